"""What a person says about one engine: `config.json,tp=4,block=64,layout=NHD`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.cli.errors import Problem
from kvferry.cli.plan import words
from kvferry.layout import PHYSICAL_ORDERS

ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}
"""vLLM's short names."""

CPU_LAYOUTS = ("cpu", "cpu-amx")
"""vLLM's CPU attention: keys transposed in each (block, head) tile; or packed for AMX, which nobody else can read."""

PLANES = {"separated": "2BNHD", "separated-hnd": "2BHND", "interleaved": "B2NHD", "interleaved-hnd": "B2HND"}
"""A tensor of K and V planes for each layer: all keys before all values, or in each block."""

LAYOUTS = (*PHYSICAL_ORDERS, *ALIASES, *CPU_LAYOUTS, *PLANES)

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float", "float32"), "float32"),
    **dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3"),
    "fp8_e5m2": "fp8_e5m2",
}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}


class Side(NamedTuple):
    """One engine's settings.

    pp_layers: decoder layers of each pipeline stage, empty for vLLM's even split. dcp: decode context parallel ranks,
    which are dealt tokens in runs of `interleave`. block: tokens of a block, None for
    vLLM's default. dtype: the cache's, None for the model's. blocks: how many there are, None for as many as are
    needed. conv: order of a convolution's window in memory, SD (steps outermost) or DS. ssm: dtype of recurrent states.
    model_id: kvferry's setting, what the side calls its model; None for a digest of it.
    """

    model: Path | None = None
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] = ()
    dp: int = 1
    dcp: int = 1
    interleave: int = 1
    block: int | None = None
    layout: str = "LBHNC"
    dtype: str | None = None
    blocks: int | None = None
    conv: str = "SD"
    ssm: str | None = None
    model_id: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.layout in CPU_LAYOUTS


def parse(option: str, text: str, model: Path | None) -> Side:
    """The settings of `[MODEL,]key=value,...`, where `model` is what holds for both. Raises Problem, naming the key."""
    values: dict[str, Any] = {"model": model}
    given: dict[str, str] = {}
    for position, part in enumerate(piece.strip() for piece in text.split(",")):
        key, equals, value = part.partition("=")
        key = key.lower()
        if not part:
            continue
        if not equals and position == 0:
            key, value = "model", _file(option, part)
        elif not equals or not value:
            raise Problem(f"{option}: {words.value(part)} is not KEY=VALUE", _known())
        if key not in _READERS:
            raise Problem(f"{option}: {words.brief(key)} is not known", _known())
        if key in given:
            raise Problem(f"{option}: {key} is given twice, as {words.brief(given[key])} and {words.brief(value)}")
        given[key] = value
        try:
            values[key] = _READERS[key](value)
        except ValueError as error:
            raise Problem(f"{option}: {key} {words.value(value)}: {error}") from None
    side = Side(**values)
    if side.pp_layers and "pp" in given and side.pp != len(side.pp_layers):
        stages = f"pp_layers {words.brief(given['pp_layers'])} has {len(side.pp_layers)} stages"
        raise Problem(f"{option}: pp is {side.pp}, but {stages}")
    return side._replace(pp=len(side.pp_layers)) if side.pp_layers else side


def _file(option: str, text: str) -> str:
    """A side may begin with its config.json; whatever can't be meant so is a setting with a slip in it."""
    if text.endswith(".json") or os.sep in text or os.path.exists(text):
        return text
    raise Problem(f"{option}: {words.value(text)} is neither KEY=VALUE nor a file", _known())


def _known() -> str:
    return f"Keys are {', '.join(_READERS)}."


MOST_RANKS = 4096
_MOST = 1 << 20
_MOST_DIGITS = 20
_MOST_LETTERS = 200


def decimal(text: str) -> int | None:
    """The number that was typed; None for anything else, and for more digits than any bound here has."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _up_to(most: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        number = decimal(value)
        if number is None or not 1 <= number <= most:
            raise ValueError(f"must be a positive number, at most {most:,}")
        return number

    return read


_ranks, _number = _up_to(MOST_RANKS), _up_to(_MOST)


def _stages(value: str) -> tuple[int, ...]:
    stages = value.split("+")
    if len(stages) > MOST_RANKS:
        raise ValueError(f"has {len(stages):,} stages, at most {MOST_RANKS:,} are understood")
    return tuple(map(_ranks, stages))


def _one_of(choices: Mapping[str, str]) -> Callable[[str], str]:
    """In upper or lower case."""
    lower = {name.lower(): meant for name, meant in choices.items()}

    def read(value: str) -> str:
        if value.lower() not in lower:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return lower[value.lower()]

    return read


def _printable(value: str) -> str:
    if not value.isprintable() or len(value) > _MOST_LETTERS:
        raise ValueError(f"must be at most {_MOST_LETTERS} letters that print")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "model": Path,
    "tp": _ranks,
    "pp": _ranks,
    "pp_layers": _stages,
    "dp": _ranks,
    "dcp": _ranks,
    "interleave": _number,
    "block": _number,
    "layout": _one_of({name: ALIASES.get(name, name) for name in LAYOUTS}),
    "dtype": _one_of(DTYPES),
    "blocks": _number,
    "conv": _one_of({"SD": "SD", "DS": "DS"}),
    "ssm": _one_of({name: dtype for name, dtype in DTYPES.items() if not dtype.startswith("fp8")}),
    "model_id": _printable,
}
