"""Feeding Mooncake: a peer's descriptors go to the library in order, and only so many at a time.

Mooncake fails what is queued for one peer beyond a bound (1024 descriptors, and as many more for a second), so the
rest waits here. Nothing here blocks; `Queue.drive` is called by whoever polls.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import TypeAlias

from kvferry.transport.mooncake_data import Step
from kvferry.transport.mooncake_library import LATE, MOVED, PENDING, REFUSED, Engine

_WINDOW = 512
_MOST_LANES = 16
"""Mooncake's TCP takes descriptors from its queue in order, into at most so many connections."""


def window() -> int:
    """How many descriptors may be with the library for one peer."""
    bound = os.environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "")
    return min(_WINDOW, int(bound)) if bound.isdecimal() and int(bound) else _WINDOW


_Posted: TypeAlias = "tuple[int, Job, Step, int]"
"""Mooncake's number, and which descriptor of which step it is of."""


class Job:
    """One transfer's steps. A step begins when the one before it has moved.

    in_flight: descriptors that are with the library. failure: why it failed, or empty. late: a descriptor ended badly,
    and it is not known that nothing of it moves any more. lost: the library may have one of which nothing is heard.
    """

    def __init__(self, name: str, steps: Sequence[Step], *, quiet_reads: bool) -> None:
        self.in_flight = 0
        self.failure = ""
        self.late = False
        self.lost = False
        self._name = name
        self._quiet_reads = quiet_reads
        self._steps = collections.deque(steps)
        self._next = 0
        self._cancelled = ""

    @property
    def done(self) -> bool:
        return not self._steps and not self.failure

    @property
    def ended(self) -> bool:
        """Nothing of it is with the library, and nothing will be."""
        return not self.in_flight and (bool(self.failure) or not self._steps)

    @property
    def unposted(self) -> int:
        """Descriptors of the present step that have still to be posted."""
        return 0 if self._stopped or not self._steps else len(self._steps[0].lengths) - self._next

    def cancel(self, reason: str) -> None:
        """Nothing more of it is posted; it fails with this reason once nothing of it is with the library."""
        if not self.ended:
            self._cancelled = self._cancelled or reason
        self._end_if_cancelled()

    def close(self, reason: str, *, under_way: bool) -> None:
        """The library is gone, and with it what was with it; under_way: of that something may still move."""
        self.late |= under_way and self.in_flight > 0
        self.in_flight = 0
        if not self.ended:
            self.fail(reason)

    def fail(self, reason: str) -> None:
        """The first reason counts."""
        self.failure = self.failure or f"{self._name}: {reason}"

    def lose(self, reason: str) -> None:
        """Of one descriptor nobody knows whether the library has it."""
        self.late = self.lost = True
        self.fail(reason)

    def take(self, room: int) -> tuple[Step, range]:
        """The next descriptors to post, at most `room`."""
        first = self._next
        self._next += min(room, self.unposted)
        return self._steps[0], range(first, self._next)

    def descriptor_ended(self, step: Step, index: int, code: int) -> None:
        """MOVED and failures end it; LATE is a failure of one that is still with the library."""
        if code != LATE:
            self.in_flight -= 1
        if code != MOVED:
            self.late |= step.write or not self._quiet_reads
            what = "write" if step.write else "read"
            why = "has not ended in time" if code == LATE else "failed"
            self.fail(
                f"a {what} of {step.lengths[index]} bytes at {step.remote[index]:#x} {why}; Mooncake's log says more"
            )
        self._end_if_cancelled()

    def next_step(self) -> bool:
        """Leaves a step that has moved. Whether there is another one to post."""
        if self._stopped or self.in_flight or self.unposted or not self._steps:
            return False
        verdict = self._steps.popleft().verdict
        self._next = 0
        if reason := verdict() if verdict else "":
            self.fail(reason)
        return self.unposted > 0

    @property
    def _stopped(self) -> bool:
        return bool(self._cancelled or self.failure)

    def _end_if_cancelled(self) -> None:
        if self._cancelled and not self.in_flight:
            self.fail(self._cancelled)


class Queue:
    """What goes to one peer through one engine."""

    def __init__(self, engine: Engine, session: str, size: int) -> None:
        self._engine = engine
        self._session = session
        self._window = size
        self._waiting: collections.deque[Job] = collections.deque()
        self._posted: collections.deque[_Posted] = collections.deque()

    def add(self, job: Job) -> None:
        self._waiting.append(job)
        self._post()

    def drive(self) -> None:
        """Takes note of what has ended, and posts what there is room for."""
        self._collect()
        self._post()

    def _collect(self) -> None:
        """Looks from the oldest on. Behind as many unfinished ones as there are connections nothing has begun."""
        unfinished: list[_Posted] = []
        while self._posted and len(unfinished) <= _MOST_LANES:
            entry = self._posted.popleft()
            batch, job, step, index = entry
            code = self._engine.check(batch)
            if code != PENDING:
                job.descriptor_ended(step, index, code)
            if code in (PENDING, LATE):
                unfinished.append(entry)
            elif job.next_step():
                self._waiting.appendleft(job)
        self._posted.extendleft(reversed(unfinished))

    def _post(self) -> None:
        while self._waiting and (room := self._window - len(self._posted)) > 0:
            job = self._waiting[0]
            if job.unposted:
                step, indexes = job.take(room)
                self._start(job, step, indexes)
            if not job.unposted:
                self._waiting.popleft()

    def _start(self, job: Job, step: Step, indexes: range) -> None:
        rows = slice(indexes.start, indexes.stop)
        columns = (array[rows].tolist() for array in (step.local, step.remote, step.lengths))
        for index, local, remote, length in zip(indexes, *columns, strict=True):
            try:
                batch = self._engine.post(self._session, step.write, local, remote, length)
            except Exception as error:
                # Not the caller's: he may poll another transfer, and of this one some may be under way.
                job.lose(f"Mooncake raised {type(error).__name__} for {length} bytes at {remote:#x}: {error}")
                return
            if batch in REFUSED:
                job.fail(f"Mooncake takes no transfer of {length} bytes at {remote:#x}; its log says more")
                return
            job.in_flight += 1
            self._posted.append((batch, job, step, index))
