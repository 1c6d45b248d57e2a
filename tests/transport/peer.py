"""The other side of the conformance suite: a process that registers memory and does as its pipe says.

One JSON object a line on stdin, one on stdout: {"do": name, ...} -> {"ok": value} or {"error": text}.
It ends when its stdin does, and with its parent.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from transport_harness import allocate, device_of, pattern

from kvferry.layout import Region
from kvferry.transport.base import Batch, State
from kvferry.transport.registry import make

_PR_SET_PDEATHSIG = 1


class Peer:
    def __init__(self) -> None:
        self.transport: Any = None
        self.buffers: list[np.ndarray] = []
        self.progressing = False
        self.post: Callable[[], Any] | None = None
        self.posted: Any = None

    def start(self, name: str, options: dict[str, Any], memory: str, sizes: list[int]) -> str:
        self.buffers = [allocate(memory, size) for size in sizes]
        self.transport = make(name, options)
        self.transport.register([Region(b.ctypes.data, b.nbytes, device_of(memory)) for b in self.buffers])
        return str(self.transport.record().hex())

    def where(self) -> list[tuple[int, int]]:
        """Address and length in bytes of each region."""
        return [(buffer.ctypes.data, buffer.nbytes) for buffer in self.buffers]

    def fill(self, region: int, seed: int) -> None:
        self.buffers[region][:] = pattern(seed, len(self.buffers[region]))

    def digest(self, region: int) -> str:
        return hashlib.blake2b(self.buffers[region].tobytes()).hexdigest()

    def progress(self, on: bool) -> None:
        self.progressing = on

    def transfer_on(self, record: str, operation: str, batch: list[Any]) -> None:
        """From now on posts this to that worker, again whenever it has ended."""
        connected = self.transport.connect(bytes.fromhex(record))
        one = Batch(*batch[:2], *(np.array(field, dtype=np.int64) for field in batch[2:]))
        self.post = lambda: getattr(self.transport, operation)(connected, [one])
        self.posted = self.post()

    def turn(self) -> None:
        if self.progressing:
            self.transport.progress()
        if self.post is not None and self.transport.poll(self.posted).state is not State.PENDING:
            self.transport.release(self.posted)
            self.posted = self.post()

    def unmap(self, region: int, offset_bytes: int) -> None:
        """Takes the pages of a region from an offset on away, as if they had been freed."""
        address, page = self.buffers[region].ctypes.data, mmap.PAGESIZE
        start = -(-(address + offset_bytes) // page) * page
        length = -(-(address + self.buffers[region].nbytes) // page) * page - start
        if ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(length)) != 0:
            raise OSError("munmap")

    def close(self) -> None:
        self.transport.close()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print: keep the pipe for answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = Peer()
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.001 if peer.progressing or peer.post else None)
        peer.turn()
        if not readable:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            answers.write(json.dumps(answer(peer, json.loads(line))) + "\n")


def answer(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": getattr(peer, command.pop("do"))(**command)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
    sys.exit(0)
