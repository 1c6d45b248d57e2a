"""Messages that came before the producer knew their transfer."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from kvferry.protocol.events import Route
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Claim, Release, Renew

HoldKey: TypeAlias = tuple[str, int]
"""Transfer id, generation."""

Parkable: TypeAlias = Claim | Renew | Release


class _Lot(NamedTuple):
    until: float
    messages: list[tuple[Route, Parkable]]


class Parking:
    """Bounded in number (`max_parked`, over all transfers) and time (`parking_s` from a transfer's first message)."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._lots: dict[HoldKey, _Lot] = {}
        self._size = 0

    def add(self, key: HoldKey, route: Route, message: Parkable, now: float) -> bool:
        """False: full, and the message isn't kept."""
        if self._size >= self._leases.max_parked:
            return False
        lot = self._lots.setdefault(key, _Lot(now + self._leases.parking_s, []))
        lot.messages.append((route, message))
        self._size += 1
        return True

    def take(self, key: HoldKey) -> list[tuple[Route, Parkable]]:
        """The messages for one transfer, in the order in which they came; they are parked no more."""
        lot = self._lots.pop(key, None)
        if lot is None:
            return []
        self._size -= len(lot.messages)
        return lot.messages

    def transfers(self) -> list[HoldKey]:
        return list(self._lots)

    def expired(self, now: float) -> list[HoldKey]:
        return [key for key, lot in self._lots.items() if lot.until <= now]

    @property
    def deadline(self) -> float:
        """inf if nothing is parked."""
        return min((lot.until for lot in self._lots.values()), default=math.inf)

    def __len__(self) -> int:
        """Messages, over all transfers."""
        return self._size
