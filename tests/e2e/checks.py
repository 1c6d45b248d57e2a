"""What the e2e tests ask of a pair of servers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.cli import api
from kvferry.cli.servers import Cluster, Server

BLOCK = 128
"""Tokens in a block of vLLM's CPU backend."""
PATIENCE_S = 60.0

Json = dict[str, Any]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of the byte-level tokenizer; different seeds differ from the first token on."""
    return [(7 * position + 31 * seed + position * position % 11) % 250 for position in range(num_tokens)]


def salt() -> str:
    """A cache salt never used before: no block of an earlier request is reused."""
    return secrets.token_hex(8)


def alone(cluster: Cluster, prompt: Sequence[int], **fields: Any) -> list[int]:
    """The tokens that the decode server generates by itself."""
    return api.tokens(api.complete(cluster.decode.url, prompt, cache_salt=salt(), **fields))


def first_leg(cluster: Cluster, prompt: Sequence[int], **fields: Any) -> tuple[Json, Json]:
    """Runs the prefill leg. Returns the request's body and the parameters for the second leg."""
    body = api.completion_body(prompt, **{"cache_salt": salt(), **fields})
    answer = api.prefill_leg(cluster.prefill.url, body)
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True, params
    return body, params


def second_leg(cluster: Cluster, body: Json, params: Json, **changes: Any) -> Json:
    return api.decode_leg(cluster.decode.url, {**body, **changes}, params)


def assert_same(answer: Json, expected: Sequence[int], path: str) -> Json:
    """The tokens are right and the KV came the way that is named. Returns the connector's report."""
    report = api.transfer_report(answer)
    assert (api.tokens(answer), report.get("path")) == (list(expected), path), report
    return report


def eventually(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits, with much patience, for something that servers do in their own time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.2)


def assert_drained(cluster: Cluster) -> None:
    """Every block on both sides is free again."""
    for server in (cluster.prefill, cluster.decode):
        eventually(lambda server=server: server.used_blocks() == 0, f"all blocks of {server.name} are free")


def cpu_seconds(server: Server) -> float:
    """Processor time that all processes of a server have used."""
    ticks = 0
    for pid in server.child.pids():
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
