"""How fast each transport reads from another process of this host, beside a plain copy in the same run.

    python benchmarks/transport.py
    python benchmarks/transport.py --mib 64 --kib 16 256 --only local nixl

Each figure is the best of `--rounds` reads of `--mib` in scattered descriptors of `--kib` each, warm, from a
process that only drives its transport. "small" is the time of a read of one descriptor of 64 bytes. A transport whose
library is not on this machine is named at the end.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.layout import Region
from kvferry.transport.base import Batch, State, Transport, TransportUnavailable
from kvferry.transport.registry import make

COLUMNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "local (shared memory)": ("local", {}, True),
    "local (process_vm)": ("local", {}, False),
    "nixl (UCX's choice)": ("nixl", {}, False),
    "nixl (TCP)": ("nixl", {"backend_params": {"engine_config": "TLS=tcp"}}, False),
    "mooncake (TCP)": ("mooncake", {"host": "127.0.0.1"}, False),
    "mori (RDMA)": ("mori", {"backend": "rdma"}, False),
}


def allocate(size: int, shared: bool) -> np.ndarray:
    if not shared:
        return np.ones(size, dtype=np.uint8)
    fd = os.memfd_create("kvferry-bench")
    os.ftruncate(fd, size)
    out = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    out[:] = 1
    return out


def serve(name: str, options: dict[str, Any], shared: bool, size: int) -> None:
    """The other process: registers, prints its record, drives its transport until stdin ends."""
    # Libraries print: keep the pipe for the record alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    memory = allocate(size, shared)
    transport = make(name, options)
    transport.register([Region(memory.ctypes.data, size)])
    print(transport.record().hex(), file=answers)
    while not select.select([0], [], [], 0.001 if transport.traits.target_must_poll else None)[0]:
        transport.progress()
    transport.close()


def descriptors(size: int, length: int) -> Batch:
    """The whole memory in runs of `length`, in another order on each side, so that none can be merged."""
    rng = np.random.default_rng(0)
    local, remote = (rng.permutation(size // length) * length for _ in range(2))
    return Batch(0, 0, local, remote, np.full(size // length, length))


def seconds(what: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        what()
        best = min(best, time.perf_counter() - begin)
    return best


def read(transport: Transport, peer: Any, batch: Batch) -> None:
    handle = transport.read(peer, [batch])
    while (status := transport.poll(handle)).state is State.PENDING:
        time.sleep(0)
    if status.state is not State.DONE or not transport.release(handle):
        raise RuntimeError(status.detail)


def measure(column: str, size: int, lengths: list[int], rounds: int) -> list[float]:
    """Seconds of a read of `size` for each length of descriptor, then of a small one."""
    name, options, shared = COLUMNS[column]
    transport = make(name, options)
    command = [sys.executable, __file__, "--serve", json.dumps([name, options, shared, size])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        record = bytes.fromhex(process.stdout.readline().decode())
        memory = allocate(size, False)
        transport.register([Region(memory.ctypes.data, size)])
        peer = transport.connect(record)
        read(transport, peer, descriptors(size, size))
        out = [seconds(lambda b=descriptors(size, n): read(transport, peer, b), rounds) for n in lengths]
        small = Batch(0, 0, np.array([0]), np.array([0]), np.array([64]))
        out.append(seconds(lambda: read(transport, peer, small), 50 * rounds))
        transport.close()
        process.communicate(b"end")
    return out


def plain(size: int, rounds: int) -> float:
    source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    return seconds(lambda: np.copyto(target, source), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB per read")
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 64, 1024], help="KiB per descriptor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="columns whose name begins so")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*json.loads(arguments.serve))
        return
    size, lengths = arguments.mib << 20, [kib << 10 for kib in arguments.kib]
    memcpy = plain(size, arguments.rounds)
    heads = [f"{kib} KiB" for kib in arguments.kib]
    print(f"{arguments.mib} MiB a read; GB/s, and the share of a plain copy's {size / memcpy / 1e9:.1f} GB/s\n")
    print("| transport | " + " | ".join(heads) + " | small, us |")
    print("|---|" + "---|" * (len(heads) + 1))
    missing: list[TransportUnavailable] = []
    for column in COLUMNS:
        if not column.startswith(tuple(arguments.only)):
            continue
        try:
            *large, small = measure(column, size, lengths, arguments.rounds)
        except TransportUnavailable as error:
            missing.append(error)
            continue
        cells = [f"{size / t / 1e9:.2f} ({memcpy / t:.0%})" for t in large]
        print(f"| {column} | " + " | ".join(cells) + f" | {small * 1e6:.0f} |", flush=True)
    for error in missing:
        print(f"\nnot here: {error}")


if __name__ == "__main__":
    main()
