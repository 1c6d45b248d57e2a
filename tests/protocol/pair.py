"""A producer and a consumer engine with its ranks, joined by an instant wire that a test may cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from builders import ADDRESS, LEASES, TOPOLOGY, held, load, ref

from kvferry.protocol.consumer import Arrived, ClaimLost, ConsumerEngine, Over
from kvferry.protocol.events import Note, Received, Send, Tick
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import AbandonReads, Connect, Loader, PeerReady, PostReads, Report, Start
from kvferry.protocol.messages import Message, Outcome, TransferRef
from kvferry.protocol.producer import FreeHold, ProducerEngine


class Pair:
    """keeps: what the wire lets through; by default everything. A test feeds events and reads what came of them."""

    def __init__(self, num_ranks: int = 1, leases: Leases = LEASES) -> None:
        self.now = 0.0
        self.num_ranks = num_ranks
        self.producer = ProducerEngine("P", "p1", leases)
        self.engine = ConsumerEngine("D", "d1", leases)
        self.loaders = [Loader("D", "d1", rank, num_ranks, leases) for rank in range(num_ranks)]
        self.keeps: Callable[[Message], bool] = lambda message: True
        self.sent: list[Message] = []
        self.freed: list[FreeHold] = []
        self.reports: list[Report] = []
        self.lost: list[ClaimLost] = []
        self.notes: list[str] = []
        self._wire: deque[tuple[Any, Received]] = deque()

    def hold(self, of: TransferRef | None = None) -> None:
        self.feed(self.producer, held(of))

    def arrive(self, claim_id: str = "c", of: TransferRef | None = None) -> None:
        self.feed(self.engine, Arrived(claim_id, of or ref(), ADDRESS, self.num_ranks))

    def over(self, claim_id: str = "c", outcome: Outcome = "done", reason: str = "") -> None:
        self.feed(self.engine, Over(claim_id, outcome, reason))

    def start(self, claim_id: str = "c", of: TransferRef | None = None) -> None:
        for loader in self.loaders:
            self.feed(loader, Start(load(claim_id, claim_id, ref=of or ref())))

    def feed(self, machine: Any, event: Any) -> None:
        """One event, and every message that follows from it."""
        self._feed(machine, event)
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
        raise AssertionError("the machines never come to rest")

    def _deadlines(self) -> Iterator[tuple[float, Any]]:
        for machine in (self.producer, self.engine, *self.loaders):
            at = machine.next_deadline()
            if at is not None:
                yield at, machine

    def _feed(self, machine: Any, event: Any) -> None:
        for action in machine.handle(event, self.now):
            match action:
                case Send(to, message):
                    self.sent.append(message)
                    if self.keeps(message):
                        self._wire.append(
                            (to if machine is self.producer else self.producer, Received(machine, message))
                        )
                case Connect(address, _):
                    self._wire.append((machine, PeerReady(address, "p1", TOPOLOGY)))
                case FreeHold():
                    self.freed.append(action)
                case Report():
                    self.reports.append(action)
                case ClaimLost():
                    self.lost.append(action)
                case Note(name, _):
                    self.notes.append(name)
                case PostReads() | AbandonReads():
                    pass  # the test says how they end
