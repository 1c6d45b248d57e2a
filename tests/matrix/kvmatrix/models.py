"""Models, and how an engine keeps them.

A model is a list of layers: `Attention` with K and V, `Latent` without heads, `State` of a recurrent layer. An
engine keeps its layers in pipeline stages: `Apart`, each in a tensor of its own; `Pool`, all in one tensor; or
`Pages`, where the layers of several groups lie on top of one another, as vLLM overlays them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Attention(NamedTuple):
    """heads: of the whole model. Sizes are elements; size_v None: as large as `size`."""

    name: str
    heads: int = 4
    size: int = 4
    size_v: int | None = None
    itemsize: int = 2
    dtype: str = "bfloat16"
    group: int = 0


class Latent(NamedTuple):
    """The same on every TP rank (MLA, an indexer's keys)."""

    name: str
    size: int = 8
    itemsize: int = 2
    dtype: str = "bfloat16"
    group: int = 0


class Projection(NamedTuple):
    """Channels of a convolution's window that are dealt over TP as `shards` shards of `channels` each."""

    name: str
    shards: int
    channels: int


class State(NamedTuple):
    """projections: in the order of the window's channels, each with `steps` values, if there is a convolution.

    shards, size: of the recurrent state, `size` elements in each shard; 0 shards if there is none.
    """

    name: str
    projections: tuple[Projection, ...]
    shards: int = 0
    size: int = 0
    steps: int = 3
    itemsize: int = 2
    size_itemsize: int = 4
    group: int = 0


ModelLayer: TypeAlias = Attention | Latent | State


class Keep(NamedTuple):
    """How a side keeps one layer. layout: one of tensors.PLANES or POOLS, "cpu", "opaque", "cells" or "key only"; of a
    state "DS" or "SD". gap_bytes: behind each row. kernel_tokens: of the kernel's blocks, 0 if they are the cache's.
    """

    layout: str
    gap_bytes: int = 0
    kernel_tokens: int = 0
    tag: str = "kernel x"
    scales: str = ""


Kept: TypeAlias = tuple[ModelLayer, Keep]


class Apart(NamedTuple):
    """Each layer in a tensor of its own, in `num_regions` regions. aliases: another name -> the layer that it names."""

    layers: tuple[Kept, ...]
    num_regions: int = 1
    aliases: tuple[tuple[str, str], ...] = ()


class Pool(NamedTuple):
    """Layers that are alike, in one tensor of a physical order; the i-th layers of all groups are the same memory."""

    layers: tuple[Attention, ...]
    order: str


class Pages(NamedTuple):
    """The i-th layers of all groups begin at the same address, in pages that hold the largest block of any."""

    layers: tuple[Kept, ...]


Stage: TypeAlias = Apart | Pool | Pages


@dataclass(frozen=True)
class Side:
    """One engine. stages: of its pipeline. block_sizes: tokens, by group; layouts.STATE_TOKENS for states.

    dcp: over how many ranks that hold the same heads the tokens are dealt, `interleave` at a time. ids: how block ids
    follow one another: scattered, ascending or descending.
    """

    stages: tuple[Stage, ...]
    tp: int = 1
    block_sizes: tuple[int, ...] = (4,)
    dcp: int = 1
    interleave: int = 1
    ids: str = "scattered"
    transport: str = "local"
    fingerprint: tuple[tuple[str, str], ...] = (("model", "m"),)
    group_kinds: tuple[str, ...] = ("FullAttentionSpec",)

    @property
    def num_ranks(self) -> int:
        return self.tp * len(self.stages)
