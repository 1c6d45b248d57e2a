"""Tiny configurations, one for each family of models that vLLM runs on a CPU.

Small enough to start in seconds; with head sizes, window sizes and state shapes that vLLM's CPU kernels take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BYTE_TOKENS = 256
"""Tokens of the byte-level tokenizer, beside <bos> and <eos>."""

_VOCABULARY = {
    "vocab_size": BYTE_TOKENS + 2,
    "bos_token_id": BYTE_TOKENS,
    "eos_token_id": BYTE_TOKENS + 1,
    "pad_token_id": BYTE_TOKENS + 1,
}
_POSITIONS = {"max_position_embeddings": 4096}
_HEADS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_WIDE_HEADS = {**{key: value for key, value in _HEADS.items() if key != "head_dim"}, "hidden_size": 256}
_LATENT = {
    **{key: value for key, value in _HEADS.items() if key != "head_dim"},
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {
    "mamba_n_groups": 1,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}


class TinyModel(NamedTuple):
    """config_class: of transformers. settings: its arguments, beside those that all have."""

    config_class: str
    settings: dict[str, Any]


TINY_MODELS = {
    "llama": TinyModel("LlamaConfig", {**_HEADS, "num_hidden_layers": 4}),
    "llama-deep": TinyModel("LlamaConfig", {**_HEADS, "num_hidden_layers": 32}),
    "gemma2": TinyModel(
        "Gemma2Config", {**_HEADS, "num_hidden_layers": 4, "sliding_window": 64, "query_pre_attn_scalar": 32}
    ),
    "gemma3": TinyModel(
        "Gemma3TextConfig",
        {
            **_HEADS,
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mistral": TinyModel("MistralConfig", {**_HEADS, "num_hidden_layers": 4, "sliding_window": 64}),
    "gptoss": TinyModel(
        "GptOssConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseekv2": TinyModel("DeepseekV2Config", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseekv3": TinyModel(
        "DeepseekV3Config", {**_LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    ),
    "qwen3next": TinyModel(
        "Qwen3NextConfig",
        {
            **_HEADS,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "falconh1": TinyModel(
        "FalconH1Config", {**_HEADS, **_MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 128, "mamba_n_heads": 4}
    ),
    "granite4": TinyModel(
        "GraniteMoeHybridConfig",
        {
            **_WIDE_HEADS,
            **_MAMBA,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_n_heads": 16,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
        },
    ),
    "nemotronh": TinyModel(
        "NemotronHConfig",
        {
            **_HEADS,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
}


def tiny_config(kind: str) -> Any:
    """The transformers configuration of a tiny model of `kind`; ValueError for a kind that is not known."""
    import transformers

    if kind not in TINY_MODELS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(TINY_MODELS)}")
    config_class, settings = TINY_MODELS[kind]
    return getattr(transformers, config_class)(**_VOCABULARY, **_POSITIONS, **settings)
