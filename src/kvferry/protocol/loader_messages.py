"""What a consumer rank's loader says, as messages: to the producer's engine, and to the producer ranks that write."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.protocol.events import Load, Order
from kvferry.protocol.load import Job
from kvferry.protocol.messages import CancelWrite, Claim, Landing, Outcome, Release, RemoteBlocks


class Reader(NamedTuple):
    """The rank that speaks; num_ranks: of its engine."""

    engine_id: str
    incarnation: str
    rank: int
    num_ranks: int


def claim(reader: Reader, job: Job, seq: int) -> Claim:
    load = job.load
    return Claim(
        ref=load.ref,
        claim_id=load.claim_id,
        engine_id=reader.engine_id,
        incarnation=reader.incarnation,
        rank=reader.rank,
        num_ranks=reader.num_ranks,
        seq=seq,
        num_tokens=load.num_tokens,
        digest=load.digest,
        blocks_digest=load.blocks_digest,
        topology_digest=job.topology_digest,
    )


def release(reader: Reader, load: Load, seq: int, outcome: Outcome, reason: str) -> Release:
    """Of this rank's part."""
    return Release(
        ref=load.ref,
        claim_id=load.claim_id,
        engine_id=reader.engine_id,
        incarnation=reader.incarnation,
        seq=seq,
        ranks=(reader.rank,),
        num_ranks=reader.num_ranks,
        outcome=outcome,
        reason=reason,
    )


def landing(reader: Reader, load: Load, producer_rank: int) -> Landing:
    return Landing(load.claim_id, load.load_id, reader.rank, producer_rank)


def remote_blocks(reader: Reader, job: Job, order: Order, producer_rank: int, transport: str) -> RemoteBlocks:
    load = job.load
    return RemoteBlocks(
        landing=landing(reader, load, producer_rank),
        ref=load.ref,
        producer_incarnation=job.incarnation,
        engine_id=reader.engine_id,
        incarnation=reader.incarnation,
        address=order.address,
        key_id=order.key_id,
        transport=transport,
        num_ranks=reader.num_ranks,
        num_tokens=load.num_tokens,
        digest=load.digest,
        topology_digest=job.topology_digest,
        first_token=order.first_token,
        end_token=order.end_token,
        window_starts=order.window_starts,
        block_ids=order.block_ids,
    )


def cancel_write(reader: Reader, job: Job, producer_rank: int) -> CancelWrite:
    return CancelWrite(
        landing=landing(reader, job.load, producer_rank),
        ref=job.load.ref,
        producer_incarnation=job.incarnation,
        num_ranks=reader.num_ranks,
    )
