"""Golden cases (tests/cases/plan.json): layouts, block tables and answers as data.

A layer names a builder of kvferry.layout with its arguments; each layer lies in a region of its own, behind `base`
bytes. "kernel_block_size" wraps it in with_kernel_blocks. Tables hold one list of block ids per KV cache group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import layout as layouts
from kvferry.layout import CacheLayout, Field, Heads, Layer, Region
from kvferry.plan import BlockTable, TransferPlan, compile, prove_shares
from kvferry.topology import sources

CASES = json.loads((Path(__file__).parent.parent / "cases" / "plan.json").read_text())


def cache(data: dict[str, Any], order: list[int] | None = None) -> CacheLayout:
    """The layers of a side, in the file's order or in another."""
    entries = list(data["layers"].items())
    made = [_layer(region, *entries[i]) for region, i in enumerate(order or range(len(entries)))]
    return CacheLayout(tuple(region for region, _ in made), tuple(layer for _, layer in made))


def _layer(region: int, name: str, data: dict[str, Any]) -> tuple[Region, Layer]:
    block_size, num_blocks = data["block_size"], data["num_blocks"]
    fields = getattr(layouts, data["build"])(**data["with"])
    if "kernel_block_size" in data:
        fields = layouts.with_kernel_blocks(fields, data["kernel_block_size"], block_size)
    base = data.get("base", 0)
    layer = Layer(
        name=name,
        group=data.get("group", 0),
        region=region,
        base_bytes=base,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=data.get("dtype", "bfloat16"),
        heads=Heads(*data.get("heads", (0, 1, 1))),
        fields=fields,
    )
    return Region(0, base + end_bytes(fields, num_blocks)), layer


def end_bytes(fields: tuple[Field, ...], num_blocks: int) -> int:
    """Bytes of all blocks, the padding of the last one included."""
    return max(
        max(field.block_stride_bytes * num_blocks, 0)
        + field.base_bytes
        + max(0, sum((axis.size - 1) * axis.stride_bytes for axis in field.axes) + 1 - field.block_stride_bytes)
        for field in fields
    )


def tables(block_ids: list[list[int]]) -> list[BlockTable]:
    return [BlockTable(np.array(group, np.int64)) for group in block_ids]


def plan_case(
    case: dict[str, Any], order: list[int] | None = None
) -> tuple[CacheLayout, list[tuple[TransferPlan, CacheLayout]]]:
    """The consumer's layout, and the plan for each source with that producer's layout."""
    consumer = cache(case["consumer"], order)
    producers = [cache(one) for one in case["producers"]]
    rank, num_ranks = case.get("consumer_rank", (0, 1))
    shares = sources(consumer, rank, num_ranks, producers)
    prove_shares(consumer, [(share, producers[share.producer_rank]) for share in shares])
    plans = []
    for share in shares:
        producer = producers[share.producer_rank]
        pair = compile(consumer, producer, share)
        request = tables(case["consumer_tables"]), tables(case["producer_tables"]), *case["tokens"]
        plans.append((pair.bind(*request), producer))
    return consumer, plans


def by_layer(consumer: CacheLayout, plan: TransferPlan) -> dict[str, list[list[int]]]:
    """Descriptors by layer name, which is by region here: [consumer offset, producer offset, length]."""
    return {consumer.layers[batch.consumer_region].name: np.stack(batch[2:], axis=1).tolist() for batch in plan.batches}
