"""May a request's destination blocks be written, whoever writes them?

Each of a request's sources proves only what it moves itself, and in WRITE it moves that in several parts. That they
don't write over one another follows from the handshake, which says that sources share nothing; and from the consumer's
own tables, if they name no block twice, nor blocks of groups that lie over one another, as those of a hybrid cache do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout import CacheLayout, Layer, Refusal, memory_of
from kvferry.layout.overlaps import merged_runs
from kvferry.plan.boxes import Ints
from kvferry.plan.proof import Unproven
from kvferry.plan.request import BlockTable, check_destinations


class _Place(NamedTuple):
    """A layer's memory in an overlay, from the overlay's first byte on."""

    group: int
    offset_bytes: int
    layer: Layer

    @property
    def shape(self) -> Hashable:
        return self.group, self.offset_bytes, self.layer.fields


class Destinations:
    """What a consumer's layout says of its block tables, worked out once."""

    def __init__(self, layout: CacheLayout) -> None:
        self._num_blocks: dict[int, int] = {}
        self._block_sizes: dict[int, int] = {}
        regions: dict[int, dict[Hashable, Layer]] = {}
        for layer in layout.layers:
            self._num_blocks[layer.group] = min(layer.num_blocks, self._num_blocks.get(layer.group, layer.num_blocks))
            self._block_sizes[layer.group] = layer.block_size
            regions.setdefault(layer.region, {})[memory_of(layer)] = layer
        # Most overlays of a model are alike: the same layers of each group, somewhere else.
        overlays: dict[Hashable, list[_Place]] = {}
        for layers in regions.values():
            for places in _overlays(list(layers.values())):
                overlays.setdefault(tuple(place.shape for place in places), places)
        self._overlays = list(overlays.values())

    def prove(self, tables: Sequence[BlockTable], end_token: int) -> None:
        """Raise Refusal unless the blocks of the tokens before end_token exist and no two of them share a byte.

        tables: the consumer's, as for `PairPlan.bind`.
        """
        ids: dict[int, Ints] = {}
        for group, block_size in self._block_sizes.items():
            if group >= len(tables):
                raise Refusal(f"block table of group {group}", f"{len(tables)} tables", None)
            some = tables[group].block_ids[: -(-end_token // block_size)]
            ids[group] = some[some != -1]
            check_destinations(group, ids[group], self._num_blocks[group])
        for places in self._overlays:
            _prove_apart(places, ids)


def _overlays(layers: Sequence[Layer]) -> list[list[_Place]]:
    """Layers whose spans in a region overlap, directly or through others, if they are of more than one group."""
    found: list[list[_Place]] = []
    spans = sorted((_span(layer), index) for index, layer in enumerate(layers))
    base = end = -1
    for (low, high), index in spans:
        if low >= end:
            base = low
            found.append([])
        layer = layers[index]
        found[-1].append(_Place(layer.group, layer.base_bytes - base, layer))
        end = max(end, high)
    return [places for places in found if len({place.group for place in places}) > 1]


def _span(layer: Layer) -> tuple[int, int]:
    starts, lengths = merged_runs(layer.fields)
    stride = max(field.block_stride_bytes for field in layer.fields)
    low, high = int(starts[0]), int((starts + lengths).max()) + (layer.num_blocks - 1) * stride
    return layer.base_bytes + low, layer.base_bytes + high


def _prove_apart(places: Sequence[_Place], ids: Mapping[int, Ints]) -> None:
    parts = [_runs(place, ids[place.group]) for place in places]
    starts, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(starts, kind="stable")
    bad = np.flatnonzero(np.diff(starts[order]) < lengths[order][:-1])
    if len(bad):
        owners = np.repeat(np.arange(len(parts)), [len(some) for some, _ in parts])[order]
        both = (places[int(owners[bad[0] + i])].layer for i in (0, 1))
        first, second = sorted(both, key=lambda layer: (layer.group, layer.name))
        raise Unproven(
            f"destination of layers {first.name} (group {first.group}) and {second.name} (group {second.group})",
            "blocks that share bytes",
            None,
        )


def _runs(place: _Place, ids: Ints) -> tuple[Ints, Ints]:
    """All runs of these blocks."""
    starts, lengths = merged_runs(place.layer.fields)
    stride = place.layer.fields[0].block_stride_bytes
    placed = np.add.outer(ids * stride, starts + place.offset_bytes)
    return placed.ravel(), np.tile(lengths, len(ids))
