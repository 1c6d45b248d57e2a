"""The three sides of a write, joined by an instant wire on which a test may hold messages back: the producer's engine
and its ranks, and a consumer with its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from builders import ADDRESS, CONSUMER, LEASES, ORDER, TOPOLOGY, load, ref, sources

from kvferry.protocol.consumer import Arrived, ClaimLost, ConsumerEngine, Over
from kvferry.protocol.events import (
    AbandonReads,
    AbandonWrites,
    BeginWrites,
    Connect,
    FreeHold,
    Note,
    PeerReady,
    PostReads,
    Quieted,
    Received,
    Report,
    Send,
    Start,
    Tick,
    WritesDone,
    WritesQuiet,
)
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import Loader
from kvferry.protocol.messages import Landing, Message, Outcome, TransferRef
from kvferry.protocol.producer import ProducerEngine
from kvferry.protocol.writer import Writer


class Trio:
    """keeps: what arrives at once. What does not lies in `late` until the test delivers it.

    Abandoned writes are quiet at once unless `is_stubborn`: then, and otherwise, the test says how writes end.
    """

    def __init__(self, num_ranks: int = 1, num_writers: int = 1, leases: Leases = LEASES) -> None:
        self.now = 0.0
        self.num_ranks = num_ranks
        self.producer = ProducerEngine("P", "p1", leases)
        self.writers = [Writer(rank, "p1", ADDRESS, leases) for rank in range(num_writers)]
        self.engine = ConsumerEngine("D", "d1", leases)
        self.loaders = [Loader("D", "d1", rank, num_ranks, leases) for rank in range(num_ranks)]
        self.is_stubborn = False
        self.keeps: Callable[[Message], bool] = lambda message: True
        self.late: list[tuple[Any, Received]] = []
        self.sent: list[Message] = []
        self.freed: list[FreeHold] = []
        self.reports: list[Report] = []
        self.quieted: list[str] = []
        self.lost: list[ClaimLost] = []
        self.notes: list[str] = []
        self.writing: dict[Landing, BeginWrites] = {}
        self.reading: set[str] = set()
        self._wire: deque[tuple[Any, Any]] = deque()

    # What a test does

    def arrive(self, of: TransferRef | None = None) -> None:
        self.feed(self.engine, Arrived("c", of or ref(), ADDRESS, self.num_ranks))

    def start(self, of: TransferRef | None = None, **changes: Any) -> None:
        for rank, loader in enumerate(self.loaders):
            self.feed(loader, Start(load(f"l{rank}", "c", ref=of or ref(), **({"order": ORDER} | changes))))

    def over(self, outcome: Outcome = "done", reason: str = "") -> None:
        self.feed(self.engine, Over("c", outcome, reason))

    def finish(self, *landings: Landing) -> None:
        """These writes, or all, were seen finished."""
        for landing in landings or tuple(self.writing):
            del self.writing[landing]
            self.feed(self.writers[landing.producer_rank], WritesDone(landing, 10, 1, "local"))

    def deliver(self, kind: Any, again: bool = False) -> bool:
        """Whether anything of this kind was late. again: it arrives now, and stays to arrive once more."""
        found = [each for each in self.late if isinstance(each[1].message, kind)]
        if not again:
            self.late = [each for each in self.late if each not in found]
        for machine, received in found:
            self.feed(machine, received)
        return bool(found)

    def feed(self, machine: Any, event: Any) -> None:
        """One event, and all that follows from it."""
        self._wire.append((machine, event))
        while self._wire:
            self._feed(*self._wire.popleft())

    def until(self, time: float) -> None:
        """Let time pass, with every tick that was asked for on the way."""
        for _ in range(10_000):
            at, machine = min(self._deadlines(), default=(time, None), key=lambda due: due[0])
            if machine is None or at > time:
                self.now = time
                return
            self.now = max(self.now, at)
            self.feed(machine, Tick())
            again = machine.next_deadline()
            assert again is None or again > self.now, f"{machine} asks for the same tick again"
        raise AssertionError("the machines never come to rest")

    @property
    def left(self) -> dict[str, int]:
        """What is not over yet; empty when all is."""
        counts = {
            "holds": self.producer.num_holds,
            "parked": self.producer.num_parked,
            "claims": self.engine.num_claims,
            "loads": sum(loader.num_loads for loader in self.loaders),
            "jobs": sum(writer.num_jobs for writer in self.writers),
        }
        return {name: count for name, count in counts.items() if count}

    # The wire

    def _deadlines(self) -> Iterator[tuple[float, Any]]:
        for machine in (self.producer, self.engine, *self.loaders, *self.writers):
            at = machine.next_deadline()
            if at is not None:
                yield at, machine

    def _feed(self, machine: Any, event: Any) -> None:
        for action in machine.handle(event, self.now):
            match action:
                case Send(to, message):
                    self.sent.append(message)
                    arrival = (self._at(to), Received(machine, message))
                    (self._wire if self.keeps(message) else self.late).append(arrival)
                case Connect(address, _) if address == CONSUMER:
                    self._wire.append((machine, PeerReady(CONSUMER, "d1", b"")))
                case Connect(address, _):
                    ready = PeerReady(address, "p1", TOPOLOGY, sources(*range(len(self.writers))))
                    self._wire.append((machine, ready))
                case BeginWrites(order):
                    self.writing[order.landing] = action
                case AbandonWrites(landing) if not self.is_stubborn:
                    del self.writing[landing]
                    self._wire.append((machine, WritesQuiet(landing)))
                case PostReads(load_id):
                    self.reading.add(load_id)
                case AbandonReads(load_id):
                    self.reading.discard(load_id)
                case FreeHold():
                    assert not self.writing, "freed under a write"
                    self.freed.append(action)
                case Report():
                    self.reports.append(action)
                case Quieted(load_id):
                    self.quieted.append(load_id)
                case ClaimLost():
                    self.lost.append(action)
                case Note(name, _):
                    self.notes.append(name)

    def _at(self, to: Any) -> Any:
        if to == ADDRESS:
            return self.producer
        return self.writers[int(to[1:])] if isinstance(to, str) else to
