"""Mooncake's library: what must be installed, loading it quietly, and one engine of it.

Its asynchronous calls are used, with one descriptor in each: only so does it say of every descriptor how it ended.
Of a batch it reports the first failure, while others still move, and `get_batch_transfer_status` waits, on a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from kvferry.layout import Region
from kvferry.transport.base import TransportError, TransportUnavailable
from kvferry.transport.devices import gpu_number

PACKAGES = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
_WHEEL = "mooncake-transfer-engine-non-cuda>=0.3.13,<0.3.14"
"""The one for CPU memory; mooncake-transfer-engine is for CUDA."""
_SYSTEM = "apt-get install libibverbs1 libnuma1 libcurl4"
"""What the wheel does not bring along."""
OLDEST = (0, 3, 13)
"""Before it a write was reported as done when it had left, not when it had arrived."""
PENDING, MOVED, LATE = 0, 1, -2
"""What `Engine.check` says; any other number is a failure. LATE: given up by a timer, but still with the library."""
REFUSED = (0, 2**64 - 1)

_RDMA_DEVICES = Path("/sys/class/infiniband")
_NO_DEVICE = "kvferry-none"
_TRIES = 3
_OVERLAPS = -7
_LOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
_LOG_ERRORS, _LOG_NOTHING = 2, 3


def load() -> Any:
    """The module `mooncake.engine`. Raises TransportUnavailable, which says what to install."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransportUnavailable(f"mooncake: {error}. Install it: {_remedy(str(error))}") from error
    release = release_of(version())
    if release < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise TransportUnavailable(
            f"mooncake: version {version()!r} is installed, {wanted} is the oldest that will do: pip install '{_WHEEL}'"
        )
    return module


def _remedy(error: str) -> str:
    """A missing shared library is the system's; a missing module may lack both, and is told of both at once."""
    return _SYSTEM if ".so" in error else f"pip install '{_WHEEL}'; its system libraries: {_SYSTEM}"


def version() -> str:
    """Of the installed wheel, whichever of them it is; empty where there is none."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def release_of(text: str) -> tuple[int, ...]:
    """(0, 3, 13) of "0.3.13.post1"; empty for what is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else ()


def check_environment() -> None:
    """Raises TransportError for a setting under which Mooncake would say that a write is done before it is."""
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise TransportError("mooncake: MC_TCP_PROTO is '1', with which writes are not acknowledged: unset it")


def check_rdma() -> None:
    """Raises TransportUnavailable where Mooncake would take TCP without a word."""
    if os.environ.get("MC_FORCE_TCP"):
        raise TransportUnavailable("mooncake: protocol is 'rdma', but MC_FORCE_TCP is set")
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        raise TransportUnavailable(f"mooncake: protocol is 'rdma', but {_RDMA_DEVICES} shows no device")


class Engine:
    """One engine of Mooncake: its own ports, two threads, and what it remembers of peers, which it never forgets.

    port: where peers ask for its regions. sessions: the token of the peer that each session ("host:port") means here.
    """

    def __init__(self, module: Any, host: str, protocol: str, device: str) -> None:
        # Mooncake looks for RDMA devices whatever the protocol is said to be; a filter that fits none leaves TCP.
        names = device if protocol == "rdma" else _NO_DEVICE
        self._cuda = bool(getattr(module, "SUPPORT_CUDA", False))
        self._protocol = protocol
        with _quiet(module):
            self._engine: Any = _initialized(module, host, protocol, names)
        self.port = int(self._engine.get_rpc_port())
        self.sessions: dict[str, bytes] = {}

    def register(self, region: Region, what: str) -> None:
        """Raises TransportError that names `what` for memory that can't be registered."""
        location = self._location(region.device, what)
        if region.length_bytes <= 0:
            raise TransportError(f"mooncake: {what} has length {region.length_bytes}")
        code = self._engine.register_memory(region.address, region.length_bytes, location)
        if code:
            why = "it overlaps another one" if code == _OVERLAPS else f"Mooncake says {code}"
            raise TransportError(
                f"mooncake: {what} at {region.address:#x} of {region.length_bytes} bytes can't be registered: {why}"
            )

    def _location(self, device: str, what: str) -> str:
        if device == "cpu":
            return "*"
        number = gpu_number(device, "cuda")
        if number is None:
            raise TransportError(f"mooncake: {what}: device {device!r} is neither 'cpu' nor 'cuda:N'")
        if not self._cuda:
            raise TransportError(f"mooncake: {what} is on {device!r}, and this wheel of Mooncake moves CPU memory only")
        return f"cuda:{number}"

    def open(self, session: str, address: int) -> bool:
        """Asks the peer for its regions, once for all; False where that fails. May block as long as the peer hangs."""
        # A read of no bytes is done at once, and opens the session as any other does.
        batch = self.post(session, False, address, address, 0)
        if batch in REFUSED:
            return False
        return self.check(batch) == MOVED

    def post(self, session: str, write: bool, local: int, remote: int, length: int) -> int:
        """Starts one descriptor, by address. Its number for `check`, or one of REFUSED: then it was not started."""
        call = self._engine.batch_transfer_async_write if write else self._engine.batch_transfer_async_read
        return int(call(session, [local], [remote], [length]))

    def check(self, batch: int) -> int:
        """How a posted descriptor stands. Unless it is PENDING or LATE its number is given back, and must not be used
        again."""
        try:
            return int(self._engine.transfer_check_status(batch))
        except Exception:
            # It has not said that it is through with it.
            return LATE

    def close(self) -> None:
        """Ends its threads and connections; takes a second, in which Python stands still."""
        self._engine = None


def _initialized(module: Any, host: str, protocol: str, names: str) -> Any:
    """An engine on free ports. It picks them at random and binds one a moment later, when it may be gone."""
    why = ""
    for _ in range(_TRIES):
        engine = module.TransferEngine()
        try:
            code = engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, names)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            continue
        if code == 0:
            return engine
        why = f"Mooncake says {code}"
    raise TransportError(f"mooncake: an engine on {host} does not start: {why}")


@contextlib.contextmanager
def _quiet(module: Any) -> Any:
    """Hides what Mooncake logs at its start, errors too that are none, and from then on shows errors only.

    Nothing where MC_LOG_LEVEL is set: then the user has chosen.
    """
    level = None if "MC_LOG_LEVEL" in os.environ else _log_level(module)
    if level is not None:
        level.value = _LOG_NOTHING
    try:
        yield
    finally:
        if level is not None:
            level.value = _LOG_ERRORS


def _log_level(module: Any) -> ctypes.c_int | None:
    """The variable of glog that holds it: this build of glog reads no environment variables."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), _LOG_LEVEL)
    except (OSError, ValueError):
        return None
