"""Cleans up after a process that was killed before it could: `python -m kvferry.cli.guardian LABEL`.

Its standard input is a pipe from that process. A line means that all is done; the end of the pipe without one means
that the process is gone, and then the guardian ends everything that carries the label.
"""

from __future__ import annotations

import signal
import sys
import time

from kvferry.cli import proc
from kvferry.cli.children import end_all
from kvferry.cli.signals import STOPPING


def main(label: str) -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    started_s = time.time()
    if sys.stdin.buffer.readline():
        return
    orphans = proc.members(label)
    segments = proc.shared_memory(orphans)
    end_all(lambda: proc.members(label), wait_s=0)
    proc.remove_shared_memory(segments, started_s)


if __name__ == "__main__":
    main(sys.argv[1])
