"""Time to the first token of the decode leg: kvferry beside vLLM's in-tree NixlConnector, in one run.

    python benchmarks/ttft.py [--requests 20] [--model tiny|smollm2] [--transport local]

Each connector gets its own pair of servers, one after the other, with the same model, prompts and settings. Both are
compared with the decode server alone in the same run. The in-tree connector keeps a progress thread busy in each worker
and pins the worker to the last core, on a host of few cores the same one for both; `--unpin` (the default) undoes the
pinning, so that what is compared is the transfer. Figures are medians over requests, each with a cache salt of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import time
from pathlib import Path

import typer

from kvferry.cli import api, models
from kvferry.cli.ports import free_ports
from kvferry.cli.servers import DECODE, PREFILL, ROLE_OF, Cluster, ServerSpec, pair

LENGTHS = (24, 282, 983)


def nixl_pair(model: Path) -> list[ServerSpec]:
    """The same pair, joined by vLLM's own connector."""
    ports = dict(zip((PREFILL, DECODE), free_ports(2), strict=True))
    return [
        ServerSpec(
            role,
            model,
            kv_config={"kv_connector": "NixlConnector", "kv_role": ROLE_OF[role]},
            env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[role]), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"},
        )
        for role in (PREFILL, DECODE)
    ]


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return [(7 * position + 31 * seed + 3) % 250 for position in range(num_tokens)]


def first_token_ms(url: str, body: api.Json) -> float:
    """From the request to its first streamed token, as a client sees it."""
    begin = time.perf_counter()
    stream = api.Stream(url, {**body, "max_tokens": 4})
    stream.read_event()
    elapsed_s = time.perf_counter() - begin
    while stream.read_event():
        pass
    stream.drop()
    return elapsed_s * 1e3


def measure(cluster: Cluster, num_tokens: int, requests: int) -> dict[str, float]:
    """Medians in ms: the decode leg with a transfer, and the same prompt on the decode server alone."""
    legs: list[float] = []
    alone: list[float] = []
    for seed in range(requests + 2):  # the first two warm up: handshake, first pages
        body = api.completion_body(prompt_of(num_tokens, seed), cache_salt=secrets.token_hex(8))
        params = api.prefill_leg(cluster.prefill.url, body)["kv_transfer_params"]
        legs.append(first_token_ms(cluster.decode.url, {**body, "kv_transfer_params": params}))
        alone.append(first_token_ms(cluster.decode.url, {**body, "cache_salt": secrets.token_hex(8)}))
    return {
        "decode_leg_ms": statistics.median(legs[2:]),
        "decode_leg_p90_ms": statistics.quantiles(legs[2:], n=10)[-1],
        "alone_ms": statistics.median(alone[2:]),
    }


def unpin(cluster: Cluster) -> None:
    """Lets every thread of the servers run on every core again."""
    cores = os.sched_getaffinity(0)
    for server in cluster.servers:
        for pid in server.child.pids():
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cores)


def main(
    requests: int = 20,
    model: str = "tiny",
    transport: str = "local",
    do_unpin: bool = typer.Option(True, "--unpin/--pinned"),
) -> None:
    """Prints a table and, as the last line, the same as JSON."""
    directory = models.smollm2() if model == "smollm2" else models.tiny("llama")
    results: dict[str, dict[int, dict[str, float]]] = {}
    pairs = {"kvferry": pair(directory, transport=transport), "NixlConnector": nixl_pair(directory)}
    for name, specs in pairs.items():
        with Cluster(specs) as cluster:
            if do_unpin:
                unpin(cluster)
            results[name] = {length: measure(cluster, length, requests) for length in LENGTHS}
    print(f"{'prompt':>8} {'kvferry ms':>11} {'p90':>8} {'Nixl ms':>9} {'p90':>8} {'ratio':>6} {'alone, each':>15}")
    for length in LENGTHS:
        ours, theirs = results["kvferry"][length], results["NixlConnector"][length]
        print(
            f"{length:>8} {ours['decode_leg_ms']:>11.1f} {ours['decode_leg_p90_ms']:>8.1f} "
            f"{theirs['decode_leg_ms']:>9.1f} {theirs['decode_leg_p90_ms']:>8.1f} "
            f"{ours['decode_leg_ms'] / theirs['decode_leg_ms']:>6.2f} "
            f"{ours['alone_ms']:>7.1f} {theirs['alone_ms']:>7.1f}"
        )
    json.dump({"requests": requests, "model": model, "transport": transport, **results}, sys.stdout)
    print()


if __name__ == "__main__":
    typer.run(main)
