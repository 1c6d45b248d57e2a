"""The coordinate oracle: every byte of a producer's cache says which global coordinate it is.

A plan is applied with plain copies; then every byte of the consumer's cache is looked at. Addresses are found here by
walking all axes of a field forwards, from digits to coordinates, which is not how the planner does it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from drawn import Situation

from kvferry.layout import CacheLayout, Context, Field, Layer
from kvferry.plan import BlockTable, TransferPlan, compile, prove_shares
from kvferry.topology import sources

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Cells(NamedTuple):
    """Every byte of one block of a field: its coordinate inside the block, and its offset from the block's start."""

    token: Ints
    head: Ints
    content: Ints
    offset: Ints


def cells(field: Field) -> Cells:
    shape = [axis.size for axis in field.axes]
    found = {
        "token": np.zeros(shape, np.int64),
        "head": np.zeros(shape, np.int64),
        "content": np.zeros(shape, np.int64),
    }
    offset = np.full(shape, field.base_bytes, np.int64)
    for axis, index in zip(field.axes, np.indices(shape), strict=True):
        found[axis.dim] += index * axis.step
        offset += index * axis.stride_bytes
    return Cells(*(one.ravel() for one in (found["token"], found["head"], found["content"], offset)))


def value(layer: str, field: str, token: Ints, head: Ints, content: Ints) -> Bytes:
    """One byte that a global coordinate is told apart by: its bits, well mixed."""
    x = np.full(len(token), zlib.crc32(f"{layer}/{field}".encode()), np.uint64)
    for part in (token, head, content):
        x = (x ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(29)
    return (x >> np.uint64(32)).astype(np.uint8)


def noise(layout: CacheLayout, seed: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, region.length_bytes, np.uint8) for region in layout.regions]


def dealt(context: Context, local: Ints) -> Ints:
    """The token that a rank's n-th is: tokens go round the ranks of a context in runs of `interleave`."""
    turn, inside = np.divmod(local, context.interleave)
    return (turn * context.size + context.rank) * context.interleave + inside


class Block(NamedTuple):
    """All bytes of one field in one block: addresses in the layer's region, tokens from the request's start."""

    addresses: Ints
    tokens: Ints
    values: Bytes


def blocks(layer: Layer, table: Sequence[int]) -> Iterator[tuple[Field, Block]]:
    for field in layer.fields:
        inside = cells(field)
        for position, block_id in enumerate(table):
            if block_id >= 0:
                tokens = position * layer.block_size + dealt(layer.context, inside.token)
                addresses = layer.base_bytes + block_id * field.block_stride_bytes + inside.offset
                heads = layer.heads.start + inside.head
                yield field, Block(addresses, tokens, value(layer.name, field.name, tokens, heads, inside.content))


def fill(layout: CacheLayout, memory: list[Bytes], tables: Sequence[Sequence[int]]) -> None:
    """Write every coordinate of a request's blocks where the layout says."""
    for layer in layout.layers:
        for _, block in blocks(layer, tables[layer.group]):
            memory[layer.region][block.addresses] = block.values


def apply(plan: TransferPlan, consumer: list[Bytes], producer: list[Bytes], written: list[Ints]) -> None:
    """Copy each descriptor's bytes; `written` counts how often each consumer byte was."""
    for batch in plan.batches:
        for c, p, n in zip(
            batch.consumer_offsets.tolist(), batch.producer_offsets.tolist(), batch.lengths.tolist(), strict=True
        ):
            assert 0 <= c < c + n <= len(consumer[batch.consumer_region])
            assert 0 <= p < p + n <= len(producer[batch.producer_region])
            consumer[batch.consumer_region][c : c + n] = producer[batch.producer_region][p : p + n]
            written[batch.consumer_region][c : c + n] += 1


class Verdict(NamedTuple):
    required_bytes: int
    tail_bytes: int


def judge(
    layout: CacheLayout,
    tables: Sequence[Sequence[int]],
    tokens: tuple[int, int],
    before: list[Bytes],
    after: list[Bytes],
    written: list[Ints],
) -> Verdict:
    """Every required byte was written once, with its own coordinate's value; no other byte was touched, but for the
    tail of the block that holds the last required token."""
    required = [np.zeros(len(one), np.bool_) for one in after]
    tail = [np.zeros(len(one), np.bool_) for one in after]
    seen: set[tuple[object, ...]] = set()
    for layer in layout.layers:
        memory = (layer.group, layer.region, layer.base_bytes, layer.fields, layer.context)
        if memory in seen:  # another name of the same bytes
            continue
        seen.add(memory)
        for field, block in blocks(layer, tables[layer.group]):
            span = span_tokens(layer, field)
            starts = block.tokens // span * span
            wanted = (starts + span > tokens[0]) & (starts < tokens[1]) & (tokens[0] < tokens[1])
            at = block.addresses[wanted]
            np.testing.assert_array_equal(after[layer.region][at], block.values[wanted], f"{layer.name} {field.name}")
            assert not required[layer.region][at].any(), "two required coordinates share a byte"
            required[layer.region][at] = True
            same_block = (tokens[1] - 1) // layer.block_size * layer.block_size
            allowed = (starts >= tokens[1]) & (block.tokens < same_block + layer.block_size)
            tail[layer.region][block.addresses[allowed]] = True
    for region, counts in enumerate(written):
        assert counts.max(initial=0) <= 1, "a byte was written twice"
        assert (counts[required[region]] == 1).all()
        assert not counts[~(required[region] | tail[region])].any(), "written outside"
        untouched = counts == 0
        np.testing.assert_array_equal(after[region][untouched], before[region][untouched])
    total = sum(int(counts.sum()) for counts in written)
    num_required = sum(int(mask.sum()) for mask in required)
    return Verdict(num_required, total - num_required)


def span_tokens(layer: Layer, field: Field) -> int:
    """Bytes of an opaque tile stand at its first token; a tile is required if any token is that it spans."""
    if field.opaque is None:
        return 1
    tile = min(axis.step for axis in field.axes if axis.dim == "token")
    return tile if tile <= layer.context.interleave else tile * layer.context.size


def run(
    consumer: CacheLayout,
    consumer_tables: Sequence[Sequence[int]],
    tokens: tuple[int, int],
    plans: Sequence[tuple[TransferPlan, CacheLayout]],
    producer_tables: Sequence[Sequence[int]],
) -> Verdict:
    """Fill the producers, apply the plans of one consumer rank, judge, and compare the counts that the plans state."""
    before = noise(consumer, 1)
    after, written = [one.copy() for one in before], [np.zeros(len(one), np.int64) for one in before]
    for seed, (plan, producer) in enumerate(plans):
        memory = noise(producer, 100 + seed)
        fill(producer, memory, producer_tables)
        apply(plan, after, memory, written)
    verdict = judge(consumer, consumer_tables, tokens, before, after, written)
    assert sum(plan.required_bytes for plan, _ in plans) == verdict.required_bytes
    assert sum(plan.num_bytes for plan, _ in plans) == verdict.required_bytes + verdict.tail_bytes
    return verdict


def transfer(situation: Situation) -> None:
    """Plan and run a situation for each consumer rank."""
    consumer, producer, tokens = situation
    request = [[BlockTable(np.array(table, np.int64)) for table in side.tables] for side in (consumer, producer)]
    for rank, layout in enumerate(consumer.layouts):
        shares = sources(layout, rank % consumer.tp_size, consumer.tp_size, producer.layouts)
        prove_shares(layout, [(share, producer.layouts[share.producer_rank]) for share in shares])
        plans = []
        for share in shares:
            source = producer.layouts[share.producer_rank]
            plans.append((compile(layout, source, share).bind(*request, *tokens), source))
        run(layout, consumer.tables, tokens, plans, producer.tables)
