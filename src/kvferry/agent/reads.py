"""The reads of one load: posted, driven and, when they must end early, given back until they are quiet."""

from __future__ import annotations

import enum
import logging
from typing import NamedTuple

from kvferry.transport.base import Batch, Handle, Peer, PeerLost, QueueFull, State, Status, Transport

logger = logging.getLogger(__name__)

NUDGE_AFTER_S = 0.003
"""A read that waits longer than this for a target that must poll gets a nudge; twice the usual inline read."""
NUDGE_AGAIN_S = 0.2
POLL_S = 0.001
"""How often reads under way are polled."""
SLOW_POLL_S = 0.1
"""How often ended reads are asked whether they are quiet, once they have not been for SLOW_AFTER_S."""
SLOW_AFTER_S = 1.0


class Source(NamedTuple):
    """What one producer worker has to give for this load."""

    transport: Transport
    peer: Peer
    nudge_address: str
    batches: tuple[Batch, ...]


class Phase(enum.Enum):
    READING = "reading"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Reads:
    """Drives one load's reads: `step` until the phase is not READING, then `quiet` until it says True."""

    def __init__(self, sources: list[Source], now: float) -> None:
        self.phase = Phase.READING
        self.reason = ""
        self._lost_peer: Peer | None = None
        self._unposted = list(reversed(sources))
        self._in_flight: list[tuple[Source, Handle]] = []
        self._draining: list[tuple[Source, Handle]] = []
        self._nudge_at = now + NUDGE_AFTER_S
        self._ended_at: float | None = None

    def step(self) -> Phase:
        """Posts what is left, polls what is under way."""
        if self.phase is Phase.READING:
            self._post()
        if self.phase is Phase.READING:
            self._poll()
        if self.phase is Phase.READING and not self._unposted and not self._in_flight:
            self.phase = Phase.DONE
        return self.phase

    def abandon(self, reason: str) -> None:
        """Ends a load whose bytes are no longer wanted. Nothing more is posted."""
        if self.phase is Phase.READING:
            self._end(Phase.ABANDONED, reason)

    def quiet(self) -> bool:
        """Whether no operation of this load can still write. Gives handles back on the way."""
        self._draining = [(source, handle) for source, handle in self._draining if not _released(source, handle)]
        return self.phase is not Phase.READING and not self._draining

    def peers(self) -> list[Peer]:
        """Peers with operations that have not been given back."""
        return [source.peer for source, _ in self._in_flight + self._draining] + [one.peer for one in self._unposted]

    @property
    def lost_peer(self) -> Peer | None:
        """The peer whose loss ended these reads, if that is why they ended."""
        return self._lost_peer

    def poll_interval_s(self, now: float) -> float:
        """How soon to look again. What stays unquiet for long, perhaps for ever, is looked at rarely."""
        if self.phase is Phase.READING:
            return POLL_S
        self._ended_at = self._ended_at or now
        return POLL_S if now < self._ended_at + SLOW_AFTER_S else SLOW_POLL_S

    def nudges_due(self, now: float) -> list[str]:
        """Control addresses of producer workers that must poll for this load to go on."""
        if now < self._nudge_at or self.poll_interval_s(now) == SLOW_POLL_S:
            return []
        self._nudge_at = now + NUDGE_AGAIN_S
        waiting = self._in_flight + self._draining
        return [source.nudge_address for source, _ in waiting if source.transport.traits.target_must_poll]

    def _post(self) -> None:
        while self._unposted:
            source = self._unposted[-1]
            try:
                handle = source.transport.read(source.peer, source.batches)
            except QueueFull:
                # Back-pressure: the rest is posted when something has finished.
                return
            except Exception as error:
                # Whatever a transport raises, this load fails alone, and with its reason.
                if isinstance(error, PeerLost):
                    self._lost_peer = source.peer
                self._end(Phase.FAILED, f"{type(error).__name__}: {error}")
                return
            self._unposted.pop()
            self._in_flight.append((source, handle))

    def _poll(self) -> None:
        still: list[tuple[Source, Handle]] = []
        failure = ""
        for source, handle in self._in_flight:
            status = _polled(source, handle)
            if status.state is State.DONE:
                if not _released(source, handle):
                    self._draining.append((source, handle))
            elif status.state is State.FAILED:
                failure = status.detail or "the transport reported a failure"
                self._draining.append((source, handle))
            else:
                still.append((source, handle))
        self._in_flight = still
        if failure:
            self._end(Phase.FAILED, failure)

    def _end(self, phase: Phase, reason: str) -> None:
        self.phase = phase
        self.reason = reason
        self._draining += self._in_flight
        self._in_flight = []
        self._unposted = []


def _polled(source: Source, handle: Handle) -> Status:
    """A transport whose poll raises breaks its contract; the load must end all the same."""
    try:
        return source.transport.poll(handle)
    except Exception as error:
        return Status(State.FAILED, f"{type(error).__name__}: {error}")


def _released(source: Source, handle: Handle) -> bool:
    """A release that raises has proven nothing."""
    try:
        return source.transport.release(handle)
    except Exception:
        logger.exception("kvferry: transport %s failed to release a handle", source.transport.name)
        return False
