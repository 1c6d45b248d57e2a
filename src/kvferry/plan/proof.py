"""Why a plan may be trusted: sums over all bytes, taken once over descriptors and once over coordinates.

The planner refines, folds, joins and merges. The proof does none of that: for each layer and field it walks the axes of
both sides, one dimension at a time, and sums over all required bytes (sums.py): how many there are, moments of their
addresses, and a print that depends on which consumer byte goes with which producer byte. Dimensions are independent of
one another, so sums of the whole follow from sums over each. Equal sums, destinations that are disjoint and bounds that
hold: then each byte is covered once, from its own source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvferry.layout import Axis, Context, Dim, Field, Layer, Refusal, offset_bytes
from kvferry.plan.boxes import Ints
from kvferry.plan.sums import NOTHING, Sums, few, sums_of_copies, sums_of_point, sums_of_points

if TYPE_CHECKING:
    from kvferry.plan.request import PlanBatch, TransferPlan


class Unproven(Refusal):
    """A plan whose proof failed: consumer is what is required, producer what is planned."""


class TokenWalk(NamedTuple):
    """The way to a token on one side: its block by the block's id, then the token axes inside.

    block_size: tokens over all ranks of the context.
    """

    block_size: int
    block_stride_bytes: int
    axes: tuple[Axis, ...]
    context: Context

    def held(self, tokens: Ints) -> Ints:
        """Those of the tokens that are on this side's rank."""
        return tokens if self.context.is_whole else tokens[self.context.holds(tokens)]

    def addresses(self, block_ids: Ints, tokens: Ints) -> Ints:
        blocks = tokens // self.block_size
        local = self.context.local(tokens - blocks * self.block_size)
        return block_ids[blocks] * self.block_stride_bytes + offset_bytes(self.axes, "token", local)


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
    axes, context = tuple(axis for axis in field.axes if axis.dim == "token"), layer.context
    if field.opaque is not None and not context.is_whole and min(axis.step for axis in axes) > context.interleave:
        # Such a tile holds runs of tokens from far apart, and only a tile like it pairs: walk by what both span.
        axes = tuple(msgspec.structs.replace(axis, step=axis.step * context.size) for axis in axes)
        context = Context()
    return TokenWalk(layer.block_size, field.block_stride_bytes, axes, context)


def prove(
    claims: Claims,
    region_bytes: tuple[Sequence[int], Sequence[int]],
    tables: tuple[Sequence[Ints], Sequence[Ints]],
    tokens: tuple[int, int],
    plan: TransferPlan,
    window_starts: Sequence[int] = (),
) -> None:
    """Raise Unproven unless the plan moves exactly what the claims require for these tables and tokens.

    region_bytes: lengths of the consumer's and the producer's regions. tables: block ids by group, of either side.
    tokens: [first, end) of the request. They count from where the plan says that it begins a unit, between the first
    and the start of the group's window, to where it says that it cut the unit's last chunk, between the end and the
    end of that block.
    """
    for key in claims:
        _prove_extent(key, tokens, plan, window_starts)
    for batch in plan.batches:
        _prove_bounds("consumer", batch.consumer_region, region_bytes[0], batch.consumer_offsets, batch.lengths)
        _prove_bounds("producer", batch.producer_region, region_bytes[1], batch.producer_offsets, batch.lengths)
    _prove_apart(plan.batches)
    required = _required(claims, tables, plan)
    copies = Counter(piece.batch for piece in plan.slices)  # layers that are alike: only a hint for speed
    planned = {
        (batch.consumer_region, batch.producer_region): sums_of_copies(
            batch.consumer_offsets, batch.producer_offsets, batch.lengths, copies[index]
        )
        for index, batch in enumerate(plan.batches)
    }
    if required != planned:
        raise Unproven("coverage: sums by region", required, planned)


def prove_together(plans: Sequence[TransferPlan]) -> None:
    """Raise Unproven if plans of one request, each proven, write a byte twice: of a consumer rank, all its sources'."""
    if sum(bool(plan.batches) for plan in plans) > 1:
        _prove_apart([batch for plan in plans for batch in plan.batches])


def _prove_extent(key: ClaimKey, tokens: tuple[int, int], plan: TransferPlan, window_starts: Sequence[int]) -> None:
    (first, end), block_size = tokens, key.consumer.block_size
    latest = max(first, window_starts[key.group]) if window_starts else first
    if not first <= plan.starts[key.unit] <= latest:
        raise Unproven(f"group {key.group}: first token", (first, latest), plan.starts[key.unit])
    furthest = -(-end // block_size) * block_size
    if not end <= plan.stops[key.unit] <= furthest:
        raise Unproven(f"group {key.group}: end of tokens", (end, furthest), plan.stops[key.unit])


def _required(
    claims: Claims, tables: tuple[Sequence[Ints], Sequence[Ints]], plan: TransferPlan
) -> dict[tuple[int, int], Sums]:
    found: dict[tuple[int, int], Sums] = {}
    known: dict[tuple[int, int, ClaimKey], Sums] = {}
    for key, rest in claims.items():
        start, stop = plan.starts[key.unit], plan.stops[key.unit]
        same = (start, stop, key._replace(unit=0, consumer_region=0, producer_region=0))
        if same not in known:
            known[same] = _sums_of_tokens(key, tables[0][key.group], tables[1][key.group], start, stop)
        if known[same].size:
            regions = (key.consumer_region, key.producer_region)
            found[regions] = found.get(regions, NOTHING).plus(rest.times(known[same]))
    return found


def _sums_of_tokens(key: ClaimKey, consumer_ids: Ints, producer_ids: Ints, first: int, stop: int) -> Sums:
    """Over the tiles of [first, stop) that both sides hold and the consumer has blocks for."""
    first = first // key.tile_tokens * key.tile_tokens
    sizes = key.consumer.block_size, key.producer.block_size
    grain = gcd(*sizes)
    turns, begin, end = lcm(*sizes) // grain, -(-first // grain), stop // grain
    if end - begin < WORTH_GRAINS * turns:
        return _sums_of_each(key, consumer_ids, producer_ids, first, stop)
    # A grain of tokens lies in one block on either side. Of grains that lie alike in their blocks, the place of the
    # block and the place in the grain are independent, as other dimensions are.
    found = _sums_of_each(key, consumer_ids, producer_ids, first, begin * grain)
    found = found.plus(_sums_of_each(key, consumer_ids, producer_ids, end * grain, stop))
    for turn in range(turns):
        inside = _sums_inside(key._replace(unit=0, group=0, consumer_region=0, producer_region=0), turn * grain, grain)
        if inside.size:
            tokens = np.arange(begin + (turn - begin) % turns, end, turns, dtype=np.int64) * grain
            found = found.plus(inside.times(_sums_of_blocks(key, consumer_ids, producer_ids, tokens)))
    return found


WORTH_GRAINS = 4
"""For so many grains that lie alike it is faster to take them together than token by token."""


def _sums_of_blocks(key: ClaimKey, consumer_ids: Ints, producer_ids: Ints, tokens: Ints) -> Sums:
    """Over the starts of the blocks of tokens that the consumer has blocks for."""
    mine = consumer_ids[tokens // key.consumer.block_size]
    theirs = producer_ids[tokens[mine >= 0] // key.producer.block_size]
    return sums_of_points(mine[mine >= 0] * key.consumer.block_stride_bytes, theirs * key.producer.block_stride_bytes)


@lru_cache(maxsize=1024)
def _sums_inside(key: ClaimKey, start: int, count: int) -> Sums:
    """Over the tokens [start, start + count), as if all blocks were at 0."""
    none = np.zeros((start + count) // min(key.consumer.block_size, key.producer.block_size) + 1, np.int64)
    return _sums_of_each(key, none, none, start, start + count)


def _sums_of_each(key: ClaimKey, consumer_ids: Ints, producer_ids: Ints, first: int, stop: int) -> Sums:
    """Over the same as _sums_of_tokens, tile by tile."""
    if first == stop:
        return NOTHING
    index = key.producer.held(key.consumer.held(np.arange(first, stop, key.tile_tokens, dtype=np.int64)))
    if (consumer_ids < 0).any():
        index = index[consumer_ids[index // key.consumer.block_size] >= 0]
    return sums_of_points(key.consumer.addresses(consumer_ids, index), key.producer.addresses(producer_ids, index))


def _prove_bounds(side: str, region: int, region_bytes: Sequence[int], offsets: Ints, lengths: Ints) -> None:
    low = min(int(starts.min()) for (starts,) in few(offsets))
    high = max(int((starts + some).max()) for starts, some in few(offsets, lengths))
    if low < 0 or high > region_bytes[region] or int(lengths.min()) < 1:
        raise Unproven(f"bounds of {side} region {region}", (0, region_bytes[region]), (low, high))


def _prove_apart(batches: Sequence[PlanBatch]) -> None:
    for region in {batch.consumer_region for batch in batches}:
        _prove_disjoint(region, [batch for batch in batches if batch.consumer_region == region])


def _prove_disjoint(region: int, batches: Sequence[PlanBatch]) -> None:
    starts = _joined([batch.consumer_offsets for batch in batches])
    lengths = _joined([batch.lengths for batch in batches])
    if _ascend(starts, lengths):  # most caches have their layers in order of address
        return
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    bad = np.flatnonzero(np.diff(starts) < lengths[:-1])
    if len(bad):
        end, start = int(starts[bad[0]] + lengths[bad[0]]), int(starts[bad[0] + 1])
        raise Unproven(f"destination in region {region} written twice: next byte", end, start)


def _joined(columns: Sequence[Ints]) -> Ints:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _ascend(starts: Ints, lengths: Ints) -> bool:
    """Whether each run ends before the next begins."""
    runs = few(starts[:-1], lengths[:-1], starts[1:])
    return all((some + length <= following).all() for some, length, following in runs)
