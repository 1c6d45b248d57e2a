"""Fixtures of the transport tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sockets_example
import verbs_stand_in
from transport_harness import Kit, PeerProcess, Side

from kvferry.transport import registry
from kvferry.transport.base import TransportError

KITS = (
    Kit("local", "local"),
    Kit("local-shm", "local", memory="memfd"),
    Kit("nixl", "nixl"),
    # Emulated over TCP, a transfer takes many steps of both sides; over the default it is often done when posted.
    # UCX may end the target's process when a reader dies (docs/transports.md): rarely, and not for a test to wait for.
    Kit("nixl-tcp", "nixl", {"backend_params": {"engine_config": "TLS=tcp"}}, survives_death_in=("write",)),
    Kit("mooncake", "mooncake", {"host": "127.0.0.1"}, environment=verbs_stand_in.environment),
    sockets_example.KIT,
)
# These need an environment of their own; tests/mori makes it and names the kit.
MORI_KITS = (
    Kit("mori-xgmi", "mori", {"backend": "xgmi"}, memory="device"),
    Kit("mori-rdma", "mori", {"backend": "rdma"}),
)


def _selected() -> tuple[Kit, ...]:
    """KVFERRY_TEST_KITS has labels of kits, or names of transports that have none here (an entry point, an import
    path); those get the options of KVFERRY_TEST_OPTIONS, as JSON."""
    named = os.environ.get("KVFERRY_TEST_KITS")
    if not named:
        return KITS
    kits = {kit.label: kit for kit in KITS + MORI_KITS}
    try:
        options = json.loads(os.environ.get("KVFERRY_TEST_OPTIONS", "{}"))
    except ValueError as error:
        raise pytest.UsageError(f"KVFERRY_TEST_OPTIONS is no JSON: {error}") from error
    return tuple(kits.get(name) or Kit(name, name, options, is_ours=False) for name in named.split(","))


SELECTED = _selected()


def pytest_configure() -> None:
    """A transport that is not there fails the run, not each of its tests."""
    for kit in SELECTED:
        if not kit.is_ours:
            try:
                registry.options(kit.name)
            except TransportError as error:
                raise pytest.UsageError(f"KVFERRY_TEST_KITS: {error}") from error


def _start(kit: Kit, started: list[PeerProcess]) -> PeerProcess:
    peer = PeerProcess(kit)
    started.append(peer)
    return peer


@pytest.fixture(scope="module", params=SELECTED, ids=lambda kit: kit.label)
def kit(request: pytest.FixtureRequest) -> Kit:
    """The transport under test."""
    request.param.environment()
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def in_the_table(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """A conformance test is a cell of the table that the run ends with."""
    if request.node.path.name == "test_conformance.py" and "kit" in request.fixturenames:
        record_property("transport", request.getfixturevalue("kit").label)


@pytest.fixture
def spawn(kit: Kit) -> Iterator[Callable[[], PeerProcess]]:
    """Starts peers that the test may stop or kill; all are gone afterwards."""
    started: list[PeerProcess] = []
    yield lambda: _start(kit, started)
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


@pytest.fixture(scope="module")
def pair(kit: Kit) -> Iterator[Any]:
    """One connected pair for all tests that leave it as it was: (here, peer process, connected peer)."""
    started: list[PeerProcess] = []
    here = Side(kit)
    try:
        peer = _start(kit, started)
        connected = here.transport.connect(peer.start())
        peer.call("progress", on=True)
        yield here, peer, connected
    finally:
        here.transport.close()
        for peer in started:
            peer.kill()
