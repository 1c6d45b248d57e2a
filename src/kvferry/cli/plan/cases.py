"""Layouts and block tables written out as JSON, as in golden cases.

A side is {"layers": {name: layer}}. A layer names a builder of kvferry.layout with its arguments; each layer lies in a
region of its own, behind `base` bytes. "kernel_block_size" wraps it in with_kernel_blocks. A case has a consumer, its
producers' ranks, perhaps tables (one list of block ids for each KV cache group) and tokens [first, end).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvferry import layout as layouts
from kvferry.cli.errors import Problem
from kvferry.cli.plan.engines import CacheGroup, Engine, Rank
from kvferry.layout import CacheLayout, Channels, Context, Field, Heads, Layer, LayoutError, Region
from kvferry.plan import BlockTable

BUILDERS = (
    "separated",
    "interleaved",
    "key_only",
    "fused",
    "cpu_tiles",
    "opaque_tiles",
    "opaque_cells",
    "state",
)


def cache(data: Mapping[str, Any], order: Sequence[int] | None = None) -> CacheLayout:
    """The layers of a side, in the file's order or in another. Raises LayoutError, which names layer and key."""
    entries = list(_key("side", data, "layers").items())
    made = [_layer(region, *entries[i]) for region, i in enumerate(order or range(len(entries)))]
    return CacheLayout(tuple(region for region, _ in made), tuple(layer for _, layer in made))


def _layer(region: int, name: str, data: Mapping[str, Any]) -> tuple[Region, Layer]:
    where = f"layer {name}"
    block_size, num_blocks = _number(where, data, "block_size"), _number(where, data, "num_blocks")
    fields = _fields(where, data)
    if "kernel_block_size" in data:
        fields = layouts.with_kernel_blocks(fields, data["kernel_block_size"], block_size)
    base = data.get("base", 0)
    layer = Layer(
        name=name,
        group=data.get("group", 0),
        region=region,
        base_bytes=base,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=data.get("dtype", "bfloat16"),
        heads=Heads(*data.get("heads", (0, 1, 1))),
        fields=fields,
        context=Context(*data.get("context", ())),
        scales=data.get("scales", ""),
    )
    return Region(0, base + end_bytes(fields, num_blocks)), layer


def _fields(where: str, data: Mapping[str, Any]) -> tuple[Field, ...]:
    build = _key(where, data, "build")
    if build not in BUILDERS:
        raise LayoutError(f"{where}: build {build!r} is none of {', '.join(BUILDERS)}")
    arguments = _key(where, data, "with")
    try:
        if build == "state":
            arguments = {**arguments, "part": Channels(**arguments["part"])}
        made: tuple[Field, ...] = getattr(layouts, build)(**arguments)
    except (TypeError, KeyError) as error:
        raise LayoutError(f"{where}: with: {error}") from None
    return made


def _key(where: str, data: Mapping[str, Any], key: str) -> Any:
    if not isinstance(data, Mapping) or key not in data:
        raise LayoutError(f"{where}: has no {key!r}")
    return data[key]


def _number(where: str, data: Mapping[str, Any], key: str) -> int:
    value = _key(where, data, key)
    if type(value) is not int or value < 1:
        raise LayoutError(f"{where}: {key} {value!r} is not a positive number")
    return value


def end_bytes(fields: tuple[Field, ...], num_blocks: int) -> int:
    """Bytes of all blocks, the padding of the last one included."""
    return max(
        max(field.block_stride_bytes * num_blocks, 0)
        + field.base_bytes
        + max(0, sum((axis.size - 1) * axis.stride_bytes for axis in field.axes) + 1 - field.block_stride_bytes)
        for field in fields
    )


def are_block_ids(groups: Any) -> bool:
    """Whether it is a list of numbers for each KV cache group."""
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(type(one) is int and abs(one) < _MOST_BLOCKS for one in group)
        for group in groups
    )


_MOST_BLOCKS = 1 << 40


def tables(block_ids: Sequence[Sequence[int]]) -> list[BlockTable]:
    """Block ids by group, as the planner takes them."""
    return [BlockTable(np.array(group, np.int64)) for group in block_ids]


class Case(NamedTuple):
    """A case of a file. block_ids: (consumer's, producer's) by group, and tokens: None where the file has none."""

    name: str
    consumer: Engine
    producer: Engine
    block_ids: tuple[list[list[int]], list[list[int]]] | None
    tokens: tuple[int, int] | None


def load(file: Path, name: str | None) -> list[Case]:
    """The cases of a file, which holds one or a list of them; only those whose name is or contains `name`.

    Raises Problem, naming the case and the key.
    """
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise Problem(f"{file} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Problem(f"{file} is not JSON: {error}") from None
    named = [(str(one.get("name", "")) if isinstance(one, dict) else "", one) for one in _listed(data)]
    if name is not None:
        chosen = [pair for pair in named if pair[0] == name] or [pair for pair in named if name in pair[0]]
        if not chosen:
            raise Problem(f"{file} has no case {name!r}", f"It has: {', '.join(known for known, _ in named)}.")
        named = chosen
    return [_case(file, known, one) for known, one in named]


def _listed(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]


def _case(file: Path, name: str, data: Any) -> Case:
    where = f"case {name}" if name else "the case"
    try:
        consumer = cache(_key(where, data, "consumer"))
        producers = [cache(one) for one in _key(where, data, "producers")]
        rank, num_ranks = _two(data, "consumer_rank") or (0, 1)
        ids = (_ids(data, "consumer_tables"), _ids(data, "producer_tables")) if "consumer_tables" in data else None
        tokens = _two(data, "tokens")
    except (LayoutError, TypeError, ValueError, KeyError, IndexError) as error:
        raise Problem(f"{file}: {where}: {error}") from None
    if not producers:
        raise Problem(f"{file}: {where}: producers: none")
    if not all(layout.layers for layout in (consumer, *producers)):
        raise Problem(f"{file}: {where}: layers: none")
    count = 1 + max(layer.group for layout in (consumer, *producers) for layer in layout.layers)
    label = str(rank) if num_ranks > 1 else "0"
    one = Rank(label, rank, num_ranks, consumer)
    several = tuple(Rank(str(index), 0, 1, layout) for index, layout in enumerate(producers))
    return Case(name, _engine("consumer", name, (one,), count), _engine("producer", "", several, count), ids, tokens)


def _two(data: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Two numbers; None where the case has none."""
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int for one in value):
        raise LayoutError(f"{key} {value} are not two numbers")
    return value[0], value[1]


def _ids(data: Mapping[str, Any], key: str) -> list[list[int]]:
    value: list[list[int]] = data.get(key, [])
    if not are_block_ids(value):
        raise LayoutError(f"{key} must be one list of numbers for each KV cache group")
    return value


def _engine(role: str, title: str, ranks: tuple[Rank, ...], num_groups: int) -> Engine:
    tokens = {layer.group: layer.block_size for rank in ranks for layer in rank.layout.layers}
    label = "group {}" if num_groups > 1 else ""
    groups = tuple(CacheGroup(label.format(group), tokens.get(group, 1)) for group in range(num_groups))
    blocks = ", ".join(dict.fromkeys(f"block {size}" for _, size in sorted(tokens.items())))
    return Engine(role, title, blocks, ranks, groups)
