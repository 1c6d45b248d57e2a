"""Memory of processes on this host, through Linux: who a process is, copies between processes, shared mappings.

Nothing here knows of transports. Errors are OSError, with the system's errno.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Iovecs = npt.NDArray[np.uint64]
"""(n, 2): address, length in bytes; as the system's struct iovec."""

SLICE_BYTES = 32 << 20
"""At most so much is copied in one system call, so that the death of a peer is seen in between."""

_IOV_MAX = 1024
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1
_SHM_DIR = "/dev/shm/"

_libc = ctypes.CDLL(None, use_errno=True)


class CopyError(OSError):
    """A copy ended early: errno as the system gave it, and how much had moved before."""

    def __init__(self, error: int, moved_bytes: int) -> None:
        super().__init__(error, os.strerror(error))
        self.moved_bytes = moved_bytes


def host_id() -> str:
    """Equal for two processes that see the same process ids: this boot of the host, and the pid namespace."""
    return _host_id_of(os.getpid())


@functools.cache
def _host_id_of(pid: int) -> str:
    """A process keeps both for its life; a child that it forks may not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class Process(msgspec.Struct, frozen=True):
    """One process, as it is told to others. host: its `host_id`; start_time: in clock ticks since boot."""

    host: str
    pid: Natural
    start_time: Natural

    @classmethod
    def own(cls) -> Process:
        return cls(host_id(), os.getpid(), start_time(os.getpid()))

    def on_this_host(self) -> bool:
        return self.host == host_id()

    def gone(self) -> bool:
        """Whether it is proven gone, its memory with it; never proven from another host."""
        return self.on_this_host() and process_gone(self.pid, self.start_time)


class _Stat(NamedTuple):
    """From /proc/PID/stat."""

    state: str
    num_threads: int
    start_time: int


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when there is none that can be seen."""
    stat_now = _stat(pid)
    return stat_now.start_time if stat_now else 0


def process_gone(pid: int, started: int) -> bool:
    """Whether the process that started then is proven gone, its memory with it; a pid used again is not it."""
    now = _stat(pid)
    if now is None:
        return not _exists(pid)
    # A zombie with more threads is one whose first thread alone has ended.
    return now.start_time != started or (now.state in "ZX" and now.num_threads <= 1)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets and may hold anything, brackets too.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Stat(fields[0].decode(), int(fields[17]), int(fields[19]))


def _exists(pid: int) -> bool:
    """Also true for a process that /proc hides from this user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ptrace_scope() -> str:
    """Yama's setting, or "absent"."""
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "absent"


def allow_any_reader() -> None:
    """Let any process of this user read and write this one where Yama restricts ptrace; nothing without Yama."""
    if _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def copy(pid: int, local: Iovecs, remote: Iovecs, *, write: bool) -> None:
    """Copy between this process and another (or itself), pair by pair; pairs have equal lengths.

    The GIL is free while bytes move. Raises CopyError: ESRCH, EFAULT, EPERM, ENOSYS.
    """
    local, remote = _split(local), _split(remote)
    ends = np.cumsum(local[:, 1].astype(np.int64))
    call = _vm_call("process_vm_writev" if write else "process_vm_readv")
    done, first = 0, 0
    while first < len(local):
        last = min(first + _IOV_MAX, int(np.searchsorted(ends, done + SLICE_BYTES, side="right")))
        last = max(last, first + 1)
        count = last - first
        moved = call(pid, local[first:].ctypes.data, count, remote[first:].ctypes.data, count, 0)
        if moved <= 0:
            raise CopyError(ctypes.get_errno() if moved < 0 else errno.EFAULT, done)
        done += moved
        # A fault ends a call early, perhaps inside a pair: go on from there, and the next call names the error.
        first = int(np.searchsorted(ends, done, side="right"))
        if first < last:
            _skip(local, remote, first, rest=int(ends[first]) - done)


def copy_own(local: Iovecs, remote: Iovecs, *, write: bool) -> None:
    """As `copy` within this process, without the system calls that a sandbox may forbid. A bad address crashes."""
    source, target = (local, remote) if write else (remote, local)
    for (to, length), (from_, _) in zip(_split(target).tolist(), _split(source).tolist(), strict=True):
        ctypes.memmove(to, from_, length)


def check_readable(pid: int, address: int, length_bytes: int) -> None:
    """Read the first and the last byte of a span of another process. Raises CopyError as `copy`."""
    byte = ctypes.create_string_buffer(2)
    here = ctypes.addressof(byte)
    local = np.array([[here, 1], [here + 1, 1]], dtype=np.uint64)
    remote = np.array([[address, 1], [address + length_bytes - 1, 1]], dtype=np.uint64)
    copy(pid, local, remote, write=False)


def read_bytes(pid: int, address: int, length_bytes: int) -> bytes:
    """Bytes of another process. Raises CopyError as `copy`."""
    into = ctypes.create_string_buffer(length_bytes)
    local = np.array([[ctypes.addressof(into), length_bytes]], dtype=np.uint64)
    copy(pid, local, np.array([[address, length_bytes]], dtype=np.uint64), write=False)
    return into.raw


def _split(vecs: Iovecs) -> Iovecs:
    """A copy in which no entry is longer than a slice."""
    lengths = vecs[:, 1].astype(np.int64)
    pieces = -(-lengths // SLICE_BYTES)
    if not (pieces > 1).any():
        return np.array(vecs, dtype=np.uint64)
    row = np.repeat(np.arange(len(vecs)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    out = np.empty((len(row), 2), dtype=np.uint64)
    out[:, 0] = vecs[row, 0] + (piece * SLICE_BYTES).astype(np.uint64)
    out[:, 1] = np.minimum(SLICE_BYTES, lengths[row] - piece * SLICE_BYTES)
    return out


def _skip(local: Iovecs, remote: Iovecs, row: int, rest: int) -> None:
    for vecs in (local, remote):
        vecs[row, 0] += vecs[row, 1] - np.uint64(rest)
        vecs[row, 1] = rest


@functools.cache
def _vm_call(name: str) -> Callable[..., int]:
    function = getattr(_libc, name)
    vecs = [ctypes.c_void_p, ctypes.c_ulong]
    function.argtypes = [ctypes.c_int, *vecs, *vecs, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return cast("Callable[..., int]", function)


class Shared(msgspec.Struct, frozen=True):
    """How another process maps a span that lies in shared memory.

    path: a file in /dev/shm; or empty, and fd is the number of the owner's open descriptor (a memfd).
    device, inode: which file it must turn out to be. offset_bytes: where in the file the span begins.
    """

    path: str
    fd: int
    device: int
    inode: int
    offset_bytes: int


def find_shared(address: int, length_bytes: int) -> Shared | None:
    """How others can map this span of this process; None if it isn't shared memory in one mapping of a known file."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        span, mode, offset, device, inode, *name = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in span.split("-"))
        if begin <= address and address + length_bytes <= end:
            if mode[3] != "s" or not name:
                return None
            major, minor = (int(x, 16) for x in device.split(":"))
            file = os.makedev(major, minor), int(inode)
            return _describe(name[0], file, int(offset, 16) + address - begin)
    return None


def _describe(name: str, file: tuple[int, int], offset_bytes: int) -> Shared | None:
    if name.startswith(_SHM_DIR) and _file_of(name) == file:
        return Shared(name, -1, *file, offset_bytes)
    for fd in os.listdir("/proc/self/fd"):
        if _file_of(f"/proc/self/fd/{fd}") == file:
            return Shared("", int(fd), *file, offset_bytes)
    return None


def _file_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Mapping:
    """Another process's shared span, mapped here. address: where; valid until `close`."""

    def __init__(self, pid: int, shared: Shared, length_bytes: int) -> None:
        """Raises OSError when the file is not there, is another one, or may not be mapped."""
        fd = _open_shared(pid, shared)
        try:
            skew = shared.offset_bytes % mmap.ALLOCATIONGRANULARITY
            self._end_bytes = shared.offset_bytes + length_bytes
            if os.fstat(fd).st_size < self._end_bytes:
                raise OSError(errno.EFAULT, "the file is shorter than the region")
            self._map = mmap.mmap(fd, length_bytes + skew, mmap.MAP_SHARED, offset=shared.offset_bytes - skew)
        finally:
            os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + skew

    def intact(self) -> bool:
        """Whether the file is still long enough; touching a page past its end would end this process."""
        return self._map.size() >= self._end_bytes

    def close(self) -> None:
        self._map.close()


def _open_shared(pid: int, shared: Shared) -> int:
    path = shared.path or f"/proc/{pid}/fd/{shared.fd}"
    # The path comes from a peer, so it may only name shared memory, and is looked at before it is opened.
    if shared.path and (not shared.path.startswith(_SHM_DIR) or ".." in shared.path):
        raise OSError(errno.EPERM, f"not a file of {_SHM_DIR}: {shared.path!r}")
    if not _is_file(os.stat(path), shared):
        raise OSError(errno.ESTALE, f"{path} is not the file that the peer has mapped")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    if not _is_file(os.fstat(fd), shared):
        os.close(fd)
        raise OSError(errno.ESTALE, f"{path} is not the file that the peer has mapped")
    return fd


def _is_file(found: os.stat_result, shared: Shared) -> bool:
    return (found.st_dev, found.st_ino) == (shared.device, shared.inode) and stat.S_ISREG(found.st_mode)
