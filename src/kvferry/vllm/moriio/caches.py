"""MoRIIO's functions on caches: where the blocks of a layer's tensor lie, in its words, read off kvferry's layouts.

The kind of a cache comes from its spec, the bytes from its tensor's named axes and strides. These functions know of the
other side only how many blocks it has, and take its tensor for one like this side's. The connector compares layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from kvferry.layout import Field, LayoutError, PlaneOrder, Spec, from_shape, fused, with_kernel_blocks
from kvferry.layout.overlaps import merged_runs, runs_of
from kvferry.plan.boxes import Ints, Runs, merge

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Offsets: TypeAlias = tuple[list[int], list[int], list[int]]
"""Descriptors in bytes: local offsets, remote offsets, sizes."""

_ORDERS: tuple[PlaneOrder, ...] = get_args(PlaneOrder)


class LayerTransferGeometry(NamedTuple):
    """Where the blocks of one layer lie in its tensor.

    num_blocks: on this side. block_size: tokens. block_len, slot_size_bytes: bytes of one transfer, and of one token
    in it. block_stride, local_kv_stride, remote_kv_stride: elements from a block to the next, and from keys to values
    on either side; None where both are in one transfer. transfers_per_block: 2 for keys and values apart, else 1.
    regions_per_block: transfers of a block in one region. split_kv_regions: keys and values are regions of their own.
    """

    num_blocks: int
    block_size: int
    block_len: int
    slot_size_bytes: int
    block_stride: int
    local_kv_stride: int | None
    remote_kv_stride: int | None
    transfers_per_block: int
    regions_per_block: int
    split_kv_regions: bool


def build_layer_to_spec(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer of all KV cache groups; a group may hold one spec for each layer."""
    found: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            found[name] = group.kv_cache_spec if per_layer is None else per_layer[name]
    return found


def is_mla_cache_layer(layer_to_spec: Mapping[str, KVCacheSpec], layer_name: str) -> bool:
    """Whether a layer keeps one content per token and no heads (a latent, an indexer's keys), by its spec.

    Raises ValueError for a layer without a spec.
    """
    return isinstance(_spec(layer_to_spec, layer_name), (MLAAttentionSpec, SlidingWindowMLASpec))


def _spec(layer_to_spec: Mapping[str, KVCacheSpec], layer_name: str) -> Any:
    if layer_name not in layer_to_spec:
        raise LayoutError(f"layer {layer_name} has no KV cache spec, there are those of {len(layer_to_spec)} others")
    return layer_to_spec[layer_name]


def get_layer_transfer_geometry(
    layer_name: str,
    kv_cache: torch.Tensor,
    layer_to_spec: Mapping[str, KVCacheSpec],
    remote_num_blocks: int | None = None,
) -> LayerTransferGeometry:
    """Reads a layer's tensor: [2, B, N, H, D] or [B, 2, N, H, D], also with heads before tokens; [B, N, C] of an MLA
    spec; vLLM's [B, H, N, C]. N may be a part of the spec's block. remote_num_blocks: None or 0 if it is this side's.

    Raises ValueError, naming the layer, where shape and spec disagree, a shape can be read in several ways, or the
    bytes of a block are not side by side.
    """
    cache = _read(layer_name, kv_cache, layer_to_spec)
    return _geometry(cache, _remote_blocks(layer_name, remote_num_blocks) or cache.num_blocks)


def merge_contiguous_offsets(offsets_local: list[int], offsets_remote: list[int], sizes: list[int]) -> Offsets:
    """The same bytes by ascending local offset, where neighbours that touch on both sides are one.

    Raises ValueError for lists of different lengths.
    """
    if not len(offsets_local) == len(offsets_remote) == len(sizes):
        raise ValueError(
            f"lists of different lengths: {len(offsets_local)} offsets_local, {len(offsets_remote)} offsets_remote, "
            f"{len(sizes)} sizes"
        )
    merged = merge([Runs(*(np.array(column, np.int64) for column in (offsets_local, offsets_remote, sizes)))])
    return merged.consumer_offsets.tolist(), merged.producer_offsets.tolist(), merged.lengths.tolist()


def compute_block_transfer_offsets(
    layer_name: str,
    kv_cache: torch.Tensor,
    layer_to_spec: Mapping[str, KVCacheSpec],
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
    remote_num_blocks: int,
    merge_fn: Callable[[list[int], list[int], list[int]], Offsets] = merge_contiguous_offsets,
) -> Offsets:
    """What to move for the i-th local from the i-th remote block, i over all local blocks; offsets from the tensors'
    starts. merge_fn: gets all keys' transfers, then all values', each in the order of the ids.

    Raises ValueError for more local than remote blocks, for an id out of range, and as `get_layer_transfer_geometry`.
    """
    cache = _read(layer_name, kv_cache, layer_to_spec)
    remote_blocks = _remote_blocks(layer_name, remote_num_blocks)
    if len(local_block_ids) > len(remote_block_ids):
        raise ValueError(
            f"layer {layer_name}: local_block_ids has {len(local_block_ids)} blocks, remote_block_ids "
            f"{len(remote_block_ids)}"
        )
    local = _ids(f"layer {layer_name}: local_block_ids", local_block_ids, cache.num_blocks)
    remote = _ids(f"layer {layer_name}: remote_block_ids", remote_block_ids, remote_blocks)[: len(local)]
    local_offsets = [base + local * cache.stride_bytes for base in cache.bases]
    remote_offsets = [base + remote * cache.stride_bytes for base in cache.remote_bases(remote_blocks)]
    offsets = np.concatenate(local_offsets).tolist(), np.concatenate(remote_offsets).tolist()
    return merge_fn(*offsets, [cache.length_bytes] * len(offsets[0]))


def iter_layer_registration_regions(
    layer_name: str, kv_cache: torch.Tensor, layer_to_spec: Mapping[str, KVCacheSpec]
) -> list[tuple[torch.Tensor, int]]:
    """The memory to register: tensors, and how many bytes from each one's start up to its last block's last byte.

    Two where all keys lie before all values, else one. Of a recurrent layer, [B, 1, 1, C] of bytes, the two states:
    tensors of the spec's shapes, with as many bytes as B pages have, or as there are.
    Raises ValueError as `get_layer_transfer_geometry`, and for other than two states.
    """
    spec = _spec(layer_to_spec, layer_name)
    if isinstance(spec, MambaSpec):
        return _state_regions(layer_name, kv_cache, spec)
    cache = _read(layer_name, kv_cache, layer_to_spec)
    blocks_bytes = (cache.num_blocks - 1) * cache.stride_bytes + cache.length_bytes
    if cache.is_split and cache.plane_axis is not None:
        return [(kv_cache.select(cache.plane_axis, plane), blocks_bytes) for plane in range(2)]
    return [(kv_cache, blocks_bytes + cache.bases[-1])]


def _state_regions(layer_name: str, kv_cache: torch.Tensor, spec: MambaSpec) -> list[tuple[torch.Tensor, int]]:
    named = f"layer {layer_name}, recurrent cache {list(kv_cache.shape)}"
    if len(spec.shapes) != 2 or len(spec.dtypes) != 2:
        raise LayoutError(
            f"{named}: the spec has {len(spec.shapes)} states, must be a convolution's and a recurrence's"
        )
    if kv_cache.dim() != 4 or kv_cache.shape[1:3] != (1, 1) or (kv_cache.element_size(), kv_cache.stride(3)) != (1, 1):
        raise LayoutError(f"{named} of {kv_cache.dtype}: must be [B, 1, 1, C] of bytes that are side by side")
    num_pages, *_, page_bytes = kv_cache.shape
    if not num_pages or page_bytes < spec.state_content_size_bytes:
        raise LayoutError(f"{named}: no page of {spec.state_content_size_bytes} bytes, as the states have")
    regions: list[tuple[torch.Tensor, int]] = []
    first = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        end = first + prod(shape) * dtype.itemsize
        try:
            state = kv_cache[:, 0, 0, first:end].view(dtype).view(num_pages, *shape)
        except RuntimeError as error:  # bytes that are not aligned
            raise LayoutError(f"{named}: {error}") from None
        bytes_left = state.untyped_storage().nbytes() - state.storage_offset() * dtype.itemsize
        regions.append((state, min(num_pages * kv_cache.stride(0), bytes_left)))
        first = end
    return regions


class _Cache(NamedTuple):
    """A layer's tensor in the spec's blocks. Of block 0, `bases` are where its transfers begin: one, or keys and values
    apart; each has length_bytes. plane_axis: the tensor's axis that tells keys from values, if it has one."""

    block_size: int
    num_states: int
    num_blocks: int
    itemsize: int
    stride_bytes: int
    bases: tuple[int, ...]
    length_bytes: int
    plane_axis: int | None

    @property
    def is_split(self) -> bool:
        """Whether all keys lie before all values. By the bytes: the axes of a tensor may be in another order."""
        return len(self.bases) == 2 and self.bases[1] >= self.num_blocks * self.stride_bytes

    def remote_bases(self, remote_num_blocks: int) -> tuple[int, ...]:
        """Of a tensor like this one with so many blocks: values follow all keys, or the keys of their own block."""
        return (0, remote_num_blocks * self.stride_bytes) if self.is_split else self.bases


def _geometry(cache: _Cache, remote_num_blocks: int) -> LayerTransferGeometry:
    num_transfers = len(cache.bases)
    local_kv, remote_kv = (
        bases[1] // cache.itemsize if num_transfers == 2 else None
        for bases in (cache.bases, cache.remote_bases(remote_num_blocks))
    )
    return LayerTransferGeometry(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        block_len=cache.length_bytes,
        slot_size_bytes=cache.length_bytes // cache.num_states,
        block_stride=cache.stride_bytes // cache.itemsize,
        local_kv_stride=local_kv,
        remote_kv_stride=remote_kv,
        transfers_per_block=num_transfers,
        regions_per_block=1 if cache.is_split else num_transfers,
        split_kv_regions=cache.is_split,
    )


class _Reading(NamedTuple):
    """One row of a tensor, as fields: a block, or the part of a block that kernels take at once."""

    num_rows: int
    num_states: int
    fields: tuple[Field, ...]
    plane_axis: int | None


def _read(layer_name: str, kv_cache: torch.Tensor, layer_to_spec: Mapping[str, KVCacheSpec]) -> _Cache:
    spec, is_mla = _spec(layer_to_spec, layer_name), is_mla_cache_layer(layer_to_spec, layer_name)
    num_states = getattr(spec, "num_states", spec.block_size)
    try:
        if isinstance(spec, MambaSpec):
            raise LayoutError("a recurrent state has no blocks of tokens")
        if 0 in kv_cache.shape:
            raise LayoutError("there is nothing in it")
        has_planes = len(kv_cache.shape) == 5 and not is_mla
        reading = _with_planes(kv_cache, spec, num_states) if has_planes else _without_planes(kv_cache, spec, is_mla)
        return _in_blocks(reading, spec.block_size, num_states, kv_cache.element_size())
    except LayoutError as error:
        kind = "MLA" if is_mla else "K/V"
        raise LayoutError(f"layer {layer_name}, {kind} cache {list(kv_cache.shape)}: {error}") from None


def _in_blocks(reading: _Reading, block_size: int, num_states: int, itemsize: int) -> _Cache:
    fields = with_kernel_blocks(reading.fields, reading.num_states, num_states)
    num_blocks, rest = divmod(reading.num_rows, num_states // reading.num_states)
    if rest or not num_blocks:
        raise LayoutError(f"{reading.num_rows} rows of {reading.num_states} tokens are no blocks of {num_states}")
    bases, length_bytes = _transfers(fields)
    return _Cache(
        block_size,
        num_states,
        num_blocks,
        itemsize,
        fields[0].block_stride_bytes,
        bases,
        length_bytes,
        reading.plane_axis,
    )


def _transfers(fields: tuple[Field, ...]) -> tuple[tuple[int, ...], int]:
    """Where each field of block 0 begins if each is one run of bytes, else where all together do; and the length."""
    runs = [runs_of(field) for field in fields]
    if all(len(starts) == 1 for starts, _ in runs):
        return tuple(int(starts[0]) for starts, _ in runs), runs[0][1]
    starts, lengths = merged_runs(fields)
    if len(starts) != 1:
        raise LayoutError(f"the bytes of a block are {len(starts)} runs with gaps between, they must be one")
    return (int(starts[0]),), int(lengths[0])


def _strides_bytes(kv_cache: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride * kv_cache.element_size() for stride in kv_cache.stride())


def _with_planes(kv_cache: torch.Tensor, spec: Any, num_states: int) -> _Reading:
    """A tensor with an axis of keys and values. Rows of whole blocks come before rows of parts of them."""
    shape = tuple(kv_cache.shape)
    fitting = [order for order in _ORDERS if _fits(dict(zip(order, shape, strict=True)), spec, num_states)]
    whole = [order for order in fitting if shape[order.index("N")] == num_states]
    readings = whole or fitting
    if len(readings) != 1:
        found = f"ambiguous, it can be read as {' and as '.join(readings)}" if readings else "nothing that fits"
        raise LayoutError(f"the shape is {found}, with {spec}")
    (order,) = readings
    sizes = dict(zip(order, shape, strict=True))
    declared = Spec(sizes["N"], sizes["H"], sizes["D"], kv_cache.element_size(), order=order)
    fields = from_shape(shape, _strides_bytes(kv_cache), declared)
    return _Reading(sizes["B"], sizes["N"], fields, order.index("2"))


def _fits(sizes: Mapping[str, int], spec: Any, num_states: int) -> bool:
    heads, head_size = (getattr(spec, name, None) for name in ("num_kv_heads", "head_size"))
    return (
        sizes["2"] == 2
        and sizes["N"] > 0
        and num_states % sizes["N"] == 0
        and heads in (sizes["H"], None)
        and head_size in (sizes["D"], None)
    )


def _without_planes(kv_cache: torch.Tensor, spec: Any, is_mla: bool) -> _Reading:
    """vLLM's view [B, H, N, C], or without its head axis if a spec has none: the content of a token is one."""
    shape, strides = tuple(kv_cache.shape), _strides_bytes(kv_cache)
    if len(shape) == 3 and is_mla:
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], shape[1] * strides[1], *strides[1:])
    if len(shape) != 4:
        possible = "[B, N, C] or [B, H, N, C]" if is_mla else "5 axes with K and V, or [B, H, N, C]"
        raise LayoutError(f"the shape has {len(shape)} axes, must be {possible}")
    num_rows, num_heads, num_states, content = shape
    content_bytes = content * kv_cache.element_size()
    for what, found, expected in (
        ("heads", num_heads, getattr(spec, "num_heads", None)),
        ("bytes of a token and head", content_bytes, getattr(spec, "state_content_size_bytes", None)),
    ):
        if expected not in (found, None):
            raise LayoutError(f"{what}: the tensor has {found}, the spec {expected}")
    return _Reading(num_rows, num_states, fused(shape, strides, content, 0, kv_cache.element_size()), None)


def _remote_blocks(layer_name: str, given: int | None) -> int:
    if given is not None and given < 0:
        raise ValueError(f"layer {layer_name}: remote_num_blocks is {given}, must not be negative")
    return given or 0


def _ids(named: str, block_ids: Sequence[int], num_blocks: int) -> Ints:
    """Raises ValueError for what is no id of one of so many blocks."""
    for one in block_ids:
        if not isinstance(one, (int, np.integer)) or not 0 <= one < num_blocks:
            raise ValueError(f"{named}: block id {one!r} is outside [0, {num_blocks})")
    return np.array(block_ids, np.int64)
