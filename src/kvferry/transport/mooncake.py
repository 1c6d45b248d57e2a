"""Mooncake's transfer engine, peer to peer: TCP, or RDMA where there are devices.

The library moves bytes in its own threads, on both sides, so a target need not poll. It takes descriptors one by one
(`mooncake_library`) and only so many at a time (`mooncake_queue`), so whoever polls a transfer feeds the next ones.

Who the peer is. Mooncake knows peers by "host:port" alone, remembers for ever what one of that name once said, and
connects again without a word. So 16 random bytes of the peer's memory are read before a write, and after every
transfer: nobody else has them at that address. DONE is said only if they are still there.

What may still land after a failure. A transfer is FAILED as soon as one descriptor is, while others are under way;
`release` waits for the end of each. Over TCP a read's bytes land in Mooncake's own handler of it, which has then
returned. What a write has sent may wait in the target's socket and still be taken, and of RDMA nothing is known. So
`release` says True only for
  - a transfer of which every descriptor has ended well, or none was posted;
  - a read over TCP, once every descriptor has ended;
  - a write of which one failed, once the peer's process is gone (seen on this host only), since its memory is;
  - a read over RDMA of which one failed, after `close`, which ends this side's connections and registrations.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import weakref
from collections.abc import Sequence

import msgspec

from kvferry.layout import Region
from kvferry.transport import mooncake_library
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
from kvferry.transport.host_address import resolved
from kvferry.transport.hostmem import Process
from kvferry.transport.mooncake_data import KIND, TOKEN_BYTES, Record, Slots, Step, decode, step_of
from kvferry.transport.mooncake_library import Engine
from kvferry.transport.mooncake_queue import Job, Queue, window
from kvferry.transport.remote import RemoteWorker

_PROTOCOLS = ("tcp", "rdma")
_MOST_INFLIGHT = 1 << 20
"""Each takes memory from the start: for the token of its peer."""
_CONNECT_S = 3.0
"""How long a peer may take to show that it lives, before Mooncake, which would wait for a minute, is sent there."""


class MooncakePeer(RemoteWorker):
    def __init__(self, record: Record, queue: Queue) -> None:
        super().__init__(f"mooncake:{record.session}", record.regions, record.process)
        self.record = record
        self.queue = queue


class MooncakeHandle:
    """One posted transfer. slot: where its peer's token is read into, until its end has been seen; or None."""

    def __init__(self, peer: MooncakePeer, job: Job, slot: int | None, *, write: bool) -> None:
        self.peer = peer
        self.job = job
        self.slot = slot
        self.write = write


class MooncakeTransport:
    """Transport "mooncake".

    host: the address of this machine that peers are told; VLLM_HOST_IP, or else loopback, if not given.
    protocol: "tcp" or "rdma"; the same on both sides. device: for "rdma", names of devices, separated by commas;
    empty takes all. max_inflight: how many transfers may be posted and not yet polled to their end (QueueFull beyond).
    Raises TransportUnavailable when the package, a system library, the device or an IPv4 address is missing.
    """

    name = "mooncake"
    options = ("host", "protocol", "device", "max_inflight")
    traits = Traits(synchronous=False, target_must_poll=False, failure_is_quiet=False)

    def __init__(
        self, *, host: str | None = None, protocol: str = "tcp", device: str = "", max_inflight: int = 1024
    ) -> None:
        if protocol not in _PROTOCOLS:
            raise TransportError(f"mooncake: protocol {protocol!r} is none of {', '.join(_PROTOCOLS)}")
        if not 1 <= max_inflight <= _MOST_INFLIGHT:
            raise TransportError(f"mooncake: max_inflight is {max_inflight}, it must be from 1 to {_MOST_INFLIGHT}")
        self._module = mooncake_library.load()
        mooncake_library.check_environment()
        if protocol == "rdma":
            mooncake_library.check_rdma()
        self._protocol, self._device = protocol, device
        self._address = resolved(host or os.environ.get("VLLM_HOST_IP") or "127.0.0.1", "mooncake")
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._max_inflight = max_inflight
        self._slots = Slots(self._token, max_inflight)
        self._window = window()
        self._engines = [self._new_engine()]
        self._regions: tuple[Region, ...] = ()
        self._handles: set[MooncakeHandle] = set()
        # By token: the bound of what is queued is the library's, and holds for all that connect to one incarnation.
        self._queues: weakref.WeakValueDictionary[bytes, Queue] = weakref.WeakValueDictionary()

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
            raise TransportError(f"mooncake: register: {len(self._regions)} regions are registered already")
        for i, region in enumerate(regions):
            self._engines[0].register(region, f"region {i}")
        self._regions = tuple(regions)

    def record(self) -> bytes:
        self._check_open()
        if not self._regions:
            raise TransportError("mooncake: record: nothing is registered")
        return msgspec.msgpack.encode(
            Record(
                kind=KIND,
                version=mooncake_library.version(),
                protocol=self._protocol,
                host=self._address,
                port=self._engines[0].port,
                process=Process.own(),
                regions=self._regions,
                token_address=self._slots.own_address,
                token=self._token,
            )
        )

    def reaches(self, record: bytes) -> bool:
        """Whether the peer speaks the same Mooncake and has an address that means it here. The network is tried by
        `connect`."""
        try:
            self._check_same(decode(record))
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> MooncakePeer:
        """Blocks for milliseconds, or for some seconds if the peer does not answer."""
        self._check_open()
        decoded = decode(record)
        self._check_same(decoded)
        queue = self._queues.get(decoded.token)
        if queue is None:
            queue = self._open(decoded)
            self._queues[decoded.token] = queue
        peer = MooncakePeer(decoded, queue)
        peer.check_alive()
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> MooncakeHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> MooncakeHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, MooncakeHandle) or handle not in self._handles:
            return Status(State.FAILED, "mooncake: not a live handle of this transport")
        self._drive(handle)
        job = handle.job
        if not job.ended and handle.peer.process_gone():
            job.fail(f"its process {handle.peer.process.pid} is gone")
        if job.failure:
            return Status(State.FAILED, job.failure)
        return Status(State.DONE if job.done else State.PENDING)

    def release(self, handle: Handle) -> bool:
        """Cancels what has not been given to the library; the rest is driven on to its end."""
        if not isinstance(handle, MooncakeHandle) or handle not in self._handles:
            return True
        handle.job.cancel("released before its end")
        self._drive(handle)
        if handle.job.in_flight or (handle.job.late and not self._quiet_by_death(handle)):
            return False
        self._handles.discard(handle)
        return True

    def gone(self, peer: Peer) -> bool:
        """Never proven: what a dead peer has sent may still wait in the network, or in this process's own sockets."""
        return False

    def progress(self) -> None:
        """Nothing to do: the library serves peers in its own threads."""

    def disconnect(self, peer: Peer) -> None:
        """Mooncake keeps its connections, and what it knows of the peer, until `close`."""
        if isinstance(peer, MooncakePeer):
            peer.connected = False

    def close(self) -> None:
        """Takes a second. A write that was under way stays a live handle: what was sent of it may still be taken."""
        if not self._engines:
            return
        for handle in self._handles:
            handle.job.close("the transport was closed", under_way=handle.write)
        self._handles = {handle for handle in self._handles if handle.write and handle.job.late}
        for engine in self._engines:
            engine.close()
        self._engines = []
        self._queues.clear()
        self._regions = ()

    def _check_open(self) -> None:
        if not self._engines:
            raise TransportError("mooncake: the transport is closed")

    def _new_engine(self) -> Engine:
        engine = Engine(self._module, self._address, self._protocol, self._device)
        engine.register(self._slots.region, "memory for tokens")
        return engine

    def _check_same(self, record: Record) -> None:
        own = mooncake_library.version()
        if mooncake_library.release_of(record.version) != mooncake_library.release_of(own):
            raise TransportError(f"mooncake: version of the peer is {record.version}, here {own}")
        if record.protocol != self._protocol:
            raise TransportError(f"mooncake: protocol of the peer is {record.protocol!r}, here {self._protocol!r}")
        if not record.process.on_this_host() and ipaddress.ip_address(record.host).is_loopback:
            raise TransportError(
                f"mooncake: the peer gives a loopback address, {record.host}, and is on another host: "
                "set its option host, or VLLM_HOST_IP there"
            )

    def _open(self, record: Record) -> Queue:
        """Raises PeerLost. Here the library asks the peer for its regions."""
        _check_answers(record)
        engine = self._engine_for(record)
        if not engine.open(record.session, self._slots.own_address):
            raise PeerLost(f"mooncake:{record.session}: Mooncake can't open a session; its log says more")
        engine.sessions[record.session] = record.token
        return Queue(engine, record.session, self._window)

    def _engine_for(self, record: Record) -> Engine:
        """One in which this session means this incarnation: what an engine once learned of a name it never forgets."""
        for engine in self._engines:
            if engine.sessions.get(record.session, record.token) == record.token:
                return engine
        engine = self._new_engine()
        for i, region in enumerate(self._regions):
            engine.register(region, f"region {i}")
        self._engines.append(engine)
        return engine

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> MooncakeHandle:
        self._check_open()
        if not isinstance(peer, MooncakePeer):
            raise BadTransfer(f"mooncake: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._regions, peer.regions)
        if checked and not self._slots.free:
            raise QueueFull(f"mooncake: {self._max_inflight} transfers in flight, max_inflight is {self._max_inflight}")
        peer.check_alive()
        slot = self._slots.take() if checked else None
        job = Job(peer.name, self._steps(peer, checked, slot, write), quiet_reads=self._protocol == "tcp")
        handle = MooncakeHandle(peer, job, slot, write=write)
        self._handles.add(handle)
        if slot is not None:
            peer.queue.add(job)
        return handle

    def _steps(self, peer: MooncakePeer, batches: Sequence[Batch], slot: int | None, write: bool) -> list[Step]:
        if slot is None:
            return []
        moves = step_of(batches, self._regions, peer.regions, write=write)
        proof = self._slots.proof(slot, peer.record)
        return [proof, moves, proof] if write else [moves, proof]

    def _drive(self, handle: MooncakeHandle) -> None:
        if self._engines:
            handle.peer.queue.drive()
        # Into the slot of a lost descriptor something may still be read.
        if handle.slot is not None and handle.job.ended and not handle.job.lost:
            self._slots.give_back(handle.slot)
            handle.slot = None

    def _quiet_by_death(self, handle: MooncakeHandle) -> bool:
        return handle.write and handle.peer.process_gone()


def _check_answers(record: Record) -> None:
    """Raises PeerLost unless the peer hangs up on a caller who says nothing, as a live Mooncake does at once."""
    try:
        with contextlib.closing(socket.create_connection((record.host, record.port), _CONNECT_S)) as caller:
            caller.shutdown(socket.SHUT_WR)
            caller.recv(1)
    except OSError as error:
        raise PeerLost(f"mooncake:{record.session}: does not answer: {error}") from error
