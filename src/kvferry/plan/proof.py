"""Why a plan may be trusted: sums over all bytes, taken once over descriptors and once over coordinates.

The planner refines, folds, joins and merges. The proof does none of that: for each layer and field it walks the axes of
both sides, one dimension at a time, and adds up over all required bytes: how many, their consumer addresses c, the
differences d to their producer addresses, and c * d (all modulo 2**64). Dimensions are independent of one another, so
sums of the whole follow from sums over each. A descriptor that is shifted, dropped, doubled, lengthened, or exchanged
with another changes one of the four. With destinations that are disjoint and bounds that hold, each byte is covered
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.layout import Axis, CacheLayout, Dim, Field, Layer, Refusal, offset_bytes
from kvferry.plan.boxes import Ints
from kvferry.topology import Share

if TYPE_CHECKING:
    from kvferry.plan.request import PlanBatch, TransferPlan

MODULUS = 1 << 64

CACHED = 1 << 14
"""Descriptors taken at a time: their intermediate arrays stay in the processor's cache."""


class Unproven(Refusal):
    """A plan whose proof failed: consumer is what is required, producer what is planned."""


class Sums(NamedTuple):
    """Over a set of (consumer address c, difference d to the producer address): its size, and sums modulo 2**64."""

    size: int
    consumer: int
    delta: int
    mixed: int

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
        ).reduced()

    def plus(self, other: Sums) -> Sums:
        """The sums over both sets together."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True))).reduced()

    def reduced(self) -> Sums:
        return Sums(*(value % MODULUS for value in self))


NOTHING = Sums(0, 0, 0, 0)


def sums_of_points(consumer: Ints, producer: Ints) -> Sums:
    delta = producer - consumer  # int64 wraps around, which is arithmetic modulo 2**64
    return Sums(len(delta), int(consumer.sum()), int(delta.sum()), int(np.dot(consumer, delta))).reduced()


def sums_of_point(consumer: int, producer: int) -> Sums:
    return Sums(1, consumer, producer - consumer, consumer * (producer - consumer)).reduced()


def sums_of_runs(consumer: Ints, producer: Ints, lengths: Ints) -> Sums:
    """Byte by byte: a run of n bytes from c adds n * c + n * (n - 1) / 2 to the sum of consumer addresses."""
    found = NOTHING
    for at in range(0, len(lengths), CACHED):
        found = found.plus(_sums_of_few(*(column[at : at + CACHED] for column in (consumer, producer, lengths))))
    return found


def _sums_of_few(consumer: Ints, producer: Ints, lengths: Ints) -> Sums:
    n, d = lengths, producer - consumer
    odd = n & 1
    total = n * consumer + (n >> (1 - odd)) * (n - 1 >> odd)  # halves whichever of n and n - 1 is even
    return Sums(int(n.sum()), int(total.sum()), int(np.dot(n, d)), int(np.dot(total, d))).reduced()


class TokenWalk(NamedTuple):
    """The way to a token on one side: its block by the block's id, then the token axes inside."""

    block_size: int
    block_stride_bytes: int
    axes: tuple[Axis, ...]

    def addresses(self, block_ids: Ints, tokens: Ints) -> Ints:
        inside = offset_bytes(self.axes, "token", tokens % self.block_size)
        return block_ids[tokens // self.block_size] * self.block_stride_bytes + inside


class ClaimKey(NamedTuple):
    """What decides a set of tokens and where they lie; claims with one key add up.

    unit: index of the unit that moves them, which says where the last chunk is cut.
    """

    unit: int
    group: int
    consumer_region: int
    producer_region: int
    tile_tokens: int
    consumer: TokenWalk
    producer: TokenWalk


Claims = dict[ClaimKey, Sums]
"""What a pair requires, apart from tokens: the sums over layers, heads and content."""


def walk_rest(consumer: Field, producer: Field, consumer_head: int, producer_head: int, num_heads: int) -> Sums:
    """The sums over heads and content of one field; heads count from the start of each side's shard."""
    heads = _walk(consumer.axes, producer.axes, "head", consumer_head, producer_head, num_heads)
    content = _walk(consumer.axes, producer.axes, "content", 0, 0, consumer.content_bytes)
    return heads.times(content).times(sums_of_point(consumer.base_bytes, producer.base_bytes))


def _walk(
    consumer: Sequence[Axis], producer: Sequence[Axis], dim: Dim, consumer_start: int, producer_start: int, count: int
) -> Sums:
    index = np.arange(count, dtype=np.int64)
    return sums_of_points(
        offset_bytes(consumer, dim, index + consumer_start), offset_bytes(producer, dim, index + producer_start)
    )


def token_walk(layer: Layer, field: Field) -> TokenWalk:
    axes = tuple(axis for axis in field.axes if axis.dim == "token")
    return TokenWalk(layer.block_size, field.block_stride_bytes, axes)


def prove(
    claims: Claims,
    region_bytes: tuple[Sequence[int], Sequence[int]],
    tables: tuple[Sequence[Ints], Sequence[Ints]],
    first_token: int,
    plan: TransferPlan,
) -> None:
    """Raise Unproven unless the plan moves exactly what the claims require for these tables and tokens.

    region_bytes: lengths of the consumer's and the producer's regions. tables: block ids by group, of either side.
    Tokens count from first_token to where the plan says that it cut each unit's last chunk.
    """
    for batch in plan.batches:
        _prove_bounds("consumer", batch.consumer_region, region_bytes[0], batch.consumer_offsets, batch.lengths)
        _prove_bounds("producer", batch.producer_region, region_bytes[1], batch.producer_offsets, batch.lengths)
    for region in {batch.consumer_region for batch in plan.batches}:
        _prove_disjoint(region, [batch for batch in plan.batches if batch.consumer_region == region])
    required = _required(claims, tables, first_token, plan.stops)
    planned = {
        (batch.consumer_region, batch.producer_region): sums_of_runs(
            batch.consumer_offsets, batch.producer_offsets, batch.lengths
        )
        for batch in plan.batches
    }
    if required != planned:
        raise Unproven("coverage: sums by region", required, planned)


def _required(
    claims: Claims, tables: tuple[Sequence[Ints], Sequence[Ints]], first_token: int, stops: Sequence[int]
) -> dict[tuple[int, int], Sums]:
    found: dict[tuple[int, int], Sums] = {}
    known: dict[ClaimKey, Sums] = {}
    for key, rest in claims.items():
        stop = stops[key.unit]
        same = key._replace(unit=stop, consumer_region=0, producer_region=0)
        if same not in known:
            known[same] = _sums_of_tokens(key, tables[0][key.group], tables[1][key.group], first_token, stop)
        if known[same].size:
            regions = (key.consumer_region, key.producer_region)
            found[regions] = found.get(regions, NOTHING).plus(rest.times(known[same]))
    return found


def _sums_of_tokens(key: ClaimKey, consumer_ids: Ints, producer_ids: Ints, first: int, stop: int) -> Sums:
    tile = key.tile_tokens
    index = np.arange(first // tile * tile, stop, tile, dtype=np.int64)
    index = index[consumer_ids[index // key.consumer.block_size] >= 0]
    return sums_of_points(key.consumer.addresses(consumer_ids, index), key.producer.addresses(producer_ids, index))


def _prove_bounds(side: str, region: int, region_bytes: Sequence[int], offsets: Ints, lengths: Ints) -> None:
    low, high = int(offsets.min()), int((offsets + lengths).max())
    if low < 0 or high > region_bytes[region] or int(lengths.min()) < 1:
        raise Unproven(f"bounds of {side} region {region}", (0, region_bytes[region]), (low, high))


def _prove_disjoint(region: int, batches: Sequence[PlanBatch]) -> None:
    starts = np.concatenate([batch.consumer_offsets for batch in batches])
    lengths = np.concatenate([batch.lengths for batch in batches])
    if (np.diff(starts) >= lengths[:-1]).all():  # most caches have their layers in order of address
        return
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    bad = np.flatnonzero(np.diff(starts) < lengths[:-1])
    if len(bad):
        end, start = int(starts[bad[0]] + lengths[bad[0]]), int(starts[bad[0] + 1])
        raise Unproven(f"destination in region {region} written twice: next byte", end, start)


def prove_shares(consumer: CacheLayout, shares: Sequence[tuple[Share, CacheLayout]]) -> None:
    """Raise Unproven unless each (layer, head) of the consumer is in exactly one share, whose producer holds it.

    shares: each with the layout of its producer rank.
    """
    served: dict[str, list[int]] = {}
    for share, producer in shares:
        held = {layer.name: layer.heads for layer in producer.layers}
        for part in share.layers:
            heads = held.get(part.name)
            if heads is None or not heads.start <= part.start < part.stop <= heads.start + heads.count:
                raise Unproven(f"layer {part.name}: heads {part.start} to {part.stop}", "share", heads)
            served.setdefault(part.name, []).extend(range(part.start, part.stop))
    for layer in consumer.layers:
        required = list(range(layer.heads.start, layer.heads.start + layer.heads.count))
        planned = sorted(served.pop(layer.name, []))
        if planned != required:
            raise Unproven(f"layer {layer.name}: heads covered", required, planned)
    if served:
        raise Unproven("layers covered", [layer.name for layer in consumer.layers], sorted(served))
