"""Running pairs of real servers for the e2e tests.

A test takes the fixture `pair`, and says which one by parametrising it:

    @pytest.mark.parametrize("pair", [PairConfig(tp_decode=2)], indirect=True)
    def test_something(pair: Cluster) -> None: ...

Without a parameter it gets PairConfig(). One pair runs at a time; tests are ordered so that those of one configuration
come together, and a pair is started anew only when the configuration changes or a test has ended one of its servers.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "transport"))
sys.path.insert(2, str(Path(__file__).parents[1] / "mori"))

from harness import PairConfig, PairPool, clean_up_on_signals, orphaned_segments

from kvferry.cli import models
from kvferry.cli.servers import Cluster

_POOL = pytest.StashKey[PairPool]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        clean_up_on_signals()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one configuration come together; the order is otherwise kept."""
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker("e2e")
        item.add_marker(pytest.mark.timeout(900))  # starting servers on a busy machine is part of it
    first_seen: dict[str, int] = {}
    for index, item in enumerate(mine):
        first_seen.setdefault(_configuration_of(item), index)
    mine.sort(key=lambda item: first_seen[_configuration_of(item)])
    remaining = iter(mine)
    items[:] = [next(remaining) if here in item.path.parents else item for item in items]


def _configuration_of(item: pytest.Item) -> str:
    if "pair" not in getattr(item, "fixturenames", ()):
        return ""
    callspec = getattr(item, "callspec", None)
    return repr(callspec.params.get("pair", PairConfig()) if callspec else PairConfig())


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The tiny random Llama in float32."""
    return models.tiny("llama")


@pytest.fixture(scope="session")
def pair_pool(request: pytest.FixtureRequest) -> Iterator[PairPool]:
    """Hands out pairs. When the session ends, nothing of any pair may be left."""
    pool = PairPool()
    request.config.stash[_POOL] = pool
    segments_before = orphaned_segments()
    yield pool
    pool.close()
    assert pool.leaks(segments_before) == []


@pytest.fixture
def pair(request: pytest.FixtureRequest, pair_pool: PairPool) -> Cluster:
    """A running prefill and decode server (and a router, if its PairConfig says so)."""
    return pair_pool.get(getattr(request, "param", PairConfig()))


@pytest.fixture
def new_salt() -> Callable[[], str]:
    """Makes cache salts that were never used: what is run with one shares no cached block with anything before."""
    return lambda: secrets.token_hex(8)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the last lines of its servers' logs."""
    report = yield
    pool = item.config.stash.get(_POOL, None)
    if report.failed and pool is not None and pool.current is not None and Path(__file__).parent in item.path.parents:
        report.sections.append(("servers", pool.current.failure_report(40)))
    return report
