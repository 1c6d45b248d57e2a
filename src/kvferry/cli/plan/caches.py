"""The layouts of an engine's ranks, as vLLM 0.32 would make them for a model and what was said about the engine.

Its rules: KV heads over TP (topology.kv_heads), decoder layers over pipeline stages (`get_pp_indices`), layers into KV
cache groups (`_get_kv_cache_groups_uniform_page_size`), and where a layer lies in the one storage of a worker
(`get_kv_cache_config_from_groups`). sizes.py has those for one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kvferry import layout as layouts
from kvferry.cli.errors import Problem
from kvferry.cli.plan import words
from kvferry.cli.plan.engines import CacheGroup, Engine, Rank
from kvferry.cli.plan.models import Attention, Cache, CachedLayer, Model, Recurrent
from kvferry.cli.plan.sides import PLANES, Side
from kvferry.cli.plan.sizes import Sizes, num_heads, sizes, state_spec
from kvferry.layout import STATE_TOKENS, CacheLayout, Context, Field, Heads, Layer, LayoutError, Region
from kvferry.topology import TopologyError, kv_heads
from kvferry.vllm import states
from kvferry.vllm.groups import Group, Window

STATE_NAMES = {"MAMBA2": "mamba2 state", "GDN_ATTN": "GDN state", "SHORT_CONV": "short convolution"}

Groups = Sequence[Sequence[CachedLayer]]


def engine(
    role: str, model: Model, side: Side, num_tokens: int, least_blocks: int = 0, identity: str | None = None
) -> Engine:
    """All ranks of an engine with room for a request of so many tokens. Raises Problem for what vLLM would refuse.

    least_blocks: how many blocks there are at least, unless the side says how many there are. identity: what it calls
    its model, where nothing in the side's settings does.
    """
    try:
        return _engine(role, model, side, num_tokens, least_blocks, identity)
    except (LayoutError, TopologyError) as error:
        raise Problem(f"--{role}: {error}") from None


def _engine(role: str, model: Model, side: Side, num_tokens: int, least_blocks: int, identity: str | None) -> Engine:
    size, groups, cut = sizes(model, side), grouped(model.layers), stages(model.num_layers, side)
    kinds = tuple(_cache_group(layers[0].cache, side, size) for layers in groups)
    num_blocks = max(_num_blocks(side, kinds, num_tokens), 0 if side.blocks else least_blocks)
    _check_cost(model, side, size, num_blocks)
    ranks = []
    for pp_rank, stage in enumerate(cut):
        here = [[layer for layer in group if layer.decoder_layer in stage] for group in groups]
        if not any(here):
            raise LayoutError(
                f"pp {side.pp}: none of the layers {stage.start}-{stage.stop - 1} of stage {pp_rank} has a cache"
            )
        for tp_rank in range(side.tp):
            layout = _Worker(side, size, tp_rank, num_blocks).layout(here)
            if tp_rank == 0:  # the others differ from it in what heads and tokens they have, not in how these lie
                _check(layout, side, size)
            label = f"pp{pp_rank}.tp{tp_rank}" if side.pp > 1 else str(tp_rank)
            ranks.append(Rank(label, tp_rank, side.tp, layout))
    return Engine(
        role=role,
        title=model.title,
        settings=_settings(model, side, size, cut),
        ranks=tuple(ranks),
        groups=kinds,
        fingerprint={
            "model": side.model_id or identity or f"{model.model_type} of {model.num_layers} layers",
            "model dtype": model.dtype,
            "KV cache dtype": size.dtype,
        },
        notes=tuple(f"{role}: {note}" for note in _notes(model, side, size)),
    )


MOST_CACHES = 1 << 16
"""Layers' caches over all ranks of a side."""

MOST_BYTES = 1 << 50
"""Of the cache of a rank."""


def _check(layout: CacheLayout, side: Side, size: Sizes) -> None:
    """Raises LayoutError, which names what the layout was made of."""
    try:
        layouts.check(layout)
    except LayoutError as error:
        raise LayoutError(f"layout {side.layout} in blocks of {size.block_tokens:,} tokens: {error}") from None


def _check_cost(model: Model, side: Side, size: Sizes, num_blocks: int) -> None:
    """Raises LayoutError for ranks that would take too long to look at, and for more bytes than there are addresses."""
    caches = side.tp * len(model.layers)
    if caches > MOST_CACHES:
        raise LayoutError(
            f"tp {side.tp}: {len(model.layers)} layers on so many ranks are {caches:,} caches, at most "
            f"{MOST_CACHES:,} are understood"
        )
    num_bytes = num_blocks * sum(size.page_bytes[layer.cache] for layer in model.layers)
    if num_bytes > MOST_BYTES:
        blocks = f"{num_blocks:,} blocks of {size.block_tokens:,} tokens in {len(model.layers)} layers"
        raise LayoutError(f"{blocks} take {num_bytes:,} bytes, at most {MOST_BYTES:,} are understood")


def stages(num_layers: int, side: Side) -> list[range]:
    """The decoder layers of each pipeline stage: as told, or even, where the last but one gets what is left first."""
    if side.pp > num_layers:
        raise LayoutError(f"pp {side.pp}: the model has {num_layers} layers")
    cuts = list(side.pp_layers)
    if not cuts:
        cuts = [num_layers // side.pp] * side.pp
        for i in range(2, num_layers % side.pp + 2):
            cuts[-i] += 1
    if sum(cuts) != num_layers:
        raise LayoutError(f"pp_layers {words.brief('+'.join(map(str, cuts)))}: the model has {num_layers} layers")
    return [range(end - size, end) for size, end in zip(cuts, accumulate(cuts), strict=True)]


def grouped(layers: Sequence[CachedLayer]) -> list[list[CachedLayer]]:
    """KV cache groups: layers with equal caches, split so that all groups have about as many layers."""
    buckets: dict[Cache, list[CachedLayer]] = {}
    for layer in layers:
        buckets.setdefault(layer.cache, []).append(layer)
    least, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = most if most < least * 1.5 else least
    found = []
    for bucket in buckets.values():
        num_groups = -(-len(bucket) // size)
        found += [bucket[i::num_groups] for i in range(num_groups)]
    return found


def _cache_group(cache: Cache, side: Side, size: Sizes) -> CacheGroup:
    if isinstance(cache, Recurrent):
        return CacheGroup(STATE_NAMES[cache.kind], STATE_TOKENS, Group(spare_slots=0))
    if cache.window is not None:
        window = Window(cache.window, size.block_tokens)
        return CacheGroup(f"window of {cache.window:,}", size.block_tokens, Group(window=window))
    return CacheGroup("latent" if cache.is_latent else "full attention", size.block_tokens * side.dcp)


def _num_blocks(side: Side, groups: Sequence[CacheGroup], num_tokens: int) -> int:
    """Blocks for one request, as many that lie between them, and vLLM's null block; or as many as were asked for, if
    they are enough."""
    needed = sum(-(-num_tokens // group.tokens) for group in groups)
    if side.blocks is not None and side.blocks <= needed:
        raise LayoutError(
            f"blocks {side.blocks}: {num_tokens:,} tokens need {needed:,}, and vLLM keeps block 0 as its null block"
        )
    return side.blocks or 1 + 2 * needed


class _Place(NamedTuple):
    """Group, region and offset of a layer."""

    group: int
    region: int
    base_bytes: int


@dataclass(frozen=True)
class _Worker:
    """One rank of a pipeline stage: makes the layout of the layers that are there."""

    side: Side
    size: Sizes
    tp_rank: int
    num_blocks: int

    def layout(self, groups: Groups) -> CacheLayout:
        return self._planes(groups) if self.side.layout in PLANES else self._storage(groups)

    def _planes(self, groups: Groups) -> CacheLayout:
        """Each layer is a tensor of its own."""
        regions: list[Region] = []
        made: list[Layer] = []
        for number, layers in enumerate(groups):
            for layer in layers:
                if isinstance(layer.cache, Recurrent):
                    raise LayoutError(f"layout {self.side.layout}: a state has no keys and values")
                place = _Place(number, len(regions), 0)
                made.append(self._attention(layer.name, layer.cache, place, self._plane_fields(layer.cache)))
                regions.append(Region(0, self.num_blocks * self.size.page_bytes[layer.cache]))
        return CacheLayout(tuple(regions), tuple(made))

    def _plane_fields(self, cache: Attention) -> tuple[Field, ...]:
        tokens, item_bytes = self.size.block_tokens, self.size.item_bytes
        if cache.is_latent:
            return layouts.key_only(tokens, cache.key_size * item_bytes)
        order = PLANES[self.side.layout]
        build = layouts.separated if order.startswith("2") else layouts.interleaved
        heads = num_heads(cache, self.side)
        return build(self.num_blocks, tokens, heads, cache.key_size, item_bytes, head_major=order.endswith("HND"))

    def _storage(self, groups: Groups) -> CacheLayout:
        """All layers lie in one storage; the groups lie one over the other, since a block belongs to one at a time."""
        order = "LBHNC" if self.side.is_cpu else self.side.layout
        block_bytes = max(sum(self.size.page_bytes[layer.cache] for layer in layers) for layers in groups)
        made: list[Layer] = []
        for number, layers in enumerate(groups):
            if layers:
                made += self._of_group(order, number, layers, block_bytes)
        return CacheLayout((Region(0, block_bytes * self.num_blocks),), tuple(made))

    def _of_group(self, order: str, number: int, layers: Sequence[CachedLayer], block_bytes: int) -> Iterator[Layer]:
        """Layers with one and the same cache, which differ only in where they begin."""
        cache = layers[0].cache
        shape, item_bytes = self._shape(cache)
        strides, layer_stride = layouts.physical_strides(order, shape, len(layers), item_bytes)
        if order.startswith("B"):  # a group with fewer layers leaves the rest of the block empty
            strides = (block_bytes, *strides[1:])
        places = [(layer.name, _Place(number, 0, index * layer_stride)) for index, layer in enumerate(layers)]
        if isinstance(cache, Recurrent):
            parts = self._parts(cache, strides[0])
            for name, place in places:
                yield from self._state(name, parts, place)
        else:
            fields = self._fields(cache, shape, strides)
            for name, place in places:
                yield self._attention(name, cache, place, fields)

    def _shape(self, cache: Cache) -> tuple[tuple[int, int, int, int], int]:
        """vLLM's logical view [B, H, N, C], and the bytes of an element; a state is a row of bytes."""
        if isinstance(cache, Recurrent):
            return (self.num_blocks, 1, 1, self.size.page_bytes[cache]), 1
        heads, content = num_heads(cache, self.side), cache.key_size + cache.value_size
        return (self.num_blocks, heads, self.size.block_tokens, content), self.size.item_bytes

    def _fields(self, cache: Attention, shape: Sequence[int], strides: Sequence[int]) -> tuple[Field, ...]:
        if self.side.layout == "cpu" and not cache.is_latent:
            return layouts.cpu_tiles(shape, strides, cache.key_size, self.size.item_bytes)
        if self.side.layout == "cpu-amx" and not cache.is_latent:
            tag = f"CPU_ATTN:amx:torch.{self.size.dtype}:{shape[2]}:{cache.key_size}:{cache.value_size}"
            return layouts.opaque_tiles(shape, strides, tag)
        return layouts.fused(shape, strides, cache.key_size, cache.value_size, self.size.item_bytes)

    def _attention(self, name: str, cache: Attention, place: _Place, fields: tuple[Field, ...]) -> Layer:
        heads = Heads(0, 1, 1) if cache.is_latent else kv_heads(self.tp_rank, self.side.tp, cache.num_heads)
        dtype = "uint8" if self.size.dtype.startswith("fp8") else self.size.dtype
        context = Context(self.tp_rank % self.side.dcp, self.side.dcp, self.side.interleave)
        tokens = self.size.block_tokens * self.side.dcp
        return Layer(name, *place, self.num_blocks, tokens, dtype, heads, fields, context)

    def _parts(self, cache: Recurrent, slot_stride_bytes: int) -> tuple[states.Part, ...]:
        spec = state_spec(cache, self.side, self.size.state_dtype)
        rank = states.Rank(self.tp_rank, self.side.tp, cache.groups, steps_outermost=self.side.conv == "SD")
        return states.parts(spec, rank, slot_stride_bytes)

    def _state(self, name: str, parts: Sequence[states.Part], place: _Place) -> Iterator[Layer]:
        """Each part of a state is a layer of its own."""
        for part in parts:
            yield Layer(
                f"{name}/{part.name}",
                *place,
                num_blocks=self.num_blocks,
                block_size=STATE_TOKENS,
                dtype=part.dtype,
                heads=part.heads,
                fields=part.fields,
            )


def _has_attention(model: Model) -> bool:
    return any(isinstance(cache, Attention) for cache in model.caches)


def _settings(model: Model, side: Side, size: Sizes, cut: Sequence[range]) -> str:
    parts = [f"tp {side.tp}"]
    if side.pp > 1:
        parts.append(f"pp {side.pp} ({'+'.join(str(len(stage)) for stage in cut)} layers)")
    if side.dp > 1:
        parts.append(f"dp {side.dp}")
    if side.dcp > 1:
        parts.append(f"dcp {side.dcp}, interleave {side.interleave}")
    if _has_attention(model):
        over = f" ({size.block_tokens * side.dcp:,} over {side.dcp} ranks)" if side.dcp > 1 else ""
        parts.append(f"block {size.block_tokens}{over}")
    return ", ".join([*parts, side.layout, size.dtype])


def _notes(model: Model, side: Side, size: Sizes) -> Iterator[str]:
    if side.dp > 1:
        yield (
            f"each of its {side.dp} DP ranks is an engine of its own with this layout, and a request names the "
            "one that it means, so the pairs hold for each."
        )
    if side.dcp > 1:
        yield (
            f"decode context parallel ranks hold {words.count(side.interleave, 'token')} each in turn; a block has "
            f"{size.block_tokens:,} tokens on each of {side.dcp}, {size.block_tokens * side.dcp:,} over all of them."
        )
    elif side.interleave > 1:
        yield f"interleave {side.interleave} means nothing without dcp."
    has_states = any(isinstance(cache, Recurrent) for cache in model.caches)
    if has_states and _has_attention(model):
        asked = f" instead of the {side.block:,} asked for" if side.block not in (None, size.block_tokens) else ""
        yield f"a block has {size.block_tokens:,} tokens{asked}, so that it can hold a state."
    if not has_states:
        yield from _without_states(side)
    else:
        yield f"a state's window is in vLLM's order {side.conv}."
    if side.block and not _has_attention(model):
        yield f"block {side.block} means nothing for this model, which has only states."
    if size.dtype.startswith("fp8"):
        yield f"the scales of {size.dtype} do not lie in the cache; the handshake compares them."


def _without_states(side: Side) -> Iterator[str]:
    default = Side()
    for key, given in (("conv", side.conv), ("ssm", side.ssm)):
        if given != getattr(default, key):
            yield f"{key} {given} means nothing for this model, which has no states."
