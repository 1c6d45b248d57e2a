"""What moves together: the fields of a layer on both sides, cut into chunks of tokens that repeat.

A chunk is the longest run of tokens that is laid out alike wherever it starts, on both sides: a whole block if blocks
are alike, else their common part. The boxes of one chunk are worked out once per geometry class, and shifted to every
chunk of a request and every layer of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import NamedTuple

from kvferry.layout import Context, Field, Refusal
from kvferry.plan.boxes import Box, Digit, Digits, Ints, above, below, digits, held, join, pair, refine, times
from kvferry.plan.limits import check_boxes


class Lane(NamedTuple):
    """How the start of a chunk follows from its block's id and its number in the block, on both sides."""

    consumer_block_stride: int
    producer_block_stride: int
    consumer_chunks: Digits
    producer_chunks: Digits


Cut = Mapping[Lane, tuple[Box, ...]]
"""The boxes of some tokens of a chunk, relative to the chunk's start in each lane."""


class FieldPair(NamedTuple):
    """One field of one layer on both sides, with the heads that are shared; offsets are from the layers' bases.

    consumer_tokens, producer_tokens: digits of a token, counted over all ranks of a context.
    tile_tokens: tokens of one value of the token digits: 1, or those that an opaque tile spans.
    rest: heads and content; with a token of each side it makes the pairs of bytes.
    """

    consumer_block_stride: int
    producer_block_stride: int
    consumer_tokens: Digits
    producer_tokens: Digits
    tile_tokens: int
    rest: tuple[Box, ...]

    def shifted(self, consumer_bytes: int, producer_bytes: int) -> FieldPair:
        return self._replace(rest=tuple(box.shifted(consumer_bytes, producer_bytes) for box in self.rest))

    def cut(self, chunk_tokens: int, start: int, stop: int) -> tuple[Box, ...]:
        """The pairs of the tokens [start, stop) of a chunk that both sides have some tokens of, tiles whole."""
        unit, first, end = chunk_tokens // self.tile_tokens, start // self.tile_tokens, -(-stop // self.tile_tokens)
        return pair(below(self.consumer_tokens, unit), below(self.producer_tokens, unit), first, first, end - first)

    def lane(self, chunk_tokens: int) -> Lane:
        unit = chunk_tokens // self.tile_tokens
        return Lane(
            self.consumer_block_stride,
            self.producer_block_stride,
            above(self.consumer_tokens, unit),
            above(self.producer_tokens, unit),
        )


def pair_fields(
    consumer: Field,
    producer: Field,
    contexts: tuple[Context, Context],
    consumer_head: int,
    producer_head: int,
    num_heads: int,
) -> FieldPair:
    """Fields that have been compared; contexts are the consumer's and the producer's, heads count from the start of
    each side's shard."""
    heads = pair(digits(consumer.axes, "head"), digits(producer.axes, "head"), consumer_head, producer_head, num_heads)
    content = pair(digits(consumer.axes, "content"), digits(producer.axes, "content"), 0, 0, consumer.content_bytes)
    check_boxes(len(heads) * len(content))
    rest = times(heads, content)
    return FieldPair(
        consumer.block_stride_bytes,
        producer.block_stride_bytes,
        token_digits(consumer, contexts[0]),
        token_digits(producer, contexts[1]),
        span_tokens(consumer, contexts[0]),
        tuple(box.shifted(consumer.base_bytes, producer.base_bytes) for box in rest),
    )


def tile_tokens(one: Field) -> int:
    """Tokens that cannot be told apart: 1, or those of an opaque tile."""
    return 1 if one.opaque is None else min(axis.step for axis in one.axes if axis.dim == "token")


def spans_runs(one: Field, context: Context) -> bool:
    """Whether a tile holds several runs of a context, so that it pairs only with one of the same context."""
    return not context.is_whole and tile_tokens(one) > context.interleave


def span_tokens(one: Field, context: Context) -> int:
    """Tokens from the first of a tile to the first of the next, those of other ranks included."""
    return tile_tokens(one) * (context.size if spans_runs(one, context) else 1)


def token_digits(one: Field, context: Context) -> Digits:
    """The digits of a token, in tiles, counted over all ranks; which rank of a context has it is a digit too."""
    mine = digits(one.axes, "token")
    if context.is_whole or spans_runs(one, context):
        return mine
    run = context.interleave // tile_tokens(one)
    return (*below(mine, run), Digit(context.size, 0, context.rank), *above(mine, run))


def common_chunk(layer: str, fields: Sequence[FieldPair]) -> int:
    """Tokens of the longest chunk that every field of a layer has in common."""
    chunk, before = 0, -1
    while chunk != before:
        before = chunk
        for one in fields:
            if chunk % one.tile_tokens:
                raise Refusal(f"layer {layer}: tile tokens", one.tile_tokens, chunk, "fields have no tile in common")
            shared = refine(one.consumer_tokens, one.producer_tokens, chunk // one.tile_tokens)
            chunk = one.tile_tokens * prod(digit.size for digit in shared)
    return chunk


class Selection(NamedTuple):
    """Which chunks have tokens that both sides hold, by the digits of a chunk's number."""

    consumer: Digits
    producer: Digits

    def held(self, numbers: Ints) -> Ints:
        """Those of the numbers whose chunk has some."""
        if not any(self):
            return numbers
        return numbers[held(self.consumer, numbers) & held(self.producer, numbers)]


ALL = Selection((), ())


def select(contexts: tuple[Context, Context], chunk_tokens: int) -> Selection:
    consumer, producer = (above(_runs(context), chunk_tokens) for context in contexts)
    return Selection(consumer, producer)


def _runs(context: Context) -> Digits:
    """A token's digits up to the rank that holds it."""
    return () if context.is_whole else (Digit(context.interleave, 0), Digit(context.size, 0, context.rank))


@dataclass(frozen=True, eq=False)
class Unit:
    """Fields of one layer, or of layers of a group that touch on both sides; layers that are alike share a unit."""

    group: int
    chunk_tokens: int
    fields: tuple[FieldPair, ...]
    selection: Selection = ALL
    _cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    _stops: dict[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def _tile(self) -> int:
        """Tokens between places at which some field can be cut, so that what is kept for each does not pile up."""
        return gcd(*(one.tile_tokens for one in self.fields))

    def _aligned(self, start: int, stop: int) -> tuple[int, int]:
        return start // self._tile * self._tile, -(-stop // self._tile) * self._tile

    def cut(self, start: int, stop: int) -> Cut:
        """The boxes of the tokens [start, stop) of a chunk, tiles whole."""
        span = self._aligned(start, stop)
        if span not in self._cuts:
            self._cuts[span] = self._cut(*span)
        return self._cuts[span]

    def _cut(self, start: int, stop: int) -> Cut:
        lanes: dict[Lane, list[Box]] = {}
        for one in self.fields:
            tokens = one.cut(self.chunk_tokens, start, stop)
            check_boxes(len(tokens) * len(one.rest))
            lanes.setdefault(one.lane(self.chunk_tokens), []).extend(times(tokens, one.rest))
        return {lane: join(boxes) for lane, boxes in lanes.items()}

    def num_runs(self, start: int, stop: int) -> int:
        """Descriptors of the tokens [start, stop) of one chunk."""
        return sum(box.num_runs for boxes in self.cut(start, stop).values() for box in boxes)

    def num_runs_of(self, num_tokens: int) -> int:
        """Descriptors of so many tokens from the start of a chunk, or of a tile that is longer."""
        whole = -(-num_tokens // self.chunk_tokens)
        return whole * self.num_runs(0, min(num_tokens, self.chunk_tokens))

    @property
    def run_bytes(self) -> int:
        """The shortest run of a whole chunk."""
        return min((box.run_bytes for boxes in self.cut(0, self.chunk_tokens).values() for box in boxes), default=0)

    def num_bytes(self, start: int, stop: int) -> int:
        """Bytes of the tokens [start, stop) of one chunk, tiles whole."""
        return sum(box.num_runs * box.run_bytes for boxes in self.cut(start, stop).values() for box in boxes)

    def last_stop(self, start: int, stop: int) -> int:
        """Where to cut the last chunk of a request, whose tokens from `stop` on hold nothing.

        The first end of a digit of the chunk, from `stop` on, at which cutting makes no more descriptors than the
        whole chunk: exactly `stop` where tokens are rows; a whole tile where keys are transposed or unknown.
        """
        span = self._aligned(start, stop)
        if span not in self._stops:
            whole = self.num_runs(start, self.chunk_tokens)
            ends = sorted({-(-stop // step) * step for step in self._steps()})
            self._stops[span] = next(end for end in ends if self.num_runs(start, end) <= whole)
        return self._stops[span]

    def _steps(self) -> set[int]:
        """Tokens of a tile, and of each digit above it, up to the chunk."""
        steps = {self.chunk_tokens}
        for one in self.fields:
            step = one.tile_tokens
            steps.add(step)
            limit = self.chunk_tokens // step
            for digit in refine(one.consumer_tokens, one.producer_tokens, limit):
                step *= digit.size
                steps.add(step)
        return steps


class Placement(NamedTuple):
    """A unit (its index) at the place of one layer: where its offsets count from."""

    unit: int
    consumer_region: int
    producer_region: int
    consumer_base: int
    producer_base: int
