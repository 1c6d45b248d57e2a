"""A plan that was tampered with in any way does not pass its proof, and neither do shares that cover a head twice."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from drawn import Situation, situations
from golden import tables
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.layout import CacheLayout, Heads, Layer, Region, key_only
from kvferry.plan import PlanBatch, Refusal, TransferPlan, Unproven, compile, prove_shares
from kvferry.plan.boxes import Ints
from kvferry.plan.proof import Sums, prove, sums_of_point, sums_of_points, sums_of_runs
from kvferry.topology import Share, ShareLayer, kv_heads, sources

Columns = tuple[Ints, Ints, Ints]


def shift_consumer(columns: Columns, i: int, by: int) -> Columns:
    columns[0][i] += by
    return columns


def shift_producer(columns: Columns, i: int, by: int) -> Columns:
    columns[1][i] += by
    return columns


def shift_both(columns: Columns, i: int, by: int) -> Columns:
    return shift_producer(shift_consumer(columns, i, by), i, by)


def lengthen(columns: Columns, i: int, by: int) -> Columns:
    columns[2][i] += by
    return columns


def drop(columns: Columns, i: int, by: int) -> Columns:
    c, p, n = (np.delete(column, i) for column in columns)
    return c, p, n


def double(columns: Columns, i: int, by: int) -> Columns:
    c, p, n = (np.append(column, column[i]) for column in columns)
    return c, p, n


def exchange_sources(columns: Columns, i: int, by: int) -> Columns:
    j = (i + abs(by)) % len(columns[1])
    assume(columns[1][i] != columns[1][j])
    columns[1][[i, j]] = columns[1][[j, i]]
    return columns


TAMPERINGS = [shift_consumer, shift_producer, shift_both, lengthen, drop, double, exchange_sources]


def first_plan(situation: Situation) -> tuple[TransferPlan, Callable[[TransferPlan], None]]:
    """The plan of the first share of the first consumer rank, and a function that proves a plan in its place."""
    consumer, producer, tokens = situation
    layout = consumer.layouts[0]
    shares = sources(layout, 0, consumer.tp_size, producer.layouts)
    assume(shares)
    pair = compile(layout, producer.layouts[shares[0].producer_rank], shares[0])
    request = tables(consumer.tables), tables(producer.tables)
    plan = pair.bind(*request, *tokens)
    assume(plan.batches)
    block_ids = tuple([table.block_ids for table in side] for side in request)
    return plan, lambda other: prove(pair.claims, pair.region_bytes, block_ids, tokens[0], other)


@settings(max_examples=80)
@given(situations(), st.sampled_from(TAMPERINGS), st.data())
def test_tampering_is_found(situation: Situation, tamper: Callable[..., Columns], data: st.DataObject) -> None:
    plan, proof = first_plan(situation)
    proof(plan)
    index = data.draw(st.integers(0, len(plan.batches) - 1))
    batch = plan.batches[index]
    at = data.draw(st.integers(0, len(batch.lengths) - 1))
    by = data.draw(st.integers(-64, 64).filter(bool))
    columns = tamper(tuple(column.copy() for column in batch[2:]), at, by)
    tampered = PlanBatch(batch.consumer_region, batch.producer_region, *columns)
    rest = [*plan.batches[:index], *([tampered] if len(columns[0]) else []), *plan.batches[index + 1 :]]
    with pytest.raises(Unproven):
        proof(plan._replace(batches=tuple(rest)))


def test_a_write_outside_a_region_is_named() -> None:
    plan, proof = plain_plan()
    (batch,) = plan.batches
    far = batch._replace(producer_offsets=batch.producer_offsets + 1000)
    with pytest.raises(Unproven, match="bounds of producer region 0"):
        proof(plan._replace(batches=(far,)))


def test_a_byte_written_twice_is_named() -> None:
    plan, proof = plain_plan()
    with pytest.raises(Unproven, match="destination in region 0 written twice"):
        proof(plan._replace(batches=plan.batches * 2))


def test_a_region_that_is_left_out_is_named() -> None:
    plan, proof = plain_plan()
    with pytest.raises(Unproven, match="coverage"):
        proof(plan._replace(batches=()))


def plain_plan() -> tuple[TransferPlan, Callable[[TransferPlan], None]]:
    layer = Layer("a", 0, 0, 0, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2))
    layout = CacheLayout((Region(0, 32),), (layer,))
    pair = compile(layout, layout, Share(0, (ShareLayer("a", 0, 1),)))
    plan = pair.bind(tables([[0, 3]]), tables([[1, 2]]), 0, 8)
    ids = [np.array([0, 3])], [np.array([1, 2])]
    return plan, lambda other: prove(pair.claims, pair.region_bytes, ids, 0, other)


def test_overlapping_blocks_of_two_groups_are_refused() -> None:
    """Groups that share memory, as vLLM's do, and one id in both: the second write would land on the first."""
    layers = tuple(Layer(f"{g}", g, 0, 0, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2)) for g in range(2))
    layout = CacheLayout((Region(0, 32),), layers)
    pair = compile(layout, layout, Share(0, tuple(ShareLayer(f"{g}", 0, 1) for g in range(2))))
    pair.bind(tables([[1], [2]]), tables([[1], [1]]), 0, 4)
    with pytest.raises(Refusal, match="destination in region 0 written twice"):
        pair.bind(tables([[1], [1]]), tables([[1], [2]]), 0, 4)


points = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=4)


def slow_sums(pairs: list[tuple[int, int]]) -> Sums:
    rows = [(0, 0, 0, 0), *((1, c, p - c, c * (p - c)) for c, p in pairs)]
    return Sums(*(sum(column) % 2**64 for column in zip(*rows, strict=True)))


@given(points, points)
def test_sums_of_points_and_of_their_sums(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def fast(pairs: list[tuple[int, int]]) -> Sums:
        return sums_of_points(*(np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1)))

    assert fast(left) == slow_sums(left)
    assert fast(left).plus(fast(right)) == slow_sums(left + right)
    both = [(a + c, b + d) for a, b in left for c, d in right]
    assert fast(left).times(fast(right)) == slow_sums(both)
    for point in left:
        assert sums_of_point(*point) == slow_sums([point])


@given(st.lists(st.tuples(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(1, 9)), max_size=4))
def test_sums_of_runs_are_sums_over_their_bytes(runs: list[tuple[int, int, int]]) -> None:
    columns = [np.array([run[i] for run in runs], np.int64) for i in range(3)]
    assert sums_of_runs(*columns) == slow_sums([(c + j, p + j) for c, p, n in runs for j in range(n)])


def cache(*heads: Heads) -> CacheLayout:
    layers = tuple(Layer(f"{i}", 0, 0, 0, 1, 1, "x", one, key_only(1, 1)) for i, one in enumerate(heads))
    return CacheLayout((Region(0, 1),), layers)


class TestShares:
    consumer = cache(Heads(0, 4, 4), Heads(0, 4, 4))
    producers = tuple(cache(*[kv_heads(rank, 2, 4)] * 2) for rank in range(2))

    def shares(self) -> list[tuple[Share, CacheLayout]]:
        found = sources(self.consumer, 0, 1, self.producers)
        return [(share, self.producers[share.producer_rank]) for share in found]

    def test_sources_pass(self) -> None:
        prove_shares(self.consumer, self.shares())

    def test_a_missing_share(self) -> None:
        with pytest.raises(
            Unproven, match=r"layer 0: heads covered: consumer has \[0, 1, 2, 3\], producer has \[0, 1\]"
        ):
            prove_shares(self.consumer, self.shares()[:1])

    def test_a_doubled_share(self) -> None:
        with pytest.raises(Unproven, match="heads covered"):
            prove_shares(self.consumer, [*self.shares(), self.shares()[0]])

    def test_a_share_of_another_ranks_heads(self) -> None:
        (first, layout), second = self.shares()
        other = msgspec.structs.replace(first, layers=second[0].layers)
        with pytest.raises(Unproven, match="layer 0: heads 2 to 4"):
            prove_shares(self.consumer, [(other, layout), second])

    def test_a_layer_that_nobody_asked_for(self) -> None:
        with pytest.raises(Unproven, match="layers covered"):
            prove_shares(cache(Heads(0, 4, 4)), self.shares())
