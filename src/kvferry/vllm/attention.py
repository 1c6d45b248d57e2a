"""The caches of attention layers, as layouts.

What the bytes inside a (block, head) tile mean depends on the attention backend: for backends whose packing is known
the axes are spelled out, for others the tile is opaque and moves whole, tagged with all that decides its packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry import layout as layouts
from kvferry.layout import Context, Field, Heads, Layer
from kvferry.topology import TopologyError, kv_heads
from kvferry.vllm.groups import UnsupportedCache, spec_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FUSED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
"""Backends that keep K and V of a token side by side in the content of vLLM's [B, H, N, C] view."""


class Backend(NamedTuple):
    """How a layer's attention keeps its cache.

    name: vLLM's name of the backend. packing: on a CPU, the instruction set that decides the tile. scales: of a cache
    quantised with one scale for each tensor, which lies outside the cache.
    """

    name: str
    packing: str = ""
    scales: str = ""


class Place(NamedTuple):
    """A layer's name and where its tensor lies."""

    name: str
    group: int
    region: int
    base_bytes: int
    num_blocks: int


def attention_layer(
    vllm_config: VllmConfig, spec: Any, place: Place, tensor: torch.Tensor, backend: Backend, tp_rank: int
) -> Layer:
    """A layer whose blocks hold tokens. Raises UnsupportedCache or LayoutError."""
    context = _context(vllm_config, spec, place.name, tp_rank)
    view = _view(spec, place.name, tensor, place.num_blocks)
    heads = _heads(vllm_config, spec, place.name, tp_rank)
    heads, fields = _rows(spec, place.name, view, backend, heads)
    return Layer(
        *place,
        block_size=spec.block_size * context.size,
        dtype=str(spec.dtype).removeprefix("torch."),
        heads=heads,
        fields=layouts.with_kernel_blocks(fields, view.shape[2], spec.block_size),
        context=context,
        scales=backend.scales,
    )


def _context(vllm_config: VllmConfig, spec: Any, name: str, tp_rank: int) -> Context:
    """Which tokens a rank holds under decode context parallelism, whose ranks are neighbours in TP."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise UnsupportedCache(
            f"layer {name}: prefill_context_parallel_size {parallel.prefill_context_parallel_size} is not supported"
        )
    size = parallel.decode_context_parallel_size if spec.dcp_sharded else 1
    if size == 1:
        return Context()
    return Context(tp_rank % size, size, parallel.cp_kv_cache_interleave_size or 1)


def _heads(vllm_config: VllmConfig, spec: Any, name: str, tp_rank: int) -> Heads:
    if type(spec).__name__ == "MLAAttentionSpec":
        return Heads(0, 1, 1)
    total = vllm_config.model_config.get_total_num_kv_heads()
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    try:
        heads = kv_heads(tp_rank, tp_size, total)
    except TopologyError as error:
        raise UnsupportedCache(f"layer {name}: {error}") from None
    if heads.count != spec.num_kv_heads:
        raise UnsupportedCache(
            f"layer {name} has {spec.num_kv_heads} KV heads on this rank, "
            f"{total} heads of the model at TP {tp_size} make {heads.count}"
        )
    return heads


class View(NamedTuple):
    """vLLM's logical view of a layer, [B, H, N, C] in rows of kernel blocks; strides in bytes."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    itemsize: int


def _view(spec: Any, name: str, tensor: torch.Tensor, num_blocks: int) -> View:
    rows, heads, tokens, content = tensor.shape
    itemsize = tensor.element_size()
    if rows % num_blocks:
        raise UnsupportedCache(f"layer {name}: {rows} rows of its tensor are not a multiple of {num_blocks} blocks")
    if tokens * (rows // num_blocks) != spec.block_size:
        raise UnsupportedCache(
            f"layer {name}: {rows // num_blocks} rows of {tokens} states make a block, its size is {spec.block_size} "
            "tokens: caches with several tokens in a state are not supported"
        )
    strides = tuple(stride * itemsize for stride in tensor.stride())
    return View((rows, heads, tokens, content), (strides[0], strides[1], strides[2], strides[3]), itemsize)


def _rows(spec: Any, name: str, view: View, backend: Backend, heads: Heads) -> tuple[Heads, tuple[Field, ...]]:
    """The heads to announce, and the fields of one row of the view."""
    shape, strides, itemsize = view
    tag = f"{backend.name}:{backend.packing}:{spec.dtype}:{shape[2]}:{spec.head_size}:{spec.head_size_v}"
    mode = spec.kv_quant_mode
    if type(spec).__name__ == "MLAAttentionSpec":
        return heads, layouts.fused(shape, strides, shape[3], 0, itemsize)
    if mode.is_per_token_head and shape[1] == spec.num_kv_heads:
        return heads, layouts.opaque_cells(shape, strides, f"{tag}:{mode.name}")
    if shape[1] != spec.num_kv_heads or shape[3] != spec.head_size + spec.head_size_v:
        return _whole_blocks(name, view, f"{tag}:{mode.name}", heads)
    if backend.packing in ("vec", "vec16") and spec.head_size == spec.head_size_v:
        return heads, layouts.cpu_tiles(shape, strides, spec.head_size, itemsize)
    if backend.name in FUSED_BACKENDS:
        return heads, layouts.fused(shape, strides, spec.head_size, spec.head_size_v, itemsize)
    return heads, layouts.opaque_tiles(shape, strides, tag)


def _whole_blocks(name: str, view: View, tag: str, heads: Heads) -> tuple[Heads, tuple[Field, ...]]:
    """For a backend that packs K and V its own way, perhaps along the head axis, so that heads can't be told apart:
    a row moves whole, between ranks with the same heads. Such a rank's heads count as one."""
    _, *inner = sorted(zip(view.strides, view.shape, strict=True), reverse=True)
    dense = view.itemsize
    for stride, size in reversed(inner):
        if size > 1 and stride != dense:
            raise UnsupportedCache(f"layer {name}: heads can't be told apart in {tag}, and its blocks have gaps inside")
        dense *= size
    order = "".join(str(axis) for axis in sorted(range(1, 4), key=lambda axis: view.strides[axis], reverse=True))
    shape = (view.shape[0], 1, view.shape[2], dense // view.shape[2] // view.itemsize)
    strides = (view.strides[0], dense, shape[3] * view.itemsize, view.itemsize)
    one = Heads(heads.start // heads.count, 1, heads.total // heads.count)
    return one, layouts.opaque_tiles(shape, strides, f"{tag}:{view.shape[1]}x{view.shape[3]}:{order}")


def backends_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Backend]:
    """The attention backend of every layer in the transfer groups, as this worker runs them."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    names = list(kv_cache_config.transfer_group_index_by_layer)
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    backends: dict[str, Backend] = {}
    for name, layer in found.items():
        backend = layer.get_attn_backend().get_name()
        packing = _packing(vllm_config, kv_cache_config, name, backend)
        backends[name] = Backend(backend, packing, scales_of(kv_cache_config, name, layer))
    return backends


def scales_of(kv_cache_config: KVCacheConfig, name: str, layer: Any) -> str:
    """Both scales of a cache with one scale for each tensor; empty for caches that need none, or carry them."""
    mode = getattr(spec_of(kv_cache_config, name), "kv_quant_mode", None)
    if mode is None or mode.name != "FP8_PER_TENSOR":
        return ""
    return f"k={layer._k_scale_float:.9g} v={layer._v_scale_float:.9g}"


def _packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, name: str, backend: str) -> str:
    """What decides the bytes inside a tile beyond shape and dtype."""
    if backend != "CPU_ATTN":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec: Any = spec_of(kv_cache_config, name)
    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
    )
