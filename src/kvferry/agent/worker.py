"""The agent of a worker process: handshakes, loads, and driving transports for peers that read from here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry import records
from kvferry.agent import peers
from kvferry.agent.loads import LoadRequest, LoadResult
from kvferry.agent.loop import AgentLoop, boottime
from kvferry.agent.peers import Producer, Side
from kvferry.agent.reads import POLL_S, Phase, Reads
from kvferry.control.addresses import AddressError
from kvferry.control.endpoint import Endpoint, Route
from kvferry.layout import CacheLayout
from kvferry.protocol import loader as machine
from kvferry.protocol import messages
from kvferry.protocol.events import Note, Received, Send, Tick
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Message
from kvferry.records import BadRecord, EngineRecord, TransportRecord, WorkerRecord
from kvferry.transport.base import Peer, Transport, TransportError, TransportUnavailable

logger = logging.getLogger(__name__)

NUDGED_FOR_S = 1.5
"""How long a worker drives its transports after a nudge: longer than the wire-up of a first read takes."""
QUIESCED_AGAIN_S = 1.0


class _Handshake(NamedTuple):
    engine_id: str
    seq: int
    deadline: float


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


class _Unacknowledged(NamedTuple):
    message: messages.Quiesced
    send_again_at: float


class WorkerAgent(AgentLoop):
    """Moves this worker's KV. `load`, `cancel`, `collect` and `record` are for the worker's main thread.

    num_ranks: workers of the engine; tp_size: those with the same layers, None if that is all of them.
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
    ) -> None:
        super().__init__(f"kvferry-worker-{rank}", endpoint)
        self._rank = rank
        self._pp_rank = pp_rank
        self._tp_rank = tp_rank
        self._make_transports = make_transports
        self._num_ranks = num_ranks
        self._side = Side(tp_rank, num_ranks if tp_size is None else tp_size, layout, fingerprint, group_kinds, ())
        self._leases = leases
        self._loader: machine.Loader | None = None
        self._incarnation = ""
        self._rendezvous = ""
        self._handshakes: dict[str, _Handshake] = {}
        self._hello_seq = 0
        self._producers: dict[str, Producer] = {}
        self._retired: list[Producer] = []
        self._events: deque[machine.Event] = deque()
        self._handling = False
        self._loads: dict[str, _Running] = {}
        self._reads: dict[str, Reads] = {}
        self._unacknowledged: dict[str, _Unacknowledged] = {}
        self._nudged_until = 0.0
        self._quiesced_seq = 0
        self._results: deque[LoadResult] = deque()

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

    def identify(self, engine_id: str, incarnation: str, rendezvous: str) -> None:
        """Tells the agent which engine it belongs to; needed before the first load. Later calls change nothing."""
        self.submit(lambda: self._identify(engine_id, incarnation, rendezvous))

    def load(self, load: LoadRequest) -> None:
        """Starts a load; its result comes from `collect`, once."""
        at = boottime()
        self.submit(lambda: self._start_load(load, at))

    def cancel(self, load_id: str, reason: str) -> None:
        """The request no longer wants its load; the result still comes, once."""
        self.submit(lambda: self._handle(machine.Cancel(load_id, reason)))

    def collect(self) -> list[LoadResult]:
        """Results since the last call."""
        results: list[LoadResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

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
        for reads in self._reads.values():
            reads.abandon("the worker is shutting down")
            reads.quiet()
        for producer in [*self._producers.values(), *self._retired]:
            peers.disconnect(producer.sources)
        for transport in self._side.transports:
            transport.close()
        for load_id in list(self._loads):
            # A closed transport may know that nothing can land any more where an open one did not.
            quiet = load_id not in self._reads or self._reads[load_id].quiet()
            self._report(machine.Report(load_id, ok=False, reason="the worker's I/O thread was stopped", quiet=quiet))

    def on_message(self, source: Route | str, message: Message) -> None:
        if isinstance(message, messages.Nudge):
            self._nudged_until = boottime() + NUDGED_FOR_S
        elif isinstance(message, messages.QuiescedAck):
            self._unacknowledged.pop(message.load_id, None)
        elif isinstance(message, messages.Record) and isinstance(source, str):
            self._finish_handshake(source, message)
        elif isinstance(message, messages.Refused) and not message.claim_id and isinstance(source, str):
            self._refused_handshake(source, message)
        else:
            self._handle(Received(source, message))

    def on_lost(self, address: str, reason: str) -> None:
        self._forget(address)
        self._handle(machine.PeerFailed(address, f"connection to {address} lost: {reason}", lost=True))

    def on_time(self) -> None:
        now = boottime()
        for address, handshake in list(self._handshakes.items()):
            if now >= handshake.deadline:
                self._fail_handshake(address, f"no answer within {self._leases.handshake_s:g} s")
        for load_id in list(self._reads):
            self._guard(self._advance, load_id)
        self._disconnect_retired()
        if now < self._nudged_until:
            for transport in self._side.transports:
                transport.progress()
        self._resend_quiesced(now)
        deadline = self._loader.next_deadline() if self._loader is not None else None
        if deadline is not None and now >= deadline:
            self._handle(Tick())

    def next_wakeup(self) -> float | None:
        now = boottime()
        times = [handshake.deadline for handshake in self._handshakes.values()]
        times += [entry.send_again_at for entry in self._unacknowledged.values()]
        times += [now + reads.poll_interval_s(now) for reads in self._reads.values()]
        if now < self._nudged_until:
            times.append(now + POLL_S)
        if self._loader is not None and (deadline := self._loader.next_deadline()) is not None:
            times.append(deadline)
        return min(times, default=None)

    def _identify(self, engine_id: str, incarnation: str, rendezvous: str) -> None:
        if self._loader is None:
            self._incarnation = incarnation
            self._rendezvous = rendezvous
            self._loader = machine.Loader(engine_id, incarnation, self._rank, self._num_ranks, self._leases)

    # The machine: events in, actions out.

    def _handle(self, event: machine.Event) -> None:
        """Feeds one event and does what follows. Events raised by actions wait their turn, so order is kept."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._feed(self._events.popleft())
        finally:
            self._handling = False

    def _feed(self, event: machine.Event) -> None:
        if self._loader is None:
            self.counters["before_identified"] += 1
            return
        for action in self._loader.handle(event, boottime()):
            self._guard(self._act, action)

    def _act(self, action: machine.Action) -> None:
        if isinstance(action, Send):
            self.send(action.to, action.message)
        elif isinstance(action, machine.Connect):
            self._begin_handshake(action.address, action.engine_id)
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

    def _start_load(self, request: LoadRequest, submitted_at: float) -> None:
        self._loads[request.load_id] = _Running(request, submitted_at)
        self.learn_key(request.address, request.key_id)
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
                    refused=request.refused,
                )
            )
        )

    def _post_reads(self, load_id: str) -> None:
        load = self._loads[load_id]
        producer = self._producers.get(load.request.address)
        try:
            if producer is None:
                raise TransportError(f"the connection to {load.request.address} is gone")
            sources, load.num_bytes, load.num_descriptors = peers.bind(producer, load.request)
        except Exception as error:
            # Whatever planning raises, this load fails alone, and with its reason.
            self._handle(machine.ReadsFailed(load_id, f"{type(error).__name__}: {error}"))
            return
        load.transport = "+".join(sorted({source.transport.name for source in sources}))
        load.posted_at = boottime()
        self._reads[load_id] = Reads(sources, load.posted_at)  # posted by `on_time`, later in this turn

    def _abandon_reads(self, load_id: str) -> None:
        if load_id in self._reads:
            self._reads[load_id].abandon("no longer wanted")
        else:
            self._handle(machine.ReadsQuiet(load_id))  # none was ever posted

    def _advance(self, load_id: str) -> None:
        """One step of a load's reads, and what the machine must hear of it."""
        reads = self._reads[load_id]
        was_reading = reads.phase is Phase.READING
        phase = reads.step()
        if was_reading and phase is Phase.DONE:
            if load_id in self._loads:
                self._loads[load_id].done_at = boottime()
            self._handle(machine.ReadsDone(load_id))
        elif was_reading and phase is Phase.FAILED:
            self._handle(machine.ReadsFailed(load_id, reads.reason))
            if reads.lost_peer is not None:
                self._peer_lost(reads.lost_peer, reads.reason)
        if phase is not Phase.READING and reads.quiet():
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
                self._forget(address)
                self._handle(machine.PeerFailed(address, f"a worker of {address} is gone: {reason}", lost=True))

    def _report(self, report: machine.Report) -> None:
        load = self._loads.pop(report.load_id)
        now = boottime()
        posted_at = load.posted_at if load.posted_at is not None else now
        self._results.append(
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

    def _begin_handshake(self, address: str, engine_id: str) -> None:
        """Until it has ended well, loads go on under an earlier handshake with the same address, if there is one."""
        self._hello_seq += 1
        hello = messages.Hello(
            version=messages.PROTOCOL_VERSION,
            engine_id=engine_id,
            incarnation=self._incarnation,
            seq=self._hello_seq,
        )
        self._handshakes[address] = _Handshake(engine_id, self._hello_seq, boottime() + self._leases.handshake_s)
        try:
            self.endpoint.dial(address, self.key_of(address))
        except AddressError as error:
            self._fail_handshake(address, str(error))
            return
        self.send(address, hello)

    def _finish_handshake(self, address: str, message: messages.Record) -> None:
        handshake = self._handshakes.get(address)
        if handshake is None or handshake.seq != message.seq:
            self.counters["late_records"] += 1
            return
        try:
            record = records.decode_engine(message.payload)
            _check_identity(handshake.engine_id, message, record)
            producer = peers.shake_hands(self._side, record, address)
        except Exception as error:
            # Whatever a peer's record makes us do, its loads end with a reason.
            self._fail_handshake(address, f"{type(error).__name__}: {error}")
            return
        self._forget(address)
        self._producers[address] = producer
        for source in producer.sources:
            self.learn_key(source.worker.control_address, source.worker.control_key_id)
        self.counters["handshakes"] += 1
        self._handle(machine.PeerReady(address, message.incarnation, producer.topology_digest))

    def _refused_handshake(self, address: str, message: messages.Refused) -> None:
        handshake = self._handshakes.get(address)
        if handshake is not None and handshake.seq == message.seq:
            self._fail_handshake(address, f"refused by the producer: {message.reason}: {message.detail}")

    def _fail_handshake(self, address: str, reason: str) -> None:
        if self._handshakes.pop(address, None) is not None:
            reason = messages.shorten(reason)
            self.counters["failed_handshakes"] += 1
            logger.warning("kvferry: handshake with %s failed: %s", address, reason)
            self._handle(machine.PeerFailed(address, f"handshake with {address}: {reason}", lost=False))

    def _forget(self, address: str) -> None:
        """The producer at this address is not what it was; its reads end through the machine."""
        self._handshakes.pop(address, None)
        if (producer := self._producers.pop(address, None)) is not None:
            self._retired.append(producer)

    def _disconnect_retired(self) -> None:
        """A peer is let go only when no read of ours uses it any more."""
        busy = {id(peer) for reads in self._reads.values() for peer in reads.peers()}
        for producer in list(self._retired):
            if not any(id(source.peer) in busy for source in producer.sources):
                peers.disconnect(producer.sources)
                self._retired.remove(producer)


def _check_identity(asked_for: str, message: messages.Record, record: EngineRecord) -> None:
    """An engine answers for itself alone. Raises BadRecord naming both values."""
    if not asked_for == message.engine_id == record.engine_id:
        raise BadRecord(
            f"engine {asked_for} was asked for, {message.engine_id} answered with {record.engine_id}'s record"
        )
    if message.incarnation != record.incarnation:
        raise BadRecord(f"incarnation {message.incarnation} answered with the record of {record.incarnation}")
