"""Local memory: between workers in one process, or in processes of one host that may touch each other's memory.

A span in shared memory (a memfd, a file in /dev/shm) is mapped; any other is reached with process_vm_readv and
process_vm_writev. The bytes move in the caller's thread when a transfer is posted, without the GIL. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvferry.layout import Region
from kvferry.transport import hostmem
from kvferry.transport.base import (
    BadTransfer,
    Batch,
    Handle,
    Offsets,
    Peer,
    PeerLost,
    QueueFull,
    State,
    Status,
    Traits,
    TransportError,
    TransportUnavailable,
)
from kvferry.transport.batches import check_batches
from kvferry.transport.hostmem import Natural
from kvferry.transport.remote import RemoteRecord, RemoteWorker, decode_record

Gate = Callable[[], bool]

_KIND = "kvferry-local/1"
_TOKEN_BYTES = 16
_MEMMOVE_BYTES = 64 << 10
"""From descriptors of this size on, a copy between mappings is faster than the system call, which pins each page;
below, one call for a thousand descriptors is, and gives the GIL back less often."""
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)


class _Span(msgspec.Struct, frozen=True):
    address: Natural
    length_bytes: Natural
    shared: hostmem.Shared | None


class _Record(RemoteRecord, frozen=True):
    """What a peer needs. token lies at token_address for as long as the transport is open."""

    uid: Natural
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    token_address: Natural
    regions: tuple[_Span, ...]


# Open transports of this process by their token, so that no peer in it touches memory of a closed one.
_here: weakref.WeakValueDictionary[bytes, LocalTransport] = weakref.WeakValueDictionary()


class _Way(NamedTuple):
    """The process and the address in it through which a region is reached."""

    pid: int
    address: int
    mapped: bool


class LocalPeer(RemoteWorker):
    """A connected worker of this host. Its regions are reached in this process, through a mapping, or by its pid."""

    def __init__(self, record: _Record) -> None:
        name = f"local:{record.process.pid}:{record.token.hex()[:8]}"
        regions = tuple(Region(span.address, span.length_bytes) for span in record.regions)
        super().__init__(name, regions, record.process)
        self._record = record
        self._mappings: dict[int, hostmem.Mapping] = {}
        self._same_process = record.process.pid == os.getpid()

    def check_alive(self) -> None:
        """Raises PeerLost when the process is gone (a pid used again is not it) or has closed its transport."""
        super().check_alive()
        if self._same_process:
            if self._record.token not in _here:
                raise PeerLost(f"{self.name}: its transport is closed")
        elif self._read_token() not in (None, self._record.token):
            raise PeerLost(f"{self.name}: its transport is closed")

    def open_regions(self) -> None:
        """Find a way to each region and try it. Raises TransportError that says why there is none."""
        if self._same_process:
            if _here[self._record.token].regions != self.regions:
                raise BadTransfer(f"{self.name}: the record's regions are not those that it registered")
            return
        for i, span in enumerate(self._record.regions):
            if not self._map(i, span):
                self._probe(i, span)

    def reach(self, region: int) -> _Way:
        """How a region is reached now. Raises OSError when it is gone."""
        if region not in self._mappings:
            return _Way(self.process.pid, self.regions[region].address, mapped=False)
        if not self._mappings[region].intact():
            raise OSError(errno.EFAULT, f"the shared memory of region {region} has shrunk")
        return _Way(os.getpid(), self._mappings[region].address, mapped=True)

    def error_of(self, error: OSError) -> TransportError:
        """What a system error from touching this peer means."""
        if error.errno == errno.ESRCH:
            return PeerLost(f"{self.name}: the process is gone")
        if error.errno == errno.EFAULT:
            return BadTransfer(f"{self.name}: memory is not mapped: {error.strerror}")
        if error.errno in _FORBIDDEN:
            return TransportError(
                f"{self.name}: may not touch the memory of a process of uid {self._record.uid}, as uid {os.getuid()} "
                f"({error.strerror}). Both must run as one user; Yama (/proc/sys/kernel/yama/ptrace_scope: "
                f"{hostmem.ptrace_scope()}) must be 0, or the peer set the option ptracer_any; a container must allow "
                "process_vm_readv"
            )
        return TransportError(f"{self.name}: {error.strerror}")

    def close(self) -> None:
        self.connected = False
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()

    def _read_token(self) -> bytes | None:
        """What now lies where the open transport keeps its token; None where reading is forbidden."""
        try:
            return hostmem.read_bytes(self.process.pid, self._record.token_address, _TOKEN_BYTES)
        except hostmem.CopyError as error:
            if error.errno in _FORBIDDEN:
                return None
            if error.errno == errno.EFAULT:
                return b""
            raise self.error_of(error) from error

    def _map(self, index: int, span: _Span) -> bool:
        if span.shared is None:
            return False
        try:
            self._mappings[index] = hostmem.Mapping(self.process.pid, span.shared, span.length_bytes)
        except (OSError, ValueError, OverflowError):
            # Another mount namespace, no permission, a sealed file: the other way may work.
            return False
        return True

    def _probe(self, index: int, span: _Span) -> None:
        try:
            hostmem.check_readable(self.process.pid, span.address, span.length_bytes)
        except hostmem.CopyError as error:
            cause = self.error_of(error)
            raise type(cause)(f"region {index}: {cause}") from error


class LocalHandle:
    """One posted transfer; PENDING only while the gate is shut, or the wire busy until due_at (time.monotonic)."""

    def __init__(self, peer: LocalPeer, batches: list[Batch], write: bool) -> None:
        self.peer = peer
        self.batches = batches
        self.write = write
        self.status = Status(State.PENDING)
        self.due_at = 0.0


class LocalTransport:
    """Transport "local".

    ptracer_any: let any process of this user reach this one where Yama restricts ptrace (ptrace_scope 1).
    For tests only: max_inflight, how many transfers may be posted and not yet polled to their end (QueueFull beyond);
    gate, a callable, or the path of a file: while the callable returns False, or the file exists, posted
    transfers stay PENDING and none of their bytes has moved. For measurements only: wire_mbps, which delays each
    transfer until a wire of so many megabytes per second, shared by all of this transport, would have carried it.
    """

    name = "local"
    options = ("ptracer_any", "max_inflight", "gate", "wire_mbps")

    def __init__(
        self,
        *,
        ptracer_any: bool = False,
        max_inflight: int | None = None,
        gate: Gate | str | None = None,
        wire_mbps: float | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise TransportUnavailable(f"local: needs Linux, this is {sys.platform}")
        if wire_mbps is not None and not wire_mbps > 0:
            raise TransportError(f"local: wire_mbps is {wire_mbps}, must be a positive number")
        if max_inflight is not None and max_inflight < 1:
            raise TransportError(f"local: max_inflight is {max_inflight}, must be 1 or more")
        if not (gate is None or isinstance(gate, str) or callable(gate)):
            raise TransportError(f"local: gate is {gate!r}, must be a path or a callable")
        is_synchronous = gate is None and wire_mbps is None
        self.traits = Traits(synchronous=is_synchronous, target_must_poll=False, failure_is_quiet=True)
        self._wire_mbps = wire_mbps
        self._wire_free_at = 0.0
        self._gate = _file_gate(gate) if isinstance(gate, str) else gate
        self._max_inflight = max_inflight
        self._regions: tuple[Region, ...] = ()
        self._handles: set[LocalHandle] = set()
        self._unseen: set[LocalHandle] = set()
        self._peers: set[LocalPeer] = set()
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        self._closed = False
        if ptracer_any:
            hostmem.allow_any_reader()

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered, in order."""
        return self._regions

    @property
    def live_handles(self) -> int:
        """Handles posted and not yet released."""
        return len(self._handles)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._regions:
            raise TransportError(f"local: register: {len(self._regions)} regions are registered already")
        for i, region in enumerate(regions):
            _check_region(i, region)
        self._regions = tuple(regions)
        _here[self._token.raw] = self

    def record(self) -> bytes:
        self._check_open()
        if not self._regions:
            raise TransportError("local: record: nothing is registered")
        return msgspec.msgpack.encode(
            _Record(
                kind=_KIND,
                process=hostmem.Process.own(),
                uid=os.getuid(),
                token=self._token.raw,
                token_address=ctypes.addressof(self._token),
                regions=tuple(
                    _Span(r.address, r.length_bytes, hostmem.find_shared(r.address, r.length_bytes))
                    for r in self._regions
                ),
            )
        )

    def reaches(self, record: bytes) -> bool:
        try:
            self._open_peer(decode_record(record, _Record, "local", _KIND)).close()
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> LocalPeer:
        self._check_open()
        peer = self._open_peer(decode_record(record, _Record, "local", _KIND))
        self._peers.add(peer)
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> LocalHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> LocalHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, LocalHandle) or handle not in self._handles:
            return Status(State.FAILED, "local: not a live handle of this transport")
        is_due = (self._gate is None or self._gate()) and time.monotonic() >= handle.due_at
        if handle.status.state is State.PENDING and is_due:
            handle.status = self._run_late(handle)
        if handle.status.state is not State.PENDING:
            self._unseen.discard(handle)
        return handle.status

    def release(self, handle: Handle) -> bool:
        """Always True: bytes move only inside a post or a poll."""
        if isinstance(handle, LocalHandle):
            self._handles.discard(handle)
            self._unseen.discard(handle)
        return True

    def gone(self, peer: Peer) -> bool:
        return isinstance(peer, LocalPeer) and peer.process_gone()

    def progress(self) -> None:
        """Nothing to do: readers and writers need no help of this process."""

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, LocalPeer):
            self._peers.discard(peer)
            peer.close()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._handles.clear()
        self._unseen.clear()
        _here.pop(self._token.raw, None)
        # Peers look here before each transfer.
        ctypes.memset(self._token, 0, _TOKEN_BYTES)
        self._regions = ()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("local: the transport is closed")

    def _open_peer(self, record: _Record) -> LocalPeer:
        if not record.process.on_this_host():
            here, there = hostmem.host_id(), record.process.host
            raise TransportError(f"local: the peer is on another host: {there}, this is {here}")
        peer = LocalPeer(record)
        try:
            peer.check_alive()
            peer.open_regions()
        except TransportError:
            peer.close()
            raise
        return peer

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> LocalHandle:
        self._check_open()
        if not isinstance(peer, LocalPeer):
            raise BadTransfer(f"local: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._regions, peer.regions)
        if self._max_inflight is not None and len(self._unseen) >= self._max_inflight:
            raise QueueFull(f"local: {len(self._unseen)} transfers in flight, max_inflight is {self._max_inflight}")
        peer.check_alive()
        handle = LocalHandle(peer, checked, write)
        if self._wire_mbps is not None:
            num_bytes = sum(int(batch.lengths.sum()) for batch in checked)
            handle.due_at = max(self._wire_free_at, time.monotonic()) + num_bytes / (self._wire_mbps * 1e6)
            self._wire_free_at = handle.due_at
        if self.traits.synchronous:
            handle.status = self._run(handle)
        self._handles.add(handle)
        self._unseen.add(handle)
        return handle

    def _run_late(self, handle: LocalHandle) -> Status:
        try:
            handle.peer.check_alive()
        except PeerLost as error:
            return Status(State.FAILED, str(error))
        return self._run(handle)

    def _run(self, handle: LocalHandle) -> Status:
        try:
            for batch in handle.batches:
                self._copy(handle.peer, batch, write=handle.write)
        except OSError as error:
            return Status(State.FAILED, str(handle.peer.error_of(error)))
        return Status(State.DONE)

    def _copy(self, peer: LocalPeer, batch: Batch, *, write: bool) -> None:
        way = peer.reach(batch.remote_region)
        local = _iovecs(self._regions[batch.local_region].address, batch.local_offsets, batch.lengths)
        remote = _iovecs(way.address, batch.remote_offsets, batch.lengths)
        if way.mapped and batch.lengths.mean() >= _MEMMOVE_BYTES:
            hostmem.copy_own(local, remote, write=write)
            return
        try:
            hostmem.copy(way.pid, local, remote, write=write)
        except hostmem.CopyError as error:
            if way.pid != os.getpid() or error.errno not in _FORBIDDEN:
                raise
            hostmem.copy_own(local, remote, write=write)


def _iovecs(base: int, offsets: Offsets, lengths: Offsets) -> hostmem.Iovecs:
    vecs = np.empty((len(lengths), 2), dtype=np.uint64)
    vecs[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    vecs[:, 1] = lengths
    return vecs


def _check_region(index: int, region: Region) -> None:
    if region.device != "cpu":
        raise TransportError(f"local: region {index} is on {region.device!r}, only 'cpu' memory can be reached")
    if region.length_bytes <= 0:
        raise TransportError(f"local: region {index} has length {region.length_bytes}")
    try:
        hostmem.check_readable(os.getpid(), region.address, region.length_bytes)
    except hostmem.CopyError as error:
        if error.errno not in _FORBIDDEN:
            raise TransportError(
                f"local: region {index} at {region.address:#x}, {region.length_bytes} bytes: {error.strerror}"
            ) from error


def _file_gate(path: str) -> Gate:
    return lambda: not os.path.exists(path)
