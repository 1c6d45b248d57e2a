"""Other engines as a worker knows them: handshake, comparison, plans and connected transports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvferry.agent.loads import LoadRequest
from kvferry.agent.transfers import Part
from kvferry.agent.writes import Target, Way
from kvferry.control import addresses
from kvferry.layout import STATE_TAG, CacheLayout, Examined, check
from kvferry.plan import (
    PairPlan,
    PlanBatch,
    Refusal,
    TransferPlan,
    block_tables,
    compile,
    prove_shares,
    prove_together,
)
from kvferry.records import EngineRecord, WorkerRecord, compare
from kvferry.topology import Share, sources
from kvferry.transport.base import Batch, Peer, Transport, TransportError

logger = logging.getLogger(__name__)

PLANNING_S = 5.0
"""Processor time that one handshake may take to compare and plan, in a thread that all loads wait for. A source of 80
layers takes about 20 ms (benchmarks/plan.py)."""


class Unreachable(TransportError):
    """This worker can't write to that one by the transport that was asked for; it may be read from all the same."""


class PlannedSource(NamedTuple):
    """One producer worker that this worker reads from."""

    worker: WorkerRecord
    transport: Transport
    peer: Peer
    plan: PairPlan


class Producer(NamedTuple):
    """A producer engine after its handshake: everything that a load needs from it."""

    engine_id: str
    incarnation: str
    topology_digest: bytes
    sources: tuple[PlannedSource, ...]


class Consumer:
    """A consumer engine after its handshake: the ranks that this worker writes to, and how, once an order has said."""

    def __init__(self, record: EngineRecord, targets: Mapping[int, Target], transports: Sequence[Transport]) -> None:
        self.engine_id = record.engine_id
        self.incarnation = record.incarnation
        self.targets = targets
        self._transports = {transport.name: transport for transport in transports}
        self._ways: dict[tuple[int, str], Way] = {}

    @property
    def peers(self) -> list[Peer]:
        """Those that are connected."""
        return [way.peer for way in self._ways.values()]

    def way(self, rank: int, name: str) -> Way:
        """To one of the targets, by this transport. Raises Unreachable that says why there is none."""
        if (rank, name) not in self._ways:
            worker = self.targets[rank].worker
            offered = {transport.name: transport.payload for transport in worker.transports}
            what = f"rank {rank} of engine {self.engine_id} is to be written to by {name!r}"
            if name not in self._transports or name not in offered:
                raise Unreachable(f"{what}: this side has {list(self._transports)}, that side {sorted(offered)}")
            transport = self._transports[name]
            try:
                self._ways[rank, name] = Way(transport, _connect_by(transport, offered[name], worker))
            except Exception as error:  # a hostile payload may make a library raise anything
                raise Unreachable(f"{what}: {error}") from error
        return self._ways[rank, name]

    def leave(self) -> None:
        for way in self._ways.values():
            way.transport.disconnect(way.peer)
        self._ways.clear()


class Side(NamedTuple):
    """This worker, as compared with others: its place among the ranks with the same layers, and all that must fit.
    Transports are in order of preference."""

    tp_rank: int
    tp_size: int
    layout: CacheLayout
    fingerprint: Mapping[str, str]
    group_kinds: tuple[str, ...]
    transports: Sequence[Transport]


def shake_hands(side: Side, record: EngineRecord, address: str) -> Producer:
    """Compares, plans, proves and connects. Raises Refusal or TransportError that names what does not fit."""
    addresses.check_reachable(address, record.host_id)
    compare(dict(side.fingerprint), side.group_kinds, record)
    compiler, layouts = _Compiler(record.engine_id), record.layouts
    shares = sources(side.layout, side.tp_rank, side.tp_size, layouts)
    prove_shares(side.layout, [(share, layouts[share.producer_rank]) for share in shares])
    plans = [compiler.compile(side.layout, layouts[share.producer_rank], share) for share in shares]
    planned: list[PlannedSource] = []
    try:
        for share, plan in zip(shares, plans, strict=True):
            worker = record.workers[share.producer_rank]
            planned.append(PlannedSource(worker, *_connect(side, record, worker), plan))
    except BaseException:
        disconnect(planned)
        raise
    return Producer(record.engine_id, record.incarnation, record.topology_digest(), tuple(planned))


def meet_consumer(side: Side, rank: int, own: EngineRecord, record: EngineRecord, address: str) -> Consumer:
    """Compares, plans and proves for the ranks that rank `rank` of engine `own` writes to. Raises Refusal that names
    what does not fit, and LayoutError for a consumer rank whose layout is unsound."""
    addresses.check_reachable(address, record.host_id)
    compare(dict(record.fingerprint), record.group_kinds, own)
    compiler = _Compiler(record.engine_id)
    planned = [
        Target(record.workers[consumer_rank], *_write_plans(compiler, layout, side.layout, share))
        for consumer_rank, layout, share in _fed(compiler, rank, own, record)
    ]
    return Consumer(record, {target.worker.rank: target for target in planned}, side.transports)


class _Compiler:
    """Compiles for one handshake. What looking at a peer's layouts costs is bounded over its whole record: in what
    there is to look at, and in time."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._until = time.thread_time() + PLANNING_S
        self._examined = Examined(), Examined()

    def tick(self) -> None:
        """Raises Refusal when it has taken too long."""
        if time.thread_time() > self._until:
            took = f"engine {self._engine_id}'s record takes longer"
            raise Refusal("processor time to compare and plan", f"at most {PLANNING_S:g} s", took)

    def check_consumer(self, layout: CacheLayout) -> None:
        self.tick()
        check(layout, self._examined[0])

    def compile(
        self, consumer: CacheLayout, producer: CacheLayout, share: Share, *, by_layer: bool = False
    ) -> PairPlan:
        self.tick()
        return compile(consumer, producer, share, by_layer=by_layer, examined=self._examined, tick=self.tick)


def _fed(
    compiler: _Compiler, rank: int, own: EngineRecord, record: EngineRecord
) -> Iterator[tuple[int, CacheLayout, Share]]:
    """The consumer ranks that a producer rank writes to, each with its layout and its share. All that comes to such a
    rank, from whichever producer rank, is proven to fit together, as it is where the consumer reads."""
    producers, tp_size = own.layouts, record.tp_size
    for consumer_rank, layout in enumerate(record.layouts):
        compiler.check_consumer(layout)
        shares = sources(layout, consumer_rank % tp_size, tp_size, producers)
        mine = [share for share in shares if share.producer_rank == rank]
        if mine:
            prove_shares(layout, [(share, producers[share.producer_rank]) for share in shares])
            yield consumer_rank, layout, mine[0]


def _write_plans(
    compiler: _Compiler, consumer: CacheLayout, producer: CacheLayout, share: Share
) -> tuple[PairPlan | None, PairPlan | None]:
    """Of the layers that grow token by token, and of those that hold a state."""
    states = {layer.name for layer in consumer.layers if any(field.opaque == STATE_TAG for field in layer.fields)}
    parts = (
        tuple(part for part in share.layers if part.name not in states),
        tuple(part for part in share.layers if part.name in states),
    )
    rows, whole = (
        compiler.compile(consumer, producer, Share(share.producer_rank, layers), by_layer=True) if layers else None
        for layers in parts
    )
    return rows, whole


def _connect(side: Side, record: EngineRecord, worker: WorkerRecord) -> tuple[Transport, Peer]:
    """The first transport in our order that the peer has and that connects."""
    offered = {transport.name: transport.payload for transport in worker.transports}
    tried: list[str] = []
    for transport in side.transports:
        payload = offered.get(transport.name)
        if payload is None:
            tried.append(f"{transport.name}: not offered by that side")
            continue
        try:
            if transport.reaches(payload):
                return transport, _connect_by(transport, payload, worker)
            transport.disconnect(transport.connect(payload))  # refuses it by name
            tried.append(f"{transport.name}: cannot reach that worker from here")
        except Exception as error:
            # A hostile payload may make a library raise anything; the next transport may still do.
            tried.append(f"{transport.name}: {str(error).removeprefix(f'{transport.name}: ')}")
            logger.info("kvferry: rank %d of engine %s: %s", worker.rank, record.engine_id, tried[-1])
    ours = [transport.name for transport in side.transports]
    raise TransportError(
        f"no transport reaches rank {worker.rank} of engine {record.engine_id}: "
        f"this side has {ours}, that side {sorted(offered)}; {'; '.join(tried)}"
    )


def _connect_by(transport: Transport, payload: bytes, worker: WorkerRecord) -> Peer:
    """Raises TransportError where the memory that the transport tells of is not that of the layout."""
    peer = transport.connect(payload)
    registered, planned = ([region.length_bytes for region in side.regions] for side in (peer, worker.layout))
    if registered != planned:
        transport.disconnect(peer)
        raise TransportError(f"regions of {_bytes_of(registered)} are registered, the layout has {_bytes_of(planned)}")
    return peer


def _bytes_of(lengths: Sequence[int]) -> str:
    more = f" and {len(lengths) - 8} more" if len(lengths) > 8 else ""
    return f"{list(lengths[:8])} bytes{more}"


def disconnect(planned: Sequence[PlannedSource]) -> None:
    for source in planned:
        source.transport.disconnect(source.peer)


def bind(producer: Producer, load: LoadRequest) -> tuple[list[Part], int, int]:
    """What to read from each source, with their descriptors, number of bytes, number of descriptors. Raises Refusal."""
    consumer_tables = block_tables("consumer", load.consumer_block_ids)
    producer_tables = block_tables("producer", load.producer_block_ids)
    bound: list[Part] = []
    plans: list[TransferPlan] = []
    num_bytes = num_descriptors = 0
    for source in producer.sources:
        tokens = (load.first_token, load.end_token, load.window_starts)
        plan = source.plan.bind(consumer_tables, producer_tables, *tokens)
        if plan.num_descriptors:
            batches = tuple(_as_read(batch) for batch in plan.batches)
            bound.append(Part(source.transport, source.peer, source.worker.control_address, batches))
        plans.append(plan)
        num_bytes += plan.num_bytes
        num_descriptors += plan.num_descriptors
    prove_together(plans)
    return bound, num_bytes, num_descriptors


def _as_read(batch: PlanBatch) -> Batch:
    """A READ moves the producer's bytes (remote) into the consumer's (local)."""
    return Batch(
        batch.consumer_region,
        batch.producer_region,
        batch.consumer_offsets,
        batch.producer_offsets,
        batch.lengths,
    )


__all__ = [
    "Consumer",
    "PlannedSource",
    "Producer",
    "Refusal",
    "Side",
    "Unreachable",
    "bind",
    "disconnect",
    "meet_consumer",
    "shake_hands",
]
