"""What every transport offers, and what each declares about itself.

A transport is driven by one thread, the agent's. It plans nothing: it gets index arrays and moves those bytes.
Libraries are imported when a transport is made, never when this package is imported.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.layout import Region

Offsets = npt.NDArray[np.int64]


class TransportError(RuntimeError):
    """Base of what a transport raises. The text names the transport, the field and the values."""


class TransportUnavailable(TransportError):
    """The library or what it needs is not on this machine; the text says what to install."""


class BadTransfer(TransportError):
    """Refused before anything moved: an offset, a length, a list or a region is wrong."""


class PeerLost(TransportError):
    """The peer's process or its memory is gone."""


class QueueFull(TransportError):
    """Back-pressure, not failure: nothing of this post was started; poll, then post again."""


class Traits(msgspec.Struct, frozen=True):
    """What a transport promises; the agent reacts to these, never to its name.

    synchronous: a post returns only when the bytes have moved.
    target_must_poll: a read may stall until the target's process calls `progress`.
    failure_is_quiet: once `poll` says FAILED no operation of that handle can still write. Otherwise only `release`
      returning True says so.
    """

    synchronous: bool
    target_must_poll: bool
    failure_is_quiet: bool


class Batch(NamedTuple):
    """Descriptors between one local and one remote region: int64 arrays of equal length, in bytes.

    local_region and remote_region are indexes into the regions that either side registered, in order.
    """

    local_region: int
    remote_region: int
    local_offsets: Offsets
    remote_offsets: Offsets
    lengths: Offsets


class State(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Status(NamedTuple):
    state: State
    detail: str = ""


class Peer(Protocol):
    """A connected remote worker; made by `Transport.connect`, ended by `Transport.disconnect`.

    regions: what its record says is registered there, in order; a batch's remote_region is an index into them.
    """

    @property
    def name(self) -> str: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...


class Handle(Protocol):
    """One posted transfer. Keep it until `Transport.release`."""


class Transport(Protocol):
    """The interface; the conformance suite (tests/transport) is its precise meaning."""

    name: str
    traits: Traits

    def register(self, regions: Sequence[Region]) -> None:
        """Once, before all else. Raises TransportError for memory that can't be registered, and the second time."""

    def record(self) -> bytes:
        """What a peer needs to reach this worker's regions. Raises TransportError before `register`."""

    def reaches(self, record: bytes) -> bool:
        """Whether a peer's record can be reached from here at all (same host, same kind). Never raises or blocks.
        Where it is False, `connect` refuses at once, and says why with both values."""

    def connect(self, record: bytes) -> Peer:
        """May block for a moment. Raises PeerLost, BadTransfer (a malformed record) or TransportError."""

    def read(self, peer: Peer, batches: Sequence[Batch]) -> Handle:
        """Post: remote to local. Raises BadTransfer, QueueFull or PeerLost; then nothing of it was started. A peer that
        is dead is PeerLost at the latest once a transfer with it was seen FAILED."""

    def write(self, peer: Peer, batches: Sequence[Batch]) -> Handle:
        """Post: local to remote. As `read`."""

    def poll(self, handle: Handle) -> Status:
        """Never raises: any error of the library is FAILED with its text. So is a handle that was released, and after
        `close` one that was under way."""

    def release(self, handle: Handle) -> bool:
        """Give the handle back, cancelling what can be cancelled. True when no operation of it can still move
        bytes; False when that is not known yet: call again later. After True the handle is dead."""

    def gone(self, peer: Peer) -> bool:
        """Whether the peer's process is proven gone, and with it every write of its own into this process's regions.
        False where that can't be known."""

    def progress(self) -> None:
        """Drive the library once on behalf of peers that read from or write to this process."""

    def disconnect(self, peer: Peer) -> None:
        """Forget the peer. Idempotent."""

    def close(self) -> None:
        """Deregister and free everything. Idempotent. After it `register`, `record`, `connect`, `read`, `write` raise
        TransportError, `release` says True of whatever can't move bytes any more, and the rest still does nothing."""
