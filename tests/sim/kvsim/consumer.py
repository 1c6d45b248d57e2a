"""The consumer's side: a scheduler with the real ConsumerEngine, workers with real Loaders, and their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.protocol.consumer import Arrived, ClaimLost, ConsumerEngine, Over, PeerLost
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.events import Note, Order, Received, Send
from kvferry.protocol.loader import Cancel, Load, Report
from kvferry.protocol.messages import Message, Outcome
from kvsim.loads import Worker
from kvsim.producer import Producer
from kvsim.prompts import TOKENS_PER_BLOCK, Params, RealClaim, Setting, digest_of
from kvsim.world import Driver, Link, Process, World, check


@dataclass(frozen=True)
class Ask:
    """A second leg. fate: load, unused (nothing is needed), abort_queued or abort_loading (after `abort_s`).

    is_written: by the producer.
    """

    params: Params
    prompt: str  # what the request really asks for
    queue_s: float
    fate: str
    abort_s: float = 0.0
    is_written: bool = False


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
        servers: dict[str, Any],
    ) -> None:
        """producers: by address; claims, servers: see Producer."""
        super().__init__(world, name)
        self.address = f"tcp://{name}"
        self.leases, self.weather, self.habits = setting.leases, setting.weather, setting.habits
        self.num_ranks, self.producers, self.claims, self.servers = num_ranks, producers, claims, servers
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
        for producer in self.producers.values():
            for worker in producer.workers:
                if self._rng.random() < 0.6:
                    worker.later(self._rng.uniform(0.0, 0.5), lambda worker=worker: worker.lose(self.address))

    def start_all(self) -> None:
        self._start_scheduler()
        for worker in self.workers:
            worker.start()

    def link(self, client: Process, links: dict[str, Link], address: str, deliver: Callable[[Received], None]) -> Link:
        if address not in links:
            rng = self.world.rng(f"link {client.name} {client.life} {address}")
            links[address] = Link(client, deliver, self.servers[address], address, self.weather, rng)
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
        elif len(self.free) >= request.ask.params.num_blocks:
            self._load(request)
        elif tries:
            self.later(0.05, lambda: self._leave_queue(request, tries - 1))
        else:
            self._end(request, "unused", "unused", "no free blocks")

    def _load(self, request: Request) -> None:
        request.state = "loading"
        request.blocks = tuple(self.free.pop() for _ in range(request.ask.params.num_blocks))
        self.owners.update(dict.fromkeys(request.blocks, request))
        for worker in self.workers:
            worker.later(self._rng.uniform(0.0, 0.005), lambda worker=worker: self._begin(worker, request))
        if request.ask.fate == "abort_loading":
            self.later(request.ask.abort_s, lambda: self._cancel(request, "aborted"))

    def _begin(self, worker: Worker, request: Request) -> None:
        params, prompt = request.ask.params, request.ask.prompt
        worker.make_room(request)
        num_blocks = params.num_blocks
        num_tokens = num_blocks * TOKENS_PER_BLOCK
        order = Order(self.address, "", 0, num_tokens, (), (request.blocks,)) if request.ask.is_written else None
        load = Load(
            load_id=f"{request.claim_id}.{worker.rank}",
            claim_id=request.claim_id,
            ref=params.ref,
            address=params.address,
            num_tokens=num_tokens,
            digest=digest_of(prompt, num_blocks),
            blocks_digest=b"" if params.blocks is None else blocks_digest([params.blocks]),
            order=order,
            may_read=params.blocks is not None,
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
        stuck = {load.request.claim_id for worker in self.workers for load in worker.stuck_loads()}
        lost = sorted(block for block, request in self.owners.items() if request.claim_id not in stuck)
        check(not lost, "leak", f"{self.name} never got back {lost}")
        engine = self.engine
        check(engine.num_claims == 0 and not engine._peers, "leak", f"{self.name} still has claims")
        check(engine.next_deadline() is None, "leak", f"{self.name} still waits for something")
        for worker in self.workers:
            worker.check_end()
