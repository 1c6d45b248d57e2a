"""The producer's half of a worker's agent: writes what consumer ranks have asked for, as the engine computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kvferry.agent import peers, sources
from kvferry.agent.driver import Driver
from kvferry.agent.handshakes import Handshakes, Line
from kvferry.agent.peers import Consumer, Side
from kvferry.agent.sources import Source, Sources
from kvferry.agent.transfers import POLL_S, Phase
from kvferry.agent.writes import Writes
from kvferry.layout import Refusal
from kvferry.protocol import messages, writer
from kvferry.protocol.events import (
    AbandonWrites,
    BeginWrites,
    Connect,
    Note,
    PeerFailed,
    PeerReady,
    PeerStale,
    Received,
    Route,
    Send,
    Tick,
    WritesDone,
    WritesFailed,
    WritesQuiet,
)
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Landing, Message, RemoteBlocks
from kvferry.records import EngineRecord
from kvferry.transport.base import TransportError

logger = logging.getLogger(__name__)


class Home(NamedTuple):
    """The engine that this worker belongs to. address: of its rendezvous; secret: what only its own workers know."""

    engine_id: str
    incarnation: str
    address: str
    rank: int
    secret: str


class Wire(Line, Protocol):
    """What the agent's loop does for this half."""

    def learn_key(self, address: str, key_id: str) -> None: ...
    def guard(self, step: Callable[..., None], *args: object) -> bool: ...


class _Job(NamedTuple):
    """source: None while the engine's steps tell, under transfer_id."""

    writes: Writes
    transfer_id: str
    source: Source | None


class Writing:
    """All landings of this worker. Everything here runs in the agent's thread."""

    def __init__(
        self,
        home: Home,
        side: Side,
        wire: Wire,
        handshakes: Handshakes,
        leases: Leases,
        unquiet: frozenset[Landing] = frozenset(),
    ) -> None:
        """unquiet: landings that an earlier agent of this worker could not end."""
        self._home = home
        self._side = side
        self._wire = wire
        self._handshakes = handshakes
        self._machine = writer.Writer(home.rank, home.incarnation, home.address, leases, home.secret, unquiet)
        self._driver: Driver[writer.Event, writer.Action] = Driver(self._machine, self._act, wire.guard)
        self.sources = Sources()
        self._jobs: dict[Landing, _Job] = {}
        self._failed: set[Landing] = set()
        self._own: EngineRecord | None = None
        self._consumers: dict[str, Consumer] = {}
        self._retired: list[Consumer] = []

    # Events.

    def on_message(self, source: Route, message: Message) -> None:
        self._driver.feed(Received(source, message))

    def on_lost(self, address: str, reason: str) -> None:
        self._retire(address)
        self._driver.feed(PeerFailed(address, reason, lost=True))

    def on_stale(self, address: str) -> None:
        """What a handshake with this address told may have changed."""
        self._retire(address)
        self._driver.feed(PeerStale(address))

    def on_time(self, now: float) -> None:
        self.sources.advance()
        for landing in list(self._jobs):
            self._wire.guard(self._advance, landing, now)
        self._disconnect_retired()
        self._driver.tick(now, Tick())

    def wakeups(self, now: float) -> Iterator[float]:
        deadline = self._driver.next_deadline()
        if deadline is not None:
            yield deadline
        if self.sources.waits_for_device:
            yield now + POLL_S
        for job in self._jobs.values():
            interval_s = job.writes.poll_interval_s(now)
            if interval_s is not None:
                yield now + interval_s

    def stop(self) -> None:
        """Posts nothing more, and lets every consumer's memory go. `close` comes when the transports are closed."""
        for job in self._jobs.values():
            job.writes.abandon("the worker is shutting down")
            job.writes.quiet()
        for consumer in [*self._consumers.values(), *self._retired]:
            consumer.leave()

    def close(self) -> frozenset[Landing]:
        """Tells the engine of all landings that are quiet. Returns those of which that will never be known."""
        unquiet = frozenset(landing for landing, job in self._jobs.items() if not job.writes.quiet())
        for action in self._machine.close_all(unquiet):
            self._act(action)
        return unquiet

    # What the machine says.

    def _act(self, action: writer.Action) -> None:
        match action:
            case Send(to, message):
                self._wire.send(to, message)
            case Connect(address, engine_id, key_id):
                self._wire.learn_key(address, key_id)
                self._meet(address, engine_id)
            case BeginWrites():
                self._begin(action)
            case AbandonWrites(landing):
                self._abandon(landing)
            case Note(name, detail):
                self._wire.counters[name] += 1
                logger.info("kvferry: %s: %s", name, detail)

    def _meet(self, address: str, engine_id: str) -> None:
        """The own engine's record comes first: who writes what to whom depends on both."""

        def failed(reason: str) -> None:
            self._driver.feed(PeerFailed(address, reason, lost=False))

        def meet(record: EngineRecord) -> None:
            self._own = record
            key, incarnation = ("consumer", address), self._home.incarnation
            self._handshakes.begin(key, address, engine_id, incarnation, lambda one: self._met(address, one), failed)

        if self._own is not None:
            meet(self._own)
            return
        home = self._home
        self._handshakes.begin(("own", address), home.address, home.engine_id, home.incarnation, meet, failed)

    def _met(self, address: str, record: EngineRecord) -> None:
        if self._own is None:
            raise TransportError("this engine's own record is not known yet")
        consumer = peers.meet_consumer(self._side, self._home.rank, self._own, record, address)
        self._retire(address)
        self._consumers[address] = consumer
        for target in consumer.targets.values():
            self._wire.learn_key(target.worker.control_address, target.worker.control_key_id)
        self._driver.feed(PeerReady(address, record.incarnation, self._own.topology_digest()))

    def _begin(self, begin: BeginWrites) -> None:
        order = begin.order
        try:
            writes = self._writes(order)
        except Exception as error:
            # Whatever an order makes us do, it fails alone, and with its reason.
            unable = isinstance(error, peers.Unreachable)
            self._driver.feed(WritesFailed(order.landing, f"{type(error).__name__}: {error}", unable))
            self._driver.feed(WritesQuiet(order.landing))
            if unable:
                self.on_stale(order.address)  # it may be elsewhere since it told where it is
            return
        source = sources.held(begin.block_ids, order.num_tokens) if begin.block_ids else None
        self._jobs[order.landing] = _Job(writes, begin.transfer_id, source)

    def _writes(self, order: RemoteBlocks) -> Writes:
        if not order.first_token <= order.end_token <= order.num_tokens:
            tokens = f"[{order.first_token}, {order.end_token})"
            raise Refusal("tokens", f"ordered {tokens}", f"offered {order.num_tokens}")
        consumer = self._consumers.get(order.address)
        if consumer is None or consumer.incarnation != order.incarnation:
            raise TransportError(f"the connection to {order.address} is gone")
        if order.landing.rank not in consumer.targets:
            raise Refusal("source ranks", f"rank {order.landing.rank} orders from {self._home.rank}", "it feeds others")
        return Writes(order, consumer.targets[order.landing.rank], consumer.way(order.landing.rank, order.transport))

    def _abandon(self, landing: Landing) -> None:
        if landing in self._jobs:
            self._jobs[landing].writes.abandon("no longer wanted")
        else:
            self._driver.feed(WritesQuiet(landing))

    # Driving them.

    def _advance(self, landing: Landing, now: float) -> None:
        """One step of a landing, and what the machine must hear of it."""
        writes, transfer_id, source = self._jobs[landing]
        try:
            phase = writes.step(source if source is not None else self.sources.get(transfer_id), now)
        except Exception as error:
            writes.abandon(f"{type(error).__name__}: {error}")
            phase = Phase.FAILED
        if phase is Phase.DONE:
            del self._jobs[landing]
            self._driver.feed(WritesDone(landing, writes.num_bytes, writes.num_descriptors, writes.transport))
            return
        if phase is Phase.FAILED and landing not in self._failed:
            self._failed.add(landing)
            self._driver.feed(WritesFailed(landing, writes.reason))
            if writes.lost_peer is not None:
                self.on_stale(writes.address)  # its memory is gone, though its engine may live
        if phase is not Phase.MOVING and writes.quiet():
            del self._jobs[landing]
            self._failed.discard(landing)
            self._driver.feed(WritesQuiet(landing))
            return
        nudge = messages.Nudge(incarnation=self._home.incarnation)
        for address in writes.nudges_due(now):
            self._wire.send(address, nudge)

    def _retire(self, address: str) -> None:
        if (consumer := self._consumers.pop(address, None)) is not None:
            self._retired.append(consumer)

    def _disconnect_retired(self) -> None:
        """A peer is let go only when no write of ours uses it any more."""
        busy = {id(job.writes.peer) for job in self._jobs.values()}
        for consumer in list(self._retired):
            if not any(id(peer) in busy for peer in consumer.peers):
                consumer.leave()
                self._retired.remove(consumer)
