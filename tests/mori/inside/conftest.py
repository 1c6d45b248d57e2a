"""Fixtures of the tests that run in MoRI's environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from transport_harness import Kit, PeerProcess, Side


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    """The module's."""
    return request.module.KIT  # type: ignore[no-any-return]


@pytest.fixture
def spawn(kit: Kit) -> Iterator[Callable[[], PeerProcess]]:
    """Starts peers; all are gone afterwards."""
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(PeerProcess(kit))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def side(kit: Kit) -> Iterator[Callable[..., Side]]:
    """Makes transports in this process; all are closed afterwards."""
    made: list[Side] = []

    def build(**more: Any) -> Side:
        made.append(Side(kit, **more))
        return made[-1]

    yield build
    for one in made:
        one.transport.close()
