"""The consumer's ranks, with the real Loader and their memory: what they read, and what is written there."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvferry.protocol.events import Note, Received, Send
from kvferry.protocol.loader import (
    AbandonReads,
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
    SourceRank,
    Start,
    WriterGone,
    WriterLost,
)
from kvferry.protocol.messages import CancelWrite, RemoteBlocks
from kvsim.prompts import LAYERS, TOPOLOGY, Piece, Place, content_of
from kvsim.world import EPSILON_S, Driver, Link, Process, check

if TYPE_CHECKING:
    from kvsim.consumer import Consumer, Request
    from kvsim.writes import Write


@dataclass
class LoadTruth:
    """started_at: on the worker's clock. writers: addresses of the producer ranks that were told to write."""

    load: Load
    request: Request
    started_at: float
    read: Read | None = None
    writes: list[Write] = field(default_factory=list)
    writers: set[str] = field(default_factory=set)
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
            sampled_at = world.now + duration_s * max(rng.random(), rng.random(), rng.random())
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
        blocks = params.blocks or ()
        contents = [producer.memory.get((blocks[index], layer), "out of bounds") for layer in range(LAYERS)]
        self._worker.world.at(
            self._rng.uniform(self._worker.world.now, self.ends_at), lambda: self._land(index, contents)
        )

    def _land(self, index: int, contents: list[str]) -> None:
        if self._is_running:
            for layer, content in enumerate(contents):
                self._worker.land(self._truth, (index, layer), content)

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
        self.memory: dict[Place, str] = {}
        self.loads: dict[str, LoadTruth] = {}
        self.links: dict[str, Link] = {}
        self.told_gone: set[str] = set()

    def begin(self, load: Load, request: Request) -> None:
        self.loads[load.load_id] = LoadTruth(load, request, self.clock())
        self.driver.feed(Start(load))

    def lose(self, address: str) -> None:
        self.do(lambda: self.driver.feed(PeerFailed(address, "connection lost")))

    def hear_of_crash(self, addresses: list[str]) -> None:
        """Of a producer's ranks: that their connections are gone, that they are proven gone, or nothing at all."""
        is_lost, is_proven = self._rng.random() < 0.6, self._rng.random() < 0.6
        for address in addresses:
            if is_lost:
                lost = WriterLost(address, "connection lost")
                self.later(self._rng.uniform(0.0, 0.5), lambda lost=lost: self.driver.feed(lost))
            if is_proven and self.is_alive:
                self.told_gone.add(address)
                self._hear_gone(address)

    def _hear_gone(self, address: str) -> None:
        self.later(self._rng.uniform(0.0, 2.0), lambda: self.driver.feed(WriterGone(address)))

    def make_room(self, request: Request) -> None:
        """What was in its blocks means nothing."""
        for block in request.blocks:
            for layer in range(LAYERS):
                self.memory[block, layer] = "junk"

    def land(self, truth: LoadTruth, piece: Piece, content: str) -> None:
        block = truth.request.blocks[piece[0]]
        owner = self.consumer.owners.get(block)
        check(owner is truth.request, "rule 1", f"{content} lands for {truth.load.load_id} in block {block} of {owner}")
        check(not truth.is_quiet, "rule 1", f"{content} lands for {truth.load.load_id}, which is quiet")
        self.memory[block, piece[1]] = content

    def expect(self, order: RemoteBlocks, write: Write) -> int:
        """A producer begins to write. Returns the life of this process whose memory it means; -1 if that is over."""
        if not self.consumer.is_alive or self.consumer.incarnation != order.incarnation:
            return -1
        truth = self.loads.get(order.landing.load_id)
        check(truth is not None, "rule 1", f"{order.landing} is written, and was never asked for")
        assert truth is not None
        check(not truth.is_quiet, "rule 1", f"{order.landing} begins to be written when it is quiet")
        truth.writes.append(write)
        return self.life

    def be_written(self, order: RemoteBlocks, piece: Piece, content: str) -> None:
        self.land(self.loads[order.landing.load_id], piece, content)

    def holds_bytes_of(self, request: Request) -> bool:
        pieces = [(index, layer) for index in range(len(request.blocks)) for layer in range(LAYERS)]
        return all(
            self.memory.get((request.blocks[piece[0]], piece[1])) == content_of(request.ask.prompt, piece)
            for piece in pieces
        )

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
                self._note_order(to, message)
                self.consumer.link(self, self.links, to, self._receive).to_server(message)
            case Report():
                self._report(action)
            case Quieted(load_id):
                self._quieted(load_id)
            case Note(name, _):
                self.consumer.notes[name] += 1

    def _note_order(self, to: str, message: object) -> None:
        if isinstance(message, RemoteBlocks):
            self.loads[message.landing.load_id].writers.add(to)
        if isinstance(message, RemoteBlocks | CancelWrite) and to in self.told_gone:
            self._hear_gone(to)

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
            elif engine_id not in ("", producer.name):
                self.driver.feed(PeerFailed(address, f"{engine_id} is not here", lost=False))
            else:
                sources = tuple(SourceRank(worker.rank, worker.address, "") for worker in producer.workers)
                self.driver.feed(PeerReady(address, producer.incarnation, topology, sources))

        self.later(rng.uniform(0.01, 0.05), answer)

    def _report(self, report: Report) -> None:
        truth, now = self.loads[report.load_id], self.clock()
        check(not truth.is_reported, "report once", f"{report.load_id} is reported again: {report}")
        truth.is_reported = True
        leases = self.consumer.leases
        limit_s = leases.load_s if truth.load.order is None else leases.write_s
        latest = max(truth.started_at + limit_s, self.resumed_at)
        check(now <= latest + EPSILON_S, "deadline", f"{report.load_id} took {now - truth.started_at:.3f} s")
        if report.ok:
            check(report.quiet, "rule 4", f"{report.load_id} is accepted while it still reads")
            contents = [self.memory.get((block, layer)) for block in truth.request.blocks for layer in range(LAYERS)]
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
        can_land = can_land or any(write.can_land for write in truth.writes)
        check(not can_land, "rule 1", f"{truth.load.load_id} is called quiet, and can still land")

    def stuck_loads(self) -> list[LoadTruth]:
        """Loads that failed and that nothing will ever call quiet: a writer is gone, and nobody can prove it."""
        failed = [truth for truth in self.loads.values() if truth.is_reported and not truth.is_quiet]
        return [truth for truth in failed if self._is_stuck(truth)]

    def _is_stuck(self, truth: LoadTruth) -> bool:
        dead = {
            to
            for to in truth.writers
            if self.consumer.servers[to].address != to or not self.consumer.servers[to].is_alive
        }
        return bool(dead - self.told_gone)

    def check_end(self) -> None:
        stuck = self.stuck_loads()
        for load_id, truth in self.loads.items():
            is_over = truth.is_reported and truth.is_quiet
            check(is_over or truth in stuck, "rule 4", f"{load_id} never ended: {truth}")
        loader = self.loader
        check(loader.num_loads == len(stuck) and not loader._questions, "leak", f"{self.name} still has loads")
        check(len(loader._peers) <= len(self.consumer.producers), "leak", f"peers {loader._peers}")
        check(bool(stuck) or loader.next_deadline() is None, "leak", f"{self.name} still waits for something")
