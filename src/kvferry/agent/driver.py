"""Feeds a state machine: events in, actions out, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvferry.agent.loop import boottime

Event = TypeVar("Event")
Action = TypeVar("Action")


class Machine(Protocol):
    """As `kvferry.protocol` makes them."""

    def handle(self, event: Any, now: float) -> list[Any]: ...
    def next_deadline(self) -> float | None: ...


class Driver(Generic[Event, Action]):
    """Events that actions raise wait their turn. guard: runs a step that must not hold up the rest."""

    def __init__(self, machine: Machine, act: Callable[[Action], None], guard: Callable[..., object]) -> None:
        self._machine = machine
        self._act = act
        self._guard = guard
        self._events: deque[Event] = deque()
        self._busy = False

    def feed(self, event: Event) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for action in self._machine.handle(self._events.popleft(), boottime()):
                    self._guard(self._act, action)
        finally:
            self._busy = False

    def tick(self, now: float, tick: Event) -> None:
        """Feeds `tick` if the machine waits for it."""
        deadline = self._machine.next_deadline()
        if deadline is not None and now >= deadline:
            self.feed(tick)

    def next_deadline(self) -> float | None:
        return self._machine.next_deadline()
