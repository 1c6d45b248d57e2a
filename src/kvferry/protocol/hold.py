"""One hold of the producer, and the claims on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

from kvferry.protocol.events import Held
from kvferry.protocol.fanin import ReleaseSet
from kvferry.protocol.lease import Leases
from kvferry.protocol.transitions import Table


class HoldState(Enum):
    UNCLAIMED = "unclaimed"
    CLAIMED = "claimed"
    RELEASED = "released"
    LAPSED = "lapsed"
    EXPIRED = "expired"
    VOIDED = "voided"


class HoldTrigger(Enum):
    CLAIM = "a claim is seen"
    ALL_RELEASED = "every claim is released"
    ALL_OVER = "every claim is over, some lapsed"
    TIMEOUT = "first_hold_s without a claim"
    VOID = "void or closing"


HOLDS = Table(
    "hold",
    HoldState.UNCLAIMED,
    {
        (HoldState.UNCLAIMED, HoldTrigger.CLAIM): HoldState.CLAIMED,
        (HoldState.UNCLAIMED, HoldTrigger.TIMEOUT): HoldState.EXPIRED,
        (HoldState.UNCLAIMED, HoldTrigger.VOID): HoldState.VOIDED,
        (HoldState.CLAIMED, HoldTrigger.CLAIM): HoldState.CLAIMED,
        (HoldState.CLAIMED, HoldTrigger.ALL_RELEASED): HoldState.RELEASED,
        (HoldState.CLAIMED, HoldTrigger.ALL_OVER): HoldState.LAPSED,
    },
)


class ClaimState(Enum):
    OPEN = "open"
    RELEASED = "released"
    LAPSED = "lapsed"


class ClaimTrigger(Enum):
    RENEW = "a claim or a renewal"
    ALL_RELEASED = "every rank has released"
    TIMEOUT = "the lease ran out"


CLAIMS = Table(
    "claim",
    ClaimState.OPEN,
    {
        (ClaimState.OPEN, ClaimTrigger.RENEW): ClaimState.OPEN,
        (ClaimState.OPEN, ClaimTrigger.ALL_RELEASED): ClaimState.RELEASED,
        (ClaimState.OPEN, ClaimTrigger.TIMEOUT): ClaimState.LAPSED,
    },
)


class ClaimRecord:
    """One claim as the producer sees it. lease_end: on the producer's clock; nothing is freed before it."""

    __slots__ = ("lease_end", "num_ranks", "releases", "state")

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.state = CLAIMS.start
        self.releases = ReleaseSet(range(num_ranks))
        self.lease_end = -math.inf

    @property
    def is_open(self) -> bool:
        return self.state is ClaimState.OPEN


class Hold:
    """Blocks that the ledger holds, with every claim on them that was ever seen."""

    __slots__ = ("_leases", "claims", "first_end", "held_at", "longest_end", "offer", "state")

    def __init__(self, offer: Held, leases: Leases, now: float) -> None:
        self.offer = offer
        self.state = HOLDS.start
        self.claims: dict[str, ClaimRecord] = {}
        self.held_at = now
        self.first_end = now + leases.first_hold_s
        self.longest_end = now + leases.longest_hold_s
        self._leases = leases

    def open_claim(self, claim_id: str, num_ranks: int) -> ClaimRecord:
        self.state = HOLDS.next(self.state, HoldTrigger.CLAIM)
        record = self.claims[claim_id] = ClaimRecord(num_ranks)
        return record

    def renew(self, record: ClaimRecord, now: float) -> float:
        """Give the claim a lease from `now`, shortened to the longest hold. Returns its length in seconds."""
        record.state = CLAIMS.next(record.state, ClaimTrigger.RENEW)
        record.lease_end = min(now + self._leases.lease_s, self.longest_end)
        return record.lease_end - now

    def release(self, record: ClaimRecord, ranks: Iterable[int] | None) -> bool:
        """Whether the release is news. Raises ValueError, and changes nothing, for ranks that the claim hasn't."""
        news = record.releases.add(ranks)
        if record.is_open and record.releases.is_complete:
            record.state = CLAIMS.next(record.state, ClaimTrigger.ALL_RELEASED)
        return news

    def lapse(self, now: float) -> list[str]:
        """End the claims whose lease has run out; returns their ids."""
        lapsed = [name for name, record in self.claims.items() if record.is_open and record.lease_end <= now]
        for name in lapsed:
            self.claims[name].state = CLAIMS.next(self.claims[name].state, ClaimTrigger.TIMEOUT)
        return lapsed

    def verdict(self, now: float) -> HoldTrigger | None:
        """What ends the hold now, if anything."""
        if not self.claims:
            return HoldTrigger.TIMEOUT if self.first_end <= now else None
        states = {record.state for record in self.claims.values()}
        if ClaimState.OPEN in states:
            return None
        return HoldTrigger.ALL_OVER if ClaimState.LAPSED in states else HoldTrigger.ALL_RELEASED

    @property
    def deadline(self) -> float:
        """When `lapse` or `verdict` may have something new to say."""
        if not self.claims:
            return self.first_end
        return min((record.lease_end for record in self.claims.values() if record.is_open), default=-math.inf)

    def released_claims(self) -> frozenset[str]:
        return frozenset(name for name, record in self.claims.items() if record.state is ClaimState.RELEASED)
