"""A plan that was tampered with in any way does not pass its proof, and neither do shares that cover a head twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from drawn import Situation, situations
from golden import tables
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.layout import Axis, CacheLayout, Context, Heads, Layer, Region, key_only
from kvferry.plan import PlanBatch, Refusal, TransferPlan, Unproven, compile, prove_shares
from kvferry.plan.boxes import Digits, Ints
from kvferry.plan.proof import (
    ClaimKey,
    Sums,
    TokenWalk,
    _sums_of_each,
    _sums_of_tokens,
    prove,
    sums_of_point,
    sums_of_points,
    sums_of_runs,
)
from kvferry.plan.units import Selection
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
    return plan, lambda other: prove(pair.claims, pair.region_bytes, block_ids, tokens, other)


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
    return plan, lambda other: prove(pair.claims, pair.region_bytes, ids, (0, 8), other)


def test_overlapping_blocks_of_two_groups_are_refused() -> None:
    """Groups that share memory, as vLLM's do, and one id in both: the second write would land on the first."""
    layers = tuple(Layer(f"{g}", g, 0, 0, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2)) for g in range(2))
    layout = CacheLayout((Region(0, 32),), layers)
    pair = compile(layout, layout, Share(0, tuple(ShareLayer(f"{g}", 0, 1) for g in range(2))))
    pair.bind(tables([[1], [2]]), tables([[1], [1]]), 0, 4)
    with pytest.raises(Refusal, match="destination in region 0 written twice"):
        pair.bind(tables([[1], [1]]), tables([[1], [2]]), 0, 4)


def dealt(context: Context) -> CacheLayout:
    """Three blocks of 8 tokens of each rank, 2 bytes a token."""
    made = Layer("a", 0, 0, 0, 3, 8 * context.size, "x", Heads(0, 1, 1), key_only(8, 2), context)
    return CacheLayout((Region(0, 48),), (made,))


def rank_below(number: Digits) -> Digits:
    """The digits as another rank of the context would have them."""
    return tuple(digit if digit.only is None else digit._replace(only=digit.only - 1) for digit in number)


class TestContexts:
    """Runs of 4 tokens dealt to 4 ranks, of which this is the second, to a side that has all."""

    pair = compile(dealt(Context()), dealt(Context(1, 4, 4)), Share(0, (ShareLayer("a", 0, 1),)))
    tables = tables([[0, 1, 2]]), tables([[1]])

    def bind_with(self, **changes: object) -> TransferPlan:
        (unit,) = self.pair.units
        return replace(self.pair, units=(replace(unit, _cuts={}, _stops={}, **changes),)).bind(*self.tables, 0, 24)

    def test_the_selection_is_right(self) -> None:
        assert self.bind_with().num_bytes == 2 * 8

    def test_chunks_of_other_ranks_are_found(self) -> None:
        with pytest.raises(Unproven, match="coverage"):
            self.bind_with(selection=Selection((), ()))

    def test_chunks_of_another_rank_are_found(self) -> None:
        selection = self.pair.units[0].selection
        with pytest.raises(Unproven, match="coverage"):
            self.bind_with(selection=selection._replace(producer=rank_below(selection.producer)))

    def test_tokens_of_another_rank_are_found(self) -> None:
        """With runs of one token a chunk has tokens of all ranks."""
        pair = compile(dealt(Context()), dealt(Context(1, 2, 1)), Share(0, (ShareLayer("a", 0, 1),)))
        (unit,) = pair.units
        (field,) = unit.fields
        wrong = field._replace(producer_tokens=rank_below(field.producer_tokens))
        with pytest.raises(Unproven, match="coverage"):
            replace(pair, units=(replace(unit, fields=(wrong,), _cuts={}),)).bind(*self.tables, 0, 16)

    def test_a_token_at_its_number_over_all_ranks_is_found(self) -> None:
        """As if the producer's ranks did not share out the tokens."""
        whole = compile(dealt(Context()), dealt(Context()), Share(0, (ShareLayer("a", 0, 1),)))
        with pytest.raises(Unproven, match="coverage"):
            self.bind_with(fields=whole.units[0].fields)


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


@st.composite
def walks(draw: st.DrawFn) -> TokenWalk:
    """Blocks of rows of 2 bytes; whole runs of a context."""
    context = draw(st.sampled_from([Context(), *(Context(rank, 2, run) for rank in range(2) for run in (1, 2))]))
    local = context.interleave * draw(st.integers(1, 3))
    return TokenWalk(local * context.size, 2 * local + 3, (Axis("token", local, 1, 2),), context)


@given(walks(), walks(), st.data())
def test_tokens_taken_together_are_as_token_by_token(left: TokenWalk, right: TokenWalk, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, 100))
    first = data.draw(st.integers(0, stop))
    ids = [np.array(data.draw(st.permutations(range(-(-stop // walk.block_size)))), np.int64) for walk in (left, right)]
    missing = data.draw(st.lists(st.booleans(), min_size=len(ids[0]), max_size=len(ids[0])))
    ids[0][np.array(missing, np.bool_)] = -1
    key = ClaimKey(0, 0, 0, 0, 1, left, right)
    assert _sums_of_tokens(key, *ids, first, stop) == _sums_of_each(key, *ids, first, stop)


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
        text = r"layer 0, head 0: times that a token is covered: consumer has \[1\], producer has \[2\]"
        with pytest.raises(Unproven, match=text):
            prove_shares(self.consumer, [*self.shares(), self.shares()[0]])

    def test_a_share_of_another_ranks_heads(self) -> None:
        (first, layout), second = self.shares()
        other = msgspec.structs.replace(first, layers=second[0].layers)
        with pytest.raises(Unproven, match="layer 0: heads 2 to 4"):
            prove_shares(self.consumer, [(other, layout), second])

    def test_a_layer_that_nobody_asked_for(self) -> None:
        with pytest.raises(Unproven, match="layers covered"):
            prove_shares(cache(Heads(0, 4, 4)), self.shares())


class TestSharesOfContexts:
    """A consumer with all tokens, and four producer ranks that share them out in pairs."""

    consumer = dealt(Context())
    producers = tuple(dealt(Context(rank % 2, 2, 4)) for rank in range(4))
    part = (ShareLayer("a", 0, 1),)

    def prove(self, *ranks: int) -> None:
        prove_shares(self.consumer, [(Share(rank, self.part), self.producers[rank]) for rank in ranks])

    def test_sources_pass(self) -> None:
        found = sources(self.consumer, 0, 1, self.producers)
        self.prove(*(share.producer_rank for share in found))
        self.prove(0, 3)

    @pytest.mark.parametrize(
        ("ranks", "times"), [((0,), "[0, 1]"), ((1, 3), "[0, 2]"), ((0, 1, 2), "[1, 2]"), ((0, 1, 2, 3), "[2]")]
    )
    def test_tokens_that_are_missing_or_come_twice(self, ranks: tuple[int, ...], times: str) -> None:
        text = f"layer a, head 0: times that a token is covered: consumer has [1], producer has {times}"
        with pytest.raises(Unproven, match=re.escape(text)):
            self.prove(*ranks)

    def test_only_the_consumers_own_tokens_count(self) -> None:
        own = dealt(Context(1, 4, 4))
        prove_shares(own, [(Share(0, self.part), self.producers[1])])
        with pytest.raises(Unproven, match=re.escape("consumer has [1], producer has [0]")):
            prove_shares(own, [(Share(0, self.part), self.producers[0])])

    def test_runs_that_do_not_divide(self) -> None:
        """Tokens 0 to 3 of 8, from ranks with 3 of 6: some lie with either."""
        own = dealt(Context(0, 2, 4))
        shares = [(Share(rank, self.part), dealt(Context(rank, 2, 3))) for rank in range(2)]
        prove_shares(own, shares)
        with pytest.raises(Unproven, match=re.escape("consumer has [1], producer has [0, 1]")):
            prove_shares(own, shares[:1])

    def test_contexts_that_take_too_long_to_repeat(self) -> None:
        far = dealt(Context(0, 2, 1 << 21 | 1))
        with pytest.raises(
            Unproven, match=r"layer a: tokens after which contexts repeat: .*at most 4194304 for 1 producer"
        ):
            prove_shares(self.consumer, [(Share(0, self.part), far)])
