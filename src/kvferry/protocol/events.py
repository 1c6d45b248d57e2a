"""What goes into the protocol's machines (events) and what comes out of them (actions).

Every machine is driven the same way: `handle(event, now) -> list[Action]`, in order, and a `Tick` at or after
`next_deadline()`. `now` is in seconds of one clock per process that never jumps and counts suspension
(CLOCK_BOOTTIME). It must be read after what the event tells was seen: a `now` from before a poll would make a
read look earlier than it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from kvferry.protocol.messages import Landing, Message, Outcome, RemoteBlocks, TransferRef, shorten

Route: TypeAlias = Any
"""Where a message came from, and where its answer goes: hashable, else opaque to the protocol, which hands it back."""

FreeOutcome = Literal["released", "expired", "lapsed", "voided", "failed"]
"""Why a hold ended. released: every claim was; expired: nobody ever claimed; lapsed: some claim's lease ran out;
voided: the engine dropped it before anyone had claimed; failed: its request ended before its prompt was computed."""


# Events of every machine


@dataclass(frozen=True)
class Received:
    """A message came from `route`."""

    route: Route
    message: Message


@dataclass(frozen=True)
class Tick:
    """Time passed."""


# Events of the producer's engine


@dataclass(frozen=True)
class Promised:
    """A request came whose KV will be `ref`, once it is computed; consumers may claim it and have it written.

    num_tokens: how many will be offered; digest: of the prompt over them; topology_digest: of the topology that the
    engine's record announces. routers_id: the name that a router gave the transfer, "" for none.
    """

    ref: TransferRef
    num_tokens: int
    digest: bytes
    topology_digest: bytes
    routers_id: str = ""


@dataclass(frozen=True)
class Held:
    """The ledger holds the blocks of `ref`, promised or not; consumers may claim them.

    num_tokens, digest, topology_digest: as in Promised, and equal to what was promised. blocks_digest: of the block
    ids offered; block_ids: they themselves, by KV cache group.
    """

    ref: TransferRef
    num_tokens: int
    digest: bytes
    blocks_digest: bytes
    topology_digest: bytes
    block_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Dropped:
    """The request of a promise has ended, and its prompt will not be offered. The ledger holds the blocks that it had
    until FreeHold."""

    ref: TransferRef
    reason: str


@dataclass(frozen=True)
class Relieve:
    """Prompts wait for blocks: drop the oldest hold whose consumer waits by a router's name and has not come for it.

    That consumer may be waiting for just those prompts, with blocks of its own, and so never come to ask.
    """

    reason: str


@dataclass(frozen=True)
class Void:
    """Drop every hold without an open claim (the engine resets its prefix cache)."""

    reason: str


@dataclass(frozen=True)
class Closing:
    """The engine stops: drop unclaimed holds, take no new claims, let open ones end."""

    reason: str


# Events of the consumer's engine


@dataclass(frozen=True)
class Arrived:
    """A request that uses `ref` arrived. Its claim is open from now on.

    address: the producer's rendezvous; num_ranks: ranks of this engine that will each claim and release.
    """

    claim_id: str
    ref: TransferRef
    address: str
    num_ranks: int


@dataclass(frozen=True)
class Over:
    """The request's use of the transfer is over for the whole engine: every rank has reported, or none ever saw it."""

    claim_id: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class PeerLost:
    """The connection to the producer at `address` is gone."""

    address: str
    reason: str


# Events of a consumer rank's loader


@dataclass(frozen=True)
class Order:
    """What a consumer rank tells its writers: see RemoteBlocks. address, key_id: of its own engine's rendezvous."""

    address: str
    key_id: str
    first_token: int
    end_token: int
    window_starts: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Load:
    """One attempt of one rank to get its part of a transfer.

    load_id: unique per attempt. address: the producer's rendezvous. num_tokens, digest, blocks_digest: as in
    Claim. refused: "" or the reason why this load must fail at once. order: the producer writes; None: this rank
    reads. may_read: the producer's blocks are known, so that this rank can read where the producer can't write.
    """

    load_id: str
    claim_id: str
    ref: TransferRef
    address: str
    num_tokens: int
    digest: bytes
    blocks_digest: bytes
    refused: str = ""
    order: Order | None = None
    may_read: bool = True


@dataclass(frozen=True)
class Start:
    load: Load


class SourceRank(NamedTuple):
    """A producer rank that feeds this one. address: of its control socket; transport: what this rank has settled on
    with it."""

    rank: int
    address: str
    transport: str


@dataclass(frozen=True)
class PeerReady:
    """The handshake with the engine at `address` is done; plans can be made and transfers posted.

    sources: where the peer is a producer, its ranks that feed this one.
    """

    address: str
    incarnation: str
    topology_digest: bytes
    sources: tuple[SourceRank, ...] = ()


@dataclass(frozen=True)
class PeerFailed:
    """The handshake failed or was refused, or the connection was lost.

    lost: nothing that was agreed with this address stands any more. False: only the handshake under way failed, so
    loads that go on under an earlier one with the same address are left alone, and so are loads that named another
    engine: they get a Connect of their own.
    """

    address: str
    reason: str
    lost: bool = True


@dataclass(frozen=True)
class PeerStale:
    """What a handshake with this address told may have changed, and nobody would have heard. What goes on under it goes
    on; what begins shakes hands anew."""

    address: str


@dataclass(frozen=True)
class ReadsDone:
    """Every read of the load was seen finished; nothing of it can land any more."""

    load_id: str


@dataclass(frozen=True)
class ReadsFailed:
    """Some read of the load failed, or could not be posted; others may still land."""

    load_id: str
    reason: str


@dataclass(frozen=True)
class ReadsQuiet:
    """Nothing of the load's reads can land any more. Comes once, after ReadsFailed or AbandonReads."""

    load_id: str


@dataclass(frozen=True)
class WriterLost:
    """The connection to the producer rank at `address` is gone; what it has posted may still land."""

    address: str
    reason: str


@dataclass(frozen=True)
class WriterGone:
    """The process at `address` is proven gone, or the transport has fenced it: nothing of it can land any more."""

    address: str


@dataclass(frozen=True)
class Cancel:
    """The engine has no more use for the load."""

    load_id: str
    reason: str


# Events of a producer rank's writer


@dataclass(frozen=True)
class WritesDone:
    """Every write of the landing was queued and seen finished. The counts are of what was really written."""

    landing: Landing
    num_bytes: int
    num_descriptors: int
    transport: str


@dataclass(frozen=True)
class WritesFailed:
    """Some write of the landing failed, or could not be posted; others may still land. unable: see Failed."""

    landing: Landing
    reason: str
    unable: bool = False


@dataclass(frozen=True)
class WritesQuiet:
    """Nothing of the landing can land any more. Comes once, after WritesFailed or AbandonWrites."""

    landing: Landing


# Actions of every machine


@dataclass(frozen=True)
class Send:
    to: Route
    message: Message


@dataclass(frozen=True)
class Note:
    """Something to count and log, under a name from a small fixed set. detail: is shortened."""

    name: str
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", shorten(self.detail))


# Actions of the producer's engine


@dataclass(frozen=True)
class FreeHold:
    """Give the blocks of `ref` back. Exactly once per hold."""

    ref: TransferRef
    outcome: FreeOutcome
    detail: str


# Actions of the consumer's engine


@dataclass(frozen=True)
class ClaimLost:
    """The producer does not hold what the claim needs. Once per claim; a load already accepted stays good."""

    claim_id: str
    reason: str


# Actions of a consumer rank's loader


@dataclass(frozen=True)
class Connect:
    """Handshake with the engine `engine_id` at `address`; answer PeerReady or PeerFailed. key_id: of that address."""

    address: str
    engine_id: str
    key_id: str = ""


@dataclass(frozen=True)
class PostReads:
    """Post the load's reads; answer ReadsDone, or ReadsFailed and ReadsQuiet."""

    load_id: str


@dataclass(frozen=True)
class AbandonReads:
    """Cancel what can be cancelled; answer ReadsQuiet (or ReadsDone) when nothing can land any more."""

    load_id: str


@dataclass(frozen=True)
class Report:
    """The load is over, exactly once. ok: the bytes are the prompt's. quiet: nothing can land any more."""

    load_id: str
    ok: bool
    reason: str
    quiet: bool


@dataclass(frozen=True)
class Quieted:
    """After a Report that was not quiet: now it is. Once."""

    load_id: str


# Actions of a producer rank's writer


@dataclass(frozen=True)
class BeginWrites:
    """Write what the order asks for, as it is computed; answer WritesDone, or WritesFailed and WritesQuiet.

    transfer_id, block_ids: as in WriteOpened.
    """

    order: RemoteBlocks
    transfer_id: str
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AbandonWrites:
    """Post nothing more, cancel what can be cancelled; answer WritesQuiet (or WritesDone) when nothing can land."""

    landing: Landing
