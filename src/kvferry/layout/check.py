"""Is a layout sound in itself? Run on a worker's own layout when it registers, and on each that a peer announces."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import get_args

import numpy as np

from kvferry.layout.overlaps import Budget, Tangles, check_layers, check_regions, folded, runs_of, shared_byte
from kvferry.layout.structs import Axis, CacheLayout, Dim, Field, Layer, LayoutError

# A peer's layout is looked at by a worker's only thread, so what it may cost is bounded. Caches in use stay far below:
# their layers are alike, and most of what lies in a block folds into a few runs.
MAX_REGIONS = 4096
MAX_LAYERS = 4096
MAX_FIELDS = 16
"""Fields of one layer."""
MAX_AXES = 16
"""Axes of one field."""
MAX_GEOMETRIES = 128
"""Different ones (fields, blocks and heads) among the layers of a layout, or of those looked at together."""
MAX_RUNS = 1 << 17
"""Separate runs of bytes in one block, over all different geometries; and over layers that lie among one another."""

MAX_BYTES = 1 << 56
"""Any length, offset or stride above this is nonsense, and below it int64 arithmetic cannot overflow."""
MAX_ADDRESS = 1 << 62


def check(layout: CacheLayout, examined: Examined | None = None) -> None:
    """Raise LayoutError, naming layer, field and both values, unless for every layer

    - the axes of each field enumerate each (token, head, content byte) once,
    - every address of every block is inside the layer's region,
    - no two of (field, block, token, head, content byte) share an address,
    - only opaque fields have a tile, and they have a tag,
    - the context is one of its ranks, deals whole runs into each block, and runs and token axes (and tiles) can be cut
      at one another,

    and unless names are unique, regions are apart, and the layers of one group agree in their block size and share no
    byte, but for names of one and the same memory. (Layers of different groups may: their blocks are told apart.)
    What would be expensive to look at is refused by name, see MAX_RUNS and the other bounds. examined: shared by
    layouts that come together, such as those of one engine, so that the bounds hold for all of them.
    """
    examined = Examined() if examined is None else examined
    _few("layout: regions", len(layout.regions), MAX_REGIONS)
    _few("layout: layers", len(layout.layers), MAX_LAYERS)
    _unique("layer name", (layer.name for layer in layout.layers))
    block_sizes: dict[int, Layer] = {}
    for index, region in enumerate(layout.regions):
        _bounded(f"region {index}", "address", region.address, 0, MAX_ADDRESS)
        _bounded(f"region {index}", "length_bytes", region.length_bytes, 1)
    check_regions(layout.regions)
    for layer in layout.layers:
        first = block_sizes.setdefault(layer.group, layer)
        if first.block_size != layer.block_size:
            raise LayoutError(
                f"layer {layer.name}: block_size {layer.block_size}, but {first.block_size} in layer {first.name}"
                f" of the same group {layer.group}"
            )
        _check_layer(layout, layer, examined)
    check_layers(layout.layers, examined.end, examined.tangles)


class Examined:
    """The geometries that were looked at, in one layout or in several: layers that are alike share one look."""

    def __init__(self) -> None:
        self._ends: dict[object, int] = {}
        self._disjoint: set[object] = set()
        self._runs = Budget(MAX_RUNS)
        self.tangles = Tangles(MAX_RUNS)

    def end(self, layer: Layer) -> int:
        """The offset just behind the last byte, from the layer's base. Raises LayoutError for an unsound field."""
        where = f"layer {layer.name}"
        geometry = _geometry(layer)
        if geometry not in self._ends:
            _few(f"{where}: different geometries up to here", len(self._ends) + 1, MAX_GEOMETRIES)
            _unique(f"{where}: field", (field.name for field in layer.fields))
            self._ends[geometry] = max(
                _check_field(f"{where}, field {field.name}", layer, field) for field in layer.fields
            )
        return self._ends[geometry]

    def prove_disjoint(self, where: str, layer: Layer) -> None:
        """Raises LayoutError if coordinates share a byte, or if it would take too long to see."""
        geometry = _geometry(layer)
        if geometry in self._disjoint:
            return
        num_runs = sum(prod(axis.size for axis in folded(field)[1]) for field in layer.fields)
        self._runs.spend(f"{where}: separate runs in a block, with those of other geometries", num_runs)
        clash = _clash(layer.fields, layer.num_blocks)
        if clash:
            raise LayoutError(f"{where}: {clash}")
        self._disjoint.add(geometry)


def _geometry(layer: Layer) -> object:
    """All of a layer that decides whether its fields are sound."""
    context = layer.context.size, layer.context.interleave
    return layer.fields, layer.num_blocks, layer.block_size, layer.heads.count, context


def _check_layer(layout: CacheLayout, layer: Layer, examined: Examined) -> None:
    where = f"layer {layer.name}"
    if not 0 <= layer.region < len(layout.regions):
        raise LayoutError(f"{where}: region {layer.region} of {len(layout.regions)}")
    for name, value, least in (
        ("group", layer.group, 0),
        ("base_bytes", layer.base_bytes, 0),
        ("num_blocks", layer.num_blocks, 1),
        ("block_size", layer.block_size, 1),
        ("heads.start", layer.heads.start, 0),
        ("heads.count", layer.heads.count, 1),
        ("heads.total", layer.heads.total, 1),
    ):
        _bounded(where, name, value, least)
    if layer.heads.start + layer.heads.count > layer.heads.total:
        raise LayoutError(
            f"{where}: heads {layer.heads.start} to {layer.heads.start + layer.heads.count} of {layer.heads.total}"
        )
    _check_context(where, layer)
    if not layer.fields:
        raise LayoutError(f"{where}: fields: none")
    _few(f"{where}: fields", len(layer.fields), MAX_FIELDS)
    for field in layer.fields:
        _few(f"{where}, field {field.name}: axes", len(field.axes), MAX_AXES)
    end = examined.end(layer)
    length = layout.regions[layer.region].length_bytes
    if layer.base_bytes + end > length:
        raise LayoutError(
            f"{where}: ends at byte {layer.base_bytes + end} of region {layer.region}, which has {length}"
        )
    examined.prove_disjoint(where, layer)


def _check_context(where: str, layer: Layer) -> None:
    context = layer.context
    _bounded(where, "context.size", context.size, 1)
    _bounded(where, "context.interleave", context.interleave, 1)
    _bounded(where, "context.rank", context.rank, 0, context.size - 1)
    if not context.is_whole and layer.block_size % context.period:
        raise LayoutError(
            f"{where}: block_size {layer.block_size} is not a multiple of context.size {context.size}"
            f" times context.interleave {context.interleave}"
        )


def _check_field(where: str, layer: Layer, field: Field) -> int:
    """Check one field; returns the offset just behind its last byte, from the layer's base."""
    _bounded(where, "base_bytes", field.base_bytes, 0)
    _bounded(where, "block_stride_bytes", field.block_stride_bytes, 1)
    _bounded(where, "content_bytes", field.content_bytes, 1)
    for axis in field.axes:
        if axis.dim not in get_args(Dim):
            raise LayoutError(f"{where}: axis {axis.dim!r} is none of {get_args(Dim)}")
        for name, value, least in (("size", axis.size, 1), ("step", axis.step, 1), ("stride", axis.stride_bytes, 0)):
            _bounded(where, f"{axis.dim} axis {name}", value, least)
    if field.opaque == "":
        raise LayoutError(f"{where}: opaque: the tag is empty")
    if field.opaque is not None and all(axis.dim != "token" for axis in field.axes):
        raise LayoutError(f"{where}: opaque: no token axis, so the tokens of a tile are not known")
    _digits(where, field.axes, "token", layer.block_size // layer.context.size, tile=field.opaque is not None)
    _digits(where, field.axes, "head", layer.heads.count)
    _digits(where, field.axes, "content", field.content_bytes)
    if not layer.context.is_whole and not _can_be_cut(field.axes, layer.context.interleave):
        steps = sorted(axis.step for axis in field.axes if axis.dim == "token")
        raise LayoutError(
            f"{where}: token axes of steps {steps} cannot be cut at context.interleave {layer.context.interleave}"
        )
    reach = sum((axis.size - 1) * axis.stride_bytes for axis in field.axes)
    return field.base_bytes + (layer.num_blocks - 1) * field.block_stride_bytes + reach + 1


def _digits(where: str, axes: Iterable[Axis], dim: Dim, extent: int, tile: bool = False) -> None:
    """The axes of `dim`, as digits of a number, count every coordinate below `extent` once."""
    digits = sorted((axis.step, axis.size) for axis in axes if axis.dim == dim)
    covered = digits[0][0] if tile and digits else 1
    for step, size in digits:
        if step != covered and size > 1:
            raise LayoutError(f"{where}: {dim} axis has step {step}, the axes inside it cover {covered}")
        covered *= size
    if covered != extent:
        raise LayoutError(f"{where}: {dim} axes cover {covered}, the layer has {extent}")


def _can_be_cut(axes: Iterable[Axis], interleave: int) -> bool:
    """Whether runs of `interleave` tokens are whole tiles and end at or inside a digit, or whole runs fill a tile."""
    digits = sorted((axis.step, axis.size) for axis in axes if axis.dim == "token")
    tile = digits[0][0] if digits else 1
    if tile % interleave == 0:
        return True
    run, odd = divmod(interleave, tile)
    if odd:
        return False
    for _, size in digits:
        if run % size:
            return size % run == 0
        run //= size
    return True


def _bounded(where: str, name: str, value: int, least: int, most: int = MAX_BYTES) -> None:
    if not least <= value <= most:
        raise LayoutError(f"{where}: {name} {value} is not in [{least}, {most}]")


def _few(what: str, count: int, most: int) -> None:
    if count > most:
        raise LayoutError(f"{what}: {count}, the most allowed are {most}")


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise LayoutError(f"{what} {name}: appears twice")
        seen.add(name)


@lru_cache(maxsize=256)
def _clash(fields: tuple[Field, ...], num_blocks: int) -> str | None:
    """How two coordinates of a layer come to share a byte, or None. Cached: most layers of a model are alike."""
    runs = [runs_of(field) for field in fields]
    starts = np.concatenate([starts for starts, _ in runs])
    lengths = np.concatenate([np.full(len(starts), length, np.int64) for starts, length in runs])
    strides = {field.block_stride_bytes for field in fields}
    if len(strides) > 1 and num_blocks > 1:
        return f"fields differ in block_stride_bytes: {sorted(strides)}"
    stride = fields[0].block_stride_bytes
    if num_blocks == 1:
        stride = int((starts + lengths).max())
    elif int(lengths.max()) > stride:
        return f"a run of {int(lengths.max())} bytes in a block, but blocks are {stride} bytes apart"
    blocks = np.full(len(starts), num_blocks, np.int64)
    try:
        address = shared_byte("fields", starts, lengths, blocks, stride)
    except LayoutError as error:
        return str(error)
    if address is None:
        return None
    return (
        f"two coordinates share the byte at offset {address} of the layer (block stride {stride}, {num_blocks} blocks)"
    )
