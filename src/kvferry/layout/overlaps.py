"""Which bytes runs have in common: within a layer, among the layers of a group, among regions.

A layer's runs repeat at each multiple of its block stride. Seen modulo the stride, two of them can only meet where they
have a segment in common, and then their quotients say whether they do: so no block has to be looked at twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.layout.structs import Axis, Field, Ints, Layer, LayoutError, Region, memory_of

_PIECES_PER_RUN = 4
_MIN_PIECES = 1024


class Budget:
    """What looking at something may cost, over all that is looked at together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = 0

    @property
    def left(self) -> int:
        return self._most - self._spent

    def spend(self, what: str, amount: int) -> None:
        """Raises LayoutError if more was spent than there is."""
        self._spent += amount
        if self._spent > self._most:
            raise LayoutError(f"{what}: {self._spent}, the most allowed are {self._most}")


def check_regions(regions: Sequence[Region]) -> None:
    """Raises LayoutError where two regions of a device share memory. At address 0 lies none: such regions stand for
    memory of no process, and are apart from one another."""
    order = sorted(range(len(regions)), key=lambda i: (regions[i].device, regions[i].address, regions[i].length_bytes))
    for i, j in pairwise(order):
        first, second = regions[i], regions[j]
        if first.device != second.device or first.address == second.address == 0:
            continue
        if second.address < first.address + first.length_bytes:
            spans = [f"[{one.address}, {one.address + one.length_bytes})" for one in (first, second)]
            raise LayoutError(f"regions {i} and {j}: addresses {spans[0]} and {spans[1]} of {first.device} overlap")


class _Span(NamedTuple):
    """Where a layer's bytes lie in its region: [low, high)."""

    low: int
    high: int
    layer: Layer


class Tangles:
    """Layers of a group that lie among one another, as in a cache that keeps all layers of a block together. Those that
    are alike are looked at once; what all of them may cost is bounded."""

    def __init__(self, most_runs: int) -> None:
        self._budget = Budget(most_runs)
        self._sound: set[Hashable] = set()

    def check(self, layers: Sequence[Layer]) -> None:
        """Raises LayoutError where two of the layers share a byte."""
        base = min(layer.base_bytes for layer in layers)
        key = tuple((layer.fields, layer.num_blocks, layer.base_bytes - base) for layer in layers)
        if key not in self._sound:
            _check_tangle(layers, base, self._budget)
            self._sound.add(key)


def check_layers(layers: Sequence[Layer], end_of: Callable[[Layer], int], tangles: Tangles) -> None:
    """Raises LayoutError where layers of one group, each sound in itself, share bytes without being one memory; and
    where names of one memory disagree in what is in it.

    end_of: the offset just behind a layer's last byte, from its base.
    """
    scopes: dict[tuple[int, int], dict[object, Layer]] = {}
    for layer in layers:
        known = scopes.setdefault((layer.group, layer.region), {}).setdefault(memory_of(layer), layer)
        if (known.heads, known.num_blocks) != (layer.heads, layer.num_blocks):
            raise LayoutError(
                f"layers {known.name} and {layer.name}: one memory, but {known.heads} in {known.num_blocks} blocks and"
                f" {layer.heads} in {layer.num_blocks}"
            )
    for memories in scopes.values():
        spans = [_Span(_low(layer), layer.base_bytes + end_of(layer), layer) for layer in memories.values()]
        for tangle in _tangles(spans):
            tangles.check(tangle)


def _low(layer: Layer) -> int:
    return layer.base_bytes + min(field.base_bytes for field in layer.fields)


def _tangles(spans: list[_Span]) -> Iterator[list[Layer]]:
    """Layers whose spans overlap, directly or through others; most caches have none."""
    spans.sort(key=lambda span: span.low)
    tangle: list[Layer] = []
    end = 0
    for span in spans:
        if span.low >= end:
            if len(tangle) > 1:
                yield tangle
            tangle = []
        tangle.append(span.layer)
        end = max(end, span.high)
    if len(tangle) > 1:
        yield tangle


def _check_tangle(layers: Sequence[Layer], base: int, budget: Budget) -> None:
    first = layers[0]
    where = f"layers {first.name} to {layers[-1].name} of group {first.group}"
    blocks = {layer.num_blocks for layer in layers}
    strides = {field.block_stride_bytes for layer in layers for field in layer.fields}
    if len(strides) > 1 and blocks != {1}:
        raise LayoutError(f"{where}: lie among one another, but differ in block_stride_bytes: {sorted(strides)}")
    runs = [merged_runs(layer.fields) for layer in layers]
    counts = [len(starts) for starts, _ in runs]
    budget.spend(f"{where}: separate runs in a block of layers among one another", sum(counts))
    starts = np.concatenate([one[0] + (layer.base_bytes - base) for one, layer in zip(runs, layers, strict=True)])
    lengths = np.concatenate([one[1] for one in runs])
    num_blocks = np.repeat([layer.num_blocks for layer in layers], counts)
    stride = int((starts + lengths).max()) if blocks == {1} else strides.pop()
    address = shared_byte(where, starts, lengths, num_blocks, stride, budget)
    if address is not None:
        raise LayoutError(f"{where}: two share the byte at offset {base + address} of region {first.region}")


def shared_byte(
    where: str, starts: Ints, lengths: Ints, num_blocks: Ints, stride: int, budget: Budget | None = None
) -> int | None:
    """An address that two runs have, or None. Each run is repeated num_blocks times, `stride` apart, no longer than
    that. Raises LayoutError if runs overlap in so many ways, modulo the stride, that it would take too long to see."""
    wraps = starts % stride + lengths > stride
    head = np.where(wraps, stride - starts % stride, lengths)
    begin = np.concatenate([starts % stride, np.zeros(int(wraps.sum()), np.int64)])
    end = begin + np.concatenate([head, (lengths - head)[wraps]])
    turn = np.concatenate([starts // stride, starts[wraps] // stride + 1])
    blocks = np.concatenate([num_blocks, num_blocks[wraps]])
    cuts = np.unique(np.concatenate([begin, end]))
    low, high = np.searchsorted(cuts, begin), np.searchsorted(cuts, end)
    pieces = high - low
    extra = int(pieces.sum()) - _PIECES_PER_RUN * len(starts) - _MIN_PIECES
    if extra > (budget.left if budget is not None else 0):
        raise LayoutError(f"{where}: runs overlap in too many ways")
    if budget is not None and extra > 0:
        budget.spend(where, extra)
    first = np.repeat(low - np.cumsum(pieces) + pieces, pieces)
    segment = first + np.arange(int(pieces.sum()))
    turn, blocks = np.repeat(turn, pieces), np.repeat(blocks, pieces)
    order = np.lexsort((turn, segment))
    segment, turn, blocks = segment[order], turn[order], blocks[order]
    bad = np.flatnonzero((segment[1:] == segment[:-1]) & (turn[1:] - turn[:-1] < blocks[:-1]))
    if not len(bad):
        return None
    return int(turn[bad[0] + 1]) * stride + int(cuts[segment[bad[0]]])


def folded(field: Field) -> tuple[int, list[Axis]]:
    """The length of a field's contiguous runs, and the axes along which they repeat in a block."""
    run, axes = 1, [axis for axis in field.axes if axis.size > 1]
    while inner := next((axis for axis in axes if axis.stride_bytes == run), None):
        run *= inner.size
        axes.remove(inner)
    return run, axes


def runs_of(field: Field) -> tuple[Ints, int]:
    """The contiguous runs of a field inside one block: their starts, and the one length they have."""
    run, axes = folded(field)
    starts = np.full(1, field.base_bytes, np.int64)
    for axis in axes:
        starts = np.add.outer(starts, np.arange(axis.size, dtype=np.int64) * axis.stride_bytes).ravel()
    return starts, run


@lru_cache(maxsize=32)
def merged_runs(fields: tuple[Field, ...]) -> tuple[Ints, Ints]:
    """The runs of all fields inside one block, neighbours as one: ascending starts, and lengths."""
    runs = [runs_of(field) for field in fields]
    starts = np.concatenate([some for some, _ in runs])
    lengths = np.concatenate([np.full(len(some), length, np.int64) for some, length in runs])
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    first = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
    return starts[first], np.add.reduceat(lengths, first)
