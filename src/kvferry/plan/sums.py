"""Sums over sets of byte pairs, such that two sets with equal sums are equal but for a negligible chance.

The sums of a set of sums follow from the sums of either set, so that independent dimensions can be summed apart. That
also holds for the print: with G a generator modulo the prime P and random exponents a, b, each pair (c, p) counts
G ** (a * c + b * p). Moments alone would not do: a pattern of errors may leave any fixed number of them as they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import numpy as np

from kvferry.plan.boxes import Ints

MODULUS = 1 << 64

_BITS = 31
PRIME = (1 << _BITS) - 1
"""A Mersenne prime: reducing is a shift, a mask and a sum. Its order has one factor 2, so that strides, which are often
powers of two, do not make exponents alike."""
_ORDER = PRIME - 1
_GENERATOR = 7
_LOW_BITS = 16

CACHED = 1 << 14
"""Descriptors taken at a time: their intermediate arrays stay in the processor's cache."""


def _random_exponents() -> tuple[int, int]:
    """Two that make G ** a and G ** b generators as well, and their product one of half the group."""
    while True:
        a, b = (1 + secrets.randbelow(_ORDER) for _ in range(2))
        if gcd(a, _ORDER) == gcd(b, _ORDER) == 1 and gcd(a + b, _ORDER) == 2:
            return a, b


_A, _B = _random_exponents()
_STEP = pow(_GENERATOR, _A + _B, PRIME)
"""What the next byte on both sides counts more than a byte."""
_PER_STEP = pow(_STEP - 1, -1, PRIME)


def _powers(base: int, count: int) -> Ints:
    found = np.ones(1, np.int64)
    while len(found) < count:
        found = np.concatenate([found, found * pow(base, len(found), PRIME) % PRIME])
    return found[:count]


_SHIFT, _ONE, _MASK = np.uint64(_BITS), np.uint64(1), np.uint64(PRIME)
_LOW = _powers(_GENERATOR, 1 << _LOW_BITS)
_HIGH = _powers(pow(_GENERATOR, 1 << _LOW_BITS, PRIME), (1 << _BITS - _LOW_BITS) + 1)


class Sums(NamedTuple):
    """Over a set of (consumer address c, difference d to the producer address): its size, and the sums of c, d and
    c * d, modulo 2**64; and of what each pair counts, modulo PRIME."""

    size: int
    consumer: int
    delta: int
    mixed: int
    print: int

    def times(self, other: Sums) -> Sums:
        """The sums over all sums of one pair of this set and one of the other."""
        return Sums(
            self.size * other.size,
            self.consumer * other.size + self.size * other.consumer,
            self.delta * other.size + self.size * other.delta,
            self.mixed * other.size
            + self.consumer * other.delta
            + self.delta * other.consumer
            + self.size * other.mixed,
            self.print * other.print,
        ).reduced()

    def plus(self, other: Sums) -> Sums:
        """The sums over both sets together."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True))).reduced()

    def reduced(self) -> Sums:
        size, consumer, delta, mixed = (value % MODULUS for value in self[:-1])
        return Sums(size, consumer, delta, mixed, self.print % PRIME)


NOTHING = Sums(0, 0, 0, 0, 0)


def print_of(consumer: int, producer: int) -> int:
    return pow(_GENERATOR, (_A * consumer + _B * producer) % _ORDER, PRIME)


def sums_of_point(consumer: int, producer: int) -> Sums:
    delta = producer - consumer
    return Sums(1, consumer, delta, consumer * delta, print_of(consumer, producer)).reduced()


def sums_of_points(consumer: Ints, producer: Ints) -> Sums:
    """Addresses from 0 to layout.check.MAX_BYTES."""
    found = NOTHING
    for c, p in few(consumer, producer):
        found = found.plus(_sums_of_few_points(c, p))
    return found


def _sums_of_few_points(consumer: Ints, producer: Ints) -> Sums:
    delta = producer - consumer  # int64 wraps around, which is arithmetic modulo 2**64
    total = int(_prints(consumer, producer).sum())
    return Sums(len(delta), int(consumer.sum()), int(delta.sum()), int(np.dot(consumer, delta)), total).reduced()


def sums_of_runs(consumer: Ints, producer: Ints, lengths: Ints) -> Sums:
    """Byte by byte: a run of n bytes from c adds n * c + n * (n - 1) / 2 to the sum of consumer addresses."""
    found = NOTHING
    for some in few(consumer, producer, lengths):
        found = found.plus(_sums_of_few_runs(*some))
    return found


def sums_of_copies(consumer: Ints, producer: Ints, lengths: Ints, copies: int) -> Sums:
    """As `sums_of_runs`; faster if the runs are so many copies of a pattern, which lie elsewhere on both sides."""
    if copies < 2 or len(lengths) % copies:
        return sums_of_runs(consumer, producer, lengths)
    (c, c_places), (p, p_places) = (_pattern(column.reshape(copies, -1)) for column in (consumer, producer))
    n = lengths.reshape(copies, -1)
    if c is None or p is None or not (n == n[0]).all():
        return sums_of_runs(consumer, producer, lengths)
    return sums_of_runs(c, p, n[0]).times(sums_of_points(c_places, p_places))


def _pattern(rows: Ints) -> tuple[Ints | None, Ints]:
    """What all rows have in common, counted from each one's least, and where that is; None if they differ."""
    places = rows.min(axis=1)
    first = rows[0] - places[0]
    return (first if (rows - places[:, None] == first).all() else None), places


def few(*columns: Ints) -> Iterator[tuple[Ints, ...]]:
    """Columns of equal length, some of their rows at a time."""
    for at in range(0, len(columns[0]), CACHED):
        yield tuple(column[at : at + CACHED] for column in columns)


def _sums_of_few_runs(consumer: Ints, producer: Ints, lengths: Ints) -> Sums:
    n, d = lengths, producer - consumer
    if int(n.min()) == int(n.max()):
        return _sums_of_few_points(consumer, producer).times(sums_of_run(int(n[0])))
    odd = n & 1
    total = n * consumer + (n >> (1 - odd)) * (n - 1 >> odd)  # halves whichever of n and n - 1 is even
    sums = int(n.sum()), int(total.sum()), int(np.dot(n, d)), int(np.dot(total, d))
    return Sums(*sums, _print_of_few_runs(consumer, producer, n)).reduced()


def sums_of_run(length: int) -> Sums:
    """Of the bytes from (0, 0) on, side by side: prints are a geometric series."""
    series = (pow(_STEP, length, PRIME) - 1) * _PER_STEP
    return Sums(length, length * (length - 1) // 2, 0, 0, series).reduced()


def _print_of_few_runs(consumer: Ints, producer: Ints, lengths: Ints) -> int:
    series = _reduced(_reduced(_prints(lengths, lengths)) + (PRIME - 1))
    firsts = _reduced(_prints(consumer, producer))
    firsts *= series
    return int(_reduced(firsts).sum()) * _PER_STEP


def _prints(consumer: Ints, producer: Ints) -> Ints:
    """What each pair counts, modulo PRIME and below 2**32."""
    exponents = (_small(consumer) * _A + _small(producer) * _B).view(np.uint64)  # a sum below 2**64
    for _ in range(2):
        exponents = (exponents >> _SHIFT << _ONE) + (exponents & _MASK)
    index = exponents.view(np.int64)
    found = _LOW.take(index & ((1 << _LOW_BITS) - 1))
    found *= _HIGH.take(index >> _LOW_BITS, mode="clip")
    return _reduced(found)


def _small(addresses: Ints) -> Ints:
    """The same exponents below 2**32: modulo the order, 2**31 is 2."""
    while len(addresses) and int(addresses.max()) >> 32:
        addresses = (addresses >> _BITS << 1) + (addresses & PRIME)
    return addresses


def _reduced(values: Ints) -> Ints:
    """The same modulo PRIME, in place: of values up to 2**62 at most 2**32, of those up to 2**32 at most 2**31."""
    high = values >> _BITS
    values &= PRIME
    values += high
    return values
