"""The algebra's post-conditions, read literally: what each operation does to a set of byte pairs."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import gcd, prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import Axis, offset_bytes
from kvferry.plan.boxes import (
    Box,
    Common,
    Digit,
    Digits,
    Loop,
    Runs,
    above,
    address,
    below,
    digits,
    expand,
    fold,
    held,
    join,
    merge,
    pair,
    refine,
    times,
)

Pairs = Counter[tuple[int, int]]

small = st.integers(0, 9)
loops = st.builds(Loop, st.integers(1, 3), small, small)
boxes = st.builds(Box, small, small, st.lists(loops, max_size=3).map(tuple), st.integers(1, 4))
ours_alone = st.integers(2, 4).flatmap(
    lambda size: st.builds(Digit, st.just(size), st.just(0), st.integers(0, size - 1))
)
numbers = st.lists(st.one_of(st.builds(Digit, st.integers(2, 4), small, st.none()), ours_alone), max_size=3).map(tuple)


def extent(number: Digits) -> int:
    return prod(digit.size for digit in number)


def pairs(box: Box) -> Pairs:
    """Every byte pair, with its multiplicity: the definition of a box."""
    found: Pairs = Counter()
    for steps in product(*(range(loop.size) for loop in box.loops)):
        c = box.consumer_offset + sum(i * loop.consumer_stride for i, loop in zip(steps, box.loops, strict=True))
        p = box.producer_offset + sum(i * loop.producer_stride for i, loop in zip(steps, box.loops, strict=True))
        found.update((c + j, p + j) for j in range(box.run_bytes))
    return found


def union(several: list[Box] | tuple[Box, ...]) -> Pairs:
    return sum((pairs(box) for box in several), Counter())


def run_pairs(runs: Runs) -> Pairs:
    rows = zip(*(column.tolist() for column in runs), strict=True)
    return Counter((c + j, p + j) for c, p, n in rows for j in range(n))


def at(number: Digits, index: int) -> int:
    return int(address(number, np.array([index]))[0])


def here(number: Digits, index: int) -> bool:
    """Whether a side has an index: by the definition of a mixed-radix number."""
    for digit in number:
        index, value = divmod(index, digit.size)
        if digit.only not in (None, value):
            return False
    return True


def places(number: Digits) -> list[tuple[int, bool]]:
    """For every index its address, and whether this side has it."""
    found = address(number, np.arange(extent(number))).tolist()
    return [(one, here(number, index)) for index, one in enumerate(found)]


@given(st.lists(st.builds(Axis, st.just("token"), st.integers(1, 4), st.just(0), small), max_size=3))
def test_digits_mean_what_axes_mean(drawn: list[Axis]) -> None:
    axes, step = [], 1
    for axis in drawn:
        axes.append(Axis("token", axis.size, step, axis.stride_bytes))
        step *= axis.size
    for index in range(step):
        assert at(digits(reversed(axes), "token"), index) == offset_bytes(axes, "token", index)


@given(numbers, st.integers(1, 24))
def test_held(number: Digits, count: int) -> None:
    index = np.arange(count * extent(number))
    assert held(number, index).tolist() == [here(number, i % extent(number)) for i in index.tolist()]


@given(numbers, numbers, st.integers(0, 24))
def test_refine(consumer: Digits, producer: Digits, limit: int) -> None:
    common = refine(consumer, producer, limit)
    unit = prod(one.size for one in common)
    assert extent(consumer) % unit == extent(producer) % unit == limit % unit == 0
    inner = below(consumer, unit), below(producer, unit)
    boxes = (Box(0, 0, (), 1),)
    for one in common:
        boxes = times(boxes, one.boxes)
    both = zip(*map(places, inner), strict=True)
    assert union(boxes) == Counter((c, p) for (c, c_here), (p, p_here) in both if c_here and p_here)
    for number, part in zip((consumer, producer), inner, strict=True):  # aligned: every chunk is as the first one
        outer, starts = places(above(number, unit)), places(number)[::unit]
        assert places(number) == [
            (start + one, up and low)
            for (start, _), (_, up) in zip(starts, outer, strict=True)
            for one, low in places(part)
        ]


@given(numbers)
def test_refine_finds_all_of_equal_numbers(number: Digits) -> None:
    def values(digit: Digit) -> Box:
        return Box(0, 0, (Loop(digit.size, digit.stride, digit.stride),) if digit.only is None else (), 1)

    assert refine(number, number) == tuple(Common(digit.size, (values(digit),)) for digit in number)


@given(numbers, numbers)
def test_above_and_below(number: Digits, other: Digits) -> None:
    unit = prod(one.size for one in refine(number, other))
    outer, inner = above(number, unit), below(number, unit)
    assert extent(outer) * unit == extent(number)
    assert extent(inner) == unit
    assert [at(outer, i) for i in range(extent(outer))] == [at(number, i * unit) for i in range(extent(outer))]
    assert [at(inner, i) for i in range(unit)] == [at(number, i) for i in range(unit)]


@given(numbers, numbers, st.data())
def test_pair(consumer: Digits, producer: Digits, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, min(extent(consumer), extent(producer))))
    consumer_start = data.draw(st.integers(0, extent(consumer) - count))
    producer_start = data.draw(st.integers(0, extent(producer) - count))
    found = pair(consumer, producer, consumer_start, producer_start, count)
    both = [(consumer_start + i, producer_start + i) for i in range(count)]
    both = [(c, p) for c, p in both if here(consumer, c) and here(producer, p)]
    assert union(found) == Counter((at(consumer, c), at(producer, p)) for c, p in both)


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 5), st.integers(1, 12))
def test_pair_of_single_digits_is_one_box(count: int, consumer_start: int, producer_start: int, stride: int) -> None:
    number = (Digit(20, stride),)
    assert len(pair(number, number, consumer_start, producer_start, count)) == 1


@given(st.lists(boxes, max_size=3), st.lists(boxes, max_size=3))
def test_times(left: list[Box], right: list[Box]) -> None:
    left, right = ([box._replace(run_bytes=1) for box in side] for side in (left, right))
    expected: Pairs = Counter()
    for (a, n), (b, m) in product(union(left).items(), union(right).items()):
        expected[a[0] + b[0], a[1] + b[1]] += n * m
    assert union(times(left, right)) == expected


@given(boxes)
def test_fold_keeps_the_set_and_leaves_nothing_to_fold(box: Box) -> None:
    folded = fold(box)
    assert pairs(folded) == pairs(box)
    assert folded.num_runs <= box.num_runs
    assert all((folded.run_bytes,) * 2 != loop[1:] for loop in folded.loops)


@given(st.lists(boxes, max_size=5))
def test_join_keeps_the_set_and_never_adds_runs(several: list[Box]) -> None:
    joined = join(several)
    assert union(joined) == union(several)
    assert sum(box.num_runs for box in joined) <= sum(box.num_runs for box in several)
    assert [box.consumer_offset for box in joined] == sorted(box.consumer_offset for box in joined)


def test_join_makes_one_run_of_a_whole_page() -> None:
    """K and V side by side in 16 tokens of 2 heads, heads outermost: each field folds to a token, both join, tokens
    and heads fold."""
    loops = (Loop(2, 512, 512), Loop(16, 32, 32), Loop(16, 1, 1))
    assert join([Box(0, 4096, loops, 1), Box(16, 4112, loops, 1)]) == (Box(0, 4096, (), 1024),)


@given(boxes, st.lists(st.tuples(small, small), max_size=3))
def test_expand(box: Box, starts: list[tuple[int, int]]) -> None:
    runs = expand(box, *(np.array([start[side] for start in starts], np.int64) for side in (0, 1)))
    assert run_pairs(runs) == union([box.shifted(*start) for start in starts])
    assert len(runs.lengths) == box.num_runs * len(starts)


@given(
    st.sets(st.integers(0, 30), max_size=12), st.lists(st.tuples(st.integers(0, 1), small), min_size=31, max_size=31)
)
def test_merge_keeps_the_set_in_order_and_leaves_no_neighbours(bytes_: set[int], jumps: list[tuple[int, int]]) -> None:
    """Single bytes of a consumer, each with a producer byte that sometimes follows its neighbour's."""
    consumer = np.array(sorted(bytes_, key=lambda byte: jumps[byte][1]), np.int64)
    producer = consumer + np.array([100 * jumps[byte][0] for byte in consumer], np.int64)
    runs = Runs(consumer, producer, np.ones(len(consumer), np.int64))
    merged = merge([runs])
    assert run_pairs(merged) == run_pairs(runs)
    ends = merged.consumer_offsets + merged.lengths, merged.producer_offsets + merged.lengths
    assert (np.diff(merged.consumer_offsets) > 0).all()
    touching = (ends[0][:-1] == merged.consumer_offsets[1:]) & (ends[1][:-1] == merged.producer_offsets[1:])
    assert not touching.any()


def test_merge_of_nothing() -> None:
    assert [len(column) for column in merge([])] == [0, 0, 0]


@given(st.integers(1, 40), st.integers(1, 40))
def test_two_plain_block_sizes_have_their_gcd_in_common(left: int, right: int) -> None:
    common = refine(digits([Axis("token", left, 1, 8)], "token"), digits([Axis("token", right, 1, 8)], "token"))
    assert prod(one.size for one in common) == gcd(left, right)
