"""The operations of one transfer: posted, driven and, when they must end early, given back until they are quiet."""

from __future__ import annotations

import enum
import logging
from typing import NamedTuple

from kvferry.transport.base import Batch, Handle, Peer, PeerLost, QueueFull, State, Status, Transport

logger = logging.getLogger(__name__)

NUDGE_AFTER_S = 0.003
"""What waits longer than this for a target that must poll gets a nudge; twice the usual inline transfer."""
NUDGE_AGAIN_S = 0.2
POLL_S = 0.001
"""How often operations under way are polled."""
SLOW_POLL_S = 0.1
"""How often ended ones are asked whether they are quiet, once they have not been for SLOW_AFTER_S."""
SLOW_AFTER_S = 1.0


class Part(NamedTuple):
    """What moves from or to one worker on the other side. nudge_address: of its control socket."""

    transport: Transport
    peer: Peer
    nudge_address: str
    batches: tuple[Batch, ...]


class Phase(enum.Enum):
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Transfer:
    """Drives reads or writes: `step` until the phase is not MOVING, then `quiet` until it says True."""

    def __init__(self, parts: list[Part], now: float, *, write: bool = False) -> None:
        self._write = write
        self.phase = Phase.MOVING
        self.reason = ""
        self._lost_peer: Peer | None = None
        self._unposted = list(reversed(parts))
        self._in_flight: list[tuple[Part, Handle]] = []
        self._draining: list[tuple[Part, Handle]] = []
        self._nudge_at = now + NUDGE_AFTER_S
        self._ended_at: float | None = None

    def step(self) -> Phase:
        """Posts what is left, polls what is under way."""
        if self.phase is Phase.MOVING:
            self._post()
        if self.phase is Phase.MOVING:
            self._poll()
        if self.phase is Phase.MOVING and not self._unposted and not self._in_flight:
            self.phase = Phase.DONE
        return self.phase

    def abandon(self, reason: str) -> None:
        """Ends a transfer whose bytes are no longer wanted. Nothing more is posted."""
        if self.phase is Phase.MOVING:
            self._end(Phase.ABANDONED, reason)

    def quiet(self) -> bool:
        """Whether no operation of it can still write. Gives handles back on the way."""
        self._draining = [(part, handle) for part, handle in self._draining if not _released(part, handle)]
        return self.phase is not Phase.MOVING and not self._draining

    def peers(self) -> list[Peer]:
        """Peers with operations that have not been given back."""
        return [part.peer for part, _ in self._in_flight + self._draining] + [one.peer for one in self._unposted]

    @property
    def lost_peer(self) -> Peer | None:
        """The peer whose loss ended it, if that is why it ended."""
        return self._lost_peer

    def poll_interval_s(self, now: float) -> float:
        """How soon to look again. What stays unquiet for long, perhaps for ever, is looked at rarely."""
        if self.phase is Phase.MOVING:
            return POLL_S
        self._ended_at = self._ended_at or now
        return POLL_S if now < self._ended_at + SLOW_AFTER_S else SLOW_POLL_S

    def nudges_due(self, now: float) -> list[str]:
        """Control addresses of producer workers that must poll for this transfer to go on."""
        if now < self._nudge_at or self.poll_interval_s(now) == SLOW_POLL_S:
            return []
        self._nudge_at = now + NUDGE_AGAIN_S
        waiting = self._in_flight + self._draining
        return [part.nudge_address for part, _ in waiting if part.transport.traits.target_must_poll]

    def _post(self) -> None:
        while self._unposted:
            part = self._unposted[-1]
            try:
                post = part.transport.write if self._write else part.transport.read
                handle = post(part.peer, part.batches)
            except QueueFull:
                # Back-pressure: the rest is posted when something has finished.
                return
            except Exception as error:
                # Whatever a transport raises, this transfer fails alone, and with its reason.
                if isinstance(error, PeerLost):
                    self._lost_peer = part.peer
                self._end(Phase.FAILED, f"{type(error).__name__}: {error}")
                return
            self._unposted.pop()
            self._in_flight.append((part, handle))

    def _poll(self) -> None:
        still: list[tuple[Part, Handle]] = []
        failure = ""
        for part, handle in self._in_flight:
            status = _polled(part, handle)
            if status.state is State.DONE:
                if not _released(part, handle):
                    self._draining.append((part, handle))
            elif status.state is State.FAILED:
                failure = status.detail or "the transport reported a failure"
                self._draining.append((part, handle))
            else:
                still.append((part, handle))
        self._in_flight = still
        if failure:
            self._end(Phase.FAILED, failure)

    def _end(self, phase: Phase, reason: str) -> None:
        self.phase = phase
        self.reason = reason
        self._draining += self._in_flight
        self._in_flight = []
        self._unposted = []


def _polled(part: Part, handle: Handle) -> Status:
    """A transport whose poll raises breaks its contract; the transfer must end all the same."""
    try:
        return part.transport.poll(handle)
    except Exception as error:
        return Status(State.FAILED, f"{type(error).__name__}: {error}")


def _released(part: Part, handle: Handle) -> bool:
    """A release that raises has proven nothing."""
    try:
        return part.transport.release(handle)
    except Exception:
        logger.exception("kvferry: transport %s failed to release a handle", part.transport.name)
        return False
