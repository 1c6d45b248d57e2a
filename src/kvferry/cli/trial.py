"""Makes a transport as a server would, to learn in a second what would else end the servers after minutes.

In a process of its own, `python -m kvferry.cli.trial NAME HOST`: a library that is loaded starts threads, takes
signals and memory, and may end its process; the servers that are started next shall find nothing of it.
"""

from __future__ import annotations

import json
import subprocess
import sys

_PATIENCE_S = 120.0
_UNAVAILABLE = 73
"""No status with which a library would end a process of its own accord."""


def failure_of(name: str, host: str) -> str:
    """Why the transport can't be made on this host, with what to do about it; empty if it can, or is too slow to tell.

    host: where the servers let it listen.
    """
    command = [sys.executable, "-m", "kvferry.cli.trial", name, host]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode == 0:
        return ""
    lines = (done.stdout if done.returncode == _UNAVAILABLE else done.stderr).strip().splitlines()
    if done.returncode == _UNAVAILABLE and lines:
        return str(json.loads(lines[-1]))  # libraries may have written before it
    return ": ".join([f"to make one ends its process with status {done.returncode}", *lines[-1:]])


def main(name: str, host: str) -> int:
    """The status; why it failed is the last line on standard output, as JSON."""
    from kvferry.transport import registry
    from kvferry.transport.base import TransportError

    try:
        options = {"host": host} if "host" in registry.options(name) else {}
        registry.make(name, options).close()
    except TransportError as error:
        print(json.dumps(str(error).removeprefix(f"{name}: ")), flush=True)
        return _UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
