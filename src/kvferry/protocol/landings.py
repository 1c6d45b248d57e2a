"""The producer's engine: which of its ranks may be writing a transfer. Its blocks are theirs until each has closed."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.protocol.events import Route, Send
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Landing, StopWrite, shorten

MAX_CLOSED = 16_384
"""Closed landings that are told apart from new ones; the oldest are forgotten, which would do harm only if a message of
one came later than that many others have closed. No setting makes it smaller."""


class ClosedLandings:
    def __init__(self) -> None:
        self._landings: OrderedDict[Landing, None] = OrderedDict()

    def add(self, landing: Landing) -> None:
        self._landings[landing] = None
        if len(self._landings) > MAX_CLOSED:
            self._landings.popitem(last=False)

    def __contains__(self, landing: Landing) -> bool:
        return landing in self._landings

    def __len__(self) -> int:
        return len(self._landings)


@dataclass
class _Open:
    """stop_at: when the writer must be told (again) to stop; inf while it may go on."""

    route: Route
    stop_at: float = math.inf
    reason: str = ""


class Landings:
    """Of one hold. A landing that was closed is never opened again."""

    def __init__(self, leases: Leases) -> None:
        self._again_s = leases.claim_reply_s
        self._open: dict[Landing, _Open] = {}
        self._closed = ClosedLandings()

    def __len__(self) -> int:
        """Those that are open."""
        return len(self._open)

    @property
    def were_used(self) -> bool:
        """Whether any was ever opened or closed."""
        return bool(self._open) or len(self._closed) > 0

    def follow(self, landing: Landing, route: Route) -> bool:
        """Whether it is open; then its writer is there from now on."""
        writer = self._open.get(landing)
        if writer is not None:
            writer.route = route
        return writer is not None

    def must_stop(self, landing: Landing) -> bool:
        return self._open[landing].stop_at < math.inf

    def open(self, landing: Landing, route: Route) -> bool:
        """False: it was closed."""
        if landing in self._closed:
            return False
        self._open[landing] = _Open(route)
        return True

    def close(self, landing: Landing) -> None:
        """Final, whether it was open or not."""
        self._open.pop(landing, None)
        self._closed.add(landing)

    def is_open_for(self, claim_id: str) -> bool:
        return any(landing.claim_id == claim_id for landing in self._open)

    def stop(self, reason: str, at: float, claim_id: str | None = None, ranks: frozenset[int] | None = None) -> None:
        """From `at` on `due` tells the writers of this claim's ranks, or of all, to stop, until they have closed."""
        for landing, writer in self._open.items():
            is_meant = claim_id in (None, landing.claim_id) and (ranks is None or landing.rank in ranks)
            if is_meant and at < writer.stop_at:
                writer.stop_at, writer.reason = at, reason

    def due(self, now: float) -> list[Send]:
        sends: list[Send] = []
        for landing, writer in self._open.items():
            if writer.stop_at <= now:
                writer.stop_at = now + self._again_s
                sends.append(Send(writer.route, StopWrite(landing=landing, reason=shorten(writer.reason))))
        return sends

    @property
    def deadline(self) -> float:
        return min((writer.stop_at for writer in self._open.values()), default=math.inf)
