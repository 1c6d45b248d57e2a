"""Every message on kvferry's wire, and the one place where its format lives.

A frame is one msgpack map with a "type". Unknown keys are ignored, so that a newer peer may add some; unknown
types and malformed frames raise `BadMessage`, which a listener counts and drops. Names of fields are part of
the wire: add, never rename.

Who talks to whom:

  consumer worker  -> producer rendezvous   Hello, Claim, Release          answers: Record, Grant, Refused, Released
  consumer engine  -> producer rendezvous   Renew, Release                 answers: Renewed, Released
  consumer worker  -> producer worker       Nudge                          no answer
  consumer worker  -> its own rendezvous    Quiesced                       answer: QuiescedAck
"""

from __future__ import annotations

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
    """

    producer: Id
    incarnation: Id
    transfer_id: Id
    generation: Count


class Hello(_Message, frozen=True, tag="hello"):
    """A worker asks an engine for its record (topology and every worker's layout and transports)."""

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
]


class Refused(_Message, frozen=True, tag="refused"):
    """A Hello or Claim is refused: for good, unless "busy". claim_id is empty when a Hello is refused."""

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


Message: TypeAlias = (
    Hello | Record | Claim | Grant | Refused | Renew | Renewed | Release | Released | Nudge | Quiesced | QuiescedAck
)

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
        raise BadMessage(shorten(f"frame of {len(frame)} bytes: {error}")) from None
