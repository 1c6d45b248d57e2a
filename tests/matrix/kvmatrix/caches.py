"""Where every byte of a model lies on every rank of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvferry import layout as layouts
from kvferry.layout import CacheLayout, Channels, Context, Field, Heads, Layer, Region
from kvferry.topology import kv_heads
from kvmatrix import tensors
from kvmatrix.models import Apart, Attention, Keep, Latent, ModelLayer, Pages, Pool, Projection, Side, Stage, State
from kvmatrix.tensors import Ints, Shape, Tensor


class Place(NamedTuple):
    """One layer of a cache. bytes_of: field -> offset from the layer's base of [block, tile, head, content byte].

    heads: which of the whole model's these are. positions: of each tile's first token, in the block. tile_tokens:
    tokens of a tile.
    """

    layer: Layer
    bytes_of: Mapping[str, Ints]
    heads: Ints
    positions: Ints
    tile_tokens: int


class Cache(NamedTuple):
    """What one rank has. Regions have no address yet. Layers that only name others again are not among the places."""

    layout: CacheLayout
    places: tuple[Place, ...]


class Owned(NamedTuple):
    """The heads of a rank as vLLM deals them, by number, and as the product announces them."""

    heads: Ints
    announced: Heads

    @property
    def count(self) -> int:
        return len(self.heads)


class Rank(NamedTuple):
    """A TP rank of a side, and how many blocks each of its layers has."""

    side: Side
    tp_rank: int
    num_blocks: int

    def owned(self, total: int) -> Owned:
        """Of so many heads of the whole model."""
        announced = kv_heads(self.tp_rank, self.side.tp, total)
        if self.side.tp > total:
            return Owned(np.array([self.tp_rank // (self.side.tp // total)]), announced)
        return Owned(np.split(np.arange(total), self.side.tp)[self.tp_rank], announced)

    def heads_of(self, layer: Attention | Latent) -> Owned:
        return Owned(np.zeros(1, np.int64), Heads(0, 1, 1)) if isinstance(layer, Latent) else self.owned(layer.heads)

    def own_tokens(self, layer: Attention | Latent) -> int:
        """Tokens of a block that this rank holds."""
        return self.side.block_sizes[layer.group] // self.side.dcp


class Spot(NamedTuple):
    """Where a layer begins."""

    region: int
    base_bytes: int


def caches(side: Side, num_blocks: int) -> list[Cache]:
    """The cache of every rank, TP ranks innermost."""
    return [_cache(stage, Rank(side, tp_rank, num_blocks)) for stage in side.stages for tp_rank in range(side.tp)]


def _cache(stage: Stage, rank: Rank) -> Cache:
    if isinstance(stage, Pool):
        return _pool(stage, rank)
    return _pages(stage, rank) if isinstance(stage, Pages) else _apart(stage, rank)


def _apart(stage: Apart, rank: Rank) -> Cache:
    ends, places = [0] * stage.num_regions, []
    for index, (layer, keep) in enumerate(stage.layers):
        region = index % stage.num_regions
        made = list(_places(layer, keep, rank, Spot(region, ends[region])))
        ends[region] += max(num_bytes for _, num_bytes in made) + 8  # so that neighbours don't touch
        places += [place for place, _ in made]
    known = {place.layer.name: place.layer for place in places}
    named_again = [msgspec.structs.replace(known[name], name=other) for other, name in stage.aliases]
    return _finished(ends, places, named_again)


def _pool(stage: Pool, rank: Rank) -> Cache:
    first, slots = stage.layers[0], _slots(stage.layers)
    shape = _shape(first, rank, Keep(stage.order))
    made = tensors.pool(stage.order, shape, max(slots) + 1)
    elements = (shape.rows, shape.heads, shape.tokens, shape.content)
    _, layer_stride = layouts.physical_strides(stage.order, elements, max(slots) + 1, shape.itemsize)
    bases = [slot * layer_stride for slot in slots]
    places = [
        _place(layer, Keep(stage.order), made[slot], rank, Spot(0, base))
        for layer, slot, base in zip(stage.layers, slots, bases, strict=True)
    ]
    return _finished([max(base + made[slot].num_bytes for base, slot in zip(bases, slots, strict=True))], places)


def _pages(stage: Pages, rank: Rank) -> Cache:
    page = max(block_bytes(layer, rank) for layer, _ in stage.layers)
    slots = _slots(layer for layer, _ in stage.layers)
    places = []
    for (layer, keep), slot in zip(stage.layers, slots, strict=True):
        padded = keep._replace(gap_bytes=page - block_bytes(layer, rank))
        places += [place for place, _ in _places(layer, padded, rank, Spot(0, slot * rank.num_blocks * page))]
    return _finished([(max(slots) + 1) * rank.num_blocks * page], places)


def _slots(layers: Iterable[ModelLayer]) -> list[int]:
    """The place of each layer among those of its group."""
    counts: dict[int, int] = {}
    slots = []
    for layer in layers:
        slots.append(counts.get(layer.group, 0))
        counts[layer.group] = slots[-1] + 1
    return slots


def _finished(ends: list[int], places: list[Place], named_again: Iterable[Layer] = ()) -> Cache:
    regions = tuple(Region(0, max(end, 1)) for end in ends)
    return Cache(CacheLayout(regions, (*(place.layer for place in places), *named_again)), tuple(places))


def _places(layer: ModelLayer, keep: Keep, rank: Rank, spot: Spot) -> Iterator[tuple[Place, int]]:
    """What a layer of the model is in the product, and where each ends, from the spot."""
    if isinstance(layer, State):
        yield from _state(layer, keep, rank, spot)
        return
    tensor = _tensor(_shape(layer, rank, keep), keep)
    if keep.kernel_tokens:
        tensor = tensors.in_blocks(tensor, rank.own_tokens(layer) // keep.kernel_tokens, keep.kernel_tokens)
    yield _place(layer, keep, tensor, rank, spot), tensor.num_bytes


def _shape(layer: Attention | Latent, rank: Rank, keep: Keep) -> Shape:
    tokens = keep.kernel_tokens or rank.own_tokens(layer)
    rows = rank.num_blocks * rank.own_tokens(layer) // tokens
    heads = rank.heads_of(layer).count
    return Shape(rows, tokens, heads, layer.size, _size_v(layer), layer.itemsize, keep.gap_bytes)


def _size_v(layer: Attention | Latent) -> int:
    if isinstance(layer, Latent):
        return 0
    return layer.size if layer.size_v is None else layer.size_v


def _tensor(shape: Shape, keep: Keep) -> Tensor:
    match keep.layout:
        case "cpu":
            return tensors.cpu(shape)
        case "opaque":
            return tensors.opaque(shape, keep.tag)
        case "cells":
            return tensors.cells(shape, keep.tag)
        case "key only":
            return tensors.key_only(shape)
        case name if name in tensors.PLANES:
            return tensors.planes(name, shape)
        case order:
            return tensors.pool(order, shape, 1)[0]


def _place(layer: Attention | Latent, keep: Keep, tensor: Tensor, rank: Rank, spot: Spot) -> Place:
    owned = rank.heads_of(layer)
    made = Layer(
        name=layer.name,
        group=layer.group,
        region=spot.region,
        base_bytes=spot.base_bytes,
        num_blocks=rank.num_blocks,
        block_size=rank.side.block_sizes[layer.group],
        dtype=layer.dtype,
        heads=owned.announced,
        fields=tensor.fields,
        context=Context(rank.tp_rank % rank.side.dcp, rank.side.dcp, rank.side.interleave),
        scales=keep.scales,
    )
    own = np.arange(0, rank.own_tokens(layer), tensor.tile_tokens)
    return Place(made, tensor.bytes_of, owned.heads, _dealt(own, made.context), tensor.tile_tokens)


def _dealt(own: Ints, context: Context) -> Ints:
    """Where in the block the tokens are that a context's rank keeps side by side: it is dealt one run in each round."""
    rounds, inside = np.divmod(own, context.interleave)
    return (rounds * context.size + context.rank) * context.interleave + inside


def block_bytes(layer: ModelLayer, rank: Rank) -> int:
    """Bytes of a layer in one block, or in the slot of a state."""
    if isinstance(layer, State):
        recurrent = rank.owned(layer.shards).count * layer.size if layer.shards else 0
        return _window_bytes(layer, rank) + recurrent * layer.size_itemsize
    heads = rank.heads_of(layer).count
    return rank.own_tokens(layer) * heads * (layer.size + _size_v(layer)) * layer.itemsize


StatePart: TypeAlias = tuple[Owned, tuple[Field, ...], Ints]
"""Shards of this rank, the product's fields, and the address of [slot, 1, shard, content byte]."""


def _state(layer: State, keep: Keep, rank: Rank, spot: Spot) -> Iterator[tuple[Place, int]]:
    """In a slot: the convolution's window, as [channels, steps] or [steps, channels], then the recurrent state."""
    slot_bytes = block_bytes(layer, rank) + keep.gap_bytes
    slots = np.arange(rank.num_blocks * slot_bytes, dtype=np.int64).reshape(rank.num_blocks, slot_bytes)
    for part in (*_window(layer, keep, rank, slots), *_recurrent(layer, rank, slots)):
        yield _state_place(layer, part, rank, spot), slots.size


def _projections(layer: State, rank: Rank) -> list[tuple[Projection, Owned]]:
    return [(one, rank.owned(one.shards)) for one in layer.projections]


def _window_bytes(layer: State, rank: Rank) -> int:
    channels = sum(owned.count * one.channels for one, owned in _projections(layer, rank))
    return channels * layer.steps * layer.itemsize


def _window(layer: State, keep: Keep, rank: Rank, slots: Ints) -> Iterator[StatePart]:
    projections, outermost = _projections(layer, rank), keep.layout == "SD"
    channels = sum(owned.count * one.channels for one, owned in projections)
    window = slots[:, : _window_bytes(layer, rank)]
    if outermost:
        window = window.reshape(len(slots), layer.steps, channels, layer.itemsize).transpose(0, 2, 1, 3)
    else:
        window = window.reshape(len(slots), channels, layer.steps, layer.itemsize)
    first = 0
    for one, owned in projections:
        part = Channels(owned.count, one.channels, layer.steps, first, outermost, channels)
        fields = layouts.state(f"conv.{one.name}", part, layer.itemsize, 0, slots.shape[1])
        last = first + owned.count * one.channels
        yield owned, fields, window[:, first:last].reshape(len(slots), 1, owned.count, -1)
        first = last


def _recurrent(layer: State, rank: Rank, slots: Ints) -> Iterator[StatePart]:
    if layer.shards:
        owned, base = rank.owned(layer.shards), _window_bytes(layer, rank)
        fields = layouts.state("ssm", Channels(owned.count, layer.size), layer.size_itemsize, base, slots.shape[1])
        yield owned, fields, slots[:, base : block_bytes(layer, rank)].reshape(len(slots), 1, owned.count, -1)


def _state_place(layer: State, part: StatePart, rank: Rank, spot: Spot) -> Place:
    owned, fields, numbers = part
    (field,) = fields
    made = Layer(
        name=f"{layer.name}/{field.name}",
        group=layer.group,
        region=spot.region,
        base_bytes=spot.base_bytes,
        num_blocks=rank.num_blocks,
        block_size=layouts.STATE_TOKENS,
        dtype=f"float{8 * (layer.size_itemsize if field.name == 'ssm' else layer.itemsize)}",
        heads=owned.announced,
        fields=fields,
    )
    return Place(made, {field.name: numbers}, owned.heads, np.zeros(1, np.int64), layouts.STATE_TOKENS)
