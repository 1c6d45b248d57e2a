"""Where the bytes of a KV cache lie: fields, named axes, byte strides.

One idea serves every cache. A layer is a list of fields; a field is a box whose axes have a name, a length,
a step and a byte stride, as in a layout algebra: a function from coordinates to byte offsets. Everything that
differs between layouts (K before V, heads before tokens, transposed keys, padded pages) is in those numbers.

Structs here are plain data that travels in handshakes, so they know nothing of torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import gcd
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Index = TypeVar("Index", int, Ints)

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


class Context(msgspec.Struct, frozen=True, order=True):
    """Which tokens of a layer a context parallel rank holds: those t with (t // interleave) % size == rank.

    So the ranks are dealt tokens in runs of `interleave`, and each keeps its own side by side in its blocks. Size 1
    holds all tokens, whatever the interleave.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def period(self) -> int:
        """Tokens after which the ranks are dealt alike."""
        return self.size * self.interleave

    def holds(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        """Whether this rank has each token."""
        held: npt.NDArray[np.bool_] = tokens // self.interleave % self.size == self.rank
        return held

    def local(self, tokens: Ints) -> Ints:
        """The number of each token, which this rank must hold, among those that it holds."""
        if self.is_whole:
            return tokens
        return tokens // self.period * self.interleave + tokens % self.interleave

    def overlaps(self, other: Context) -> bool:
        """Whether some token is held by both. Sizes and interleaves must be positive.

        By the Chinese remainder theorem a token that lies at u in one period and at v in the other exists if and only
        if u and v are equal modulo the gcd of the periods. So the two runs are compared on a circle of that length.
        """
        if self.is_whole or other.is_whole:
            return True
        circle = gcd(self.period, other.period)
        ahead = (other.rank * other.interleave - self.rank * self.interleave) % circle
        return ahead < self.interleave or (circle - ahead) % circle < other.interleave


class Layer(msgspec.Struct, frozen=True):
    """One layer's cache on one worker.

    group: index of its KV cache group, that is of its block table.
    region, base_bytes: the registered region it lies in, and where in it the layer begins.
    block_size: tokens of a block, over all ranks of the context; fields hold block_size / context.size of them.
    scales: of a quantised cache whose scales lie outside it, such as "k=0.5 v=1.0"; else empty.
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
    context: Context = Context()
    scales: str = ""


def memory_of(layer: Layer) -> Hashable:
    """Equal for names of one and the same memory."""
    return layer.group, layer.region, layer.base_bytes, layer.fields, layer.context


class Region(msgspec.Struct, frozen=True):
    """One span of memory to register: address in its process (0 where it is none's), length in bytes, device ("cpu",
    "cuda:0", ...)."""

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

    field: what was compared, with the layer or group it belongs to. consumer, producer: both sides' values, None for a
    side that has no part in it.
    """

    def __init__(self, field: str, consumer: Any, producer: Any, hint: str = "") -> None:
        sides = (("consumer", consumer), ("producer", producer))
        told = ", ".join(f"{side} has {value}" for side, value in sides if value is not None)
        super().__init__((f"{field}: {told}" if told else field) + (f" ({hint})" if hint else ""))
        self.field = field
        self.consumer = consumer
        self.producer = producer


def offset_bytes(axes: Sequence[Axis], dim: Dim, index: Index) -> Index:
    """What coordinate `index` of `dim` adds to an address: the meaning of axes, for an int or an array of them."""
    total = index * 0
    for axis in axes:
        if axis.dim == dim:
            digit = index if axis.step == 1 else index // axis.step
            total = total + digit % axis.size * axis.stride_bytes
    return total
