"""How the command line shows progress: a live view on a terminal, plain lines elsewhere, nothing in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

View = Callable[[int], RenderableType]  # makes what is shown for a terminal of so many columns


class Reporter(Protocol):
    """Receives progress. `state` keys by name: a new text for a name replaces the old one."""

    def say(self, message: str) -> None:
        """A line that stays."""

    def state(self, name: str, text: str, done: bool = False) -> None:
        """What `name` is doing now, or that it is done."""

    def show(self, view: View | None) -> None:
        """A view below the states that is shown while work goes on (a table that fills); None takes it away."""


class Silent:
    """Shows nothing."""

    def say(self, message: str) -> None: ...

    def state(self, name: str, text: str, done: bool = False) -> None: ...

    def show(self, view: View | None) -> None: ...


class Plain:
    """Lines with the seconds since the start; a state is printed when it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._states: dict[str, str] = {}

    def say(self, message: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._console.print(f"{elapsed_s:6.1f} s  {message}", markup=False, highlight=False, soft_wrap=True)

    def state(self, name: str, text: str, done: bool = False) -> None:
        if self._states.get(name) != text:
            self._states[name] = text
            self.say(f"{name}: {text}")

    def show(self, view: View | None) -> None: ...


class LiveView:
    """A spinner for each thing under way, with a table below. Use it in a `with` block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, tuple[str, bool, float]] = {}
        self._spinner = Spinner("dots")
        self._view: View | None = None
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False)

    def state(self, name: str, text: str, done: bool = False) -> None:
        since_s = self._states[name][2] if name in self._states else time.monotonic()
        if done and not (name in self._states and self._states[name][1]):
            self._console.print(
                Text.assemble(("✓ ", "green"), f"{name}: {text} ({time.monotonic() - since_s:.0f} s)"), highlight=False
            )
        self._states[name] = (text, done, since_s)

    def show(self, view: View | None) -> None:
        self._view = view

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        now_s = time.monotonic()
        for name, (text, done, since_s) in self._states.items():
            if not done:
                rows.add_row(self._spinner, Text(name, "bold"), Text(text), Text(f"{now_s - since_s:.0f} s", "dim"))
        return Group(rows, self._view(self._console.width)) if self._view is not None else rows


def reporter_for(console: Console) -> Plain | LiveView:
    """A live view on a terminal, else plain lines. Enter a LiveView before use."""
    return LiveView(console) if console.is_terminal else Plain(console)
