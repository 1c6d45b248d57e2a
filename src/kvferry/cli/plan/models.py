"""What a model keeps in its cache, from its Hugging Face config.json alone: neither transformers nor vLLM is imported.

Only families whose rules are written down here are understood, since a guess would plan another cache than the one that
vLLM makes. Where config.json leaves a key out, the default is the one that transformers gives that family.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvferry.cli.errors import Problem
from kvferry.cli.plan import keys, words
from kvferry.cli.plan.files import read_json
from kvferry.cli.plan.keys import Config
from kvferry.protocol.messages import shorten


class Attention(NamedTuple):
    """Keys and values by head; or one latent for every token (value_size 0), the same on every TP rank.

    window: how many tokens back the layer looks, None for all.
    """

    num_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    @property
    def is_latent(self) -> bool:
        return self.value_size == 0


class Recurrent(NamedTuple):
    """A state of fixed size: a convolution's window over heads * head_size + 2 * groups * state_size channels; then
    what the recurrence carries on, [heads, head_size, state_size] (nothing in a short convolution).

    kind: vLLM's name of it. groups: of B and C in mamba2; the key heads in GDN. steps: of the window.
    state_dtype: of what is carried on, None for the cache's own.
    """

    kind: str
    heads: int
    head_size: int
    groups: int
    state_size: int
    steps: int
    state_dtype: str | None = None


Cache = Attention | Recurrent


class CachedLayer(NamedTuple):
    """One cache of one decoder layer, which pipeline stages are cut by. name: as vLLM names it."""

    name: str
    decoder_layer: int
    cache: Cache


class Model(NamedTuple):
    """A model's caches, in vLLM's order. kind: the family in words. dtype: the weights', by torch's name.

    num_layers: decoder layers, with or without a cache. query_heads: 0 where there is no attention, or config.json does
    not say. config: what the file holds.
    """

    title: str
    model_type: str
    kind: str
    num_layers: int
    dtype: str
    layers: tuple[CachedLayer, ...]
    query_heads: int = 0
    config: Config = MappingProxyType({})

    @property
    def caches(self) -> tuple[Cache, ...]:
        return tuple(layer.cache for layer in self.layers)


def read(path: Path) -> Model:
    """The model of a config.json, or of a directory with one. Raises Problem, which names the key or the family."""
    file = path / "config.json" if os.path.isdir(path) else path  # Path.is_dir raises for what can't be a path
    config, where = read_json(file), words.brief(str(file))
    if not isinstance(config, dict):
        raise Problem(f"{where} is not a model's configuration: it holds no object")
    try:
        return parse(config, shorten(_title(config, file)))
    except Problem as problem:
        raise Problem(f"{where}: {problem.message}", problem.advice) from None


def _title(config: Config, file: Path) -> str:
    name = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    if name:
        return name
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def parse(config: Config, title: str) -> Model:
    """The model of a configuration. Raises Problem for a family that is not understood, or a key that is not there."""
    outer, model_type = config, str(config.get("model_type"))
    prefix = "model.layers"
    if model_type in MULTIMODAL:
        if not isinstance(config.get("text_config"), dict):
            raise Problem(f"model_type {model_type}: text_config {words.value(config.get('text_config'))} is no object")
        config, prefix = config["text_config"], "language_model.model.layers"
        model_type = str(config.get("model_type") or MULTIMODAL[model_type])
    if model_type in REFUSED:
        raise Problem(f"model_type {model_type}: {REFUSED[model_type]}")
    if model_type not in FAMILIES:
        raise Problem(f"model_type {words.brief(model_type)} is not understood", f"Understood are: {understood()}.")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    caches = list(family.caches(config))
    if not any(caches):
        raise Problem("none of its layers has a cache")
    layers = tuple(
        CachedLayer(f"{prefix}.{index}.{_suffix(model_type, cache)}", index, cache)
        for index, of_layer in enumerate(caches)
        for cache in of_layer
    )
    return Model(
        title, model_type, family.kind, len(caches), _dtype(config, outer), layers, _query_heads(config, layers), outer
    )


def understood() -> str:
    """The families that are understood, for a person."""
    kinds: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        kinds.setdefault(family.kind, []).append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def _suffix(model_type: str, cache: Cache) -> str:
    if isinstance(cache, Recurrent):
        return {"GDN_ATTN": "linear_attn", "SHORT_CONV": "short_conv"}.get(cache.kind, "mixer")
    return {"gpt_oss": "attn.attn", "nemotron_h": "mixer.attn", "falcon": "self_attention.attn"}.get(
        model_type, "self_attn.attn"
    )


def _query_heads(config: Config, layers: Sequence[CachedLayer]) -> int:
    """What vLLM wants to divide by the TP size."""
    has_attention = any(isinstance(layer.cache, Attention) for layer in layers)
    if not has_attention or config.get("num_attention_heads") is None:
        return 0
    return keys.heads(config, "num_attention_heads")


def _dtype(config: Config, outer: Config) -> str:
    """vLLM serves weights of float32 in bfloat16 unless told otherwise."""
    for one in (outer, config):
        named = one.get("dtype") or one.get("torch_dtype")
        if named:
            name = str(named).removeprefix("torch.")
            return "bfloat16" if name == "float32" else name
    return "bfloat16"


def _heads(config: Config) -> Attention:
    """Grouped, multi-head or multi-query attention, without a window."""
    size = keys.number(config, "head_dim") if config.get("head_dim") else keys.head_size(config)
    kv_heads = keys.heads(config, "num_key_value_heads", "num_attention_heads")
    return Attention(kv_heads, size, size)


def _windowed(config: Config, is_sliding: Callable[[int], bool]) -> Iterator[list[Cache]]:
    attention = _heads(config)
    for index in keys.layers(config):
        window = keys.number(config, "sliding_window", most=keys.MOST_WINDOW) if is_sliding(index) else None
        yield [attention._replace(window=window)]


def _dense(config: Config) -> Iterator[list[Cache]]:
    """A window, if there is one, holds for the layers that layer_types names, else for all."""
    types = keys.layer_types(config)
    has_window = bool(config.get("sliding_window"))
    return _windowed(config, lambda index: types[index] == "sliding_attention" if types else has_window)


def _qwen(config: Config) -> Iterator[list[Cache]]:
    if keys.flag(config, "use_sliding_window"):
        raise Problem("use_sliding_window: Qwen's windows are not understood")
    return _windowed(config, lambda index: False)


def _alternating(config: Config) -> Iterator[list[Cache]]:
    """Gemma 2 and gpt-oss: every other layer has a window, beginning with the first."""
    return _windowed(config, lambda index: index % 2 == 0)


def _gemma3(config: Config) -> Iterator[list[Cache]]:
    pattern = keys.number({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
    types = keys.layer_types(config)
    return _windowed(
        config, lambda index: types[index] == "sliding_attention" if types else bool((index + 1) % pattern)
    )


def _falcon(config: Config) -> Iterator[list[Cache]]:
    size = keys.head_size(config)
    if keys.flag(config, "new_decoder_architecture"):
        kv_heads = keys.heads(config, "num_kv_heads", "num_attention_heads")
    else:
        kv_heads = 1 if keys.flag(config, "multi_query") else keys.heads(config, "num_attention_heads")
    for _ in keys.layers(config):
        yield [Attention(kv_heads, size, size)]


def _latent(config: Config) -> Iterator[list[Cache]]:
    size = keys.number(config, "kv_lora_rank") + keys.number(config, "qk_rope_head_dim")
    for _ in keys.layers(config):
        yield [Attention(1, size, 0)]


def _mamba2(
    config: Config, heads: str, head_size: str, groups: str, state_size: str, kernel: str, dtype: str | None = None
) -> Recurrent:
    """A state whose sizes are under these keys."""
    return Recurrent(
        "MAMBA2",
        keys.heads(config, heads),
        keys.number(config, head_size),
        groups=keys.heads(config, groups),
        state_size=keys.number(config, state_size),
        steps=keys.steps(config, kernel),
        state_dtype=dtype,
    )


def _mamba2_within(config: Config, inner_size: int) -> Recurrent:
    """Falcon-H1 and Granite, whose heads must make up an inner size."""
    state = _mamba2(config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    size = state.heads * state.head_size
    if size != inner_size:
        raise Problem(f"mamba_n_heads * mamba_d_head is {size}, the inner size is {inner_size}")
    return state


def _expanded(config: Config) -> int:
    """The inner size of a state where it is given as a multiple of the hidden size."""
    factor = config["mamba_expand"]
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= keys.MOST_SIZE:
        raise Problem(f"mamba_expand {words.value(factor)} is not a positive number, at most {keys.MOST_SIZE:,}")
    return math.floor(factor * keys.width(config, "hidden_size"))


def _falcon_h1(config: Config) -> Iterator[list[Cache]]:
    given = config.get("mamba_d_ssm") is not None
    inner = keys.width(config, "mamba_d_ssm") if given else _expanded(config)
    state = _mamba2_within(config, inner)
    for _ in keys.layers(config):
        yield [_heads(config), state]


def _granite_hybrid(config: Config) -> Iterator[list[Cache]]:
    state = _mamba2_within(config, _expanded(config))
    types = keys.layer_types(config, ("layer_types", "layers_block_type")) or ["mamba"] * len(keys.layers(config))
    by_type: dict[str, Cache] = {"mamba": state, "linear_attention": state}
    by_type |= dict.fromkeys(("attention", "full_attention"), _heads(config))
    return _by_type(types, by_type)


def _nemotron_h(config: Config) -> Iterator[list[Cache]]:
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    state = _mamba2(config, *names, dtype=keys.state_dtype(config, "mamba_ssm_cache_dtype"))
    pattern = config.get("hybrid_override_pattern")
    letters = list(pattern) if isinstance(pattern, str) else None
    types = keys.layer_types(
        {**config, "hybrid_override_pattern": letters}, ("hybrid_override_pattern", "layers_block_type", "layer_types")
    )
    if not types:
        raise Problem("has no hybrid_override_pattern or layers_block_type")
    by_type: dict[str, Cache | None] = dict.fromkeys(("M", "mamba", "linear_attention"), state)
    by_type |= dict.fromkeys(("*", "attention", "full_attention"), _heads(config))
    by_type |= dict.fromkeys(("-", "E", "mlp", "moe"))
    return _by_type(types, by_type)


def _qwen3_5(config: Config) -> Iterator[list[Cache]]:
    """vLLM reads the dtype of the states here, and not in Qwen3-Next."""
    given = config.get("mamba_ssm_dtype") is not None
    return _gdn(config, keys.state_dtype(config, "mamba_ssm_dtype") if given else None)


def _gdn(config: Config, state_dtype: str | None = None) -> Iterator[list[Cache]]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention in every fourth layer."""
    state = Recurrent(
        "GDN_ATTN",
        keys.heads(config, "linear_num_value_heads"),
        keys.number(config, "linear_value_head_dim"),
        groups=keys.heads(config, "linear_num_key_heads"),
        state_size=keys.number(config, "linear_key_head_dim"),
        steps=keys.steps(config, "linear_conv_kernel_dim"),
        state_dtype=state_dtype,
    )
    every = keys.number({"full_attention_interval": 4, **config}, "full_attention_interval")
    types = keys.layer_types(config) or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in keys.layers(config)
    ]
    return _by_type(types, {"linear_attention": state, "full_attention": _heads(config)})


def _pure_mamba2(config: Config) -> Iterator[list[Cache]]:
    state = _mamba2(config, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    for _ in keys.layers(config):
        yield [state]


def _lfm2(config: Config) -> Iterator[list[Cache]]:
    channels = keys.width(config, "conv_dim", "hidden_size")
    state = Recurrent("SHORT_CONV", 1, channels, groups=0, state_size=0, steps=keys.steps(config, "conv_L_cache"))
    types = keys.layer_types(config)
    if types is None:
        raise Problem("has no layer_types")
    return _by_type(types, {"conv": state, "full_attention": _heads(config)})


def _by_type(types: Sequence[str], by_type: Mapping[str, Cache | None]) -> Iterator[list[Cache]]:
    for index, one in enumerate(types):
        if one not in by_type:
            raise Problem(f"layer {index} is a {words.value(one)}, which is none of {', '.join(by_type)}")
        cache = by_type[one]
        yield [] if cache is None else [cache]


class Family(NamedTuple):
    """kind: in words. caches: those of each decoder layer. defaults: transformers' for keys that may be left out."""

    kind: str
    caches: Callable[[Config], Iterator[list[Cache]]]
    defaults: Config = MappingProxyType({})


DENSE, WINDOWS, LATENT = "dense attention", "sliding windows", "latent attention (MLA)"
STATES, RECURRENT = "attention and recurrent states", "recurrent states"

FAMILIES: dict[str, Family] = {
    "llama": Family(DENSE, _dense),
    "granite": Family(DENSE, _dense),
    "phi3": Family(DENSE, _dense),
    "mixtral": Family(DENSE, _dense, {"num_key_value_heads": 8}),
    "gemma": Family(DENSE, _dense, {"head_dim": 256}),
    "qwen2": Family(DENSE, _qwen),
    "qwen2_moe": Family(DENSE, _qwen),
    "qwen3": Family(DENSE, _qwen, {"head_dim": 128}),
    "qwen3_moe": Family(DENSE, _qwen, {"num_key_value_heads": 4}),
    "falcon": Family(DENSE, _falcon, {"multi_query": True}),
    "mistral": Family(WINDOWS, _dense, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "gemma2": Family(WINDOWS, _alternating, {"head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": Family(
        WINDOWS,
        _gemma3,
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    ),
    "gpt_oss": Family(WINDOWS, _alternating, {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}),
    "deepseek_v2": Family(LATENT, _latent, {"num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "deepseek_v3": Family(LATENT, _latent, {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "kimi_k2": Family(LATENT, _latent, {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "falcon_h1": Family(STATES, _falcon_h1, {"mamba_expand": 2}),
    "granitemoehybrid": Family(STATES, _granite_hybrid, {"mamba_expand": 2}),
    "nemotron_h": Family(STATES, _nemotron_h, {"mamba_ssm_cache_dtype": "float32"}),
    "qwen3_next": Family(STATES, _gdn, {"head_dim": 256}),
    "qwen3_5_text": Family(STATES, _qwen3_5, {"head_dim": 256}),
    "lfm2": Family(STATES, _lfm2),
    "mamba2": Family(RECURRENT, _pure_mamba2),
}

MULTIMODAL = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
"""Models with a text_config, and its model_type where it does not name one."""

REFUSED = {
    "deepseek_v32": "its indexer keeps a second cache that is not understood",
    "deepseek_v4": "its compressed caches are not understood",
    "gemma3n": "its layers share caches, which is not understood",
    "gemma4": "its layers differ in head size, which is not understood",
    "jamba": "mamba1 states are not understood",
    "mamba": "mamba1 states are not understood",
}
"""Families that are known to differ from those above, and in what."""
