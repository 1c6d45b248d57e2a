"""What the transport tests share: peers in processes of their own, buffers, descriptors, bounded polling."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.layout import Region
from kvferry.transport import hostmem
from kvferry.transport.base import Batch, Handle, PeerLost, State, Status, Transport
from kvferry.transport.registry import make

SIZES = (2 << 20, 1 << 20)
"""Bytes of the regions that both sides register."""
BOUND_S = 60.0
"""Longest wait for anything; far above what is seen, so that it tells a hang and not a slow machine."""
SLOT = 200
"""Scattered descriptors lie in slots of so many bytes unless told otherwise, one in each: they never overlap."""


@dataclass(frozen=True)
class Kit:
    """One column of the table: a transport, its options, and the memory that it is tried on.

    environment: makes its library loadable in this process, and returns what a peer's environment needs besides.
    survives_death_in: the operations in which whoever posts may die, and the library lets the target's process live.
    is_ours: errors are looked at for their words too, not only for their type.
    """

    label: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    memory: str = "private"
    environment: Callable[[], dict[str, str]] = dict
    survives_death_in: tuple[str, ...] = ("read", "write")
    is_ours: bool = True

    def text(self, words: str) -> str | None:
        """For pytest.raises."""
        return words if self.is_ours else None

    @property
    def device(self) -> str:
        """Of its memory, in a region's words."""
        return device_of(self.memory)


class PeerProcess:
    """A peer in a process of its own."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.record = b""
        self._regions: list[tuple[int, int]] = []
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **kit.environment()},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, do: str, **arguments: Any) -> Any:
        os.write(self._to, (json.dumps({"do": do, **arguments}) + "\n").encode())
        got = b""
        while not got.endswith(b"\n"):
            ready, _, _ = select.select([self._from], [], [], BOUND_S)
            chunk = os.read(self._from, 1 << 16) if ready else b""
            assert chunk, f"the peer did not answer {do!r}"
            got += chunk
        answer = json.loads(got)
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def memory(self, region: int) -> bytes:
        """What its region holds, also while it is stopped."""
        address, length = self._regions[region]
        return hostmem.read_bytes(self.pid, address, length)

    def start(self, sizes: tuple[int, ...] = SIZES) -> bytes:
        kit = self.kit
        answer = self.call("start", name=kit.name, options=kit.options, memory=kit.memory, sizes=sizes)
        self.record = bytes.fromhex(answer)
        self._regions = self.call("where")
        return self.record

    def digest(self, region: int) -> str:
        return str(self.call("digest", region=region))

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(BOUND_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Side:
    """A transport in this process, on buffers full of a guard byte."""

    def __init__(self, kit: Kit, sizes: tuple[int, ...] = SIZES, **more: Any) -> None:
        self.buffers = [allocate(kit.memory, size) for size in sizes]
        self.reset()
        self.transport: Transport = make(kit.name, {**kit.options, **more})
        self.transport.register([Region(b.ctypes.data, b.nbytes, kit.device) for b in self.buffers])

    def reset(self) -> None:
        for buffer in self.buffers:
            buffer[:] = 0xA5

    def snapshot(self) -> list[bytes]:
        return [buffer.tobytes() for buffer in self.buffers]


@functools.lru_cache(maxsize=64)
def pattern(seed: int, size: int) -> np.ndarray:
    """Bytes that both sides can make."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype=np.uint8)


def allocate(memory: str, size: int) -> np.ndarray:
    """Zeros in private memory, of HIP's device 0, in a memfd, or in the file of /dev/shm that `memory` names."""
    if memory == "private":
        return np.zeros(size, dtype=np.uint8)
    if memory == "device":
        return _device_memory(size)
    fd = os.memfd_create("kvferry-test") if memory == "memfd" else os.open(memory, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, size)
    shared = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    if memory != "memfd":
        os.close(fd)
    return shared


def _device_memory(size: int) -> np.ndarray:
    """From a HIP whose device memory the CPU can touch (tests/mori)."""
    hip, address = ctypes.CDLL("libamdhip64.so.7"), ctypes.c_void_p()
    error = hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(size))
    assert error == 0, f"hipMalloc: {error}"
    assert address.value is not None
    return np.frombuffer((ctypes.c_char * size).from_address(address.value), dtype=np.uint8)


def device_of(memory: str) -> str:
    return "cuda:0" if memory == "device" else "cpu"


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def batch(local: Any, remote: Any, lengths: Any, regions: tuple[int, int] = (0, 0)) -> Batch:
    return Batch(*regions, *(np.asarray(x, dtype=np.int64) for x in (local, remote, lengths)))


def scattered(count: int, size: int, seed: int, slot: int = SLOT) -> Batch:
    """`count` descriptors of 1 to slot / 2 bytes at odd places in other orders on the two sides."""
    rng = np.random.default_rng(seed)
    slots, half = size // slot, slot // 2
    lengths = rng.integers(1, half + 1, count)
    local, remote = (rng.permutation(slots)[:count] * slot + rng.integers(0, half, count) for _ in range(2))
    return batch(local, remote, lengths)


def merged(count: int, size: int, seed: int) -> Batch:
    """The same bytes as `count` neighbours, given as one run for each quarter of them."""
    rng = np.random.default_rng(seed)
    length = size // 2 // max(count, 4) * max(count // 4, 1)
    starts = np.arange(min(count, 4)) * length
    return batch(
        starts + int(rng.integers(1, 1000)), starts[::-1] + int(rng.integers(1, 1000)), np.full(len(starts), length)
    )


def moved(target: np.ndarray, source: np.ndarray, target_offsets: Any, source_offsets: Any, lengths: Any) -> np.ndarray:
    """What `target` must be after these descriptors; all its other bytes are the guards."""
    out = target.copy()
    for to, of, length in zip(target_offsets, source_offsets, lengths, strict=True):
        out[to : to + length] = source[of : of + length]
    return out


def settle(transport: Transport, handle: Handle) -> Status:
    """Polls until it is no longer PENDING."""
    for _ in waiting("still PENDING"):
        status = transport.poll(handle)
        if status.state is not State.PENDING:
            break
    return status


def give_back(transport: Transport, handle: Handle) -> None:
    """Releases until the transport says that nothing of it can still move bytes."""
    for _ in waiting("release does not come to an end"):
        if transport.release(handle):
            break


def waiting(what: str) -> Iterator[int]:
    """Rounds of a loop that must end: at once at first, then with a pause; fails with `what` at the bound."""
    end = time.monotonic() + BOUND_S
    for round_ in itertools.count():
        yield round_
        assert time.monotonic() < end, what
        if round_ > 100:
            time.sleep(0.0005)


def finish(transport: Transport, handle: Handle) -> None:
    """To its end, which must be good."""
    status = settle(transport, handle)
    assert status == Status(State.DONE, ""), status
    give_back(transport, handle)


def outcome(transport: Transport, post: Any) -> str:
    """ "lost" (raised), "failed" or "done" of a post to a peer that may be dead; gives the handle back."""
    try:
        handle = post()
    except PeerLost:
        return "lost"
    status = settle(transport, handle)
    give_back(transport, handle)
    if status.state is State.FAILED:
        assert status.detail
    return status.state.value


def digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.tobytes()).hexdigest()


def changed(record: bytes, **fields: Any) -> bytes:
    """The record with other values; of a field that is a dict, only those that are named."""
    old = msgspec.msgpack.decode(record)
    nested = {name: {**old[name], **value} for name, value in fields.items() if isinstance(value, dict)}
    return msgspec.msgpack.encode({**old, **fields, **nested})


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
