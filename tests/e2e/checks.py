"""What the e2e tests ask of a pair of servers."""

from __future__ import annotations

import os
import re
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
_RENDEZVOUS = re.compile(r"kvferry: engine (\S+) serves its rendezvous on (\S+)")


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


WAYS = ("read", "write", "at once")
"""How the KV gets to the decode server: it reads; the prefill server writes when it has computed all; both legs are
sent at once, and it writes while it computes."""


def generate(cluster: Cluster, prompt: Sequence[int], way: str, first: str = "", **fields: Any) -> Json:
    """One request by way of both servers."""
    if way == "at once":
        body = api.completion_body(prompt, **{"cache_salt": salt(), **fields})
        to = address_of(cluster.prefill)
        return api.both_legs_at_once(cluster.prefill.url, cluster.decode.url, body, to, first=first).decode
    body, params = first_leg(cluster, prompt, **fields)
    return second_leg(cluster, body, {**params, "mode": way})


def mismatched_legs(cluster: Cluster, prefill_prompt: Sequence[int], decode_prompt: Sequence[int]) -> Json:
    """Both legs under one name, the first to its end, each with a prompt of its own."""
    name, shared = f"tx-{secrets.token_hex(16)}", salt()
    first = api.completion_body(prefill_prompt, cache_salt=shared, max_tokens=1)
    first["kv_transfer_params"] = {**api.PREFILL_PARAMS, "transfer_id": name}
    api.post(f"{cluster.prefill.url}/v1/completions", first)
    params = {**second_leg_alone(cluster, decode_prompt)["kv_transfer_params"], "transfer_id": name}
    return api.decode_leg(cluster.decode.url, api.completion_body(decode_prompt, cache_salt=shared), params)


def second_leg_alone(cluster: Cluster, prompt: Sequence[int], **fields: Any) -> Json:
    """A decode leg of the concurrent contract whose prefill leg never comes."""
    to = address_of(cluster.prefill)
    params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": f"tx-{secrets.token_hex(16)}", **to}
    return {**api.completion_body(prompt, **{"cache_salt": salt(), **fields}), "kv_transfer_params": params}


def address_of(server: Server) -> Json:
    """Where its rendezvous is, as routers say it."""
    host, _, port = rendezvous(server)[1].removeprefix("tcp://").rpartition(":")
    return {"remote_host": host, "remote_port": int(port)}


def rendezvous(server: Server) -> tuple[str, str]:
    """A server's engine id and the address of its rendezvous, as it has logged them."""
    found = [match for line in server.log_lines(100_000) if (match := _RENDEZVOUS.search(line))]
    assert found, f"{server.name} has not logged its rendezvous"
    return found[-1].group(1), found[-1].group(2)


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
