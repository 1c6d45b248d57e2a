"""Asks engines for their records, each with a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from kvferry import records
from kvferry.agent.loop import Counters, boottime
from kvferry.control.addresses import AddressError
from kvferry.protocol import messages
from kvferry.records import BadRecord, EngineRecord

logger = logging.getLogger(__name__)

Then = Callable[[EngineRecord], None]
"""May raise whatever a peer's record makes it raise: then the handshake has failed, with that as its reason."""
Otherwise = Callable[[str], None]


class Line(Protocol):
    """What dials and sends."""

    counters: Counters

    def dial(self, address: str) -> None: ...
    def send(self, to: str, message: messages.Message) -> None: ...


class _Pending(NamedTuple):
    address: str
    engine_id: str
    seq: int
    deadline: float
    then: Then
    otherwise: Otherwise


class Handshakes:
    """One for each key at a time; a new one with the same key takes the place of the old, which is not answered."""

    def __init__(self, line: Line, timeout_s: float) -> None:
        self._line = line
        self._timeout_s = timeout_s
        self._pending: dict[Hashable, _Pending] = {}
        self._seq = 0

    def begin(
        self, key: Hashable, address: str, engine_id: str, incarnation: str, then: Then, otherwise: Otherwise
    ) -> None:
        """engine_id: who must answer, "" for whoever does. incarnation: of the worker that asks."""
        self._seq += 1
        until = boottime() + self._timeout_s
        self._pending[key] = _Pending(address, engine_id, self._seq, until, then, otherwise)
        try:
            self._line.dial(address)
        except AddressError as error:
            self._fail(key, str(error))
            return
        hello = messages.Hello(
            version=messages.PROTOCOL_VERSION, engine_id=engine_id, incarnation=incarnation, seq=self._seq
        )
        self._line.send(address, hello)

    def on_record(self, address: str, message: messages.Record) -> None:
        key = self._find(address, message.seq)
        if key is None:
            self._line.counters["late_records"] += 1
            return
        try:
            record = records.decode_engine(message.payload)
            _check_identity(self._pending[key].engine_id, message, record)
            self._pending[key].then(record)
        except Exception as error:
            # Whatever a peer's record makes us do, its transfers end with a reason.
            self._fail(key, f"{type(error).__name__}: {error}")
            return
        self._pending.pop(key, None)
        self._line.counters["handshakes"] += 1

    def on_refused(self, address: str, message: messages.Refused) -> None:
        key = self._find(address, message.seq)
        if key is not None:
            self._fail(key, f"refused by that engine: {message.reason}: {message.detail}")

    def on_lost(self, address: str, reason: str) -> None:
        for key in [key for key, pending in self._pending.items() if pending.address == address]:
            self._fail(key, reason)

    def on_time(self, now: float) -> None:
        for key in [key for key, pending in self._pending.items() if now >= pending.deadline]:
            self._fail(key, f"no answer within {self._timeout_s:g} s")

    def deadlines(self) -> list[float]:
        return [pending.deadline for pending in self._pending.values()]

    def _find(self, address: str, seq: int) -> Hashable | None:
        found = (key for key, pending in self._pending.items() if (pending.address, pending.seq) == (address, seq))
        return next(found, None)

    def _fail(self, key: Hashable, reason: str) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            reason = messages.shorten(reason)
            self._line.counters["failed_handshakes"] += 1
            logger.warning("kvferry: handshake with %s failed: %s", pending.address, reason)
            pending.otherwise(f"handshake with {pending.address}: {reason}")


def _check_identity(asked_for: str, message: messages.Record, record: EngineRecord) -> None:
    """An engine answers for itself alone. Raises BadRecord naming both values."""
    if asked_for not in ("", message.engine_id) or message.engine_id != record.engine_id:
        wanted = asked_for or "(any)"
        raise BadRecord(f"engine {wanted} was asked for, {message.engine_id} answered with {record.engine_id}'s record")
    if message.incarnation != record.incarnation:
        raise BadRecord(f"incarnation {message.incarnation} answered with the record of {record.incarnation}")
