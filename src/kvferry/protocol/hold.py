"""One hold of the producer, and the claims on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvferry.protocol.events import Held, Promised, Route
from kvferry.protocol.fanin import ReleaseSet
from kvferry.protocol.landings import Landings
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import RefusedReason
from kvferry.protocol.transitions import Table

MAX_DISOWNED = 256
"""Of one hold; the oldest are forgotten."""


class No(NamedTuple):
    """Why a claim can't be had. is_over: this very claim was released, so nothing is lost."""

    reason: RefusedReason
    detail: str
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class HoldState(Enum):
    UNCLAIMED = "unclaimed"
    CLAIMED = "claimed"
    RELEASED = "released"
    LAPSED = "lapsed"
    EXPIRED = "expired"
    VOIDED = "voided"
    FAILED = "failed"


class HoldTrigger(Enum):
    CLAIM = "a claim is seen"
    ALL_RELEASED = "every claim is released"
    ALL_OVER = "every claim is over, some lapsed"
    TIMEOUT = "nobody claimed it within first_hold_s"
    VOID = "void or closing"
    DISOWN = "its last claim is disowned"
    FAIL = "its request ended before its prompt was computed"


HOLDS = Table(
    "hold",
    HoldState.UNCLAIMED,
    {
        (HoldState.UNCLAIMED, HoldTrigger.CLAIM): HoldState.CLAIMED,
        (HoldState.UNCLAIMED, HoldTrigger.TIMEOUT): HoldState.EXPIRED,
        (HoldState.UNCLAIMED, HoldTrigger.VOID): HoldState.VOIDED,
        (HoldState.CLAIMED, HoldTrigger.CLAIM): HoldState.CLAIMED,
        (HoldState.CLAIMED, HoldTrigger.DISOWN): HoldState.UNCLAIMED,
        (HoldState.CLAIMED, HoldTrigger.ALL_RELEASED): HoldState.RELEASED,
        (HoldState.CLAIMED, HoldTrigger.ALL_OVER): HoldState.LAPSED,
        (HoldState.UNCLAIMED, HoldTrigger.FAIL): HoldState.FAILED,
        (HoldState.CLAIMED, HoldTrigger.FAIL): HoldState.FAILED,
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
    """One claim as the producer sees it. lease_end: on the producer's clock; nothing is freed before it.

    granted_end: of the last lease that a rank was granted, which may prove its reads.
    """

    __slots__ = ("granted_end", "lease_end", "num_ranks", "releases", "state")

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.state = CLAIMS.start
        self.releases = ReleaseSet(range(num_ranks))
        self.lease_end = -math.inf
        self.granted_end = -math.inf

    @property
    def is_open(self) -> bool:
        return self.state is ClaimState.OPEN

    @property
    def was_granted(self) -> bool:
        return self.granted_end > -math.inf


class Hold:
    """Blocks that the ledger holds or that are promised, with every claim on them that was ever seen.

    offer: Promised while the prompt is not computed. routers_id: see there. is_awaited: a consumer claims it by that
    name. failed: why the prompt never will be
    computed; "" if it is, or may be. landings: of ranks of this engine that may be writing.
    disowned: why, by id of a claim whose reader wanted something else; it neither keeps nor ends the hold.
    disowned_end: until then a rank of such a claim may trust a lease that it was granted.
    plain_ranks: by route, who said a PlainRelease.
    """

    __slots__ = (
        "_leases",
        "claims",
        "disowned",
        "disowned_end",
        "failed",
        "first_end",
        "held_at",
        "is_awaited",
        "landings",
        "longest_end",
        "offer",
        "plain_ranks",
        "routers_id",
        "state",
    )

    def __init__(self, offer: Held | Promised, leases: Leases, now: float) -> None:
        self.offer = offer
        self.routers_id = offer.routers_id if isinstance(offer, Promised) else ""
        self.is_awaited = False
        self.failed = ""
        self.plain_ranks: dict[Route, int] = {}
        self.landings = Landings(leases)
        self.state = HOLDS.start
        self.claims: dict[str, ClaimRecord] = {}
        self.disowned: dict[str, No] = {}
        self.disowned_end = -math.inf
        self.held_at = now
        self.first_end = self.longest_end = math.inf
        self._leases = leases
        if isinstance(offer, Held):
            self.keep(offer, now)

    @property
    def is_live(self) -> bool:
        """Its request runs: nothing is held yet, and what is computed may be written."""
        return isinstance(self.offer, Promised) and not self.failed

    def keep(self, offer: Held, now: float) -> None:
        """The prompt is computed, and the ledger holds its blocks."""
        self.offer = offer
        self.held_at = now
        self.first_end = now + self._leases.first_hold_s
        self.longest_end = now + self._leases.longest_hold_s

    def open_claim(self, claim_id: str, num_ranks: int) -> ClaimRecord:
        self.state = HOLDS.next(self.state, HoldTrigger.CLAIM)
        record = self.claims[claim_id] = ClaimRecord(num_ranks)
        return record

    def disown(self, claim_id: str, no: No) -> None:
        """The claim's reader was refused for what it wants: forget its claim, and answer it with `no` from now on.
        What is being written for it must stop."""
        record = self.claims.pop(claim_id, None)
        if record is not None:
            if record.is_open:
                self.disowned_end = max(self.disowned_end, record.granted_end)
            if not self.claims:
                self.state = HOLDS.next(self.state, HoldTrigger.DISOWN)
        self.disowned.setdefault(claim_id, no)
        if len(self.disowned) > MAX_DISOWNED:
            del self.disowned[next(iter(self.disowned))]

    def renew(self, record: ClaimRecord, now: float) -> float:
        """Give the claim a lease from `now`, shortened to the longest hold. Returns its length in seconds."""
        record.state = CLAIMS.next(record.state, ClaimTrigger.RENEW)
        record.lease_end = min(now + self._leases.lease_s, self.longest_end)
        return min(record.lease_end - now, self._leases.lease_s)

    def release(self, record: ClaimRecord, ranks: Iterable[int] | None) -> bool:
        """Whether the release is news. Raises ValueError, and changes nothing, for ranks that the claim hasn't."""
        news = record.releases.add(ranks)
        if record.is_open and record.releases.is_complete:
            record.state = CLAIMS.next(record.state, ClaimTrigger.ALL_RELEASED)
        return news

    def lapse(self, now: float) -> list[str]:
        """End the claims whose lease has run out; returns their ids. What is being written for them must stop."""
        lapsed = [name for name, record in self.claims.items() if record.is_open and record.lease_end <= now]
        for name in lapsed:
            self.claims[name].state = CLAIMS.next(self.claims[name].state, ClaimTrigger.TIMEOUT)
            self.landings.stop("lapsed: the claim's lease ran out", now, name)
        return lapsed

    def verdict(self, now: float) -> HoldTrigger | None:
        """What ends the hold now, if anything; not before each of its landings is closed."""
        if self.failed:
            return HoldTrigger.FAIL
        if self.is_live:
            return None
        if now < self.disowned_end:
            return None
        if not self.claims:
            return HoldTrigger.TIMEOUT if self.first_end <= now else None
        states = {record.state for record in self.claims.values()}
        if ClaimState.OPEN in states:
            return None
        return HoldTrigger.ALL_OVER if ClaimState.LAPSED in states else HoldTrigger.ALL_RELEASED

    @property
    def deadline(self) -> float:
        """When `lapse`, `verdict` or `landings.due` may have something new to say."""
        claims_end = min((record.lease_end for record in self.claims.values() if record.is_open), default=math.inf)
        if self.is_live or len(self.landings):
            return min(claims_end, self.landings.deadline)
        if not self.claims:
            return max(self.first_end, self.disowned_end)
        return claims_end if claims_end < math.inf else self.disowned_end

    def may_be_relieved(self) -> bool:
        """Held; its consumer waits by the router's name, and so may have blocks of its own; and none of its ranks has
        come for it. By any other name a consumer waits without blocks."""
        was_granted = self.disowned_end > -math.inf or any(record.was_granted for record in self.claims.values())
        has_come = self.landings.were_used or was_granted
        return self.is_awaited and not self.is_live and not self.failed and not has_come

    def may_be_voided(self, now: float) -> bool:
        return not (self.claims or self.is_live or len(self.landings)) and self.disowned_end <= now

    def released_claims(self) -> frozenset[str]:
        return frozenset(name for name, record in self.claims.items() if record.state is ClaimState.RELEASED)
