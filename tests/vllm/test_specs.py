"""vLLM's specs and tensors, described as layouts."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvferry.layout import Heads
from kvferry.vllm import specs
from kvferry.vllm.specs import Backend, UnsupportedCache, Window

CPU = Backend("CPU_ATTN", "vec")
GPU = Backend("FLASH_ATTN")


def full(num_kv_heads: int = 2, block_size: int = 32, head_size: int = 32, **more) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=torch.float32, **more
    )


def cache_config(*groups: KVCacheGroupSpec, num_blocks: int = 8) -> KVCacheConfig:
    names = [name for group in groups for name in group.layer_names]
    tensor = KVCacheTensor(size=1, layers=names, layer_stride=1, block_stride=1)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=list(groups))


def vllm_config(tp_size: int = 1, total_kv_heads: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total_kv_heads),
    )


def views(num_layers: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Views of one storage, as vLLM makes them."""
    return list(torch.zeros(num_layers, *shape, dtype=dtype).unbind(0))


def test_layers_of_one_storage_share_one_region() -> None:
    config = cache_config(KVCacheGroupSpec(["a", "b"], full()))
    a, b = views(2, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(), config, {"a": a, "b": b}, {"a": CPU, "b": CPU}, tp_rank=0)
    assert [(region.address, region.length_bytes) for region in layout.regions] == [
        (a.untyped_storage().data_ptr(), 2 * 8 * 2 * 32 * 64 * 4)
    ]
    assert [(layer.name, layer.region, layer.base_bytes) for layer in layout.layers] == [
        ("a", 0, 0),
        ("b", 0, 8 * 2 * 32 * 64 * 4),
    ]
    assert [field.name for field in layout.layers[0].fields] == ["k", "v"]


def test_cpu_tiles_have_transposed_keys() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full()))
    (tensor,) = views(1, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": CPU}, tp_rank=0)
    keys, values = layout.layers[0].fields
    strides = {axis.dim: axis.stride_bytes for axis in keys.axes if axis.step != 1 or axis.dim == "token"}
    assert strides["token"] == 4  # one float
    assert values.base_bytes == 32 * 32 * 4  # after the keys of the tile
    assert {axis.stride_bytes for axis in values.axes if axis.dim == "token"} == {32 * 4}


def test_gpu_caches_are_fused_with_the_strides_of_the_tensor() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full()))
    tensor = torch.zeros(8, 32, 2, 64).transpose(1, 2)  # tokens before heads: vLLM's NHD
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": GPU}, tp_rank=0)
    keys, values = layout.layers[0].fields
    assert {axis.dim: axis.stride_bytes for axis in keys.axes if axis.dim != "content"} == {
        "token": 2 * 64 * 4,
        "head": 64 * 4,
    }
    assert values.base_bytes - keys.base_bytes == 32 * 4


def test_an_unknown_packing_is_opaque_and_tagged() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full()))
    (tensor,) = views(1, (8, 2, 32, 64))
    tags = []
    for backend in (Backend("CPU_ATTN", "amx"), Backend("NEW_ATTN")):
        layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": backend}, tp_rank=0)
        tags.append(layout.layers[0].fields[0].opaque)
    assert tags == ["CPU_ATTN:amx:torch.float32:32:32:32", "NEW_ATTN::torch.float32:32:32:32"]


def test_kernel_blocks_are_counted_as_blocks() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(block_size=64)))
    (tensor,) = views(1, (16, 2, 32, 64))  # 8 blocks of 64 tokens in kernel blocks of 32
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": CPU}, tp_rank=0)
    layer = layout.layers[0]
    assert (layer.num_blocks, layer.block_size) == (8, 64)
    assert layer.fields[0].block_stride_bytes == 2 * 2 * 32 * 64 * 4


def test_heads_of_a_rank_are_global() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    (tensor,) = views(1, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(2, 4), config, {"a": tensor}, {"a": CPU}, tp_rank=1)
    assert layout.layers[0].heads == Heads(2, 2, 4)


def test_replicated_heads_are_named() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=1)))
    (tensor,) = views(1, (8, 1, 32, 64))
    layout = specs.cache_layout(vllm_config(4, 2), config, {"a": tensor}, {"a": CPU}, tp_rank=3)
    assert layout.layers[0].heads == Heads(1, 1, 2)


def test_mla_is_one_latent_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config = cache_config(KVCacheGroupSpec(["a"], spec))
    (tensor,) = views(1, (8, 1, 16, 576), torch.bfloat16)
    layout = specs.cache_layout(vllm_config(2, 16), config, {"a": tensor}, {"a": Backend("CPU_MLA")}, tp_rank=1)
    assert layout.layers[0].heads == Heads(0, 1, 1)
    assert [(field.name, field.content_bytes) for field in layout.layers[0].fields] == [("latent", 1152)]


def test_hybrid_groups_over_the_same_bytes_stay_apart() -> None:
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    config = cache_config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], window))
    (tensor,) = views(1, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor, "b": tensor}, {"a": CPU, "b": CPU}, tp_rank=0)
    assert [(layer.name, layer.group) for layer in layout.layers] == [("a", 0), ("b", 1)]
    assert specs.group_kinds(config) == ("FullAttentionSpec", "SlidingWindowSpec(window 64)")


def test_layers_that_share_a_tensor_in_a_group_move_once() -> None:
    config = cache_config(KVCacheGroupSpec(["a", "b"], full()))
    (tensor,) = views(1, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor, "b": tensor}, {"a": CPU, "b": CPU}, tp_rank=0)
    assert [layer.name for layer in layout.layers] == ["a"]


def test_a_group_that_cannot_be_moved_is_refused_by_name() -> None:
    state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    config = cache_config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["mixer"], state))
    with pytest.raises(UnsupportedCache, match=r"group 1 \(mixer, .*MambaSpec"):
        specs.group_kinds(config)


def test_head_slots_that_are_not_heads_are_refused() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    (tensor,) = views(1, (8, 4, 32, 32))  # keys and values of two heads as four slots
    with pytest.raises(UnsupportedCache, match="4 head slots"):
        specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": Backend("ROCM_ATTN")}, tp_rank=0)


def test_heads_that_do_not_add_up_are_refused() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    (tensor,) = views(1, (8, 2, 32, 64))
    with pytest.raises(UnsupportedCache, match="2 KV heads on this rank"):
        specs.cache_layout(vllm_config(1, 8), config, {"a": tensor}, {"a": CPU}, tp_rank=0)


def test_windows_tell_which_blocks_are_behind() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=256)
    config = cache_config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], window))
    assert specs.windows(config) == (None, Window(256, 16))
    # Of 63 blocks, token 1007 looks at tokens 752 to 1007: the last 16. Token 1006 looks at one block more.
    assert Window(256, 16).blocks_behind(1007) == 47
    assert Window(256, 16).blocks_behind(1006) == 46
    assert Window(256, 16).blocks_behind(255) == 0
    assert Window(256, 16).blocks_behind(271) == 1
