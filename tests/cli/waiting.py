"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    """Return when `condition` holds; fail with `what` when it does not within deadline_s."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not happen in {deadline_s} s"
        time.sleep(0.02)
