"""Ctrl-C and SIGTERM end a `with` block once; while it cleans up, further signals are ignored."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Not SIG_IGN: Python complains when a signal that came before it was set is still to be handled."""


def _raise_once(number: int, _frame: FrameType | None) -> None:
    # Before the exception starts its way up: a second signal must not break into the clean-up.
    for each in STOPPING:
        signal.signal(each, _ignore)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in the block, SIGTERM and SIGHUP SystemExit(128 + number); only the first does.

    Without effect outside the main thread, where Python allows no handlers.
    """
    if not _in_main_thread():
        yield
        return
    before = {each: signal.signal(each, _raise_once) for each in STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """No signal of STOPPING interrupts the block. Without effect outside the main thread."""
    if not _in_main_thread():
        yield
        return
    before = {each: signal.signal(each, _ignore) for each in STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
