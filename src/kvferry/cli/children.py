"""Child processes that never outlive us: each in a session of its own, stopped with all that it started.

A child is known by its session and by a label in its environment, so that nothing it started is missed, and nothing
else is touched. A guardian process (guardian.py) does the same cleaning should this process be killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvferry.cli import proc
from kvferry.cli.signals import signals_ignored

_POLL_S = 0.05
_LEAVE_S = 1.0  # what is left of a session may still be on its way out
_TRACKER_S = 3.0  # Python's resource trackers unlink their segments once their owner is gone
_KILLED_S = 10.0


class Child:
    """One process with all that it starts. Made by Children.start."""

    def __init__(self, name: str, label: str, process: subprocess.Popen[bytes], log: Path, grace_s: float) -> None:
        self.name = name
        self.label = label
        self.log = log
        self.grace_s = grace_s
        self.process = process

    @property
    def pid(self) -> int:
        """Pid of the process itself, which is its session's id too."""
        return self.process.pid

    def exit_status(self) -> int | None:
        """The exit status of the process itself (negative: the signal that ended it); None while it runs."""
        return self.process.poll()

    def pids(self) -> set[int]:
        """Live pids of the process and of all that it started."""
        return proc.members(self.label, self.pid)

    def send(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        for pid in self.pids():
            _kill(pid, number)

    def log_lines(self, count: int = 20) -> list[str]:
        """The last lines of its log."""
        try:
            return self.log.read_text(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []


class Children:
    """Several children, and the shared memory they leave. Call close, whatever happens."""

    def __init__(self, log_dir: Path) -> None:
        self._label = secrets.token_hex(8)
        self._log_dir = log_dir
        self._started_s = time.time()
        self._segments: set[str] = set()
        self._children: list[Child] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, grace_s: float = 5.0
    ) -> Child:
        """Start `command` with `env` added to ours; its output is appended to NAME.log.

        grace_s is how long it may take from SIGTERM to its end before it is killed.
        """
        if self._guardian is None:
            self._guardian = _start_guardian(self._label)
        label = f"{self._label}.{name}"
        log = self._log_dir / f"{name}.log"
        environment = {**os.environ, **(env or {}), proc.CHILD_VARIABLE: label, "SPT_NOENV": "1"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        child = Child(name, label, process, log, grace_s)
        self._children.append(child)
        return child

    def note_segments(self) -> None:
        """Remember which shared memory the children use now; a child that dies can no longer be asked."""
        for child in self._children:
            self._segments |= proc.shared_memory(child.pids())

    def stop(self, *children: Child) -> None:
        """End these children and all that they started: SIGTERM, then SIGKILL for what is left. Never raises."""
        with signals_ignored():
            self.note_segments()
            for child in children:
                if child.exit_status() is None:
                    _kill(child.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + max((child.grace_s for child in children), default=0)
            _wait(lambda: all(child.exit_status() is not None for child in children), deadline_s)
            self._end(children)

    def kill(self, *children: Child) -> None:
        """SIGKILL these children and all that they started, as a crash would."""
        with signals_ignored():
            self.note_segments()
            for child in children:
                child.send(signal.SIGKILL)
            self._end(children)

    def close(self) -> None:
        """Stop every child, and whatever else carries our label; remove the shared memory that is left."""
        with signals_ignored():
            self.stop(*self._children)
            end_all(lambda: proc.members(self._label), wait_s=0)
            self._remove_segments()
            if self._guardian is not None:
                _dismiss(self._guardian)
                self._guardian = None

    def _end(self, children: Iterable[Child]) -> None:
        children = list(children)
        end_all(lambda: set().union(*(child.pids() for child in children)), wait_s=_LEAVE_S)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=_KILLED_S)
            if child in self._children:
                self._children.remove(child)
        self._remove_segments()

    def _remove_segments(self) -> None:
        self._segments -= set(proc.remove_shared_memory(self._segments, self._started_s))


def end_all(find: Callable[[], set[int]], wait_s: float) -> None:
    """SIGKILL the processes that `find` returns, resource trackers last, after `wait_s` for them to leave."""
    _wait(lambda: not find(), time.monotonic() + wait_s)
    for pid in find():
        if not proc.is_resource_tracker(pid):
            _kill(pid, signal.SIGKILL)
    _wait(lambda: not find(), time.monotonic() + _TRACKER_S)
    for pid in find():
        _kill(pid, signal.SIGKILL)
    _wait(lambda: not find(), time.monotonic() + _KILLED_S)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGCONT)  # a suspended process hears SIGTERM only when it goes on


def _wait(condition: Callable[[], bool], deadline_s: float) -> bool:
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _start_guardian(label: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli.guardian", label],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _dismiss(guardian: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guardian.communicate(b"done\n", timeout=_KILLED_S)
    if guardian.poll() is None:
        guardian.kill()
        guardian.wait()
