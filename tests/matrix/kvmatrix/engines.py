"""Real engines without vLLM: agents, sockets and transports as vLLM's processes have them, caches in numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvferry.agent import EngineAgent, HoldEnded, LoadRequest, LoadResult, WorkerAgent, boottime
from kvferry.control.addresses import AllowedRanges, host_id
from kvferry.control.endpoint import Endpoint
from kvferry.control.security import Security
from kvferry.layout import CacheLayout
from kvferry.protocol.digest import blocks_digest, prompt_digest
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import TransferRef
from kvferry.records import EngineRecord
from kvferry.transport import registry
from kvmatrix.caches import Cache, caches
from kvmatrix.combination import Combination
from kvmatrix.coordinates import Bytes, noise
from kvmatrix.models import Side

PATIENCE_S = 60.0
"""Longest wait for another thread or process; far above what is seen, so that it tells a hang, not a slow machine."""
LEASES = Leases(handshake_s=PATIENCE_S, load_s=PATIENCE_S, first_hold_s=4 * PATIENCE_S, lease_s=2 * PATIENCE_S)


class Offer(msgspec.Struct, frozen=True):
    """What a router carries from the producer to the consumer."""

    ref: TransferRef
    address: str
    block_ids: tuple[tuple[int, ...], ...]


class Engine:
    """An engine with a rendezvous and one worker for each rank. Call `stop`, whatever happens."""

    def __init__(self, side: Side, num_blocks: int, name: str) -> None:
        self.caches = caches(side, num_blocks)
        self.memory = [noise(cache, seed) for seed, cache in enumerate(self.caches)]
        self.agent = EngineAgent(name, f"{name}-{boottime()}", _open_endpoint(), LEASES)
        self.workers: list[WorkerAgent] = []
        self._side = side

    def start(self) -> None:
        self.agent.start()
        for rank, (cache, memory) in enumerate(zip(self.caches, self.memory, strict=True)):
            self.workers.append(_worker(self._side, rank, _placed(cache, memory)))
            self.workers[-1].start()
            agent = self.agent
            self.workers[-1].identify(agent.engine_id, agent.incarnation, agent.endpoint.address, agent.home)
        self.agent.set_record(
            EngineRecord(
                engine_id=self.agent.engine_id,
                incarnation=self.agent.incarnation,
                host_id=host_id(),
                fingerprint=dict(self._side.fingerprint),
                group_kinds=self._side.group_kinds,
                workers=tuple(worker.record() for worker in self.workers),
            )
        )

    def offer(self, combination: Combination, block_ids: Sequence[Sequence[int]]) -> Offer:
        """Holds the request's blocks for whoever comes with the offer."""
        ref = TransferRef(self.agent.engine_id, self.agent.incarnation, "ab" * 16, 1)
        held = tuple(map(tuple, block_ids))
        self.agent.hold(ref, combination.num_tokens, _digest(combination), blocks_digest(block_ids), held)
        return Offer(ref, self.agent.endpoint.address, held)

    def hold_end(self, offer: Offer) -> str:
        """Waits until the offer's blocks may be given back, and says why."""
        items: list[object] = []

        def ended() -> list[HoldEnded]:
            items.extend(self.agent.drain())
            return [item for item in items if isinstance(item, HoldEnded) and item.ref == offer.ref]

        eventually(lambda: bool(ended()), "the hold ends")
        return ended()[0].outcome

    def load(
        self, combination: Combination, offer: Offer, block_ids: Sequence[Sequence[int]], write: bool = False
    ) -> list[LoadResult]:
        """As an engine does: the rendezvous claims, every worker loads, the rendezvous says that it is over. write: the
        producer's workers move the bytes."""
        request = LoadRequest(
            request_id="request",
            load_id="load",
            claim_id="cd" * 16,
            ref=offer.ref,
            address=offer.address,
            key_id="",
            num_tokens=combination.num_tokens,
            first_token=combination.first,
            end_token=combination.end,
            consumer_block_ids=tuple(map(tuple, block_ids)),
            producer_block_ids=offer.block_ids,
            digest=_digest(combination),
            blocks_digest=blocks_digest(offer.block_ids),
            window_starts=combination.window_starts(),
            write=write,
        )
        self.agent.arrived(request.claim_id, offer.ref, offer.address, "", len(self.workers))
        for worker in self.workers:
            worker.load(request)
        results: list[LoadResult] = []

        def all_in() -> bool:
            for worker in self.workers:
                results.extend(worker.collect())
            return len(results) == len(self.workers)

        eventually(all_in, "every worker has reported")
        bad = next((result.reason for result in results if not result.ok), "")
        self.agent.over(request.claim_id, "failed" if bad else "done", bad)
        return sorted(results, key=lambda result: result.rank)

    def stop(self) -> None:
        """Raises TimeoutError if a thread goes on."""
        for agent in (*self.workers, self.agent):
            agent.stop(PATIENCE_S)
        if any(agent.alive for agent in (*self.workers, self.agent)):
            raise TimeoutError(f"an agent's thread did not end within {PATIENCE_S:g} s")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread does. Raises TimeoutError that names it."""
    deadline = boottime() + PATIENCE_S
    while not condition():
        if boottime() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.001)


def _worker(side: Side, rank: int, layout: CacheLayout) -> WorkerAgent:
    pp_rank, tp_rank = divmod(rank, side.tp)
    return WorkerAgent(
        rank=rank,
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        num_ranks=side.num_ranks,
        endpoint=_open_endpoint(),
        make_transports=lambda: [registry.make(side.transport)],
        layout=layout,
        fingerprint=dict(side.fingerprint),
        group_kinds=side.group_kinds,
        leases=LEASES,
    )


def _placed(cache: Cache, memory: Sequence[Bytes]) -> CacheLayout:
    """The layout with the addresses that its regions have in this process."""
    regions = tuple(
        msgspec.structs.replace(region, address=array.ctypes.data)
        for region, array in zip(cache.layout.regions, memory, strict=True)
    )
    return msgspec.structs.replace(cache.layout, regions=regions)


def _open_endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", Security.choose("127.0.0.1", ()), AllowedRanges())


def _digest(combination: Combination) -> bytes:
    tokens = np.arange(combination.num_tokens).tolist()
    return prompt_digest(tokens, model="m", lora="", cache_salt=combination.name, mm_hashes=[], weights_epoch="")
