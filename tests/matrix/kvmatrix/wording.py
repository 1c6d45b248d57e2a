"""Combinations in a few words, for docs/matrix.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.layout import STATE_TOKENS
from kvmatrix.combination import Combination
from kvmatrix.models import Attention, Keep, Latent, ModelLayer, Pages, Pool, Side, Stage, State


def model(combination: Combination) -> str:
    """The layers of the model, those that are alike together."""
    layers = {layer.name: layer for stage in combination.producer.stages for layer in _layers(stage)}
    alike: dict[ModelLayer, list[str]] = {}
    for name in sorted(layers, key=_by_number):
        alike.setdefault(layers[name]._replace(name=""), []).append(name)
    return "; ".join(f"{_listed(names)}: {_layer(layer)}" for layer, names in alike.items())


def engine(side: Side) -> str:
    """How a side keeps its model."""
    sizes = dict.fromkeys("a state" if size == STATE_TOKENS else str(size) for size in side.block_sizes)
    words = [f"TP {side.tp}"]
    if len(side.stages) > 1:
        words.append(f"PP {len(side.stages)}")
    if side.dcp > 1:
        words.append(f"DCP {side.dcp}" + (f" by {side.interleave}" if side.interleave > 1 else ""))
    words.append(f"blocks of {' and '.join(sizes)}")
    if side.ids != "scattered":
        words.append(f"{side.ids} ids")
    return f"{', '.join(words)}: {' then '.join(map(_stage, side.stages))}"


def tokens(combination: Combination) -> str:
    windows = [str(window) for window in combination.windows if window is not None]
    asked_for = f"{combination.first} to {combination.end - 1}" if combination.first < combination.end else "none"
    return asked_for + (f", windows of {', '.join(windows)}" if windows else "")


def _layers(stage: Stage) -> list[ModelLayer]:
    return list(stage.layers) if isinstance(stage, Pool) else [layer for layer, _ in stage.layers]


def _stage(stage: Stage) -> str:
    names = [layer.name for layer in _layers(stage)]
    if isinstance(stage, Pool):
        return f"{_listed(names)} in one {stage.order}"
    alike: dict[Keep, list[str]] = {}
    for layer, keep in stage.layers:
        alike.setdefault(keep, []).append(layer.name)
    text = ", ".join(f"{_listed(names)} {_keep(keep)}" for keep, names in alike.items())
    if isinstance(stage, Pages):
        return f"{text}, overlaid"
    again = "".join(f", {name} also as {other!r}" for other, name in stage.aliases)
    return text + again + (f", in {stage.num_regions} regions" if stage.num_regions > 1 else "")


def _listed(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= 6 else f"{names[0]} to {names[-1]}"


def _by_number(name: str) -> tuple[int, str]:
    """layers.10 comes behind layers.9."""
    return len(name), name


def _layer(layer: ModelLayer) -> str:
    where = f" (group {layer.group})" if layer.group else ""
    if isinstance(layer, State):
        shards = ", ".join(_state_parts(layer))
        return f"state of {shards}{where}"
    if isinstance(layer, Latent):
        return f"{layer.size} {layer.dtype} without heads{where}"
    return f"{layer.heads} heads of {_sizes(layer)} {layer.dtype}{where}"


def _sizes(layer: Attention) -> str:
    return str(layer.size) if layer.size_v in (None, layer.size) else f"{layer.size} + {layer.size_v}"


def _state_parts(layer: State) -> Iterable[str]:
    yield from (f"{one.shards} x {one.channels} {one.name}" for one in layer.projections)
    if layer.shards:
        yield f"{layer.shards} x {layer.size} ssm"


def _keep(keep: Keep) -> str:
    words = [keep.layout]
    if keep.layout in ("opaque", "cells"):
        words.append(f'"{keep.tag}"')
    if keep.kernel_tokens:
        words.append(f"in kernel blocks of {keep.kernel_tokens}")
    if keep.gap_bytes:
        words.append(f"+ {keep.gap_bytes} bytes")
    if keep.scales:
        words.append(f"with scales {keep.scales}")
    return " ".join(words)
