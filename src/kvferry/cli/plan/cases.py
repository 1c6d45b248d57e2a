"""Layouts and block tables written out as JSON, as in golden cases.

A side is {"layers": {name: layer}}. A layer names a builder of kvferry.layout with its arguments; each layer lies in a
region of its own, behind `base` bytes. "kernel_block_size" wraps it in with_kernel_blocks. A case has a consumer, its
producers' ranks, perhaps tables (one list of block ids for each KV cache group), tokens [first, end), and answers.
docs/plan.md describes all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvferry import layout as layouts
from kvferry.cli.errors import Problem
from kvferry.cli.plan import words
from kvferry.cli.plan.answers import Answers
from kvferry.cli.plan.engines import CacheGroup, Engine, Rank
from kvferry.cli.plan.files import read_json
from kvferry.cli.plan.requests import MOST_TOKENS
from kvferry.cli.plan.sides import MOST_RANKS
from kvferry.layout import CacheLayout, Channels, Context, Field, Heads, Layer, LayoutError, Region
from kvferry.plan import BlockTable

# Above anything that is served, and low enough that what is made of it stays small.
MOST_GROUPS = MOST_HEADS = 4096
_MOST_LISTED = 200
"""Names of cases."""

Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 56)]
Rank0 = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
NumRanks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Head = Annotated[int, Meta(ge=0, lt=MOST_HEADS)]
NumHeads = Annotated[int, Meta(ge=1, le=MOST_HEADS)]
Token = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Text = Annotated[str, Meta(max_length=200)]
Four = tuple[Count, Count, Count, Count]
FourBytes = tuple[Bytes, Bytes, Bytes, Bytes]
BlockId = Annotated[int, Meta(gt=-(1 << 40), lt=1 << 40)]
Tables = Annotated[list[list[BlockId]], Meta(max_length=MOST_GROUPS)]
"""Block ids of a request by KV cache group; -1 where there is no block."""

BlockIds = tuple[list[list[int]], list[list[int]]]
"""The consumer's and the producer's."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person wrote; its texts are printed, so they must be printable."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            text = getattr(self, name)
            if isinstance(text, str) and not text.isprintable():
                raise ValueError(f"{name} {words.value(text)} has characters that do not print")


class _Planes(_Strict, frozen=True):
    num_blocks: Count
    block_size: Count
    num_heads: Count
    head_size: Count
    itemsize: Count
    head_major: bool = False


class _KeyOnly(_Strict, frozen=True):
    block_size: Count
    content_bytes: Count
    block_stride_bytes: Bytes | None = None


class _Fused(_Strict, frozen=True):
    shape: Four
    strides_bytes: FourBytes
    head_size: Count
    head_size_v: Bytes
    itemsize: Count


class _CpuTiles(_Strict, frozen=True):
    shape: Four
    strides_bytes: FourBytes
    head_size: Count
    itemsize: Count


class _Opaque(_Strict, frozen=True):
    shape: Four
    strides_bytes: FourBytes
    tag: Text


class _Channels(_Strict, frozen=True):
    num_shards: Count
    num_channels: Count
    num_steps: Count = 1
    first_channel: Bytes = 0
    steps_outermost: bool = False
    all_channels: Bytes = 0


class _State(_Strict, frozen=True):
    name: Text
    part: _Channels
    itemsize: Count
    base_bytes: Bytes
    slot_stride_bytes: Bytes


_ARGUMENTS: dict[str, type[_Strict]] = {
    "separated": _Planes,
    "interleaved": _Planes,
    "key_only": _KeyOnly,
    "fused": _Fused,
    "cpu_tiles": _CpuTiles,
    "opaque_tiles": _Opaque,
    "opaque_cells": _Opaque,
    "state": _State,
}
"""What each builder takes."""


class _Layer(_Strict, frozen=True, rename={"arguments": "with"}):
    block_size: Count
    num_blocks: Count
    build: str
    arguments: Any
    kernel_block_size: Count | None = None
    base: Bytes = 0
    group: Annotated[int, Meta(ge=0, lt=MOST_GROUPS)] = 0
    dtype: Text = "bfloat16"
    heads: tuple[Head, NumHeads, NumHeads] = (0, 1, 1)
    context: tuple[Rank0, NumRanks, Count] = (0, 1, 1)
    scales: Text = ""


class _Side(_Strict, frozen=True):
    layers: dict[str, Any]


_Runs = dict[str, list[tuple[Bytes, Bytes, Bytes]]]


class _Case(_Strict, frozen=True):
    """The second half are answers, but for notes to those who test with a case."""

    consumer: Any
    producers: Annotated[list[Any], Meta(max_length=MOST_RANKS)]
    name: str = ""
    consumer_rank: tuple[Rank0, NumRanks] = (0, 1)
    consumer_tables: Tables | None = None
    producer_tables: Tables | None = None
    tokens: tuple[Token, Token] | None = None

    num_bytes: Bytes | None = None
    required_bytes: Bytes | None = None
    source_ranks: list[Rank0] | None = None
    descriptors: _Runs | None = None
    descriptors_by_source: list[_Runs] | None = None
    refused: list[Text] | None = None
    any_order: bool = False
    huge: bool = False

    def answers(self) -> Answers:
        runs = self.descriptors_by_source
        if runs is None and self.descriptors is not None:
            runs = [self.descriptors]
        return Answers(self.num_bytes, self.required_bytes, self.source_ranks, runs, self.refused)


Wanted = TypeVar("Wanted", bound=msgspec.Struct)


def _typed(where: str, data: Any, wanted: type[Wanted]) -> Wanted:
    """The data as a struct. Raises LayoutError, which names the key, its value, and what is allowed."""
    try:
        return msgspec.convert(data, wanted)
    except msgspec.ValidationError as error:
        what = _in_words(data, wanted, str(error))
    except UnicodeEncodeError as error:  # half a character, which JSON can write
        what = f"{words.value(error.object)} is not Unicode"
    raise LayoutError(f"{where}: {what}" if where else what)


def _in_words(data: Any, wanted: type[msgspec.Struct], error: str) -> str:
    """What msgspec says is wrong, and the value at the place that it names."""
    what, _, path = error.partition(" - at `$")
    what = re.sub(r"^Object missing required field `(.*)`$", r"has no '\1'", what)
    for key in re.findall(r"\w+", path):
        data = data[int(key)] if isinstance(data, list) else data[key]
        wanted = _Channels if key == "part" else wanted
    if unknown := re.match(r"^Object contains unknown field `(.*)`$", what, re.DOTALL):
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(wanted))
        return f"{path.strip('.`')} has an unknown key {words.value(unknown[1])}: known are {known}".strip()
    return f"{path.strip('.`')} {words.value(data)}: {what}" if path.strip("`") else what


def cache(data: Any, order: Sequence[int] | None = None) -> CacheLayout:
    """The layers of a side, in the file's order or in another. Raises LayoutError, which names layer and key."""
    entries = list(_typed("", data, _Side).layers.items())
    made = [_layer(region, *entries[i]) for region, i in enumerate(order or range(len(entries)))]
    return CacheLayout(tuple(region for region, _ in made), tuple(layer for _, layer in made))


def _layer(region: int, name: str, data: Any) -> tuple[Region, Layer]:
    where = f"layer {words.brief(name)}"
    if where != f"layer {name}":
        raise LayoutError(f"{where}: the name is too long, or has characters that do not print")
    one = _typed(where, data, _Layer)
    fields = _fields(where, one)
    layer = Layer(
        name=name,
        group=one.group,
        region=region,
        base_bytes=one.base,
        num_blocks=one.num_blocks,
        block_size=one.block_size,
        dtype=one.dtype,
        heads=Heads(*one.heads),
        fields=fields,
        context=Context(*one.context),
        scales=one.scales,
    )
    return Region(0, one.base + end_bytes(fields, one.num_blocks)), layer


def _fields(where: str, layer: _Layer) -> tuple[Field, ...]:
    if layer.build not in _ARGUMENTS:
        raise LayoutError(f"{where}: build {words.value(layer.build)} is none of {', '.join(_ARGUMENTS)}")
    given = _typed(f"{where}: with", layer.arguments, _ARGUMENTS[layer.build])
    arguments = msgspec.structs.asdict(given)
    if isinstance(given, _State):
        arguments["part"] = Channels(**msgspec.structs.asdict(given.part))
    try:
        made: tuple[Field, ...] = getattr(layouts, layer.build)(**arguments)
        if layer.kernel_block_size is None:
            return made
        return layouts.with_kernel_blocks(made, layer.kernel_block_size, layer.block_size)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def end_bytes(fields: tuple[Field, ...], num_blocks: int) -> int:
    """Bytes of all blocks, the padding of the last one included."""
    return max(
        max(field.block_stride_bytes * num_blocks, 0)
        + field.base_bytes
        + max(0, sum((axis.size - 1) * axis.stride_bytes for axis in field.axes) + 1 - field.block_stride_bytes)
        for field in fields
    )


def tables(block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
    """Block ids by group, as the planner takes them."""
    return [BlockTable(np.array(group, np.int64)) for group in block_ids]


class Case(NamedTuple):
    """A case of a file. block_ids and tokens: None where the file has none. answers: what is to come of them."""

    consumer: Engine
    producer: Engine
    block_ids: BlockIds | None
    tokens: tuple[int, int] | None
    answers: Answers


def load(file: Path, name: str | None) -> list[Case]:
    """The cases of a file, which holds one or a list of them; only those whose name is or contains `name`.

    Raises Problem, naming the case and the key.
    """
    where, data = words.brief(str(file)), read_json(file)
    named = [(_name(one), one) for one in (data if isinstance(data, list) else [data])]
    if name is not None:
        chosen = [pair for pair in named if pair[0] == name] or [pair for pair in named if name in pair[0]]
        if not chosen:
            raise Problem(f"{where} has no case {words.value(name)}", _listed([known for known, _ in named]))
        named = chosen
    if not named:
        raise Problem(f"{where} has no cases")
    return [_case(where, known, one) for known, one in named]


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return "\n  ".join(["It has:", *map(words.brief, names[:_MOST_LISTED]), *more])


def _name(data: Any) -> str:
    return str(data.get("name", "")) if isinstance(data, dict) else ""


def _case(file: str, name: str, data: Any) -> Case:
    title = words.brief(name)
    where = f"{file}: {f'case {title}' if name else 'the case'}"
    try:
        return _read(title, data)
    except LayoutError as error:
        raise Problem(f"{where}: {error}") from None


def _named(side: str, data: Any) -> CacheLayout:
    try:
        return cache(data)
    except LayoutError as error:
        raise LayoutError(f"{side}: {error}") from None


def _read(title: str, data: Any) -> Case:
    """A case of a file. Raises LayoutError."""
    case = _typed("", data, _Case)
    consumer = _named("consumer", case.consumer)
    producers = [_named(f"producers[{rank}]", one) for rank, one in enumerate(case.producers)]
    if not producers:
        raise LayoutError("producers: none")
    if not all(layout.layers for layout in (consumer, *producers)):
        raise LayoutError("layers: none")
    ids = None
    if case.consumer_tables is not None:
        ids = case.consumer_tables, case.producer_tables or []
    count = 1 + max(layer.group for layout in (consumer, *producers) for layer in layout.layers)
    rank, num_ranks = case.consumer_rank
    one = Rank(str(rank), rank, num_ranks, consumer)
    several = tuple(Rank(str(index), 0, 1, layout) for index, layout in enumerate(producers))
    engines = _engine("consumer", title, (one,), count), _engine("producer", "", several, count)
    return Case(*engines, ids, case.tokens, case.answers())


def _engine(role: str, title: str, ranks: tuple[Rank, ...], num_groups: int) -> Engine:
    tokens = {layer.group: layer.block_size for rank in ranks for layer in rank.layout.layers}
    label = "group {}" if num_groups > 1 else ""
    groups = tuple(CacheGroup(label.format(group), tokens.get(group, 1)) for group in range(num_groups))
    blocks = ", ".join(dict.fromkeys(f"block {size}" for _, size in sorted(tokens.items())))
    return Engine(role, title, blocks, ranks, groups)
