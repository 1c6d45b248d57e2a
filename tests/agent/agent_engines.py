"""Whole engines without vLLM: real agents, sockets and transports, caches in numpy arrays."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.agent import (
    EngineAgent,
    HoldEnded,
    Leftovers,
    LoadQuiet,
    LoadRequest,
    LoadResult,
    TransferLost,
    WorkerAgent,
    boottime,
)
from kvferry.control.addresses import AllowedRanges, host_id
from kvferry.control.endpoint import Endpoint, Limits
from kvferry.control.security import Security
from kvferry.layout import CacheLayout, Layer, Region, fused
from kvferry.protocol.digest import blocks_digest, prompt_digest
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import TransferRef
from kvferry.records import EngineRecord
from kvferry.topology import kv_heads
from kvferry.transport import registry
from kvferry.transport.base import Transport

BLOCK, HEAD, LAYERS = 4, 8, 2
PATIENCE_S = 30.0


def eventually(condition: Callable[[], object], what: str) -> None:
    """Waits, with much patience, for something that another thread does."""
    deadline = boottime() + PATIENCE_S
    while not condition():
        if boottime() > deadline:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.002)


def open_endpoint(secrets: tuple[bytes, ...] = (), idle_s: float = 300.0, port: int = 0) -> Endpoint:
    security = Security.choose("127.0.0.1", secrets)
    return Endpoint("127.0.0.1", security, AllowedRanges(), port=port, limits=Limits(idle_s=idle_s))


def values(layer: int, head: int, tokens: np.ndarray) -> np.ndarray:
    """What the cache holds for these tokens of one head: distinct for every element. [tokens, 2 * HEAD] float32."""
    element = np.arange(2 * HEAD)
    return (((layer * 64 + head) * 512 + tokens[:, None]) * 64 + element).astype(np.float32)


@dataclass
class Worker:
    """start: another agent over the same cache."""

    cache: np.ndarray
    agent: WorkerAgent
    start: Callable[[Leftovers], WorkerAgent]


@dataclass
class Engine:
    """One engine: a rendezvous and its workers."""

    agent: EngineAgent
    workers: list[Worker]
    total_heads: int
    items: list[HoldEnded | TransferLost | LoadQuiet] = field(default_factory=list)
    results: list[LoadResult] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    fingerprint: dict[str, str] = field(default_factory=dict)

    def publish(self, fingerprint: dict[str, str]) -> None:
        self.fingerprint = fingerprint
        self.agent.set_record(
            EngineRecord(
                engine_id=self.agent.engine_id,
                incarnation=self.agent.incarnation,
                host_id=host_id(),
                fingerprint=fingerprint,
                group_kinds=("FullAttentionSpec",),
                workers=tuple(worker.agent.record() for worker in self.workers),
            )
        )

    def sleep_and_wake(self) -> None:
        """As vLLM's sleep mode: each worker's agent stops, and later another registers the same memory."""
        for worker in self.workers:
            worker.agent.stop()
            self.results += worker.agent.collect()
        for worker in self.workers:
            worker.agent = worker.start(worker.agent.leftovers)
        self.publish(self.fingerprint)

    def fill(self, block_ids: list[int], num_tokens: int) -> None:
        for worker in self.workers:
            heads = worker.agent.record().layout.layers[0].heads
            for layer, head in itertools.product(range(LAYERS), range(heads.count)):
                for position, block in enumerate(block_ids):
                    tokens = np.arange(position * BLOCK, min((position + 1) * BLOCK, num_tokens))
                    worker.cache[layer, block, head, : len(tokens)] = values(layer, heads.start + head, tokens)

    def holds_prompt(self, block_ids: list[int], num_tokens: int, first_token: int = 0) -> bool:
        for worker in self.workers:
            heads = worker.agent.record().layout.layers[0].heads
            for layer, head in itertools.product(range(LAYERS), range(heads.count)):
                for token in range(first_token, num_tokens):
                    found = worker.cache[layer, block_ids[token // BLOCK], head, token % BLOCK]
                    if not np.array_equal(found, values(layer, heads.start + head, np.array([token]))[0]):
                        return False
        return True

    def hold(self, block_ids: list[int], num_tokens: int) -> TransferRef:
        number = next(self.numbers) + 1
        ref = TransferRef(self.agent.engine_id, self.agent.incarnation, secrets.token_hex(16), number)
        self.agent.hold(ref, num_tokens, digest_of(num_tokens), blocks_digest([block_ids]), (tuple(block_ids),))
        return ref

    def inbox(self) -> list[HoldEnded | TransferLost | LoadQuiet]:
        self.items += self.agent.drain()
        return self.items

    def freed(self, ref: TransferRef) -> list[HoldEnded]:
        return [item for item in self.inbox() if isinstance(item, HoldEnded) and item.ref == ref]

    def load(self, load: LoadRequest) -> list[LoadResult]:
        """Runs one load on every worker and waits for all results."""
        for worker in self.workers:
            worker.agent.load(load)
        eventually(lambda: len(self.collected(load.load_id)) == len(self.workers), f"results of load {load.load_id}")
        return self.collected(load.load_id)

    def collected(self, load_id: str) -> list[LoadResult]:
        for worker in self.workers:
            self.results += worker.agent.collect()
        return [result for result in self.results if result.load_id == load_id]

    def stop(self) -> None:
        for worker in self.workers:
            worker.agent.stop()
        self.agent.stop()


def digest_of(num_tokens: int, salt: str = "") -> bytes:
    return prompt_digest(list(range(num_tokens)), model="m", lora="", cache_salt=salt, mm_hashes=[], weights_epoch="")


def request_for(
    producer: Engine,
    ref: TransferRef,
    producer_blocks: list[int],
    consumer_blocks: list[int],
    prompt_tokens: int,
    first_token: int = 0,
    **changes: object,
) -> LoadRequest:
    fields: dict[str, object] = {
        "request_id": "request",
        "load_id": secrets.token_hex(8),
        "claim_id": secrets.token_hex(16),
        "ref": ref,
        "address": producer.agent.endpoint.address,
        "key_id": producer.agent.endpoint.key_id,
        "num_tokens": prompt_tokens,
        "first_token": first_token,
        "end_token": prompt_tokens,
        "consumer_block_ids": (tuple(consumer_blocks),),
        "producer_block_ids": (tuple(producer_blocks),),
        "digest": digest_of(prompt_tokens),
        "blocks_digest": blocks_digest([producer_blocks]),
    }
    return LoadRequest(**{**fields, **changes})


Wrap = Callable[[Transport], Transport]


class Engines:
    """Starts engines and stops them all."""

    def __init__(self) -> None:
        self.all: list[Engine] = []

    def make(
        self,
        tp_size: int = 1,
        *,
        total_heads: int = 4,
        num_blocks: int = 16,
        transports: tuple[str, ...] = ("local",),
        fingerprint: dict[str, str] | None = None,
        leases: Leases | None = None,
        secret_keys: tuple[bytes, ...] = (),
        wrap: Wrap = lambda transport: transport,
        transports_of: Sequence[tuple[str, ...]] = (),
        idle_s: float = 300.0,
        port: int = 0,
    ) -> Engine:
        """transports_of: of each rank, where they differ. idle_s: see Limits. port: of the rendezvous."""
        leases = leases or Leases()
        rendezvous = open_endpoint(secret_keys, idle_s, port)
        agent = EngineAgent(secrets.token_hex(4), secrets.token_hex(16), rendezvous, leases)
        agent.start()
        engine = Engine(agent, [], total_heads)
        self.all.append(engine)
        prints = fingerprint or {"model": "m"}
        for rank in range(tp_size):
            heads = kv_heads(rank, tp_size, total_heads)
            cache = np.zeros((LAYERS, num_blocks, heads.count, BLOCK, 2 * HEAD), dtype=np.float32)
            names = transports_of[rank] if transports_of else transports

            def start(
                leftovers: Leftovers | None = None, rank=rank, heads=heads, cache=cache, names=names
            ) -> WorkerAgent:
                worker = WorkerAgent(
                    rank=rank,
                    pp_rank=0,
                    tp_rank=rank,
                    num_ranks=tp_size,
                    endpoint=open_endpoint(secret_keys, idle_s),
                    make_transports=lambda: [wrap(registry.make(name, {})) for name in names],
                    layout=layout_of(cache, heads),
                    fingerprint=prints,
                    group_kinds=("FullAttentionSpec",),
                    leases=leases,
                    leftovers=leftovers,
                )
                worker.start()
                worker.identify(agent.engine_id, agent.incarnation, agent.endpoint.address, agent.home)
                return worker

            engine.workers.append(Worker(cache, start(), start))
        engine.publish(prints)
        return engine

    def stop(self) -> None:
        for engine in self.all:
            engine.stop()


def layout_of(cache: np.ndarray, heads) -> CacheLayout:
    layers = tuple(
        Layer(
            name=f"layer.{index}",
            group=0,
            region=0,
            base_bytes=index * cache.strides[0],
            num_blocks=cache.shape[1],
            block_size=BLOCK,
            dtype="float32",
            heads=heads,
            fields=fused(cache.shape[1:], cache.strides[1:], HEAD, HEAD, cache.itemsize),
        )
        for index in range(LAYERS)
    )
    return CacheLayout(regions=(Region(cache.ctypes.data, cache.nbytes, "cpu"),), layers=layers)
