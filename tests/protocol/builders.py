"""Messages and machines with the values that the tests don't care about."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.events import Held, Load, Note, Received, Send
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import Loader, PeerReady, Start
from kvferry.protocol.messages import Claim, Grant, Refused, Release, Renew, RenewEntry, TransferRef
from kvferry.protocol.producer import ProducerEngine

ADDRESS = "tcp://127.0.0.1:7000"
DIGEST, BLOCKS, TOPOLOGY = b"d" * 16, b"b" * 16, b"t" * 16
LEASES = Leases()


def ref(transfer_id: str = "x", generation: int = 1, incarnation: str = "p1", producer: str = "P") -> TransferRef:
    return TransferRef(producer, incarnation, transfer_id, generation)


def held(of: TransferRef | None = None) -> Held:
    return Held(of or ref(), 100, DIGEST, BLOCKS, TOPOLOGY)


def claim(claim_id: str = "c", rank: int = 0, num_ranks: int = 1, seq: int = 1, **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "ref": ref(),
        "engine_id": "D",
        "incarnation": "d1",
        "num_tokens": 100,
        "digest": DIGEST,
        "blocks_digest": BLOCKS,
        "topology_digest": TOPOLOGY,
    }
    return Claim(claim_id=claim_id, rank=rank, num_ranks=num_ranks, seq=seq, **(values | changes))


def release(
    claim_id: str = "c", ranks: tuple[int, ...] | None = None, num_ranks: int = 1, seq: int = 9, **changes: Any
) -> Release:
    values: dict[str, Any] = {
        "ref": ref(),
        "engine_id": "D",
        "incarnation": "d1",
        "outcome": "done",
        "reason": "",
    }
    return Release(claim_id=claim_id, ranks=ranks, num_ranks=num_ranks, seq=seq, **(values | changes))


def renew(*claim_ids: str, num_ranks: int = 1, seq: int = 5, of: TransferRef | None = None) -> Renew:
    entries = tuple(RenewEntry(of or ref(), claim_id, num_ranks) for claim_id in claim_ids)
    return Renew(engine_id="D", incarnation="d1", seq=seq, entries=entries)


def grant(seq: int = 1, claim_id: str = "c", rank: int = 0, generation: int = 1, lease_s: float = 30.0) -> Grant:
    return Grant(claim_id=claim_id, rank=rank, seq=seq, generation=generation, lease_s=lease_s)


def refused(seq: int = 1, reason: Any = "lapsed", claim_id: str = "c", rank: int = 0) -> Refused:
    return Refused(claim_id=claim_id, rank=rank, seq=seq, reason=reason, detail="why")


def load(load_id: str = "l", claim_id: str = "c", address: str = ADDRESS, refused: str = "", **changes: Any) -> Load:
    return Load(load_id, claim_id, changes.get("ref", ref()), address, 100, DIGEST, BLOCKS, refused)


def producer(leases: Leases = LEASES) -> ProducerEngine:
    return ProducerEngine("P", "p1", leases)


def loader(leases: Leases = LEASES, rank: int = 0, num_ranks: int = 1) -> Loader:
    return Loader("D", "d1", rank, num_ranks, leases)


def reading(machine: Loader, at: float = 0.0, **of_load: Any) -> None:
    """Take a fresh loader to where the reads of one load are posted and its claim (seq 1) is sent."""
    machine.handle(Start(load(**of_load)), at)
    machine.handle(PeerReady(ADDRESS, "p1", TOPOLOGY), at)


def told(machine: Any, message: Any, now: float, route: Any = "route") -> list[Any]:
    return machine.handle(Received(route, message), now)


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def notes(actions: list[Any]) -> list[str]:
    return [action.name for action in of_kind(actions, Note)]


def answers(actions: list[Any]) -> list[Any]:
    return [action.message for action in of_kind(actions, Send)]
