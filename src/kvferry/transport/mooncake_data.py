"""Mooncake's side of the data: what a record holds, descriptors by address, and where peers' tokens are read into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, Batch
from kvferry.transport.host_address import is_address
from kvferry.transport.hostmem import Natural
from kvferry.transport.remote import RemoteRecord, check_regions, decode_record

KIND = "kvferry-mooncake/1"
TOKEN_BYTES = 16

Addresses = npt.NDArray[np.int64]


class Record(RemoteRecord, frozen=True):
    """What a peer needs.

    host, port: where Mooncake is asked for its regions; host is a numeric IPv4 address. token: random bytes of this
    incarnation, which lie in its memory at token_address.
    """

    version: str
    protocol: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    regions: tuple[Region, ...]
    token_address: Natural
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]

    @property
    def session(self) -> str:
        """Mooncake's name for it; another process may have it later."""
        return f"{self.host}:{self.port}"


def decode(record: bytes) -> Record:
    decoded = decode_record(record, Record, "mooncake", KIND)
    if not is_address(decoded.host):
        raise BadTransfer(f"mooncake: record's host {decoded.host!r} is no IPv4 address of one machine")
    check_regions(decoded.regions, "mooncake")
    return decoded


class Step(NamedTuple):
    """Descriptors that may move at the same time, by address: int64 arrays of equal length, in bytes.

    verdict: asked once all have moved; returns why the transfer has failed all the same, or nothing.
    """

    write: bool
    local: Addresses
    remote: Addresses
    lengths: Addresses
    verdict: Callable[[], str] | None = None


def step_of(batches: Sequence[Batch], local: Sequence[Region], remote: Sequence[Region], *, write: bool) -> Step:
    """All batches, which have been checked, as one step."""
    return Step(
        write,
        np.concatenate([batch.local_offsets + local[batch.local_region].address for batch in batches]),
        np.concatenate([batch.remote_offsets + remote[batch.remote_region].address for batch in batches]),
        np.concatenate([batch.lengths for batch in batches]),
    )


class Slots:
    """Memory for tokens: this side's own, which peers read, and one place for each transfer to read its peer's into."""

    def __init__(self, own: bytes, count: int) -> None:
        self._memory = np.zeros((count + 1, TOKEN_BYTES), dtype=np.uint8)
        self._memory[0] = np.frombuffer(own, dtype=np.uint8)
        self._free = list(range(count, 0, -1))

    @property
    def region(self) -> Region:
        return Region(self._memory.ctypes.data, self._memory.nbytes)

    @property
    def own_address(self) -> int:
        return int(self._memory.ctypes.data)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        slot = self._free.pop()
        self._memory[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def proof(self, slot: int, record: Record) -> Step:
        """Reads the peer's token: only the process that the record is of has it there."""

        def verdict() -> str:
            seen = self._memory[slot].tobytes()
            self._memory[slot] = 0
            return "" if seen == record.token else "another process answers at its address"

        local, remote, length = np.array(
            [[self.own_address + slot * TOKEN_BYTES], [record.token_address], [TOKEN_BYTES]], dtype=np.int64
        )
        return Step(False, local, remote, length, verdict)
