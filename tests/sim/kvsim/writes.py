"""A producer's ranks, with the real Writer, and what they write into the memory of consumers' ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvferry.protocol.events import (
    AbandonWrites,
    BeginWrites,
    Connect,
    Note,
    PeerFailed,
    PeerReady,
    Received,
    Send,
    WritesDone,
    WritesFailed,
    WritesQuiet,
)
from kvferry.protocol.messages import Landing, Message
from kvferry.protocol.writer import Writer
from kvsim.prompts import LAYERS, TOPOLOGY, Piece
from kvsim.world import Driver, Link, Process, check

if TYPE_CHECKING:
    from kvsim.consumer import Consumer
    from kvsim.producer import Producer


@dataclass
class Progress:
    """What a rank knows of a transfer that is being computed: which block has which piece, in the latest attempt."""

    attempt: int = 0
    blocks: dict[Piece, int] = field(default_factory=dict)


class ProducerWorker(Process):
    """One rank of a producer: it has every layer whose number is its own, modulo the number of ranks."""

    def __init__(self, producer: Producer, rank: int) -> None:
        super().__init__(producer.world, f"{producer.name}w{rank}")
        self.producer = producer
        self.rank = rank
        self.notes: Counter[str] = Counter()
        self._rng = self.world.rng(f"writer {self.name}")
        self.start()

    def start(self) -> None:
        self.revive()
        producer = self.producer
        self.address = f"tcp://{self.name}.{self.life}"
        self.writer = Writer(
            self.rank, producer.incarnation, producer.address, producer.leases, home=producer.incarnation
        )
        self.driver = Driver(self, self.writer, self._act)
        self.progress: dict[str, Progress] = {}
        self.writes: dict[Landing, Write] = {}
        self.begun: set[Landing] = set()
        self.links: dict[str, Link] = {}
        producer.servers[self.address] = self

    @property
    def layers(self) -> range:
        return range(self.rank, LAYERS, len(self.producer.workers))

    # What the engine's steps tell

    def learn(self, transfer_id: str, attempt: int, piece: Piece, block: int) -> None:
        def hear() -> None:
            self._latest(transfer_id, attempt).blocks[piece] = block
            self._post()

        self.do(hear)

    def unlearn(self, transfer_id: str, attempt: int) -> None:
        self.do(lambda: self._latest(transfer_id, attempt))

    def forget(self, transfer_id: str) -> None:
        self.do(lambda: self.progress.pop(transfer_id, None))

    def _latest(self, transfer_id: str, attempt: int) -> Progress:
        progress = self.progress.setdefault(transfer_id, Progress())
        if progress.attempt != attempt:
            progress = self.progress[transfer_id] = Progress(attempt)
        return progress

    def _post(self) -> None:
        for write in list(self.writes.values()):
            write.post()

    # The machine

    def receive(self, link: Link, message: Message) -> None:
        if link.address == self.address:  # else it is meant for an earlier life
            self.do(lambda: self.driver.feed(Received(link, message)))

    def lose(self, address: str) -> None:
        self.do(lambda: self.driver.feed(PeerFailed(address, "connection lost")))

    def _act(self, action: object) -> None:
        match action:
            case Connect(address, _):
                self._handshake(self.producer.consumers[address])
            case BeginWrites(order):
                landing = order.landing
                check(landing not in self.begun, "rule 6", f"{landing} is written again")
                check(landing in self.producer.opened, "rule 1", f"{landing} is written without leave")
                self.begun.add(landing)
                self.writes[landing] = Write(self, action, self._rng)
            case AbandonWrites(landing):
                self.writes[landing].abandon()
            case Send(Link() as link, message):
                link.to_client(message)
            case Send(_, message):
                self._own_link().to_server(message)
            case Note(name, _):
                self.notes[name] += 1

    def _own_link(self) -> Link:
        address = self.producer.address
        if address not in self.links:
            rng = self.world.rng(f"link {self.name} {self.life} {address}")
            weather = self.producer.setting.weather
            self.links[address] = Link(self, self.driver.feed, self.producer, address, weather, rng)
        return self.links[address]

    def _handshake(self, consumer: Consumer) -> None:
        rng, address = self._rng, consumer.address

        def answer() -> None:
            if rng.random() < self.producer.setting.habits.unable:
                self.driver.feed(PeerFailed(address, "no transport in common", lost=False))
            elif not consumer.is_alive:
                self.driver.feed(PeerFailed(address, "no such peer", lost=rng.random() < 0.5))
            else:
                self.driver.feed(PeerReady(address, consumer.incarnation, TOPOLOGY))

        self.later(rng.uniform(0.01, 0.05), answer)

    def is_writing(self, transfer: tuple[str, int]) -> bool:
        return any(write.can_land and write.transfer == transfer for write in self.writes.values())

    def check_end(self) -> None:
        writer = self.writer
        check(not any(write.can_land for write in self.writes.values()), "leak", f"{self.name} still writes")
        check(writer.num_jobs == 0 and not writer._questions, "leak", f"{self.name} still has jobs")
        check(len(writer._over) <= self.producer.leases.max_remembered, "leak", f"{self.name} remembers too much")
        known = writer._ready.keys() | writer._connecting.keys()
        check(known <= set(self.producer.consumers), "leak", f"{self.name} knows {known}")
        check(not writer._routes and not writer._num_block_ids, "leak", f"{self.name} counts jobs that are over")
        check(not writer._connecting, "rule 4", f"{self.name} waits for {writer._connecting}")
        check(not self.progress, "leak", f"{self.name} still knows of {sorted(self.progress)}")
        check(writer.next_deadline() is None, "leak", f"{self.name} still waits for something")


class Write:
    """One landing under way. Each piece is posted once it is computed; it is sampled and lands some time later."""

    def __init__(self, worker: ProducerWorker, begin: BeginWrites, rng: Random) -> None:
        self._worker, self._rng, self._order = worker, rng, begin.order
        self.transfer_id = begin.transfer_id
        generation = 1 if begin.order.ref.is_routers else begin.order.ref.generation
        self.transfer = (begin.transfer_id, generation)
        habits = worker.producer.setting.habits
        self._longest_s = rng.uniform(*habits.slow_write_s) if rng.random() < habits.slow_write else 0.03
        self._is_cancellable = rng.random() < 0.5
        self._fails_at = rng.randrange(4) if rng.random() < habits.write_fails else -1
        self._target = worker.producer.consumers[begin.order.address].workers[begin.order.landing.rank]
        self._target_life = self._target.expect(begin.order, self)
        blocks = begin.block_ids[0] if begin.block_ids else ()
        self._held = {(index, layer): block for index, block in enumerate(blocks) for layer in worker.layers}
        self._wanted = {(index, layer) for index in range(len(self._order.block_ids[0])) for layer in worker.layers}
        self._attempt = 0
        self._posted: set[Piece] = set()
        self._landed: set[Piece] = set()
        self._num_flying = 0
        self._is_stopped = self._has_failed = False
        self._life, self._can_land, self._is_cancelled = worker.life, True, False
        if rng.random() < habits.unable / 2:
            worker.later(0.001, lambda: self._fail("the memory can't be reached", unable=True))
        worker.later(rng.uniform(0.0, 0.01), self.post)

    @property
    def can_land(self) -> bool:
        """Something is posted, or may be: until the worker has seen that it is over."""
        return self._can_land and self._worker.life == self._life

    # In the worker's thread

    def post(self) -> None:
        """What is computed and was not posted in this attempt. A new attempt waits until the old one is quiet."""
        if self._is_stopped or not self.can_land:
            return
        if not self._is_of_latest_attempt():
            if self._num_flying:
                return
            self._attempt = self._worker.progress[self.transfer_id].attempt
            self._posted, self._landed = set(), set()
        for piece, block in self._sources().items():
            if piece in self._wanted and piece not in self._posted and not self._is_stopped:
                self._post(piece, block)
        if not self._wanted:
            self._end(is_done=True)

    def _sources(self) -> dict[Piece, int]:
        progress = self._worker.progress.get(self.transfer_id)
        return self._held or (dict(progress.blocks) if progress is not None else {})

    def _is_of_latest_attempt(self) -> bool:
        progress = self._worker.progress.get(self.transfer_id)
        return bool(self._held) or progress is None or progress.attempt == self._attempt

    def _post(self, piece: Piece, block: int) -> None:
        if len(self._posted) == self._fails_at:
            self._fail("the transport failed")
            return
        world = self._worker.world
        self._posted.add(piece)
        self._num_flying += 1
        lands_at = world.now + self._longest_s * self._rng.random()
        attempt = self._attempt
        sampled_at = self._rng.uniform(world.now, lands_at)
        world.at(sampled_at, lambda: self._sample(piece, block, attempt, lands_at))

    def _see(self, piece: Piece, attempt: int) -> None:
        if not self.can_land:
            return
        if attempt == self._attempt:
            self._num_flying -= 1
            self._landed |= {piece} if self._is_of_latest_attempt() else set()
        if self._is_stopped:
            self._end_if_quiet()
        elif self._landed == self._wanted:
            self._end(is_done=True)
        else:
            self.post()

    def abandon(self) -> None:
        self._is_stopped = True
        if self._is_cancellable:
            self._worker.later(self._rng.uniform(0.0, 0.2), self._cancel)
        else:
            self._worker.later(0.0, self._end_if_quiet)

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._end(is_done=False)

    def _fail(self, reason: str, unable: bool = False) -> None:
        if self._has_failed or self._is_stopped or not self.can_land:
            return
        self._is_stopped = self._has_failed = True
        self._worker.driver.feed(WritesFailed(self._order.landing, reason, unable))
        self._worker.later(0.0, self._end_if_quiet)

    def _end_if_quiet(self) -> None:
        if not self._num_flying:
            is_done = self._landed == self._wanted and self._is_of_latest_attempt() and not self._has_failed
            self._end(is_done=is_done and self._rng.random() < 0.5)

    def _end(self, is_done: bool) -> None:
        if not self.can_land:
            return
        self._can_land = False
        del self._worker.writes[self._order.landing]
        landing = self._order.landing
        event = WritesDone(landing, 1, len(self._wanted), "sim") if is_done else WritesQuiet(landing)
        self._worker.driver.feed(event)

    # Where no thread is asked

    @property
    def _is_physical(self) -> bool:
        """Whatever anybody believes: what was posted lands, unless it was cancelled or its process is gone."""
        return not self._is_cancelled and self._worker.life == self._life

    def _sample(self, piece: Piece, block: int, attempt: int, lands_at: float) -> None:
        if self._is_physical:
            content = self._worker.producer.memory[block, piece[1]]
            self._worker.world.at(lands_at, lambda: self._land(piece, attempt, content))

    def _land(self, piece: Piece, attempt: int, content: str) -> None:
        if not self._is_physical:
            return
        if self._target.is_alive and self._target.life == self._target_life:
            self._target.be_written(self._order, piece, content)
            self._worker.do(lambda: self._see(piece, attempt))
        else:
            self._worker.do(lambda: self._break(piece, attempt))

    def _break(self, piece: Piece, attempt: int) -> None:
        self._fail("the peer's memory is gone")
        self._has_failed = True
        self._see(piece, attempt)
