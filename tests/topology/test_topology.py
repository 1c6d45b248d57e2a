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

from kvferry.layout import CacheLayout, Context, Heads, Layer, Refusal, Region, key_only
from kvferry.plan import prove_shares
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

ALL = Context()

CASES = json.loads((Path(__file__).parent.parent / "cases" / "topology.json").read_text())


def layer(name: str, heads: Heads, group: int = 0, context: Context = ALL) -> Layer:
    return Layer(name, group, 0, 0, 1, context.period, "uint8", heads, key_only(context.interleave, 1), context)


def cache(*layers: Layer) -> CacheLayout:
    """Layers side by side."""
    apart = [msgspec.structs.replace(layer, base_bytes=64 * i) for i, layer in enumerate(layers)]
    return CacheLayout((Region(0, 64 * len(layers)),), tuple(apart))


def engine(tp_size: int, total_heads: int, *names: str, dcp: tuple[int, int] = (1, 1)) -> list[CacheLayout]:
    """All TP ranks of an engine; total_heads 0 stands for a cache that is the same on every rank (MLA).

    dcp: (ranks of a context, tokens of a run); vLLM takes neighbouring TP ranks for a context.
    """

    def heads(rank: int) -> Heads:
        return kv_heads(rank, tp_size, total_heads) if total_heads else Heads(0, 1, 1)

    return [
        cache(*(layer(name, heads(rank), context=Context(rank % dcp[0], *dcp)) for name in names or ("a",)))
        for rank in range(tp_size)
    ]


def stages(tp_size: int, total_heads: int, *parts: str, dcp: tuple[int, int] = (1, 1)) -> list[CacheLayout]:
    """An engine of several pipeline stages; each part has the names of a stage's layers, one letter each."""
    return [
        rank
        for part in parts
        for rank in (engine(tp_size, total_heads, *part, dcp=dcp) if part else [cache()] * tp_size)
    ]


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


SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 6, 8, 12)


def legal(tp_size: int, total_heads: int) -> bool:
    return not total_heads or max(tp_size, total_heads) % min(tp_size, total_heads) == 0


def check_dealing(tp_size: int, consumers: list[CacheLayout], producers: list[CacheLayout]) -> None:
    """The promises of `sources` for a whole engine: each head and token comes once, from a rank that holds it; and over
    the ranks that hold the same, loads differ by at most one consumer rank. And `targets` is the inverse."""
    load: dict[tuple[str, int, Context], Counter[int]] = {}
    read: list[tuple[int, int, Share]] = []
    for rank, consumer in enumerate(consumers):
        shares = sources(consumer, rank % tp_size, tp_size, producers)
        prove_shares(consumer, [(share, producers[share.producer_rank]) for share in shares])
        read += [(share.producer_rank, rank, share) for share in shares]
        for share in shares:
            held = {one.name: one for one in producers[share.producer_rank].layers}
            for part in share.layers:
                for head in range(part.start, part.stop):
                    kind = (part.name, head, held[part.name].context)
                    load.setdefault(kind, Counter())[share.producer_rank] += 1
    for (name, head, context), counts in load.items():
        holders = [rank for rank, one in enumerate(producers) for its in one.layers if has(its, name, head, context)]
        loads = [counts[rank] for rank in holders]
        assert max(loads) - min(loads) <= 1, (name, head, context, counts)
    written = [
        (producer_rank, rank, share)
        for producer_rank in range(len(producers))
        for rank, share in targets(producer_rank, producers, consumers, tp_size)
    ]
    assert sorted(written, key=lambda one: one[:2]) == sorted(read, key=lambda one: one[:2])


def has(its: Layer, name: str, head: int, context: Context) -> bool:
    return its.name == name and its.context == context and 0 <= head - its.heads.start < its.heads.count


@pytest.mark.parametrize("total_heads", [0, *HEADS])
@pytest.mark.parametrize("producer_tp", SIZES)
def test_all_pairs(producer_tp: int, total_heads: int) -> None:
    """L12: every legal TP size to every other, both ways; what is not legal is refused by name."""
    if not legal(producer_tp, total_heads):
        with pytest.raises(TopologyError, match=f"tp_size {producer_tp} and total_heads {total_heads}"):
            engine(producer_tp, total_heads)
        return
    producers = engine(producer_tp, total_heads)
    for consumer_tp in SIZES:
        if legal(consumer_tp, total_heads):
            check_dealing(consumer_tp, engine(consumer_tp, total_heads), producers)


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), list(product(SIZES, SIZES)))
def test_a_cache_that_is_the_same_on_all_ranks_comes_from_one(producer_tp: int, consumer_tp: int) -> None:
    """And each producer rank serves as many consumer ranks as any other, or one more."""
    consumers, producers = engine(consumer_tp, 0), engine(producer_tp, 0)
    found = [sources(one, rank, consumer_tp, producers) for rank, one in enumerate(consumers)]
    assert {len(shares) for shares in found} == {1}
    served = Counter(share.producer_rank for (share,) in found)
    assert set(served.values()) <= {consumer_tp // producer_tp, -(-consumer_tp // producer_tp)}


@pytest.mark.parametrize("total_heads", [0, 2, 4, 6])
@pytest.mark.parametrize("parts", [("abcde",), ("ab", "cde"), ("a", "bcd", "e"), ("", "abcd", "e")])
def test_pipeline_stages(parts: tuple[str, ...], total_heads: int) -> None:
    """Unequal ones, on either side or both; layers are matched by name."""
    for producer_tp, consumer_tp in product((1, 2, 4, 6), repeat=2):
        if legal(producer_tp, total_heads) and legal(consumer_tp, total_heads):
            consumers = stages(consumer_tp, total_heads, *parts)
            for others in (("abcde",), ("abc", "de"), ("edcba",), ("d", "a", "cbe")):
                check_dealing(consumer_tp, consumers, stages(producer_tp, total_heads, *others))


CONTEXTS = [(tp, size) for tp in (1, 2, 4, 6, 8) for size in (1, 2, 3, 4) if tp % size == 0]


@pytest.mark.parametrize(("producer_tp", "producer_dcp"), CONTEXTS)
def test_contexts(producer_tp: int, producer_dcp: int) -> None:
    """N ranks to M ranks that share out tokens, with replicas on either side; runs alike or not."""
    for consumer_tp, consumer_dcp in CONTEXTS:
        for ours, theirs in ((1, 1), (1, 16), (6, 4)):
            consumers = engine(consumer_tp, 0, dcp=(consumer_dcp, ours))
            check_dealing(consumer_tp, consumers, engine(producer_tp, 0, dcp=(producer_dcp, theirs)))


@pytest.mark.parametrize("total_heads", [1, 2, 3])
def test_contexts_of_heads_and_stages(total_heads: int) -> None:
    """Ranks with the same head share out its tokens."""
    shapes = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 1), (6, 2), (12, 2), (12, 4)]
    legals = [(tp, dcp) for tp, dcp in shapes if legal(tp, total_heads) and max(1, tp // total_heads) % dcp == 0]
    for (consumer_tp, ours), (producer_tp, theirs) in product(legals, legals):
        consumers = stages(consumer_tp, total_heads, "ab", "c", dcp=(ours, 2))
        check_dealing(consumer_tp, consumers, stages(producer_tp, total_heads, "a", "bc", dcp=(theirs, 2)))


@pytest.mark.parametrize("case", CASES["contexts"], ids=case_name)
def test_sources_of_contexts(case: dict[str, Any]) -> None:
    consumers = engine(case["consumer"][0], 0, dcp=(case["consumer"][1], 1))
    producers = engine(case["producer"][0], 0, dcp=(case["producer"][1], 1))
    found = [sources(one, rank, len(consumers), producers) for rank, one in enumerate(consumers)]
    assert [[share.producer_rank for share in shares] for shares in found] == case["ranks"]


def test_contexts_without_a_common_token_are_named() -> None:
    with pytest.raises(Refusal, match=r"layer a: context: .*rank=1, size=2.*rank=0, size=2.*no token in common"):
        sources(engine(2, 0, dcp=(2, 1))[1], 1, 2, engine(2, 0, dcp=(2, 1))[:1])


@pytest.mark.parametrize(
    "bad", [Context(0, 0, 1), Context(2, 2, 1), Context(-1, 2, 1), Context(0, 2, 0), Context(0, 2, -1)]
)
def test_a_context_that_cannot_be_is_named(bad: Context) -> None:
    """Peers' layouts come here before they are checked."""
    theirs = Layer("a", 0, 0, 0, 1, 1, "uint8", Heads(0, 1, 1), key_only(1, 1), bad)
    with pytest.raises(Refusal, match=r"layer a: context: .*no such rank"):
        sources(engine(1, 0)[0], 0, 1, [cache(theirs)])


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[CacheLayout], list[CacheLayout]]:
    """(consumer TP size, consumers, producers): layers with different heads, stages on both sides, TP innermost."""
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
def test_any_split(split: tuple[int, list[CacheLayout], list[CacheLayout]]) -> None:
    check_dealing(*split)


def test_overlapping_intervals_that_are_not_equal() -> None:
    producers = [cache(layer("a", Heads(0, 3, 4))), cache(layer("a", Heads(2, 2, 4)))]
    found = sources(cache(layer("a", Heads(0, 4, 4))), 0, 1, producers)
    assert found == (Share(0, (ShareLayer("a", 0, 3),)), Share(1, (ShareLayer("a", 3, 4),)))


def test_total_heads_that_differ_are_named() -> None:
    with pytest.raises(Refusal, match="layer a: total KV heads: consumer has 4, producer has 8"):
        sources(engine(1, 4)[0], 0, 1, engine(2, 8))


def test_a_head_that_nobody_holds_is_named() -> None:
    with pytest.raises(Refusal, match=r"layer a: consumer has KV head 2, producer has KV heads 0 to 1$"):
        sources(engine(1, 4)[0], 0, 1, engine(2, 4)[:1])


def test_a_layer_that_nobody_holds_is_named() -> None:
    with pytest.raises(Refusal, match=r"layer b: consumer has KV head 0, producer has no such layer$"):
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
            engine(2, 4, "a", "b", dcp=(2, 1)),
        ],
        ids=[
            "a layer less",
            "layers swapped",
            "more heads",
            "more ranks",
            "ranks swapped",
            "another group",
            "contexts",
        ],
    )
    def test_changes_with_what_sources_depends_on(self, other: list[CacheLayout]) -> None:
        assert digest(other) != digest(self.base)

    def test_changes_with_the_ranks_and_the_runs_of_a_context(self) -> None:
        found = {digest(engine(4, 0, dcp=dcp)) for dcp in ((1, 1), (2, 1), (2, 4), (4, 1))}
        assert len(found) == 4

    def test_does_not_change_with_addresses(self) -> None:
        moved = [msgspec.structs.replace(one, regions=(Region(4096, 1),)) for one in self.base]
        assert digest(moved) == digest(self.base)
