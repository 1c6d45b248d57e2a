"""What bulk.py looks at, drawn from a seed: drawn.py's engines, and more, with `random` instead of hypothesis.

Hypothesis shrinks what fails, but takes longer to draw a situation than it takes to plan and judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from random import Random
from typing import NamedTuple

import msgspec
from drawn import (
    KV_LAYOUTS,
    LAYOUTS,
    NO_DEAL,
    Apart,
    Deal,
    ModelLayer,
    Pool,
    Recipe,
    Slot,
    context_of,
    end_bytes,
    fields_of,
    heads_of,
    scales_of,
)

from kvferry.layout import PHYSICAL_ORDERS, STATE_TOKENS, CacheLayout, Layer, Region

TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
KV_HEADS = (1, 2, 3, 4, 6, 8, 12)

MOST_BLOCK_TOKENS = 48
"""Blocks that contexts would make larger are not made for them."""

BLOCK_OUTERMOST = frozenset(("B2NHD", "B2HND", "cpu", "LBHNC", "LBNHC", "key_only", "opaque", "DS", "SD"))


class Overlaid(NamedTuple):
    """A stage whose pages all have one size; the i-th layers of all groups lie at the same address.

    blocks_outermost: a block's pages of all layers lie together, instead of a layer's pages of all blocks.
    """

    layers: tuple[ModelLayer, ...]
    slots: tuple[Slot, ...]
    blocks_outermost: bool

    def layout(
        self, tp_rank: int, tp_size: int, num_blocks: int, block_sizes: list[int], deal: Deal = NO_DEAL
    ) -> CacheLayout:
        made, place_in_group = [], dict.fromkeys(range(len(block_sizes)), 0)
        for layer, slot in zip(self.layers, self.slots, strict=True):
            block_size, heads = block_sizes[layer.group], heads_of(layer, tp_rank, tp_size)
            context = context_of(layer, tp_rank, tp_size, deal, block_size)
            fields = fields_of(layer, slot, heads.count, num_blocks, block_size, context)
            rest = (num_blocks, block_size, "x", heads, fields, context, scales_of(layer))
            made.append(Layer(layer.name, layer.group, 0, place_in_group[layer.group], *rest))
            place_in_group[layer.group] += 1
        page = max((end_bytes(layer.fields, 1) for layer in made), default=1)
        places = max(place_in_group.values())
        block_stride, place_stride = (page * places, page) if self.blocks_outermost else (page, page * num_blocks)
        layers = [_moved(layer, layer.base_bytes * place_stride, block_stride) for layer in made]
        return CacheLayout((Region(0, max(1, places * page * num_blocks)),), tuple(layers))


def _moved(layer: Layer, base_bytes: int, block_stride: int) -> Layer:
    fields = tuple(msgspec.structs.replace(field, block_stride_bytes=block_stride) for field in layer.fields)
    return msgspec.structs.replace(layer, base_bytes=base_bytes, fields=fields)


class Engine(NamedTuple):
    """All ranks' layouts, TP ranks innermost; block sizes by group."""

    recipe: Recipe
    block_sizes: list[int]
    num_blocks: int
    layouts: list[CacheLayout]


class Engines(NamedTuple):
    """other_names: of layers that have two, the second by the first. most_tokens: of a request."""

    model: tuple[ModelLayer, ...]
    consumer: Engine
    producer: Engine
    other_names: dict[str, str]
    most_tokens: int

    @property
    def block_sizes(self) -> list[tuple[int, int]]:
        """By group, the consumer's and the producer's."""
        return list(zip(self.consumer.block_sizes, self.producer.block_sizes, strict=True))


class Request(NamedTuple):
    """The tokens [first, end), and the block tables by group, the consumer's and the producer's.

    window_starts: by group, the first token that is still looked at, at most end; 0 where there is no sliding window.
    """

    first: int
    end: int
    tables: tuple[list[list[int]], list[list[int]]]
    window_starts: list[int]


def draw_engines(rng: Random) -> Engines:
    model = draw_model(rng)
    ours = draw_recipe(rng, model)
    theirs = draw_recipe(rng, model, ours)
    groups = range(1 + max(layer.group for layer in model))
    sizes = [
        draw_block_sizes(rng, [layer for layer in model if layer.group == group], ours, theirs) for group in groups
    ]
    largest = max((size for both in sizes for size in both if size < STATE_TOKENS), default=1)
    most_tokens = max(rng.choice((8, 16, 24)), largest + 4)
    names = {rng.choice(model).name: "layers.other"} if rng.random() < 0.15 else {}
    engines = [
        draw_engine(rng, recipe, [both[side] for both in sizes], most_tokens, names)
        for side, recipe in enumerate((ours, theirs))
    ]
    return Engines(model, engines[0], engines[1], names, most_tokens)


def draw_model(rng: Random) -> tuple[ModelLayer, ...]:
    """One to six layers in one to three groups, perhaps parts of states in one more."""
    num_groups = rng.choice((1, 1, 2, 3))
    kinds = [draw_geometry(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    groups = [*range(num_groups), *(rng.randrange(num_groups) for _ in range(rng.randrange(4)))]
    layers = [ModelLayer(f"layers.{i}", group, *rng.choice(kinds)) for i, group in enumerate(groups)]
    num_parts = rng.choice((0, 0, 1, 2, 3))
    layers += [ModelLayer(f"mixer/{i}", num_groups, *draw_part(rng)) for i in range(num_parts)]
    return tuple(layers) if tp_sizes(layers) != [1] or rng.random() < 0.1 else draw_model(rng)


def draw_geometry(rng: Random) -> tuple[str, int, int, int, int, int]:
    """What follows a layer's name and group."""
    kind, itemsize = rng.choice(("kv", "kv", "kv", "latent", "latent", "cells", "opaque")), rng.choice((1, 2))
    if kind == "latent":
        return kind, 1, rng.randint(1, 3), 0, itemsize, 0
    total = rng.choice((1, *KV_HEADS))
    size = rng.randint(1, 3 if total < 6 else 2)
    size_v = rng.choice((size, size, size + 1)) if kind == "kv" else size
    return kind, total, size, size_v, itemsize, rng.choice((2, 4)) if kind == "opaque" else 0


def draw_part(rng: Random) -> tuple[str, int, int, int, int, int]:
    """A window of a convolution, or what has no steps."""
    return "state", rng.choice(KV_HEADS), rng.randint(1, 3), rng.randint(1, 3), rng.choice((1, 2)), 0


def tp_sizes(model: Sequence[ModelLayer]) -> list[int]:
    """The TP sizes at which every layer's heads are slices or replicas."""
    return [tp for tp in TP_SIZES if all(max(tp, one.total_heads) % min(tp, one.total_heads) == 0 for one in model)]


def draw_recipe(rng: Random, model: tuple[ModelLayer, ...], other: Recipe | None = None) -> Recipe:
    """A new one; or with the stages, or some layouts, or even the contexts of the other."""
    tp_size = rng.choice(tp_sizes(model))
    sizes = [size for size in (2, 3, 4, 8) if tp_size % size == 0] or [1]
    deal = Deal(rng.choice(sizes), rng.choice((1, 1, 2, 4))) if rng.random() < 0.5 else NO_DEAL
    if other and rng.random() < 0.3:
        deal = other.deal
    if other and rng.random() < 0.6:
        keep = rng.choice((0.5, 1.0))
        stages = [stage if rng.random() < keep else draw_stage(rng, stage.layers) for stage in other.stages]
        return Recipe(tp_size, tuple(stages), deal)
    cuts = sorted(rng.randint(0, len(model)) for _ in range(rng.choice((0, 0, 1, 2))))
    parts = [model[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(model)], strict=True)]
    return Recipe(tp_size, tuple(draw_stage(rng, part) for part in parts), deal)


def draw_stage(rng: Random, layers: tuple[ModelLayer, ...]) -> Apart | Pool | Overlaid:
    alike = len({layer[2:] for layer in layers}) == 1 and layers[0].kind == "kv"
    if alike and rng.random() < 0.7:
        return Pool(layers, rng.choice((*PHYSICAL_ORDERS, *PHYSICAL_ORDERS[3:], *PHYSICAL_ORDERS[3:])))
    mixed, one_for_all, overlaid = rng.sample(layers, len(layers)), rng.random() < 0.5, rng.random() < 0.4
    slots: list[Slot] = []
    for layer in mixed:
        like = next((slot for slot, seen in zip(slots, mixed, strict=False) if seen[2:] == layer[2:]), None)
        slots.append(like if like and one_for_all else draw_slot(rng, layer, overlaid))
    if overlaid:
        return Overlaid(tuple(mixed), tuple(slots), rng.random() < 0.5)
    return Apart(tuple(mixed), tuple(slots))


def draw_slot(rng: Random, layer: ModelLayer, block_outermost: bool) -> Slot:
    names = LAYOUTS[layer.kind]
    if layer.head_size != layer.head_size_v and layer.kind == "kv":
        names = KV_LAYOUTS[5:]
    if block_outermost:
        names = tuple(name for name in names if name in BLOCK_OUTERMOST)
    return Slot(rng.choice(names), rng.choice((0, 0, 3, 8)), rng.choice((1, 1, 2, 3)), rng.randrange(2))


def draw_block_sizes(rng: Random, layers: Sequence[ModelLayer], ours: Recipe, theirs: Recipe) -> tuple[int, int]:
    """(consumer's, producer's) of one group: multiples of what opaque layers take at once, else anything; mostly such
    that a context's ranks have equal parts of a block."""
    if layers[0].kind == "state":
        return STATE_TOKENS, STATE_TOKENS
    tile = max(layer.tile_tokens for layer in layers)
    sizes = (tile, 2 * tile, 3 * tile) if tile else (1, 2, 3, 4, 6, 8, 12)

    def for_all(size: int, deal: Deal) -> int:
        dealt = lcm(size, deal.period)
        return dealt if dealt <= MOST_BLOCK_TOKENS and rng.random() < 0.7 else size

    mine = for_all(rng.choice(sizes), ours.deal)
    return mine, for_all(mine if rng.random() < 0.3 else rng.choice(sizes), theirs.deal)


def draw_engine(
    rng: Random, recipe: Recipe, block_sizes: list[int], most_tokens: int, other_names: dict[str, str]
) -> Engine:
    """Its groups draw their blocks from one pool, as vLLM's do, so that groups may share memory."""
    num_blocks = sum(-(-most_tokens // size) for size in block_sizes) + rng.randint(0, 2)
    layouts = [
        _with_names(stage.layout(tp_rank, recipe.tp_size, num_blocks, block_sizes, recipe.deal), other_names)
        for stage in recipe.stages
        for tp_rank in range(recipe.tp_size)
    ]
    return Engine(recipe, block_sizes, num_blocks, layouts)


def _with_names(layout: CacheLayout, other_names: dict[str, str]) -> CacheLayout:
    named = [layer for layer in layout.layers if layer.name in other_names]
    again = [msgspec.structs.replace(layer, name=other_names[layer.name]) for layer in named]
    return CacheLayout(layout.regions, (*layout.layers, *again))


def draw_request(engines: Engines, rng: Random) -> Request:
    end = rng.randint(1, engines.most_tokens)
    first = 0 if rng.random() < 0.4 else rng.randrange(end) if rng.random() < 0.97 else end
    windowed = rng.random() < 0.5
    windows = [draw_window(rng, end, sizes) if windowed else 0 for sizes in engines.block_sizes]
    mine, theirs = [], []
    for window, (own, size) in zip(windows, engines.block_sizes, strict=True):
        present = draw_presence(rng, end, own)
        if rng.random() < 0.5:
            present = [there and at + own > window for there, at in zip(present, range(0, end, own), strict=True)]
        mine.append(present)
        theirs.append(draw_given(rng, first, end, window, present, own, size))
    tables = draw_tables(rng, mine, engines.consumer.num_blocks), draw_tables(rng, theirs, engines.producer.num_blocks)
    return Request(first, end, tables, windows)


def draw_window(rng: Random, end: int, sizes: tuple[int, int]) -> int:
    """Where a group's window begins: at a bound of a block of either side, or anywhere."""
    if STATE_TOKENS in sizes or rng.random() < 0.3:
        return 0
    step = rng.choice((*sizes, 1, 1))
    return rng.randint(0, end // step) * step


def window_block(window: int, sizes: tuple[int, int]) -> int:
    """The first token that shares a block with a window's start on both sides."""
    return max(window // size * size for size in sizes)


def draw_presence(rng: Random, end: int, block_size: int) -> list[bool]:
    """Which of a consumer's table entries have a block; a sliding window or a hit leaves holes."""
    entries, drawn = -(-end // block_size), rng.random()
    if drawn < 0.5 or entries == 1:
        return [True] * entries
    if drawn < 0.75:
        begin = rng.randrange(entries)
        return [entry >= begin for entry in range(entries)]
    return [rng.random() < 0.6 for _ in range(entries)]


def draw_given(
    rng: Random, first: int, end: int, window: int, present: list[bool], own_size: int, size: int
) -> list[bool]:
    """Which of a producer's table entries have a block: all, those that a window has left, or no more than needed."""
    drawn = rng.random()
    if drawn < 0.3:
        return [drawn < 0.1 or at + size > window for at in range(0, end, size)]
    return needed(max(first, window_block(window, (own_size, size))), end, present, own_size, size)


def needed(first: int, end: int, present: list[bool], own_size: int, size: int) -> list[bool]:
    """The producer's table entries with tokens for a block that the consumer has."""
    spans = [(max(first, at), min(end, at + size)) for at in range(0, end, size)]
    return [low < high and any(present[low // own_size : (high - 1) // own_size + 1]) for low, high in spans]


def draw_tables(rng: Random, present: list[list[bool]], num_blocks: int) -> list[list[int]]:
    ids = rng.sample(range(num_blocks), sum(map(sum, present)))
    if rng.random() < 0.5:
        ids.sort()  # long runs
    rest = iter(ids)
    return [[next(rest) if there else -1 for there in one] for one in present]
