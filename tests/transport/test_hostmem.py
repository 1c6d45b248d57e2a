"""Copies between memory, shared spans and process identities, on the real system."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transport_harness import pattern

from kvferry.transport import hostmem


def vecs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.uint64)


def bases(array: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.stack([offsets + array.ctypes.data, lengths], axis=1).astype(np.uint64)


@pytest.fixture(params=["system call", "own"])
def copier(request: pytest.FixtureRequest) -> object:
    """Both ways to copy within a process; either must give the same bytes."""
    if request.param == "own":
        return hostmem.copy_own
    return lambda local, remote, *, write: hostmem.copy(os.getpid(), local, remote, write=write)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("count", "length"),
    [(1, 3 * hostmem.SLICE_BYTES + 12_345), (3, hostmem.SLICE_BYTES), (1025, 1), (5000, 333), (1024, 4096)],
)
def test_copy_is_exact_across_slices_and_calls(copier: object, count: int, length: int, write: bool) -> None:
    gap = 7
    source, target = pattern(count, count * (length + gap)).copy(), np.zeros(count * (length + gap), dtype=np.uint8)
    offsets, lengths = np.arange(count) * (length + gap), np.full(count, length)
    order = np.random.default_rng(0).permutation(count)
    expected = target.copy()
    for to, of in zip(offsets, offsets[order], strict=True):
        expected[to : to + length] = source[of : of + length]
    into, out_of = bases(target, offsets, lengths), bases(source, offsets[order], lengths)
    local, remote = (out_of, into) if write else (into, out_of)
    copier(local, remote, write=write)  # type: ignore[operator]
    assert np.array_equal(target, expected)


def test_a_fault_ends_the_copy_and_says_how_far_it_came() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(base + 2 * page), ctypes.c_size_t(page), 0) == 0
    target = np.zeros(4 * page, dtype=np.uint8)
    local = vecs((target.ctypes.data, page), (target.ctypes.data + page, 3 * page))
    with pytest.raises(hostmem.CopyError) as caught:
        hostmem.copy(os.getpid(), local, vecs((base, page), (base + page, 3 * page)), write=False)
    assert caught.value.errno == errno.EFAULT
    assert caught.value.moved_bytes == 2 * page


def test_a_process_that_never_was() -> None:
    target = np.zeros(16, dtype=np.uint8)
    one = vecs((target.ctypes.data, 16))
    with pytest.raises(hostmem.CopyError) as caught:
        hostmem.copy(2**22 + 1, one, one, write=False)
    assert caught.value.errno == errno.ESRCH


def test_who_a_process_is() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = hostmem.start_time(child.pid)
    assert started >= hostmem.start_time(os.getpid()) > 0
    assert not hostmem.process_gone(child.pid, started)
    assert hostmem.process_gone(child.pid, started - 1)
    child.kill()
    # Dead and not yet reaped: a zombie has no memory.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").exists()
    assert hostmem.process_gone(child.pid, started)
    child.communicate()
    assert hostmem.process_gone(child.pid, started)
    assert hostmem.start_time(child.pid) == 0


def test_a_process_of_another_host_is_never_proven_gone() -> None:
    own = hostmem.Process.own()
    assert (own.pid, own.on_this_host(), own.gone()) == (os.getpid(), True, False)
    earlier = msgspec.structs.replace(own, start_time=own.start_time - 1)
    assert earlier.gone()
    elsewhere = msgspec.structs.replace(earlier, host="5f0c/pid:[1]")
    assert (elsewhere.on_this_host(), elsewhere.gone()) == (False, False)


def test_a_process_that_proc_hides_is_not_proven_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmem, "_stat", lambda pid: None)
    assert not hostmem.process_gone(os.getpid(), hostmem.start_time(os.getpid()))
    assert not hostmem.process_gone(1, 1)


def test_a_zombie_whose_threads_live_is_not_gone() -> None:
    """Its first thread has ended, its memory is still there."""
    program = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if sys.argv[1] == 'x86_64' else 93, 0)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, os.uname().machine], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        started = hostmem.start_time(child.pid)
        state = Path(f"/proc/{child.pid}/task/{child.pid}/stat")
        while b") Z" not in state.read_bytes():
            os.sched_yield()
        assert not hostmem.process_gone(child.pid, started)
    finally:
        child.kill()
        child.communicate()


def test_shared_spans() -> None:
    private = np.zeros(1 << 20, dtype=np.uint8)
    assert hostmem.find_shared(private.ctypes.data, 100) is None
    fd = os.memfd_create("kvferry-test")
    os.ftruncate(fd, 5 * mmap.PAGESIZE)
    memory = np.frombuffer(mmap.mmap(fd, 4 * mmap.PAGESIZE, offset=mmap.PAGESIZE), dtype=np.uint8)
    shared = hostmem.find_shared(memory.ctypes.data + 10, 1000)
    assert shared is not None
    assert (shared.path, shared.offset_bytes) == ("", mmap.PAGESIZE + 10)
    assert os.fstat(shared.fd).st_ino == shared.inode == os.fstat(fd).st_ino
    # A private mapping of the same file has pages of its own once it is written to.
    copy_on_write = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    assert hostmem.find_shared(ctypes.addressof(ctypes.c_char.from_buffer(copy_on_write)), 100) is None
    mapping = hostmem.Mapping(os.getpid(), shared, 1000)
    memory[10:1010] = pattern(1, 1000)
    assert ctypes.string_at(mapping.address, 1000) == pattern(1, 1000).tobytes()
    assert mapping.intact()
    os.ftruncate(fd, mmap.PAGESIZE)
    assert not mapping.intact()
    mapping.close()
    os.close(fd)


def test_only_shared_memory_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 5000)
    found = file.stat()
    for path in (str(file), f"/dev/shm/../{file}", "/dev/null"):
        with pytest.raises(OSError, match="not a file of /dev/shm"):
            hostmem.Mapping(os.getpid(), hostmem.Shared(path, -1, found.st_dev, found.st_ino, 0), 100)
    fd = os.open(file, os.O_RDWR)
    with pytest.raises(OSError, match="not the file"):
        hostmem.Mapping(os.getpid(), hostmem.Shared("", fd, found.st_dev, found.st_ino + 1, 0), 100)
    with pytest.raises(OSError, match="shorter"):
        hostmem.Mapping(os.getpid(), hostmem.Shared("", fd, found.st_dev, found.st_ino, 4999), 100)
    os.close(fd)
