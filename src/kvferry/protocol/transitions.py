"""State machines as tables: what may follow what is data, which the code obeys and the documentation draws."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Trigger = TypeVar("Trigger", bound=Enum)


class IllegalTransition(RuntimeError):
    """The caller's own mistake (never a peer's): the event makes no sense now. Nothing was changed."""


class Table(Generic[State, Trigger]):
    """Which state follows on (state, trigger). What is not in the table is illegal.

    thing: what the states are of, for error texts and diagrams. start: the state a new thing is in.
    """

    def __init__(self, thing: str, start: State, moves: Mapping[tuple[State, Trigger], State]) -> None:
        self.thing = thing
        self.start = start
        self.moves = dict(moves)

    def next(self, state: State, trigger: Trigger) -> State:
        """Raises IllegalTransition where the table has no entry."""
        try:
            return self.moves[state, trigger]
        except KeyError:
            raise IllegalTransition(f"{self.thing}: {trigger.value!r} while {state.value!r}") from None

    def allows(self, state: State, trigger: Trigger) -> bool:
        return (state, trigger) in self.moves
