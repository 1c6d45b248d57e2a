"""MoRI-IO's side of the data: what a record holds, kinds of memory, and batches cut into what one call takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, Batch, Offsets, TransportError
from kvferry.transport.devices import gpu_number
from kvferry.transport.remote import RemoteRecord, check_regions, decode_record

KIND = "kvferry-mori/1"
CALL_BYTES = 1 << 30
"""At most so much in one call: MoRI joins neighbours within it, and a network card takes no longer message."""
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Record(RemoteRecord, frozen=True):
    """What a peer needs.

    engine: MoRI's key of this incarnation. node: MoRI's name of the host. address: of the engine's TCP server.
    digest: of the packed descriptions, which MoRI parses in C++.
    """

    version: str
    backend: str
    engine: _Name
    node: str
    address: str
    regions: tuple[Region, ...]
    engine_desc: bytes
    memory_descs: tuple[bytes, ...]
    digest: bytes


class Memory(NamedTuple):
    """A region in MoRI's terms: a GPU's number, or -1 in CPU memory."""

    on_gpu: bool
    device_id: int


class Piece(NamedTuple):
    """What one library call moves between one local and one remote region: lists of bytes' offsets and lengths."""

    regions: tuple[int, int]
    local_offsets: list[int]
    remote_offsets: list[int]
    lengths: list[int]

    def cut(self, most: int) -> tuple[Piece, Piece]:
        """Its first `most` descriptors, and the rest."""
        arrays = (self.local_offsets, self.remote_offsets, self.lengths)
        return (
            Piece(self.regions, *(array[:most] for array in arrays)),
            Piece(self.regions, *(array[most:] for array in arrays)),
        )


def memory_of(region: Region, what: str, backend: str) -> Memory:
    """Raises TransportError that names `what` where the backend can't move such memory."""
    if region.device == "cpu":
        if backend == "xgmi":
            raise TransportError(f"mori: {what} is on {region.device!r}: backend 'xgmi' moves GPU memory only")
        return Memory(False, -1)
    # ROCm's torch calls its devices cuda as well.
    number = gpu_number(region.device, "cuda", "hip")
    if number is not None:
        return Memory(True, number)
    raise TransportError(f"mori: {what}: device {region.device!r} is neither 'cpu' nor 'cuda:N' nor 'hip:N'")


def pieces(batches: Sequence[Batch], most: int) -> Iterator[Piece]:
    """Cuts checked batches into calls of at most `most` descriptors and CALL_BYTES bytes; order is kept."""
    for batch in batches:
        local, remote, lengths = _short(batch.local_offsets, batch.remote_offsets, batch.lengths)
        ends = np.cumsum(lengths)
        first, done = 0, 0
        while first < len(lengths):
            last = min(first + most, int(np.searchsorted(ends, done + CALL_BYTES, side="right")))
            regions = (batch.local_region, batch.remote_region)
            yield Piece(regions, *(array[first:last].tolist() for array in (local, remote, lengths)))
            first, done = last, int(ends[last - 1])


def _short(local: Offsets, remote: Offsets, lengths: Offsets) -> tuple[Offsets, Offsets, Offsets]:
    """The same bytes in descriptors that are no longer than one call takes."""
    parts = -(-lengths // CALL_BYTES)
    if not (parts > 1).any():
        return local, remote, lengths
    row = np.repeat(np.arange(len(lengths)), parts)
    skipped = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * CALL_BYTES
    return local[row] + skipped, remote[row] + skipped, np.minimum(CALL_BYTES, lengths[row] - skipped)


def decode(record: bytes) -> Record:
    """Raises BadTransfer for what is no record of this transport, before any of it reaches the library."""
    decoded = decode_record(record, Record, "mori", KIND)
    if len(decoded.memory_descs) != len(decoded.regions):
        raise BadTransfer(
            f"mori: record has {len(decoded.regions)} regions and {len(decoded.memory_descs)} memory descriptions"
        )
    if decoded.digest != digest_of(decoded.engine_desc, decoded.memory_descs):
        raise BadTransfer(f"mori: digest of the record's {1 + len(decoded.memory_descs)} descriptions does not match")
    check_regions(decoded.regions, "mori")
    return decoded


def digest_of(engine_desc: bytes, memory_descs: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode([engine_desc, list(memory_descs)]), digest_size=16).digest()
