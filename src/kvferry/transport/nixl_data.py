"""NIXL's side of the data: what a record holds, and descriptors in the form that NIXL wants."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, Batch, Offsets, TransportError
from kvferry.transport.devices import gpu_number
from kvferry.transport.remote import RemoteRecord, check_regions, decode_record

KIND = "kvferry-nixl/1"

Rows = npt.NDArray[np.uint64]
"""(n, 3): address, length in bytes, device number."""
MemoryPair = tuple[str, str]
"""NIXL's kinds of the local and the remote memory: "DRAM" or "VRAM"."""


class Record(RemoteRecord, frozen=True):
    """What a peer needs. agent: NIXL's name of this incarnation; digest: of the metadata, which NIXL parses in C++."""

    version: str
    backend: str
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    regions: tuple[Region, ...]
    metadata: bytes
    digest: bytes


def by_memory(
    batches: Sequence[Batch], local: Sequence[Region], remote: Sequence[Region]
) -> dict[MemoryPair, tuple[Rows, Rows]]:
    """Descriptors as NIXL wants them, (n, 3) of address, length, device; one list for each pair of memory kinds."""
    rows: dict[MemoryPair, list[tuple[Rows, Rows]]] = {}
    for batch in batches:
        here, there = local[batch.local_region], remote[batch.remote_region]
        (local_kind, local_device), (remote_kind, remote_device) = memory_of(here, "local"), memory_of(there, "remote")
        rows.setdefault((local_kind, remote_kind), []).append(
            (
                _rows(here.address, batch.local_offsets, batch.lengths, local_device),
                _rows(there.address, batch.remote_offsets, batch.lengths, remote_device),
            )
        )
    return {
        kinds: (np.concatenate([here for here, _ in pairs]), np.concatenate([there for _, there in pairs]))
        for kinds, pairs in rows.items()
    }


def _rows(base: int, offsets: Offsets, lengths: Offsets, device: int) -> Rows:
    rows = np.empty((len(lengths), 3), dtype=np.uint64)
    rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    rows[:, 1] = lengths
    rows[:, 2] = device
    return rows


def memory_of(region: Region, what: str) -> tuple[str, int]:
    """NIXL's kind of memory and device number of a region."""
    if region.device.partition(":")[0] == "cpu":
        return "DRAM", 0
    number = gpu_number(region.device, "cuda")
    if number is not None:
        return "VRAM", number
    raise TransportError(f"nixl: {what}: device {region.device!r} is neither 'cpu' nor 'cuda:N'")


def decode(record: bytes) -> Record:
    """Raises BadTransfer, or TransportError for memory that NIXL does not know."""
    decoded = decode_record(record, Record, "nixl", KIND)
    if decoded.digest != digest_of(decoded.metadata):
        raise BadTransfer(f"nixl: digest of the record's metadata of {len(decoded.metadata)} bytes does not match")
    check_regions(decoded.regions, "nixl")
    for i, region in enumerate(decoded.regions):
        memory_of(region, f"record's region {i}")
    return decoded


def digest_of(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()
