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

from kvferry.layout import Axis, CacheLayout, Context, Heads, Layer, Region, key_only, separated
from kvferry.plan import PlanBatch, Refusal, TransferPlan, Unproven, compile, prove_shares, prove_together
from kvferry.plan.boxes import Digits, Ints
from kvferry.plan.proof import ClaimKey, TokenWalk, _sums_of_each, _sums_of_tokens, prove
from kvferry.plan.sums import PRIME, Sums, print_of, sums_of_copies, sums_of_point, sums_of_points, sums_of_runs
from kvferry.plan.units import Selection
from kvferry.topology import Share, ShareLayer, kv_heads, sources

Columns = tuple[Ints, Ints, Ints]
change = msgspec.structs.replace


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


def block_moves(producer_ids: list[int]) -> tuple[TransferPlan, Callable[[TransferPlan], None]]:
    """Keys and values of as many blocks, 64 bytes each, none beside another; and a function that proves a plan."""
    fields = separated(40, 4, 1, 8, 2)
    layout = CacheLayout((Region(0, 1 << 13),), (Layer("a", 0, 0, 0, 40, 4, "x", Heads(0, 1, 1), fields),))
    pair = compile(layout, layout, Share(0, (ShareLayer("a", 0, 1),)))
    ids = [[2 * i + 1 for i in range(len(producer_ids))]], [producer_ids]
    tokens = (0, 4 * len(producer_ids))
    plan = pair.bind(tables(ids[0]), tables(ids[1]), *tokens)
    assert plan.num_descriptors == 2 * len(producer_ids)
    arrays = tuple([np.array(one) for one in side] for side in ids)
    return plan, lambda other: prove(pair.claims, pair.region_bytes, arrays, tokens, other)


def with_sources(plan: TransferPlan, offsets: Ints) -> TransferPlan:
    (batch,) = plan.batches
    return plan._replace(batches=(batch._replace(producer_offsets=offsets),))


@pytest.mark.parametrize(
    "pattern",
    [
        [1, -2, 1],
        [1, -3, 3, -1],
        [1, -1, 0, -1, 1],
        [1, -1, -1, 1, -1, 1, 1, -1],  # leaves every moment up to the third as it is
        [1, -6, 15, -20, 15, -6, 1],
    ],
)
@pytest.mark.parametrize("unit", [1, 64])
def test_patterns_that_leave_sums_as_they_are(pattern: list[int], unit: int) -> None:
    """Sources that are wrong by amounts whose sum is 0, weighted by the place as well."""
    plan, proof = block_moves([18, 15, 20, 25, 22, 27, 17, 23])
    offsets = plan.batches[0].producer_offsets.copy()
    offsets[: len(pattern)] += np.array(pattern) * unit
    with pytest.raises(Unproven, match="coverage"):
        proof(with_sources(plan, offsets))


def test_two_exchanges_that_make_up_for_one_another() -> None:
    plan, proof = block_moves([9, 10, 21, 20])
    offsets = plan.batches[0].producer_offsets.copy()
    offsets[:4] = offsets[[1, 0, 3, 2]]
    with pytest.raises(Unproven, match="coverage"):
        proof(with_sources(plan, offsets))


def test_exchanges_of_all_layers_alike() -> None:
    """Layers are summed as copies of one another; what is wrong in all of them, or in one, is still seen."""
    layers = tuple(
        Layer(f"{i}", 0, 0, 4096 * (7 - i), 8, 4, "x", Heads(0, 1, 1), separated(8, 4, 1, 8, 2)) for i in range(8)
    )
    layout = CacheLayout((Region(0, 1 << 15),), layers)
    pair = compile(layout, layout, Share(0, tuple(ShareLayer(one.name, 0, 1) for one in layers)))
    ids = [np.array([1, 3, 5, 7])], [np.array([4, 3, 2, 6])]
    plan = pair.bind(tables([[1, 3, 5, 7]]), tables([[4, 3, 2, 6]]), 0, 16)
    (batch,) = plan.batches
    assert len(plan.slices) == 8
    prove(pair.claims, pair.region_bytes, ids, (0, 16), plan)
    rows = batch.producer_offsets.reshape(8, -1)
    everywhere, in_one = rows.copy(), rows.copy()
    everywhere[:, :3] += [64, -128, 64]
    in_one[3, :3] += [64, -128, 64]
    for wrong in (everywhere, in_one, rows[[1, 0, *range(2, 8)]]):
        with pytest.raises(Unproven, match="coverage"):
            prove(pair.claims, pair.region_bytes, ids, (0, 16), with_sources(plan, wrong.ravel()))


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


def test_sources_that_write_the_same_blocks_are_refused() -> None:
    """Each of the two groups comes from a rank of its own, so that neither plan shows it."""
    layers = [Layer(f"{g}", g, 0, 0, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2)) for g in range(2)]
    consumer = CacheLayout((Region(0, 32),), tuple(layers))
    pairs = [
        compile(consumer, CacheLayout((Region(0, 32),), (one,)), Share(rank, (ShareLayer(one.name, 0, 1),)))
        for rank, one in enumerate(layers)
    ]

    def plans(*consumer_ids: list[int]) -> list[TransferPlan]:
        return [pair.bind(tables(list(consumer_ids)), tables([[1], [2]]), 0, 4) for pair in pairs]

    prove_together(plans([1], [2]))
    prove_together(plans([1], [2])[:1])
    with pytest.raises(Unproven, match=r"destination in region 0 written twice: next byte: consumer has 16, producer"):
        prove_together(plans([1], [1]))


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
    moments = [sum(column) % 2**64 for column in zip(*rows, strict=True)]
    return Sums(*moments, print=sum(print_of(c, p) for c, p in pairs) % PRIME)


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


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=4),
    st.booleans(),
)
def test_sums_of_copies_are_sums_of_their_runs(
    pattern: list[tuple[int, int, int]], places: list[tuple[int, int]], exact: bool
) -> None:
    runs = np.array([(c + at, p + to, n) for at, to in places for c, p, n in pattern], np.int64)
    if not exact:
        runs[-1] += 1
    columns = [runs[:, i].copy() for i in range(3)]
    for copies in (1, 2, 3, len(places)):
        assert sums_of_copies(*columns, copies) == sums_of_runs(*columns)


@pytest.mark.parametrize("size", [1, 1 << 14, (1 << 14) + 1, 100_000])
def test_sums_of_many(size: int) -> None:
    """Some of the rows at a time."""
    rng = np.random.default_rng(size)
    consumer, producer = (rng.integers(0, 1 << 56, size) for _ in range(2))
    lengths = rng.integers(1, 1 << 20, size)
    prints = sum(map(print_of, consumer.tolist(), producer.tolist())) % PRIME
    assert sums_of_points(consumer, producer).print == prints
    assert sums_of_runs(consumer, producer, np.full(size, 1)) == sums_of_points(consumer, producer)
    halves = lengths // 2 + 1
    split = [np.concatenate(pair) for pair in ((consumer, consumer + halves), (producer, producer + halves))]
    assert sums_of_runs(*split, np.concatenate([halves, halves])) == sums_of_runs(consumer, producer, 2 * halves)


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
        with pytest.raises(Unproven, match=r"layer 0: heads covered: consumer has 0 to 3, producer has \[0, 1\]"):
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


class TestNamesOfOneMemory:
    """Two names of one memory of the consumer move once: whoever has both must mean one memory, too."""

    layers = tuple(Layer(name, 0, 0, 0, 4, 4, "x", Heads(0, 2, 2), key_only(4, 8, 64)) for name in "ab")

    def prove(self, *producers: tuple[Layer, ...]) -> None:
        consumer = CacheLayout((Region(0, 256),), self.layers)
        held = [CacheLayout((Region(0, 512), Region(0, 512)), layers) for layers in producers]
        found = sources(consumer, 0, 1, held)
        prove_shares(consumer, [(share, held[share.producer_rank]) for share in found])

    def test_one_memory_of_one_rank(self) -> None:
        self.prove(self.layers)

    def test_heads_of_two_ranks(self) -> None:
        halves = [
            tuple(change(one, heads=Heads(rank, 1, 2), fields=key_only(4, 8)) for one in self.layers) for rank in (0, 1)
        ]
        self.prove(*halves)
        with pytest.raises(
            Refusal, match=r"layers a and b: consumer has one memory, producer has two, of ranks \[0, 1\]"
        ):
            self.prove(halves[0], (halves[1][0], change(halves[1][1], base_bytes=32)))

    @pytest.mark.parametrize("changed", [{"base_bytes": 256}, {"region": 1}, {"fields": key_only(4, 16, 128)}])
    def test_two_memories_of_one_rank(self, changed: dict[str, object]) -> None:
        a, b = self.layers
        with pytest.raises(Refusal, match=r"layers a and b: consumer has one memory, producer has two, of ranks \[0\]"):
            self.prove((a, change(b, **changed)))

    def test_two_ranks(self) -> None:
        a, b = self.layers
        text = r"layers a and b: consumer has one memory, producer has two, of ranks \[0\] and \[1\]"
        with pytest.raises(Refusal, match=text):
            self.prove((a,), (b,))

    def test_ranks_that_share_out_the_tokens(self) -> None:
        own = tuple(change(one, heads=Heads(0, 1, 1), fields=key_only(4, 8)) for one in self.layers)
        consumer = CacheLayout((Region(0, 256),), own)

        def dealt_to(rank: int, *bases: int) -> CacheLayout:
            context = Context(rank, 2, 4)
            layers = [
                change(one, block_size=8, context=context, base_bytes=b) for one, b in zip(own, bases, strict=True)
            ]
            return CacheLayout((Region(0, 512),), tuple(layers))

        def check(*producers: CacheLayout) -> None:
            found = sources(consumer, 0, 1, producers)
            prove_shares(consumer, [(share, producers[share.producer_rank]) for share in found])

        check(dealt_to(0, 0, 0), dealt_to(1, 128, 128))
        with pytest.raises(Refusal, match="layers a and b: consumer has one memory"):
            check(dealt_to(0, 0, 0), dealt_to(1, 0, 128))


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
