"""Puts this folder on the path and offers engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agent_engines import Engine, Engines


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """make_engine(tp_size, ...) starts an engine; all are stopped at the end."""
    engines = Engines()
    yield engines.make
    engines.stop()
