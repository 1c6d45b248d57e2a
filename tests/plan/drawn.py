"""Draws whole situations: a model, two engines with different TP, stages and layouts, and a request's block tables."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from hypothesis import strategies as st

from kvferry.layout import (
    PHYSICAL_ORDERS,
    CacheLayout,
    Field,
    Heads,
    Layer,
    Region,
    Spec,
    cpu_tiles,
    from_shape,
    fused,
    key_only,
    opaque_tiles,
    physical_strides,
    with_kernel_blocks,
)
from kvferry.topology import kv_heads


class ModelLayer(NamedTuple):
    """kind: "kv", "latent" or "opaque". tile_tokens: what an opaque layer's kernel takes at once, else 0."""

    name: str
    group: int
    kind: str
    total_heads: int
    head_size: int
    head_size_v: int
    itemsize: int
    tile_tokens: int


class Side(NamedTuple):
    """One engine: layouts of all ranks, TP ranks innermost; block tables by group."""

    tp_size: int
    layouts: list[CacheLayout]
    tables: list[list[int]]


class Situation(NamedTuple):
    consumer: Side
    producer: Side
    tokens: tuple[int, int]


KV_LAYOUTS = ("2BNHD", "2BHND", "B2NHD", "B2HND", "cpu", "LBHNC", "LBNHC", "LHBNC")


class Slot(NamedTuple):
    """How one side keeps one layer: the layout's name, bytes of padding between blocks, kernel blocks of a block."""

    layout: str
    padding: int
    ratio: int


def fields_of(layer: ModelLayer, slot: Slot, heads: int, num_blocks: int, block_size: int) -> tuple[Field, ...]:
    tokens, rows = block_size // slot.ratio, num_blocks * slot.ratio
    return with_kernel_blocks(_rows(layer, slot, heads, rows, tokens), tokens, block_size)


def _rows(layer: ModelLayer, slot: Slot, heads: int, rows: int, tokens: int) -> tuple[Field, ...]:
    size, size_v, itemsize = layer.head_size, layer.head_size_v, layer.itemsize
    if slot.layout[0] in "2B" and "2" in slot.layout:
        shape = [{"2": 2, "B": rows, "N": tokens, "H": heads, "D": size}[letter] for letter in slot.layout]
        strides = [prod(shape[i + 1 :]) * itemsize for i in range(5)]
        if slot.layout[0] == "B":
            strides[0] += slot.padding
        spec = Spec(tokens, heads, size, itemsize, rows, slot.layout)  # type: ignore[arg-type]
        return from_shape(shape, strides, spec)
    if slot.layout == "key_only":
        content = size * itemsize
        return key_only(tokens, content, tokens * content + slot.padding)
    order = "LBHNC" if slot.layout in ("cpu", "opaque") else slot.layout
    shape = (rows, heads, tokens, size + size_v)
    strides, _ = physical_strides(order, shape, 1, itemsize)
    if order != "LHBNC":
        strides = (strides[0] + slot.padding, *strides[1:])
    if slot.layout == "cpu":
        return cpu_tiles(shape, strides, size, itemsize)
    if slot.layout == "opaque":
        return opaque_tiles(shape, strides, "kernel x")
    return fused(shape, strides, size, size_v, itemsize)


def end_bytes(fields: tuple[Field, ...], num_blocks: int) -> int:
    return max(
        field.base_bytes
        + (num_blocks - 1) * field.block_stride_bytes
        + sum((axis.size - 1) * axis.stride_bytes for axis in field.axes)
        + 1
        for field in fields
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelLayer, ...]:
    """One to five layers in one to three groups. Geometry repeats within a model, so that classes have members."""
    num_groups = draw(st.integers(1, 3))
    kinds = draw(st.lists(_geometries(), min_size=1, max_size=2))
    groups = [*range(num_groups), *draw(st.lists(st.integers(0, num_groups - 1), max_size=3))]
    return tuple(ModelLayer(f"layers.{i}", group, *draw(st.sampled_from(kinds))) for i, group in enumerate(groups))


@st.composite
def _geometries(draw: st.DrawFn) -> tuple[str, int, int, int, int, int]:
    kind = draw(st.sampled_from(("kv", "kv", "kv", "latent", "opaque")))
    total = 1 if kind == "latent" else draw(st.sampled_from((1, 2, 3, 4, 6)))
    size, itemsize = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2)))
    size_v = {"latent": 0, "kv": draw(st.sampled_from((size, size, size + 1))), "opaque": size}[kind]
    return kind, total, size, size_v, itemsize, draw(st.sampled_from((2, 4))) if kind == "opaque" else 0


def tp_sizes(model: tuple[ModelLayer, ...]) -> list[int]:
    """The TP sizes at which every layer's heads are legal: slices or replicas."""
    return [
        tp
        for tp in (1, 2, 3, 4, 6, 8)
        if all(max(tp, layer.total_heads) % min(tp, layer.total_heads) == 0 for layer in model)
    ]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    model = draw(models())
    num_groups = 1 + max(layer.group for layer in model)
    end = draw(st.integers(1, 24))
    first = draw(st.one_of(st.just(0), st.integers(0, end)))
    block_sizes = [draw(_block_sizes(model, group)) for group in range(num_groups)]
    wanted = [draw(_presence(first, end, sizes[0])) for sizes in block_sizes]
    needed = [_needed(first, end, present, *sizes) for present, sizes in zip(wanted, block_sizes, strict=True)]
    consumer = draw(_sides(model, [sizes[0] for sizes in block_sizes], wanted))
    producer = draw(_sides(model, [sizes[1] for sizes in block_sizes], needed))
    return Situation(consumer, producer, (first, end))


@st.composite
def _block_sizes(draw: st.DrawFn, model: tuple[ModelLayer, ...], group: int) -> tuple[int, int]:
    """(consumer's, producer's): multiples of what opaque layers take at once, else anything."""
    tiles = {layer.tile_tokens for layer in model if layer.group == group}
    unit = max(tiles)
    if unit:
        return unit * draw(st.integers(1, 3)), unit * draw(st.integers(1, 3))
    sizes = st.sampled_from((1, 2, 3, 4, 6, 8, 12))
    mine = draw(sizes)
    return mine, draw(st.one_of(st.just(mine), sizes))


@st.composite
def _presence(draw: st.DrawFn, first: int, end: int, block_size: int) -> list[bool]:
    """Which of a consumer's table entries have a block; a sliding window or a hit leaves holes."""
    entries = -(-end // block_size)
    present = draw(st.lists(st.booleans(), min_size=entries, max_size=entries))
    return [True] * entries if draw(st.booleans()) else present


def _needed(first: int, end: int, present: list[bool], consumer_size: int, producer_size: int) -> list[bool]:
    tokens = [token for token in range(first, end) if present[token // consumer_size]]
    entries = -(-end // producer_size)
    found = {token // producer_size for token in tokens}
    return [entry in found for entry in range(entries)]


@st.composite
def _sides(draw: st.DrawFn, model: tuple[ModelLayer, ...], block_sizes: list[int], present: list[list[bool]]) -> Side:
    """An engine whose groups draw their blocks from one pool, as vLLM's do; now and then groups share memory."""
    num_blocks = sum(sum(one) for one in present) + draw(st.integers(1, 3))
    ids = draw(st.permutations(range(num_blocks)))
    if draw(st.booleans()):
        ids = sorted(ids)  # long runs
    tables, at = [], 0
    for one in present:
        tables.append([])
        for there in one:
            tables[-1].append(ids[at] if there else -1)
            at += there
    tp_size = draw(st.sampled_from(tp_sizes(model)))
    cuts = sorted(draw(st.lists(st.integers(0, len(model)), max_size=2)))
    stages = [model[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(model)], strict=True)]
    layouts = []
    for stage in stages:
        pooled = draw(st.booleans()) and _poolable(stage, block_sizes)
        make = _pool(draw, stage, num_blocks) if pooled else _apart(draw, stage, num_blocks)
        layouts.extend(make(tp_rank, tp_size, block_sizes) for tp_rank in range(tp_size))
    return Side(tp_size, layouts, tables)


def _heads(layer: ModelLayer, tp_rank: int, tp_size: int) -> Heads:
    return Heads(0, 1, 1) if layer.kind == "latent" else kv_heads(tp_rank, tp_size, layer.total_heads)


def _apart(draw: st.DrawFn, stage: tuple[ModelLayer, ...], num_blocks: int):  # type: ignore[no-untyped-def]
    """Each layer with a layout of its own, in a few regions, with gaps between."""
    ratios = {layer.name: draw(st.sampled_from((1, 1, 2, 3))) for layer in stage}
    layouts = {layer.name: draw(_layout_names(layer)) for layer in stage}
    paddings = {layer.name: draw(st.sampled_from((0, 0, 3, 8))) for layer in stage}
    regions = {layer.name: draw(st.integers(0, 1)) for layer in stage}
    order = draw(st.permutations(stage))

    def make(tp_rank: int, tp_size: int, block_sizes: list[int]) -> CacheLayout:
        ends, made = [0, 0], []
        for layer in order:
            block_size, heads = block_sizes[layer.group], _heads(layer, tp_rank, tp_size)
            ratio = block_size // layer.tile_tokens if layer.tile_tokens else ratios[layer.name]
            ratio = ratio if block_size % ratio == 0 else 1
            slot = Slot(layouts[layer.name], paddings[layer.name], ratio)
            fields = fields_of(layer, slot, heads.count, num_blocks, block_size)
            region = regions[layer.name]
            made.append(
                Layer(layer.name, layer.group, region, ends[region], num_blocks, block_size, "x", heads, fields)
            )
            ends[region] += end_bytes(fields, num_blocks) + paddings[layer.name]
        return CacheLayout(tuple(Region(0, max(end, 1)) for end in ends), tuple(made))

    return make


@st.composite
def _layout_names(draw: st.DrawFn, layer: ModelLayer) -> str:
    if layer.kind == "opaque":
        return "opaque"
    if layer.kind == "latent":
        return draw(st.sampled_from(("key_only", "LBNHC", "LBHNC")))
    same = layer.head_size == layer.head_size_v
    return draw(st.sampled_from(KV_LAYOUTS if same else KV_LAYOUTS[5:]))


def _poolable(stage: tuple[ModelLayer, ...], block_sizes: list[int]) -> bool:
    """Layers of one geometry, which vLLM keeps in one tensor."""
    return len({(layer[2:], block_sizes[layer.group]) for layer in stage}) == 1 and stage[0].kind == "kv"


def _pool(draw: st.DrawFn, stage: tuple[ModelLayer, ...], num_blocks: int):  # type: ignore[no-untyped-def]
    """One tensor in one of the six orders. The i-th layers of all groups lie at the same address."""
    order = draw(st.sampled_from(PHYSICAL_ORDERS))
    slots, counts = {}, {}
    for layer in stage:
        slots[layer.name] = counts.get(layer.group, 0)
        counts[layer.group] = slots[layer.name] + 1
    num_slots = max(counts.values())

    def make(tp_rank: int, tp_size: int, block_sizes: list[int]) -> CacheLayout:
        layer, block_size = stage[0], block_sizes[stage[0].group]
        heads = _heads(layer, tp_rank, tp_size)
        shape = (num_blocks, heads.count, block_size, layer.head_size + layer.head_size_v)
        strides, layer_stride = physical_strides(order, shape, num_slots, layer.itemsize)
        fields = fused(shape, strides, layer.head_size, layer.head_size_v, layer.itemsize)
        made = tuple(
            Layer(one.name, one.group, 0, slots[one.name] * layer_stride, num_blocks, block_size, "x", heads, fields)
            for one in stage
        )
        return CacheLayout((Region(0, prod(shape) * num_slots * layer.itemsize),), made)

    return make
