"""How long things live without news, and what may be believed of a lease."""

from __future__ import annotations

import math

import msgspec

from kvferry.protocol.messages import MAX_LEASE_S


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    """The protocol's times, in seconds, and its bounds. Raises ValueError for values that make no sense.

    first_hold_s: a hold that nobody has claimed. lease_s: a claim without news. renew_s: between renewals.
    claim_reply_s: before a claim or a release without answer is sent again. parking_s: a message for a transfer
    that the producer does not know yet. handshake_s: from Connect to PeerReady. longest_hold_s: any hold,
    whatever is renewed. load_s: a load from start to report; write_s: the same where the producer writes, which may
    have to compute first. margin: the part of a lease that a consumer does
    not use, against clocks of different speed. max_parked: parked messages. max_claims: of one hold.
    max_remembered: ended holds that are still told apart from unknown ones. release_tries: sends of a release.
    """

    first_hold_s: float = 60.0
    lease_s: float = 30.0
    renew_s: float = 5.0
    claim_reply_s: float = 2.0
    parking_s: float = 5.0
    handshake_s: float = 15.0
    longest_hold_s: float = 600.0
    load_s: float = 60.0
    write_s: float = 300.0
    margin: float = 0.1
    max_parked: int = 1024
    max_claims: int = 256
    max_remembered: int = 4096
    release_tries: int = 5

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name.endswith("_s"):
                _check_seconds(name, getattr(self, name))
            elif name != "margin":
                _check_count(name, getattr(self, name))
        if not _is_number(self.margin) or not 0 <= self.margin <= 0.5:
            raise ValueError(f"margin is {self.margin!r}, must be between 0 and 0.5")
        if self.lease_s > MAX_LEASE_S:
            raise ValueError(f"lease_s is {self.lease_s!r}, must be at most {MAX_LEASE_S!r}")
        self._check_order("first_hold_s", "longest_hold_s")
        self._check_order("lease_s", "longest_hold_s")
        self._check_order("claim_reply_s", "load_s")
        self._check_order("claim_reply_s", "write_s")
        if 2 * self.renew_s > self.lease_s:
            raise ValueError(f"renew_s is {self.renew_s!r}, must be at most half of lease_s, which is {self.lease_s!r}")

    def _check_order(self, smaller: str, larger: str) -> None:
        if getattr(self, smaller) > getattr(self, larger):
            raise ValueError(
                f"{smaller} is {getattr(self, smaller)!r}, must not exceed {larger}, which is {getattr(self, larger)!r}"
            )

    def may_accept(self, sent_at: float, seen_at: float, lease_s: float) -> bool:
        """Whether reads that were seen finished at `seen_at` finished while the lease still ran.

        sent_at: when the claim whose grant gave `lease_s` was sent. The producer counts from later, when it answers.
        """
        return seen_at < sent_at + lease_s * (1 - self.margin)

    def is_fresh(self, sent_at: float, seen_at: float, lease_s: float) -> bool:
        """As `may_accept`, and early enough in the lease that time alone is trusted."""
        return self.may_accept(sent_at, seen_at, lease_s) and seen_at <= sent_at + lease_s / 2


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_seconds(name: str, value: object) -> None:
    if not _is_number(value) or not value > 0:  # type: ignore[operator]  # a number by now
        raise ValueError(f"{name} is {value!r}, must be a positive number of seconds")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, must be a positive integer")


class Alarm:
    """When a machine must look at its deadlines next: never late, sometimes early.

    A deadline that moves away needs no call; the look that comes too early sets the alarm anew.
    """

    def __init__(self) -> None:
        self._at = math.inf

    def by(self, at: float) -> None:
        """Look no later than `at`."""
        self._at = min(self._at, at)

    def is_due(self, now: float) -> bool:
        return now >= self._at

    def clear(self) -> None:
        self._at = math.inf

    @property
    def at(self) -> float | None:
        return None if math.isinf(self._at) else self._at
