"""WRITE beside READ: from the end of prefill to the decode server having its KV, on one pair of servers in one run.

    python benchmarks/write_vs_read.py [--requests 10] [--tokens 1000,2000,4000] [--wire-mbps 0,500]

Each request goes both ways in turn, with a cache salt of its own. READ: the prefill leg, then the decode leg. WRITE:
both legs at once, as vllm-router sends them with `--kv-connector moriio`. "Ready" is the time from the answer of the
prefill leg to the decode server's first token: the transfer, its messages, and the decode server's own first step,
which is the same in both. On few cores a decode server that waits for its KV slows the prefill down (vLLM steps its
engine all the time then), so the prefill of both ways and the totals are shown as well.

Two cores compute and copy at once here, and a local copy is nearly free, so the second part of the table delays the
transport's copies as a network card of so many megabytes per second would (`wire_mbps` of the transport `local`).
"""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import typer

from kvferry.cli import api, models
from kvferry.cli.servers import Cluster, pair

WARM_UP = 2


class Sample(NamedTuple):
    """One request, in ms. total: to the decode leg's first token; prefill: the prefill leg."""

    total: float
    prefill: float


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return [(7 * position + 31 * seed + position // 250) % 250 for position in range(num_tokens)]


def first_token_at(url: str, body: api.Json) -> float:
    """When a streamed request has its first token, as a client sees it."""
    stream = api.Stream(url, {**body, "max_tokens": 2})
    if not stream.read_event():
        raise RuntimeError(f"{url} sent no token")
    at = time.perf_counter()
    while stream.read_event():
        pass
    stream.drop()
    return at


def read(cluster: Cluster, body: api.Json) -> Sample:
    begin = time.perf_counter()
    params = api.prefill_leg(cluster.prefill.url, body)["kv_transfer_params"]
    end = time.perf_counter()
    at = first_token_at(cluster.decode.url, {**body, "kv_transfer_params": {**params, "mode": "read"}})
    return Sample((at - begin) * 1e3, (end - begin) * 1e3)


def write(cluster: Cluster, body: api.Json, address: api.Json) -> Sample:
    name = f"tx-{secrets.token_hex(16)}"
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **address}
    first = {**body, "max_tokens": 1, "kv_transfer_params": {**api.PREFILL_PARAMS, "transfer_id": name}}
    with ThreadPoolExecutor(1) as pool:
        begin = time.perf_counter()
        decode = pool.submit(first_token_at, cluster.decode.url, {**body, "kv_transfer_params": params})
        api.post(f"{cluster.prefill.url}/v1/completions", first)
        end = time.perf_counter()
        return Sample((decode.result() - begin) * 1e3, (end - begin) * 1e3)


def measure(cluster: Cluster, num_tokens: int, requests: int, address: api.Json) -> dict[str, float]:
    """Medians in ms."""
    reads: list[Sample] = []
    writes: list[Sample] = []
    for seed in range(requests + WARM_UP):
        for way in (reads, writes):
            body = api.completion_body(prompt_of(num_tokens, seed), cache_salt=secrets.token_hex(8))
            way.append(read(cluster, body) if way is reads else write(cluster, body, address))
    results: dict[str, float] = {}
    for name, samples in (("read", reads[WARM_UP:]), ("write", writes[WARM_UP:])):
        results[f"{name}_prefill_ms"] = statistics.median(sample.prefill for sample in samples)
        results[f"{name}_total_ms"] = statistics.median(sample.total for sample in samples)
        results[f"{name}_ready_ms"] = statistics.median(sample.total - sample.prefill for sample in samples)
    return results


def address_of(cluster: Cluster) -> api.Json:
    """Of the prefill server's rendezvous, as its answers name it."""
    body = api.completion_body(prompt_of(32, 0), cache_salt=secrets.token_hex(8))
    params = api.prefill_leg(cluster.prefill.url, body)["kv_transfer_params"]
    api.decode_leg(cluster.decode.url, body, params)
    return {key: params[key] for key in ("remote_host", "remote_port")}


def main(requests: int = 10, tokens: str = "1000,2000,4000", wire_mbps: str = "0,500") -> None:
    """Prints a table and, as the last line, the same as JSON."""
    model = models.tiny("llama-deep")
    lengths = [int(length) for length in tokens.split(",")]
    results: dict[str, dict[int, dict[str, float]]] = {}
    for mbps in map(float, wire_mbps.split(",")):
        options = {"transport_options": {"local": {"wire_mbps": mbps}}} if mbps else {}
        extra = {"handshake_s": 60, "silence_s": 30, **options}
        specs = pair(model, transport="local", extra=extra, max_model_len=max(lengths) + 64, max_num_batched_tokens=512)
        with Cluster(specs) as cluster:
            address = address_of(cluster)
            wire = f"{mbps:g} MB/s" if mbps else "as is"
            results[wire] = {length: measure(cluster, length, requests, address) for length in lengths}
    columns = ("prefill", "ready", "total")
    print(
        f"{'wire':>10} {'prompt':>7}"
        + "".join(f" {f'{way} {one}':>14}" for one in columns for way in ("READ", "WRITE"))
    )
    for wire, rows in results.items():
        for length, row in rows.items():
            figures = [row[f"{way}_{one}_ms"] for one in columns for way in ("read", "write")]
            print(f"{wire:>10} {length:>7}" + "".join(f" {figure:>14.1f}" for figure in figures))
    json.dump({"requests": requests, **results}, sys.stdout)
    print()


if __name__ == "__main__":
    typer.run(main)
