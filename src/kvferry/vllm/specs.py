"""vLLM's cache specs and tensors, as layouts.

The kind of a cache comes from its spec, the strides from its tensor. What the bytes inside a (block, head) tile mean
depends on the attention backend: for backends whose packing is known the axes are spelled out, for others the tile
is opaque and moves whole, tagged with all that decides its packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry import layout as layouts
from kvferry.layout import CacheLayout, Field, Heads, Layer, Region
from kvferry.topology import TopologyError, kv_heads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

MOVABLE_KINDS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")
"""Specs whose blocks hold tokens by position, so that the planner may pair them."""

FUSED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
"""Backends that keep K and V of a token side by side in the content of vLLM's [B, H, N, C] view."""


class UnsupportedCache(ValueError):
    """A KV cache group that kvferry cannot move; the text names the group, its layers and what is supported."""


class Backend(NamedTuple):
    """name: vLLM's name of an attention backend. packing: on a CPU, the instruction set that decides the tile."""

    name: str
    packing: str = ""


def spec_of(kv_cache_config: KVCacheConfig, layer_name: str) -> KVCacheSpec:
    """The spec of one layer; a group may hold one spec per layer. Raises UnsupportedCache for an unknown layer."""
    for group in kv_cache_config.transfer_groups:
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            per_layer = getattr(spec, "kv_cache_specs", None)
            return spec if per_layer is None else per_layer[layer_name]
    raise UnsupportedCache(f"layer {layer_name} is in none of the KV cache groups")


def group_kinds(kv_cache_config: KVCacheConfig) -> tuple[str, ...]:
    """The kind of each transfer group, for the handshake. Raises UnsupportedCache for one that can't be moved."""
    return tuple(_group_kind(index, group) for index, group in enumerate(kv_cache_config.transfer_groups))


def _group_kind(index: int, group: Any) -> str:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if per_layer is None else list(per_layer.values())
    kinds = sorted({type(one).__name__ for one in specs})
    foreign = [kind for kind in kinds if kind not in MOVABLE_KINDS]
    if foreign:
        raise UnsupportedCache(
            f"KV cache group {index} ({', '.join(group.layer_names[:3])}, ...) is a {', '.join(foreign)}: "
            f"kvferry moves {', '.join(MOVABLE_KINDS)}"
        )
    windows = sorted({str(one.sliding_window) for one in specs if getattr(one, "sliding_window", None)})
    return "+".join(kinds) + (f"(window {', '.join(windows)})" if windows else "")


class Window(NamedTuple):
    """Of a sliding-window group: how many tokens back it looks, and its block size."""

    tokens: int
    block_size: int

    def blocks_behind(self, num_computed_tokens: int) -> int:
        """How many whole blocks the token after `num_computed_tokens` and all later ones never look at."""
        return max(num_computed_tokens - self.tokens + 1, 0) // self.block_size


def windows(kv_cache_config: KVCacheConfig) -> tuple[Window | None, ...]:
    """The window of each transfer group; None where every block is kept."""
    found: list[Window | None] = []
    for group in kv_cache_config.transfer_groups:
        spec: Any = group.kv_cache_spec
        per_layer = getattr(spec, "kv_cache_specs", None)
        one = spec if per_layer is None else next(iter(per_layer.values()))
        is_sliding = type(one).__name__ == "SlidingWindowSpec"
        found.append(Window(one.sliding_window, one.block_size) if is_sliding else None)
    return tuple(found)


def cache_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    backends: Mapping[str, Backend],
    tp_rank: int,
) -> CacheLayout:
    """The layout of one worker's cache: one region per storage, one entry per layer and physical tensor.

    kv_caches: layer name to vLLM's logical [blocks, heads, tokens, content] view; aliases of other layers and
    layers outside the transfer groups are left out. Raises UnsupportedCache or layout.LayoutError.
    """
    regions, region_of = _regions([kv_caches[name] for name in sorted(kv_caches)])
    seen: set[tuple[int, int]] = set()
    layers: list[Layer] = []
    for name, group in sorted(kv_cache_config.transfer_group_index_by_layer.items()):
        tensor = kv_caches.get(name)
        if tensor is None or (group, tensor.data_ptr()) in seen:
            continue
        seen.add((group, tensor.data_ptr()))
        region = region_of[tensor.untyped_storage().data_ptr()]
        spec = spec_of(kv_cache_config, name)
        layers.append(
            Layer(
                name=name,
                group=group,
                region=region,
                base_bytes=tensor.data_ptr() - regions[region].address,
                num_blocks=kv_cache_config.num_blocks,
                block_size=spec.block_size,
                dtype=str(spec.dtype).removeprefix("torch."),
                heads=_heads(vllm_config, spec, name, tp_rank),
                fields=_fields(spec, name, tensor, kv_cache_config.num_blocks, backends[name]),
            )
        )
    result = CacheLayout(regions=tuple(regions), layers=tuple(layers))
    layouts.check(result)
    return result


def _regions(tensors: Sequence[torch.Tensor]) -> tuple[list[Region], dict[int, int]]:
    """One region per storage: views of many layers share one, and registering it twice costs twice."""
    regions: list[Region] = []
    region_of: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in region_of:
            region_of[storage.data_ptr()] = len(regions)
            regions.append(Region(storage.data_ptr(), storage.nbytes(), str(tensor.device)))
    return regions, region_of


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


def _fields(spec: Any, name: str, tensor: torch.Tensor, num_blocks: int, backend: Backend) -> tuple[Field, ...]:
    rows, heads, tokens, content = tensor.shape
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    if rows % num_blocks:
        raise UnsupportedCache(f"layer {name}: {rows} rows of its tensor are not a multiple of {num_blocks} blocks")
    if tokens * (rows // num_blocks) != spec.block_size:
        raise UnsupportedCache(
            f"layer {name}: {rows // num_blocks} rows of {tokens} states make a block, its size is {spec.block_size} "
            "tokens: caches with several tokens in a state are not supported"
        )
    shape = (rows, heads, tokens, content)
    tag = f"{backend.name}:{backend.packing}:{tensor.dtype}:{tokens}:{spec.head_size}:{spec.head_size_v}"
    if type(spec).__name__ == "MLAAttentionSpec":
        fields = layouts.fused(shape, strides, content, 0, itemsize)
    elif heads != spec.num_kv_heads or content != spec.head_size + spec.head_size_v:
        # The backend packs K and V its own way, perhaps along the head axis: heads can't be told apart.
        raise UnsupportedCache(
            f"layer {name}: backend {backend.name} has a cache of {heads} head slots and {content} elements, "
            f"{spec.num_kv_heads} KV heads of {spec.head_size} + {spec.head_size_v} were expected"
        )
    elif backend.packing in ("vec", "vec16") and spec.head_size == spec.head_size_v:
        fields = layouts.cpu_tiles(shape, strides, spec.head_size, itemsize)
    elif backend.name in FUSED_BACKENDS:
        fields = layouts.fused(shape, strides, spec.head_size, spec.head_size_v, itemsize)
    else:
        fields = layouts.opaque_tiles(shape, strides, tag)
    if rows == num_blocks:
        return fields
    return layouts.with_kernel_blocks(fields, kernel_block_size=tokens, block_size=spec.block_size)


def backends_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Backend]:
    """The attention backend of every layer in the transfer groups, as this worker runs them."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    names = list(kv_cache_config.transfer_group_index_by_layer)
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    backends: dict[str, Backend] = {}
    for name, layer in found.items():
        backend = layer.get_attn_backend().get_name()
        backends[name] = Backend(backend, _packing(vllm_config, kv_cache_config, name, backend))
    return backends


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


def fingerprint(vllm_config: VllmConfig, model: str) -> dict[str, str]:
    """What must be equal on both sides for their bytes to mean the same, besides layouts."""
    return {
        "model": model,
        "model dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "KV cache dtype": str(vllm_config.cache_config.cache_dtype),
        "decode context parallel size": str(vllm_config.parallel_config.decode_context_parallel_size),
    }
