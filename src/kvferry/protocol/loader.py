"""A consumer rank's loads: claim and read, or have the producer write; prove, report, release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvferry.protocol.events import (
    AbandonReads,
    Cancel,
    Connect,
    Load,
    Note,
    Order,
    PeerFailed,
    PeerReady,
    PeerStale,
    PostReads,
    Quieted,
    ReadsDone,
    ReadsFailed,
    ReadsQuiet,
    Received,
    Report,
    Send,
    SourceRank,
    Start,
    Tick,
    WriterGone,
    WriterLost,
)
from kvferry.protocol.lease import Alarm, Leases
from kvferry.protocol.load import LOADS, Asked, Granted, Job, LoadState, LoadTrigger, Writers
from kvferry.protocol.loader_messages import Reader, cancel_write, claim, release, remote_blocks
from kvferry.protocol.loader_messages import landing as landing_of
from kvferry.protocol.messages import (
    Failed,
    Grant,
    Landing,
    Message,
    Outcome,
    Refused,
    Released,
    WriteDone,
    shorten,
)
from kvferry.protocol.transitions import IllegalTransition

__all__ = [
    "AbandonReads",
    "Action",
    "Cancel",
    "Connect",
    "Event",
    "Load",
    "Loader",
    "Note",
    "Order",
    "PeerFailed",
    "PeerReady",
    "PeerStale",
    "PostReads",
    "Quieted",
    "ReadsDone",
    "ReadsFailed",
    "ReadsQuiet",
    "Received",
    "Report",
    "Send",
    "SourceRank",
    "Start",
    "Tick",
    "WriterGone",
    "WriterLost",
]

Event: TypeAlias = (
    Start
    | PeerReady
    | PeerFailed
    | PeerStale
    | ReadsDone
    | ReadsFailed
    | ReadsQuiet
    | WriterLost
    | WriterGone
    | Cancel
    | Received
    | Tick
)
Action: TypeAlias = Connect | PostReads | AbandonReads | Send | Report | Quieted | Note


LONGEST_CANCEL_S = 60.0
"""Between two cancels of a landing whose writer does not answer."""


@dataclass
class _Peer:
    """A producer's engine. incarnation: None until a handshake is done. connecting_until: None if none is under way.

    connecting_to: the engine id that the handshake under way asks for, as one load has it.
    """

    incarnation: str | None = None
    topology_digest: bytes = b""
    sources: tuple[SourceRank, ...] = ()
    connecting_until: float | None = None
    connecting_to: str = ""


class Loader:
    """Runs the loads of one rank; each is reported exactly once, within `load_s`, or `write_s` if the producer writes.

    A load that is written is accepted when each of its writers has said that it is done: until then the producer has
    kept the blocks, of the prompt that the order named. It is quiet when each has said that nothing can land any more,
    or is proven gone. One that can't write here is read from instead, where its blocks are known.

    A load that is read is accepted when a grant proves that its bytes were held while they were read (rule 2): the
    reads were seen finished early in the lease that the grant gave, counted from when its claim was sent; else the
    producer is asked once more, and a grant for a claim sent after the reads had finished proves it. Answers of
    producers never raise; events of the own process raise IllegalTransition where they make no sense.
    """

    def __init__(self, engine_id: str, incarnation: str, rank: int, num_ranks: int, leases: Leases) -> None:
        self._reader = Reader(engine_id, incarnation, rank, num_ranks)
        self._leases = leases
        self._jobs: dict[str, Job] = {}  # by load id
        self._questions: dict[int, Job] = {}  # by seq of a claim
        self._peers: dict[str, _Peer] = {}  # by address
        self._seq = 0
        self._alarm = Alarm()

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Start(load):
                return self._on_start(load, now)
            case PeerReady():
                return self._on_peer_ready(event, now)
            case PeerFailed():
                return self._on_peer_failed(event, now)
            case PeerStale(address):
                return self._on_peer_stale(address)
            case ReadsDone(load_id):
                return self._on_reads_done(self._job(load_id), now)
            case ReadsFailed(load_id, reason):
                return self._on_reads_failed(self._job(load_id), reason, now)
            case ReadsQuiet(load_id):
                return self._on_reads_quiet(self._job(load_id))
            case WriterLost(address, reason):
                return self._on_writer_lost(address, reason, now)
            case WriterGone(address):
                return self._on_writer_gone(address, now)
            case Cancel(load_id, reason):
                return self._on_cancel(load_id, reason, now)
            case Received(_, message):
                return self._on_message(message, now)
            case Tick():
                return self._on_tick(now)

    def next_deadline(self) -> float | None:
        return self._alarm.at

    @property
    def num_loads(self) -> int:
        """Reported ones that are not quiet yet included."""
        return len(self._jobs)

    @property
    def num_draining(self) -> int:
        return sum(job.is_reported for job in self._jobs.values())

    # Peers

    def _on_start(self, load: Load, now: float) -> list[Action]:
        if load.load_id in self._jobs:
            raise IllegalTransition(f"load {load.load_id} starts twice")
        job = self._jobs[load.load_id] = Job(load, now + self._limit_s(load))
        if load.refused:
            return self._give_up(job, load.refused, now)
        self._alarm.by(job.deadline)
        peer = self._peers.setdefault(load.address, _Peer())
        if peer.incarnation is not None and load.ref.incarnation in ("", peer.incarnation):
            return self._begin(job, peer, now)
        if peer.connecting_until is not None:
            return []
        return [self._connect(peer, load, now)]

    def _limit_s(self, load: Load) -> float:
        return self._leases.load_s if load.order is None else self._leases.write_s

    def _connect(self, peer: _Peer, load: Load, now: float) -> Action:
        peer.connecting_until = now + self._leases.handshake_s
        peer.connecting_to = load.ref.producer
        self._alarm.by(peer.connecting_until)
        return Connect(load.address, load.ref.producer)

    def _on_peer_ready(self, ready: PeerReady, now: float) -> list[Action]:
        peer = self._peers[ready.address] = _Peer(ready.incarnation, ready.topology_digest, ready.sources)
        actions = self._follow_writers(ready, now)
        for job in self._unreported_jobs(ready.address):
            wanted = job.incarnation or job.load.ref.incarnation
            if wanted not in ("", ready.incarnation):
                reason = f"incarnation: the load needs {wanted}, the peer is {ready.incarnation}"
                actions += self._give_up(job, reason, now)
            elif job.state is LoadState.CONNECTING:
                actions += self._begin(job, peer, now)
        return actions

    def _follow_writers(self, ready: PeerReady, now: float) -> list[Action]:
        """Workers of the same engine may have new addresses: what they wrote for us they know, or can close."""
        actions: list[Action] = []
        addresses = {source.rank: source.address for source in ready.sources}
        for job in list(self._jobs.values()):
            if job.writers is None or (job.load.address, job.incarnation) != (ready.address, ready.incarnation):
                continue
            moved = {rank: at for rank, at in addresses.items() if job.writers.addresses.get(rank, at) != at}
            if not moved:
                continue
            job.writers.addresses |= moved
            job.writers.cancels = 0
            if job.state is LoadState.LANDING and moved.keys() & job.writers.waiting:
                actions += self._give_up(job, f"producer rank {min(moved)} has another address now", now)
            else:
                actions += self._settle_writers(job, now)
        return actions

    def _on_peer_stale(self, address: str) -> list[Action]:
        peer = self._peers.get(address)
        if peer is not None and peer.connecting_until is None:
            del self._peers[address]
        elif peer is not None:
            peer.incarnation = None
        return []

    def _on_peer_failed(self, failed: PeerFailed, now: float) -> list[Action]:
        if not failed.lost:
            return self._on_handshake_failed(failed, now)
        self._peers.pop(failed.address, None)
        actions: list[Action] = []
        for job in self._unreported_jobs(failed.address):
            actions += self._give_up(job, failed.reason, now)
        return actions

    def _on_handshake_failed(self, failed: PeerFailed, now: float) -> list[Action]:
        """Fails the loads that named the engine that was asked for; the next one's handshake begins."""
        peer = self._peers.get(failed.address)
        if peer is None or peer.connecting_until is None:
            return []  # none was under way any more
        peer.connecting_until = None
        actions: list[Action] = []
        others: list[Load] = []
        for job in self._unreported_jobs(failed.address):
            if job.state is not LoadState.CONNECTING:
                continue
            if job.load.ref.producer == peer.connecting_to:
                actions += self._give_up(job, failed.reason, now)
            else:
                others.append(job.load)
        if others:
            actions.append(self._connect(peer, others[0], now))
        elif peer.incarnation is None:
            del self._peers[failed.address]
        return actions

    def _unreported_jobs(self, address: str) -> list[Job]:
        return [job for job in self._jobs.values() if job.load.address == address and not job.is_reported]

    # Reads

    def _begin(self, job: Job, peer: _Peer, now: float) -> list[Action]:
        job.topology_digest, job.incarnation = peer.topology_digest, peer.incarnation or ""
        if job.load.order is not None:
            return self._order(job, peer.sources, now)
        return self._read(job, LoadTrigger.READY, now)

    def _read(self, job: Job, trigger: LoadTrigger, now: float) -> list[Action]:
        job.state = LOADS.next(job.state, trigger)
        job.writers = None
        return [self._ask(job, now), PostReads(job.load.load_id)]

    def _on_reads_done(self, job: Job, now: float) -> list[Action]:
        was_reported = job.is_reported
        job.state = LOADS.next(job.state, LoadTrigger.DONE)
        if was_reported:
            return self._quieted(job)
        job.done_at = now
        return self._prove(job, now)

    def _on_reads_failed(self, job: Job, reason: str, now: float) -> list[Action]:
        if job.is_reported:
            job.state = LOADS.next(job.state, LoadTrigger.FAILED)
            return []
        return self._fail(job, LoadTrigger.FAILED, reason, "failed", now)

    def _on_reads_quiet(self, job: Job) -> list[Action]:
        job.state = LOADS.next(job.state, LoadTrigger.QUIET)
        return self._quieted(job)

    def _quieted(self, job: Job) -> list[Action]:
        self._forget(job)
        return [Quieted(job.load.load_id)]

    # Writes

    def _order(self, job: Job, sources: tuple[SourceRank, ...], now: float) -> list[Action]:
        job.state = LOADS.next(job.state, LoadTrigger.ORDER)
        addresses = {source.rank: source.address for source in sources}
        transports = {source.rank: source.transport for source in sources}
        job.writers = Writers(addresses, transports, waiting=set(addresses), unquiet=set(addresses))
        return self._order_again(job, job.writers, now) if addresses else self._accept(job, LoadTrigger.LANDED)

    def _order_again(self, job: Job, writers: Writers, now: float) -> list[Action]:
        """Orders for those that have not reported, whose answer may be lost."""
        order = job.load.order
        if order is None:
            raise IllegalTransition(f"load {job.load.load_id} has no order to write")
        self._set_ask_again(job, now + self._leases.claim_reply_s)
        return [
            Send(writers.addresses[rank], remote_blocks(self._reader, job, order, rank, writers.transports[rank]))
            for rank in sorted(writers.waiting)
        ]

    def _landed_by(self, landing: Landing) -> tuple[Job, Writers] | None:
        """The job that the message is about. None: it is over, or was never ours."""
        job = self._jobs.get(landing.load_id)
        if job is None or job.writers is None or landing.producer_rank not in job.writers.addresses:
            return None
        return (job, job.writers) if landing == landing_of(self._reader, job.load, landing.producer_rank) else None

    def _on_write_done(self, done: WriteDone, now: float) -> list[Action]:
        found = self._landed_by(done.landing)
        if found is None:
            return [Note("stray_answer", f"write done of {done.landing}")]
        job, writers = found
        writers.waiting.discard(done.landing.producer_rank)
        writers.unquiet.discard(done.landing.producer_rank)
        if job.state is LoadState.LANDING:
            return [] if writers.waiting else self._accept(job, LoadTrigger.LANDED)
        return self._settle_writers(job, now)

    def _on_write_failed(self, failed: Failed, now: float) -> list[Action]:
        found = self._landed_by(failed.landing)
        if found is None:
            return [Note("stray_answer", f"write failed of {failed.landing}")]
        job, writers = found
        if failed.quiet:
            writers.unquiet.discard(failed.landing.producer_rank)
        if job.state is not LoadState.LANDING:
            return self._settle_writers(job, now)
        if not (failed.unable and job.load.may_read):
            return self._give_up(job, failed.reason, now)
        job.state = LOADS.next(job.state, LoadTrigger.UNABLE)
        note = Note("reads_instead", f"load {job.load.load_id}: {failed.reason}")
        return [note, *self._settle_writers(job, now)]

    def _settle_writers(self, job: Job, now: float) -> list[Action]:
        """A load that is no longer written: see that its writers become quiet, and go on when they are."""
        if job.writers is None or job.state not in (LoadState.SETTLING, LoadState.DRAINING):
            return []
        if job.writers.unquiet:
            return [] if job.writers.cancels else self._cancel_writers(job, job.writers, now)
        if job.state is LoadState.SETTLING:
            return self._read(job, LoadTrigger.QUIET, now)
        job.state = LOADS.next(job.state, LoadTrigger.QUIET)
        return self._quieted(job)

    def _cancel_writers(self, job: Job, writers: Writers, now: float) -> list[Action]:
        """Again and again, ever more rarely: what may still land stays in quarantine until they answer."""
        writers.cancels += 1
        wait_s = self._leases.claim_reply_s * 2.0 ** min(writers.cancels - 1, 16)
        self._set_ask_again(job, now + min(wait_s, max(LONGEST_CANCEL_S, self._leases.claim_reply_s)))
        actions: list[Action] = [
            Send(writers.addresses[rank], cancel_write(self._reader, job, rank)) for rank in sorted(writers.unquiet)
        ]
        if job.load.address not in self._peers:  # they may have moved
            peer = self._peers[job.load.address] = _Peer()
            actions.append(self._connect(peer, job.load, now))
        return actions

    def _set_ask_again(self, job: Job, at: float) -> None:
        job.ask_again_at = at
        self._alarm.by(at)

    def _written_from(self, address: str) -> list[tuple[Job, Writers, set[int]]]:
        """Jobs, and their writers at this address."""
        found = []
        for job in list(self._jobs.values()):
            if job.writers is not None:
                ranks = {rank for rank, at in job.writers.addresses.items() if at == address}
                found.append((job, job.writers, ranks))
        return [(job, writers, ranks) for job, writers, ranks in found if ranks]

    def _on_writer_lost(self, address: str, reason: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for job, writers, ranks in self._written_from(address):
            if job.state is LoadState.LANDING and ranks & writers.waiting:
                actions += self._give_up(job, reason, now)
        return actions

    def _on_writer_gone(self, address: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for job, writers, ranks in self._written_from(address):
            awaited = ranks & writers.waiting
            writers.unquiet -= ranks
            if job.state is LoadState.LANDING and awaited:
                actions += self._give_up(job, f"the process of producer rank {min(awaited)} is gone", now)
            else:
                actions += self._settle_writers(job, now)
        return actions

    # Claims and their answers

    def _ask(self, job: Job, now: float) -> Action:
        """Claim, or claim again: a question whose answer tells that the transfer is still held."""
        self._seq += 1
        job.asked[self._seq] = Asked(now, job.done_at is not None)
        self._questions[self._seq] = job
        self._set_ask_again(job, now + self._leases.claim_reply_s)
        return Send(job.load.address, claim(self._reader, job, self._seq))

    def _on_message(self, message: Message, now: float) -> list[Action]:
        match message:
            case Grant():
                return self._on_grant(message, now)
            case Refused():
                return self._on_refused(message, now)
            case WriteDone():
                return self._on_write_done(message, now)
            case Failed():
                return self._on_write_failed(message, now)
            case Released():
                return []  # the engine's own release makes sure
        return [Note("unexpected_message", f"{type(message).__name__} at a loader")]

    def _asked_by(self, answer: Grant | Refused) -> Job | None:
        """The job that waits for this answer. None: a late one, or none of ours."""
        job = self._questions.get(answer.seq)
        if job is None or job.is_reported or (answer.claim_id, answer.rank) != (job.load.claim_id, self._reader.rank):
            return None
        return job

    def _on_grant(self, grant: Grant, now: float) -> list[Action]:
        job = self._asked_by(grant)
        if job is None or grant.generation != job.load.ref.generation:
            return [Note("stray_answer", f"grant of claim {grant.claim_id}, seq {grant.seq}")]
        if job.granted is None or job.granted.seq < grant.seq:
            job.granted = Granted(grant.seq, job.asked[grant.seq], grant.lease_s)
        return self._prove(job, now) if job.state is LoadState.PROVING else []

    def _on_refused(self, refused: Refused, now: float) -> list[Action]:
        job = self._asked_by(refused)
        if job is None:
            return [Note("stray_answer", f"refusal of claim {refused.claim_id}, seq {refused.seq}")]
        if refused.reason == "busy":
            job.ask_again_at = now + self._leases.claim_reply_s
            self._alarm.by(job.ask_again_at)
            return [Note("claim_busy", f"claim {refused.claim_id}: {refused.detail}")]
        return self._give_up(job, f"{refused.reason}: {refused.detail}", now)

    def _prove(self, job: Job, now: float) -> list[Action]:
        """The reads are done: accept them if a grant proves them, else see that a question about it is under way."""
        if job.is_proven(self._leases):
            return self._accept(job, LoadTrigger.PROVEN)
        if job.granted is None or job.asked_after_reads:
            return []
        return [self._ask(job, now)]

    # Time

    def _on_tick(self, now: float) -> list[Action]:
        if not self._alarm.is_due(now):
            return []
        actions: list[Action] = []
        for address, peer in list(self._peers.items()):
            if peer.connecting_until is not None and peer.connecting_until <= now:
                reason = f"handshake: no answer in {self._leases.handshake_s} s"
                actions += self._on_peer_failed(PeerFailed(address, reason, lost=False), now)
        for job in list(self._jobs.values()):
            actions += self._on_job_tick(job, now)
        self._set_alarm()
        return actions

    def _on_job_tick(self, job: Job, now: float) -> list[Action]:
        actions: list[Action] = []
        if not job.is_reported and job.deadline <= now:
            actions = self._give_up(job, f"deadline: {job.state.value} after {self._limit_s(job.load)} s", now)
        if job.asks_again and job.ask_again_at <= now:
            actions += self._ask_again(job, now)
        return actions

    def _ask_again(self, job: Job, now: float) -> list[Action]:
        if job.writers is None:
            return [self._ask(job, now)]
        if job.state is LoadState.LANDING:
            return self._order_again(job, job.writers, now)
        return self._cancel_writers(job, job.writers, now)

    def _set_alarm(self) -> None:
        self._alarm.clear()
        for peer in self._peers.values():
            if peer.connecting_until is not None:
                self._alarm.by(peer.connecting_until)
        for job in self._jobs.values():
            if job.next_deadline is not None:
                self._alarm.by(job.next_deadline)

    # Ends

    def _accept(self, job: Job, trigger: LoadTrigger) -> list[Action]:
        job.state = LOADS.next(job.state, trigger)
        self._forget(job)
        return [Report(job.load.load_id, ok=True, reason="", quiet=True), self._release(job, "done", "")]

    def _on_cancel(self, load_id: str, reason: str, now: float) -> list[Action]:
        job = self._jobs.get(load_id)
        if job is None or job.is_reported:
            return []  # it was reported while the engine changed its mind
        return self._fail(job, LoadTrigger.GIVE_UP, f"cancelled: {reason}", "unused", now)

    def _give_up(self, job: Job, reason: str, now: float) -> list[Action]:
        return self._fail(job, LoadTrigger.GIVE_UP, reason, "failed", now)

    def _fail(self, job: Job, trigger: LoadTrigger, reason: str, outcome: Outcome, now: float) -> list[Action]:
        load_id, reason = job.load.load_id, shorten(reason)
        is_written = job.state in (LoadState.LANDING, LoadState.SETTLING)
        job.state = LOADS.next(job.state, trigger)
        if is_written and not job.has_unquiet_writers:
            job.state = LOADS.next(job.state, LoadTrigger.QUIET)
        quiet = job.state is LoadState.OVER
        actions: list[Action] = [] if quiet or is_written else [AbandonReads(load_id)]
        actions += [Report(load_id, ok=False, reason=reason, quiet=quiet), self._release(job, outcome, reason)]
        if quiet:
            self._forget(job)
        elif is_written:
            actions += self._settle_writers(job, now)
        return actions

    def _release(self, job: Job, outcome: Outcome, reason: str) -> Action:
        self._seq += 1
        return Send(job.load.address, release(self._reader, job.load, self._seq, outcome, reason))

    def _forget(self, job: Job) -> None:
        del self._jobs[job.load.load_id]
        for seq in job.asked:
            del self._questions[seq]

    def _job(self, load_id: str) -> Job:
        """Raises IllegalTransition for a load that never started or is over."""
        try:
            return self._jobs[load_id]
        except KeyError:
            raise IllegalTransition(f"load {load_id} never started, or is over") from None
