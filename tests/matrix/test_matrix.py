"""The matrix: combinations of splits and layouts between two real processes, byte by byte; a chosen few by default.

`make matrix` runs all of them too, and writes docs/matrix.md, which is compared here.
"""

from __future__ import annotations

import ast
import functools
import os
import signal
from itertools import product
from pathlib import Path

import pytest
from kvmatrix import document, wording
from kvmatrix.combination import Combination
from kvmatrix.combinations import BY_NAME, CHOSEN, COMBINATIONS, HEADS, OVER_NIXL, TP_SIZES, legal
from kvmatrix.driver import Outcome, Pair
from kvmatrix.plants import BLOCKS_PLANT, CONSUMER_PLANTS, PRODUCER_PLANTS
from kvmatrix.real_vllm import REAL_VLLM

from kvferry.topology import TopologyError, kv_heads

ROOT = Path(__file__).parents[2]


@functools.cache
def published() -> dict[str, str]:
    """The results in docs/matrix.md. Raises Outdated if it is about other combinations."""
    return document.read(document.PATH.read_text())


def run_as_published(pair: Pair, combination: Combination) -> None:
    outcome = pair.run(combination)
    assert not outcome.wrong, outcome.wrong
    assert document.told(outcome) == published()[combination.name], "docs/matrix.md differs: run `make matrix`"


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_combination(pair: Pair, name: str) -> None:
    run_as_published(pair, BY_NAME[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in CHOSEN])
def test_every_other_combination(pair: Pair, name: str) -> None:
    run_as_published(pair, BY_NAME[name])


PLANTED = ("splits of 4 heads: 1 to 2", "layouts: cpu to 2BNHD", "states: GDN, SD to DS, TP 1 to 2")


@pytest.mark.parametrize("plant", [*CONSUMER_PLANTS, *PRODUCER_PLANTS, BLOCKS_PLANT])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(pair: Pair, name: str, plant: str) -> None:
    outcome = pair.run(BY_NAME[name], plant)
    assert outcome.result == "ok", "the transfer itself succeeds"
    assert outcome.wrong.startswith("rank ")


def test_bytes_that_come_with_a_refusal_are_found(pair: Pair) -> None:
    outcome = pair.run(BY_NAME["refused: head size"], "a required byte is flipped")
    assert "outside what was asked for" in outcome.wrong


def test_what_succeeds_where_a_refusal_is_due_is_found(pair: Pair) -> None:
    fitting = BY_NAME["layouts: cpu to cpu"]
    due = Combination(fitting.name, fitting.producer, fitting.consumer, fitting.first, fitting.end, refused=("model",))
    assert "it was not refused" in pair.run(due).wrong


def test_nothing_is_left_of_engines(pair: Pair) -> None:
    names = ("layouts: cpu to 2BNHD", "splits of 8 heads: 8 to 4", "refused: model")
    pair.run(BY_NAME[names[0]])
    before = pair.left()
    for name in names:
        pair.run(BY_NAME[name])
    assert pair.left() == before
    assert {one["threads"] for one in before.values()} == {1}


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_process_that_dies_is_told_and_replaced(role: str) -> None:
    combination = BY_NAME["layouts: cpu to cpu"]
    with Pair() as pair:
        pids = [pair.pid(one) for one in ("producer", "consumer")]
        os.kill(pair.pid(role), signal.SIGKILL)
        outcome = pair.run(combination)
        assert outcome.result == "failed"
        assert outcome.wrong.startswith(role)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not pair.run(combination).wrong


def test_a_process_that_hangs_is_ended_with_the_other() -> None:
    with Pair(patience_s=0.5) as pair:
        pids = [pair.pid(one) for one in ("producer", "consumer")]
        os.kill(pids[0], signal.SIGSTOP)
        outcome = pair.run(BY_NAME["layouts: cpu to cpu"])
        assert "no answer within 0.5 s" in outcome.wrong
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_document_has_a_result_for_every_combination() -> None:
    results = published()
    assert set(results) == set(BY_NAME)
    assert all(results.values())
    refused = {one.name for one in COMBINATIONS if one.refused}
    assert {name for name, result in results.items() if result.startswith("refused: ")} == refused


def test_a_document_about_other_combinations_is_noticed() -> None:
    text = document.write({one.name: Outcome(1, 2, "ok") for one in COMBINATIONS})
    assert set(document.read(text).values()) == {"1 / 2"}
    lines = text.splitlines(keepends=True)
    row = next(index for index, line in enumerate(lines) if line.startswith("| a full block |"))
    for other in (lines[:row] + lines[row + 1 :], [*lines, "more\n"], lines[:-1]):
        with pytest.raises(document.Outdated):
            document.read("".join(other))
    with pytest.raises(document.Outdated, match="TP 2, blocks of 8"):
        document.read(text.replace("| a full block | TP 2, blocks of 4", "| a full block | TP 2, blocks of 8"))


def test_the_table_is_as_large_as_it_claims() -> None:
    assert len(BY_NAME) == len(COMBINATIONS), "names are unique"
    assert len(COMBINATIONS) - len(OVER_NIXL) >= 200
    assert len(OVER_NIXL) >= 40
    for heads, tp in product(HEADS, TP_SIZES):
        try:
            kv_heads(0, tp, heads)
        except TopologyError:
            assert not legal(heads, tp)
        else:
            assert legal(heads, tp)


def test_only_what_real_vllm_ran_is_bold() -> None:
    text = document.write({one.name: Outcome(1, 2, "ok") for one in COMBINATIONS})
    bold = {}
    for section in text.partition("## Splits")[2].partition("## Layouts")[0].split("### ")[1:]:
        bold[section.splitlines()[0]] = section.count("**1 / 2**")
    heads = {"1 KV head": 0, "2 KV heads": 1, "3 KV heads": 0, "4 KV heads": 3, "No heads": 1}
    assert bold == {**dict.fromkeys(bold, 0), **heads}


def test_tokens_are_written_with_both_ends() -> None:
    told = {one.name: wording.tokens(one) for one in BY_NAME.values()}
    assert told["requests: one token"] == "0 to 0"
    assert told["requests: a hit of whole blocks"] == "4 to 11"
    assert told["requests: a full hit: nothing moves"] == "none"


@pytest.mark.parametrize("test", [one.test for one in REAL_VLLM])
def test_a_test_with_real_vllm_that_the_document_names_exists(test: str) -> None:
    file, *names = test.partition("[")[0].split("::")
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for name in names:
        found = [one for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name]
        assert found, f"{file} has no {name}"
        body = found[0].body
