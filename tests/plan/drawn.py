"""Draws whole situations: a model, two engines with different TP, stages, contexts and layouts, and a request's block
tables."""

from __future__ import annotations

from math import lcm, prod
from typing import NamedTuple

from hypothesis import strategies as st

from kvferry.layout import (
    PHYSICAL_ORDERS,
    STATE_TOKENS,
    CacheLayout,
    Channels,
    Context,
    Field,
    Heads,
    Layer,
    Region,
    Spec,
    cpu_tiles,
    from_shape,
    fused,
    key_only,
    opaque_cells,
    opaque_tiles,
    physical_strides,
    state,
    with_kernel_blocks,
)
from kvferry.topology import kv_heads


class ModelLayer(NamedTuple):
    """kind: "kv", "latent", "cells", "opaque" or "state".

    tile_tokens: what an opaque layer's kernel takes at once, else 0. Of a state (one part of it), total_heads are its
    shards, head_size the channels of one and head_size_v the steps of its window.
    """

    name: str
    group: int
    kind: str
    total_heads: int
    head_size: int
    head_size_v: int
    itemsize: int
    tile_tokens: int


class Deal(NamedTuple):
    """How an engine deals tokens to the ranks of a context, where a layer's replicas and blocks allow."""

    size: int = 1
    interleave: int = 1

    @property
    def period(self) -> int:
        return self.size * self.interleave


NO_DEAL = Deal()


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
LAYOUTS = {
    "kv": KV_LAYOUTS,
    "latent": ("key_only", "LBNHC", "LBHNC"),
    "cells": ("LBNHC", "LBHNC"),
    "opaque": ("opaque",),
    "state": ("DS", "SD"),
}


class Slot(NamedTuple):
    """How one side keeps one layer; padding in bytes, between blocks and behind the layer.

    ratio: kernel blocks of a block, if that divides it; an opaque layer's kernel blocks are its tiles. Of a state, the
    channel that it begins with.
    """

    layout: str
    padding: int
    ratio: int
    region: int


def fields_of(
    layer: ModelLayer, slot: Slot, heads: int, num_blocks: int, block_size: int, context: Context
) -> tuple[Field, ...]:
    if layer.kind == "state":
        return _state(layer, slot, heads)
    local = block_size // context.size
    ratio = local // layer.tile_tokens if layer.tile_tokens else slot.ratio
    if local % ratio or (not layer.tile_tokens and not _cuts(local // ratio, context)):
        ratio = 1
    tokens, rows = local // ratio, num_blocks * ratio
    return with_kernel_blocks(_rows(layer, slot, heads, rows, tokens), tokens, local)


def _cuts(kernel_block: int, context: Context) -> bool:
    """Whether kernel blocks and runs of a context end at or inside one another."""
    return context.size == 1 or not kernel_block % context.interleave or not context.interleave % kernel_block


def _state(layer: ModelLayer, slot: Slot, shards: int) -> tuple[Field, ...]:
    """A tensor of its own in each slot, which begins and ends with channels of somebody else."""
    first, itemsize = slot.ratio - 1, layer.itemsize
    channels = first + shards * layer.head_size + slot.padding
    part = Channels(shards, layer.head_size, layer.head_size_v, first, slot.layout == "SD", channels)
    return state("part", part, itemsize, slot.padding, channels * layer.head_size_v * itemsize + 2 * slot.padding)


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
    if layer.kind == "opaque":
        return opaque_tiles(shape, strides, "kernel x")
    if layer.kind == "cells":
        return opaque_cells(shape, strides, "quantised")
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
    """Two to six layers in one to three groups, perhaps parts of states in one more.

    Geometry repeats within a model, so that classes have members.
    """
    num_groups = draw(st.sampled_from((1, 1, 2, 3)))
    kinds = draw(st.lists(_geometries(), min_size=1, max_size=draw(st.sampled_from((1, 1, 3)))))
    groups = [*range(num_groups), *draw(st.lists(st.integers(0, num_groups - 1), min_size=1, max_size=3))]
    layers = [ModelLayer(f"layers.{i}", group, *draw(st.sampled_from(kinds))) for i, group in enumerate(groups)]
    parts = draw(st.lists(_parts(), max_size=draw(st.sampled_from((0, 0, 3)))))
    layers += [ModelLayer(f"mixer/{i}", num_groups, *part) for i, part in enumerate(parts)]
    return tuple(layers)


@st.composite
def _geometries(draw: st.DrawFn) -> tuple[str, int, int, int, int, int]:
    kind = draw(st.sampled_from(("kv", "kv", "latent", "latent", "cells", "opaque")))
    total = 1 if kind == "latent" else draw(st.sampled_from((1, 2, 3, 4, 6)))
    size, itemsize = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2)))
    size_v = 0 if kind == "latent" else draw(st.sampled_from((size, size, size + 1))) if kind == "kv" else size
    return kind, total, size, size_v, itemsize, draw(st.sampled_from((2, 4))) if kind == "opaque" else 0


@st.composite
def _parts(draw: st.DrawFn) -> tuple[str, int, int, int, int, int]:
    """A window of a convolution, or what has no steps."""
    total, channels, steps = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return "state", total, channels, steps, draw(st.sampled_from((1, 2))), 0


def heads_of(layer: ModelLayer, tp_rank: int, tp_size: int) -> Heads:
    return Heads(0, 1, 1) if layer.kind == "latent" else kv_heads(tp_rank, tp_size, layer.total_heads)


def context_of(layer: ModelLayer, tp_rank: int, tp_size: int, deal: Deal, block_size: int) -> Context:
    """Ranks that hold the same heads share out the tokens, if their number and the blocks allow."""
    replicas = tp_size if layer.kind == "latent" else tp_size // layer.total_heads
    fits = replicas and replicas % deal.size == 0 and block_size % deal.period == 0
    if layer.kind == "state" or not fits or deal.interleave % max(layer.tile_tokens, 1):
        return Context()
    return Context(tp_rank % deal.size, *deal)


def scales_of(layer: ModelLayer) -> str:
    return "k=0.5 v=2.0" if layer.kind == "kv" and layer.itemsize == 1 else ""


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
    ours = draw(_recipes(model))
    theirs = ours if draw(st.booleans()) else draw(_recipes(model, ours))
    end = draw(st.integers(1, 32))
    first = draw(st.one_of(st.just(0), st.integers(0, end)))
    block_sizes = [draw(_block_sizes(model, group, ours.deal, theirs.deal)) for group in range(num_groups)]
    wanted = [draw(_presence(end, sizes[0])) for sizes in block_sizes]
    needed = [_needed(first, end, present, *sizes) for present, sizes in zip(wanted, block_sizes, strict=True)]
    consumer = draw(_sides(ours, [sizes[0] for sizes in block_sizes], wanted))
    producer = draw(_sides(theirs, [sizes[1] for sizes in block_sizes], needed))
    return Situation(consumer, producer, (first, end))


@st.composite
def _block_sizes(
    draw: st.DrawFn, model: tuple[ModelLayer, ...], group: int, ours: Deal, theirs: Deal
) -> tuple[int, int]:
    """(consumer's, producer's): multiples of what opaque layers take at once, else anything, and mostly of what is
    dealt to all ranks of a context."""
    layers = [layer for layer in model if layer.group == group]
    if layers[0].kind == "state":
        return STATE_TOKENS, STATE_TOKENS
    tile = max(layer.tile_tokens for layer in layers)
    sizes = st.sampled_from((tile, 2 * tile, 3 * tile) if tile else (1, 2, 3, 4, 6, 8, 12))

    def for_all(size: int, deal: Deal) -> int:
        return lcm(size, deal.period) if draw(st.sampled_from((True, True, False))) else size

    mine = for_all(draw(sizes), ours)
    return mine, draw(st.one_of(st.just(lcm(mine, theirs.period)), sizes.map(lambda size: for_all(size, theirs))))


@st.composite
def _presence(draw: st.DrawFn, end: int, block_size: int) -> list[bool]:
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
def _sides(draw: st.DrawFn, recipe: Recipe, block_sizes: list[int], present: list[list[bool]]) -> Side:
    """An engine whose groups draw their blocks from one pool, as vLLM's do, so that groups may share memory."""
    num_blocks = sum(sum(one) for one in present) + draw(st.integers(1, 3))
    ids = draw(st.permutations(range(num_blocks)))
    if draw(st.booleans()):
        ids = sorted(ids)  # long runs
    rest = iter(ids)
    tables = [[next(rest) if there else -1 for there in one] for one in present]
    layouts = [
        stage.layout(tp_rank, recipe.tp_size, num_blocks, block_sizes, recipe.deal)
        for stage in recipe.stages
        for tp_rank in range(recipe.tp_size)
    ]
    return Side(recipe.tp_size, layouts, tables)


class Apart(NamedTuple):
    """A pipeline stage whose layers each have a layout of their own, in two regions, with gaps between."""

    layers: tuple[ModelLayer, ...]
    slots: tuple[Slot, ...]

    def layout(
        self, tp_rank: int, tp_size: int, num_blocks: int, block_sizes: list[int], deal: Deal = NO_DEAL
    ) -> CacheLayout:
        ends, made = [0, 0], []
        for layer, slot in zip(self.layers, self.slots, strict=True):
            block_size, heads = block_sizes[layer.group], heads_of(layer, tp_rank, tp_size)
            context = context_of(layer, tp_rank, tp_size, deal, block_size)
            fields = fields_of(layer, slot, heads.count, num_blocks, block_size, context)
            at, rest = slot.region, ("x", heads, fields, context, scales_of(layer))
            made.append(Layer(layer.name, layer.group, at, ends[at], num_blocks, block_size, *rest))
            ends[at] += end_bytes(fields, num_blocks) + slot.padding
        return CacheLayout(tuple(Region(0, max(end, 1)) for end in ends), tuple(made))


class Pool(NamedTuple):
    """A stage of layers that are alike, in one tensor; the i-th layers of all groups lie at the same address."""

    layers: tuple[ModelLayer, ...]
    order: str

    def layout(
        self, tp_rank: int, tp_size: int, num_blocks: int, block_sizes: list[int], deal: Deal = NO_DEAL
    ) -> CacheLayout:
        first, counts = self.layers[0], dict.fromkeys(range(len(block_sizes)), 0)
        heads = heads_of(first, tp_rank, tp_size)
        contexts = [context_of(first, tp_rank, tp_size, deal, size) for size in block_sizes]
        tokens = [size // context.size for size, context in zip(block_sizes, contexts, strict=True)]
        most = max(tokens[layer.group] for layer in self.layers)
        num_slots = max(sum(one.group == group for one in self.layers) for group in counts)
        made = []
        for layer in self.layers:
            # A group of smaller blocks leaves the rest of its pages empty.
            shape = (num_blocks, heads.count, most, layer.head_size + layer.head_size_v)
            strides, layer_stride = physical_strides(self.order, shape, num_slots, layer.itemsize)
            mine = (*shape[:2], tokens[layer.group], shape[3])
            fields = fused(mine, strides, layer.head_size, layer.head_size_v, layer.itemsize)
            base = counts[layer.group] * layer_stride
            counts[layer.group] += 1
            rest = ("x", heads, fields, contexts[layer.group], scales_of(layer))
            made.append(Layer(layer.name, layer.group, 0, base, num_blocks, block_sizes[layer.group], *rest))
        return CacheLayout((Region(0, prod(shape) * num_slots * first.itemsize),), tuple(made))


class Recipe(NamedTuple):
    """How an engine keeps a model, but for its block sizes and number of blocks."""

    tp_size: int
    stages: tuple[Apart | Pool, ...]
    deal: Deal


@st.composite
def _recipes(draw: st.DrawFn, model: tuple[ModelLayer, ...], other: Recipe | None = None) -> Recipe:
    """A new one; or one like the other, but for the TP size, the contexts, or for the layouts of some stages."""
    tp_size = draw(st.sampled_from(tp_sizes(model)))
    deal = Deal(draw(st.sampled_from((1, 2, 2, 4))), draw(st.sampled_from((1, 2, 4))))
    if other and draw(st.booleans()):
        stages = tuple(stage if draw(st.booleans()) else draw(_stages(stage.layers)) for stage in other.stages)
        return Recipe(tp_size, stages, deal)
    cuts = sorted(draw(st.lists(st.integers(0, len(model)), max_size=draw(st.sampled_from((0, 1, 2))))))
    parts = [model[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(model)], strict=True)]
    return Recipe(tp_size, tuple([draw(_stages(part)) for part in parts]), deal)


@st.composite
def _stages(draw: st.DrawFn, layers: tuple[ModelLayer, ...]) -> Apart | Pool:
    alike = len({layer[2:] for layer in layers}) == 1 and layers[0].kind == "kv"
    if alike and draw(st.booleans()):
        return Pool(layers, draw(st.sampled_from((*PHYSICAL_ORDERS, *PHYSICAL_ORDERS[3:]))))
    mixed = tuple(draw(st.permutations(layers)))
    one_for_all = draw(st.booleans())
    slots: list[Slot] = []
    for layer in mixed:
        like = next((slot for slot, seen in zip(slots, mixed, strict=False) if seen[2:] == layer[2:]), None)
        slots.append(like if like and one_for_all else draw(_slots(layer)))
    return Apart(mixed, tuple(slots))


@st.composite
def _slots(draw: st.DrawFn, layer: ModelLayer) -> Slot:
    names = LAYOUTS[layer.kind]
    if layer.head_size != layer.head_size_v and layer.kind == "kv":
        names = KV_LAYOUTS[5:]
    padding, ratio = draw(st.sampled_from((0, 0, 3, 8))), draw(st.sampled_from((1, 1, 2, 3)))
    return Slot(draw(st.sampled_from(names)), padding, ratio, draw(st.integers(0, 1)))
