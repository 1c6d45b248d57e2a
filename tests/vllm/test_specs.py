"""vLLM's specs and tensors, described as layouts."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvferry import layout as layouts
from kvferry.layout import Context, Heads
from kvferry.vllm import specs
from kvferry.vllm.attention import Backend, scales_of
from kvferry.vllm.groups import UnsupportedCache

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


def vllm_config(tp_size: int = 1, total_kv_heads: int = 2, **parallel: int) -> SimpleNamespace:
    defaults = {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, **{**defaults, **parallel}),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: total_kv_heads, hf_text_config=SimpleNamespace(n_groups=1)
        ),
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


def test_context_parallel_ranks_hold_every_other_run_of_tokens() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config = cache_config(KVCacheGroupSpec(["a"], spec))
    (tensor,) = views(1, (8, 1, 16, 576), torch.bfloat16)
    sizes = vllm_config(4, 16, decode_context_parallel_size=2, cp_kv_cache_interleave_size=4)
    layout = specs.cache_layout(sizes, config, {"a": tensor}, {"a": Backend("FLASHMLA")}, tp_rank=3)
    layer = layout.layers[0]
    assert (layer.context, layer.block_size, layer.heads) == (Context(1, 2, 4), 32, Heads(0, 1, 1))


def test_prefill_context_parallelism_is_refused_by_name() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full()))
    (tensor,) = views(1, (8, 2, 32, 64))
    with pytest.raises(UnsupportedCache, match="layer a: prefill_context_parallel_size 2"):
        specs.cache_layout(vllm_config(prefill_context_parallel_size=2), config, {"a": tensor}, {"a": CPU}, tp_rank=0)


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
    chunked = ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
    config = cache_config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["local"], chunked))
    with pytest.raises(UnsupportedCache, match=r"group 1 \(local, .*ChunkedLocalAttentionSpec"):
        specs.group_kinds(config)


def test_each_part_of_a_state_is_a_layer_in_the_padded_page_of_its_slot() -> None:
    """4 heads of 2 with states of 8, a window of 3 steps: 8 + 2 * 8 = 24 channels, 288 bytes, then 256 bytes."""
    state = MambaSpec(block_size=1024, shapes=((3, 24), (4, 2, 8)), dtypes=(torch.float32,) * 2, page_size_padded=1024)
    config = cache_config(KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["mixer"], state))
    pool = torch.zeros(8, 1024, dtype=torch.int8)
    attention = torch.zeros(8, 2, 32, 64)
    slots = pool.as_strided((8, 1, 1, 544), (1024, 544, 544, 1))
    backends = {"a": CPU, "mixer": Backend("MAMBA2_ATTN")}
    layout = specs.cache_layout(vllm_config(), config, {"a": attention, "mixer": slots}, backends, tp_rank=0)
    assert [(layer.name, layer.heads.total, layer.dtype) for layer in layout.layers[1:]] == [
        ("mixer/conv.x", 4, "float32"),
        ("mixer/conv.b", 1, "float32"),
        ("mixer/conv.c", 1, "float32"),
        ("mixer/ssm", 4, "float32"),
    ]
    assert {(layer.group, layer.block_size) for layer in layout.layers[1:]} == {(1, layouts.STATE_TOKENS)}
    assert {field.block_stride_bytes for layer in layout.layers[1:] for field in layer.fields} == {1024}
    assert [layer.fields[0].base_bytes for layer in layout.layers[1:]] == [0, 32, 64, 288]
    assert specs.group_kinds(config) == ("FullAttentionSpec", "MambaSpec(MAMBA2)")


def test_cells_with_scales_in_them_move_whole() -> None:
    quantised = full().__class__(
        block_size=32,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.int8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=2 * 32 + 2 * 4,
    )
    config = cache_config(KVCacheGroupSpec(["a"], quantised))
    (tensor,) = views(1, (8, 2, 32, 72), torch.int8)
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": Backend("TRITON_ATTN")}, tp_rank=0)
    (cell,) = layout.layers[0].fields
    assert (cell.name, cell.content_bytes) == ("cell", 72)
    assert cell.opaque == "TRITON_ATTN::torch.int8:32:32:32:INT8_PER_TOKEN_HEAD"


def test_scales_outside_the_cache_are_announced_by_layer() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)))
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=1 / 3)
    scales = scales_of(config, "a", layer)
    assert scales == "k=0.5 v=0.333333333"
    (tensor,) = views(1, (8, 2, 32, 64))
    layout = specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": Backend("X", "", scales)}, tp_rank=0)
    assert layout.layers[0].scales == scales
    assert scales_of(cache_config(KVCacheGroupSpec(["a"], full())), "a", layer) == ""


def test_head_slots_that_are_not_heads_move_whole_between_ranks_with_the_same_heads() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    (tensor,) = views(1, (8, 4, 32, 32))  # keys and values of two heads as four slots
    layout = specs.cache_layout(vllm_config(2, 4), config, {"a": tensor}, {"a": Backend("ROCM_ATTN")}, tp_rank=1)
    layer = layout.layers[0]
    assert layer.heads == Heads(1, 1, 2)  # the second pair of heads
    assert [(field.content_bytes, field.block_stride_bytes) for field in layer.fields] == [(4 * 32 * 32 * 4,) * 2]
    assert layer.fields[0].opaque == "ROCM_ATTN::torch.float32:32:32:32:NONE:4x32:123"


def test_a_block_with_gaps_whose_heads_are_not_known_is_refused() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    tensor = torch.zeros(8, 4, 32, 64)[..., :32]
    with pytest.raises(UnsupportedCache, match="layer a: heads can't be told apart in ROCM_ATTN"):
        specs.cache_layout(vllm_config(), config, {"a": tensor}, {"a": Backend("ROCM_ATTN")}, tp_rank=0)


def test_heads_that_do_not_add_up_are_refused() -> None:
    config = cache_config(KVCacheGroupSpec(["a"], full(num_kv_heads=2)))
    (tensor,) = views(1, (8, 2, 32, 64))
    with pytest.raises(UnsupportedCache, match="2 KV heads on this rank"):
        specs.cache_layout(vllm_config(1, 8), config, {"a": tensor}, {"a": CPU}, tp_rank=0)
