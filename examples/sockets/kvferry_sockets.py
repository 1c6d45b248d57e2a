"""Transport "sockets", over plain TCP: the worked example of docs/transports.md, "Adding a transport".

A transfer is one connection, with a thread at either end. Whoever posts sends the target's token and a request; the
target answers READY; the bytes follow, without headers, in the order of the request; and after written bytes the target
says DONE or GIVEN_UP. A thread touches the memory of its own process only, and nothing any more once it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import ipaddress
import itertools
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

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

READY, DONE, GIVEN_UP = b"R", b"D", b"G"
TOKEN_BYTES, MAX_REQUEST_BYTES = 16, 1 << 30
MAX_SERVED = 256
"""Connections served at a time; further ones wait in the listener's queue."""
SILENT_S = 10.0
"""Whoever is served and neither sends nor takes anything for so long is cut off."""
CONNECT_S, PAUSE_S = 2.0, 0.1


class SocketsPeer(msgspec.Struct, eq=False, tag=f"kvferry-sockets/1/{sys.byteorder}"):
    """A worker, as its record says. token: names this incarnation; who can show it may touch the regions.

    lost: why nothing can be posted to it any more.
    """

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    host_id: str
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    start_time: int
    region_lengths_bytes: tuple[Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)], ...] = ()
    lost: str = ""

    @property
    def name(self) -> str:
        return f"sockets:{self.host}:{self.port}:{self.token.hex()[:8]}"

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(0, length) for length in self.region_lengths_bytes)

    def network(self) -> str:
        """Equal for workers that may reach each other: over the loopback only those of one host. Raises ValueError."""
        address = ipaddress.IPv4Address(self.host)
        if address.is_unspecified:
            raise ValueError(f"{address} is no address that peers can be told")
        return self.host_id if address.is_loopback else "network"

    def process_gone(self) -> bool:
        """Whether its process is seen gone, which takes being on the same host."""
        return self.host_id == hostmem.host_id() and hostmem.process_gone(self.pid, self.start_time)


class Request(msgspec.Struct, frozen=True):
    """parts: of the target's memory, in order: region, offsets and lengths (int64 in the processor's byte order)."""

    write: bool
    parts: list[tuple[int, bytes, bytes]]


class Connection(threading.Thread):
    """One end of a transfer: a socket, and the thread that does `work` on it. Where it was posted it is the handle.

    status: how it went, once the thread has ended. cut_by: what `cut` shuts of the socket.
    may_land: bytes were written, and the target has not said that it is through with them.
    """

    def __init__(self, name: str, sock: socket.socket, work: Callable[[Connection], None]) -> None:
        # A daemon, so that a transport that nobody closes does not keep its process from ending.
        super().__init__(name=name, daemon=True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock, self.stream, self._work = sock, sock.makefile("rwb"), work
        self.status, self.may_land, self.cut_by = Status(State.PENDING), False, socket.SHUT_RDWR
        self.lock = threading.Lock()

    def run(self) -> None:
        try:
            self._work(self)
            self.status = Status(State.DONE)
        except Exception as error:  # whatever a stranger sends, and however a peer dies, it ends this connection alone
            self.status = Status(State.FAILED, f"{self.name}: {error}")
            logger.debug("kvferry: %s", self.status.detail)
        with contextlib.suppress(OSError):
            self.stream.close()
        with self.lock:
            self.sock.close()

    def cut(self, *, fully: bool = False) -> None:
        """Makes the thread end soon, whatever it waits for; unless it has yet to begin to connect."""
        with self.lock, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR if fully else self.cut_by)

    def end(self, *, fully: bool = False) -> None:
        while self.is_alive():
            self.cut(fully=fully)
            self.join(PAUSE_S)

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.stream.writelines(pieces)
        self.stream.flush()

    def fill(self, pieces: Iterable[memoryview]) -> None:
        for piece in pieces:
            if self.stream.readinto(piece) < len(piece):
                raise ConnectionError("the connection has ended before all bytes had come")


def ask(conn: Connection, peer: SocketsPeer, request: Request, pieces: Iterable[memoryview]) -> None:
    """The end that posts. pieces: of its memory."""
    conn.sock.connect((peer.host, peer.port))
    body = msgspec.msgpack.encode(request)
    conn.send([peer.token, len(body).to_bytes(8, "little"), body])
    if conn.stream.read(1) != READY:
        raise ConnectionError("the request was refused, or another process listens there")
    if not request.write:
        conn.fill(pieces)
        return
    conn.may_land = True
    with contextlib.suppress(OSError):  # where sending breaks off there may be an answer all the same
        conn.send(pieces)
    answer = conn.stream.read(1)
    conn.may_land = answer not in (DONE, GIVEN_UP)
    if answer != DONE:
        raise ConnectionError("the target has given the transfer up" if answer else "the target has not answered")


def serve(conn: Connection, token: bytes, pieces_of: Callable[[Request], Iterable[memoryview]]) -> None:
    """The target's end, of a connection that anybody may have opened. pieces_of: the memory that a request asks for."""
    conn.sock.settimeout(SILENT_S)
    if not hmac.compare_digest(conn.stream.read(TOKEN_BYTES), token):
        raise ConnectionError("not the token of this side: a stranger, or meant for a process before this one")
    num_bytes = int.from_bytes(conn.stream.read(8), "little")
    if num_bytes > MAX_REQUEST_BYTES:
        raise ConnectionError(f"a request of {num_bytes} bytes, at most {MAX_REQUEST_BYTES} are taken")
    request = msgspec.msgpack.decode(conn.stream.read(num_bytes), type=Request)
    pieces = pieces_of(request)
    if not request.write:
        conn.send(itertools.chain([READY], pieces))
        return
    with conn.lock:  # a cut before this ends it unanswered, and nothing has landed; a later one lets the answer pass
        conn.cut_by = socket.SHUT_RD
    answer = GIVEN_UP
    try:
        conn.send([READY])
        conn.fill(pieces)
        answer = DONE
    finally:
        conn.send([answer])  # only this tells the other end that nothing more of it lands here


class SocketsTransport:
    """host: the IPv4 address to listen on, which peers are told. port: 0 for any. max_inflight: how many transfers may
    be posted and not yet polled to their end; beyond it, QueueFull."""

    name = "sockets"
    options = ("host", "port", "max_inflight")
    # Not quiet: of a write that breaks off, bytes may wait in the target's socket, and its thread still takes them.
    traits = Traits(synchronous=False, target_must_poll=False, failure_is_quiet=False)

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, max_inflight: int = 64) -> None:
        token, pid = secrets.token_bytes(TOKEN_BYTES), os.getpid()
        self._me = SocketsPeer(host, port, token, hostmem.host_id(), pid, hostmem.start_time(pid))
        with _raising(TransportError, "host"):
            self._me.network()
        if max_inflight < 1:
            raise TransportError(f"sockets: max_inflight is {max_inflight}, must be positive")
        with _raising(TransportError, f"can't listen on {host}, port {port}"):
            self._listener = socket.create_server((host, port), backlog=MAX_SERVED)
        self._me.port = self._listener.getsockname()[1]
        self._max_inflight, self._closed = max_inflight, threading.Event()
        self._memory: list[memoryview] = []
        self._handles: dict[Connection, SocketsPeer] = {}
        self._in_flight: set[Connection] = set()
        self._server = threading.Thread(target=self._serve_all, name=self._me.name, daemon=True)
        self._server.start()

    @property
    def live_handles(self) -> int:
        """Handles posted and not yet released."""
        return len(self._handles)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._memory:
            raise TransportError(f"sockets: register: {len(self._memory)} regions are registered already")
        for i, region in enumerate(regions):
            if region.device != "cpu" or region.length_bytes <= 0:
                raise TransportError(f"sockets: region {i}: {region.length_bytes} bytes on {region.device!r}")
        self._memory = [memoryview((ctypes.c_ubyte * r.length_bytes).from_address(r.address)) for r in regions]
        self._me.region_lengths_bytes = tuple(region.length_bytes for region in regions)

    def record(self) -> bytes:
        self._check_open()
        if not self._memory:
            raise TransportError("sockets: record: nothing is registered")
        return msgspec.msgpack.encode(self._me)

    def reaches(self, record: bytes) -> bool:
        with contextlib.suppress(TransportError):
            return bool(self._open_peer(record))
        return False

    def connect(self, record: bytes) -> SocketsPeer:
        """Shows that somebody listens there; whether it is the one that made the record, each transfer shows."""
        self._check_open()
        peer = self._open_peer(record)
        with _raising(PeerLost, peer.name):
            socket.create_connection((peer.host, peer.port), CONNECT_S).close()
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> Handle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> Handle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, Connection) or handle not in self._handles:
            return Status(State.FAILED, "sockets: not a live handle of this transport")
        if handle.is_alive():
            return Status(State.PENDING)
        if handle.status.state is State.FAILED and handle in self._in_flight:
            self._handles[handle].lost = handle.status.detail
        self._in_flight.discard(handle)
        return handle.status

    def release(self, handle: Handle) -> bool:
        """Cuts it off. A write is quiet once the target has answered, or its process is seen gone, on this host."""
        if not isinstance(handle, Connection) or handle not in self._handles:
            return True
        self._in_flight.discard(handle)
        if handle.is_alive():
            handle.cut(fully=self._handles[handle].process_gone())
        elif not handle.may_land or self._handles[handle].process_gone():
            del self._handles[handle]
        return handle not in self._handles

    def gone(self, peer: Peer) -> bool:
        """Never proven: what a dead peer has written may still wait in this process's sockets."""
        return False

    def progress(self) -> None:
        """Nothing to do: threads serve the peers."""

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, SocketsPeer):
            peer.lost = f"{peer.name}: disconnected"

    def close(self) -> None:
        """Ends all transfers, peers' too, and all threads. Own writes that may still land stay live handles."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._server.join()
        self._listener.close()
        for handle in list(self._handles):
            handle.end(fully=True)
            self.release(handle)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransportError("sockets: the transport is closed")

    def _open_peer(self, record: bytes) -> SocketsPeer:
        with _raising(BadTransfer, f"malformed record of {len(record)} bytes"):
            peer = msgspec.msgpack.decode(record, type=SocketsPeer)
            network = peer.network()
        if network != self._me.network():
            raise TransportError(f"sockets: the peer listens on {peer.host}, out of reach from {self._me.host} here")
        return peer

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> Connection:
        self._check_open()
        if not isinstance(peer, SocketsPeer):
            raise BadTransfer(f"sockets: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._me.regions, peer.regions)
        if peer.lost:
            raise PeerLost(peer.lost)
        if len(self._in_flight) >= self._max_inflight:
            raise QueueFull(f"sockets: {len(self._in_flight)} in flight, max_inflight is {self._max_inflight}")
        request = Request(write, [(b.remote_region, b.remote_offsets.tobytes(), b.lengths.tobytes()) for b in checked])
        work = functools.partial(ask, peer=peer, request=request, pieces=self._pieces(checked))
        with _raising(QueueFull, "no descriptor or thread left"):
            handle = Connection(peer.name, socket.socket(), work)
            handle.cut_by = socket.SHUT_WR if write else socket.SHUT_RDWR
            handle.start()
        self._handles[handle] = peer
        self._in_flight.add(handle)
        return handle

    def _serve_all(self) -> None:
        work = functools.partial(serve, token=self._me.token, pieces_of=self._asked_for)
        served: list[Connection] = []
        while not self._closed.is_set():
            served = [one for one in served if one.is_alive()]
            if len(served) == MAX_SERVED:
                self._closed.wait(PAUSE_S)
                continue
            try:
                one = Connection("sockets:serving", self._listener.accept()[0], work)
                one.start()
                served.append(one)
            except (OSError, RuntimeError):  # no descriptor or no thread left; or the end
                self._closed.wait(PAUSE_S)
        for one in served:
            one.end()

    def _asked_for(self, request: Request) -> Iterable[memoryview]:
        """Checked here as well: only this side knows what is registered. Raises BadTransfer or ValueError."""
        batches = []
        for region, *int64s in request.parts:
            offsets, lengths = (np.frombuffer(one, np.int64) for one in int64s)
            batches.append(Batch(region, region, offsets, offsets, lengths))
        return self._pieces(check_batches(batches, self._me.regions, self._me.regions))

    def _pieces(self, batches: Sequence[Batch]) -> Iterable[memoryview]:
        """The local side of the batches, in order."""
        for region, _, offsets, _, lengths in batches:
            for start, end in zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True):
                yield self._memory[region][start:end]


@contextlib.contextmanager
def _raising(kind: type[TransportError], what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError, RuntimeError, msgspec.DecodeError) as error:
        raise kind(f"sockets: {what}: {error}") from error
