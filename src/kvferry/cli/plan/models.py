"""What a model keeps in its cache, from its Hugging Face config.json alone: neither transformers nor vLLM is imported.

Only families whose rules are written down here are understood, since a guess would plan another cache than the one that
vLLM makes. Where config.json leaves a key out, the default is the one that transformers gives that family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvferry.cli.errors import Problem


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

    num_layers: decoder layers, with or without a cache.
    """

    title: str
    model_type: str
    kind: str
    num_layers: int
    dtype: str
    layers: tuple[CachedLayer, ...]

    @property
    def caches(self) -> tuple[Cache, ...]:
        return tuple(layer.cache for layer in self.layers)


Config = Mapping[str, Any]


def read(path: Path) -> Model:
    """The model of a config.json, or of a directory with one. Raises Problem, which names the key or the family."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise Problem(f"{file} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Problem(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Problem(f"{file} is not a model's configuration: it holds no object")
    try:
        return parse(config, _title(config, file))
    except Problem as problem:
        raise Problem(f"{file}: {problem.message}", problem.advice) from None


def _title(config: Config, file: Path) -> str:
    name = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    if name:
        return name
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def parse(config: Config, title: str) -> Model:
    """The model of a configuration. Raises Problem for a family that is not understood, or a key that is not there."""
    outer, model_type = config, str(config.get("model_type"))
    prefix = "model.layers"
    if model_type in MULTIMODAL and isinstance(config.get("text_config"), dict):
        config, prefix = config["text_config"], "language_model.model.layers"
        model_type = str(config.get("model_type") or MULTIMODAL[model_type])
    if model_type in REFUSED:
        raise Problem(f"model_type {model_type}: {REFUSED[model_type]}")
    if model_type not in FAMILIES:
        raise Problem(f"model_type {model_type} is not understood", f"Understood are: {understood()}.")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    caches = list(family.caches(config))
    layers = tuple(
        CachedLayer(f"{prefix}.{index}.{_suffix(model_type, cache)}", index, cache)
        for index, of_layer in enumerate(caches)
        for cache in of_layer
    )
    return Model(title, model_type, family.kind, len(caches), _dtype(config, outer), layers)


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


def _dtype(config: Config, outer: Config) -> str:
    """vLLM serves weights of float32 in bfloat16 unless told otherwise."""
    for one in (outer, config):
        named = one.get("dtype") or one.get("torch_dtype")
        if named:
            name = str(named).removeprefix("torch.")
            return "bfloat16" if name == "float32" else name
    return "bfloat16"


def _int(config: Config, *names: str) -> int:
    """The first of the keys that is there. Raises Problem unless it is a positive number."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise Problem(f"{name} {value!r} is not a positive number")
            return value
    raise Problem(f"has no {' or '.join(names)}")


def _heads(config: Config) -> Attention:
    """Grouped, multi-head or multi-query attention, without a window."""
    heads = _int(config, "num_attention_heads")
    size = _int(config, "head_dim") if config.get("head_dim") else _int(config, "hidden_size") // heads
    kv_heads = _int(config, "num_key_value_heads", "num_attention_heads")
    return Attention(kv_heads, size, size)


def _layers(config: Config) -> range:
    return range(_int(config, "num_hidden_layers"))


def _types(config: Config, names: Sequence[str] = ("layer_types",)) -> list[str] | None:
    """The kind of each layer where the configuration lists them. Raises Problem if there are not as many as layers."""
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if found is None:
        return None
    if not isinstance(found, list) or ("num_hidden_layers" in config and len(found) != len(_layers(config))):
        raise Problem(f"{names[0]} does not list {config.get('num_hidden_layers')} layers")
    return [str(one) for one in found]


def _windowed(config: Config, is_sliding: Callable[[int], bool]) -> Iterator[list[Cache]]:
    attention = _heads(config)
    for index in _layers(config):
        window = _int(config, "sliding_window") if is_sliding(index) else None
        yield [attention._replace(window=window)]


def _dense(config: Config) -> Iterator[list[Cache]]:
    """A window, if there is one, holds for the layers that layer_types names, else for all."""
    types = _types(config)
    has_window = bool(config.get("sliding_window"))
    return _windowed(config, lambda index: types[index] == "sliding_attention" if types else has_window)


def _qwen(config: Config) -> Iterator[list[Cache]]:
    if config.get("use_sliding_window"):
        raise Problem("use_sliding_window: Qwen's windows are not understood")
    return _windowed(config, lambda index: False)


def _alternating(config: Config) -> Iterator[list[Cache]]:
    """Gemma 2 and gpt-oss: every other layer has a window, beginning with the first."""
    return _windowed(config, lambda index: index % 2 == 0)


def _gemma3(config: Config) -> Iterator[list[Cache]]:
    types, pattern = _types(config), _int({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
    return _windowed(
        config, lambda index: types[index] == "sliding_attention" if types else bool((index + 1) % pattern)
    )


def _falcon(config: Config) -> Iterator[list[Cache]]:
    heads = _int(config, "num_attention_heads")
    size = _int(config, "hidden_size") // heads
    if config.get("new_decoder_architecture"):
        kv_heads = _int(config, "num_kv_heads", "num_attention_heads")
    else:
        kv_heads = 1 if config["multi_query"] else heads
    for _ in _layers(config):
        yield [Attention(kv_heads, size, size)]


def _latent(config: Config) -> Iterator[list[Cache]]:
    size = _int(config, "kv_lora_rank") + _int(config, "qk_rope_head_dim")
    for _ in _layers(config):
        yield [Attention(1, size, 0)]


def _mamba2(config: Config, prefix: str, inner_size: int) -> Recurrent:
    """Falcon-H1 and Granite: the same names behind `mamba_`."""
    heads, head_size = _int(config, f"{prefix}n_heads"), _int(config, f"{prefix}d_head")
    if heads * head_size != inner_size:
        raise Problem(f"{prefix}n_heads * {prefix}d_head is {heads * head_size}, the inner size is {inner_size}")
    return Recurrent(
        "MAMBA2",
        heads,
        head_size,
        groups=_int(config, f"{prefix}n_groups"),
        state_size=_int(config, f"{prefix}d_state"),
        steps=_int(config, f"{prefix}d_conv") - 1,
    )


def _falcon_h1(config: Config) -> Iterator[list[Cache]]:
    inner = config.get("mamba_d_ssm") or int(config["mamba_expand"] * _int(config, "hidden_size"))
    state = _mamba2(config, "mamba_", inner)
    for _ in _layers(config):
        yield [_heads(config), state]


def _granite_hybrid(config: Config) -> Iterator[list[Cache]]:
    state = _mamba2(config, "mamba_", int(config["mamba_expand"] * _int(config, "hidden_size")))
    types = _types(config, ("layer_types", "layers_block_type")) or ["mamba"] * len(_layers(config))
    by_type: dict[str, Cache] = {"mamba": state, "linear_attention": state}
    by_type |= dict.fromkeys(("attention", "full_attention"), _heads(config))
    return _by_type(types, by_type)


def _nemotron_h(config: Config) -> Iterator[list[Cache]]:
    state = Recurrent(
        "MAMBA2",
        _int(config, "mamba_num_heads"),
        _int(config, "mamba_head_dim"),
        groups=_int(config, "n_groups"),
        state_size=_int(config, "ssm_state_size"),
        steps=_int(config, "conv_kernel") - 1,
        state_dtype=str(config["mamba_ssm_cache_dtype"]),
    )
    pattern = config.get("hybrid_override_pattern")
    types = list(pattern) if isinstance(pattern, str) else _types(config, ("layers_block_type", "layer_types"))
    if not types:
        raise Problem("has no hybrid_override_pattern or layers_block_type")
    by_type: dict[str, Cache | None] = dict.fromkeys(("M", "mamba", "linear_attention"), state)
    by_type |= dict.fromkeys(("*", "attention", "full_attention"), _heads(config))
    by_type |= dict.fromkeys(("-", "E", "mlp", "moe"))
    return _by_type(types, by_type)


def _gdn(config: Config) -> Iterator[list[Cache]]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention in every fourth layer."""
    state = Recurrent(
        "GDN_ATTN",
        _int(config, "linear_num_value_heads"),
        _int(config, "linear_value_head_dim"),
        groups=_int(config, "linear_num_key_heads"),
        state_size=_int(config, "linear_key_head_dim"),
        steps=_int(config, "linear_conv_kernel_dim") - 1,
        state_dtype=config.get("mamba_ssm_dtype"),
    )
    every = _int({"full_attention_interval": 4, **config}, "full_attention_interval")
    types = _types(config) or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in _layers(config)
    ]
    return _by_type(types, {"linear_attention": state, "full_attention": _heads(config)})


def _pure_mamba2(config: Config) -> Iterator[list[Cache]]:
    heads, head_size = _int(config, "num_heads"), _int(config, "head_dim")
    groups, size, kernel = _int(config, "n_groups"), _int(config, "state_size"), _int(config, "conv_kernel")
    for _ in _layers(config):
        yield [Recurrent("MAMBA2", heads, head_size, groups, size, kernel - 1)]


def _lfm2(config: Config) -> Iterator[list[Cache]]:
    channels = _int(config, "conv_dim", "hidden_size")
    state = Recurrent("SHORT_CONV", 1, channels, groups=0, state_size=0, steps=_int(config, "conv_L_cache") - 1)
    types = _types(config)
    if types is None:
        raise Problem("has no layer_types")
    return _by_type(types, {"conv": state, "full_attention": _heads(config)})


def _by_type(types: Sequence[str], by_type: Mapping[str, Cache | None]) -> Iterator[list[Cache]]:
    for index, one in enumerate(types):
        if one not in by_type:
            raise Problem(f"layer {index} is a {one!r}, which is none of {', '.join(by_type)}")
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
    "deepseek_v2": Family(LATENT, _latent, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "deepseek_v3": Family(LATENT, _latent, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "kimi_k2": Family(LATENT, _latent, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "falcon_h1": Family(STATES, _falcon_h1, {"mamba_expand": 2}),
    "granitemoehybrid": Family(STATES, _granite_hybrid, {"mamba_expand": 2}),
    "nemotron_h": Family(STATES, _nemotron_h, {"mamba_ssm_cache_dtype": "float32"}),
    "qwen3_next": Family(STATES, _gdn, {"head_dim": 256}),
    "qwen3_5_text": Family(STATES, _gdn, {"head_dim": 256}),
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
