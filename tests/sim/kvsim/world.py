"""Time, processes with clocks of their own, and a network that loses, repeats, delays and reorders."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.protocol.events import Received, Tick
from kvferry.protocol.messages import Message, decode, encode

EPSILON_S = 1e-6
"""What rounding between true time and a process's clock may cost."""
MAX_EVENTS = 20_000
"""Of one schedule. An ordinary one has some hundreds."""


class Violation(Exception):
    """A rule of the protocol was broken."""


def check(condition: bool, rule: str, detail: str) -> None:
    if not condition:
        raise Violation(f"{rule}: {detail}")


class World:
    """Runs what was scheduled, in order of true time (seconds from the start)."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        self.num_events = 0
        self.trace: list[str] | None = [] if trace else None
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def rng(self, name: str) -> random.Random:
        """A stream of its own for each name, so that one thing left out changes little in the others."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, time: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), do))

    def after(self, delay_s: float, do: Callable[[], object]) -> None:
        self.at(self.now + delay_s, do)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()

    def log(self, who: str, what: object, mark: str = "") -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f} {who:8} {mark}{what}")


class Process:
    """Something that runs, may be paused or crash, and has a clock: up to 5 % fast or slow, from anywhere."""

    def __init__(self, world: World, name: str) -> None:
        rng = world.rng(f"clock {name}")
        self.world = world
        self.name = name
        self.rate = rng.uniform(0.95, 1.05)
        self.offset_s = rng.uniform(0.0, 1e5)
        self.is_alive = True
        self.life = 0
        self.resumed_at = float("-inf")
        self._waiting: list[Callable[[], object]] | None = None
        self._pauses = 0

    def clock(self) -> float:
        return self.offset_s + self.rate * self.world.now

    def true_time(self, clock: float) -> float:
        return (clock - self.offset_s) / self.rate

    def do(self, work: Callable[[], object]) -> None:
        """Now; or when the pause is over; or never, if the process is dead."""
        if self._waiting is not None:
            self._waiting.append(work)
        elif self.is_alive:
            work()

    def later(self, delay_s: float, work: Callable[[], object]) -> None:
        """As `do`, after a delay, unless this life of the process has ended by then."""
        life = self.life
        self.world.after(delay_s, lambda: self.do(work) if self.life == life else None)

    def pause(self, for_s: float) -> None:
        if self.is_alive:
            self._waiting = [] if self._waiting is None else self._waiting
            self._pauses += 1
            life, pauses = self.life, self._pauses
            self.world.after(for_s, lambda: self._resume() if (self.life, self._pauses) == (life, pauses) else None)

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        self.resumed_at = self.clock()
        self.world.log(self.name, f"resumes with {len(waiting)} things to do")
        for work in waiting:
            self.do(work)

    def crash(self) -> None:
        self.is_alive = False
        self.life += 1
        self._waiting = None
        self.world.log(self.name, "crashes")

    def revive(self) -> None:
        self.is_alive = True


class Machine(Protocol):
    def handle(self, event: Any, now: float) -> list[Any]: ...

    def next_deadline(self) -> float | None: ...


class Driver:
    """Feeds one machine within its process, acts on what it says, and ticks it when it asks for that."""

    def __init__(self, process: Process, machine: Machine, act: Callable[[Any], None]) -> None:
        self._process = process
        self._machine = machine
        self._act = act
        self._life = process.life
        self._armed_at = float("inf")

    def feed(self, event: object) -> None:
        self._feed(event, self._process.clock())

    def _feed(self, event: object, now: float) -> None:
        world = self._process.world
        world.num_events += 1
        check(world.num_events < MAX_EVENTS, "rest", f"{self._process.name} never comes to rest")
        world.log(self._process.name, event)
        actions = self._machine.handle(event, now)
        if isinstance(event, Tick):
            deadline = self._machine.next_deadline()
            check(
                deadline is None or deadline > now, "rest", f"{self._process.name} asks for a tick at {deadline}, again"
            )
        for action in actions:
            world.log(self._process.name, action, "  -> ")
            self._act(action)
        self._arm()

    def _arm(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline is None:
            return
        at = max(self._process.world.now, self._process.true_time(deadline))
        if at < self._armed_at:
            self._armed_at = at
            self._process.world.at(at, self._ring)

    def _ring(self) -> None:
        self._armed_at = float("inf")
        if self._process.life == self._life:
            self._process.do(self._tick)

    def _tick(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline is not None and self._process.clock() + EPSILON_S >= deadline:
            self._feed(Tick(), max(self._process.clock(), deadline))
        else:
            self._arm()


@dataclass(frozen=True)
class Weather:
    """What the network does. loss, duplication, slow: probabilities per message; slow_s: the longest slow delay.

    ends_at: after which nothing is lost, so that what is asked again and again is answered.
    """

    loss: float = 0.0
    duplication: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
    is_fifo: bool = True
    delay_s: tuple[float, float] = (0.005, 0.010)
    ends_at: float = float("inf")


class Server(Protocol):
    def receive(self, link: Link, message: Message) -> None: ...


@dataclass(repr=False, eq=False)
class Link:
    """A connection from one life of a client to whoever serves an address. The route of what comes through it."""

    client: Process
    deliver_to_client: Callable[[Received], None]
    server: Server
    address: str
    weather: Weather
    rng: random.Random
    cut_until: float = float("-inf")
    _free_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._life = self.client.life

    def __repr__(self) -> str:
        return f"<{self.client.name} to {self.address}>"

    def to_server(self, message: Message) -> None:
        self._send("there", message, lambda copy: self.server.receive(self, copy))

    def to_client(self, message: Message) -> None:
        self._send("back", message, self._arrive)

    def _arrive(self, message: Message) -> None:
        if self.client.life == self._life:
            self.client.do(lambda: self.deliver_to_client(Received(self.address, message)))

    def _send(self, way: str, message: Message, arrive: Callable[[Message], None]) -> None:
        world, weather, rng = self.client.world, self.weather, self.rng
        is_lost = rng.random() < weather.loss and world.now < weather.ends_at
        if world.now < self.cut_until or is_lost:
            world.log("network", message, f"loses {way}: ")
            return
        copies = 2 if rng.random() < weather.duplication else 1
        for _ in range(copies):
            copy = decode(encode(message))
            world.at(self._arrival(way), lambda copy=copy: arrive(copy))

    def _arrival(self, way: str) -> float:
        delay_s = self.rng.uniform(*self.weather.delay_s)
        if self.rng.random() < self.weather.slow:
            delay_s += self.rng.uniform(0.0, self.weather.slow_s)
        at = self.client.world.now + delay_s
        if self.weather.is_fifo:
            at = self._free_at[way] = max(at, self._free_at.get(way, 0.0))
        return at
