"""From a model and one side's settings to the layouts of its ranks."""

from __future__ import annotations

from typing import Any

import plan_models
import pytest

from kvferry.cli.errors import Problem
from kvferry.cli.plan import models, sides
from kvferry.cli.plan.caches import engine, grouped, stages
from kvferry.cli.plan.engines import Engine
from kvferry.layout import STATE_TOKENS, CacheLayout, Context, Heads, Layer

LFM2 = {
    "model_type": "lfm2",
    "num_attention_heads": 8,
    "hidden_size": 512,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"],
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_attention_heads": 8,
    "head_dim": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "hybrid_override_pattern": "M*--",
}


def make(config: dict[str, Any], text: str = "", tokens: int = 1024) -> Engine:
    return engine("consumer", models.parse(config, "x"), sides.parse("--consumer", text, None), tokens)


def heads(built: Engine) -> list[Heads]:
    return [rank.layout.layers[0].heads for rank in built.ranks]


def of(layout: CacheLayout, name: str) -> Layer:
    return next(layer for layer in layout.layers if layer.name.endswith(name))


def test_tp_cuts_heads() -> None:
    assert heads(make(plan_models.LLAMA, "tp=4")) == [Heads(start, 2, 8) for start in (0, 2, 4, 6)]


def test_more_ranks_than_heads_replicate_them() -> None:
    assert heads(make(plan_models.LLAMA, "tp=16")) == [Heads(rank // 2, 1, 8) for rank in range(16)]


def test_a_latent_is_whole_on_every_rank() -> None:
    built = make(plan_models.DEEPSEEK, "tp=8")
    assert heads(built) == [Heads(0, 1, 1)] * 8
    assert built.ranks[0].layout.layers[0].fields[0].content_bytes == 576 * 2


def test_pp_cuts_layers() -> None:
    built = make(plan_models.LLAMA, "tp=2,pp_layers=10+22")
    assert [rank.label for rank in built.ranks] == ["pp0.tp0", "pp0.tp1", "pp1.tp0", "pp1.tp1"]
    assert [len(layout.layers) for layout in built.layouts] == [10, 10, 22, 22]
    assert built.layouts[2].layers[0].name == "model.layers.10.self_attn.attn"
    assert built.layouts[2].layers[0].base_bytes == 0


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(32, 4, [8, 8, 8, 8]), (61, 4, [15, 15, 16, 15]), (30, 4, [7, 8, 8, 7]), (9, 2, [5, 4])],
)
def test_uneven_stages(layers: int, pp: int, expected: list[int]) -> None:
    """The last stage has the output layer, the first one the embedding."""
    assert [len(stage) for stage in stages(layers, sides.Side(pp=pp))] == expected


def test_dcp_deals_tokens() -> None:
    built = make(plan_models.DEEPSEEK, "tp=4,dcp=2,interleave=4")
    assert [layout.layers[0].context for layout in built.layouts] == [Context(rank % 2, 2, 4) for rank in range(4)]
    assert built.layouts[0].layers[0].block_size == built.groups[0].tokens == 32


def test_dcp_shares_the_ranks_of_a_kv_head() -> None:
    config = {**plan_models.LLAMA, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 128}
    layers = [layout.layers[0] for layout in make(config, "tp=24,dcp=3").layouts]
    assert [(layer.heads.start, layer.context.rank) for layer in layers[:7]] == [
        *((0, rank) for rank in (0, 1, 2, 0, 1, 2)),
        (1, 0),
    ]


@pytest.mark.parametrize(
    ("config", "text", "note"),
    [
        (plan_models.LLAMA, "interleave=4", "consumer: interleave 4 means nothing without dcp."),
        (plan_models.LLAMA, "conv=DS", "consumer: conv DS means nothing for this model, which has no states."),
        (plan_models.LLAMA, "ssm=fp32", "consumer: ssm float32 means nothing for this model, which has no states."),
        (plan_models.MAMBA2, "block=64", "consumer: block 64 means nothing for this model, which has only states."),
        (
            plan_models.QWEN3_NEXT,
            "block=64",
            "consumer: a block has 576 tokens instead of the 64 asked for, so that it can hold a state.",
        ),
        (plan_models.QWEN3_NEXT, "block=544", "consumer: a block has 544 tokens, so that it can hold a state."),
    ],
)
def test_settings_that_change_or_mean_nothing_are_noted(config: dict[str, Any], text: str, note: str) -> None:
    assert note in make(config, text).notes
    assert not any("means nothing" in one for one in make(config).notes)


def test_the_heading_of_a_side_with_context_ranks() -> None:
    built = make(plan_models.DEEPSEEK, "tp=8,dcp=8,interleave=4")
    assert built.settings == "tp 8, dcp 8, interleave 4, block 16 (128 over 8 ranks), LBHNC, bfloat16"


def test_groups_of_a_model_with_windows() -> None:
    layers = models.parse(plan_models.GEMMA3, "x").layers
    groups = grouped(layers)
    assert [len(group) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert [layer.decoder_layer for layer in groups[0][:3]] == [0, 7, 14]
    labels = [group.label for group in make(plan_models.GEMMA3).groups]
    assert labels == ["window of 1,024"] * 6 + ["full attention"]


def test_groups_lie_one_over_the_other() -> None:
    layout = make(plan_models.GEMMA3).layouts[0]
    firsts = {layer.group: layer.base_bytes for layer in reversed(layout.layers)}
    assert firsts == dict.fromkeys(range(7), 0)
    assert len(layout.regions) == 1


def test_groups_of_about_one_size_are_not_split() -> None:
    """As vLLM does: three layers with a window and four without make two groups, not three."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 4
    config = {**plan_models.LLAMA, "num_hidden_layers": 7, "sliding_window": 64, "layer_types": kinds}
    assert [len(group) for group in grouped(models.parse(config, "x").layers)] == [3, 4]


def test_blocks_of_all_groups_are_as_far_apart_as_those_of_the_largest() -> None:
    layout = make(plan_models.GEMMA3, "tp=2,layout=BLHNC").layouts[0]
    page = 8 * 16 * 2 * 128 * 2
    assert {layer.fields[0].block_stride_bytes for layer in layout.layers} == {10 * page}


def test_room_for_a_request() -> None:
    """And for as many blocks between those of the request, so that none of them are neighbours."""
    assert make(plan_models.LLAMA, tokens=1000).num_blocks == 1 + 2 * 63
    assert make(plan_models.LLAMA, "blocks=500", tokens=1000).num_blocks == 500


@pytest.mark.parametrize(
    ("text", "block_stride", "head_stride", "token_stride", "layer_stride"),
    [  # 65 blocks of 16 tokens, 2 heads, K and V of 128: 256 bytes each
        ("layout=LBHNC", 16384, 8192, 512, 65 * 16384),
        ("layout=NHD", 16384, 512, 1024, 65 * 16384),
        ("layout=LHBNC", 8192, 65 * 8192, 512, 65 * 16384),
        ("layout=BLHNC", 32 * 16384, 8192, 512, 16384),
        ("layout=BLNHC", 32 * 16384, 512, 1024, 16384),
        ("layout=BHLNC", 32 * 16384, 32 * 8192, 512, 8192),
    ],
)
def test_physical_orders(text: str, block_stride: int, head_stride: int, token_stride: int, layer_stride: int) -> None:
    layout = make(plan_models.LLAMA, f"tp=4,blocks=65,{text}").layouts[0]
    first, second = layout.layers[:2]
    axes = {axis.dim: axis.stride_bytes for axis in first.fields[0].axes}
    assert (first.fields[0].block_stride_bytes, axes["head"], axes["token"]) == (
        block_stride,
        head_stride,
        token_stride,
    )
    assert (second.base_bytes, layout.regions[0].length_bytes) == (layer_stride, 65 * 32 * 16384)


def test_planes_are_tensors_of_their_own() -> None:
    separated = make(plan_models.LLAMA, "tp=4,blocks=65,layout=separated").layouts[0]
    assert len(separated.regions) == 32
    assert separated.layers[5].region == 5
    assert separated.layers[0].fields[1].base_bytes == 65 * 8192
    interleaved = make(plan_models.LLAMA, "tp=4,layout=interleaved-hnd").layouts[0].layers[0]
    assert interleaved.fields[1].base_bytes == 8192
    assert [axis.dim for axis in interleaved.fields[0].axes] == ["head", "token", "content"]


def test_the_cpus_attention() -> None:
    layer = make(plan_models.LLAMA, "layout=cpu").layouts[0].layers[0]
    assert layer.block_size == 128
    assert [axis.stride_bytes for axis in layer.fields[0].axes if axis.dim == "token"] == [2]
    tile = make(plan_models.LLAMA, "layout=cpu-amx,block=64").layouts[0].layers[0].fields[0]
    assert tile.opaque == "CPU_ATTN:amx:torch.bfloat16:64:128:128"
    assert make(plan_models.DEEPSEEK, "layout=cpu").groups[0].tokens == 16


def test_quantised_caches() -> None:
    layer = make(plan_models.LLAMA, "tp=4,dtype=fp8").layouts[0].layers[0]
    assert (layer.dtype, layer.fields[0].content_bytes) == ("uint8", 128)


@pytest.mark.parametrize(
    ("config", "text", "block"),
    [  # what vLLM chooses: measured for the tiny model on its CPU backend, logged for Qwen3-Next on GPUs
        (
            {
                **plan_models.QWEN3_NEXT,
                **dict.fromkeys(("linear_num_value_heads",), 4),
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "head_dim": 32,
            },
            "layout=cpu",
            384,
        ),
        (plan_models.QWEN3_NEXT, "", 544),
        (plan_models.FALCON_H1, "layout=cpu,dtype=fp32", 128),
    ],
)
def test_blocks_are_as_large_as_states(config: dict[str, Any], text: str, block: int) -> None:
    built = make(config, text)
    assert {group.tokens for group in built.groups if not group.kept.keeps_state} == {block}
    assert {group.tokens for group in built.groups if group.kept.keeps_state} == {STATE_TOKENS}


def test_parts_of_a_state() -> None:
    layout = make(plan_models.QWEN3_NEXT, "tp=2").layouts[1]
    assert [layer.name.rpartition("/")[2] for layer in layout.layers[:4]] == ["conv.q", "conv.k", "conv.v", "ssm"]
    assert of(layout, "0.linear_attn/conv.k").heads == Heads(8, 8, 16)
    assert of(layout, "0.linear_attn/ssm").heads == Heads(16, 16, 32)
    assert of(layout, "0.linear_attn/ssm").fields[0].base_bytes == 3 * (2 * 1024 + 2048) * 2


def test_a_single_group_of_mamba2_is_on_every_rank() -> None:
    layout = make(plan_models.FALCON_H1, "tp=2").layouts[1]
    assert of(layout, "0.mixer/conv.b").heads == Heads(0, 1, 1)
    assert of(layout, "0.mixer/conv.x").heads == of(layout, "0.mixer/ssm").heads == Heads(2, 2, 4)


def test_states_alone() -> None:
    built = make(plan_models.MAMBA2, "tp=2")
    assert [group.label for group in built.groups] == ["mamba2 state"]
    assert built.layouts[0].regions[0].length_bytes == 3 * 4 * (3 * (128 + 2 * 32) + 4 * 32 * 32) * 2


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("", "bfloat16"), ("layout=cpu", "float32"), ("ssm=fp16", "float16"), ("dtype=fp8", "bfloat16")],
)
def test_the_dtype_of_a_state(text: str, dtype: str) -> None:
    assert of(make(plan_models.QWEN3_NEXT, text).layouts[0], "0.linear_attn/ssm").dtype == dtype


@pytest.mark.parametrize(
    ("config", "text", "words"),
    [
        (plan_models.LLAMA, "tp=3", "tp 3 does not divide the model's 32 query heads"),
        (plan_models.LLAMA, "tp=64", "tp 64 does not divide the model's 32 query heads"),
        ({**plan_models.GEMMA3["text_config"], "num_attention_heads": 12}, "tp=8", "model's 12 query heads"),
        (
            {**plan_models.LLAMA, "num_attention_heads": 24, "head_dim": 128},
            "tp=3",
            "tp_size 3 and total_heads 8: one must be a multiple",
        ),
        (plan_models.LLAMA, "pp_layers=10+10", "pp_layers 10+10: the model has 32 layers"),
        (plan_models.LLAMA, "pp=33", "pp 33: the model has 32 layers"),
        (plan_models.LLAMA, "blocks=3", "blocks 3: 1,024 tokens need 64, and vLLM keeps block 0"),
        (plan_models.LLAMA, "layout=cpu,block=16", "block 16: vLLM's CPU attention needs a multiple of 32"),
        (plan_models.LLAMA, "blocks=64", "blocks 64: 1,024 tokens need 64, and vLLM keeps block 0 as its null block"),
        (
            plan_models.LLAMA,
            "tp=8,dcp=2",
            "dcp 2: with tp 8 each of the 8 KV heads is on 1 rank, which dcp must divide",
        ),
        (plan_models.LLAMA, "tp=8,dcp=3", "dcp 3 does not divide tp 8"),
        (
            {**plan_models.LLAMA, "num_key_value_heads": 16},
            "tp=32,dcp=4",
            "dcp 4: with tp 32 each of the 16 KV heads is on 2 ranks",
        ),
        (plan_models.GEMMA3, "tp=32,dcp=2", "dcp 2: only understood for full attention and latents"),
        (plan_models.DEEPSEEK, "tp=4,dcp=2,interleave=3", "context.interleave 3"),
        (plan_models.QWEN3_NEXT, "layout=separated", "layout separated: a state has no keys and values"),
        ({**plan_models.QWEN3_NEXT, "num_attention_heads": 32}, "tp=32", "tp 32 does not divide the 16 groups of the"),
        ({**plan_models.LLAMA, "torch_dtype": "int8"}, "", "dtype int8 is none of bfloat16"),
        ({**plan_models.LLAMA, "torch_dtype": "\x1b"}, "", "dtype \\x1b is none of bfloat16, float16, float32"),
        (plan_models.LLAMA, "block=1048576,blocks=1048576", "1,048,576 blocks of 1,048,576 tokens in 32 layers take "),
        ({**LFM2, "num_attention_heads": 12, "head_dim": 64}, "tp=3", "tp 3 does not divide the 512 channels of the"),
        (
            {**LFM2, "num_attention_heads": 1024, "head_dim": 64},
            "tp=1024",
            "tp 1024 does not divide the 512 channels of the state",
        ),
        (NEMOTRON_H, "pp_layers=2+2", "pp 2: none of the layers 2-3 of stage 1 has a cache"),
    ],
)
def test_what_vllm_would_not_serve_is_named(config: dict[str, Any], text: str, words: str) -> None:
    with pytest.raises(Problem) as problem:
        make(config, text)
    assert str(problem.value).startswith("--consumer: ")
    assert words in str(problem.value)
