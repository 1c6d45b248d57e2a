"""NIXL, without a progress thread: RDMA, TCP, shared memory or GPU links, as its backend (UCX) finds them.

All calls come from one thread. Without a progress thread the library moves only inside `read`, `write`, `poll`,
`release` and `progress`, and a peer that reads from here may need `progress` (`target_must_poll`).

What may still land after a failure. NIXL's UCX backend reports an error as soon as one sub-request fails, while
others may be under way, and it gives a request in progress back without waiting for its end. So FAILED is not quiet
(`failure_is_quiet` is False), and no request in progress is given back to NIXL: `release` drives it to its end.
`release` says True only for
  - a transfer seen DONE, or one of which nothing was posted;
  - a write, once the peer's process is gone (seen on this host only), since its memory is;
  - a read, once the peer's process is gone and all that it sent was taken in, on a host without an RDMA device and
    between CPU memory: bytes then land only inside calls into the library.
Otherwise it stays False until `close`, which destroys the endpoints and registrations: that is the fence.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.layout import Region
from kvferry.transport import hostmem
from kvferry.transport.base import (
    BadTransfer,
    Batch,
    Handle,
    Offsets,
    Peer,
    PeerLost,
    State,
    Status,
    Traits,
    TransportError,
    TransportUnavailable,
)
from kvferry.transport.batches import check_batches

_KIND = "kvferry-nixl/1"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Record(msgspec.Struct, frozen=True):
    """What a peer needs. agent: NIXL's name of this incarnation; digest: of the metadata, which NIXL parses in C++."""

    kind: str
    version: str
    backend: str
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    host: str
    pid: _Natural
    start_time: _Natural
    regions: tuple[Region, ...]
    metadata: bytes
    digest: bytes


class _Remote:
    """A worker known to NIXL. users: connected peers and transfers in progress that name it."""

    def __init__(self) -> None:
        self.users = 0
        self.lost = False


class NixlPeer:
    """A connected worker."""

    def __init__(self, record: _Record, remote: _Remote, here: str) -> None:
        self.record = record
        self.remote = remote
        self.connected = True
        self._same_host = record.host == here

    @property
    def name(self) -> str:
        return f"nixl:{self.record.agent}"

    def process_gone(self) -> bool:
        """Whether its process is proven gone; never proven from another host."""
        return self._same_host and hostmem.start_time(self.record.pid) != self.record.start_time

    def check_alive(self) -> None:
        """Raises PeerLost for a peer that is known to be gone."""
        if not self.connected:
            raise PeerLost(f"{self.name}: disconnected")
        if self.remote.lost:
            raise PeerLost(f"{self.name}: NIXL has reported it disconnected; disconnect, then connect again")
        if self.process_gone():
            raise PeerLost(f"{self.name}: its process {self.record.pid} is gone")


class NixlHandle:
    """One posted transfer.

    pending: NIXL's requests that are not finished. failure: why it failed, or empty. maybe_moving: some of it may be
    under way that NIXL no longer tells about. quiet_by_death: whether the end of the peer's process ends it too.
    """

    def __init__(self, peer: NixlPeer, quiet_by_death: bool) -> None:
        self.peer = peer
        self.quiet_by_death = quiet_by_death
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
        self._host = hostmem.host_id()
        self._regions: tuple[Region, ...] = ()
        self._registered: list[Any] = []
        self._handles: set[NixlHandle] = set()
        self._remotes: dict[str, _Remote] = {}

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
            kind, device = _memory(region, f"region {i}")
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
            _Record(
                kind=_KIND,
                version=self._version,
                backend=self._backend,
                agent=self._agent_name,
                host=self._host,
                pid=os.getpid(),
                start_time=hostmem.start_time(os.getpid()) or 0,
                regions=self._regions,
                metadata=metadata,
                digest=_digest(metadata),
            )
        )

    def reaches(self, record: bytes) -> bool:
        """Whether the peer speaks the same NIXL and backend. The network itself is tried by the first transfer."""
        try:
            self._check_same(_decode(record))
        except TransportError:
            return False
        return True

    def connect(self, record: bytes) -> NixlPeer:
        agent = self._open_agent()
        decoded = _decode(record)
        self._check_same(decoded)
        remote = self._remotes.get(decoded.agent, _Remote())
        peer = NixlPeer(decoded, remote, self._host)
        peer.check_alive()
        if not remote.users:
            try:
                agent.add_remote_agent(decoded.metadata)
            except Exception as error:
                raise TransportError(f"{peer.name}: NIXL refuses its record: {_text(error)}") from error
            self._remotes[decoded.agent] = remote
        remote.users += 1
        return peer

    def read(self, peer: Peer, batches: Sequence[Batch]) -> NixlHandle:
        return self._post(peer, batches, write=False)

    def write(self, peer: Peer, batches: Sequence[Batch]) -> NixlHandle:
        return self._post(peer, batches, write=True)

    def poll(self, handle: Handle) -> Status:
        if not isinstance(handle, NixlHandle) or handle not in self._handles:
            return Status(State.FAILED, "nixl: not a live handle of this transport")
        self._drive(handle)
        if handle.pending and not handle.failure and handle.peer.process_gone():
            handle.failure = f"{handle.peer.name}: its process {handle.peer.record.pid} is gone"
        if handle.failure:
            return Status(State.FAILED, handle.failure)
        return Status(State.PENDING if handle.pending else State.DONE)

    def release(self, handle: Handle) -> bool:
        """Nothing can be cancelled: a transfer in progress is driven on, and given back when it is quiet."""
        if not isinstance(handle, NixlHandle) or handle not in self._handles:
            return True
        self._drive(handle)
        if (handle.pending or handle.maybe_moving) and not self._quiet_by_death(handle):
            return False
        for request in list(handle.pending):
            self._give_back(handle, request)
        self._handles.discard(handle)
        return True

    def progress(self) -> None:
        if self._agent is not None:
            # Notifications themselves are not used; asking for them is what drives the library.
            self._agent.get_new_notifs()

    def disconnect(self, peer: Peer) -> None:
        if isinstance(peer, NixlPeer) and peer.connected:
            peer.connected = False
            self._leave(peer)

    def close(self) -> None:
        """Frees all, also what is in progress: the endpoints and registrations through which bytes could land end."""
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        for handle in self._handles:
            handle.failure = handle.failure or "nixl: the transport is closed"
            for request in handle.pending:
                _quietly(request.release)
            handle.pending.clear()
        self._handles.clear()
        for name in self._remotes:
            _quietly(agent.remove_remote_agent, name)
        self._remotes.clear()
        for registered in self._registered:
            _quietly(agent.deregister_memory, registered, [self._backend])
        self._registered.clear()
        self._regions = ()

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransportError("nixl: the transport is closed")
        return self._agent

    def _check_same(self, record: _Record) -> None:
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
        kinds = _by_memory(checked, self._regions, peer.record.regions)
        only_cpu = set(kinds) <= {("DRAM", "DRAM")} and not _has_rdma()
        handle = NixlHandle(peer, quiet_by_death=write or only_cpu)
        requests = self._prepare(peer, kinds, "WRITE" if write else "READ")
        self._start(handle, requests)
        self._handles.add(handle)
        peer.remote.users += bool(handle.pending)
        return handle

    def _prepare(self, peer: NixlPeer, kinds: _ByMemory, operation: str) -> list[Any]:
        agent = self._open_agent()
        requests: list[Any] = []
        try:
            for (local_kind, remote_kind), (local, remote) in kinds.items():
                # Measured: faster than prep_xfer_dlist and make_prepped_xfer when offsets differ each time.
                descs = agent.get_xfer_descs(local, local_kind), agent.get_xfer_descs(remote, remote_kind)
                requests.append(agent.initialize_xfer(operation, *descs, peer.record.agent, backends=[self._backend]))
        except Exception as error:
            for request in requests:
                _quietly(request.release)
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
                _quietly(request.release)
            if handle.failure:
                for rest in requests[i + 1 :]:
                    _quietly(rest.release)
                return

    def _drive(self, handle: NixlHandle) -> None:
        for request in list(handle.pending):
            if self._ask(handle, self._open_agent().check_xfer_state, request) != "PROC":
                self._give_back(handle, request)

    def _give_back(self, handle: NixlHandle, request: Any) -> None:
        handle.pending.remove(request)
        _quietly(request.release)
        if not handle.pending:
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
        # What it sent before its end lies in our sockets: take that in.
        self.progress()
        return True

    def _leave(self, peer: NixlPeer) -> None:
        """One user less. NIXL must not forget a worker that a request in progress names: it would free the request."""
        peer.remote.users -= 1
        if not peer.remote.users and self._agent is not None:
            del self._remotes[peer.record.agent]
            _quietly(self._agent.remove_remote_agent, peer.record.agent)


_Rows = npt.NDArray[np.uint64]
_ByMemory = dict[tuple[str, str], tuple[_Rows, _Rows]]


def _by_memory(batches: Sequence[Batch], local: Sequence[Region], remote: Sequence[Region]) -> _ByMemory:
    """Descriptors as NIXL wants them, (n, 3) of address, length, device; one list for each pair of memory kinds."""
    rows: dict[tuple[str, str], list[tuple[_Rows, _Rows]]] = {}
    for batch in batches:
        here, there = local[batch.local_region], remote[batch.remote_region]
        (local_kind, local_device), (remote_kind, remote_device) = _memory(here, "local"), _memory(there, "remote")
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


def _rows(base: int, offsets: Offsets, lengths: Offsets, device: int) -> _Rows:
    rows = np.empty((len(lengths), 3), dtype=np.uint64)
    rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    rows[:, 1] = lengths
    rows[:, 2] = device
    return rows


def _memory(region: Region, what: str) -> tuple[str, int]:
    """NIXL's kind of memory and device number of a region."""
    kind, _, number = region.device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind == "cuda" and (number or "0").isdecimal():
        return "VRAM", int(number or "0")
    raise TransportError(f"nixl: {what}: device {region.device!r} is neither 'cpu' nor 'cuda:N'")


def _decode(record: bytes) -> _Record:
    try:
        decoded = msgspec.msgpack.decode(record, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTransfer(f"nixl: malformed record of {len(record)} bytes: {error}") from error
    if decoded.kind != _KIND:
        raise BadTransfer(f"nixl: record of kind {decoded.kind!r}, expected {_KIND!r}")
    if decoded.digest != _digest(decoded.metadata):
        raise BadTransfer(f"nixl: digest of the record's metadata of {len(decoded.metadata)} bytes does not match")
    for i, region in enumerate(decoded.regions):
        if not (0 <= region.address < 2**63 and 0 < region.length_bytes < 2**63):
            raise BadTransfer(f"nixl: record's region {i}: address {region.address}, length {region.length_bytes}")
        _memory(region, f"record's region {i}")
    return decoded


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()


def _import_nixl() -> Any:
    try:
        import nixl._api as api
    except ImportError as error:
        raise TransportUnavailable(f"nixl: {error}. Install it: pip install 'kvferry[nixl]'") from error
    return api


def _make_agent(api: Any, name: str, backend: str, params: Mapping[str, str]) -> Any:
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


def _quietly(call: Any, *args: Any) -> None:
    """For giving back: NIXL's complaint about what is gone already helps nobody."""
    try:
        call(*args)
    except Exception:
        return
