"""NIXL, without a progress thread: RDMA, TCP, shared memory or GPU links, as its backend (UCX) finds them.

All calls come from one thread. Without a progress thread the library moves only inside `read`, `write`, `poll`,
`release` and `progress`, and a peer that reads from here may need `progress` (`target_must_poll`).

What may still land after a failure. NIXL's UCX backend reports an error as soon as one sub-request fails, while
others may be under way, and it gives a request in progress back without waiting for its end. So FAILED is not quiet
(`failure_is_quiet` is False), and no request in progress is given back to NIXL: `release` drives it to its end.
`release` says True only for
  - a transfer seen DONE, or one of which nothing was posted;
  - a write, once the peer's process is gone (seen on this host only), since its memory is;
  - a read, once NIXL has reported its failure and the peer's process is gone (on this host), between CPU memory on a
    host without an RDMA device: bytes then land only inside calls into the library, and nobody sends any.
Otherwise it stays False. `close` destroys this side's endpoints and registrations, which fences reads between CPU
memory; a write may still wait in the network or in the target, and a GPU may still copy, so those stay False after it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    State,
    Status,
    Traits,
    TransportError,
    TransportUnavailable,
)
from kvferry.transport.batches import check_batches
from kvferry.transport.nixl_data import KIND, MemoryPair, Record, Rows, by_memory, decode, digest_of, memory_of
from kvferry.transport.nixl_remotes import Remote, Remotes, quietly
from kvferry.transport.remote import RemoteWorker

_WHEELS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlPeer(RemoteWorker):
    def __init__(self, record: Record, remote: Remote) -> None:
        super().__init__(f"nixl:{record.agent}", record.regions, record.process)
        self.record = record
        self.remote = remote

    def check_alive(self) -> None:
        super().check_alive()
        if self.remote.lost:
            raise PeerLost(f"{self.name}: NIXL has reported it disconnected; connect again")


class NixlHandle:
    """One posted transfer.

    pending: NIXL's requests that are not finished. failure: why it failed, or empty. maybe_moving: some of it may be
    under way that NIXL no longer tells about. quiet_by_death, quiet_by_close: what ends that as well, the end of the
    peer's process or the close of this transport.
    """

    def __init__(self, peer: NixlPeer, *, quiet_by_death: bool, quiet_by_close: bool) -> None:
        self.peer = peer
        self.quiet_by_death = quiet_by_death
        self.quiet_by_close = quiet_by_close
        self.pending: list[Any] = []
        self.failure = ""
        self.maybe_moving = False


class NixlTransport:
    """Transport "nixl".

    backend: NIXL's plugin, "UCX" unless said otherwise. backend_params: its parameters, as strings.
    Making one takes about half a second. Raises TransportUnavailable when the package or the plugin is missing.
    """

    name = "nixl"
    options = ("backend", "backend_params")
    traits = Traits(synchronous=False, target_must_poll=True, failure_is_quiet=False)

    def __init__(self, *, backend: str = "UCX", backend_params: Mapping[str, str] | None = None) -> None:
        api = _import_nixl()
        self._backend = backend
        self._version = importlib.metadata.version(api.__name__.split(".")[0].replace("_", "-"))
        self._agent_name = f"kvferry-{secrets.token_hex(16)}"
        self._agent = _make_agent(api, self._agent_name, backend, backend_params or {})
        self._regions: tuple[Region, ...] = ()
        self._registered: list[Any] = []
        self._handles: set[NixlHandle] = set()
        self._remotes = Remotes()

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered, in order."""
        return self._regions

    @property
    def live_handles(self) -> int:
        """Handles posted and not yet released."""
        return len(self._handles)

    def register(self, regions: Sequence[Region]) -> None:
        agent = self._open_agent()
        if self._regions:
            raise TransportError(f"nixl: register: {len(self._regions)} regions are registered already")
        for i, region in enumerate(regions):
            kind, device = memory_of(region, f"region {i}")
            if region.length_bytes <= 0:
                raise TransportError(f"nixl: region {i} has length {region.length_bytes}")
            row = np.array([[region.address, region.length_bytes, device]], dtype=np.uint64)
            try:
                self._registered.append(agent.register_memory(row, kind, backends=[self._backend]))
            except Exception as error:
                raise TransportError(f"nixl: region {i} on {region.device!r} can't be registered: {error}") from error
        self._regions = tuple(regions)

    def record(self) -> bytes:
        agent = self._open_agent()
        if not self._regions:
            raise TransportError("nixl: record: nothing is registered")
        metadata = bytes(agent.get_agent_metadata())
        return msgspec.msgpack.encode(
            Record(
                kind=KIND,
                version=self._version,
                backend=self._backend,
                agent=self._agent_name,
                process=hostmem.Process.own(),
                regions=self._regions,
                metadata=metadata,
                digest=digest_of(metadata),
            )
        )

    def reaches(self, record: bytes) -> bool:
        """Whether the peer speaks the same NIXL and backend. The network itself is tried by the first transfer."""
        try:
            self._check_same(decode(record))
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> NixlPeer:
        agent = self._open_agent()
        decoded = decode(record)
        self._check_same(decoded)
        if decoded.process.gone():
            raise PeerLost(f"nixl:{decoded.agent}: its process {decoded.process.pid} is gone")
        remote = self._remotes.open(agent, decoded)
        remote.peers += 1
        return NixlPeer(decoded, remote)

    def read(self, peer: Peer, batches: Sequence[Batch]) -> NixlHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> NixlHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, NixlHandle) or handle not in self._handles:
            return Status(State.FAILED, "nixl: not a live handle of this transport")
        self._drive(handle)
        if handle.pending and not handle.failure and handle.peer.process_gone():
            handle.failure = f"{handle.peer.name}: its process {handle.peer.process.pid} is gone"
        if handle.failure:
            return Status(State.FAILED, handle.failure)
        return Status(State.PENDING if handle.pending else State.DONE)

    def release(self, handle: Handle) -> bool:
        """Nothing can be cancelled: a transfer in progress is driven on, and given back when it is quiet."""
        if not isinstance(handle, NixlHandle) or handle not in self._handles:
            return True
        self._drive(handle)
        if handle.pending or (handle.maybe_moving and not self._quiet_by_death(handle)):
            return False
        self._handles.discard(handle)
        return True

    def gone(self, peer: Peer) -> bool:
        """Never proven: what a dead peer has sent may still wait in the network, or in this process's own queues."""
        return False

    def progress(self) -> None:
        if self._agent is not None:
            # Asking for notifications, which are not used, drives the library; an error shows in the transfer it is of.
            quietly(self._agent.get_new_notifs)

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, NixlPeer) and peer.connected:
            peer.connected = False
            peer.remote.peers -= 1
            self._leave(peer)

    def close(self) -> None:
        """Frees all, also what is in progress; of that, what is not quiet by it stays a live handle for `release`."""
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        for handle in self._handles:
            if handle.pending:
                handle.failure = handle.failure or "nixl: the transport was closed"
                handle.maybe_moving = True
            for request in handle.pending:
                quietly(request.release)
            handle.pending.clear()
        self._handles = {handle for handle in self._handles if handle.maybe_moving and not handle.quiet_by_close}
        self._remotes.clear(agent)
        for registered in self._registered:
            quietly(agent.deregister_memory, registered, [self._backend])
        self._registered.clear()
        self._regions = ()

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransportError("nixl: the transport is closed")
        return self._agent

    def _check_same(self, record: Record) -> None:
        if record.backend != self._backend:
            raise TransportError(f"nixl: backend of the peer is {record.backend!r}, here {self._backend!r}")
        # The metadata's format has changed between minor versions.
        if record.version.split(".")[:2] != self._version.split(".")[:2]:
            raise TransportError(f"nixl: version of the peer is {record.version}, here {self._version}")

    def _post(self, peer: Peer, batches: Sequence[Batch], *, write: bool) -> NixlHandle:
        self._open_agent()
        if not isinstance(peer, NixlPeer):
            raise BadTransfer(f"nixl: {type(peer).__name__} is no peer of this transport")
        checked = check_batches(batches, self._regions, peer.record.regions)
        peer.check_alive()
        kinds = by_memory(checked, self._regions, peer.record.regions)
        cpu_read = not write and set(kinds) <= {("DRAM", "DRAM")}
        handle = NixlHandle(peer, quiet_by_death=write or (cpu_read and not _has_rdma()), quiet_by_close=cpu_read)
        requests = self._prepare(peer, kinds, "WRITE" if write else "READ")
        self._start(handle, requests)
        self._handles.add(handle)
        peer.remote.pending += bool(handle.pending)
        return handle

    def _prepare(self, peer: NixlPeer, kinds: dict[MemoryPair, tuple[Rows, Rows]], operation: str) -> list[Any]:
        agent = self._open_agent()
        requests: list[Any] = []
        try:
            for (local_kind, remote_kind), (local, remote) in kinds.items():
                # Measured: faster than prep_xfer_dlist and make_prepped_xfer when offsets differ each time.
                descs = agent.get_xfer_descs(local, local_kind), agent.get_xfer_descs(remote, remote_kind)
                requests.append(agent.initialize_xfer(operation, *descs, peer.record.agent, backends=[self._backend]))
        except Exception as error:
            for request in requests:
                quietly(request.release)
            if _is_disconnect(error):
                peer.remote.lost = True
                raise PeerLost(f"{peer.name}: {_text(error)}") from error
            raise BadTransfer(f"{peer.name}: NIXL refuses the descriptors: {_text(error)}") from error
        return requests

    def _start(self, handle: NixlHandle, requests: list[Any]) -> None:
        """Posts until one fails. A failing post may have started some of its descriptors, so it is never raised."""
        agent = self._open_agent()
        for i, request in enumerate(requests):
            state = self._ask(handle, agent.transfer, request)
            if state == "PROC":
                handle.pending.append(request)
            else:
                quietly(request.release)
            if handle.failure:
                for rest in requests[i + 1 :]:
                    quietly(rest.release)
                return

    def _drive(self, handle: NixlHandle) -> None:
        for request in list(handle.pending):
            if self._ask(handle, self._open_agent().check_xfer_state, request) != "PROC":
                self._give_back(handle, request)

    def _give_back(self, handle: NixlHandle, request: Any) -> None:
        handle.pending.remove(request)
        quietly(request.release)
        if not handle.pending:
            handle.peer.remote.pending -= 1
            self._leave(handle.peer)

    def _ask(self, handle: NixlHandle, call: Any, request: Any) -> str:
        """NIXL's "DONE", "PROC" or "ERR"; whatever is not the first two is noted as the handle's failure."""
        try:
            state = str(call(request))
        except Exception as error:
            handle.peer.remote.lost |= _is_disconnect(error)
            state, text = "ERR", _text(error)
        else:
            text = f"NIXL says {state}"
        if state not in ("DONE", "PROC"):
            handle.failure = handle.failure or f"{handle.peer.name}: {text}"
            handle.maybe_moving = True
        return state

    def _quiet_by_death(self, handle: NixlHandle) -> bool:
        if not handle.quiet_by_death or not handle.peer.process_gone():
            return False
        # The library has seen the connection end, after all that was sent on it; this lets it finish with it.
        self.progress()
        return True

    def _leave(self, peer: NixlPeer) -> None:
        """One user less. NIXL must not forget a worker that a request in progress names: it would free the request."""
        if self._agent is not None:
            self._remotes.leave(self._agent, peer.remote)


def _import_nixl() -> Any:
    try:
        # The package picks one of its wheels by the CUDA in use, and imports torch, for seconds, to find that out.
        # Where no such library is loaded the memory is the CPU's, and any wheel will do.
        if sys.modules.keys().isdisjoint(("torch", "cupy", "cuda.bindings")):
            wheel = next((wheel for wheel in _WHEELS if importlib.util.find_spec(wheel)), "nixl")
            return importlib.import_module(f"{wheel}._api")
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportUnavailable(f"nixl: {error}. Install it: pip install 'nixl>=1.0,<2'") from error


def _make_agent(api: Any, name: str, backend: str, params: Mapping[str, str]) -> Any:
    if "NIXL_LOG_LEVEL" not in os.environ:
        # It would print two lines on stdout for each agent.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[]))
    if backend not in agent.get_plugin_list():
        raise TransportUnavailable(f"nixl: no backend {backend!r}; this wheel has {', '.join(agent.get_plugin_list())}")
    try:
        agent.create_backend(backend, {key: str(value) for key, value in params.items()})
    except Exception as error:
        raise TransportUnavailable(f"nixl: backend {backend!r} does not start: {_text(error)}") from error
    return agent


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def _is_disconnect(error: Exception) -> bool:
    return type(error).__name__ == "nixlRemoteDisconnectError"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
