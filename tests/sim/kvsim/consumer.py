"""The consumer's side: a scheduler with the real ConsumerEngine, workers with real Loaders, and their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from kvferry.protocol.consumer import Arrived, ClaimLost, ConsumerEngine, Over, PeerLost
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.events import Note, Received, Send
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import (
    AbandonReads,
    Cancel,
    Connect,
    Load,
    Loader,
    PeerFailed,
    PeerReady,
    PostReads,
    Quieted,
    ReadsDone,
    ReadsFailed,
    ReadsQuiet,
    Report,
    Start,
)
from kvferry.protocol.messages import Message, Outcome
from kvsim.producer import TOKENS_PER_BLOCK, TOPOLOGY, Params, Producer, RealClaim, digest_of
from kvsim.world import EPSILON_S, Driver, Link, Process, Weather, World, check


@dataclass(frozen=True)
class Habits:
    """How this consumer's transports and handshakes behave. Probabilities per load; slow_read_s: from, to."""

    slow_read: float = 0.0
    slow_read_s: tuple[float, float] = (0.0, 0.0)
    read_fails: float = 0.0
    wrong_topology: float = 0.0
    silent_handshake: float = 0.0


class Setting(NamedTuple):
    leases: Leases
    weather: Weather
    habits: Habits


@dataclass(frozen=True)
class Ask:
    """A second leg. fate: load, unused (nothing is needed), abort_queued or abort_loading (after `abort_s`)."""

    params: Params
    prompt: str  # what the request really asks for
    queue_s: float
    fate: str
    abort_s: float = 0.0


@dataclass
class Request:
    """state: queued, loading, accepted, failed, unused. The last three are ends."""

    claim_id: str
    ask: Ask
    state: str = "queued"
    reason: str = ""
    blocks: tuple[int, ...] = ()
    reports: dict[int, bool] = field(default_factory=dict)
    unquiet: set[int] = field(default_factory=set)
    num_lost: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in ("accepted", "failed", "unused")


@dataclass
class LoadTruth:
    load: Load
    request: Request
    started_at: float  # on the worker's clock
    read: Read | None = None
    is_reported: bool = False
    is_quiet: bool = False


class Read:
    """A load's reads under way: each block is sampled once and lands once, both some time before the end."""

    def __init__(self, worker: Worker, truth: LoadTruth, rng: Random) -> None:
        self._worker, self._truth, self._rng = worker, truth, rng
        habits, world = worker.consumer.habits, worker.world
        is_slow = rng.random() < habits.slow_read
        duration_s = rng.uniform(*(habits.slow_read_s if is_slow else (0.0, 0.03)))
        self.ends_at = world.now + duration_s
        self.can_land = True
        self._has_failed = False
        self._is_abandoned = False
        self._life = worker.life
        for index in range(len(truth.request.blocks)):
            sampled_at = world.now + duration_s * rng.random()
            world.at(sampled_at, lambda index=index: self._sample(index))
        if rng.random() < habits.read_fails:
            world.at(world.now + duration_s * rng.random(), lambda: self._fail("the transport failed"))
        world.at(self.ends_at, self._end)

    @property
    def _is_running(self) -> bool:
        return self.can_land and self._worker.life == self._life

    def _sample(self, index: int) -> None:
        if not self._is_running:
            return
        params = self._truth.request.ask.params
        producer = self._worker.consumer.producers[params.address]
        if not producer.is_alive or producer.incarnation != params.ref.incarnation:
            self._fail("the peer's memory is gone")
            return
        content = producer.memory.get(params.blocks[index], "out of bounds")
        self._worker.world.at(
            self._rng.uniform(self._worker.world.now, self.ends_at), lambda: self._land(index, content)
        )

    def _land(self, index: int, content: str) -> None:
        if self._is_running:
            self._worker.land(self._truth, index, content)

    def _fail(self, reason: str) -> None:
        if not self._is_running or self._has_failed:
            return
        self._has_failed = True
        self._tell(ReadsFailed(self._truth.load.load_id, reason))
        if self._rng.random() < 0.3:  # nothing else was posted
            self._stop(ReadsQuiet(self._truth.load.load_id))

    def abandon(self) -> None:
        self._is_abandoned = True
        if self.can_land and self._rng.random() < 0.5:  # it can be cancelled, within a while
            self._worker.world.after(self._rng.uniform(0.0, 0.2), self._cancelled)

    def _cancelled(self) -> None:
        if self._is_running:
            self._stop(ReadsQuiet(self._truth.load.load_id))

    def _end(self) -> None:
        if not self._is_running:
            return
        load_id = self._truth.load.load_id
        if self._has_failed or (self._is_abandoned and self._rng.random() < 0.5):
            self._stop(ReadsQuiet(load_id))
        else:
            self._stop(ReadsDone(load_id))

    def _stop(self, event: ReadsQuiet | ReadsDone) -> None:
        self.can_land = False
        self._tell(event)

    def _tell(self, event: object) -> None:
        self._worker.do(lambda: self._worker.driver.feed(event))


class Worker(Process):
    """One rank."""

    def __init__(self, consumer: Consumer, rank: int) -> None:
        super().__init__(consumer.world, f"{consumer.name}r{rank}")
        self.consumer = consumer
        self.rank = rank
        self._rng = self.world.rng(f"worker {self.name}")
        self.start()

    def start(self) -> None:
        self.revive()
        consumer = self.consumer
        self.loader = Loader(consumer.name, consumer.incarnation, self.rank, consumer.num_ranks, consumer.leases)
        self.driver = Driver(self, self.loader, self._act)
        self.memory: dict[int, str] = {}
        self.loads: dict[str, LoadTruth] = {}
        self.links: dict[str, Link] = {}

    def begin(self, load: Load, request: Request) -> None:
        self.loads[load.load_id] = LoadTruth(load, request, self.clock())
        self.driver.feed(Start(load))

    def lose(self, address: str) -> None:
        self.do(lambda: self.driver.feed(PeerFailed(address, "connection lost")))

    def land(self, truth: LoadTruth, index: int, content: str) -> None:
        block = truth.request.blocks[index]
        owner = self.consumer.owners.get(block)
        check(owner is truth.request, "rule 1", f"a read of {truth.load.load_id} lands in block {block} of {owner}")
        self.memory[block] = content

    def holds_bytes_of(self, request: Request) -> bool:
        wanted = [f"{request.ask.prompt}/{index}" for index in range(len(request.blocks))]
        return [self.memory.get(block) for block in request.blocks] == wanted

    # What the machine says

    def _act(self, action: object) -> None:
        match action:
            case Connect(address, engine_id):
                self._handshake(address, engine_id)
            case PostReads(load_id):
                truth = self.loads[load_id]
                check(truth.read is None, "report once", f"{load_id} posts twice")
                truth.read = Read(self, truth, self._rng)
            case AbandonReads(load_id):
                read = self.loads[load_id].read
                assert read is not None
                read.abandon()
            case Send(to, message):
                self.consumer.link(self, self.links, to, self._receive).to_server(message)
            case Report():
                self._report(action)
            case Quieted(load_id):
                self._quieted(load_id)
            case Note(name, _):
                self.consumer.notes[name] += 1

    def _receive(self, event: Received) -> None:
        self.driver.feed(event)

    def _handshake(self, address: str, engine_id: str) -> None:
        habits, rng, producer = self.consumer.habits, self._rng, self.consumer.producers[address]
        if rng.random() < habits.silent_handshake:
            return
        topology = b"another topology" if rng.random() < habits.wrong_topology else TOPOLOGY

        def answer() -> None:
            if not producer.is_alive:
                self.driver.feed(PeerFailed(address, "no such peer", lost=rng.random() < 0.5))
            elif producer.name != engine_id:
                self.driver.feed(PeerFailed(address, f"{engine_id} is not here", lost=False))
            else:
                self.driver.feed(PeerReady(address, producer.incarnation, topology))

        self.later(rng.uniform(0.01, 0.05), answer)

    def _report(self, report: Report) -> None:
        truth, now = self.loads[report.load_id], self.clock()
        check(not truth.is_reported, "report once", f"{report.load_id} is reported again: {report}")
        truth.is_reported = True
        latest = max(truth.started_at + self.consumer.leases.load_s, self.resumed_at)
        check(now <= latest + EPSILON_S, "deadline", f"{report.load_id} took {now - truth.started_at:.3f} s")
        if report.ok:
            check(report.quiet, "rule 4", f"{report.load_id} is accepted while it still reads")
            contents = [self.memory.get(block) for block in truth.request.blocks]
            check(self.holds_bytes_of(truth.request), "rule 2", f"{report.load_id} accepts {contents}")
        if report.quiet:
            self._check_quiet(truth)
        request, rank = truth.request, self.rank
        self.consumer.ipc(lambda: self.consumer.on_report(request, rank, report))

    def _quieted(self, load_id: str) -> None:
        truth = self.loads[load_id]
        check(truth.is_reported and not truth.is_quiet, "report once", f"{load_id} is quiet again")
        self._check_quiet(truth)
        self.consumer.ipc(lambda: self.consumer.on_quiet(truth.request, self.rank))

    def _check_quiet(self, truth: LoadTruth) -> None:
        truth.is_quiet = True
        can_land = truth.read is not None and truth.read.can_land
        check(not can_land, "rule 1", f"{truth.load.load_id} is called quiet, and can still land")

    def check_end(self) -> None:
        for load_id, truth in self.loads.items():
            check(truth.is_reported and truth.is_quiet, "rule 4", f"{load_id} never ended: {truth}")
        loader = self.loader
        check(loader.num_loads == 0 and not loader._questions, "leak", f"{self.name} still has loads")
        check(len(loader._peers) <= len(self.consumer.producers), "leak", f"peers {loader._peers}")
        check(loader.next_deadline() is None, "leak", f"{self.name} still waits for something")


class Consumer(Process):
    """The scheduler's process; its workers live and die with it."""

    def __init__(
        self,
        world: World,
        name: str,
        setting: Setting,
        num_ranks: int,
        producers: dict[str, Producer],
        claims: dict[str, RealClaim],
    ) -> None:
        """producers: by address; claims: see Producer."""
        super().__init__(world, name)
        self.leases, self.weather, self.habits = setting
        self.num_ranks, self.producers, self.claims = num_ranks, producers, claims
        self.notes: Counter[str] = Counter()
        self.ended: list[Request] = []
        self._num_requests = 0
        self._rng = world.rng(f"consumer {name}")
        self._start_scheduler()
        self.workers = [Worker(self, rank) for rank in range(num_ranks)]

    def _start_scheduler(self) -> None:
        self.revive()
        self.incarnation = f"{self.name}-life{self.life}"
        self.engine = ConsumerEngine(self.name, self.incarnation, self.leases)
        self.driver = Driver(self, self.engine, self._act)
        self.owners: dict[int, Request] = {}
        self.free = list(range(12))
        self.requests: dict[str, Request] = {}
        self.links: dict[str, Link] = {}

    def crash_all(self) -> None:
        for process in (self, *self.workers):
            process.crash()

    def start_all(self) -> None:
        self._start_scheduler()
        for worker in self.workers:
            worker.start()

    def link(self, client: Process, links: dict[str, Link], address: str, deliver: Callable[[Received], None]) -> Link:
        if address not in links:
            rng = self.world.rng(f"link {client.name} {client.life} {address}")
            links[address] = Link(client, deliver, self.producers[address], address, self.weather, rng)
        return links[address]

    def ipc(self, work: Callable[[], None]) -> None:
        """From a worker to the scheduler, in order."""
        self.later(0.001, work)

    # Requests

    def ask(self, ask: Ask) -> None:
        self.do(lambda: self._arrive(ask))

    def _arrive(self, ask: Ask) -> None:
        self._num_requests += 1
        claim_id = f"{self.name}-{self._num_requests}"
        self.claims[claim_id] = RealClaim(ask.params.ref, self.num_ranks)
        request = self.requests[claim_id] = Request(claim_id, ask)
        self.driver.feed(Arrived(claim_id, ask.params.ref, ask.params.address, self.num_ranks))
        self.later(ask.queue_s, lambda: self._leave_queue(request, tries=200))

    def _leave_queue(self, request: Request, tries: int) -> None:
        if request.is_over:
            return
        if request.ask.fate in ("unused", "abort_queued"):
            self._end(request, "unused", "unused", request.ask.fate)
        elif len(self.free) >= len(request.ask.params.blocks):
            self._load(request)
        elif tries:
            self.later(0.05, lambda: self._leave_queue(request, tries - 1))
        else:
            self._end(request, "unused", "unused", "no free blocks")

    def _load(self, request: Request) -> None:
        request.state = "loading"
        request.blocks = tuple(self.free.pop() for _ in request.ask.params.blocks)
        self.owners.update(dict.fromkeys(request.blocks, request))
        for worker in self.workers:
            worker.later(self._rng.uniform(0.0, 0.005), lambda worker=worker: self._begin(worker, request))
        if request.ask.fate == "abort_loading":
            self.later(request.ask.abort_s, lambda: self._cancel(request, "aborted"))

    def _begin(self, worker: Worker, request: Request) -> None:
        params, prompt = request.ask.params, request.ask.prompt
        worker.memory.update(dict.fromkeys(request.blocks, "junk"))
        num_blocks = len(params.blocks)
        load = Load(
            load_id=f"{request.claim_id}.{worker.rank}",
            claim_id=request.claim_id,
            ref=params.ref,
            address=params.address,
            num_tokens=num_blocks * TOKENS_PER_BLOCK,
            digest=digest_of(prompt, num_blocks),
            blocks_digest=blocks_digest([params.blocks]),
        )
        if self._rng.random() < self.habits.read_fails / 4:
            load = replace(load, refused="the plan can't be made")
        worker.begin(load, request)

    def _cancel(self, request: Request, reason: str) -> None:
        if request.state == "loading":
            for worker in self.workers:
                load_id = f"{request.claim_id}.{worker.rank}"
                worker.later(0.006, lambda worker=worker, load_id=load_id: worker.driver.feed(Cancel(load_id, reason)))

    def on_report(self, request: Request, rank: int, report: Report) -> None:
        request.reports[rank] = report.ok
        if not report.ok:
            request.reason = request.reason or report.reason
            if not report.quiet:
                request.unquiet.add(rank)
            if self._rng.random() < 0.5:
                self._cancel(request, f"rank {rank} failed")
        if len(request.reports) < self.num_ranks:
            return
        if all(request.reports.values()):
            for worker in self.workers:
                check(worker.holds_bytes_of(request), "rule 4", f"{request.claim_id} is accepted with wrong bytes")
            self._end(request, "accepted", "done", "")
        else:
            self._end(request, "failed", "failed", request.reason)

    def on_quiet(self, request: Request, rank: int) -> None:
        request.unquiet.discard(rank)
        if request.is_over:
            self._give_back(request)

    def _end(self, request: Request, state: str, outcome: Outcome, reason: str) -> None:
        request.state, request.reason = state, reason
        self.ended.append(request)
        self.driver.feed(Over(request.claim_id, outcome, reason))
        if state == "accepted":
            self.later(self._rng.uniform(0.0, 0.5), lambda: self._give_back(request))
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """Free the blocks, unless a read may still land in them."""
        if request.unquiet:
            return
        for block in request.blocks:
            if self.owners.get(block) is request:
                del self.owners[block]
                self.free.append(block)

    # The machine

    def _act(self, action: Send | ClaimLost | Note) -> None:
        match action:
            case Send(to, message):
                self._send(to, message)
            case ClaimLost(claim_id, reason):
                self._lost(self.requests[claim_id], reason)
            case Note(name, _):
                self.notes[name] += 1

    def _send(self, to: str, message: Message) -> None:
        self.link(self, self.links, to, self.driver.feed).to_server(message)

    def _lost(self, request: Request, reason: str) -> None:
        request.num_lost += 1
        check(request.num_lost == 1, "report once", f"claim {request.claim_id} is lost twice")
        if request.state == "queued":
            self.later(0.0, lambda: self._fail_queued(request, reason))

    def _fail_queued(self, request: Request, reason: str) -> None:
        if request.state == "queued":
            self._end(request, "failed", "failed", reason)

    def lose(self, address: str) -> None:
        self.do(lambda: self.driver.feed(PeerLost(address, "connection lost")))

    def check_end(self) -> None:
        if not self.is_alive:
            return
        for request in self.requests.values():
            check(request.is_over, "rule 4", f"request {request.claim_id} never ended: {request}")
        check(not self.owners, "leak", f"{self.name} never got back {sorted(self.owners)}")
        engine = self.engine
        check(engine.num_claims == 0 and not engine._peers, "leak", f"{self.name} still has claims")
        check(engine.next_deadline() is None, "leak", f"{self.name} still waits for something")
        for worker in self.workers:
            worker.check_end()
