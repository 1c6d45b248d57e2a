"""Numbers, ranks, layers and heads in few words."""

from __future__ import annotations

import pytest

from kvferry.cli.plan import words
from kvferry.topology import ShareLayer


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (44.7, "44.7 B"),
        (1024, "1 KiB"),
        (1152, "1.12 KiB"),
        (1.25 * 1024**2, "1.25 MiB"),
        (1.5 * 1024**2, "1.5 MiB"),
        (10.25 * 1024, "10.2 KiB"),
        (200.5 * 1024, "200 KiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert words.size(count) == text


def test_the_length_of_descriptors() -> None:
    assert words.sizes(512, 512) == "512 B"
    assert words.sizes(2, 8192) == "2 B to 8 KiB"


def test_counts() -> None:
    assert (words.count(1, "block"), words.count(1024, "block")) == ("1 block", "1,024 blocks")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), (range(32), "0-31"), ([3], "3"), ([0, 1, 4, 5], "0-1, 4-5"), (range(0, 60, 6), "10 of 0-54")],
)
def test_layers(numbers: list[int], text: str) -> None:
    assert words.layers([f"model.layers.{number}.self_attn.attn" for number in numbers]) == text


def test_layers_with_names_of_their_own() -> None:
    assert words.layers(["A", "B"]) == "A, B"
    assert words.layers(list("ABCDEF")) == "A, B, C, D and 2 more"


def test_heads_of_a_state_are_those_of_its_last_part() -> None:
    assert words.heads([ShareLayer("x/conv.b", 0, 1), ShareLayer("x/ssm", 8, 16)]) == "8-15"


def test_layers_are_sorted_by_number() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "A"]
    assert sorted(names, key=words.in_order) == ["A", "model.layers.9.attn", "model.layers.10.attn"]
