"""Transport "sockets", over plain TCP: the worked example of docs/transports.md, "Adding a transport".

This file is what one writes around a library; kvferry_sockets_wire.py stands for the library. All bytes move in calls
of the thread that drives the transport: on the side that posts in `poll` and `release`, on the target's in `progress`.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from kvferry_sockets_wire import TOKEN_BYTES, Asking, Request, Serving

from kvferry.layout import Region
from kvferry.transport import hostmem
from kvferry.transport.base import (
    BadTransfer,
    Batch,
    Handle,
    Peer,
    PeerLost,
    QueueFull,
    State,
    Status,
    Traits,
    TransportError,
)
from kvferry.transport.batches import check_batches

logger = logging.getLogger(__name__)

KIND = f"kvferry-sockets/1/{sys.byteorder}"
CONNECT_S = 2.0
MAX_SERVED = 256
"""Connections served at a time; further ones wait in the listener's queue."""


class Record(msgspec.Struct, frozen=True):
    """What a peer needs. token: names this incarnation; who can show it may touch the regions."""

    kind: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    host_id: str
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    start_time: int
    region_lengths_bytes: tuple[Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)], ...]


class SocketsPeer:
    """lost: why nothing can be posted to it any more."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.address = (record.host, record.port)
        self.name = f"sockets:{record.host}:{record.port}:{record.token.hex()[:8]}"
        self.regions = tuple(Region(0, length) for length in record.region_lengths_bytes)
        self.lost = ""

    def process_gone(self) -> bool:
        on_this_host = self.record.host_id == hostmem.host_id()
        return on_this_host and hostmem.process_gone(self.record.pid, self.record.start_time)


class SocketsHandle:
    """One posted transfer. Nothing of it moves before the first `advance`."""

    def __init__(self, peer: SocketsPeer, request: Request, pieces: list[memoryview]) -> None:
        self.peer = peer
        self.status = Status(State.PENDING)
        self.connection = Asking(peer.address, peer.record.token, request, pieces)

    def advance(self) -> None:
        if self.status.state is not State.PENDING:
            return
        try:
            if self.connection.is_over():
                self.status = Status(State.DONE)
        except Exception as error:
            self.status = Status(State.FAILED, f"{self.peer.name}: {error}")
            self.peer.lost = self.status.detail

    def is_quiet(self) -> bool:
        """Whether nothing of it moves any more once its connection is closed."""
        if not self.connection.may_land:
            return True
        return self.status.state is not State.PENDING and self.peer.process_gone()


class SocketsTransport:
    """host: the IPv4 address to listen on, which peers are told. port: 0 for any. max_inflight: how many transfers may
    be under way; beyond it, QueueFull."""

    name = "sockets"
    options = ("host", "port", "max_inflight")
    # Not quiet: of a write that breaks off, bytes may wait in the target's socket, which still takes them.
    traits = Traits(synchronous=False, target_must_poll=True, failure_is_quiet=False)

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, max_inflight: int = 64) -> None:
        try:
            self._network = _network_of(host, hostmem.host_id())
        except ValueError as error:
            raise TransportError(f"sockets: host: {error}") from error
        if max_inflight < 1:
            raise TransportError(f"sockets: max_inflight is {max_inflight}, must be positive")
        self._host, self._port, self._max_inflight = host, port, max_inflight
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._regions: tuple[Region, ...] = ()
        self._memory: list[memoryview] = []
        self._listener: socket.socket | None = None
        self._served: set[Serving] = set()
        self._handles: set[SocketsHandle] = set()
        self._closed = False

    @property
    def live_handles(self) -> int:
        """Handles posted and not yet released."""
        return len(self._handles)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._regions:
            raise TransportError(f"sockets: register: {len(self._regions)} regions are registered already")
        for i, region in enumerate(regions):
            if region.device != "cpu" or region.length_bytes <= 0:
                raise TransportError(f"sockets: region {i}: {region.length_bytes} bytes on {region.device!r}")
        try:
            self._listener = socket.create_server((self._host, self._port), backlog=1024)
        except (OSError, OverflowError) as error:
            raise TransportError(f"sockets: can't listen on {self._host}, port {self._port}: {error}") from error
        self._listener.setblocking(False)
        self._regions = tuple(regions)
        self._memory = [memoryview((ctypes.c_ubyte * r.length_bytes).from_address(r.address)) for r in regions]

    def record(self) -> bytes:
        self._check_open()
        if self._listener is None:
            raise TransportError("sockets: record: nothing is registered")
        record = Record(
            kind=KIND,
            host=self._host,
            port=self._listener.getsockname()[1],
            token=self._token,
            host_id=hostmem.host_id(),
            pid=os.getpid(),
            start_time=hostmem.start_time(os.getpid()),
            region_lengths_bytes=tuple(region.length_bytes for region in self._regions),
        )
        return msgspec.msgpack.encode(record)

    def reaches(self, record: bytes) -> bool:
        try:
            self._open_peer(record)
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> SocketsPeer:
        """Shows that somebody listens there; whether it is the one that made the record, each transfer shows."""
        self._check_open()
        peer = self._open_peer(record)
        try:
            socket.create_connection(peer.address, CONNECT_S).close()
        except OSError as error:
            raise PeerLost(f"{peer.name}: {error}") from error
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> SocketsHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> SocketsHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, SocketsHandle) or handle not in self._handles:
            return Status(State.FAILED, "sockets: not a live handle of this transport")
        handle.advance()
        return handle.status

    def release(self, handle: Handle) -> bool:
        """A read is cut off. A write that has begun waits for the target's answer; where that can't come any more, it
        is quiet once the target's process is seen gone, on this host."""
        if not isinstance(handle, SocketsHandle) or handle not in self._handles:
            return True
        if not handle.is_quiet():
            handle.advance()
        if not handle.is_quiet():
            return False
        handle.connection.close()
        self._handles.discard(handle)
        return True

    def gone(self, peer: Peer) -> bool:
        """Never proven: what a dead peer has written may still wait in this process's sockets."""
        return False

    def progress(self) -> None:
        """Serves peers as far as that goes without waiting."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # nobody waits, or this process has no descriptor left
            while len(self._served) < MAX_SERVED:
                self._served.add(Serving(self._listener.accept()[0], self._token, self._asked_for))
        for connection in list(self._served):
            try:
                is_over = connection.is_over()
            except Exception as error:
                # Whatever a stranger sends, and however a peer dies, it ends its own connection and nothing else.
                logger.info("kvferry: sockets: a connection to this worker has ended: %s", error)
                is_over = True
            if is_over:
                connection.close()
                self._served.discard(connection)

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, SocketsPeer):
            peer.lost = f"{peer.name}: disconnected"

    def close(self) -> None:
        """Ends all transfers, peers' too. Own writes that may still land stay live handles, for `release`."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._served:
            connection.close()
        self._served.clear()
        for handle in self._handles:
            handle.connection.close()
            if handle.status.state is State.PENDING:
                handle.status = Status(State.FAILED, "sockets: the transport was closed")
        self._handles = {handle for handle in self._handles if not handle.is_quiet()}
        self._memory.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("sockets: the transport is closed")

    def _open_peer(self, record: bytes) -> SocketsPeer:
        try:
            decoded = msgspec.msgpack.decode(record, type=Record)
            network = _network_of(decoded.host, decoded.host_id)
        except (msgspec.DecodeError, ValueError) as error:
            raise BadTransfer(f"sockets: malformed record of {len(record)} bytes: {error}") from error
        if decoded.kind != KIND:
            raise BadTransfer(f"sockets: record of kind {decoded.kind!r}, expected {KIND!r}")
        if network != self._network:
            raise TransportError(f"sockets: the peer listens on {decoded.host}, out of reach from {self._host} here")
        return SocketsPeer(decoded)

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> SocketsHandle:
        self._check_open()
        if not isinstance(peer, SocketsPeer):
            raise BadTransfer(f"sockets: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._regions, peer.regions)
        if peer.lost:
            raise PeerLost(peer.lost)
        in_flight = sum(handle.status.state is State.PENDING for handle in self._handles)
        if in_flight >= self._max_inflight:
            raise QueueFull(f"sockets: {in_flight} transfers in flight, max_inflight is {self._max_inflight}")
        request = Request(write, [(b.remote_region, b.remote_offsets.tobytes(), b.lengths.tobytes()) for b in checked])
        try:
            handle = SocketsHandle(peer, request, self._pieces(checked))
        except OSError as error:
            raise QueueFull(f"sockets: {error}") from error
        self._handles.add(handle)
        return handle

    def _asked_for(self, request: Request) -> list[memoryview]:
        """Checked here as well: only this side knows what is registered. Raises BadTransfer or ValueError."""
        batches = []
        for region, offsets_int64, lengths_int64 in request.parts:
            offsets, lengths = np.frombuffer(offsets_int64, np.int64), np.frombuffer(lengths_int64, np.int64)
            batches.append(Batch(region, region, offsets, offsets, lengths))
        return self._pieces(check_batches(batches, self._regions, self._regions))

    def _pieces(self, batches: Sequence[Batch]) -> list[memoryview]:
        """The local side of the batches, in order."""
        pieces: list[memoryview] = []
        for batch in batches:
            memory, ends = self._memory[batch.local_region], batch.local_offsets + batch.lengths
            pieces += [memory[a:b] for a, b in zip(batch.local_offsets.tolist(), ends.tolist(), strict=True)]
        return pieces


def _network_of(host: str, host_id: str) -> str:
    """Equal for addresses that may reach each other: loopback only that of the same host. Raises ValueError."""
    address = ipaddress.IPv4Address(host)
    if address.is_unspecified:
        raise ValueError(f"{host} is no address that peers can be told")
    return host_id if address.is_loopback else "network"
