"""Free loopback ports."""

from __future__ import annotations

import random
import socket

from kvferry.cli import proc
from kvferry.cli.errors import Problem

HOST = "127.0.0.1"

# Below Linux's range for outgoing connections (32768 and up), lest one of those takes a port first.
_FIRST, _LAST = 20000, 32767
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could bind this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT does not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that are free now. Raises Problem if so many can't be found."""
    found: set[int] = set()
    for _ in range(_TRIES):
        if len(found) == count:
            break
        port = random.randint(_FIRST, _LAST)
        if is_free(port):
            found.add(port)
    if len(found) < count:
        raise Problem(f"only {len(found)} of {count} free ports found between {_FIRST} and {_LAST} on {HOST}")
    return sorted(found)


def require_free(port: int, owner: str) -> None:
    """Raise Problem, naming who listens there, unless `port` is free for `owner`."""
    if is_free(port):
        return
    pids = sorted(proc.listeners(port))
    holder = f" by process {', '.join(map(str, pids))}" if pids else ""
    raise Problem(
        f"port {port} on {HOST}, wanted for {owner}, is in use{holder}",
        advice="Stop what listens there, or choose another with --port (0 takes a free one).",
    )
