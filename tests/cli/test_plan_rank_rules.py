"""Who takes from whom, in few words."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvferry.cli.plan.rank_rules import labels, ranks


def pairs(made: Iterable[tuple[int, int]], stage: str = "") -> list[tuple[str, str]]:
    return [(str(consumer), f"{stage}{producer}") for consumer, producer in made]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([(0, 0)], "0 ← 0"),
        ([(0, 0), (1, 0), (2, 1), (3, 1)], "0-1 ← 0; 2-3 ← 1"),
        ([(0, 0), (0, 1), (1, 2), (1, 3)], "0 ← 0-1; 1 ← 2-3"),
        ([(consumer, producer) for consumer in range(4) for producer in range(8)], "0-3 ← 0-7"),
        ([(rank, rank) for rank in range(16)], "i ← i, i = 0-15"),
        ([(rank, rank // 2) for rank in range(16)], "2i, 2i+1 ← i, i = 0-7"),
        ([(rank, rank // 4) for rank in range(32)], "4i to 4i+3 ← i, i = 0-7"),
        ([(rank // 2, rank) for rank in range(16)], "i ← 2i, 2i+1, i = 0-7"),
        ([(rank, 2 * rank) for rank in range(8)], "i ← 2i, i = 0-7"),
        ([(c, p) for c in range(4) for p in range(4) if (c - p) % 2 == 0], "0, 2 ← 0, 2; 1, 3 ← 1, 3"),
        ([(c, p) for c in range(8) for p in range(8) if (c - p) % 8 < 4], "each of 0-7 ← 4 of 0-7"),
        ([(c, p) for c in range(8) for p in range(8) if p <= c], "each of 0-7 ← 1 to 8 of 0-7"),
        ([(rank, 15 - rank) for rank in range(16)], "each of 0-15 ← 1 of 0-15"),
    ],
)
def test_pairs_of_ranks(made: list[tuple[int, int]], text: str) -> None:
    assert ranks(pairs(made)) == text


def test_a_stage_of_a_pipeline() -> None:
    assert ranks(pairs(((rank, rank // 2) for rank in range(4)), "pp1.tp")) == "0-1 ← pp1.tp0; 2-3 ← pp1.tp1"
    assert ranks(pairs(((rank, rank // 2) for rank in range(16)), "pp1.tp")) == "2i, 2i+1 ← i of pp1, i = 0-7"
    both = [(f"pp0.tp{rank}", f"pp1.tp{rank}") for rank in range(8)]
    assert ranks(both) == "i of pp0 ← i of pp1, i = 0-7"


def test_labels() -> None:
    assert labels(["0", "1", "2", "7"]) == "0-2, 7"
    assert labels([f"pp{stage}.tp{rank}" for stage in range(2) for rank in range(8)]) == "pp0.tp0-7, pp1.tp0-7"
    assert labels([f"pp{stage}.tp0" for stage in range(9)]) == "pp0.tp0 … pp8.tp0"
    assert labels(["any"]) == "any"
    assert labels(["any", *"abcde"]) == "any … e"
    assert ranks([(str(rank), "any") for rank in range(32)]) == "0-31 ← any"
