"""MoRI-IO: AMD's library for RDMA between hosts, and for XGMI, copies between the GPUs of one host.

All calls come from one thread. The library has threads of its own that complete RDMA; XGMI completes when `poll` asks.
Its notifications are off: kvferry has messages of its own. Everything is checked here first: lists of unequal length
end the process inside the library, and XGMI checks no offset.

Which engine. `record` describes one engine, the home, which peers reach and which also reaches them: an engine of RDMA
keeps a thread that never sleeps, so there are as few as can be. When a queue pair to a peer dies the library goes on
using it for that peer's engine, for ever; no other peer is affected. So that link is dead: posts raise PeerLost until
the peer is connected again. A restarted peer has a record with a new key, and the home engine makes new queue pairs for
it. For the same record `connect` makes a fresh engine under a new key, which lives as long as it has links. A copy that
fails under XGMI leaves nothing that could fail later, so its link stays.

Back-pressure. The library waits, and then fails with part of a batch started, when a send queue is full. So work
requests are counted here, a long transfer is cut into calls, and `poll` makes the next call when there is room.
QueueFull means that there was none for the first.

What may still land after a failure (`failure_is_quiet` is False). `release` says True only when each call has ended,
and
  - all were good, or those that failed are known to have started nothing;
  - or a read over RDMA with one queue pair failed: it has stopped by then, and what was behind is flushed;
  - or a read over RDMA failed otherwise, once its engine is closed, which destroys the queue pairs;
  - or a write failed, once the peer's process is gone (seen on this host only), since its memory is.
A failed read under XGMI stays False: copies of it that were started before the one that failed may go on, and nothing
tells of their end.
"""

from __future__ import annotations

import ipaddress
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from kvferry.layout import Region
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
from kvferry.transport.mori_data import KIND, Record, decode, digest_of, memory_of, pieces
from kvferry.transport.mori_engine import Engine, Settings, import_io
from kvferry.transport.mori_transfer import MoriHandle, MoriPeer

CLOSE_S = 2.0
"""How long `close` waits for the ends of transfers that are under way."""


class MoriTransport:
    """Transport "mori".

    backend: "rdma" or "xgmi". host: an IPv4 address of this machine, or a name that has one, at which peers reach this
    worker's engine (RDMA), by default loopback.
    qp_per_transfer, post_batch_size, num_workers: MoRI's own, for RDMA. max_send_wr: work requests that a queue pair
    takes; not more than the network card's limit. Raises TransportUnavailable when the library, the hardware or the
    address is missing.
    """

    name = "mori"
    options = ("backend", "host", "qp_per_transfer", "post_batch_size", "num_workers", "max_send_wr")
    traits = Traits(synchronous=False, target_must_poll=False, failure_is_quiet=False)

    def __init__(
        self,
        *,
        backend: str = "rdma",
        host: str = "127.0.0.1",
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_workers: int = 1,
        max_send_wr: int = 8192,
    ) -> None:
        self._settings = Settings(
            backend,
            host,
            qp_per_transfer=qp_per_transfer,
            post_batch_size=post_batch_size,
            num_workers=num_workers,
            max_send_wr=max_send_wr,
        )
        self._io, self._version = import_io()
        if backend == "rdma":
            # MoRI looks no name up. XGMI listens nowhere.
            self._settings.host = resolved(host, "mori")
        self._regions: tuple[Region, ...] = ()
        self._handles: set[MoriHandle] = set()
        self._home = Engine(self._io, self._settings)
        self._engines = [self._home]

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered, in order."""
        return self._regions

    @property
    def live_handles(self) -> int:
        """Handles posted and not yet released."""
        return len(self._handles)

    @property
    def live_engines(self) -> int:
        """MoRI's engines of this worker: the home, and those that took over from a dead link."""
        return len(self._engines)

    @property
    def live_sessions(self) -> int:
        """MoRI's sessions, of all engines and links."""
        return sum(link.sessions for engine in self._engines for link in engine.links.values())

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._regions:
            raise TransportError(f"mori: register: {len(self._regions)} regions are registered already")
        for i, region in enumerate(regions):
            memory_of(region, f"region {i}", self._settings.backend)
            if region.length_bytes <= 0:
                raise TransportError(f"mori: region {i} has length {region.length_bytes}")
        self._home.register(regions)
        self._regions = tuple(regions)

    def record(self) -> bytes:
        self._check_open()
        if not self._regions:
            raise TransportError("mori: record: nothing is registered")
        desc, memories = self._home.desc(), self._home.memory_descs()
        packed = desc.pack()
        return msgspec.msgpack.encode(
            Record(
                kind=KIND,
                version=self._version,
                backend=self._settings.backend,
                engine=self._home.key,
                node=desc.node_id,
                address=self._settings.host,
                process=Process.own(),
                regions=self._regions,
                engine_desc=packed,
                memory_descs=memories,
                digest=digest_of(packed, memories),
            )
        )

    def reaches(self, record: bytes) -> bool:
        """Whether the peer has the same MoRI and backend, and one host where XGMI or a loopback address asks for it."""
        try:
            self._check_open()
            self._check_same(decode(record))
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> MoriPeer:
        """Asks the peer's engine over TCP, which may take a moment, with Python's lock held by the library."""
        self._check_open()
        decoded = decode(record)
        self._check_same(decoded)
        if decoded.process.gone():
            raise PeerLost(f"mori:{decoded.engine}: its process {decoded.process.pid} is gone")
        if not self._regions:
            raise TransportError("mori: connect: nothing is registered")
        engine = self._engine_for(decoded)
        try:
            peer = MoriPeer(decoded, engine, engine.link(decoded))
        finally:
            self._retire(engine)
        peer.link.users += 1
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> MoriHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> MoriHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, MoriHandle) or handle not in self._handles:
            return Status(State.FAILED, "mori: not a live handle of this transport")
        self._drive(handle)
        if handle.failure:
            return Status(State.FAILED, handle.failure)
        return Status(State.DONE if handle.ended else State.PENDING)

    def release(self, handle: Handle) -> bool:
        """What has not been handed to the library is dropped; the rest is driven to its end."""
        if not isinstance(handle, MoriHandle) or handle not in self._handles:
            return True
        if handle.waiting:
            handle.fail("given back before its end")
        self._drive(handle)
        if not handle.quiet():
            return False
        self._handles.discard(handle)
        return True

    def gone(self, peer: Peer) -> bool:
        """Never proven: what a dead peer's network card or GPU had begun may still be on its way."""
        return False

    def progress(self) -> None:
        """Nothing to drive: RDMA has threads of its own, and XGMI needs none on the target's side."""

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, MoriPeer) and peer.connected:
            peer.connected = False
            self._leave(peer)

    def close(self) -> None:
        """Waits a moment for what is under way, then frees all; what is not quiet by it stays for `release`."""
        if self._home.closed:
            return
        self._settle(time.monotonic() + CLOSE_S)
        statuses = [handle.abandon("the transport was closed") for handle in self._handles if not handle.ended]
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        # MoRI's threads have ended by now, and with them all that writes into these.
        del statuses
        self._handles = {handle for handle in self._handles if not handle.quiet()}
        self._regions = ()

    def _check_open(self) -> None:
        if self._home.closed:
            raise TransportError("mori: the transport is closed")

    def _check_same(self, record: Record) -> None:
        backend = self._settings.backend
        if record.backend != backend:
            raise TransportError(f"mori: backend of the peer is {record.backend!r}, here {backend!r}")
        # The descriptions' format changes between versions.
        if record.version.split(".")[:2] != self._version.split(".")[:2]:
            raise TransportError(f"mori: version of the peer is {record.version}, here {self._version}")
        for i, region in enumerate(record.regions):
            memory_of(region, f"the peer's region {i}", backend)
        node = self._home.desc().node_id
        if backend == "xgmi" and record.node != node:
            raise TransportError(f"mori: backend 'xgmi' stays within a host: the peer is on {record.node}, here {node}")
        if backend == "rdma" and not record.process.on_this_host() and _is_loopback(record.address):
            raise TransportError(
                f"mori: the peer on another host advertises the loopback address {record.address}; set its option host"
            )

    def _engine_for(self, record: Record) -> Engine:
        """The first in which no queue pair to this peer's engine has died, or a fresh one."""
        for engine in self._engines:
            if record.engine not in engine.failed:
                return engine
        engine = Engine(self._io, self._settings)
        self._engines.append(engine)
        try:
            engine.register(self._regions)
        except BaseException:
            self._retire(engine)
            raise
        return engine

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> MoriHandle:
        self._check_open()
        if not isinstance(peer, MoriPeer):
            raise BadTransfer(f"mori: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._regions, peer.regions)
        peer.check_alive()
        waiting = deque(pieces(checked, self._settings.piece_descriptors()))
        for pair in {piece.regions for piece in waiting}:
            peer.link.session(*pair)
        handle = MoriHandle(peer, waiting, write=write)
        if waiting and not handle.send():
            raise QueueFull(f"{peer.name}: {peer.link.queued} of {self._settings.max_send_wr} (max_send_wr) are queued")
        handle.fill()
        self._handles.add(handle)
        if not handle.ended:
            handle.uses_link = True
            peer.link.users += 1
        return handle

    def _drive(self, handle: MoriHandle) -> None:
        if not handle.uses_link:
            return
        handle.drive()
        if handle.ended:
            handle.uses_link = False
            self._leave(handle.peer)

    def _leave(self, peer: MoriPeer) -> None:
        if not peer.engine.closed:
            peer.engine.leave(peer.link)
            self._retire(peer.engine)

    def _retire(self, engine: Engine) -> None:
        """Closes a fresh engine that has no link any more."""
        if engine is not self._home and not engine.links and not engine.closed:
            self._engines.remove(engine)
            engine.close()

    def _settle(self, until: float) -> None:
        while time.monotonic() < until and not all(handle.ended for handle in self._handles):
            for handle in self._handles:
                self._drive(handle)
            time.sleep(0.001)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
