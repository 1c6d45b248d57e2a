"""The algebra of a transfer: boxes of byte pairs, and the few operations that make, coalesce and list them.

An axis list gives every coordinate an address. Where the same coordinates have addresses on two sides, a transfer is
the set of pairs (consumer address, producer address), byte by byte. A `Box` is such a set in closed form. Each
operation below states what it does to the set; tests check these statements literally.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layout import Axis, Dim
from kvferry.plan.limits import check_points

Ints = npt.NDArray[np.int64]


class Digit(NamedTuple):
    """One digit of a coordinate on one side: `size` values, `stride` bytes apart.

    only: None, or the one value that this side has; coordinates with another are elsewhere. Its stride is 0.
    """

    size: int
    stride: int
    only: int | None = None


Digits = tuple[Digit, ...]
"""The digits of a coordinate, innermost first: a mixed-radix number, and what each digit adds to the address."""


class Loop(NamedTuple):
    """`size` steps, each so many bytes on either side."""

    size: int
    consumer_stride: int
    producer_stride: int


class Box(NamedTuple):
    """The pairs {(c + sum(i * cs) + j, p + sum(i * ps) + j)} over all i of its loops and 0 <= j < run_bytes."""

    consumer_offset: int
    producer_offset: int
    loops: tuple[Loop, ...]
    run_bytes: int

    @property
    def num_runs(self) -> int:
        return prod(loop.size for loop in self.loops)

    def shifted(self, consumer_bytes: int, producer_bytes: int) -> Box:
        """Each pair of the box, moved on both sides."""
        return Box(
            self.consumer_offset + consumer_bytes, self.producer_offset + producer_bytes, self.loops, self.run_bytes
        )


class Runs(NamedTuple):
    """Descriptors as arrays of equal length: pairs (c + j, p + j), 0 <= j < length, for each entry."""

    consumer_offsets: Ints
    producer_offsets: Ints
    lengths: Ints


POINT = Box(0, 0, (), 1)
"""The one pair (0, 0): what `times` leaves alone."""


class Common(NamedTuple):
    """A digit that two numbers have in common: its size, and as at most one box the pairs of addresses of those values
    that both sides have."""

    size: int
    boxes: tuple[Box, ...]


def digits(axes: Iterable[Axis], dim: Dim) -> Digits:
    """The axes of one dimension, innermost first, without those that have only one value."""
    inner_first = sorted((axis for axis in axes if axis.dim == dim and axis.size > 1), key=lambda axis: axis.step)
    return tuple(Digit(axis.size, axis.stride_bytes) for axis in inner_first)


def address(number: Digits, index: Ints) -> Ints:
    """What each index adds to an address."""
    total = np.zeros_like(index)
    for size, stride, _ in number:
        total += index % size * stride
        index = index // size
    return total


def held(number: Digits, index: Ints) -> npt.NDArray[np.bool_]:
    """Whether this side has each index."""
    found = np.ones(len(index), np.bool_)
    for size, _, only in number:
        if only is not None:
            found &= index % size == only
        index = index // size
    return found


def above(number: Digits, unit: int) -> Digits:
    """The digits that count whole units: address(above(d, unit), i) == address(d, i * unit). Unit must be aligned.

    And held(above(d, unit), i) if and only if some index of the i-th unit is held.
    """
    rest: list[Digit] = []
    for digit in number:
        inside = gcd(digit.size, unit)
        unit //= inside
        if inside < digit.size:
            rest.append(_without(digit, inside))
    return tuple(rest)


def below(number: Digits, unit: int) -> Digits:
    """The digits inside one unit: address(below(d, unit), i) == address(d, i) for i < unit. Unit must be aligned."""
    rest: list[Digit] = []
    for digit in number:
        inside = gcd(digit.size, unit)
        unit //= inside
        if inside > 1:
            rest.append(digit._replace(size=inside, only=None if digit.only is None else digit.only % inside))
    return tuple(rest)


def _without(digit: Digit, size: int) -> Digit:
    """What is left of a digit above its innermost `size` values."""
    return Digit(digit.size // size, digit.stride * size, None if digit.only is None else digit.only // size)


def refine(consumer: Digits, producer: Digits, limit: int = 0) -> tuple[Common, ...]:
    """The innermost digits that two numbers have in common, innermost first; `limit` (0: none) bounds their product.

    With U the product of the sizes: U divides both extents, and the limit if there is one; both numbers are cut at U
    (a digit ends there, or is cut in two); and below U the product of the boxes has the pairs of addresses of every
    index that both sides have.
    """
    found: list[Common] = []
    left, right = list(consumer), list(producer)
    while left and right:
        size = gcd(left[0].size, right[0].size, limit)
        if size == 1:
            break
        found.append(Common(size, _both(size, left[0], right[0])))
        limit //= size
        _advance(left, size)
        _advance(right, size)
        if limit == 1:
            break
    return tuple(found)


def _both(size: int, consumer: Digit, producer: Digit) -> tuple[Box, ...]:
    """The innermost `size` values of two digits, where both have them."""
    values = {digit.only % size for digit in (consumer, producer) if digit.only is not None}
    if not values:
        return (Box(0, 0, (Loop(size, consumer.stride, producer.stride),), 1),)
    if len(values) > 1:
        return ()
    (value,) = values
    return (Box(value * consumer.stride, value * producer.stride, (), 1),)


def _advance(number: list[Digit], size: int) -> None:
    digit = number.pop(0)
    if digit.size > size:
        number.insert(0, _without(digit, size))


def pair(consumer: Digits, producer: Digits, consumer_start: int, producer_start: int, count: int) -> tuple[Box, ...]:
    """The pairs of addresses of those of `count` coordinates that both sides have; they start elsewhere on each side.

    The union of the boxes is {(address(consumer, consumer_start + i), address(producer, producer_start + i))}: the
    common digits as loops, what is above them index by index, where neighbours that are evenly spaced on both sides
    are a loop again. Raises Refusal where that would be very many.
    """
    common = refine(consumer, producer, gcd(consumer_start, producer_start, count))
    inner: tuple[Box, ...] = (POINT,)
    for one in common:
        inner = times(inner, one.boxes)
    unit = prod(one.size for one in common)
    check_points(count // unit)
    steps = np.arange(count // unit, dtype=np.int64)
    left, right = consumer_start // unit + steps, producer_start // unit + steps
    points = _points(above(consumer, unit), left, above(producer, unit), right)
    outer = [Box(c, p, (loop,) if loop.size > 1 else (), 1) for c, p, loop in _progressions(points)]
    return times(inner, outer)


def _points(consumer: Digits, left: Ints, producer: Digits, right: Ints) -> list[tuple[int, int]]:
    """The pairs of addresses of those indices that both sides have."""
    both = held(consumer, left) & held(producer, right)
    return list(zip(address(consumer, left[both]).tolist(), address(producer, right[both]).tolist(), strict=True))


def _progressions(points: list[tuple[int, int]]) -> Iterable[tuple[int, int, Loop]]:
    """Points as evenly spaced sequences, greedily from the left: (first point, loop over the rest)."""
    at = 0
    while at < len(points):
        (c, p), end = points[at], at + 1
        step = (points[end][0] - c, points[end][1] - p) if end < len(points) else (0, 0)
        while end < len(points) and points[end] == (points[end - 1][0] + step[0], points[end - 1][1] + step[1]):
            end += 1
        yield c, p, Loop(end - at, *step)
        at = end


def times(left: Iterable[Box], right: Sequence[Box]) -> tuple[Box, ...]:
    """Sums of a pair of the left set and one of the right: the set of two independent dimensions together."""
    return tuple(
        Box(a.consumer_offset + b.consumer_offset, a.producer_offset + b.producer_offset, (*a.loops, *b.loops), 1)
        for a in left
        for b in right
    )


def fold(box: Box) -> Box:
    """The same set with longer runs: a loop whose stride is the run on both sides becomes part of the run."""
    run, loops = box.run_bytes, list(box.loops)
    while inner := next((loop for loop in loops if loop.consumer_stride == loop.producer_stride == run), None):
        run *= inner.size
        loops.remove(inner)
    loops.sort(key=lambda loop: loop[1:], reverse=True)
    return Box(box.consumer_offset, box.producer_offset, tuple(loops), run)


def join(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same set as fewer boxes, by ascending consumer offset: folded, and neighbours on both sides made one.

    Boxes with equal loops join where one's runs end where the other's begin; that may let a further loop fold.
    """
    found = list(boxes)
    while True:
        found = sorted(map(fold, found), key=lambda box: (box.loops, box.consumer_offset))
        joined: list[Box] = []
        for box in found:
            if joined and _continues(joined[-1], box):
                joined[-1] = joined[-1]._replace(run_bytes=joined[-1].run_bytes + box.run_bytes)
            else:
                joined.append(box)
        if len(joined) == len(found):
            return tuple(sorted(joined))
        found = joined


def _continues(first: Box, second: Box) -> bool:
    return (
        first.loops == second.loops
        and second.consumer_offset - first.consumer_offset == first.run_bytes
        and second.producer_offset - first.producer_offset == first.run_bytes
    )


def expand(box: Box, consumer_starts: Ints, producer_starts: Ints) -> Runs:
    """The runs of a box, moved to each of the given starts."""
    consumer = consumer_starts + box.consumer_offset
    producer = producer_starts + box.producer_offset
    for loop in box.loops:
        steps = np.arange(loop.size, dtype=np.int64)
        consumer = np.add.outer(consumer, steps * loop.consumer_stride).ravel()
        producer = np.add.outer(producer, steps * loop.producer_stride).ravel()
    return Runs(consumer, producer, np.full(len(consumer), box.run_bytes, np.int64))


def merge(parts: Sequence[Runs]) -> Runs:
    """The same pairs by ascending consumer offset, where runs that are adjacent on both sides are one."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Runs(none, none, none)
    consumer, producer, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(consumer, kind="stable")
    consumer, producer, lengths = consumer[order], producer[order], lengths[order]
    begins = np.ones(len(consumer), np.bool_)
    begins[1:] = (consumer[1:] != consumer[:-1] + lengths[:-1]) | (producer[1:] != producer[:-1] + lengths[:-1])
    first = np.flatnonzero(begins)
    return Runs(consumer[first], producer[first], np.add.reduceat(lengths, first) if len(first) else lengths)
