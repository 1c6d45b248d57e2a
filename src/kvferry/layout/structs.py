"""Where the bytes of a KV cache lie: fields, named axes, byte strides.

One idea serves every cache. A layer is a list of fields; a field is a box whose axes have a name, a length,
a step and a byte stride, as in a layout algebra: a function from coordinates to byte offsets. Everything that
differs between layouts (K before V, heads before tokens, transposed keys, padded pages) is in those numbers.

Structs here are plain data that travels in handshakes, so they know nothing of torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Index = TypeVar("Index", int, "npt.NDArray[np.int64]")

Dim = Literal["token", "head", "content"]
"""A dimension inside a block. token: position in the block; head: KV head of this rank's shard, from 0;
content: byte within one (token, head). The block itself is found through block ids, a layer by its name."""


class Axis(msgspec.Struct, frozen=True):
    """One axis of a field: index i covers the coordinates [i * step, (i + 1) * step) of `dim`.

    A dimension may be cut into several axes, as digits of a number: a token axis of 64 in kernel blocks of 32
    is (token, size 2, step 32) and (token, size 32, step 1).
    """

    dim: Dim
    size: int
    step: int
    stride_bytes: int


class Field(msgspec.Struct, frozen=True):
    """One kind of content of a layer: "k", "v", "latent", ...

    base_bytes: offset of (block 0, token 0, head 0, content 0) from the layer's base.
    block_stride_bytes: from one block to the next; larger than what a block holds if pages are padded.
    axes: inside a block, outermost first. Together they enumerate every (token, head, content byte) once,
      unless `opaque` is set.
    content_bytes: bytes of one (token, head); of one whole (tile, head) if opaque.
    opaque: None, or the tag of a packing that is not known. Then the token axes end at step == tile tokens,
      the content is the whole tile, and both sides must carry the same tag.
    """

    name: str
    base_bytes: int
    block_stride_bytes: int
    axes: tuple[Axis, ...]
    content_bytes: int
    opaque: str | None = None


class Heads(msgspec.Struct, frozen=True):
    """Which KV heads of the whole model a rank's shard of a layer holds: [start, start + count) of total.

    A cache that is the same on every TP rank (MLA, an indexer's keys) has start 0, count 1, total 1.
    """

    start: int
    count: int
    total: int


class Layer(msgspec.Struct, frozen=True):
    """One layer's cache on one worker.

    group: index of its KV cache group, that is of its block table.
    region, base_bytes: the registered region it lies in, and where in it the layer begins.
    """

    name: str
    group: int
    region: int
    base_bytes: int
    num_blocks: int
    block_size: int
    dtype: str
    heads: Heads
    fields: tuple[Field, ...]


class Region(msgspec.Struct, frozen=True):
    """One span of memory to register: address in its process, length in bytes, device ("cpu", "cuda:0", ...)."""

    address: int
    length_bytes: int
    device: str = "cpu"


class CacheLayout(msgspec.Struct, frozen=True):
    """All that one worker's cache is: its regions and its layers (one entry per layer name)."""

    regions: tuple[Region, ...]
    layers: tuple[Layer, ...]


class LayoutError(ValueError):
    """A layout is wrong in itself; the text names the layer, the field and the values."""


class Refusal(ValueError):
    """Two sides do not fit together, or a request does not fit them.

    field: what was compared, with the layer or group it belongs to. consumer, producer: both sides' values.
    """

    def __init__(self, field: str, consumer: Any, producer: Any, hint: str = "") -> None:
        super().__init__(f"{field}: consumer has {consumer}, producer has {producer}" + (f" ({hint})" if hint else ""))
        self.field = field
        self.consumer = consumer
        self.producer = producer


def offset_bytes(axes: Sequence[Axis], dim: Dim, index: Index) -> Index:
    """What coordinate `index` of `dim` adds to an address: the meaning of axes, for an int or an array of them."""
    total = index * 0
    for axis in axes:
        if axis.dim == dim:
            total = total + index // axis.step % axis.size * axis.stride_bytes
    return total
