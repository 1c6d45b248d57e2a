"""Steps that the tests of both backends take."""

from __future__ import annotations

from typing import Any

import numpy as np
from transport_harness import SIZES, PeerProcess, Side, batch

from kvferry.transport.base import Batch

STEP = 4096
TEN_BYTES = 10


def connect(here: Side, peer: PeerProcess, *, seed: int = 1) -> Any:
    """Starts the peer on a known pattern and connects to it."""
    record = peer.start()
    peer.call("fill", region=0, seed=seed)
    return here.transport.connect(record)


def spread(count: int) -> Batch:
    """Ten bytes at the beginning of each of the first `count` pages: nothing that could be joined."""
    starts = np.arange(count) * STEP
    assert count * STEP <= SIZES[0]
    return batch(starts, starts, np.full(count, TEN_BYTES))


def landed(buffer: np.ndarray, of: np.ndarray, count: int) -> list[bool]:
    """Which of `spread(count)` lie in the buffer."""
    return [bool((buffer[at : at + TEN_BYTES] == of[at : at + TEN_BYTES]).all()) for at in range(0, count * STEP, STEP)]


UNEQUAL = [
    Batch(0, 0, np.arange(2), np.arange(1), np.full(2, 10)),
    Batch(0, 0, np.arange(2), np.arange(2), np.full(1, 10)),
    Batch(0, 0, np.arange(1), np.arange(2), np.full(2, 10)),
]
OUTSIDE = [batch([0], [SIZES[0] - 9], [10]), batch([SIZES[0]], [0], [1]), batch([-1], [0], [1]), batch([0], [-1], [1])]
