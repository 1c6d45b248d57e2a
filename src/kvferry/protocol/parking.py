"""Messages that came before the producer knew their transfer."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple, TypeAlias

from kvferry.protocol.events import Route
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Claim, OpenWrite, Release, Renew

HoldKey: TypeAlias = tuple[str, int]
"""Transfer id, generation; 0 where the id is a router's."""

Parkable: TypeAlias = Claim | OpenWrite | Renew | Release


class _Lot(NamedTuple):
    until: float
    messages: list[tuple[Route, Parkable]]


class Parking:
    """Bounded in number and in time: `parking_s` from a transfer's first message, or `lease_s` where a router named the
    transfer, since then the producer's request is on its way as well.

    `max_parked` messages over all transfers, and a quarter of that from one route, so that no peer takes all the room.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._lots: dict[HoldKey, _Lot] = {}
        self._size = 0
        self._per_route: Counter[Route] = Counter()
        self._max_per_route = max(1, leases.max_parked // 4)

    def add(self, key: HoldKey, route: Route, message: Parkable, now: float) -> bool:
        """False: full, or full for this route, and the message isn't kept. What is parked already is parked once."""
        if key in self._lots and (route, message) in self._lots[key].messages:
            return True
        if self._size >= self._leases.max_parked or self._per_route[route] >= self._max_per_route:
            return False
        lot = self._lots.setdefault(key, _Lot(now + self.time_s(key), []))
        lot.messages.append((route, message))
        self._size += 1
        self._per_route[route] += 1
        return True

    def time_s(self, key: HoldKey) -> float:
        """How long messages for it wait."""
        return self._leases.parking_s if key[1] else self._leases.lease_s

    def take(self, key: HoldKey) -> list[tuple[Route, Parkable]]:
        """The messages for one transfer, in the order in which they came; they are parked no more."""
        lot = self._lots.pop(key, None)
        if lot is None:
            return []
        self._size -= len(lot.messages)
        for route, _ in lot.messages:
            self._per_route[route] -= 1
            if not self._per_route[route]:
                del self._per_route[route]
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
