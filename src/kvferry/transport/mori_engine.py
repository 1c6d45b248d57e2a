"""MoRI-IO's engines, and the links from one to a peer's: what has to be made and given back in the library's order.

A backend before any memory is registered, memory before remote engines, sessions gone before their engine.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import secrets
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, PeerLost, TransportError, TransportUnavailable
from kvferry.transport.host_address import check_is_here
from kvferry.transport.mori_data import Record, memory_of

BACKENDS = ("rdma", "xgmi")

_BACKOFF = "MORI_IO_SQ_BACKOFF_TIMEOUT_US"
_BACKOFF_US = "1000"
"""How long a call waits for room in a full send queue. MoRI's own five seconds would stop the agent for as long."""
_VARIABLES = {
    "qp_per_transfer": "MORI_IO_QP_PER_TRANSFER",
    "post_batch_size": "MORI_IO_POST_BATCH_SIZE",
    "num_workers": "MORI_IO_NUM_WORKER_THREADS",
    "max_send_wr": "MORI_IO_QP_MAX_SEND_WR",
}
_INT = re.compile(r"-?[0-9]{1,18}")
_BOUNDS = {
    # Each takes `connect` about a millisecond, with Python's lock held, and all peers share those that a card has.
    "qp_per_transfer": (1, 128),
    # Each is a thread that is bound to a core; MoRI starts no more than there are queue pairs.
    "num_workers": (1, 128),
    # An int of C in MoRI.
    "max_send_wr": (2, 2**31 - 1),
}
_MOST_PER_POST = 2**31 - 1
_NO_LIMIT = 1 << 62
_FALLBACK_PORT = 1
"""The port that MoRI reports when it has made an XGMI backend although RDMA was asked for."""


@dataclass
class Settings:
    """How a transport's engines are made. host: for RDMA, a numeric address. max_send_wr: work requests that one queue
    pair takes."""

    backend: str
    host: str
    qp_per_transfer: int
    post_batch_size: int
    num_workers: int
    max_send_wr: int

    def __post_init__(self) -> None:
        """MoRI's environment variables win, as in the library. Raises TransportError for a value that can't be."""
        if self.backend not in BACKENDS:
            raise TransportError(f"mori: backend {self.backend!r} is none of {', '.join(BACKENDS)}")
        for name, variable in _VARIABLES.items():
            setattr(self, name, _overridden(variable, getattr(self, name)))
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise TransportError(f"mori: {name} is {getattr(self, name)}, must be from {least} to {most}")
        if self.post_batch_size != -1 and not 1 <= self.post_batch_size <= _MOST_PER_POST:
            raise TransportError(
                f"mori: post_batch_size is {self.post_batch_size}, must be -1 or from 1 to {_MOST_PER_POST}"
            )

    @property
    def in_parts(self) -> bool:
        """Whether MoRI deals a call out to several threads, of which each checks and posts its part alone."""
        return self.backend == "rdma" and min(self.num_workers, self.qp_per_transfer) > 1

    def limit(self, max_send_wr: int) -> None:
        """The network card takes less than we were told; what comes next keeps to it."""
        self.max_send_wr = max(2, min(self.max_send_wr, max_send_wr))

    def piece_descriptors(self) -> int:
        """Descriptors of one call: half of what the queues take, so that one is on its way while the next waits."""
        return _NO_LIMIT if self.backend == "xgmi" else self.max_send_wr // 2 * self.qp_per_transfer

    def queue_share(self, descriptors: int) -> int:
        """Work requests that so many put into the fullest queue, at most; MoRI deals its posts out in turn."""
        if self.backend == "xgmi":
            return 0
        post = self._post(descriptors)
        posts = math.ceil(descriptors / post)
        return min(descriptors, math.ceil(posts / self.qp_per_transfer) * post)

    def in_one_post(self, descriptors: int) -> bool:
        """Whether MoRI hands so many to the card at once, so that a full queue means that none of them was."""
        return descriptors <= self._post(descriptors)

    def _post(self, descriptors: int) -> int:
        even = math.ceil(descriptors / self.qp_per_transfer)
        return min(even if self.post_batch_size == -1 else self.post_batch_size, self.max_send_wr)


class Link:
    """A peer's engine as one of ours knows it.

    users: connected peers and transfers that need it. queued: work requests in its fullest queue. dead: why nothing can
    be sent over it any more, or empty.
    """

    def __init__(self, io: Any, library: Any, memories: Sequence[Any], record: Record) -> None:
        self.key = record.engine
        self.users = 0
        self.queued = 0
        self.dead = ""
        self._library = library
        self._memories = memories
        self._sessions: dict[tuple[int, int], Any] = {}
        try:
            self._desc = io.EngineDesc.unpack(record.engine_desc)
            self._remote = [io.MemoryDesc.unpack(packed) for packed in record.memory_descs]
        except Exception as error:
            raise BadTransfer(f"mori:{self.key}: MoRI can't read its record: {text_of(error)}") from error
        self._check(record)
        library.register_remote_engine(self._desc)

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def open(self) -> None:
        """Sessions for each region of either side: all that asks the peer or registers memory with the card.

        Those that `session` makes later, between other pairs of them, take microseconds.
        """
        for remote in range(len(self._remote)):
            self.session(0, remote)
        for local in range(len(self._memories)):
            self.session(local, 0)

    def session(self, local: int, remote: int) -> Any:
        """Between two regions. Raises PeerLost where the peer's engine does not answer, else TransportError."""
        found = self._sessions.get((local, remote))
        if found is None:
            found = self._sessions[local, remote] = self._make_session(local, remote)
        return found

    def close(self) -> None:
        """Drops the sessions, then forgets the engine."""
        self._sessions.clear()
        quietly(self._library.deregister_remote_engine, self._desc)
        # An engine ends with the last reference to it.
        self._library = None

    def _make_session(self, local: int, remote: int) -> Any:
        name = f"mori:{self.key}"
        try:
            session = self._library.create_session(self._memories[local], self._remote[remote])
        except Exception as error:
            # All that can fail here is the exchange with the peer's engine over TCP.
            raise PeerLost(f"{name}: its engine does not answer: {text_of(error)}") from error
        if session is None:
            raise TransportError(f"{name}: MoRI makes no session between local region {local} and its region {remote}")
        return session

    def _check(self, record: Record) -> None:
        found = [(self._desc.key, desc.engine_key, desc.data, desc.size) for desc in self._remote]
        said = [(self.key, self.key, region.address, region.length_bytes) for region in record.regions]
        if found != said:
            raise BadTransfer(f"mori:{self.key}: the record's regions are not those that MoRI describes")


class Engine:
    """One of MoRI's engines with its backend; its settings are shared by a transport's engines.

    links: by the key of the peer's engine. failed: keys to which a queue pair of this engine has died.
    """

    def __init__(self, io: Any, settings: Settings) -> None:
        """Raises TransportUnavailable where the backend does not start."""
        self.links: dict[str, Link] = {}
        self.failed: set[str] = set()
        self.key = f"kvferry-{secrets.token_hex(16)}"
        self._io = io
        self.settings = settings
        self._memories: list[Any] = []
        self._library = _make(io, settings, self.key)
        # Also when nobody calls close: sessions that outlive their engine crash the process.
        self._close = weakref.finalize(self, _give_back, self._library, self.links, self._memories)

    @property
    def closed(self) -> bool:
        return self._library is None

    def register(self, regions: Sequence[Region]) -> None:
        """All of them or none. Raises TransportError that names the region and its device."""
        try:
            for i, region in enumerate(regions):
                self._memories.append(self._register(region, f"region {i}"))
        except BaseException:
            _deregister(self._library, self._memories)
            raise

    def _register(self, region: Region, what: str) -> Any:
        on_gpu, device_id = memory_of(region, what, self.settings.backend)
        where = self._io.MemoryLocationType.GPU if on_gpu else self._io.MemoryLocationType.CPU
        refused = f"mori: {what} on {region.device!r} can't be registered"
        try:
            desc = self._library.register_memory(region.address, region.length_bytes, device_id, where)
        except Exception as error:
            raise TransportError(f"{refused}: {text_of(error)}") from error
        if self.settings.backend == "xgmi" and not any(desc.ipc_handle):
            quietly(self._library.deregister_memory, desc)
            raise TransportError(f"{refused}: HIP gives no handle for address {region.address:#x}")
        return desc

    def desc(self) -> Any:
        """MoRI's description of it."""
        return self._library.get_engine_desc()

    def memory_descs(self) -> tuple[bytes, ...]:
        """MoRI's descriptions of the regions, packed."""
        return tuple(desc.pack() for desc in self._memories)

    def link(self, record: Record) -> Link:
        """The link to a peer's engine, made and opened where there is none. Raises as `Link`."""
        link = self.links.get(record.engine)
        if link is None:
            link = Link(self._io, self._library, self._memories, record)
            try:
                link.open()
            except BaseException:
                link.close()
                raise
            self.links[record.engine] = link
        return link

    def leave(self, link: Link) -> None:
        """One user less; the last one's going closes the link."""
        link.users -= 1
        if not link.users and self.links.get(link.key) is link:
            del self.links[link.key]
            link.close()

    def close(self) -> None:
        """Ends its links, queue pairs, threads and registrations. Idempotent."""
        self._close()
        self._library = None


def _give_back(library: Any, links: dict[str, Link], memories: list[Any]) -> None:
    for link in links.values():
        link.close()
    links.clear()
    _deregister(library, memories)


def _deregister(library: Any, memories: list[Any]) -> None:
    for memory in memories:
        quietly(library.deregister_memory, memory)
    memories.clear()


def import_io() -> tuple[Any, str]:
    """MoRI's module mori.io, and its version. Raises TransportUnavailable that says what is missing."""
    try:
        io = importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"mori: {text_of(error)}. MoRI-IO needs ROCm's libraries; {_remedy()}") from error
    os.environ.setdefault(_BACKOFF, _BACKOFF_US)
    return io, str(importlib.import_module("mori").__version__)


def _remedy() -> str:
    """AMD publishes wheels for one Python only."""
    major, minor = sys.version_info[:2]
    if (major, minor) == (3, 10):
        return "with them: pip install 'amd-mori>=1.2.4,<1.3'"
    return (
        f"AMD's wheels on PyPI are for Python 3.10, this is {major}.{minor}: take the MoRI 1.2 of your ROCm image, or "
        "build it for this Python"
    )


def _make(io: Any, settings: Settings, key: str) -> Any:
    if settings.backend == "rdma":
        # Where it can't listen MoRI ends the process.
        check_is_here(settings.host, "mori")
    try:
        engine = io.IOEngine(key, io.IOEngineConfig(host=settings.host, port=0))
        engine.create_backend(*_backend(io, settings))
    except Exception as error:
        raise TransportUnavailable(f"mori: backend {settings.backend!r} does not start: {text_of(error)}") from error
    if settings.backend == "rdma" and engine.get_engine_desc().port <= _FALLBACK_PORT:
        raise TransportUnavailable("mori: backend 'rdma' does not start: no RDMA device, MoRI fell back to XGMI")
    return engine


def _backend(io: Any, settings: Settings) -> tuple[Any, Any]:
    if settings.backend == "xgmi":
        return io.BackendType.XGMI, io.XgmiBackendConfig()
    config = io.RdmaBackendConfig(
        qp_per_transfer=settings.qp_per_transfer,
        post_batch_size=settings.post_batch_size,
        num_worker_threads=settings.num_workers,
        enable_notification=False,
    )
    config.max_send_wr = settings.max_send_wr
    return io.BackendType.RDMA, config


def _overridden(variable: str, value: int) -> int:
    found = os.environ.get(variable, "")
    if found and not _INT.fullmatch(found):
        # What MoRI would make of it is not known, and it must be what is counted with here.
        raise TransportError(f"mori: {variable} is {found!r}, must be an integer")
    return int(found) if found else value


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def quietly(call: Any, *args: Any) -> None:
    """For giving back: MoRI's complaint about what is gone already helps nobody."""
    try:
        call(*args)
    except Exception:
        return
