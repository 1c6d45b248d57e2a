"""What the tests turn and read in the libraries that stand in for the hardware, of this process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

VERBS = ctypes.CDLL("libibverbs.so.1")
HIP = ctypes.CDLL("libamdhip64.so.7")
VERBS.stand_in_verbs_requests.restype = ctypes.c_longlong
HIP.stand_in_hip_copies.restype = ctypes.c_longlong

REMOTE_ACCESS_ERROR = 10
"""A status of verbs."""


@contextlib.contextmanager
def card_held() -> Iterator[None]:
    """The network card does nothing meanwhile."""
    VERBS.stand_in_verbs_hold(1)
    try:
        yield
    finally:
        VERBS.stand_in_verbs_hold(0)


@contextlib.contextmanager
def gpu_held() -> Iterator[None]:
    """Copies stay in their streams meanwhile."""
    HIP.stand_in_hip_hold(1)
    try:
        yield
    finally:
        HIP.stand_in_hip_hold(0)


def fail_request(nth: int, status: int = REMOTE_ACCESS_ERROR) -> None:
    """The nth request that the card carries out from now on fails."""
    VERBS.stand_in_verbs_fail(nth, status)


def fail_copy(nth: int) -> None:
    """The nth copy from now on is refused."""
    HIP.stand_in_hip_fail_copy(nth)


def requests() -> int:
    """Given to the card so far."""
    return int(VERBS.stand_in_verbs_requests())


def queue_pairs() -> int:
    """That there are in this process."""
    return int(VERBS.stand_in_verbs_pairs())


def copies() -> int:
    """Asked of the GPU so far."""
    return int(HIP.stand_in_hip_copies())


def imported() -> int:
    """Spans of other processes that are mapped here."""
    return int(HIP.stand_in_hip_imported())
