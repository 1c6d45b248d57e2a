"""Who reads from whom: golden cases as data (tests/cases/topology.json), and what must hold for any split."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import CacheLayout, Heads, Layer, Refusal, Region, key_only
from kvferry.topology import (
    Share,
    ShareLayer,
    TopologyError,
    digest,
    expected_ack_count,
    kv_heads,
    remote_tp_rank,
    sources,
    targets,
)

CASES = json.loads((Path(__file__).parent.parent / "cases" / "topology.json").read_text())


def layer(name: str, heads: Heads, group: int = 0) -> Layer:
    return Layer(name, group, 0, 0, 1, 1, "uint8", heads, key_only(1, 1))


def cache(*layers: Layer) -> CacheLayout:
    return CacheLayout((Region(0, 1),), layers)


def engine(tp_size: int, total_heads: int, *names: str) -> list[CacheLayout]:
    """All TP ranks of an engine; total_heads 0 stands for a cache that is the same on every rank (MLA)."""

    def heads(rank: int) -> Heads:
        return kv_heads(rank, tp_size, total_heads) if total_heads else Heads(0, 1, 1)

    return [cache(*(layer(name, heads(rank)) for name in names or ("a",))) for rank in range(tp_size)]


def case_name(case: dict[str, Any]) -> str:
    return case["name"]


@pytest.mark.parametrize("case", CASES["kv_heads"], ids=case_name)
def test_kv_heads(case: dict[str, Any]) -> None:
    found = [kv_heads(rank, case["tp_size"], case["total_heads"]) for rank in range(case["tp_size"])]
    assert [list(range(heads.start, heads.start + heads.count)) for heads in found] == case["heads"]
    assert {heads.total for heads in found} == {case["total_heads"]}


@pytest.mark.parametrize("case", CASES["remote_tp_rank"], ids=case_name)
def test_remote_tp_rank(case: dict[str, Any]) -> None:
    found = [remote_tp_rank(rank, case["local"], case["remote"]) for rank in range(case["local"])]
    assert found == case["ranks"]


@pytest.mark.parametrize("case", CASES["remote_tp_rank"], ids=case_name)
def test_sources_of_a_cache_that_is_the_same_on_all_ranks_are_remote_tp_rank(case: dict[str, Any]) -> None:
    consumers, producers = engine(case["local"], 0), engine(case["remote"], 0)
    shares = [sources(one, rank, len(consumers), producers) for rank, one in enumerate(consumers)]
    assert [[share.producer_rank for share in one] for one in shares] == [[rank] for rank in case["ranks"]]


@pytest.mark.parametrize("case", CASES["expected_ack_count"], ids=case_name)
def test_expected_ack_count(case: dict[str, Any]) -> None:
    assert expected_ack_count(case["producer_tp"], case["consumer_tp"]) == case["acks"]


@pytest.mark.parametrize("case", CASES["errors"], ids=case_name)
def test_impossible_numbers_are_named(case: dict[str, Any]) -> None:
    functions = {f.__name__: f for f in (kv_heads, remote_tp_rank, expected_ack_count)}
    with pytest.raises(TopologyError) as error:
        functions[case["call"]](*case["with"])
    for word in case["names"]:
        assert word in str(error.value)


@pytest.mark.parametrize("case", CASES["sources"], ids=case_name)
def test_sources(case: dict[str, Any]) -> None:
    consumers, producers = engine(case["consumer_tp"], case["heads"]), engine(case["producer_tp"], case["heads"])
    for rank, expected in case["shares"].items():
        found = sources(consumers[int(rank)], int(rank), len(consumers), producers)
        assert [[share.producer_rank, part.start, part.stop] for share in found for part in share.layers] == expected


SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("total_heads", [0, 1, 2, 4, 6, 8])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), list(product(SIZES, SIZES)))
def test_all_pairs(producer_tp: int, consumer_tp: int, total_heads: int) -> None:
    """L12: each head of each rank once, from a rank that holds it, and no replica with more than its share."""
    illegal = {tp for tp in (producer_tp, consumer_tp) if total_heads == 6 and tp not in (1, 2)}
    if illegal:
        for tp in illegal:
            with pytest.raises(TopologyError, match=f"tp_size {tp} and total_heads 6"):
                engine(tp, total_heads)
        return
    producers, consumers = engine(producer_tp, total_heads), engine(consumer_tp, total_heads)
    readers: dict[int, Counter[int]] = {}
    for rank, consumer in enumerate(consumers):
        covered = []
        for share in sources(consumer, rank, consumer_tp, producers):
            (part,) = share.layers
            held = producers[share.producer_rank].layers[0].heads
            assert held.start <= part.start < part.stop <= held.start + held.count
            covered.extend(range(part.start, part.stop))
            for head in range(part.start, part.stop):
                readers.setdefault(head, Counter())[share.producer_rank] += 1
        heads = consumer.layers[0].heads
        assert covered == list(range(heads.start, heads.start + heads.count))
    for head, counts in readers.items():
        holders = [p for p in producers if 0 <= head - p.layers[0].heads.start < p.layers[0].heads.count]
        assert max(counts.values()) <= -(-counts.total() // len(holders)), (head, counts)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[CacheLayout], list[CacheLayout]]:
    """(consumer TP size, consumers, producers): several layers, pipeline stages on both sides, TP innermost."""
    totals = draw(st.lists(st.sampled_from((0, 1, 2, 4, 6, 12)), min_size=1, max_size=4))

    def side() -> tuple[int, list[CacheLayout]]:
        legal = [tp for tp in (1, 2, 3, 4, 6, 12) if all(max(t, tp) % min(t, tp) == 0 for t in totals if t)]
        tp_size = draw(st.sampled_from(legal))
        cuts = sorted(draw(st.lists(st.integers(0, len(totals)), max_size=2)))
        stages = zip([0, *cuts], [*cuts, len(totals)], strict=True)
        return tp_size, [
            cache(
                *(
                    layer(f"{i}", kv_heads(rank, tp_size, totals[i]) if totals[i] else Heads(0, 1, 1))
                    for i in range(begin, stop)
                )
            )
            for begin, stop in stages
            for rank in range(tp_size)
        ]

    tp_size, consumers = side()
    return tp_size, consumers, side()[1]


@settings(deadline=None)
@given(splits())
def test_each_head_of_each_layer_comes_once(split: tuple[int, list[CacheLayout], list[CacheLayout]]) -> None:
    tp_size, consumers, producers = split
    for rank, consumer in enumerate(consumers):
        found: list[tuple[str, int]] = []
        shares = sources(consumer, rank % tp_size, tp_size, producers)
        assert [share.producer_rank for share in shares] == sorted({share.producer_rank for share in shares})
        for share in shares:
            held = {one.name: one.heads for one in producers[share.producer_rank].layers}
            for part in share.layers:
                heads = held[part.name]
                assert heads.start <= part.start < part.stop <= heads.start + heads.count
                found.extend((part.name, head) for head in range(part.start, part.stop))
        wanted = [
            (one.name, head)
            for one in consumer.layers
            for head in range(one.heads.start, one.heads.start + one.heads.count)
        ]
        assert sorted(found) == sorted(wanted)


@settings(deadline=None)
@given(splits())
def test_targets_are_the_inverse_of_sources(split: tuple[int, list[CacheLayout], list[CacheLayout]]) -> None:
    tp_size, consumers, producers = split
    read = [
        (share.producer_rank, rank, share)
        for rank, consumer in enumerate(consumers)
        for share in sources(consumer, rank % tp_size, tp_size, producers)
    ]
    written = [
        (producer_rank, rank, share)
        for producer_rank in range(len(producers))
        for rank, share in targets(producer_rank, producers, consumers, tp_size)
    ]
    assert sorted(written, key=lambda one: one[:2]) == sorted(read, key=lambda one: one[:2])


def test_overlapping_intervals_that_are_not_equal() -> None:
    producers = [cache(layer("a", Heads(0, 3, 4))), cache(layer("a", Heads(2, 2, 4)))]
    found = sources(cache(layer("a", Heads(0, 4, 4))), 0, 1, producers)
    assert found == (Share(0, (ShareLayer("a", 0, 3),)), Share(1, (ShareLayer("a", 3, 4),)))


def test_total_heads_that_differ_are_named() -> None:
    with pytest.raises(Refusal, match="layer a: total KV heads: consumer has 4, producer has 8"):
        sources(engine(1, 4)[0], 0, 1, engine(2, 8))


def test_a_head_that_nobody_holds_is_named() -> None:
    with pytest.raises(Refusal, match=r"layer a: KV head: consumer has 2, producer has 0 to 1 .*no producer rank"):
        sources(engine(1, 4)[0], 0, 1, engine(2, 4)[:1])


def test_a_layer_that_nobody_holds_is_named() -> None:
    with pytest.raises(Refusal, match="layer b: KV head: consumer has 0, producer has no such layer"):
        sources(engine(1, 4, "a", "b")[0], 0, 1, engine(1, 4, "a"))


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_engine_is_named(rank: int, size: int) -> None:
    with pytest.raises(TopologyError):
        sources(engine(1, 4)[0], rank, size, engine(1, 4))
    with pytest.raises(TopologyError):
        targets(rank, engine(1, 4) * size, engine(1, 4))


class TestDigest:
    base = tuple(engine(2, 4, "a", "b"))

    def test_is_16_bytes_and_repeatable(self) -> None:
        assert digest(self.base) == digest(engine(2, 4, "a", "b"))
        assert len(digest(self.base)) == 16

    @pytest.mark.parametrize(
        "other",
        [
            engine(2, 4, "a"),
            engine(2, 4, "b", "a"),
            engine(2, 8, "a", "b"),
            engine(4, 4, "a", "b"),
            engine(2, 4, "a", "b")[::-1],
            [cache(layer("a", Heads(0, 2, 4), group=1)), engine(2, 4, "a", "b")[1]],
        ],
        ids=["a layer less", "layers swapped", "more heads", "more ranks", "ranks swapped", "another group"],
    )
    def test_changes_with_what_sources_depends_on(self, other: list[CacheLayout]) -> None:
        assert digest(other) != digest(self.base)

    def test_does_not_change_with_addresses(self) -> None:
        moved = [msgspec.structs.replace(one, regions=(Region(4096, 1),)) for one in self.base]
        assert digest(moved) == digest(self.base)
