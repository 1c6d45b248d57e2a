"""The consumer's engine: keeps claims alive from their requests' arrival, and releases them for the whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvferry.protocol.events import (
    Arrived,
    ClaimLost,
    Note,
    Over,
    PeerLost,
    Received,
    Send,
    Tick,
)
from kvferry.protocol.lease import Alarm, Leases
from kvferry.protocol.messages import CLAIM_OVER, Message, Release, Released, Renew, Renewed, RenewEntry, shorten
from kvferry.protocol.transitions import IllegalTransition, Table

__all__ = [
    "USES",
    "Action",
    "Arrived",
    "ClaimLost",
    "ConsumerEngine",
    "Event",
    "Note",
    "Over",
    "PeerLost",
    "Received",
    "Send",
    "Tick",
    "UseState",
    "UseTrigger",
]

Event: TypeAlias = Arrived | Over | Received | PeerLost | Tick
Action: TypeAlias = Send | ClaimLost | Note


RENEW_ENTRIES = 1024
"""In one message."""


class UseState(Enum):
    OPEN = "open"
    LOST = "lost"
    RELEASING = "releasing"
    GONE = "gone"


class UseTrigger(Enum):
    LOSE = "not held, or the peer is lost"
    OVER = "over"
    RELEASED = "released"
    GIVE_UP = "release_tries without an answer"


USES = Table(
    "claim of the engine",
    UseState.OPEN,
    {
        (UseState.OPEN, UseTrigger.LOSE): UseState.LOST,
        (UseState.OPEN, UseTrigger.OVER): UseState.RELEASING,
        (UseState.LOST, UseTrigger.OVER): UseState.RELEASING,
        (UseState.RELEASING, UseTrigger.RELEASED): UseState.GONE,
        (UseState.RELEASING, UseTrigger.GIVE_UP): UseState.GONE,
    },
)


@dataclass
class _Use:
    """One request's claim. resend_at, tries: of its release."""

    arrived: Arrived
    state: UseState = USES.start
    over: Over | None = None
    resend_at: float = 0.0
    tries: int = 0


@dataclass
class _Peer:
    """Where the engine has open claims. claim_ids: in order of arrival."""

    renew_at: float
    claim_ids: dict[str, None] = field(default_factory=dict)


class ConsumerEngine:
    """Opens a claim when its request arrives, renews it, and releases it until the producer has answered.

    Answers of producers never raise; events of the own engine raise IllegalTransition where they make no sense
    (a claim that arrives twice, or is over without having arrived).
    """

    def __init__(self, engine_id: str, incarnation: str, leases: Leases) -> None:
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._leases = leases
        self._uses: dict[str, _Use] = {}
        self._peers: dict[str, _Peer] = {}
        self._seq = 0
        self._alarm = Alarm()

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Arrived():
                return self._on_arrived(event, now)
            case Over():
                return self._on_over(event, now)
            case Received(_, message):
                return self._on_message(message)
            case PeerLost(address, reason):
                return self._on_peer_lost(address, reason)
            case Tick():
                return self._on_tick(now)

    def next_deadline(self) -> float | None:
        return self._alarm.at

    @property
    def num_open(self) -> int:
        return sum(len(peer.claim_ids) for peer in self._peers.values())

    @property
    def num_claims(self) -> int:
        """Open, lost and not yet over, or being released."""
        return len(self._uses)

    # The own engine's events

    def _on_arrived(self, arrived: Arrived, now: float) -> list[Action]:
        if arrived.claim_id in self._uses:
            raise IllegalTransition(f"claim {arrived.claim_id} arrives twice")
        self._uses[arrived.claim_id] = _Use(arrived)
        peer = self._peers.setdefault(arrived.address, _Peer(now + self._leases.renew_s))
        peer.claim_ids[arrived.claim_id] = None
        self._alarm.by(peer.renew_at)
        return self._renewals(arrived.address, [arrived.claim_id])

    def _on_over(self, over: Over, now: float) -> list[Action]:
        use = self._uses.get(over.claim_id)
        if use is None:
            raise IllegalTransition(f"claim {over.claim_id} is over but never arrived, or is gone")
        use.state = USES.next(use.state, UseTrigger.OVER)
        use.over = over
        self._stop_renewing(use)
        return self._release(use, over, now)

    def _on_peer_lost(self, address: str, reason: str) -> list[Action]:
        peer = self._peers.get(address)
        actions: list[Action] = []
        for claim_id in list(peer.claim_ids) if peer else []:
            actions += self._lose(claim_id, reason)
        return actions

    # Messages

    def _on_message(self, message: Message) -> list[Action]:
        match message:
            case Renewed():
                actions: list[Action] = []
                for entry in message.entries:
                    if not entry.held and entry.reason != CLAIM_OVER:
                        actions += self._lose(entry.claim_id, entry.reason)
                return actions
            case Released():
                return self._on_released(message.claim_id)
        return [Note("unexpected_message", f"{type(message).__name__} at a consumer's engine")]

    def _on_released(self, claim_id: str) -> list[Action]:
        use = self._uses.get(claim_id)
        if use is not None and USES.allows(use.state, UseTrigger.RELEASED):
            self._end(use, UseTrigger.RELEASED)
        return []

    def _lose(self, claim_id: str, reason: str) -> list[Action]:
        use = self._uses.get(claim_id)
        if use is None or not USES.allows(use.state, UseTrigger.LOSE):
            return []
        use.state = USES.next(use.state, UseTrigger.LOSE)
        self._stop_renewing(use)
        return [ClaimLost(claim_id, shorten(reason))]

    # Time

    def _on_tick(self, now: float) -> list[Action]:
        if not self._alarm.is_due(now):
            return []
        actions: list[Action] = []
        for address, peer in self._peers.items():
            if peer.renew_at <= now:
                peer.renew_at = now + self._leases.renew_s
                actions += self._renewals(address, list(peer.claim_ids))
        for use in list(self._uses.values()):
            if use.over is not None and use.resend_at <= now:
                actions += self._release_again(use, use.over, now)
        self._set_alarm()
        return actions

    def _release_again(self, use: _Use, over: Over, now: float) -> list[Action]:
        if use.tries < self._leases.release_tries:
            return self._release(use, over, now)
        self._end(use, UseTrigger.GIVE_UP)
        return [Note("release_unanswered", f"claim {over.claim_id} at {use.arrived.address}, {use.tries} tries")]

    def _set_alarm(self) -> None:
        self._alarm.clear()
        for peer in self._peers.values():
            self._alarm.by(peer.renew_at)
        for use in self._uses.values():
            if use.over is not None:
                self._alarm.by(use.resend_at)

    # What is sent, and what is forgotten

    def _renewals(self, address: str, claim_ids: list[str]) -> list[Action]:
        starts = range(0, len(claim_ids), RENEW_ENTRIES)
        return [self._renewal(address, claim_ids[start : start + RENEW_ENTRIES]) for start in starts]

    def _renewal(self, address: str, claim_ids: list[str]) -> Send:
        arrived = [self._uses[claim_id].arrived for claim_id in claim_ids]
        entries = tuple(RenewEntry(each.ref, each.claim_id, each.num_ranks) for each in arrived)
        return Send(address, Renew(self._engine_id, self._incarnation, self._next_seq(), entries))

    def _release(self, use: _Use, over: Over, now: float) -> list[Action]:
        use.tries += 1
        use.resend_at = now + self._leases.claim_reply_s
        self._alarm.by(use.resend_at)
        release = Release(
            ref=use.arrived.ref,
            claim_id=over.claim_id,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            seq=self._next_seq(),
            ranks=None,
            num_ranks=use.arrived.num_ranks,
            outcome=over.outcome,
            reason=shorten(over.reason),
        )
        return [Send(use.arrived.address, release)]

    def _stop_renewing(self, use: _Use) -> None:
        address = use.arrived.address
        peer = self._peers.get(address)
        if peer is not None:
            peer.claim_ids.pop(use.arrived.claim_id, None)
            if not peer.claim_ids:
                del self._peers[address]

    def _end(self, use: _Use, trigger: UseTrigger) -> None:
        use.state = USES.next(use.state, trigger)
        del self._uses[use.arrived.claim_id]

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
