"""Combinations of the matrix on other roads: written by the producer, and over each transport's real library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvmatrix.combinations import BY_NAME, CHOSEN
from kvmatrix.driver import Pair

sys.path.insert(0, str(Path(__file__).parents[1] / "transport"))
sys.path.insert(1, str(Path(__file__).parents[1] / "mori"))

MINIMAX_M3 = [name for name in BY_NAME if name.startswith("MiniMax-M3") and "nixl" not in name]
WRITTEN = [*CHOSEN, "refused: head size", "refused: model"]
READ, WRITE = False, True


def _nothing() -> dict[str, str]:
    return {}


def _for_mooncake() -> dict[str, str]:
    import verbs_stand_in

    return verbs_stand_in.environment()


def _for_mori() -> dict[str, str]:
    import mori_env

    environment = mori_env.environment()
    return {name: environment[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH")}


ROADS: dict[tuple[str, bool], Callable[[], dict[str, str]]] = {
    ("local", WRITE): _nothing,
    ("nixl", WRITE): _nothing,
    ("mooncake", READ): _for_mooncake,
    ("mooncake", WRITE): _for_mooncake,
    ("mori", READ): _for_mori,
    ("mori", WRITE): _for_mori,
}


@pytest.fixture(scope="module")
def road(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport, write = request.param
    with Pair(transport=transport, write=write, environment=ROADS[request.param]()) as pair:
        yield pair


def _cases(names: Callable[[str, bool], list[str]]) -> list[object]:
    return [
        pytest.param(road, name, id=f"{'write' if road[1] else 'read'}-{road[0]}-{name}")
        for road in ROADS
        for name in names(*road)
    ]


def _narrow(transport: str, write: bool) -> list[str]:
    return WRITTEN if transport == "local" else MINIMAX_M3[3:6] if transport == "mori" else MINIMAX_M3[3:4]


def _wide(transport: str, write: bool) -> list[str]:
    return [name for name in dict.fromkeys((*CHOSEN, *MINIMAX_M3)) if name not in _narrow(transport, write)]


def run(road: Pair, name: str) -> None:
    outcome = road.run(BY_NAME[name])
    assert not outcome.wrong, outcome.wrong
    assert outcome.num_bytes > 0 or BY_NAME[name].refused


@pytest.mark.parametrize(("road", "name"), _cases(_narrow), indirect=["road"])
def test_a_chosen_combination(road: Pair, name: str) -> None:
    run(road, name)


@pytest.mark.wide
@pytest.mark.parametrize(("road", "name"), _cases(_wide), indirect=["road"])
def test_every_other_combination(road: Pair, name: str) -> None:
    run(road, name)
