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

    def topology_digest(self) -> bytes:
        """16 bytes; equal when two sides compute the same sources from this engine."""
        return digest(self.layouts)


_engine_decoder = msgspec.msgpack.Decoder(EngineRecord)
_worker_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def encode(record: EngineRecord | WorkerRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_engine(payload: bytes) -> EngineRecord:
    """Raises BadRecord unless the payload is an engine's record with workers ranked 0, 1, 2, ..."""
    try:
        record = _engine_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(f"engine record of {len(payload)} bytes: {error}") from None
    ranks = [worker.rank for worker in record.workers]
    if not ranks or ranks != list(range(len(ranks))):
        raise BadRecord(f"engine {record.engine_id}: worker ranks {ranks} are not 0..{len(ranks) - 1}")
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
