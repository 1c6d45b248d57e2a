"""The geometry that `kvferry plan` works out without vLLM, beside vLLM's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.transformers_utils.model_arch_config_convertor import (
    FalconModelArchConfigConvertor,
    ModelArchConfigConvertorBase,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

import plan_models

from kvferry.cli.plan import models, sides
from kvferry.cli.plan.caches import engine, stages
from kvferry.cli.plan.models import Attention, CachedLayer, Model, Recurrent
from kvferry.layout import PHYSICAL_ORDERS, fused

DENSE = [name for name in models.FAMILIES if name in CONFIG_MAPPING and name != "mamba2"]


@pytest.mark.parametrize("model_type", DENSE)
def test_heads_and_sizes_of_a_family(model_type: str) -> None:
    """transformers' own defaults, read from the file that it would write."""
    config = CONFIG_MAPPING[model_type]()
    convertor = FalconModelArchConfigConvertor if model_type == "falcon" else ModelArchConfigConvertorBase
    theirs = convertor(config, config)
    ours = models.parse(config.to_dict(), "x")
    assert ours.num_layers == theirs.get_num_hidden_layers()
    attention = [cache for cache in ours.caches if isinstance(cache, Attention)]
    if theirs.is_deepseek_mla():
        assert set(attention) == {Attention(1, theirs.get_head_size(), 0)}
    else:
        found = {(one.num_heads, one.key_size, one.value_size) for one in attention}
        assert found <= {(theirs.get_total_num_kv_heads(), *[theirs.get_head_size()] * 2)}
    if getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        expected = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        assert [one.window for one in attention] == expected


@pytest.mark.parametrize(("layers", "pp"), [(32, 1), (32, 4), (61, 4), (30, 4), (9, 2), (62, 8)])
def test_pipeline_stages(layers: int, pp: int) -> None:
    found = [(stage.start, stage.stop) for stage in stages(layers, sides.Side(pp=pp))]
    assert found == [get_pp_indices(layers, rank, pp) for rank in range(pp)]


def spec_of(cache: Attention | Recurrent, tp: int, block: int, page: int | None) -> KVCacheSpec:
    """vLLM's spec of a cache on one rank, of bfloat16."""
    if isinstance(cache, Recurrent):
        sizes = (cache.groups, cache.heads, cache.state_size, cache.head_size)
        shapes = Shapes.gated_delta_net_state_shape(tp, *sizes, cache.steps + 1)
        kind = MambaAttentionBackendEnum.GDN_ATTN
        return MambaSpec(block, shapes=shapes, dtypes=(torch.bfloat16,) * 2, page_size_padded=page, mamba_type=kind)
    common: dict[str, Any] = {"block_size": block, "dtype": torch.bfloat16, "head_size": cache.key_size}
    if cache.is_latent:
        return MLAAttentionSpec(num_kv_heads=1, **common)
    common["num_kv_heads"] = max(1, cache.num_heads // tp)
    if cache.window is not None:
        return SlidingWindowSpec(sliding_window=cache.window, **common)
    return FullAttentionSpec(**common)


def vllm_config(order: str, num_blocks: int) -> SimpleNamespace:
    """As much of vLLM's configuration as its grouping of caches reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[order],
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )


def views(model: Model, order: str, tp: int, block: int, num_blocks: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Layer name to its KV cache group, and vLLM's view of one storage."""
    attention = next(cache for cache in model.caches if isinstance(cache, Attention))
    page = spec_of(attention, tp, block, None).page_size_bytes
    specs = {layer.name: spec_of(layer.cache, tp, block, page) for layer in model.layers}
    config = vllm_config(order, num_blocks)
    groups = get_kv_cache_groups(config, specs)
    made = get_kv_cache_config_from_groups(config, groups, 1 << 40)
    raw = torch.empty(made.kv_cache_tensors[0].size, dtype=torch.int8)
    found = {}
    for number, group in enumerate(groups):
        for tensor in (one for one in made.kv_cache_tensors if one.layers[0] in group.layer_names):
            of_layers = create_kv_cache_views(raw, specs[tensor.layers[0]], num_blocks, KVCacheLayout[order], tensor)
            found |= {name: (number, view) for name, view in zip(tensor.layers, of_layers, strict=True)}
    return found


def tiny(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


@pytest.mark.parametrize("order", PHYSICAL_ORDERS)
@pytest.mark.parametrize(
    ("config", "tp"),
    [
        (tiny(plan_models.LLAMA, num_hidden_layers=5), 2),
        (tiny(plan_models.LLAMA, num_hidden_layers=2), 16),
        (tiny(plan_models.DEEPSEEK, num_hidden_layers=3), 4),
        (tiny(plan_models.GEMMA3, num_hidden_layers=15), 2),
        (tiny(plan_models.QWEN3_NEXT, num_hidden_layers=8), 2),
    ],
    ids=["dense", "replicated", "latent", "windows", "states"],
)
def test_every_layer_lies_where_vllm_puts_it(config: dict[str, Any], tp: int, order: str) -> None:
    model = models.parse(config, "x")
    built = engine("consumer", model, sides.Side(tp=tp, layout=order), 64)
    layout, num_blocks = built.layouts[0], built.num_blocks
    block = next(group.tokens for group in built.groups if not group.kept.keeps_state)
    expected = views(model, order, tp, block, num_blocks)
    assert {layer.name.partition("/")[0] for layer in layout.layers} == set(expected)
    first = min(view.data_ptr() for _, view in expected.values())
    caches = {layer.name: layer for layer in model.layers}
    for layer in layout.layers:
        name = layer.name.partition("/")[0]
        group, view = expected[name]
        assert (layer.group, layer.base_bytes) == (group, view.data_ptr() - first), name
        _same_strides(caches[name], layer, view)
    assert layout.regions[0].length_bytes == next(iter(expected.values()))[1].untyped_storage().nbytes()


def _same_strides(cached: CachedLayer, layer: Any, view: torch.Tensor) -> None:
    strides = [stride * view.element_size() for stride in view.stride()]
    if isinstance(cached.cache, Recurrent):
        assert {field.block_stride_bytes for field in layer.fields} == {strides[0]}
        return
    cache = cached.cache
    assert layer.fields == fused(view.shape, strides, cache.key_size, cache.value_size, view.element_size())
