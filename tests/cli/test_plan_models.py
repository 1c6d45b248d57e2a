"""config.json to caches: which families are understood, and which are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plan_models
import pytest

from kvferry.cli.errors import Problem
from kvferry.cli.plan.models import FAMILIES, REFUSED, Attention, Model, Recurrent, parse, read, understood

NEMOTRON_H = {
    "model_type": "nemotron_h",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
QWEN3_5 = {**plan_models.QWEN3_NEXT, "model_type": "qwen3_5_text"}


def windows(model: Model) -> list[int | None]:
    return [cache.window for cache in model.caches if isinstance(cache, Attention)]


def test_grouped_query_attention() -> None:
    model = parse(plan_models.LLAMA, "x")
    assert (model.num_layers, model.dtype) == (32, "bfloat16")
    assert set(model.caches) == {Attention(num_heads=8, key_size=128, value_size=128)}
    assert model.layers[31].name == "model.layers.31.self_attn.attn"


@pytest.mark.parametrize(
    ("changes", "heads", "size"),
    [
        ({"num_key_value_heads": None}, 32, 128),
        ({"num_key_value_heads": 1}, 1, 128),
        ({"head_dim": 64}, 8, 64),
        ({"head_dim": None}, 8, 128),
        ({"model_type": "falcon"}, 1, 128),
        ({"model_type": "falcon", "multi_query": False}, 32, 128),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4}, 4, 128),
    ],
)
def test_heads(changes: dict[str, Any], heads: int, size: int) -> None:
    assert parse({**plan_models.LLAMA, **changes}, "x").caches[0] == Attention(heads, size, size)


def test_a_latent_has_no_heads_and_no_values() -> None:
    caches = parse(plan_models.DEEPSEEK, "x").caches
    assert set(caches) == {Attention(1, 576, 0)}
    assert caches[0].is_latent
    assert len(caches) == 61


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": None}, [None] * 6),
        ({"model_type": "mistral", "sliding_window": 100}, [100] * 6),
        ({"model_type": "mistral"}, [4096] * 6),  # transformers' default where the key is missing
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 6),
        ({"model_type": "gemma2"}, [4096, None] * 3),
        ({"model_type": "gpt_oss", "sliding_window": 128}, [128, None] * 3),
        ({"model_type": "gemma3_text", "sliding_window": 512}, [512] * 5 + [None]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3}, [512, 512, None] * 2),
        (
            {"model_type": "llama", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [8, None] * 3,
        ),
        ({"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}, [None] * 6),
    ],
)
def test_windows(config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(parse({**plan_models.LLAMA, "num_hidden_layers": 6, **config}, "x")) == expected


def test_the_text_of_a_multimodal_model() -> None:
    model = parse(plan_models.GEMMA3, "x")
    assert (model.model_type, model.dtype) == ("gemma3_text", "bfloat16")
    assert model.layers[0].name == "language_model.model.layers.0.self_attn.attn"
    assert [index for index, window in enumerate(windows(model)) if window is None] == list(range(5, 62, 6))


def test_keys_that_gemma_3_leaves_to_transformers() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    assert parse({"model_type": "gemma3", "text_config": text}, "x").caches[0] == Attention(4, 256, 256, 1024)


def test_states() -> None:
    caches = parse(plan_models.QWEN3_NEXT, "x").caches
    state = Recurrent("GDN_ATTN", heads=32, head_size=128, groups=16, state_size=128, steps=3)
    assert caches[:4] == (state, state, state, Attention(2, 256, 256))
    assert parse(plan_models.MAMBA2, "x").caches[0] == Recurrent("MAMBA2", 8, 32, 2, 32, 3)


def test_a_layer_may_have_attention_and_a_state() -> None:
    model = parse(plan_models.FALCON_H1, "x")
    assert [(layer.decoder_layer, type(layer.cache).__name__) for layer in model.layers[:3]] == [
        (0, "Attention"),
        (0, "Recurrent"),
        (1, "Attention"),
    ]


@pytest.mark.parametrize("pattern", ["M-*E", None])
def test_layers_without_a_cache(pattern: str | None) -> None:
    types = (
        {"hybrid_override_pattern": pattern} if pattern else {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    )
    model = parse({**NEMOTRON_H, **types}, "x")
    assert model.num_layers == 4
    assert [(layer.decoder_layer, layer.cache) for layer in model.layers] == [
        (0, Recurrent("MAMBA2", 4, 8, 2, 16, 3, state_dtype="float32")),
        (2, Attention(2, 64, 64)),
    ]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_dtype_that_vllm_would_choose(config: dict[str, str], dtype: str) -> None:
    base = {key: value for key, value in plan_models.LLAMA.items() if key != "torch_dtype"}
    assert parse({**base, **config}, "x").dtype == dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [  # vLLM reads the key in these families only
        ({**NEMOTRON_H, "hybrid_override_pattern": "M"}, "float32"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M", "mamba_ssm_cache_dtype": "auto"}, None),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M", "mamba_ssm_cache_dtype": "float16"}, "float16"),
        (QWEN3_5, None),
        ({**QWEN3_5, "mamba_ssm_dtype": "auto"}, None),
        ({**QWEN3_5, "mamba_ssm_dtype": "float32"}, "float32"),
        ({**plan_models.QWEN3_NEXT, "mamba_ssm_dtype": "float32"}, None),
    ],
)
def test_the_dtype_of_a_state(config: dict[str, Any], dtype: str | None) -> None:
    (state,) = {cache for cache in parse(config, "x").caches if isinstance(cache, Recurrent)}
    assert state.state_dtype == dtype


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_known_differences_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(Problem, match=f"model_type {model_type}: .*not understood"):
        parse({**plan_models.LLAMA, "model_type": model_type}, "x")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "bert"}, "model_type bert is not understood"),
        ({"model_type": None}, "model_type None is not understood"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size '4096' is not a number from 1 to 1,048,576"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 is not a number from 1 to 4,096"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, num_hidden_layers is 32"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "use_sliding_window": "no"}, "use_sliding_window 'no' is neither true nor false"),
        ({"model_type": "\x1b[31m\n"}, "model_type \\x1b[31m\\n is not understood"),
        ({"model_type": "gemma3"}, "model_type gemma3: text_config None is no object"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers 1048576 is not a number from 1 to 512"),
        ({"num_hidden_layers": True}, "num_hidden_layers True is not a number"),
        ({"num_attention_heads": 10**6}, "num_attention_heads 1000000 is not a number from 1 to 4,096"),
        ({"hidden_size": 4}, "hidden_size 4 over num_attention_heads 32: no head size from 1 to 65,536"),
        ({"head_dim": 1 << 40}, "head_dim 1099511627776 is not a number from 1 to 65,536"),
        ({"layer_types": ["full_attention"] * 513}, "layer_types ['full_attention', 'full_attention', "),
        ({**plan_models.DEEPSEEK, "kv_lora_rank": 1 << 40}, "kv_lora_rank 1099511627776 is not a number from 1 to"),
        ({**plan_models.MAMBA2, "num_heads": 1 << 40}, "num_heads 1099511627776 is not a number from 1 to 4,096"),
        ({**plan_models.MAMBA2, "n_groups": 1 << 40}, "n_groups 1099511627776 is not a number from 1 to 4,096"),
        ({**plan_models.MAMBA2, "conv_kernel": 1}, "conv_kernel 1 is not a number from 2 to"),
        ({**plan_models.FALCON_H1, "mamba_d_ssm": None, "mamba_expand": "2"}, "mamba_expand '2' is not a positive"),
        ({**plan_models.FALCON_H1, "mamba_d_ssm": None, "mamba_expand": float("nan")}, "mamba_expand nan is not a"),
        ({**plan_models.FALCON_H1, "mamba_d_ssm": "128"}, "mamba_d_ssm '128' is not a number"),
        ({**plan_models.FALCON_H1, "mamba_d_ssm": 64}, "mamba_n_heads * mamba_d_head is 128, the inner size is 64"),
        ({**QWEN3_5, "mamba_ssm_dtype": "float99"}, "mamba_ssm_dtype 'float99' is none of auto, bfloat16, float16"),
        ({**QWEN3_5, "mamba_ssm_dtype": ["float32"]}, "mamba_ssm_dtype ['float32'] is none of auto"),
        ({**NEMOTRON_H, "mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype 'fp8' is none of auto"),
        ({**NEMOTRON_H, "num_hidden_layers": 4, "hybrid_override_pattern": "M" * 5}, "hybrid_override_pattern lists 5"),
        ({**NEMOTRON_H, "num_hidden_layers": 4, "hybrid_override_pattern": "-" * 4}, "none of its layers has a cache"),
        ({"model_type": "lfm2", "conv_dim": 8, "conv_L_cache": 3, "layer_types": ["odd"] * 32}, "layer 0 is a 'odd'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(Problem) as problem:
        list(parse({**plan_models.LLAMA, **changes}, "x").layers)
    assert text in str(problem.value)


def test_every_family_is_listed_for_a_person() -> None:
    text = understood()
    assert all(name in text for name in FAMILIES)


def test_files(tmp_path: Path) -> None:
    directory = plan_models.write(tmp_path / "some-model", plan_models.LLAMA)
    assert read(directory).title == "some-model"
    assert read(directory / "config.json").title == "some-model"
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**plan_models.LLAMA, "_name_or_path": "org/name"}))
    assert read(other).title == "name"
    for content, text in (
        ("[1]", "it holds no object"),
        ("{", "is not JSON"),
        ('{"model_type": "bert"}', "other.json: model_type bert"),
    ):
        other.write_text(content)
        with pytest.raises(Problem) as problem:
            read(other)
        assert text in str(problem.value)
    with pytest.raises(Problem, match="can't be read: No such file"):
        read(tmp_path / "missing.json")
