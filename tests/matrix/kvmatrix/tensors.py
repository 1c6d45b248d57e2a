"""One layer's cache as an attention kernel sees it: a tensor, and the address of each byte of each coordinate in it.

Addresses come from numbering the tensor's bytes and reshaping, slicing and transposing the numbers as a kernel would
its data. The fields beside them come from the product's builders. So a builder that describes a layout wrongly shows
as bytes in wrong places.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvferry import layout as layouts
from kvferry.layout import Field, PlaneOrder, Spec

Ints = npt.NDArray[np.int64]

PLANES = ("2BNHD", "2BHND", "B2NHD", "B2HND")
"""Tensors with K and V planes."""
POOLS = layouts.PHYSICAL_ORDERS
"""vLLM's fused tensors, all layers in one."""


class Shape(NamedTuple):
    """Of one layer on one rank. Sizes are elements, head_size_v 0 where there are no values; rows are blocks, or the
    kernel's smaller blocks. gap_bytes: behind each row."""

    rows: int
    tokens: int
    heads: int
    head_size: int
    head_size_v: int
    itemsize: int
    gap_bytes: int = 0

    @property
    def content(self) -> int:
        return self.head_size + self.head_size_v


class Tensor(NamedTuple):
    """fields: as the product describes it. bytes_of: field name -> address of [row, tile, head, content byte], a tile
    being `tile_tokens` tokens, one unless nothing is known inside. num_bytes: where its last byte ends."""

    fields: tuple[Field, ...]
    bytes_of: Mapping[str, Ints]
    num_bytes: int
    tile_tokens: int = 1


def numbered(order: str, sizes: Mapping[str, int], wanted: str, gap_bytes: int = 0) -> Ints:
    """The bytes of a tensor with axes in `order`, outermost first, seen with its axes as `wanted`.

    gap_bytes: behind each entry of the outermost axis.
    """
    shape = [sizes[letter] for letter in order]
    inner = prod(shape[1:])
    rows = np.arange(shape[0] * (inner + gap_bytes), dtype=np.int64).reshape(shape[0], -1)[:, :inner]
    return rows.reshape(shape).transpose([order.index(letter) for letter in wanted])


def planes(order: str, shape: Shape) -> Tensor:
    """[2, B, N, H, D] and its like."""
    rows, tokens, heads, size, size_v, itemsize, gap_bytes = shape
    if size != size_v:
        raise ValueError(f"{order}: head_size {size} and head_size_v {size_v} differ")
    sizes = {"2": 2, "B": rows, "N": tokens, "H": heads, "D": size * itemsize}
    both = numbered(order, sizes, "2BNHD", gap_bytes)
    if gap_bytes:
        elements = [{**sizes, "D": size}[letter] for letter in order]
        strides = [prod(elements[i + 1 :]) * itemsize for i in range(5)]
        strides[0] += gap_bytes
        spec = Spec(tokens, heads, size, itemsize, rows, cast(PlaneOrder, order))
        fields = layouts.from_shape(elements, strides, spec)
    else:
        build = layouts.separated if order[0] == "2" else layouts.interleaved
        fields = build(rows, tokens, heads, size, itemsize, head_major=order.index("H") < order.index("N"))
    return Tensor(fields, {"k": both[0], "v": both[1]}, int(both.max()) + 1)


def pool(order: str, shape: Shape, num_layers: int) -> list[Tensor]:
    """vLLM's [B, H, N, C] of all layers in one tensor, in a physical order of L, B, H, N and C."""
    rows, tokens, heads, size, size_v, itemsize, gap_bytes = shape
    if gap_bytes and not (order.startswith("LB") and num_layers == 1):
        raise ValueError(f"{order}: no gaps between the blocks of {num_layers} layers")
    content = shape.content * itemsize
    sizes = {"L": num_layers, "B": rows, "N": tokens, "H": heads, "C": content}
    elements = (rows, heads, tokens, shape.content)
    strides, layer_stride = layouts.physical_strides(order, elements, num_layers, itemsize)
    if gap_bytes:
        strides = (strides[0] + gap_bytes, *strides[1:])
        numbers = numbered(order.removeprefix("L"), sizes, "BNHC", gap_bytes)[np.newaxis]
    else:
        numbers = numbered(order, sizes, "LBNHC")
    fields = layouts.fused(elements, strides, size, size_v, itemsize)
    split = size * itemsize
    return [
        Tensor(fields, _named(one - layer * layer_stride, split, size_v), int(numbers.max()) + 1 - layer * layer_stride)
        for layer, one in enumerate(numbers)
    ]


def _named(numbers: Ints, split: int, size_v: int) -> dict[str, Ints]:
    return {"k": numbers[..., :split], "v": numbers[..., split:]} if size_v else {"latent": numbers}


def cpu(shape: Shape) -> Tensor:
    """vLLM's CPU attention: in a (block, head) tile, keys as [D][N], then values as [N][D]."""
    rows, tokens, heads, size, _, itemsize, _ = shape
    tiles = _tiles(shape)
    half = tokens * size * itemsize
    keys = tiles[..., :half].reshape(rows, heads, size, tokens, itemsize).transpose(0, 3, 1, 2, 4)
    values = tiles[..., half:].reshape(rows, heads, tokens, size * itemsize).transpose(0, 2, 1, 3)
    bytes_of = {"k": keys.reshape(rows, tokens, heads, size * itemsize), "v": values}
    elements, strides = _tile_strides(shape)
    return Tensor(layouts.cpu_tiles(elements, strides, size, itemsize), bytes_of, int(tiles.max()) + 1)


def opaque(shape: Shape, tag: str) -> Tensor:
    """Nothing is known inside a (block, head) tile."""
    tiles = _tiles(shape)
    elements, strides = _tile_strides(shape)
    fields = layouts.opaque_tiles(elements, strides, tag)
    return Tensor(fields, {"tile": tiles[:, np.newaxis]}, int(tiles.max()) + 1, shape.tokens)


def cells(shape: Shape, tag: str) -> Tensor:
    """Nothing is known inside the bytes of a (token, head): quantised data with its scales. [B, N, H, C]."""
    (one,) = pool("LBNHC", shape._replace(head_size=shape.content, head_size_v=0), 1)
    elements = (shape.rows, shape.heads, shape.tokens, shape.content)
    row = shape.heads * shape.content * shape.itemsize
    strides = (shape.tokens * row + shape.gap_bytes, shape.content * shape.itemsize, row, shape.itemsize)
    return one._replace(fields=layouts.opaque_cells(elements, strides, tag), bytes_of={"cell": one.bytes_of["latent"]})


def key_only(shape: Shape) -> Tensor:
    """[B, N, C]: no heads."""
    content = shape.content * shape.itemsize
    numbers = numbered("BNHC", {"B": shape.rows, "N": shape.tokens, "H": 1, "C": content}, "BNHC", shape.gap_bytes)
    fields = layouts.key_only(shape.tokens, content, shape.tokens * content + shape.gap_bytes)
    return Tensor(fields, {"latent": numbers}, int(numbers.max()) + 1)


def _tiles(shape: Shape) -> Ints:
    """[row, head, byte of the tile]"""
    tile = shape.tokens * shape.content * shape.itemsize
    return numbered("BHC", {"B": shape.rows, "H": shape.heads, "C": tile}, "BHC", shape.gap_bytes)


def _tile_strides(shape: Shape) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    elements = (shape.rows, shape.heads, shape.tokens, shape.content)
    strides, _ = layouts.physical_strides("LBHNC", elements, 1, shape.itemsize)
    return elements, (strides[0] + shape.gap_bytes, *strides[1:])


def in_blocks(tensor: Tensor, ratio: int, kernel_tokens: int) -> Tensor:
    """A tensor that counts kernel blocks, `ratio` of them to a block."""
    fields = layouts.with_kernel_blocks(tensor.fields, kernel_tokens, ratio * kernel_tokens)
    bytes_of = {
        name: one.reshape(one.shape[0] // ratio, ratio * one.shape[1], *one.shape[2:])
        for name, one in tensor.bytes_of.items()
    }
    return tensor._replace(fields=fields, bytes_of=bytes_of)
