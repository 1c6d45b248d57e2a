"""Bugs that real connectors have had, planted into the machines. The simulator is worth what it finds of these.

Here are those of reading and of the producer's holds; `planted_writes` has those of writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from kvferry.protocol import load, loader, producer
from kvferry.protocol.consumer import ConsumerEngine
from kvferry.protocol.events import Note, Quieted, Report
from kvferry.protocol.fanin import ReleaseSet
from kvferry.protocol.hold import ClaimState, Hold, HoldTrigger
from kvferry.protocol.lease import Leases
from kvferry.protocol.load import Job, LoadTrigger
from kvferry.protocol.loader import Loader
from kvferry.protocol.parking import Parking
from kvferry.protocol.producer import ProducerEngine

Planted = Callable[[], AbstractContextManager[Any]]


def any_rank_frees() -> AbstractContextManager[Any]:
    """The first rank's release ends the claim."""
    return patch.object(ReleaseSet, "is_complete", property(lambda self: bool(self._released)))


def duplicates_count() -> AbstractContextManager[Any]:
    """Releases are counted, so that a repeated one stands in for another rank's."""

    def add(self: Any, ranks: Iterable[int] | None) -> bool:
        self.count = getattr(self, "count", 0) + (len(self._expected) if ranks is None else len(tuple(ranks)))
        return True

    return all_of(
        patch.object(ReleaseSet, "add", add),
        patch.object(ReleaseSet, "is_complete", property(lambda self: self.count >= len(self._expected))),
    )


def first_claim_is_all() -> AbstractContextManager[Any]:
    """The hold ends with the first claim that is released, whoever else reads."""

    def verdict(self: Hold, now: float) -> HoldTrigger | None:
        if any(record.state is ClaimState.RELEASED for record in self.claims.values()):
            return HoldTrigger.ALL_RELEASED
        return real(self, now)

    real = Hold.verdict
    return patch.object(Hold, "verdict", verdict)


def timer_frees() -> AbstractContextManager[Any]:
    """A hold ends after first_hold_s, claimed or not."""

    def verdict(self: Hold, now: float) -> HoldTrigger | None:
        if self.claims and self.first_end <= now:
            return HoldTrigger.ALL_OVER
        return real(self, now)

    real = Hold.verdict
    return patch.object(Hold, "verdict", verdict)


def void_frees_claimed() -> AbstractContextManager[Any]:
    """Resetting the prefix cache drops what others still read."""

    def void(self: Any, reason: str, now: float) -> list[Any]:
        return [
            action
            for hold in self._all_holds()
            for action in self._end(hold, HoldTrigger.ALL_OVER if hold.claims else HoldTrigger.VOID, reason)
        ]

    return patch.object(ProducerEngine, "_void", void)


def longest_hold_forgotten() -> AbstractContextManager[Any]:
    """A claim that is renewed for ever is held for ever."""

    def renew(self: Any, record: Any, now: float) -> float:
        record.lease_end = now + self._leases.lease_s
        return float(self._leases.lease_s)

    return patch.object(Hold, "renew", renew)


def leases_are_forgotten() -> AbstractContextManager[Any]:
    """A claim lives until it is released, so that a dead consumer holds blocks for ever."""
    return patch.object(Hold, "lapse", lambda self, now: [])


def claims_rise_again() -> AbstractContextManager[Any]:
    """A claim that comes late, after its release, is granted."""
    return patch.object(producer, "admit", _admit_whatever)


def digest_unchecked() -> AbstractContextManager[Any]:
    return patch.object(producer, "mismatch", lambda offer, claim: None)


def generation_unchecked() -> AbstractContextManager[Any]:
    """A transfer is known by its id alone."""

    def find(self: Any, ref: Any, claim_id: str) -> Any:
        holds = self._holds.get(ref.transfer_id)
        return next(iter(holds.values())) if holds else real(self, ref, claim_id)

    real = ProducerEngine._find
    return patch.object(ProducerEngine, "_find", find)


def refused_readers_count() -> AbstractContextManager[Any]:
    """A reader that was refused for its prompt still ends, or keeps, the hold of the right one."""
    return patch.object(Hold, "disown", lambda self, claim_id, no: None)


def parked_for_ever() -> AbstractContextManager[Any]:
    return patch.object(Parking, "expired", lambda self, now: [])


def accepted_unasked() -> AbstractContextManager[Any]:
    """Reads that are done are good."""
    return all_of(
        patch.object(Job, "is_proven", lambda self, leases: self.done_at is not None),
        patch.object(Loader, "_on_refused", lambda self, refused, now: []),
    )


def lease_unchecked() -> AbstractContextManager[Any]:
    """Any grant proves any read, however late it was done."""
    return patch.object(Job, "is_proven", lambda self, leases: self.granted is not None and self.done_at is not None)


def refusal_after_grant_ignored() -> AbstractContextManager[Any]:
    """A claim that was granted once is taken for granted."""

    def on_refused(self: Any, refused: Any, now: float) -> list[Any]:
        job = self._asked_by(refused)
        if job is not None and job.granted is not None and job.done_at is not None:
            return self._accept(job, LoadTrigger.PROVEN)  # type: ignore[no-any-return]
        return real(self, refused, now)

    real = Loader._on_refused
    return patch.object(Loader, "_on_refused", on_refused)


def lease_counted_from_grant() -> AbstractContextManager[Any]:
    """The lease is counted from when its grant came, not from when its claim was sent."""

    def on_grant(self: Any, grant: Any, now: float) -> list[Any]:
        job = self._asked_by(grant)
        if job is not None:
            job.asked[grant.seq] = job.asked[grant.seq]._replace(sent_at=now)
        return real(self, grant, now)

    real = Loader._on_grant
    return patch.object(Loader, "_on_grant", on_grant)


def margin_forgotten() -> AbstractContextManager[Any]:
    """Time is trusted to the last moment of the lease, as if all clocks ran alike."""
    return patch.object(Leases, "is_fresh", lambda self, sent_at, seen_at, lease_s: seen_at < sent_at + lease_s)


def called_quiet() -> AbstractContextManager[Any]:
    """A failed load's blocks are given back at once."""
    return _reports(lambda action: Report(action.load_id, action.ok, action.reason, quiet=True))


def quiet_when_told_to_stop() -> AbstractContextManager[Any]:
    """Abandoned reads are taken for ended ones."""

    def fail(self: Any, job: Any, *args: Any) -> list[Any]:
        actions = real(self, job, *args)
        return [*actions, Quieted(job.load.load_id)] if job.is_reported else actions

    real = Loader._fail
    return patch.object(Loader, "_fail", fail)


def refusal_unreported() -> AbstractContextManager[Any]:
    """A refused load is neither failed nor done."""

    def on_refused(self: Any, refused: Any, now: float) -> list[Any]:
        job = self._asked_by(refused)
        if job is not None:
            job.deadline = float("inf")
        return []

    return patch.object(Loader, "_on_refused", on_refused)


def reported_twice() -> AbstractContextManager[Any]:
    """A failed read is reported again for a load that was given up."""

    def on_reads_failed(self: Any, job: Any, reason: str, now: float) -> list[Any]:
        extra = [Report(job.load.load_id, False, reason, False)] if job.is_reported else []
        return real(self, job, reason, now) + extra

    real = Loader._on_reads_failed
    return patch.object(Loader, "_on_reads_failed", on_reads_failed)


def deadline_forgotten() -> AbstractContextManager[Any]:
    """A load waits for its answer as long as it takes."""

    def job_init(self: Any, load: Any, deadline: float) -> None:
        real(self, load, float("inf"))

    real = load.Job.__init__
    return patch.object(loader.Job, "__init__", job_init)


def renewals_forgotten() -> AbstractContextManager[Any]:
    """A request that waits longer than a lease loses its claim."""
    return patch.object(ConsumerEngine, "_renewal", lambda self, address, claim_ids: Note("renewal", address))


def nothing_is_released_for_nothing() -> AbstractContextManager[Any]:
    """A request that no worker ever saw is forgotten."""

    def release(self: Any, use: Any, over: Any, now: float) -> list[Any]:
        if over.outcome != "unused":
            return real(self, use, over, now)
        del self._uses[over.claim_id]
        return []

    real = ConsumerEngine._release
    return patch.object(ConsumerEngine, "_release", release)


def release_repeated_for_ever() -> AbstractContextManager[Any]:
    """A producer that is gone is told for ever."""
    return patch.object(ConsumerEngine, "_release_again", lambda self, use, over, now: self._release(use, over, now))


READS: tuple[Planted, ...] = (
    any_rank_frees,
    duplicates_count,
    first_claim_is_all,
    timer_frees,
    void_frees_claimed,
    longest_hold_forgotten,
    leases_are_forgotten,
    claims_rise_again,
    digest_unchecked,
    generation_unchecked,
    refused_readers_count,
    parked_for_ever,
    accepted_unasked,
    lease_unchecked,
    refusal_after_grant_ignored,
    lease_counted_from_grant,
    margin_forgotten,
    called_quiet,
    quiet_when_told_to_stop,
    refusal_unreported,
    reported_twice,
    deadline_forgotten,
    renewals_forgotten,
    nothing_is_released_for_nothing,
    release_repeated_for_ever,
)


def _admit_whatever(hold: Hold, claim_id: str, num_ranks: int, now: float, **_: Any) -> Any:
    return hold.claims.get(claim_id) or hold.open_claim(claim_id, num_ranks)


def _reports(change: Callable[[Report], Report]) -> AbstractContextManager[Any]:
    def fail(self: Any, *args: Any) -> list[Any]:
        return [change(action) if isinstance(action, Report) else action for action in real(self, *args)]

    real = Loader._fail
    return patch.object(Loader, "_fail", fail)


class all_of(AbstractContextManager[Any]):
    """Several patches at once."""

    def __init__(self, *patches: Any) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for each in self._patches:
            each.__enter__()

    def __exit__(self, *error: object) -> None:
        for each in reversed(self._patches):
            each.__exit__(*error)
