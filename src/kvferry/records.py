"""What engines tell each other about themselves before the first byte moves, and how it is compared.

An engine's record travels as the payload of a `Record` message. It holds every worker's layout and what its
transports need, and a fingerprint: named values that must be equal on both sides, because bytes from an engine
that differs in one of them mean something else.
"""

from __future__ import annotations

import msgspec

from kvferry.layout import CacheLayout
from kvferry.plan import Refusal
from kvferry.topology import digest

MAX_WORKERS = 1024
"""Of one engine. What peers do with a record grows with its workers."""


class BadRecord(ValueError):
    """A peer's record cannot be read; the text says why."""


class TransportRecord(msgspec.Struct, frozen=True):
    """What one transport of a worker tells peers; the payload is that transport's own."""

    name: str
    payload: bytes


class WorkerRecord(msgspec.Struct, frozen=True):
    """One worker: rank = pp_rank * tp_size + tp_rank. Transports are in the worker's order of preference.

    control_key_id: names the key of its control socket; empty when open.
    """

    rank: int
    pp_rank: int
    tp_rank: int
    control_address: str
    control_key_id: str
    layout: CacheLayout
    transports: tuple[TransportRecord, ...]


class EngineRecord(msgspec.Struct, frozen=True):
    """One engine: workers are sorted by rank. group_kinds names the kind of each KV cache group, in order."""

    engine_id: str
    incarnation: str
    host_id: str
    fingerprint: dict[str, str]
    group_kinds: tuple[str, ...]
    workers: tuple[WorkerRecord, ...]

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        return tuple(worker.layout for worker in self.workers)

    @property
    def tp_size(self) -> int:
        """Workers with the same layers."""
        return 1 + max(worker.tp_rank for worker in self.workers)

    def topology_digest(self) -> bytes:
        """16 bytes; equal when two sides compute the same sources from this engine."""
        return digest(self.layouts)


_engine_decoder = msgspec.msgpack.Decoder(EngineRecord)
_worker_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def encode(record: EngineRecord | WorkerRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_engine(payload: bytes) -> EngineRecord:
    """Raises BadRecord unless the payload is an engine's record; its workers are ranked by stage, then by TP rank."""
    try:
        record = _engine_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(f"engine record of {len(payload)} bytes: {error}") from None
    if len(record.workers) > MAX_WORKERS:
        raise BadRecord(f"engine {record.engine_id}: {len(record.workers)} workers, the most allowed are {MAX_WORKERS}")
    ranks = [worker.rank for worker in record.workers]
    if not ranks or ranks != list(range(len(ranks))):
        raise BadRecord(f"engine {record.engine_id}: worker ranks {ranks} are not 0..{len(ranks) - 1}")
    tp_size = record.tp_size
    for worker in record.workers:
        if (worker.pp_rank, worker.tp_rank) != divmod(worker.rank, tp_size):
            place = f"pp_rank {worker.pp_rank} and tp_rank {worker.tp_rank}"
            raise BadRecord(
                f"engine {record.engine_id}: rank {worker.rank} has {place}, but there are {tp_size} TP ranks"
            )
    return record


def decode_worker(payload: bytes) -> WorkerRecord:
    """Raises BadRecord unless the payload is a worker's record."""
    try:
        return _worker_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(f"worker record of {len(payload)} bytes: {error}") from None


_HINTS = {"model": "if both serve the same weights, give both the same model_id"}


def compare(
    consumer_fingerprint: dict[str, str],
    consumer_group_kinds: tuple[str, ...],
    producer: EngineRecord,
) -> None:
    """Raises Refusal that names the first field in which both sides differ, and both values."""
    for field in sorted(consumer_fingerprint.keys() | producer.fingerprint.keys()):
        ours = consumer_fingerprint.get(field, "(not stated)")
        theirs = producer.fingerprint.get(field, "(not stated)")
        if ours != theirs:
            raise Refusal(field, ours, theirs, _HINTS.get(field, ""))
    if consumer_group_kinds != producer.group_kinds:
        raise Refusal("KV cache groups", list(consumer_group_kinds), list(producer.group_kinds))
