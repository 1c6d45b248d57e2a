"""Puts this folder on the path, offers the two processes, and keeps them for the tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kvmatrix.driver import Pair


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Both processes, ended afterwards whatever happened."""
    with Pair() as pair:
        yield pair
