"""Messages and machines with the values that the tests don't care about."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.events import Held, Load, Note, Order, Promised, Received, Send
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import Loader, PeerReady, SourceRank, Start
from kvferry.protocol.messages import (
    CancelWrite,
    Claim,
    CloseWrite,
    Failed,
    Grant,
    Landing,
    OpenWrite,
    Refused,
    Release,
    RemoteBlocks,
    Renew,
    RenewEntry,
    TransferRef,
    WriteClosed,
    WriteDone,
    WriteOpened,
)
from kvferry.protocol.producer import ProducerEngine
from kvferry.protocol.writer import Writer

ADDRESS = "tcp://127.0.0.1:7000"
CONSUMER = "tcp://127.0.0.1:8000"
DIGEST, BLOCKS, TOPOLOGY = b"d" * 16, b"b" * 16, b"t" * 16
TABLES = ((4, 5, 6),)
ORDER = Order(CONSUMER, "", 0, 100, (), ((1, 2, 3),))
LEASES = Leases()


def ref(transfer_id: str = "x", generation: int = 1, incarnation: str = "p1", producer: str = "P") -> TransferRef:
    return TransferRef(producer, incarnation, transfer_id, generation)


def held(of: TransferRef | None = None) -> Held:
    return Held(of or ref(), 100, DIGEST, BLOCKS, TOPOLOGY, TABLES)


def promised(of: TransferRef | None = None, routers_id: str = "") -> Promised:
    return Promised(of or ref(), 100, DIGEST, TOPOLOGY, routers_id)


def by_router(name: str = "R") -> TransferRef:
    """As a router names it."""
    return TransferRef("", "", name, 0)


def landing(claim_id: str = "c", load_id: str = "l", rank: int = 0, producer_rank: int = 0) -> Landing:
    return Landing(claim_id, load_id, rank, producer_rank)


def remote_blocks(of: Landing | None = None, **changes: Any) -> RemoteBlocks:
    values: dict[str, Any] = {
        "ref": ref(),
        "producer_incarnation": "p1",
        "engine_id": "D",
        "incarnation": "d1",
        "address": CONSUMER,
        "key_id": "",
        "transport": "local",
        "num_ranks": 1,
        "num_tokens": 100,
        "digest": DIGEST,
        "topology_digest": TOPOLOGY,
        "first_token": 0,
        "end_token": 100,
        "window_starts": (),
        "block_ids": ((1, 2, 3),),
    }
    return RemoteBlocks(landing=of or landing(), **(values | changes))


def cancel_write(of: Landing | None = None, incarnation: str = "p1") -> CancelWrite:
    return CancelWrite(landing=of or landing(), ref=ref(), producer_incarnation=incarnation, num_ranks=1)


def open_write(of: Landing | None = None, seq: int = 1, num_ranks: int = 1, **changes: Any) -> OpenWrite:
    values: dict[str, Any] = {
        "ref": ref(),
        "engine_id": "D",
        "num_tokens": 100,
        "digest": DIGEST,
        "topology_digest": TOPOLOGY,
    }
    return OpenWrite(landing=of or landing(), num_ranks=num_ranks, seq=seq, **(values | changes))


def opened(seq: int, of: Landing | None = None, block_ids: Any = TABLES) -> WriteOpened:
    return WriteOpened(landing=of or landing(), seq=seq, transfer_id="x", block_ids=block_ids)


def close_write(of: Landing | None = None, seq: int = 3) -> CloseWrite:
    return CloseWrite(landing=of or landing(), seq=seq)


def closed(of: Landing | None = None, seq: int = 3) -> WriteClosed:
    return WriteClosed(landing=of or landing(), seq=seq)


def write_done(of: Landing | None = None) -> WriteDone:
    return WriteDone(landing=of or landing(), num_bytes=1000, num_descriptors=3, transport="local")


def failed(of: Landing | None = None, reason: str = "why", quiet: bool = False, unable: bool = False) -> Failed:
    return Failed(landing=of or landing(), reason=reason, quiet=quiet, unable=unable)


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
    of = changes.pop("ref", ref())
    return Load(load_id, claim_id, of, address, 100, DIGEST, BLOCKS, refused, **changes)


def producer(leases: Leases = LEASES) -> ProducerEngine:
    return ProducerEngine("P", "p1", leases)


def loader(leases: Leases = LEASES, rank: int = 0, num_ranks: int = 1) -> Loader:
    return Loader("D", "d1", rank, num_ranks, leases)


def writer(rank: int = 0, leases: Leases = LEASES) -> Writer:
    return Writer(rank, "p1", ADDRESS, leases)


def sources(*ranks: int) -> tuple[SourceRank, ...]:
    """Producer ranks that feed this one: the first over shared memory, those on other hosts not."""
    return tuple(SourceRank(rank, f"w{rank}", "nixl" if rank else "local") for rank in ranks)


def written(machine: Loader, *ranks: int, at: float = 0.0, **of_load: Any) -> list[Any]:
    """Take a fresh loader to where producer ranks (0 if none is named) were told to write one load."""
    machine.handle(Start(load(**({"order": ORDER} | of_load))), at)
    return machine.handle(PeerReady(ADDRESS, "p1", TOPOLOGY, sources(*ranks or (0,))), at)


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
