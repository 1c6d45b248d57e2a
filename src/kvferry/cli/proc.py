"""Reads /proc: which processes belong to a child, what shared memory they use, who listens on a port. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

CHILD_VARIABLE = "KVFERRY_CHILD"  # in the environment of a child and of all that it starts

_SHM = Path("/dev/shm")
_SHM_MAPPING = re.compile(r" (\d+) +/dev/shm/\S+(?: \(deleted\))?$", re.MULTILINE)  # the inode
_TCP_LISTEN = "0A"


def all_pids() -> list[int]:
    """Pids of all processes of this host (of our pid namespace)."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int | None:
    """The session id of a live process; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    state, session = fields[0], int(fields[3])
    return None if state in "ZX" else session


def _environment_has(pid: int, entry: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(item.startswith(entry) for item in environment.split(b"\0"))


def members(label: str, session: int | None = None) -> set[int]:
    """Live pids of a child: those of its session, and those whose CHILD_VARIABLE starts with `label`.

    The second finds what has left the session, and a child that was started but never recorded. Never this process.
    """
    entry = f"{CHILD_VARIABLE}={label}".encode()
    found = set()
    for pid in all_pids():
        live_in = _session(pid)
        if live_in is None or pid == os.getpid():
            continue
        if (session is not None and live_in == session) or _environment_has(pid, entry):
            found.add(pid)
    return found


def is_resource_tracker(pid: int) -> bool:
    """Whether pid is Python's resource tracker, which unlinks what its owner left when that one is gone."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Paths below /dev/shm that any of these processes has mapped or open.

    Found by inode: glibc makes a named semaphore under another name, which is what its mapping goes on to show.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            inodes.update(map(int, _SHM_MAPPING.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))))
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(descriptor.path).startswith(f"{_SHM}/"):
                    inodes.add(os.stat(descriptor.path).st_ino)
        except OSError:
            continue  # it ended meanwhile
    return {entry.path for entry in os.scandir(_SHM) if entry.inode() in inodes}


def remove_shared_memory(paths: Iterable[str], since_s: float) -> list[str]:
    """Unlink those of `paths` that are ours, were made after `since_s` (wall clock) and that no process uses any more.

    Returns the paths that were unlinked.
    """
    in_use = shared_memory(all_pids())
    removed = []
    for path in sorted(set(paths) - in_use):
        try:
            status = os.stat(path)
            if status.st_uid == os.getuid() and status.st_ctime >= since_s - 1:
                os.unlink(path)
                removed.append(path)
        except FileNotFoundError:
            continue
    return removed


def listeners(port: int) -> set[int]:
    """Pids of the processes that listen on this TCP port (those that we may look into)."""
    inodes = _listening_inodes(port)
    found = set()
    for pid in all_pids():
        try:
            if any(os.readlink(entry.path) in inodes for entry in os.scandir(f"/proc/{pid}/fd")):
                found.add(pid)
        except OSError:
            continue
    return found


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes
