"""The worker at the other end, as far as all transports look at it: what each record tells, and whether it lives."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, PeerLost
from kvferry.transport.hostmem import Process


class RemoteRecord(msgspec.Struct, frozen=True):
    """Base of what a worker tells its peers. kind: the transport and its format's number."""

    kind: str
    process: Process


R = TypeVar("R", bound=RemoteRecord)


def decode_record(record: bytes, record_type: type[R], transport: str, kind: str) -> R:
    """Raises BadTransfer for what is no record of this transport."""
    try:
        decoded = msgspec.msgpack.decode(record, type=record_type)
    # RecursionError: one that is nested too deeply, even where nobody looks.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTransfer(f"{transport}: malformed record of {len(record)} bytes: {error}") from error
    if decoded.kind != kind:
        raise BadTransfer(f"{transport}: record of kind {decoded.kind!r}, expected {kind!r}")
    return decoded


def check_regions(regions: tuple[Region, ...], transport: str) -> None:
    """Raises BadTransfer for a record's region whose addresses are not those of a machine."""
    for i, region in enumerate(regions):
        if not (0 <= region.address < 2**63 and 0 < region.length_bytes < 2**63 - region.address):
            raise BadTransfer(
                f"{transport}: record's region {i}: address {region.address}, length {region.length_bytes}"
            )


class RemoteWorker:
    """Base of a connected worker. connected: until its `disconnect`."""

    def __init__(self, name: str, regions: tuple[Region, ...], process: Process) -> None:
        self.name = name
        self.regions = regions
        self.process = process
        self.connected = True

    def process_gone(self) -> bool:
        """Whether its process is proven gone; never proven from another host."""
        return self.process.gone()

    def check_alive(self) -> None:
        """Raises PeerLost for a peer that is known to be gone."""
        if not self.connected:
            raise PeerLost(f"{self.name}: disconnected")
        if self.process_gone():
            raise PeerLost(f"{self.name}: its process {self.process.pid} is gone")
