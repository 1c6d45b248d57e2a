"""The agent of a worker process: loads, their handshakes, and driving transports for peers that read from here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.agent import peers
from kvferry.agent.driver import Driver
from kvferry.agent.handshakes import Handshakes
from kvferry.agent.loads import Leftovers, LoadRequest, LoadResult, Results
from kvferry.agent.loop import AgentLoop, boottime
from kvferry.agent.peers import Producer, Side
from kvferry.agent.sources import ComputeStep, IsDone
from kvferry.agent.transfers import POLL_S, Phase, Transfer
from kvferry.agent.writing import Home, Writing
from kvferry.control.endpoint import Endpoint, Route
from kvferry.layout import CacheLayout, Refusal
from kvferry.plan import Destinations, block_tables
from kvferry.protocol import loader as machine
from kvferry.protocol import messages
from kvferry.protocol.events import Note, Received, Send, Tick
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Message
from kvferry.protocol.writer import FIRST_SEQ
from kvferry.records import EngineRecord, TransportRecord, WorkerRecord
from kvferry.transport.base import Peer, Transport, TransportError, TransportUnavailable

logger = logging.getLogger(__name__)

NUDGED_FOR_S = 1.5
"""How long a worker drives its transports after a nudge: longer than the wire-up of a first read takes."""
QUIESCED_AGAIN_S = 1.0
MAX_EARLY = 256
"""Orders that wait for the engine's first step; the oldest is dropped, and sent again by its sender."""
LOOK_FOR_DEAD_S = 0.5
"""How often writers of loads that are not quiet are looked for."""

_FROM_CONSUMERS = (messages.RemoteBlocks, messages.CancelWrite)
_FROM_OUR_ENGINE = (messages.WriteOpened, messages.StopWrite, messages.WriteClosed)
_FROM_WRITERS = (messages.WriteDone, messages.Failed)


@dataclass
class _Running:
    """A load that has not been reported, and its figures so far (boottime seconds)."""

    request: LoadRequest
    submitted_at: float
    posted_at: float | None = None
    done_at: float | None = None
    transport: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    counted: set[tuple[int, int]] = field(default_factory=set)


class _Unacknowledged(NamedTuple):
    message: messages.Quiesced
    send_again_at: float


class WorkerAgent(AgentLoop):
    """Moves this worker's KV. What stands first below is for the worker's main thread.

    num_ranks: workers of the engine; tp_size: those with the same layers, None if that is all of them.
    leftovers: of the worker's agent before this one, once it has stopped.
    """

    def __init__(
        self,
        *,
        rank: int,
        pp_rank: int,
        tp_rank: int,
        num_ranks: int,
        tp_size: int | None = None,
        endpoint: Endpoint,
        make_transports: Callable[[], Sequence[Transport]],
        layout: CacheLayout,
        fingerprint: dict[str, str],
        group_kinds: tuple[str, ...],
        leases: Leases,
        leftovers: Leftovers | None = None,
    ) -> None:
        super().__init__(f"kvferry-worker-{rank}", endpoint)
        self._rank = rank
        self._pp_rank = pp_rank
        self._tp_rank = tp_rank
        self._make_transports = make_transports
        self._num_ranks = num_ranks
        self._side = Side(tp_rank, num_ranks if tp_size is None else tp_size, layout, fingerprint, group_kinds, ())
        self._leases = leases
        self._inherited = leftovers or Leftovers()
        self.leftovers = Leftovers()
        self._loader: Driver[machine.Event, machine.Action] | None = None
        self._writing: Writing | None = None
        self._early: deque[tuple[Route | str, Message]] = deque(maxlen=MAX_EARLY)
        self._incarnation = ""
        self._rendezvous = ""
        self._handshakes = Handshakes(self, leases.handshake_s)
        self._producers: dict[str, Producer] = {}
        self._retired: list[Producer] = []
        self._loads: dict[str, _Running] = {}
        self._reads: dict[str, Transfer] = {}
        self._written: dict[str, Producer] = {}  # loads into which their writers may still write
        self._look_for_dead_at = 0.0
        self._destinations: Destinations | None = None
        self._unacknowledged: dict[str, _Unacknowledged] = {}
        self._nudged_until = 0.0
        self._quiesced_seq = 0
        self._results = Results()
        self._waiting: deque[tuple[IsDone | None, Callable[[], None]]] = deque()  # for the device

    # For the worker's main thread.

    def record(self) -> WorkerRecord:
        """After `start`: what peers need to know of this worker."""
        return WorkerRecord(
            rank=self._rank,
            pp_rank=self._pp_rank,
            tp_rank=self._tp_rank,
            control_address=self.endpoint.address,
            control_key_id=self.endpoint.key_id,
            layout=self._side.layout,
            transports=tuple(TransportRecord(t.name, t.record()) for t in self._side.transports),
        )

    def identify(self, engine_id: str, incarnation: str, rendezvous: str, home: str) -> None:
        """Tells the agent which engine it belongs to; needed before the first load. Later calls change nothing.

        home: the engine agent's, by which it knows its own workers.
        """
        self.submit(lambda: self._identify(engine_id, incarnation, rendezvous, home))

    def load(self, load: LoadRequest, is_ready: IsDone | None = None) -> None:
        """Starts a load once `is_ready` says so (None: it is), and those before it have started; its result comes from
        `collect`, once. What the device was told before may still touch the blocks: nothing may land before that."""
        at = boottime()
        self.submit(lambda: self._when_ready(is_ready, lambda: self._start_load(load, at)))

    def cancel(self, load_id: str, reason: str) -> None:
        """The request no longer wants its load; the result still comes, once."""
        self.submit(lambda: self._when_ready(None, lambda: self._handle(machine.Cancel(load_id, reason))))

    def begin_step(self, steps: list[ComputeStep]) -> None:
        """The engine's step begins: what it computes of promised transfers, if anything."""
        self.submit(lambda: self._writer().sources.begin_step(steps))

    def computed_layer(self, layer: str, is_done: IsDone | None) -> None:
        """In this step the layer has written its cache, once `is_done` says so (None: it has)."""
        self.submit(lambda: self._writer().sources.computed_layer(layer, is_done))

    def end_step(self, is_done: IsDone | None) -> None:
        """In this step every layer has."""
        self.submit(lambda: self._writer().sources.end_step(is_done))

    def forget_transfers(self, transfer_ids: list[str]) -> None:
        """Nobody can want these any more."""
        self.submit(lambda: self._writer().sources.forget(transfer_ids))

    def collect(self, wait_s: float = 0.0) -> list[LoadResult]:
        """Results since the last call; waits for the first of them, up to `wait_s` seconds."""
        return self._results.take(wait_s)

    # The agent's thread.

    def on_start(self) -> None:
        """Keeps every transport that can register this memory. Raises TransportUnavailable if none can."""
        kept: list[Transport] = []
        refused: list[str] = []
        for transport in self._make_transports():
            try:
                transport.register(self._side.layout.regions)
                kept.append(transport)
            except TransportError as error:
                transport.close()
                refused.append(f"{transport.name}: {error}")
                logger.info("kvferry: transport %s is not used: %s", transport.name, error)
        if not kept:
            raise TransportUnavailable(f"no transport can move this cache: {'; '.join(refused)}")
        self._side = self._side._replace(transports=tuple(kept))

    def on_stop(self) -> None:
        """Closes everything, and reports what was still running: whoever stopped the agent may collect it."""
        while self._waiting:  # not for the device any more: nothing is posted from here on
            self.guard(self._waiting.popleft()[1])
        for reads in self._reads.values():
            reads.abandon("the worker is shutting down")
            reads.quiet()
        if self._writing is not None:
            self._writing.stop()
        for producer in [*self._producers.values(), *self._retired]:
            peers.disconnect(producer.sources)
        for transport in self._side.transports:
            transport.close()
        self.leftovers = self._leave()
        for load_id in list(self._loads):
            # A closed transport may know that nothing can land any more where an open one did not.
            quiet = load_id not in self._written and (load_id not in self._reads or self._reads[load_id].quiet())
            self._report(machine.Report(load_id, ok=False, reason="the worker's I/O thread was stopped", quiet=quiet))

    def _leave(self) -> Leftovers:
        """Now that the transports are closed, tells what has become quiet. Returns what is left."""
        if self._writing is None:
            return self._inherited
        for load_id in [load_id for load_id in self._reads if load_id not in self._loads]:
            if self._reads[load_id].quiet():
                self._tell_quiet(load_id)
        return Leftovers(tuple(self._unacknowledged), self._writing.close() | self._inherited.unquiet)

    def on_message(self, source: Route | str, message: Message) -> None:
        if isinstance(message, messages.Nudge):
            self._nudged_until = boottime() + NUDGED_FOR_S
        elif isinstance(message, messages.QuiescedAck):
            self._unacknowledged.pop(message.load_id, None)
        elif isinstance(message, messages.Record) and isinstance(source, str):
            self._handshakes.on_record(source, message)
        elif isinstance(message, messages.Refused) and not message.claim_id and isinstance(source, str):
            self._handshakes.on_refused(source, message)
        elif isinstance(message, _FROM_CONSUMERS):
            self._to_writer(source, message)
        elif isinstance(message, _FROM_OUR_ENGINE) or (
            isinstance(message, messages.Refused) and message.seq > FIRST_SEQ
        ):
            if source == self._rendezvous:
                self._to_writer(source, message)
            else:
                self._count_foreign(message)
        elif isinstance(message, _FROM_WRITERS) and not isinstance(source, str):
            self._count_foreign(message)
        else:
            if isinstance(message, messages.WriteDone):
                self._count_written(message)
            self._handle(Received(source, message))

    def _count_foreign(self, message: Message) -> None:
        """It answers nothing that we asked where it comes from: nobody else may speak for our engine or a writer."""
        self.counters[f"foreign_{type(message).__name__.lower()}"] += 1

    def on_forgotten(self, address: str) -> None:
        self._stale(address)
        if self._writing is not None:
            self._writing.on_stale(address)

    def _stale(self, address: str) -> None:
        """What the handshake with this rendezvous told may have changed."""
        self._retire(address)
        if self._loader is not None:
            self._handle(machine.PeerStale(address))

    def on_lost(self, address: str, reason: str) -> None:
        reason = f"connection to {address} lost: {reason}"
        self._handshakes.on_lost(address, reason)
        self._retire(address)
        self._handle(machine.PeerFailed(address, reason, lost=True))
        for rendezvous, producer in list(self._producers.items()):
            if any(source.worker.control_address == address for source in producer.sources):
                self._stale(rendezvous)
        self._handle(machine.WriterLost(address, reason))
        if self._writing is not None:
            self._writing.on_lost(address, reason)

    def on_time(self) -> None:
        now = boottime()
        self._handshakes.on_time(now)
        self.guard(self._start_what_is_ready)
        for load_id in list(self._reads):
            self.guard(self._advance, load_id)
        if self._writing is not None:
            self.guard(self._writing.on_time, now)
        if self._written and now >= self._look_for_dead_at:
            self._look_for_dead_at = now + LOOK_FOR_DEAD_S
            self._look_for_dead()
        self._disconnect_retired()
        if now < self._nudged_until:
            for transport in self._side.transports:
                transport.progress()
        self._resend_quiesced(now)
        if self._loader is not None:
            self._loader.tick(now, Tick())

    def next_wakeup(self) -> float | None:
        now = boottime()
        times = self._handshakes.deadlines()
        times += [entry.send_again_at for entry in self._unacknowledged.values()]
        times += [now + reads.poll_interval_s(now) for reads in self._reads.values()]
        if now < self._nudged_until or self._waiting:
            times.append(now + POLL_S)
        if self._written:
            times.append(self._look_for_dead_at)
        if self._loader is not None and (deadline := self._loader.next_deadline()) is not None:
            times.append(deadline)
        if self._writing is not None:
            times += self._writing.wakeups(now)
        return min(times, default=None)

    def dial(self, address: str) -> None:
        """Raises AddressError for an address that may not be dialled."""
        self.endpoint.dial(address, self.key_of(address))

    def _identify(self, engine_id: str, incarnation: str, rendezvous: str, secret: str) -> None:
        if self._loader is not None:
            return
        self._incarnation = incarnation
        self._rendezvous = rendezvous
        self.pin_key(rendezvous)
        loader = machine.Loader(engine_id, incarnation, self._rank, self._num_ranks, self._leases)
        self._loader = Driver(loader, self._act, self.guard)
        home = Home(engine_id, incarnation, rendezvous, self._rank, secret)
        self._writing = Writing(home, self._side, self, self._handshakes, self._leases, self._inherited.unquiet)
        for load_id in self._inherited.quiet:
            self._tell_quiet(load_id)
        while self._early:
            self._writing.on_message(*self._early.popleft())

    def _to_writer(self, source: Route | str, message: Message) -> None:
        """An order may come before the engine's first step, which tells this worker where it belongs."""
        if self._writing is not None:
            self._writing.on_message(source, message)
        else:
            self._early.append((source, message))

    def _writer(self) -> Writing:
        if self._writing is None:
            raise TransportError("this worker does not know its engine yet")
        return self._writing

    # The machine: events in, actions out.

    def _handle(self, event: machine.Event) -> None:
        if self._loader is None:
            self.counters["before_identified"] += 1
        else:
            self._loader.feed(event)

    def _act(self, action: machine.Action) -> None:
        if isinstance(action, Send):
            self._note_order(action.message)
            self.send(action.to, action.message)
        elif isinstance(action, machine.Connect):
            self._meet(action.address, action.engine_id)
        elif isinstance(action, machine.PostReads):
            self._post_reads(action.load_id)
        elif isinstance(action, machine.AbandonReads):
            self._abandon_reads(action.load_id)
        elif isinstance(action, machine.Report):
            self._report(action)
        elif isinstance(action, machine.Quieted):
            self._tell_quiet(action.load_id)
        elif isinstance(action, Note):
            self.counters[action.name] += 1
            logger.info("kvferry: %s: %s", action.name, action.detail)

    # Loads.

    def _when_ready(self, is_ready: IsDone | None, start: Callable[[], None]) -> None:
        self._waiting.append((is_ready, start))
        self._start_what_is_ready()

    def _start_what_is_ready(self) -> None:
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0]()):
            self.guard(self._waiting.popleft()[1])

    def _start_load(self, request: LoadRequest, submitted_at: float) -> None:
        self._loads[request.load_id] = _Running(request, submitted_at)
        self.learn_key(request.address, request.key_id)
        refused = request.refused or (self._why_not_written(request) if request.write else "")
        self._handle(
            machine.Start(
                machine.Load(
                    load_id=request.load_id,
                    claim_id=request.claim_id,
                    ref=request.ref,
                    address=request.address,
                    num_tokens=request.num_tokens,
                    digest=request.digest,
                    blocks_digest=request.blocks_digest,
                    refused=refused,
                    order=self._order(request) if request.write else None,
                    may_read=bool(request.producer_block_ids),
                )
            )
        )

    def _why_not_written(self, request: LoadRequest) -> str:
        """Writers see their own part alone, so that no byte is a destination twice must be seen here."""
        try:
            tables = block_tables("consumer", request.consumer_block_ids)
            if self._destinations is None:
                self._destinations = Destinations(self._side.layout)
            self._destinations.prove(tables, request.end_token)
        except Refusal as refusal:
            return str(refusal)
        return ""

    def _order(self, request: LoadRequest) -> machine.Order:
        return machine.Order(
            address=self._rendezvous,
            key_id=self.endpoint.key_id,
            first_token=request.first_token,
            end_token=request.end_token,
            window_starts=request.window_starts,
            block_ids=request.consumer_block_ids,
        )

    def _note_order(self, message: Message) -> None:
        """From its first order on, a load's blocks may be written from outside."""
        if isinstance(message, messages.RemoteBlocks) and message.landing.load_id not in self._written:
            load = self._loads[message.landing.load_id]
            load.posted_at = boottime()
            self._written[message.landing.load_id] = self._producers[load.request.address]

    def _count_written(self, done: messages.WriteDone) -> None:
        load = self._loads.get(done.landing.load_id)
        if load is not None and (done.landing.producer_rank, done.landing.rank) not in load.counted:
            load.counted.add((done.landing.producer_rank, done.landing.rank))
            load.num_bytes += done.num_bytes
            load.num_descriptors += done.num_descriptors
            load.transport = "+".join(sorted({*load.transport.split("+"), done.transport} - {""}))
            load.done_at = boottime()

    def _look_for_dead(self) -> None:
        producers = {id(producer): producer for producer in self._written.values()}
        for producer in producers.values():
            for source in producer.sources:
                if source.transport.gone(source.peer):
                    self._handle(machine.WriterGone(source.worker.control_address))

    def _post_reads(self, load_id: str) -> None:
        load = self._loads[load_id]
        producer = self._producers.get(load.request.address)
        try:
            if producer is None:
                raise TransportError(f"the connection to {load.request.address} is gone")
            parts, num_bytes, num_descriptors = peers.bind(producer, load.request)
        except Exception as error:
            # Whatever planning raises, this load fails alone, and with its reason.
            self._handle(machine.ReadsFailed(load_id, f"{type(error).__name__}: {error}"))
            return
        load.transport = "+".join(sorted({part.transport.name for part in parts}))
        load.posted_at = boottime()
        load.num_bytes, load.num_descriptors = num_bytes, num_descriptors
        self._reads[load_id] = Transfer(parts, load.posted_at)  # posted by `on_time`, later in this turn

    def _abandon_reads(self, load_id: str) -> None:
        if load_id in self._reads:
            self._reads[load_id].abandon("no longer wanted")
        else:
            self._handle(machine.ReadsQuiet(load_id))  # none was ever posted

    def _advance(self, load_id: str) -> None:
        """One step of a load's reads, and what the machine must hear of it."""
        reads = self._reads[load_id]
        was_reading = reads.phase is Phase.MOVING
        phase = reads.step()
        if was_reading and phase is Phase.DONE:
            if load_id in self._loads:
                self._loads[load_id].done_at = boottime()
            self._handle(machine.ReadsDone(load_id))
        elif was_reading and phase is Phase.FAILED:
            self._handle(machine.ReadsFailed(load_id, reads.reason))
            if reads.lost_peer is not None:
                self._peer_lost(reads.lost_peer, reads.reason)
        if phase is not Phase.MOVING and reads.quiet():
            del self._reads[load_id]
            if phase is not Phase.DONE:
                self._handle(machine.ReadsQuiet(load_id))
            return
        for address in reads.nudges_due(boottime()):
            self.send(address, messages.Nudge(incarnation=self._incarnation))

    def _peer_lost(self, peer: Peer, reason: str) -> None:
        """The memory that a handshake told of is gone, though its engine may live: ask anew before the next load."""
        for address, producer in list(self._producers.items()):
            if any(source.peer is peer for source in producer.sources):
                self._retire(address)
                self._handle(machine.PeerFailed(address, f"a worker of {address} is gone: {reason}", lost=True))

    def _report(self, report: machine.Report) -> None:
        load = self._loads.pop(report.load_id)
        if report.quiet:
            self._written.pop(report.load_id, None)
        now = boottime()
        posted_at = load.posted_at if load.posted_at is not None else now
        self._results.put(
            LoadResult(
                request_id=load.request.request_id,
                load_id=report.load_id,
                rank=self._rank,
                ok=report.ok,
                quiet=report.quiet,
                reason=messages.shorten(report.reason),
                transport=load.transport,
                num_bytes=load.num_bytes if report.ok else 0,
                num_descriptors=load.num_descriptors if report.ok else 0,
                seconds=(load.done_at or now) - posted_at,
                wait_s=posted_at - load.submitted_at,
            )
        )

    def _tell_quiet(self, load_id: str) -> None:
        self._written.pop(load_id, None)
        self._quiesced_seq += 1
        message = messages.Quiesced(
            incarnation=self._incarnation, load_id=load_id, rank=self._rank, seq=self._quiesced_seq
        )
        self._unacknowledged[load_id] = _Unacknowledged(message, boottime() + QUIESCED_AGAIN_S)
        self.send(self._rendezvous, message)

    def _resend_quiesced(self, now: float) -> None:
        for load_id, entry in list(self._unacknowledged.items()):
            if now >= entry.send_again_at:
                self._unacknowledged[load_id] = entry._replace(send_again_at=now + QUIESCED_AGAIN_S)
                self.send(self._rendezvous, entry.message)

    # Handshakes.

    def _meet(self, address: str, engine_id: str) -> None:
        """Until it has ended well, loads go on under an earlier handshake with the same address, if there is one."""

        def failed(reason: str) -> None:
            self._handle(machine.PeerFailed(address, reason, lost=False))

        def met(record: EngineRecord) -> None:
            producer = peers.shake_hands(self._side, record, address)
            self._retire(address)
            self._producers[address] = producer
            for source in producer.sources:
                self.learn_key(source.worker.control_address, source.worker.control_key_id)
            ranks = tuple(
                machine.SourceRank(one.worker.rank, one.worker.control_address, one.transport.name)
                for one in producer.sources
            )
            self._handle(machine.PeerReady(address, producer.incarnation, producer.topology_digest, ranks))

        self._handshakes.begin(("producer", address), address, engine_id, self._incarnation, met, failed)

    def _retire(self, address: str) -> None:
        """The producer at this address is not what it was; its transfers end through the machine."""
        if (producer := self._producers.pop(address, None)) is not None:
            self._retired.append(producer)

    def _disconnect_retired(self) -> None:
        """A peer is let go only when no transfer of ours uses it any more."""
        busy = {id(peer) for reads in self._reads.values() for peer in reads.peers()}
        busy |= {id(source.peer) for producer in self._written.values() for source in producer.sources}
        for producer in list(self._retired):
            if not any(id(source.peer) in busy for source in producer.sources):
                peers.disconnect(producer.sources)
                self._retired.remove(producer)
