"""What moves together: the fields of a layer on both sides, cut into chunks of tokens that repeat.

A chunk is the longest run of tokens that is laid out alike wherever it starts, on both sides: a whole block if blocks
are alike, else their common part. The boxes of one chunk are worked out once per geometry class, and shifted to every
chunk of a request and every layer of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from kvferry.layout import Field, Refusal
from kvferry.plan.boxes import Box, Digits, above, digits, join, pair, refine, times


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

    tile_tokens: tokens of one value of the token digits: 1, or an opaque tile's.
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

    def tiles(self, start: int, stop: int) -> tuple[int, int]:
        """The tiles that hold the tokens [start, stop)."""
        return start // self.tile_tokens, -(-stop // self.tile_tokens)

    @property
    def tile_bytes(self) -> int:
        return sum(box.num_runs for box in self.rest)

    def lane(self, chunk_tokens: int) -> Lane:
        unit = chunk_tokens // self.tile_tokens
        return Lane(
            self.consumer_block_stride,
            self.producer_block_stride,
            above(self.consumer_tokens, unit),
            above(self.producer_tokens, unit),
        )


def pair_fields(consumer: Field, producer: Field, consumer_head: int, producer_head: int, num_heads: int) -> FieldPair:
    """Fields that have been compared; heads count from the start of each side's shard."""
    heads = pair(digits(consumer.axes, "head"), digits(producer.axes, "head"), consumer_head, producer_head, num_heads)
    content = pair(digits(consumer.axes, "content"), digits(producer.axes, "content"), 0, 0, consumer.content_bytes)
    rest = times(heads, content)
    return FieldPair(
        consumer.block_stride_bytes,
        producer.block_stride_bytes,
        digits(consumer.axes, "token"),
        digits(producer.axes, "token"),
        tile_tokens(consumer),
        tuple(box.shifted(consumer.base_bytes, producer.base_bytes) for box in rest),
    )


def tile_tokens(one: Field) -> int:
    """Tokens that cannot be told apart: 1, or those of an opaque tile."""
    return 1 if one.opaque is None else min(axis.step for axis in one.axes if axis.dim == "token")


def common_chunk(layer: str, fields: Sequence[FieldPair]) -> int:
    """Tokens of the longest chunk that every field of a layer has in common."""
    chunk, before = 0, -1
    while chunk != before:
        before = chunk
        for one in fields:
            if chunk % one.tile_tokens:
                raise Refusal(f"layer {layer}: tile tokens", one.tile_tokens, chunk, "fields have no tile in common")
            shared = refine(one.consumer_tokens, one.producer_tokens, chunk // one.tile_tokens)
            chunk = one.tile_tokens * prod(loop.size for loop in shared)
    return chunk


@dataclass(frozen=True, eq=False)
class Unit:
    """Fields of one layer, or of layers of a group that touch on both sides; layers that are alike share a unit."""

    group: int
    chunk_tokens: int
    fields: tuple[FieldPair, ...]
    _cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    _stops: dict[tuple[int, int], int] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> Cut:
        """The boxes of the tokens [start, stop) of a chunk, tiles whole."""
        if (start, stop) not in self._cuts:
            self._cuts[start, stop] = self._cut(start, stop)
        return self._cuts[start, stop]

    def _cut(self, start: int, stop: int) -> Cut:
        lanes: dict[Lane, list[Box]] = {}
        for one in self.fields:
            first, end = one.tiles(start, stop)
            tokens = pair(one.consumer_tokens, one.producer_tokens, first, first, end - first)
            lanes.setdefault(one.lane(self.chunk_tokens), []).extend(times(tokens, one.rest))
        return {lane: join(boxes) for lane, boxes in lanes.items()}

    def num_runs(self, start: int, stop: int) -> int:
        """Descriptors of the tokens [start, stop) of one chunk."""
        return sum(box.num_runs for boxes in self.cut(start, stop).values() for box in boxes)

    def num_bytes(self, start: int, stop: int) -> int:
        """Bytes of the tokens [start, stop) of one chunk, tiles whole."""
        spans = ((one.tile_bytes, *one.tiles(start, stop)) for one in self.fields)
        return sum(size * (end - first) for size, first, end in spans)

    def last_stop(self, start: int, stop: int) -> int:
        """Where to cut the last chunk of a request, whose tokens from `stop` on hold nothing.

        The first end of a digit of the chunk, from `stop` on, at which cutting makes no more descriptors than the
        whole chunk: exactly `stop` where tokens are rows; a whole tile where keys are transposed or unknown.
        """
        if (start, stop) not in self._stops:
            whole = self.num_runs(start, self.chunk_tokens)
            ends = sorted({-(-stop // step) * step for step in self._steps()})
            self._stops[start, stop] = next(end for end in ends if self.num_runs(start, end) <= whole)
        return self._stops[start, stop]

    def _steps(self) -> set[int]:
        """Tokens of a tile, and of each digit above it, up to the chunk."""
        steps = {self.chunk_tokens}
        for one in self.fields:
            step = one.tile_tokens
            steps.add(step)
            limit = self.chunk_tokens // step
            for loop in refine(one.consumer_tokens, one.producer_tokens, limit):
                step *= loop.size
                steps.add(step)
        return steps


class Placement(NamedTuple):
    """A unit (its index) at the place of one layer: where its offsets count from."""

    unit: int
    consumer_region: int
    producer_region: int
    consumer_base: int
    producer_base: int
