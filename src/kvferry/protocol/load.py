"""One load of a consumer rank: its states, what it asked, and what proves its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvferry.protocol.events import Load
from kvferry.protocol.lease import Leases
from kvferry.protocol.transitions import Table


class LoadState(Enum):
    CONNECTING = "connecting"
    READING = "reading"
    PROVING = "proving"
    LANDING = "landing"
    SETTLING = "settling"
    DRAINING = "draining"
    OVER = "over"


class LoadTrigger(Enum):
    READY = "the peer is ready"
    ORDER = "the peer is ready, and shall write"
    LANDED = "every writer is done"
    UNABLE = "a writer can't write here"
    DONE = "reads done"
    FAILED = "reads failed"
    QUIET = "reads or writes quiet"
    PROVEN = "a grant proves the bytes"
    GIVE_UP = "refused, cancelled, peer lost or too late"


LOADS = Table(
    "load",
    LoadState.CONNECTING,
    {
        (LoadState.CONNECTING, LoadTrigger.READY): LoadState.READING,
        (LoadState.CONNECTING, LoadTrigger.ORDER): LoadState.LANDING,
        (LoadState.CONNECTING, LoadTrigger.GIVE_UP): LoadState.OVER,
        (LoadState.LANDING, LoadTrigger.LANDED): LoadState.OVER,
        (LoadState.LANDING, LoadTrigger.UNABLE): LoadState.SETTLING,
        (LoadState.LANDING, LoadTrigger.GIVE_UP): LoadState.DRAINING,
        (LoadState.SETTLING, LoadTrigger.QUIET): LoadState.READING,
        (LoadState.SETTLING, LoadTrigger.GIVE_UP): LoadState.DRAINING,
        (LoadState.READING, LoadTrigger.DONE): LoadState.PROVING,
        (LoadState.READING, LoadTrigger.FAILED): LoadState.DRAINING,
        (LoadState.READING, LoadTrigger.GIVE_UP): LoadState.DRAINING,
        (LoadState.PROVING, LoadTrigger.PROVEN): LoadState.OVER,
        (LoadState.PROVING, LoadTrigger.GIVE_UP): LoadState.OVER,
        (LoadState.DRAINING, LoadTrigger.FAILED): LoadState.DRAINING,
        (LoadState.DRAINING, LoadTrigger.DONE): LoadState.OVER,
        (LoadState.DRAINING, LoadTrigger.QUIET): LoadState.OVER,
    },
)


class Asked(NamedTuple):
    """A claim as it was sent. after_reads: every read had been seen finished by then."""

    sent_at: float
    after_reads: bool


class Granted(NamedTuple):
    seq: int
    asked: Asked
    lease_s: float


@dataclass
class Writers:
    """The producer ranks that write a load. addresses: of their control sockets; transports: by which they are to
    write. Both by rank.

    waiting: those that have not said that they are done. unquiet: those of which something may still land.
    cancels: how often the unquiet ones were told to stop.
    """

    addresses: dict[int, str]
    transports: dict[int, str]
    waiting: set[int]
    unquiet: set[int]
    cancels: int = 0


@dataclass
class Job:
    """A load under way. deadline, ask_again_at, done_at: on the machine's clock; done_at: the reads' end was seen.

    topology_digest, incarnation: of the producer that it goes by, once it has begun. writers: None where this rank
    reads.
    """

    load: Load
    deadline: float
    state: LoadState = LOADS.start
    topology_digest: bytes = b""
    incarnation: str = ""
    asked: dict[int, Asked] = field(default_factory=dict)  # by seq
    ask_again_at: float = 0.0
    granted: Granted | None = None
    done_at: float | None = None
    writers: Writers | None = None

    @property
    def has_unquiet_writers(self) -> bool:
        return self.writers is not None and bool(self.writers.unquiet)

    @property
    def waits_for_grant(self) -> bool:
        return self.state is LoadState.PROVING or (self.state is LoadState.READING and self.granted is None)

    @property
    def is_reported(self) -> bool:
        return self.state is LoadState.DRAINING

    @property
    def asks_again(self) -> bool:
        """Whether something must be sent again at `ask_again_at`."""
        if self.state in (LoadState.SETTLING, LoadState.DRAINING):
            return self.has_unquiet_writers
        return self.waits_for_grant or self.state is LoadState.LANDING

    @property
    def next_deadline(self) -> float | None:
        times = ([] if self.is_reported else [self.deadline]) + ([self.ask_again_at] if self.asks_again else [])
        return min(times, default=None)

    def is_proven(self, leases: Leases) -> bool:
        """Whether a grant tells that the transfer was still held when the last read was done.

        It was held before the first one, and a generation that has ended is never held again.
        """
        if self.granted is None or self.done_at is None:
            return False
        asked = self.granted.asked
        return asked.after_reads or leases.is_fresh(asked.sent_at, self.done_at, self.granted.lease_s)

    @property
    def asked_after_reads(self) -> bool:
        return any(asked.after_reads for asked in self.asked.values())
