"""Fixtures of MoRI's tests; those in inside/ run in a process of their own, see inside_run.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))

from inside_run import scratch_of


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this run."""
    return scratch_of(tmp_path_factory.getbasetemp())
