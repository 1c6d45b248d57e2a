from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import Recorder

from kvferry.cli.children import Children


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    group = Children(tmp_path)
    yield group
    group.close()


@pytest.fixture
def new_server() -> Iterator[Callable[[], Recorder]]:
    servers: list[Recorder] = []

    def make() -> Recorder:
        servers.append(Recorder())
        return servers[-1]

    yield make
    for server in servers:
        server.close()
