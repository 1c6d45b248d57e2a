"""Producer engines as a worker knows them: handshake, comparison, plans and connected transports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.agent.loads import LoadRequest
from kvferry.agent.reads import Source
from kvferry.control import addresses
from kvferry.layout import CacheLayout
from kvferry.plan import BlockTable, PairPlan, PlanBatch, Refusal, compile, prove_shares
from kvferry.records import EngineRecord, WorkerRecord, compare
from kvferry.topology import Share, sources
from kvferry.transport.base import Batch, Peer, Transport, TransportError

logger = logging.getLogger(__name__)


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


class Side(NamedTuple):
    """This worker, as compared with producers: its place among the ranks with the same layers, and all that must fit.
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
    shares = sources(side.layout, side.tp_rank, side.tp_size, record.layouts)
    planned: list[PlannedSource] = []
    plans = [compile(side.layout, record.layouts[share.producer_rank], share) for share in shares]
    prove_shares(side.layout, [(share, record.layouts[share.producer_rank]) for share in shares])
    try:
        for share, plan in zip(shares, plans, strict=True):
            planned.append(_connect(side, record, share, plan))
    except BaseException:
        disconnect(planned)
        raise
    return Producer(record.engine_id, record.incarnation, record.topology_digest(), tuple(planned))


def _connect(side: Side, record: EngineRecord, share: Share, plan: PairPlan) -> PlannedSource:
    """The first transport in our order that the peer has and that connects."""
    worker = record.workers[share.producer_rank]
    offered = {transport.name: transport.payload for transport in worker.transports}
    tried: list[str] = []
    for transport in side.transports:
        payload = offered.get(transport.name)
        if payload is None:
            tried.append(f"{transport.name}: not offered by the producer")
            continue
        try:
            if transport.reaches(payload):
                return PlannedSource(worker, transport, transport.connect(payload), plan)
            tried.append(f"{transport.name}: cannot reach that worker from here")
        except Exception as error:
            # A hostile payload may make a library raise anything; the next transport may still do.
            tried.append(f"{transport.name}: {error}")
            logger.info("kvferry: rank %d of engine %s: %s", worker.rank, record.engine_id, tried[-1])
    ours = [transport.name for transport in side.transports]
    raise TransportError(
        f"no transport reaches rank {worker.rank} of engine {record.engine_id}: "
        f"this side has {ours}, that side {sorted(offered)}; {'; '.join(tried)}"
    )


def disconnect(planned: Sequence[PlannedSource]) -> None:
    for source in planned:
        source.transport.disconnect(source.peer)


def bind(producer: Producer, load: LoadRequest) -> tuple[list[Source], int, int]:
    """Sources with their descriptors, number of bytes, number of descriptors. Raises Refusal."""
    consumer_tables = _tables(load.consumer_block_ids)
    producer_tables = _tables(load.producer_block_ids)
    bound: list[Source] = []
    num_bytes = num_descriptors = 0
    for source in producer.sources:
        tokens = (load.first_token, load.end_token, load.window_starts)
        plan = source.plan.bind(consumer_tables, producer_tables, *tokens)
        if plan.num_descriptors:
            batches = tuple(_as_read(batch) for batch in plan.batches)
            bound.append(Source(source.transport, source.peer, source.worker.control_address, batches))
        num_bytes += plan.num_bytes
        num_descriptors += plan.num_descriptors
    return bound, num_bytes, num_descriptors


def _tables(block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
    return [BlockTable(np.asarray(group, dtype=np.int64)) for group in block_ids]


def _as_read(batch: PlanBatch) -> Batch:
    """A READ moves the producer's bytes (remote) into the consumer's (local)."""
    return Batch(
        batch.consumer_region,
        batch.producer_region,
        batch.consumer_offsets,
        batch.producer_offsets,
        batch.lengths,
    )


__all__ = ["PlannedSource", "Producer", "Refusal", "Side", "bind", "disconnect", "shake_hands"]
