"""A producer rank's writes for consumer ranks: asked for, allowed by its own engine, done, and closed."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

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
from kvferry.protocol.lease import Alarm, Leases
from kvferry.protocol.messages import (
    CancelWrite,
    CloseWrite,
    Failed,
    Landing,
    Message,
    OpenWrite,
    Refused,
    RemoteBlocks,
    StopWrite,
    WriteClosed,
    WriteDone,
    WriteOpened,
    shorten,
)
from kvferry.protocol.transitions import IllegalTransition, Table

__all__ = ["JOBS", "Action", "Event", "JobState", "JobTrigger", "Writer"]

Event: TypeAlias = PeerReady | PeerFailed | PeerStale | WritesDone | WritesFailed | WritesQuiet | Received | Tick
Action: TypeAlias = Connect | BeginWrites | AbandonWrites | Send | Note


FIRST_SEQ = 1 << 40
"""Above what a loader of the same process asks with, so that one can tell whose question an answer is for."""
MAX_JOBS = 8192
MAX_JOBS_PER_ROUTE = 2048
MAX_BLOCK_IDS = 1 << 22
"""Of all orders. What comes beyond these limits is let fall: who ordered it asks again."""
LONGEST_ASK_S = 30.0
"""Between two times that the own engine is asked the same; an open landing's route to it is kept alive so."""


class JobState(Enum):
    OPENING = "opening"
    WRITING = "writing"
    DRAINING = "draining"
    CLOSING = "closing"
    OVER = "over"


class JobTrigger(Enum):
    BEGIN = "allowed, and the peer is ready"
    DONE = "writes done"
    FAILED = "writes failed"
    QUIET = "writes quiet"
    GIVE_UP = "refused, cancelled, stopped or the peer is lost"
    CLOSED = "its own engine knows"


JOBS = Table(
    "write",
    JobState.OPENING,
    {
        (JobState.OPENING, JobTrigger.BEGIN): JobState.WRITING,
        (JobState.OPENING, JobTrigger.GIVE_UP): JobState.CLOSING,
        (JobState.WRITING, JobTrigger.DONE): JobState.CLOSING,
        (JobState.WRITING, JobTrigger.FAILED): JobState.DRAINING,
        (JobState.WRITING, JobTrigger.GIVE_UP): JobState.DRAINING,
        (JobState.DRAINING, JobTrigger.FAILED): JobState.DRAINING,
        (JobState.DRAINING, JobTrigger.DONE): JobState.CLOSING,
        (JobState.DRAINING, JobTrigger.QUIET): JobState.CLOSING,
        (JobState.CLOSING, JobTrigger.CLOSED): JobState.OVER,
    },
)


@dataclass
class _Job:
    """One landing. route: where its consumer hears of it. order: None if only a cancel ever came.

    seq, asks, ask_again_at: of what is asked of the own engine, OpenWrite or CloseWrite. done: if all was written in
    time; failure: else, why not.
    """

    landing: Landing
    route: Route
    order: RemoteBlocks | None
    state: JobState = JOBS.start
    opened: WriteOpened | None = None
    seq: int = 0
    asks: int = 0
    ask_again_at: float = math.inf
    done: WriteDone | None = None
    failure: str = ""
    unable: bool = False

    @property
    def num_block_ids(self) -> int:
        return sum(map(len, self.order.block_ids)) if self.order is not None else 0

    @property
    def failed(self) -> Failed:
        """As it stands now. Only what is closed can never be opened again."""
        quiet = self.state is JobState.OVER
        return Failed(landing=self.landing, reason=shorten(self.failure), quiet=quiet, unable=self.unable)


class Writer:
    """Runs the landings of one producer rank.

    Nothing is posted before the own engine has allowed it, so that it keeps the blocks meanwhile; nothing is called
    quiet before the own engine knows that it is closed, so that no late message can open it again. Messages of peers
    never raise; events of the own process raise IllegalTransition where they make no sense. `Connect` is always
    answered, by PeerReady or PeerFailed.
    """

    def __init__(
        self,
        rank: int,
        incarnation: str,
        rendezvous: str,
        leases: Leases,
        home: str = "",
        unquiet: frozenset[Landing] = frozenset(),
    ) -> None:
        """rendezvous: address of the own engine's; home: see OpenWrite. unquiet: landings that an earlier writer of
        this rank could not end; nobody can say any more when they are."""
        self._rank = rank
        self._incarnation = incarnation
        self._rendezvous = rendezvous
        self._leases = leases
        self._home = home
        self._unquiet = unquiet
        self._jobs: dict[Landing, _Job] = {}
        self._over: OrderedDict[Landing, _Job] = OrderedDict()
        self._questions: dict[int, _Job] = {}  # by seq
        self._ready: dict[str, str] = {}  # incarnation by address
        self._connecting: dict[str, str] = {}  # the engine asked for, by address
        self._routes: Counter[Route] = Counter()  # jobs of each
        self._num_block_ids = 0
        self._seq = FIRST_SEQ
        self._alarm = Alarm()

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Received(route, message):
                return self._on_message(route, message, now)
            case PeerReady(address, incarnation):
                return self._on_peer_ready(address, incarnation, now)
            case PeerFailed():
                return self._on_peer_failed(event, now)
            case PeerStale(address):
                return self._on_peer_stale(address)
            case WritesDone():
                return self._on_writes_done(event, now)
            case WritesFailed(landing, reason, unable):
                return self._on_writes_failed(self._job(landing), reason, unable)
            case WritesQuiet(landing):
                return self._close(self._job(landing), JobTrigger.QUIET, now)
            case Tick():
                return self._on_tick(now)

    def next_deadline(self) -> float | None:
        return self._alarm.at

    @property
    def num_jobs(self) -> int:
        """Those that are not over."""
        return len(self._jobs)

    # Messages

    def _on_message(self, route: Route, message: Message, now: float) -> list[Action]:
        match message:
            case RemoteBlocks():
                return self._on_remote_blocks(route, message, now)
            case CancelWrite():
                return self._on_cancel(route, message, now)
            case WriteOpened():
                return self._on_opened(message)
            case Refused():
                return self._on_refused(message, now)
            case StopWrite(landing, reason):
                return self._on_stop(landing, reason, now)
            case WriteClosed():
                return self._on_closed(message)
        return [Note("unexpected_message", f"{type(message).__name__} at a writer")]

    def _on_remote_blocks(self, route: Route, order: RemoteBlocks, now: float) -> list[Action]:
        if not self._is_mine(order.landing, order.producer_incarnation):
            return [Note("stray_order", self._stray(order.landing, order.producer_incarnation))]
        known = self._find(order.landing, route)
        if known is not None:
            return self._again(known)
        job = _Job(order.landing, route, order)
        if (no := self._why_not_taken(job)) is not None:
            return no
        self._add(job)
        return [self._ask(job, now), *self._connect_for(order)]

    def _why_not_taken(self, job: _Job) -> list[Action] | None:
        """None: it is taken."""
        if job.landing in self._unquiet:
            job.failure = "an earlier writer of this rank could not end it"
            return [Note("unquiet_landing", f"{job.landing}: {job.failure}"), Send(job.route, job.failed)]
        most = (len(self._jobs) >= MAX_JOBS, self._routes[job.route] >= MAX_JOBS_PER_ROUTE)
        if any(most) or self._num_block_ids + job.num_block_ids > MAX_BLOCK_IDS:
            return [Note("too_many_orders", f"{len(self._jobs)} landings, {self._num_block_ids} block ids")]
        return None

    def _add(self, job: _Job) -> None:
        self._jobs[job.landing] = job
        self._routes[job.route] += 1
        self._num_block_ids += job.num_block_ids

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.landing]
        self._num_block_ids -= job.num_block_ids
        self._leave_route(job)

    def _leave_route(self, job: _Job) -> None:
        self._routes[job.route] -= 1
        if not self._routes[job.route]:
            del self._routes[job.route]

    def _connect_for(self, order: RemoteBlocks) -> list[Action]:
        if self._ready.get(order.address) == order.incarnation or order.address in self._connecting:
            return []
        self._connecting[order.address] = order.engine_id
        return [Connect(order.address, order.engine_id, order.key_id)]

    def _on_cancel(self, route: Route, cancel: CancelWrite, now: float) -> list[Action]:
        landing = cancel.landing
        if not self._is_mine(landing, cancel.producer_incarnation):
            return [Note("stray_order", self._stray(landing, cancel.producer_incarnation))]
        job = self._find(landing, route)
        if job is None:  # its order may still be on the way
            job = _Job(landing, route, None)
            if (no := self._why_not_taken(job)) is not None:
                return no
            self._add(job)
        if job.state in (JobState.OPENING, JobState.WRITING):
            return self._give_up(job, "cancelled by the consumer", now)
        return self._again(job)

    def _find(self, landing: Landing, route: Route) -> _Job | None:
        job = self._jobs.get(landing)
        if job is not None and job.route != route:
            self._leave_route(job)
            self._routes[route] += 1
        job = job or self._over.get(landing)
        if job is not None:
            job.route = route
        return job

    def _again(self, job: _Job) -> list[Action]:
        """The answer that may have been lost, if there is one yet."""
        if job.done is not None:
            return [Send(job.route, job.done)]
        return [Send(job.route, job.failed)] if job.failure else []

    def _is_mine(self, landing: Landing, incarnation: str) -> bool:
        return (landing.producer_rank, incarnation) == (self._rank, self._incarnation)

    def _stray(self, landing: Landing, incarnation: str) -> str:
        return f"meant for rank {landing.producer_rank} of {incarnation}, this is {self._rank} of {self._incarnation}"

    # What the own engine says

    def _ask(self, job: _Job, now: float) -> Action:
        """Ask the own engine for what this job needs from it, that it is opened or closed; the same question again has
        the same number."""
        if not job.seq:
            job.seq = self._next_seq()
            self._questions[job.seq] = job
        longest_s = max(LONGEST_ASK_S, self._leases.claim_reply_s)
        job.ask_again_at = now + min(longest_s, self._leases.claim_reply_s * 2.0 ** min(job.asks, 8))
        job.asks += 1
        self._alarm.by(job.ask_again_at)
        if job.state is JobState.CLOSING or job.order is None:
            return Send(self._rendezvous, self._close_write(job.landing, job.seq))
        order = job.order
        ask = OpenWrite(
            landing=job.landing,
            ref=order.ref,
            engine_id=order.engine_id,
            num_ranks=order.num_ranks,
            seq=job.seq,
            num_tokens=order.num_tokens,
            digest=order.digest,
            topology_digest=order.topology_digest,
            home=self._home,
        )
        return Send(self._rendezvous, ask)

    def _on_opened(self, opened: WriteOpened) -> list[Action]:
        job = self._jobs.get(opened.landing)
        if job is None or job.state is not JobState.OPENING or self._questions.get(opened.seq) is not job:
            return []  # it has closed, or will
        job.opened = opened
        return self._begin_if_ready(job)

    def _begin_if_ready(self, job: _Job) -> list[Action]:
        if job.order is None or job.opened is None or self._ready.get(job.order.address) != job.order.incarnation:
            return []
        job.state = JOBS.next(job.state, JobTrigger.BEGIN)
        return [BeginWrites(job.order, job.opened.transfer_id, job.opened.block_ids)]

    def _on_refused(self, refused: Refused, now: float) -> list[Action]:
        job = self._questions.get(refused.seq)
        if job is None or job.state is not JobState.OPENING or job.opened is not None:
            return []
        if (refused.claim_id, refused.rank) != (job.landing.claim_id, job.landing.rank):
            return []
        if refused.reason == "busy":
            return [Note("write_busy", f"claim {refused.claim_id}: {refused.detail}")]  # asks again by itself
        return self._give_up(job, f"{refused.reason}: {refused.detail}", now)

    def _on_stop(self, landing: Landing, reason: str, now: float) -> list[Action]:
        job = self._jobs.get(landing)
        if job is None:  # over, and the engine hasn't heard
            if landing in self._unquiet:
                return []
            return [Send(self._rendezvous, self._close_write(landing, self._next_seq()))]
        return self._give_up(job, reason, now) if job.state in (JobState.OPENING, JobState.WRITING) else []

    def _on_closed(self, closed: WriteClosed) -> list[Action]:
        job = self._jobs.get(closed.landing)
        if job is None or job.state is not JobState.CLOSING:
            return []
        job.state = JOBS.next(job.state, JobTrigger.CLOSED)
        self._remove(job)
        del self._questions[job.seq]
        job.ask_again_at = math.inf
        job.order = job.opened = None  # block ids are large
        self._over[job.landing] = job
        if len(self._over) > self._leases.max_remembered:
            self._over.popitem(last=False)
        return [] if job.done is not None else [Send(job.route, job.failed)]

    # The consumer's engine

    def _on_peer_ready(self, address: str, incarnation: str, now: float) -> list[Action]:
        self._connecting.pop(address, None)
        self._ready[address] = incarnation
        actions: list[Action] = []
        for job, order in self._jobs_at(address):
            if job.state is not JobState.OPENING:
                continue
            if order.incarnation != incarnation:
                reason = f"incarnation: the order is from {order.incarnation}, the peer is {incarnation}"
                actions += self._give_up(job, reason, now)
            else:
                actions += self._begin_if_ready(job)
        return actions

    def _on_peer_failed(self, failed: PeerFailed, now: float) -> list[Action]:
        """lost: what is being written must stop, since nobody would hear of it. Else only a handshake has failed: this
        rank can't write to the engine that it asked for. Orders of others at that address get one of their own."""
        asked_for = self._connecting.pop(failed.address, None)
        if failed.lost:
            self._ready.pop(failed.address, None)
        actions: list[Action] = []
        for job, order in self._jobs_at(failed.address):
            waits = job.state is JobState.OPENING and self._ready.get(failed.address) != order.incarnation
            if waits and not failed.lost and order.engine_id != asked_for:
                actions += self._connect_for(order)
            elif waits or (failed.lost and job.state is JobState.WRITING):
                job.unable = not failed.lost
                actions += self._give_up(job, failed.reason, now)
        return actions

    def _on_peer_stale(self, address: str) -> list[Action]:
        self._ready.pop(address, None)
        waiting = (order for job, order in self._jobs_at(address) if job.state is JobState.OPENING)
        return [action for order in waiting for action in self._connect_for(order)]

    def _jobs_at(self, address: str) -> list[tuple[_Job, RemoteBlocks]]:
        jobs = list(self._jobs.values())
        return [(job, job.order) for job in jobs if job.order is not None and job.order.address == address]

    # Writes

    def _on_writes_done(self, event: WritesDone, now: float) -> list[Action]:
        job = self._job(event.landing)
        if job.state is JobState.WRITING:
            job.done = WriteDone(
                landing=job.landing,
                num_bytes=event.num_bytes,
                num_descriptors=event.num_descriptors,
                transport=event.transport,
            )
        actions = self._close(job, JobTrigger.DONE, now)
        return [Send(job.route, job.done), *actions] if job.done is not None else actions

    def _on_writes_failed(self, job: _Job, reason: str, unable: bool) -> list[Action]:
        was_draining = job.state is JobState.DRAINING
        job.state = JOBS.next(job.state, JobTrigger.FAILED)
        if was_draining:
            return []
        job.failure, job.unable = reason or "failed", unable
        return [Send(job.route, job.failed)]

    # Time and ends

    def _on_tick(self, now: float) -> list[Action]:
        if not self._alarm.is_due(now):
            return []
        actions = [self._ask(job, now) for job in self._jobs.values() if job.ask_again_at <= now]
        self._alarm.clear()
        for job in self._jobs.values():
            self._alarm.by(job.ask_again_at)
        return actions

    def _give_up(self, job: _Job, reason: str, now: float) -> list[Action]:
        job.failure = reason or "given up"
        if job.state is JobState.OPENING:
            return self._close(job, JobTrigger.GIVE_UP, now)
        job.state = JOBS.next(job.state, JobTrigger.GIVE_UP)
        return [AbandonWrites(job.landing), Send(job.route, job.failed)]

    def _close(self, job: _Job, trigger: JobTrigger, now: float) -> list[Action]:
        job.state = JOBS.next(job.state, trigger)
        self._questions.pop(job.seq, None)
        job.seq = job.asks = 0
        return [self._ask(job, now)]

    def close_all(self, unquiet: frozenset[Landing]) -> list[Action]:
        """The process lets go of everything: the own engine hears of all that is quiet that it is closed."""
        quiet = [landing for landing in self._jobs if landing not in unquiet]
        return [Send(self._rendezvous, self._close_write(landing, self._next_seq())) for landing in quiet]

    def _close_write(self, landing: Landing, seq: int) -> CloseWrite:
        return CloseWrite(landing=landing, seq=seq, home=self._home)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _job(self, landing: Landing) -> _Job:
        """Raises IllegalTransition for a landing that was never begun, or is over."""
        try:
            return self._jobs[landing]
        except KeyError:
            raise IllegalTransition(f"writes of {landing} never began, or are over") from None
