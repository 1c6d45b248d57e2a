"""The producer's engine: who may read which held blocks, and when they are free again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeAlias

import msgspec

from kvferry.protocol.admission import MAX_RANKS, admit, mismatch, ranks_make_sense
from kvferry.protocol.events import (
    Closing,
    Dropped,
    FreeHold,
    FreeOutcome,
    Held,
    Note,
    Promised,
    Received,
    Relieve,
    Route,
    Send,
    Tick,
    Void,
)
from kvferry.protocol.hold import HOLDS, ClaimRecord, Hold, HoldState, HoldTrigger, No
from kvferry.protocol.landings import ClosedLandings
from kvferry.protocol.lease import Alarm, Leases
from kvferry.protocol.messages import (
    CLAIM_OVER,
    Claim,
    CloseWrite,
    Grant,
    Message,
    OpenWrite,
    PlainRelease,
    Refused,
    RefusedReason,
    Release,
    Released,
    Renew,
    Renewed,
    RenewedEntry,
    RenewEntry,
    TransferRef,
    WriteClosed,
    WriteOpened,
    shorten,
)
from kvferry.protocol.parking import HoldKey, Parkable, Parking
from kvferry.protocol.transitions import IllegalTransition

__all__ = [
    "Action",
    "Closing",
    "Dropped",
    "Event",
    "FreeHold",
    "Held",
    "Note",
    "ProducerEngine",
    "Promised",
    "Received",
    "Relieve",
    "Send",
    "Tick",
    "Void",
]

Event: TypeAlias = Promised | Held | Dropped | Relieve | Received | Void | Closing | Tick
Action: TypeAlias = Send | FreeHold | Note

_OUTCOMES: dict[HoldState, FreeOutcome] = {
    HoldState.RELEASED: "released",
    HoldState.LAPSED: "lapsed",
    HoldState.EXPIRED: "expired",
    HoldState.VOIDED: "voided",
    HoldState.FAILED: "failed",
}
_REASONS: dict[FreeOutcome, RefusedReason] = {
    "released": "released",
    "lapsed": "lapsed",
    "expired": "lapsed",
    "voided": "ended",
    "failed": "failed",
}


PLAIN_CLAIM = "a consumer that names no rank"
"""The id of its claim; not one that a consumer of ours could have."""


class _Past(NamedTuple):
    """What is remembered of a hold that ended."""

    outcome: FreeOutcome
    detail: str
    released_claims: frozenset[str]
    routers_id: str


class ProducerEngine:
    """Answers claims, renewals and releases, and says of each hold once when to give its blocks back.

    A hold ends when every claim on it that was seen is released or has lapsed; without any claim, after
    `first_hold_s`; whatever comes, after `longest_hold_s` (leases are shortened to that). It never ends while a
    lease that was granted and not released still runs, nor while one of this engine's own ranks may be writing from it:
    that one is told to stop, again and again, until it has closed. What is promised can be claimed, and written as it
    is computed, before it is held. Messages of peers never raise; events of the own engine
    raise IllegalTransition where they make no sense.
    """

    def __init__(self, engine_id: str, incarnation: str, leases: Leases) -> None:
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._leases = leases
        self._holds: dict[str, dict[int, Hold]] = {}  # by transfer id, then generation
        self._parking = Parking(leases)
        self._past: OrderedDict[HoldKey, _Past] = OrderedDict()
        self._routers_ids: dict[str, HoldKey] = {}
        self._closed = ClosedLandings()  # also of transfers that were not known then
        self._closing: str | None = None
        self._alarm = Alarm()

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Promised | Held | Dropped):
            self._check_own(event)
        actions = self._expire(now)
        match event:
            case Promised():
                actions += self._on_promised(event, now)
            case Held():
                actions += self._on_held(event, now)
            case Dropped(ref, reason):
                actions += self._on_dropped(ref, reason, now)
            case Received(route, message):
                actions += self._on_message(route, message, now)
            case Void(reason):
                actions += self._void(reason, now)
            case Relieve(reason):
                actions += self._relieve(reason, now)
            case Closing(reason):
                actions += self._close(reason, now)
            case Tick():
                pass
        return actions

    def next_deadline(self) -> float | None:
        return self._alarm.at

    @property
    def num_holds(self) -> int:
        return sum(len(holds) for holds in self._holds.values())

    @property
    def num_open_claims(self) -> int:
        return sum(record.is_open for hold in self._all_holds() for record in hold.claims.values())

    @property
    def num_parked(self) -> int:
        """Messages, over all transfers."""
        return len(self._parking)

    def oldest_hold_age_s(self, now: float) -> float:
        """0.0 if nothing is held."""
        return max((now - hold.held_at for hold in self._all_holds()), default=0.0)

    # The own engine's events

    def _check_own(self, event: Promised | Held | Dropped) -> None:
        ref = event.ref
        if (ref.producer, ref.incarnation) != (self._engine_id, self._incarnation):
            raise IllegalTransition(f"hold of {ref.producer}/{ref.incarnation} at {self._name}")
        known = self._holds.get(ref.transfer_id, {}).get(ref.generation)
        where = f"transfer {ref.transfer_id} generation {ref.generation}"
        if isinstance(event, Dropped):
            if known is None or not known.is_live:
                raise IllegalTransition(f"{where} is dropped, and was not promised")
        elif (ref.transfer_id, ref.generation) in self._past or (known is not None and not known.is_live):
            raise IllegalTransition(f"{where} was held before")
        elif isinstance(event, Promised):
            if known is not None or event.routers_id in self._routers_ids:
                raise IllegalTransition(f"{where} ({event.routers_id}) was promised before")
        elif known is not None and (known.offer.num_tokens, known.offer.digest) != (event.num_tokens, event.digest):
            raise IllegalTransition(f"{where} is held for another prompt than was promised")

    def knows_routers_id(self, routers_id: str) -> bool:
        """Whether a router's name is taken: by a transfer that is promised, held, or remembered."""
        return routers_id in self._routers_ids

    def _on_promised(self, promise: Promised, now: float) -> list[Action]:
        actions = self._add(Hold(promise, self._leases, now), now)
        if promise.routers_id:
            self._routers_ids[promise.routers_id] = (promise.ref.transfer_id, promise.ref.generation)
            actions += self._unpark((promise.routers_id, 0), now)
        return actions

    def _on_held(self, offer: Held, now: float) -> list[Action]:
        hold = self._holds.get(offer.ref.transfer_id, {}).get(offer.ref.generation)
        if hold is not None:
            hold.keep(offer, now)
            return self._settle(hold, now)
        hold = Hold(offer, self._leases, now)
        actions = self._add(hold, now)
        return self._end(hold, HoldTrigger.VOID, self._closing) if self._closing is not None else actions

    def _add(self, hold: Hold, now: float) -> list[Action]:
        ref = hold.offer.ref
        self._holds.setdefault(ref.transfer_id, {})[ref.generation] = hold
        if self._closing is not None:
            return []
        self._alarm.by(hold.deadline)
        return self._unpark((ref.transfer_id, ref.generation), now)

    def _unpark(self, key: HoldKey, now: float) -> list[Action]:
        return [act for route, message in self._parking.take(key) for act in self._on_message(route, message, now)]

    def _on_dropped(self, ref: TransferRef, reason: str, now: float) -> list[Action]:
        hold = self._holds[ref.transfer_id][ref.generation]
        hold.failed = reason
        return self._settle(hold, now)

    def _void(self, reason: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for hold in self._all_holds():
            if hold.may_be_voided(now):
                actions += self._end(hold, HoldTrigger.VOID, reason)
        return actions

    def _relieve(self, reason: str, now: float) -> list[Action]:
        oldest = min((hold for hold in self._all_holds() if hold.may_be_relieved()), key=_held_at, default=None)
        if oldest is None:
            return []
        oldest.failed = reason
        return [Note("hold_relieved", f"{_name(oldest)}: {reason}"), *self._settle(oldest, now)]

    def _close(self, reason: str, now: float) -> list[Action]:
        self._closing = reason
        actions = self._void(reason, now)
        for key in self._parking.transfers():
            actions += self._turn_away(self._parking.take(key), No("ended", reason))
        return actions

    # Messages

    def _on_message(self, route: Route, message: Message, now: float) -> list[Action]:
        match message:
            case Claim():
                return self._on_claim(route, message, now)
            case Renew():
                return self._on_renew(route, message, now)
            case Release():
                return self._on_release(route, message, now)
            case PlainRelease():
                return self._on_plain_release(route, message, now)
            case OpenWrite():
                return self._on_open_write(route, message, now)
            case CloseWrite():
                return self._on_close_write(route, message, now)
        return [Note("unexpected_message", f"{type(message).__name__} at a producer")]

    def _on_claim(self, route: Route, claim: Claim, now: float) -> list[Action]:
        if not 0 <= claim.rank < claim.num_ranks <= MAX_RANKS:
            return [Note("bad_message", f"claim of rank {claim.rank} of {claim.num_ranks}")]
        hold = self._find(claim.ref, claim.claim_id)
        if hold is None:
            return self._park_or_refuse(route, claim, now)
        if isinstance(hold, No):
            return self._refuse(route, claim, hold)
        if (wrong := mismatch(hold.offer, claim)) is not None:
            return self._disown(hold, route, claim, wrong, now)
        if hold.is_live:
            return self._refuse(route, claim, No("busy", "the prompt is still being computed"))
        record = self._admit(hold, claim.claim_id, claim.num_ranks, now, claim.rank)
        if isinstance(record, No):
            return self._refuse(route, claim, record)
        lease_s = self._renew(hold, record, now)
        record.granted_end = record.lease_end
        grant = Grant(
            claim_id=claim.claim_id,
            rank=claim.rank,
            seq=claim.seq,
            generation=claim.ref.generation,
            lease_s=lease_s,
        )
        return [Send(route, grant)]

    def _disown(self, hold: Hold, route: Route, claim: Claim | OpenWrite, no: No, now: float) -> list[Action]:
        claim_id = claim.claim_id if isinstance(claim, Claim) else claim.landing.claim_id
        hold.disown(claim_id, no)
        hold.landings.stop(str(no), now, claim_id)
        return [*self._refuse(route, claim, no), *self._settle(hold, now)]

    def _on_open_write(self, route: Route, ask: OpenWrite, now: float) -> list[Action]:
        landing = ask.landing
        if not 0 <= landing.rank < ask.num_ranks <= MAX_RANKS:
            return self._refuse(route, ask, No("topology", f"write for rank {landing.rank} of {ask.num_ranks} ranks"))
        hold = self._find(ask.ref, landing.claim_id)
        if hold is None and landing not in self._closed:
            return self._park_or_refuse(route, ask, now)
        if isinstance(hold, No):
            return self._refuse(route, ask, hold)
        if hold is None or landing in self._closed:
            return self._refuse(route, ask, No("ended", "its writer has closed it"))
        if hold.landings.follow(landing, route):  # the answer was lost, or the writer only shows where it is
            return [] if hold.landings.must_stop(landing) else [Send(route, self._opened(hold, ask))]
        if (wrong := mismatch(hold.offer, ask)) is not None:
            return self._disown(hold, route, ask, wrong, now)
        record = self._admit(hold, landing.claim_id, ask.num_ranks, now, landing.rank)
        if isinstance(record, No):
            return self._refuse(route, ask, record)
        if not hold.landings.open(landing, route):
            return self._refuse(route, ask, No("ended", "its writer has closed it"))
        self._renew(hold, record, now)
        return [Send(route, self._opened(hold, ask))]

    def _opened(self, hold: Hold, ask: OpenWrite) -> WriteOpened:
        offer = hold.offer
        block_ids = offer.block_ids if isinstance(offer, Held) else ()
        return WriteOpened(landing=ask.landing, seq=ask.seq, transfer_id=offer.ref.transfer_id, block_ids=block_ids)

    def _on_close_write(self, route: Route, close: CloseWrite, now: float) -> list[Action]:
        landing = close.landing
        self._closed.add(landing)
        actions: list[Action] = [Send(route, WriteClosed(landing=landing, seq=close.seq))]
        for hold in self._all_holds():
            if landing.claim_id in hold.claims or hold.landings.is_open_for(landing.claim_id):
                hold.landings.close(landing)
                actions += self._settle(hold, now)
        return actions

    def _on_renew(self, route: Route, renew: Renew, now: float) -> list[Action]:
        answers: list[RenewedEntry] = []
        bad: list[str] = []
        dropped: list[str] = []
        for entry in renew.entries:
            if not 0 < entry.num_ranks <= MAX_RANKS:
                bad.append(f"a claim of {entry.num_ranks} ranks")
                continue
            answer = self._renew_entry(entry, now)
            if answer is not None:
                answers.append(answer)
            elif not self._park(route, msgspec.structs.replace(renew, entries=(entry,)), entry.ref, now):
                dropped.append(self._parking_full().detail)
        refused = [answer.reason for answer in answers if not answer.held and answer.reason != CLAIM_OVER]
        actions = _counted("bad_message", bad) + _counted("parking_full", dropped)
        actions += _counted("renewal_refused", refused)
        if answers:
            actions.append(Send(route, Renewed(seq=renew.seq, entries=tuple(answers))))
        return actions

    def _renew_entry(self, entry: RenewEntry, now: float) -> RenewedEntry | None:
        """None: the transfer isn't known yet."""
        hold = self._find(entry.ref, entry.claim_id)
        if hold is None:
            return None
        if isinstance(hold, No):
            return _not_held(entry, hold)
        record = self._admit(hold, entry.claim_id, entry.num_ranks, now)
        if isinstance(record, No):
            return _not_held(entry, record)
        hold.is_awaited |= entry.ref.is_routers
        return RenewedEntry(claim_id=entry.claim_id, held=True, reason="", lease_s=self._renew(hold, record, now))

    def _on_release(self, route: Route, release: Release, now: float) -> list[Action]:
        if not ranks_make_sense(release):
            return [Note("bad_message", f"release of ranks {release.ranks} of {release.num_ranks}")]
        hold = self._find(release.ref, release.claim_id)
        if hold is None:
            parked = self._park(route, release, release.ref, now)
            return [] if parked else [Note("parking_full", self._parking_full().detail)]
        if isinstance(hold, No):
            actions = _late_release(release, hold)
        else:
            record = hold.claims.get(release.claim_id)
            if record is not None and record.num_ranks != release.num_ranks:
                return [Note("bad_message", f"release of {release.num_ranks} ranks, the claim has {record.num_ranks}")]
            actions = self._release(hold, record, release, now)
        return [*actions, Send(route, Released(claim_id=release.claim_id, seq=release.seq))]

    def _on_plain_release(self, route: Route, plain: PlainRelease, now: float) -> list[Action]:
        """It names no rank, so each connection is one, and counts once for this transfer."""
        hold = self._find_named(plain.transfer_id)
        size = plain.consumer_tp_size
        if hold is None:
            return [Note("unknown_release", f"a release without a rank for {plain.transfer_id}")]
        record = hold.claims.get(PLAIN_CLAIM)
        if record is not None and record.num_ranks != size:
            return [Note("bad_message", f"release of 1 of {size} ranks, an earlier one said {record.num_ranks}")]
        if route not in hold.plain_ranks and len(hold.plain_ranks) >= size:
            return [Note("duplicate_release", f"{size} ranks have released {plain.transfer_id} already")]
        rank = hold.plain_ranks.setdefault(route, len(hold.plain_ranks))
        release = Release(
            ref=hold.offer.ref,
            claim_id=PLAIN_CLAIM,
            engine_id="",
            incarnation="",
            seq=0,
            ranks=(rank,),
            num_ranks=size,
            outcome="done",
            reason="",
        )
        return self._release(hold, record, release, now)

    def _find_named(self, transfer_id: str) -> Hold | None:
        """The newest hold of that name, be it a router's or our own."""
        key = self._routers_ids.get(transfer_id)
        if key is not None:
            return self._holds.get(key[0], {}).get(key[1])
        holds = self._holds.get(transfer_id)
        return holds[max(holds)] if holds else None

    def _release(self, hold: Hold, record: ClaimRecord | None, release: Release, now: float) -> list[Action]:
        if release.claim_id in hold.disowned:
            return _failure(release)
        if record is None:  # nobody claimed first: a transfer of nothing, or its claim is still on the way
            if len(hold.claims) >= self._leases.max_claims:
                over = No("released", "the claim was released before there was room for it", is_over=True)
                hold.disown(release.claim_id, over)
                return [Note("unknown_release", _describe(release))]
            record = hold.open_claim(release.claim_id, release.num_ranks)
            self._renew(hold, record, now)
        ranks = None if release.ranks is None else frozenset(release.ranks)
        # Writers of a load that is done close by themselves, a moment before or after this.
        stop_at = now + self._leases.claim_reply_s if release.outcome == "done" else now
        hold.landings.stop(f"released: {release.reason or release.outcome}", stop_at, release.claim_id, ranks)
        if not hold.release(record, release.ranks):
            # The engine's own release comes after those of its ranks, so only a rank's is worth a note.
            note: list[Action] = [] if release.ranks is None else [Note("duplicate_release", _describe(release))]
            return note + self._settle(hold, now)
        return _failure(release) + self._settle(hold, now)

    # Looking up

    def _find(self, ref: TransferRef, claim_id: str) -> Hold | No | None:
        """The hold; or why there is none for this claim, for good; or None: not known yet."""
        if ref.is_routers:
            key = self._routers_ids.get(ref.transfer_id)
            if key is None:
                return None if self._closing is None else No("ended", self._closing)
            ref = TransferRef(self._engine_id, self._incarnation, *key)
        if (ref.producer, ref.incarnation) != (self._engine_id, self._incarnation):
            return No("incarnation", f"meant for {ref.producer}/{ref.incarnation}, this is {self._name}")
        holds = self._holds.get(ref.transfer_id, {})
        if ref.generation in holds:
            return holds[ref.generation]
        past = self._past.get((ref.transfer_id, ref.generation))
        if past is not None:
            detail = f"the hold was {past.outcome}: {past.detail}"
            return No(_REASONS[past.outcome], detail, is_over=claim_id in past.released_claims)
        if holds and max(holds) > ref.generation:
            return No("generation", f"claimed {ref.generation}, held {max(holds)}")
        return None if self._closing is None else No("ended", self._closing)

    def _admit(
        self, hold: Hold, claim_id: str, num_ranks: int, now: float, rank: int | None = None
    ) -> ClaimRecord | No:
        return admit(
            hold, claim_id, num_ranks, now, rank=rank, max_claims=self._leases.max_claims, closing=self._closing
        )

    # Deadlines and ends

    def _renew(self, hold: Hold, record: ClaimRecord, now: float) -> float:
        lease_s = hold.renew(record, now)
        self._alarm.by(record.lease_end)
        return lease_s

    def _expire(self, now: float) -> list[Action]:
        if not self._alarm.is_due(now):
            return []
        actions: list[Action] = []
        for key in self._parking.expired(now):
            actions += self._turn_away(self._parking.take(key), self._unknown(key))
        for hold in self._all_holds():
            actions += [Note("claim_lapsed", f"{claim_id} of {_name(hold)}") for claim_id in hold.lapse(now)]
            actions += self._settle(hold, now)
        self._set_alarm()
        return actions

    def _set_alarm(self) -> None:
        self._alarm.clear()
        for hold in self._all_holds():
            self._alarm.by(hold.deadline)
        self._alarm.by(self._parking.deadline)

    def _settle(self, hold: Hold, now: float) -> list[Action]:
        trigger = hold.verdict(now)
        if trigger is not None and not len(hold.landings):
            return self._end(hold, trigger, hold.failed or trigger.value)
        if trigger is not None:
            hold.landings.stop(hold.failed or trigger.value, now)
        elif self._closing is not None and hold.may_be_voided(now):
            return self._end(hold, HoldTrigger.VOID, self._closing)
        stops: list[Action] = [*hold.landings.due(now)]
        self._alarm.by(hold.deadline)
        return stops

    def _end(self, hold: Hold, trigger: HoldTrigger, detail: str) -> list[Action]:
        hold.state = HOLDS.next(hold.state, trigger)
        outcome, ref = _OUTCOMES[hold.state], hold.offer.ref
        del self._holds[ref.transfer_id][ref.generation]
        if not self._holds[ref.transfer_id]:
            del self._holds[ref.transfer_id]
        routers_id = hold.routers_id
        self._past[ref.transfer_id, ref.generation] = _Past(outcome, detail, hold.released_claims(), routers_id)
        if len(self._past) > self._leases.max_remembered:
            _, oldest = self._past.popitem(last=False)
            self._routers_ids.pop(oldest.routers_id, None)
        return [FreeHold(ref, outcome, detail)]

    # Messages for transfers that aren't known yet

    def _park(self, route: Route, message: Parkable, ref: TransferRef, now: float) -> bool:
        """False: full. A claim is then refused; a renewal or a release is dropped, since it will come again."""
        key = (ref.transfer_id, ref.generation)
        if not self._parking.add(key, route, message, now):
            return False
        self._alarm.by(now + self._parking.time_s(key))
        return True

    def _park_or_refuse(self, route: Route, claim: Claim | OpenWrite, now: float) -> list[Action]:
        if self._park(route, claim, claim.ref, now):
            return []
        no = self._parking_full()
        return [Note("parking_full", no.detail), *self._refuse(route, claim, no)]

    def _parking_full(self) -> No:
        return No("busy", f"{len(self._parking)} messages wait for transfers that aren't known")

    def _turn_away(self, messages: list[tuple[Route, Parkable]], no: No) -> list[Action]:
        actions: list[Action] = []
        for route, message in messages:
            match message:
                case Claim() | OpenWrite():
                    actions += self._refuse(route, message, no)
                case Renew():
                    answers = tuple(_not_held(entry, no) for entry in message.entries)
                    actions += [Note("renewal_refused", str(no)), Send(route, Renewed(message.seq, answers))]
                case Release():
                    released = Released(message.claim_id, message.seq)
                    actions += [Note("unknown_release", _describe(message)), Send(route, released)]
        return actions

    def _unknown(self, key: HoldKey) -> No:
        held = self._holds.get(key[0])
        if held and key[1]:
            return No("generation", f"claimed {key[1]}, held {max(held)}")
        return No("unknown", f"no transfer {key[0]} generation {key[1]} here, after {self._parking.time_s(key)} s")

    # Small things

    @property
    def _name(self) -> str:
        return f"{self._engine_id}/{self._incarnation}"

    def _all_holds(self) -> list[Hold]:
        return [hold for holds in self._holds.values() for hold in holds.values()]

    def _refuse(self, route: Route, claim: Claim | OpenWrite, no: No) -> list[Action]:
        asked = claim if isinstance(claim, Claim) else claim.landing
        refused = Refused(
            claim_id=asked.claim_id, rank=asked.rank, seq=claim.seq, reason=no.reason, detail=shorten(no.detail)
        )
        return [Note("claim_refused", str(no)), Send(route, refused)]


def _counted(name: str, details: list[str]) -> list[Action]:
    """One note for all of a message's entries; it has the first one's detail."""
    return [Note(name, f"{len(details)} entries, the first: {details[0]}")] if details else []


def _failure(release: Release) -> list[Action]:
    if release.outcome != "failed":
        return []
    return [Note("consumer_failed", f"{_describe(release)}: {release.reason}")]


def _late_release(release: Release, no: No) -> list[Action]:
    if not no.is_over:
        return [Note("stale_release", f"{_describe(release)}: {no!s}")]
    return [] if release.ranks is None else [Note("duplicate_release", _describe(release))]


def _not_held(entry: RenewEntry, no: No) -> RenewedEntry:
    reason = CLAIM_OVER if no.is_over else shorten(str(no))
    return RenewedEntry(claim_id=entry.claim_id, held=False, reason=reason, lease_s=0.0)


def _describe(release: Release) -> str:
    ranks = "all ranks" if release.ranks is None else f"ranks {list(release.ranks)}"
    return f"{ranks} of claim {release.claim_id} on {release.ref.transfer_id} from {release.engine_id}"


def _held_at(hold: Hold) -> float:
    return hold.held_at


def _name(hold: Hold) -> str:
    return f"{hold.offer.ref.transfer_id} generation {hold.offer.ref.generation}"
