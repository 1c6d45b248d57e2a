"""Fields of the layouts in use, one builder for each. Each describes one layer; sizes are elements unless named bytes.

Letters in tensor shapes: B blocks, N tokens of a block, H KV heads of this rank, D head size, C content (K and V of
a token side by side, or a latent), 2 the K and V planes, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

import msgspec

from kvferry.layout.structs import Axis, Field, LayoutError

PlaneOrder = Literal["2BNHD", "2BHND", "B2NHD", "B2HND"]
"""How a tensor with K and V planes is to be read, outermost axis first."""

PHYSICAL_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's physical orders of a fused cache, outermost axis first (HND is LBHNC, NHD is LBNHC)."""


def separated(
    num_blocks: int, block_size: int, num_heads: int, head_size: int, itemsize: int, *, head_major: bool = False
) -> tuple[Field, ...]:
    """[2, B, N, H, D], or [2, B, H, N, D] if head_major: all keys, then all values. `num_blocks` is this side's own."""
    order: PlaneOrder = "2BHND" if head_major else "2BNHD"
    return _planes(order, num_blocks, block_size, num_heads, head_size, itemsize)


def interleaved(
    num_blocks: int, block_size: int, num_heads: int, head_size: int, itemsize: int, *, head_major: bool = False
) -> tuple[Field, ...]:
    """[B, 2, N, H, D], or [B, 2, H, N, D] if head_major: in each block its keys, then its values."""
    order: PlaneOrder = "B2HND" if head_major else "B2NHD"
    return _planes(order, num_blocks, block_size, num_heads, head_size, itemsize)


def key_only(block_size: int, content_bytes: int, block_stride_bytes: int | None = None) -> tuple[Field, ...]:
    """[B, N, C]: one content per token and no heads (MLA latents, an indexer's keys)."""
    stride = block_size * content_bytes if block_stride_bytes is None else block_stride_bytes
    axes = (Axis("token", block_size, 1, content_bytes), Axis("content", content_bytes, 1, 1))
    return (Field("latent", 0, stride, axes, content_bytes),)


def fused(
    shape: Sequence[int], strides_bytes: Sequence[int], head_size: int, head_size_v: int, itemsize: int
) -> tuple[Field, ...]:
    """vLLM's logical view [B, H, N, C], in whatever physical order the strides say; C holds K, then V.

    head_size_v == 0: the content is one "latent". Raises LayoutError if C is not head_size + head_size_v, since what
    else is in it (scales, padding) would not be moved.
    """
    _, num_heads, block_size, content = _four("shape", shape)
    block_stride, head_stride, token_stride, item_stride = _four("strides_bytes", strides_bytes)
    if content != head_size + head_size_v:
        raise LayoutError(
            f"shape: content of {content} elements, but head_size {head_size} + head_size_v {head_size_v}"
        )

    def part(name: str, first: int, size: int) -> Field:
        outer = (Axis("head", num_heads, 1, head_stride), Axis("token", block_size, 1, token_stride))
        axes = _outermost_first(outer) + _content(size, itemsize, item_stride)
        return Field(name, first * item_stride, block_stride, axes, size * itemsize)

    if head_size_v == 0:
        return (part("latent", 0, head_size),)
    return part("k", 0, head_size), part("v", head_size, head_size_v)


def cpu_tiles(shape: Sequence[int], strides_bytes: Sequence[int], head_size: int, itemsize: int) -> tuple[Field, ...]:
    """vLLM's CPU attention (isa vec, vec16): in a view [B, H, N, 2D], each (block, head) tile: K [D][N], V [N][D].

    Raises LayoutError if a tile is not contiguous.
    """
    _, num_heads, block_size, content = _four("shape", shape)
    block_stride, head_stride = _tile_strides(shape, strides_bytes, itemsize)
    if content != 2 * head_size:
        raise LayoutError(f"shape: content of {content} elements, but twice head_size {head_size} is {2 * head_size}")
    head, row = Axis("head", num_heads, 1, head_stride), head_size * itemsize
    key_axes = (
        head,
        Axis("content", head_size, itemsize, block_size * itemsize),
        Axis("token", block_size, 1, itemsize),
        Axis("content", itemsize, 1, 1),
    )
    value_axes = (head, Axis("token", block_size, 1, row), Axis("content", row, 1, 1))
    return (
        Field("k", 0, block_stride, key_axes, row),
        Field("v", block_size * row, block_stride, value_axes, row),
    )


def opaque_tiles(shape: Sequence[int], strides_bytes: Sequence[int], tag: str) -> tuple[Field, ...]:
    """[B, H, N, C] where nothing is known inside a (block, head) tile: it moves whole, to a side with the same tag.

    The tag says all that the packing depends on (kernel, instruction set, dtype, kernel block size, head size).
    Raises LayoutError if a tile is not contiguous or the tag is empty.
    """
    _, num_heads, block_size, content = _four("shape", shape)
    itemsize = strides_bytes[3]
    block_stride, head_stride = _tile_strides(shape, strides_bytes, itemsize)
    if not tag:
        raise LayoutError("tag: an opaque tile needs one, or no peer could be told apart")
    tile_bytes = block_size * content * itemsize
    axes = (
        Axis("head", num_heads, 1, head_stride),
        Axis("token", 1, block_size, tile_bytes),
        Axis("content", tile_bytes, 1, 1),
    )
    return (Field("tile", 0, block_stride, axes, tile_bytes, tag),)


def opaque_cells(shape: Sequence[int], strides_bytes: Sequence[int], tag: str) -> tuple[Field, ...]:
    """[B, H, N, C] where each (token, head) is a cell that is known only as a whole: quantised data with its scales.

    The tag says all that the cell's bytes depend on. Raises LayoutError if cells overlap or the tag is empty.
    """
    _, num_heads, block_size, content = _four("shape", shape)
    block_stride, head_stride, token_stride, itemsize = _four("strides_bytes", strides_bytes)
    cell_bytes = content * itemsize
    if not tag:
        raise LayoutError("tag: an opaque cell needs one, or no peer could be told apart")
    if min(token_stride, head_stride) < cell_bytes:
        raise LayoutError(
            f"strides_bytes: cells of {cell_bytes} bytes are {min(token_stride, head_stride)} bytes apart"
        )
    outer = (Axis("head", num_heads, 1, head_stride), Axis("token", block_size, 1, token_stride))
    axes = (*_outermost_first(outer), Axis("content", cell_bytes, 1, 1))
    return (Field("cell", 0, block_stride, axes, cell_bytes, tag),)


STATE_TOKENS = 1 << 40
"""Block size of a state: more tokens than any request has, so that its block table has one entry, the slot."""

STATE_TAG = "state"
"""Marks a state's field as one tile of all tokens, which moves whole."""


class Channels(msgspec.Struct, frozen=True):
    """A part of a recurrent state on one rank, in elements: `num_shards` shards of `num_channels` channels, each with
    `num_steps` values (of a convolution's window; 1 where there is no such axis).

    first_channel: where in its tensor the part begins. steps_outermost: the tensor is [steps, channels] (vLLM's SD)
    instead of [channels, steps] (DS); all_channels: the channels of the whole tensor, which is then the step's stride.
    """

    num_shards: int
    num_channels: int
    num_steps: int = 1
    first_channel: int = 0
    steps_outermost: bool = False
    all_channels: int = 0


def state(name: str, part: Channels, itemsize: int, base_bytes: int, slot_stride_bytes: int) -> tuple[Field, ...]:
    """One part of the state of a mamba, GDN, KDA or short convolution layer; its shards are the head axis.

    base_bytes: where the tensor begins in its slot. The content of a shard is [channels, steps, bytes] in either order
    of memory, so both orders pair.
    """
    step = part.all_channels * itemsize if part.steps_outermost else itemsize
    channel = itemsize if part.steps_outermost else part.num_steps * itemsize
    if part.steps_outermost and part.all_channels < part.first_channel + part.num_shards * part.num_channels:
        raise LayoutError(f"all_channels: {part.all_channels} do not hold the part {part}")
    content_bytes = part.num_channels * part.num_steps * itemsize
    axes = [Axis("head", part.num_shards, 1, part.num_channels * channel), Axis("token", 1, STATE_TOKENS, 0)]
    if part.steps_outermost:
        axes += [
            Axis("content", part.num_steps, itemsize, step),
            Axis("content", part.num_channels, part.num_steps * itemsize, channel),
            Axis("content", itemsize, 1, 1),
        ]
    else:
        axes.append(Axis("content", content_bytes, 1, 1))
    base = base_bytes + part.first_channel * channel
    return (Field(name, base, slot_stride_bytes, tuple(axes), content_bytes, STATE_TAG),)


def with_kernel_blocks(fields: Iterable[Field], kernel_block_size: int, block_size: int) -> tuple[Field, ...]:
    """Fields of a tensor counted in kernel blocks, as fields of blocks: block b is the kernel blocks b*r to b*r + r-1.

    The token axis gets an outer digit (kernel block, slot) and the block stride becomes r times as large; the layer's
    num_blocks is the tensor's rows divided by r = block_size / kernel_block_size, which must divide.
    """
    ratio, rest = divmod(block_size, kernel_block_size)
    if rest or not ratio:
        raise LayoutError(f"kernel_block_size {kernel_block_size} does not divide block_size {block_size}")

    def widen(field: Field) -> Field:
        row = Axis("token", ratio, kernel_block_size, field.block_stride_bytes)
        stride = ratio * field.block_stride_bytes
        return msgspec.structs.replace(field, block_stride_bytes=stride, axes=(row, *field.axes))

    return tuple(fields) if ratio == 1 else tuple(widen(field) for field in fields)


def physical_strides(
    order: str, shape: Sequence[int], num_layers: int, itemsize: int
) -> tuple[tuple[int, int, int, int], int]:
    """Byte strides of the logical view [B, H, N, C], and from a layer to the next, for a physical order ("BLHNC")."""
    if order not in PHYSICAL_ORDERS:
        raise LayoutError(f"order: {order!r} is none of {', '.join(PHYSICAL_ORDERS)}")
    sizes = dict(zip("LBHNC", (num_layers, *_four("shape", shape)), strict=True))
    stride = {letter: prod(sizes[inner] for inner in order[i + 1 :]) * itemsize for i, letter in enumerate(order)}
    return (stride["B"], stride["H"], stride["N"], stride["C"]), stride["L"]


class Spec(msgspec.Struct, frozen=True):
    """What a layer's spec says about its attention cache: the kind comes from here, never from the tensor's shape.

    num_blocks: None if it is not known. order: how the tensor is declared, None if it is not.
    """

    block_size: int
    num_heads: int
    head_size: int
    itemsize: int
    num_blocks: int | None = None
    order: PlaneOrder | None = None


def from_shape(shape: Sequence[int], strides_bytes: Sequence[int] | None, spec: Spec) -> tuple[Field, ...]:
    """Fields of a 5-D tensor with K and V planes; strides None means contiguous.

    Raises LayoutError if the shape fits no reading of the spec, or more than one and the spec declares none: a wrong
    guess would put bytes in wrong places without any error.
    """
    if len(shape) != 5:
        raise LayoutError(f"shape: {list(shape)} has {len(shape)} axes, a cache with K and V planes has 5")
    orders: tuple[PlaneOrder, ...] = ("2BNHD", "2BHND", "B2NHD", "B2HND")
    readings = [order for order in orders if _fits(order, shape, spec)]
    if spec.order is not None and spec.order not in readings:
        raise LayoutError(f"shape: {list(shape)} cannot be read as the declared {spec.order} with {spec}")
    if spec.order is None and len(readings) != 1:
        found = " and as ".join(readings) if readings else "nothing that fits"
        raise LayoutError(f"shape: {list(shape)} can be read as {found}, with {spec}; declare the order")
    order = spec.order or readings[0]
    contiguous = [prod(shape[i + 1 :]) * spec.itemsize for i in range(5)]
    strides = dict(zip(order, contiguous if strides_bytes is None else strides_bytes, strict=True))
    return _plane_fields(strides, spec.block_size, spec.num_heads, spec.head_size, spec.itemsize)


def _fits(order: PlaneOrder, shape: Sequence[int], spec: Spec) -> bool:
    expected = {"2": 2, "B": spec.num_blocks, "N": spec.block_size, "H": spec.num_heads, "D": spec.head_size}
    return all(expected[letter] in (size, None) for letter, size in zip(order, shape, strict=True))


def _planes(
    order: PlaneOrder, num_blocks: int, block_size: int, num_heads: int, head_size: int, itemsize: int
) -> tuple[Field, ...]:
    sizes = {"2": 2, "B": num_blocks, "N": block_size, "H": num_heads, "D": head_size}
    shape = [sizes[letter] for letter in order]
    strides = {letter: prod(shape[i + 1 :]) * itemsize for i, letter in enumerate(order)}
    return _plane_fields(strides, block_size, num_heads, head_size, itemsize)


def _plane_fields(
    strides: dict[str, int], block_size: int, num_heads: int, head_size: int, itemsize: int
) -> tuple[Field, ...]:
    outer = (Axis("token", block_size, 1, strides["N"]), Axis("head", num_heads, 1, strides["H"]))
    axes = _outermost_first(outer) + _content(head_size, itemsize, strides["D"])
    content_bytes = head_size * itemsize
    return tuple(
        Field(name, plane * strides["2"], strides["B"], axes, content_bytes) for plane, name in enumerate(("k", "v"))
    )


def _content(size: int, itemsize: int, item_stride: int) -> tuple[Axis, ...]:
    """`size` elements of a (token, head): one axis of bytes if they are dense, else elements and their bytes."""
    if item_stride == itemsize:
        return (Axis("content", size * itemsize, 1, 1),)
    return Axis("content", size, itemsize, item_stride), Axis("content", itemsize, 1, 1)


def _outermost_first(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda axis: axis.stride_bytes, reverse=True))


def _tile_strides(shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(block, head) strides of a view whose (block, head) tiles are contiguous."""
    block_stride, head_stride, token_stride, item_stride = _four("strides_bytes", strides_bytes)
    if (token_stride, item_stride) != (shape[3] * itemsize, itemsize):
        dense = (shape[3] * itemsize, itemsize)
        raise LayoutError(f"strides_bytes: tile strides {(token_stride, item_stride)}, a contiguous tile has {dense}")
    return block_stride, head_stride


def _four(name: str, values: Sequence[int]) -> tuple[int, int, int, int]:
    if len(values) != 4:
        raise LayoutError(f"{name}: {list(values)} has {len(values)} entries, [B, H, N, C] has 4")
    return values[0], values[1], values[2], values[3]
