"""What a config.json says under its keys. All here raise Problem, which names key, value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.cli.errors import Problem
from kvferry.cli.plan import words

Config = Mapping[str, Any]

# Above anything that is served, and low enough that what is made of it stays small.
MOST_LAYERS = 512
MOST_HEADS = 4096
MOST_SIZE = 1 << 16
"""Elements of a head, a latent, or a state's axis."""
MOST_WIDTH = 1 << 20
MOST_WINDOW = 1 << 40

STATE_DTYPES = ("bfloat16", "float16", "float32")
"""Of what is not quantised."""


def number(config: Config, *names: str, least: int = 1, most: int = MOST_SIZE) -> int:
    """The first of the keys that is there. Raises Problem unless it is a number from `least` to `most`."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise Problem(f"{name} {words.value(value)} is not a number from {least:,} to {most:,}")
            return value
    raise Problem(f"has no {' or '.join(names)}")


def heads(config: Config, *names: str) -> int:
    """Heads, or groups of them."""
    return number(config, *names, most=MOST_HEADS)


def width(config: Config, *names: str) -> int:
    """Elements of all heads."""
    return number(config, *names, most=MOST_WIDTH)


def flag(config: Config, name: str) -> bool:
    """Whether the key is there and true. Raises Problem unless it is true or false."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise Problem(f"{name} {words.value(value)} is neither true nor false")
    return bool(value)


def head_size(config: Config) -> int:
    """What each attention head has of the hidden size."""
    hidden, count = width(config, "hidden_size"), heads(config, "num_attention_heads")
    if not 1 <= hidden // count <= MOST_SIZE:
        raise Problem(f"hidden_size {hidden} over num_attention_heads {count}: no head size from 1 to {MOST_SIZE:,}")
    return hidden // count


def steps(config: Config, name: str) -> int:
    """Of a convolution's window: all that its kernel looks at, but for the newest."""
    return number(config, name, least=2) - 1


def layers(config: Config) -> range:
    return range(number(config, "num_hidden_layers", most=MOST_LAYERS))


def layer_types(config: Config, names: Sequence[str] = ("layer_types",)) -> list[str] | None:
    """The kind of each layer where the configuration lists them. Raises Problem if there are not as many as layers."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    found = config[name]
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_LAYERS:
        raise Problem(f"{name} {words.value(found)} is not a list of 1 to {MOST_LAYERS} layers")
    if "num_hidden_layers" in config and len(found) != len(layers(config)):
        raise Problem(f"{name} lists {len(found)} layers, num_hidden_layers is {len(layers(config))}")
    return [str(one) for one in found]


def state_dtype(config: Config, name: str) -> str | None:
    """What a recurrence carries on; None for vLLM's "auto", the dtype that the convolution's window has."""
    value = config[name]
    if value == "auto":
        return None
    if value not in STATE_DTYPES:
        raise Problem(f"{name} {words.value(value)} is none of auto, {', '.join(STATE_DTYPES)}")
    return str(value)
