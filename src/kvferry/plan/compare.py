"""Do two sides mean the same bytes? What does not fit is refused, with the layer, the field and both values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from kvferry.layout import CacheLayout, Context, Examined, Field, Layer, LayoutError, Refusal, check, memory_of
from kvferry.plan.units import spans_runs, tile_tokens
from kvferry.topology import Share

Scope = tuple[int, int, int]
"""A KV cache group, and a region of either side."""


class LayerPair(NamedTuple):
    """One layer on both sides, and the heads that go from one to the other, counted from the start of each shard."""

    consumer: Layer
    producer: Layer
    consumer_head: int
    producer_head: int
    num_heads: int

    @property
    def geometry(self) -> Hashable:
        """Equal for layers whose fields agree in everything but the base address, on both sides."""
        return (self.consumer.fields, self.producer.fields, self.contexts, *self[2:])

    @property
    def contexts(self) -> tuple[Context, Context]:
        return self.consumer.context, self.producer.context

    @property
    def scope(self) -> Scope:
        """Only layers of one group and the same regions can move together."""
        return self.consumer.group, self.consumer.region, self.producer.region


Examinations = tuple[Examined, Examined]
"""Of the consumer's layouts and of the producer's, where several come together."""


def check_sound(consumer: CacheLayout, producer: CacheLayout, examined: Examinations) -> None:
    ours, theirs = (_fault(layout, seen) for layout, seen in zip((consumer, producer), examined, strict=True))
    if ours or theirs:
        raise Refusal("layout", ours, theirs)


def _fault(layout: CacheLayout, seen: Examined) -> str | None:
    try:
        check(layout, seen)
    except LayoutError as error:
        return f"a wrong one, {error}"
    return None


def layer_pairs(consumer: CacheLayout, producer: CacheLayout, share: Share) -> Iterator[LayerPair]:
    """The share's layers, compared; layers that are one and the same memory on both sides come once."""
    mine = {layer.name: layer for layer in consumer.layers}
    theirs = {layer.name: layer for layer in producer.layers}
    seen: dict[Hashable, tuple[str, Hashable]] = {}
    for part in share.layers:
        left, right = mine.get(part.name), theirs.get(part.name)
        if left is None or right is None:
            raise Refusal(f"layer {part.name}", *("none" if one is None else "one" for one in (left, right)))
        _compare(left, right, part.start, part.stop)
        memory = memory_of(left)
        source = (right.region, right.base_bytes, right.fields, right.context)
        first, first_source = seen.setdefault(memory, (part.name, source))
        if first_source != source:
            raise Refusal(f"layers {first} and {part.name}", "one memory", "two")
        if first == part.name:
            heads = (part.start - left.heads.start, part.start - right.heads.start, part.stop - part.start)
            yield LayerPair(left, right, *heads)


def _compare(left: Layer, right: Layer, start: int, stop: int) -> None:
    where = f"layer {left.name}"
    for name, mine, theirs in (
        ("group", left.group, right.group),
        ("dtype", left.dtype, right.dtype),
        ("scales", left.scales or "none", right.scales or "none"),
        ("total KV heads", left.heads.total, right.heads.total),
        ("fields", [field.name for field in left.fields], [field.name for field in right.fields]),
    ):
        if mine != theirs:
            raise Refusal(f"{where}: {name}", mine, theirs)
    for heads in (left.heads, right.heads):
        if not heads.start <= start < stop <= heads.start + heads.count:
            raise Refusal(f"{where}: heads {start} to {stop} of the share", left.heads, right.heads)
    if not left.context.overlaps(right.context):
        raise Refusal(f"{where}: context", left.context, right.context, "they have no token in common")
    for mine_field, their_field in zip(left.fields, right.fields, strict=True):
        _compare_fields(f"{where}, field {mine_field.name}", mine_field, their_field)
        _compare_runs(f"{where}, field {mine_field.name}", mine_field, left.context, right.context)


def _compare_fields(where: str, left: Field, right: Field) -> None:
    if left.opaque != right.opaque:
        raise Refusal(f"{where}: packing", left.opaque or "known", right.opaque or "known")
    if tile_tokens(left) != tile_tokens(right):
        raise Refusal(f"{where}: tile tokens", tile_tokens(left), tile_tokens(right))
    if left.content_bytes != right.content_bytes:
        raise Refusal(f"{where}: content_bytes", left.content_bytes, right.content_bytes)


def _compare_runs(where: str, field: Field, left: Context, right: Context) -> None:
    """A tile that holds several runs of a context cannot be taken apart."""
    if left != right and (spans_runs(field, left) or spans_runs(field, right)):
        raise Refusal(f"{where}: context of tiles of {tile_tokens(field)} tokens", left, right, "a tile moves whole")
