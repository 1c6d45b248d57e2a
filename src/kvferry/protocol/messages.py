"""Every message on kvferry's wire, and the one place where its format lives.

A frame is one msgpack map with a "type". Unknown keys are ignored, so that a newer peer may add some; unknown
types and malformed frames raise `BadMessage`, which a listener counts and drops. Names of fields are part of
the wire: add, never rename.

Who talks to whom:

  consumer worker  -> producer rendezvous   Hello, Claim, Release          answers: Record, Grant, Refused, Released
  consumer engine  -> producer rendezvous   Renew, Release                 answers: Renewed, Released
  consumer worker  -> producer worker       Nudge                          no answer
  consumer worker  -> its own rendezvous    Quiesced                       answer: QuiescedAck

  older consumers  -> producer rendezvous   PlainRelease                   no answer

and where the producer writes:

  consumer worker  -> producer worker       RemoteBlocks, CancelWrite      answers: WriteDone, Failed
  producer worker  -> consumer rendezvous   Hello                          answer: Record
  producer worker  -> its own rendezvous    OpenWrite, CloseWrite          answers: WriteOpened, Refused, WriteClosed
  producer rendezvous -> its own worker     StopWrite                      answer: CloseWrite
  producer worker  -> consumer worker       Nudge                          no answer
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 << 20
"""Larger frames are dropped by the socket itself (an engine record of 1,000 layers stays below 1 MiB)."""

MAX_ID_CHARS = 128
MAX_TEXT_CHARS = 500
MAX_DIGEST_BYTES = 64
MAX_ENTRIES = 4096
"""Of a renewal or its answer; also ranks of a release."""
MAX_BLOCKS = 1 << 20
"""Of one request in one KV cache group."""
MAX_LEASE_S = 86_400.0

Id: TypeAlias = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""What `shorten` returns: for people."""
Digest: TypeAlias = Annotated[bytes, Meta(max_length=MAX_DIGEST_BYTES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_LEASE_S)]
"""Finite, since it is bounded."""


class BadMessage(ValueError):
    """A frame that is no message of this protocol: the text says what is wrong with it."""


class _Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    pass


class TransferRef(msgspec.Struct, frozen=True):
    """Names one holding of one request's blocks.

    producer: engine id; incarnation: fresh for each start of that engine; transfer_id: 128 random bits, 32 hex
    digits; generation: which holding is meant, so that an id used again is not the old transfer.

    A router that sends both legs at once names the transfer itself, before any engine knows it: then producer and
    incarnation are empty, the generation is 0, and transfer_id is the router's.
    """

    producer: Id
    incarnation: Id
    transfer_id: Id
    generation: Count

    @property
    def is_routers(self) -> bool:
        return not self.producer


class Hello(_Message, frozen=True, tag="hello"):
    """A worker asks an engine for its record (topology and every worker's layout and transports).

    engine_id: "" asks whoever serves the address. incarnation: of the worker that asks.
    """

    version: Count
    engine_id: Id
    incarnation: Id
    seq: Count


class Record(_Message, frozen=True, tag="record"):
    """The engine's record: `payload` is an encoded `agent` EngineRecord, opaque to the protocol."""

    seq: Count
    version: Count
    engine_id: Id
    incarnation: Id
    payload: bytes


class Claim(_Message, frozen=True, tag="claim"):
    """One consumer rank uses a transfer. Sent as its reads are posted, and again to ask "still held?".

    claim_id: one use by one consumer engine, 32 hex digits; rank, num_ranks: of that engine's readers.
    digest: of the prompt as the consumer sees it, over num_tokens tokens; blocks_digest: of the producer's block
    ids that the consumer is reading; topology_digest: of the producer topology that its plan was computed from.
    """

    ref: TransferRef
    claim_id: Id
    engine_id: Id
    incarnation: Id
    rank: Count
    num_ranks: Count
    seq: Count
    num_tokens: Count
    digest: Digest
    blocks_digest: Digest
    topology_digest: Digest


class Grant(_Message, frozen=True, tag="grant"):
    """The transfer named by the claim was held when this was answered, and will be for lease_s after it."""

    claim_id: Id
    rank: Count
    seq: Count
    generation: Count
    lease_s: Seconds


RefusedReason = Literal[
    "unknown",
    "released",
    "lapsed",
    "incarnation",
    "generation",
    "digest",
    "blocks",
    "topology",
    "version",
    "busy",
    "ended",
    "failed",
]


class Refused(_Message, frozen=True, tag="refused"):
    """A Hello, Claim or OpenWrite is refused: for good, unless "busy". claim_id is empty when a Hello is refused."""

    claim_id: Id
    rank: Count
    seq: Count
    reason: RefusedReason
    detail: Text


class RenewEntry(msgspec.Struct, frozen=True):
    ref: TransferRef
    claim_id: Id
    num_ranks: Count


class Renew(_Message, frozen=True, tag="renew"):
    """A consumer engine keeps its claims alive, from the moment their requests arrive; one message per peer."""

    engine_id: Id
    incarnation: Id
    seq: Count
    entries: Annotated[tuple[RenewEntry, ...], Meta(max_length=MAX_ENTRIES)]


CLAIM_OVER = "over"
"""RenewedEntry.reason when the claim's own ranks have released it: not held, and nothing is lost."""


class RenewedEntry(msgspec.Struct, frozen=True):
    """reason: "" if held, CLAIM_OVER, or a RefusedReason with what is behind it."""

    claim_id: Id
    held: bool
    reason: Text
    lease_s: Seconds


class Renewed(_Message, frozen=True, tag="renewed"):
    seq: Count
    entries: Annotated[tuple[RenewedEntry, ...], Meta(max_length=MAX_ENTRIES)]


Outcome = Literal["done", "unused", "failed"]


class Release(_Message, frozen=True, tag="release"):
    """Ranks' parts of a claim are over; `ranks` None: the whole engine's. Idempotent and final.

    reason: for outcome "failed", what went wrong, so that both sides log the same.
    """

    ref: TransferRef
    claim_id: Id
    engine_id: Id
    incarnation: Id
    seq: Count
    ranks: Annotated[tuple[Count, ...], Meta(max_length=MAX_ENTRIES)] | None
    num_ranks: Count
    outcome: Outcome
    reason: Text


class PlainRelease(_Message, frozen=True, tag="plain_release"):
    """As consumers of vLLM's MoRIIO connector say it: a transfer's name and nothing of the rank that speaks.

    On the wire it is the bare name, or a "release" map with `transfer_id` and perhaps `consumer_tp_size`: how many
    ranks will say it.
    """

    transfer_id: Id
    consumer_tp_size: Annotated[int, Meta(ge=1, le=2**16)] = 1


class Released(_Message, frozen=True, tag="released"):
    claim_id: Id
    seq: Count


class Nudge(_Message, frozen=True, tag="nudge"):
    """A read of your memory waits for you to drive your transport."""

    incarnation: Id


class Quiesced(_Message, frozen=True, tag="quiesced"):
    """No operation can still write the destination blocks of this rank's load."""

    incarnation: Id
    load_id: Id
    rank: Count
    seq: Count


class QuiescedAck(_Message, frozen=True, tag="quiesced_ack"):
    load_id: Id
    rank: Count
    seq: Count


class Landing(msgspec.Struct, frozen=True):
    """Names what one producer rank writes for one attempt of one consumer rank to get its part of a transfer.

    load_id: of the attempt. rank: the consumer's; producer_rank: the writer's.
    """

    claim_id: Id
    load_id: Id
    rank: Count
    producer_rank: Count


BlockId: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
BlockIds: TypeAlias = Annotated[tuple[BlockId, ...], Meta(max_length=MAX_BLOCKS)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=MAX_ENTRIES)]


class RemoteBlocks(_Message, frozen=True, tag="remote_blocks"):
    """A consumer rank asks a producer rank to write a transfer into its blocks, once they are its own. Sent again
    while the answer is out; it changes nothing then.

    incarnation, engine_id, address, key_id: of the consumer's engine and its rendezvous. producer_incarnation: of the
    engine whose record the consumer goes by; topology_digest: of that record. transport: to write by and no other,
    since the consumer judges by it whether a dead writer's bytes can still land. num_ranks: of the consumer's engine.
    num_tokens, digest: as in Claim. [first_token, end_token): what is missing; window_starts: per KV cache group, the
    first token that is still looked at (empty: all are). block_ids: the consumer's, per group, by token position; -1
    where nothing is to be written.
    """

    landing: Landing
    ref: TransferRef
    producer_incarnation: Id
    engine_id: Id
    incarnation: Id
    address: Text
    key_id: Id
    transport: Id
    num_ranks: Count
    num_tokens: Count
    digest: Digest
    topology_digest: Digest
    first_token: Count
    end_token: Count
    window_starts: Annotated[tuple[Count, ...], Meta(max_length=MAX_ENTRIES)]
    block_ids: BlockTables


class WriteDone(_Message, frozen=True, tag="write_done"):
    """Everything that the landing asked of this producer rank has been written, and seen finished; nothing more will
    land. The counts are of what was really written."""

    landing: Landing
    num_bytes: Count
    num_descriptors: Count
    transport: Id


class Failed(_Message, frozen=True, tag="failed"):
    """The landing will not be written. quiet: nothing of it can land any more; else a second one says so later.

    unable: this rank can't write to that one at all, and has not begun; it may be read from all the same.
    """

    landing: Landing
    reason: Text
    quiet: bool
    unable: bool = False


class CancelWrite(_Message, frozen=True, tag="cancel"):
    """The consumer has no more use for the landing. Answered by Failed once nothing of it can land any more."""

    landing: Landing
    ref: TransferRef
    producer_incarnation: Id
    num_ranks: Count


class OpenWrite(_Message, frozen=True, tag="open_write"):
    """A producer rank asks its own engine whether it may write, which counts as the consumer rank's claim.

    From the answer until CloseWrite the engine gives none of the transfer's blocks back. home: what only the engine's
    own workers know of it, since no other process may speak for them.
    """

    landing: Landing
    ref: TransferRef
    engine_id: Id
    num_ranks: Count
    seq: Count
    num_tokens: Count
    digest: Digest
    topology_digest: Digest
    home: Id = ""


class WriteOpened(_Message, frozen=True, tag="write_opened"):
    """block_ids: the producer's, per KV cache group, when the prompt is computed and held; empty while it is not: then
    the steps of the engine tell what there is to write. transfer_id: under which they tell it."""

    landing: Landing
    seq: Count
    transfer_id: Id
    block_ids: BlockTables


class StopWrite(_Message, frozen=True, tag="stop_write"):
    """The claim or the transfer is over: post nothing more, and close when nothing can land any more."""

    landing: Landing
    reason: Text


class CloseWrite(_Message, frozen=True, tag="close_write"):
    """No operation of this landing can happen any more; it is never opened again. home: as in OpenWrite."""

    landing: Landing
    seq: Count
    home: Id = ""


class WriteClosed(_Message, frozen=True, tag="write_closed"):
    landing: Landing
    seq: Count


Message: TypeAlias = (
    Hello
    | Record
    | Claim
    | Grant
    | Refused
    | Renew
    | Renewed
    | Release
    | PlainRelease
    | Released
    | Nudge
    | Quiesced
    | QuiescedAck
    | RemoteBlocks
    | WriteDone
    | Failed
    | CancelWrite
    | OpenWrite
    | WriteOpened
    | StopWrite
    | CloseWrite
    | WriteClosed
)


class MoriioRelease(msgspec.Struct, frozen=True, tag_field="type", tag="release"):
    """PlainRelease as a map on the wire of vLLM's MoRIIO connector."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    consumer_tp_size: Annotated[int, Meta(ge=1, le=2**16)] = 1


_NAME = re.compile(rb"[!-~]{8,%d}" % MAX_ID_CHARS)
_moriio_decoder = msgspec.msgpack.Decoder(MoriioRelease)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def shorten(text: str) -> str:
    """The text as messages and logs may carry it: bounded, and with what does not print escaped. Idempotent."""
    if len(text) <= MAX_TEXT_CHARS and text.isprintable():
        return text
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: MAX_TEXT_CHARS + 1])
    return plain if len(plain) <= MAX_TEXT_CHARS else plain[: MAX_TEXT_CHARS - 3] + "..."


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Raises BadMessage for whatever is not a message: empty, not msgpack, unknown type, a field out of bounds."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        older = _older(frame)
        if older is None:
            raise BadMessage(shorten(f"frame of {len(frame)} bytes: {error}")) from None
        return older


def _older(frame: bytes) -> PlainRelease | None:
    """What the frame says in the older wire format. None: nothing."""
    if _NAME.fullmatch(frame):
        return PlainRelease(transfer_id=frame.decode("ascii"))
    try:
        release = _moriio_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return PlainRelease(transfer_id=release.transfer_id, consumer_tp_size=release.consumer_tp_size)
