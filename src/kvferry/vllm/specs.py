"""vLLM's cache specs and tensors, as layouts.

The kind of a cache comes from its spec, the strides from its tensor. attention.py knows the caches of attention layers,
states.py what recurrent layers keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry import layout as layouts
from kvferry.layout import CacheLayout, Layer, Region
from kvferry.vllm import states
from kvferry.vllm.attention import Backend, Place, attention_layer
from kvferry.vllm.groups import UnsupportedCache, backoff_tokens, spec_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MOVABLE_KINDS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec")
"""Specs whose blocks hold tokens by position, so that the planner may pair them, or one state."""


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
    windows = {f"window {one.sliding_window}" for one in specs if getattr(one, "sliding_window", None)}
    states = {one.mamba_type.name for one in specs if kinds == ["MambaSpec"]}
    details = sorted(windows | states)
    return "+".join(kinds) + (f"({', '.join(details)})" if details else "")


def cache_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    backends: Mapping[str, Backend],
    tp_rank: int,
) -> CacheLayout:
    """The layout of one worker's cache: one region per storage, one entry per layer and physical tensor, or for each
    part of a recurrent layer's state.

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
        place = Place(name, group, region, tensor.data_ptr() - regions[region].address, kv_cache_config.num_blocks)
        spec = spec_of(kv_cache_config, name)
        if type(spec).__name__ == "MambaSpec":
            layers += _state_layers(vllm_config, spec, place, tensor, tp_rank)
        else:
            layers.append(attention_layer(vllm_config, spec, place, tensor, backends[name], tp_rank))
    result = CacheLayout(regions=tuple(regions), layers=tuple(layers))
    layouts.check(result)
    return result


def _state_layers(
    vllm_config: VllmConfig, spec: Any, place: Place, tensor: torch.Tensor, tp_rank: int
) -> Iterator[Layer]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    if tensor.shape[0] != place.num_blocks:
        raise UnsupportedCache(f"layer {place.name}: {tensor.shape[0]} slots, but {place.num_blocks} blocks")
    rank = states.Rank(
        tp_rank=tp_rank,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        num_groups=_num_groups(vllm_config.model_config.hf_text_config),
        steps_outermost=not is_conv_state_dim_first(),
    )
    try:
        parts = states.parts(spec, rank, tensor.stride(0) * tensor.element_size())
    except layouts.LayoutError as error:
        raise UnsupportedCache(f"layer {place.name}: {error}") from None
    for part in parts:
        yield Layer(
            *place._replace(name=f"{place.name}/{part.name}"),
            block_size=layouts.STATE_TOKENS,
            dtype=part.dtype,
            heads=part.heads,
            fields=part.fields,
        )


def _num_groups(hf_config: Any) -> int | None:
    """Groups of the B and C projections of mamba2 layers, under the names that models give them."""
    for name in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
        if isinstance(value := getattr(hf_config, name, None), int):
            return value
    return None


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


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model: str) -> dict[str, str]:
    """What must be equal on both sides for their bytes to mean the same, besides layouts."""
    return {
        "model": model,
        "model dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "KV cache dtype": str(vllm_config.cache_config.cache_dtype),
        "tokens left to the consumer": str(backoff_tokens(vllm_config, kv_cache_config)),
    }
