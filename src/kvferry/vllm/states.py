"""The state of recurrent layers (mamba, mamba2, GDN, KDA, short convolution), as layouts.

vLLM keeps a layer's states side by side in one page: the window of a convolution, whose channels belong to several
projections, then what the recurrence carries on. Each part is sharded over TP by an axis of its own (x and the state by
heads, B and C by groups), so each becomes a layer of its own in a layout, named `<layer>/<part>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry import layout as layouts
from kvferry.layout import Channels, Field, Heads, LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

SHARDS_OF_CHANNELS = 2**6 * 3**2 * 5 * 7
"""Channels without heads are dealt in shards: as many as this has in common with their number, on every rank alike, so
that any usual TP size divides them."""


class Rank(NamedTuple):
    """A TP rank, and what a state's shapes do not tell.

    num_groups: of the model's B and C projections (mamba2), None if the model's configuration does not say.
    steps_outermost: convolution windows are [steps, channels] (vLLM's SD), not [channels, steps] (DS).
    """

    tp_rank: int
    tp_size: int
    num_groups: int | None = None
    steps_outermost: bool = False


class Part(NamedTuple):
    """One part of a layer's state on one rank: its heads over the whole model, and where it lies in a slot."""

    name: str
    heads: Heads
    dtype: str
    fields: tuple[Field, ...]


class _Projection(NamedTuple):
    """Channels of a convolution that come from one projection. total_shards: over the whole model."""

    name: str
    num_channels: int
    num_shards: int
    total_shards: int


def parts(spec: MambaSpec, rank: Rank, slot_stride_bytes: int) -> tuple[Part, ...]:
    """The parts of one layer's state on one rank. Raises LayoutError for a state whose parts are not known."""
    conv, recurrent = _shapes(spec)
    found: list[Part] = []
    base = 0
    if conv is not None:
        found += _convolution(spec, conv, recurrent, rank, slot_stride_bytes)
        base = prod(conv) * spec.dtypes[0].itemsize
    if recurrent is not None:
        shards, content = _recurrent_shards(spec, recurrent, rank), prod(recurrent)
        channels = Channels(num_shards=shards.count, num_channels=content // shards.count)
        dtype = spec.dtypes[-1]
        fields = layouts.state("ssm", channels, dtype.itemsize, base, slot_stride_bytes)
        found.append(Part("ssm", shards, _name(dtype), fields))
    return tuple(found)


def _shapes(spec: MambaSpec) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """(the convolution's window, the recurrent state), either of which may be missing."""
    kind, shapes = spec.mamba_type.name, spec.shapes
    if kind == "SHORT_CONV" and len(shapes) == 1 and len(shapes[0]) == 2:
        return shapes[0], None
    if kind == "LINEAR" and len(shapes) == 1:
        return None, shapes[0]
    if kind in ("MAMBA1", "MAMBA2", "GDN_ATTN") and len(shapes) == 2 and len(shapes[0]) == 2:
        return shapes
    raise LayoutError(f"state {kind} of shapes {list(map(list, shapes))}: its parts are not known")


def _convolution(
    spec: MambaSpec, conv: Sequence[int], recurrent: Sequence[int] | None, rank: Rank, slot_stride_bytes: int
) -> Iterator[Part]:
    steps, channels = conv if rank.steps_outermost else (conv[1], conv[0])
    first = 0
    for one in _projections(spec, channels, recurrent, rank):
        part = Channels(
            num_shards=one.num_shards,
            num_channels=one.num_channels // one.num_shards,
            num_steps=steps,
            first_channel=first,
            steps_outermost=rank.steps_outermost,
            all_channels=channels,
        )
        name, dtype = f"conv.{one.name}", spec.dtypes[0]
        fields = layouts.state(name, part, dtype.itemsize, 0, slot_stride_bytes)
        yield Part(name, _heads(spec, one.num_shards, one.total_shards, rank), _name(dtype), fields)
        first += one.num_channels


def _projections(
    spec: MambaSpec, channels: int, recurrent: Sequence[int] | None, rank: Rank
) -> tuple[_Projection, ...]:
    """Whose channels a convolution's window holds, in order: x, B, C in mamba2; q, k, v in GDN and KDA."""
    kind = spec.mamba_type.name
    if recurrent is None or kind == "MAMBA1":
        return (_channels("x", channels, rank, spec),)
    heads, head_size = recurrent[0], recurrent[1]
    values = heads * head_size
    others, odd = divmod(channels - values, 2)
    if others < 1 or odd:
        raise LayoutError(f"state {kind}: {channels} channels are not {values} and two equal parts")
    if kind == "MAMBA2":
        groups, total = _groups(spec, others, recurrent[2], rank)
        pair = (_Projection("b", others, groups, total), _Projection("c", others, groups, total))
        return (_Projection("x", values, heads, heads * rank.tp_size), *pair)
    key_heads, rest = divmod(others, recurrent[2])
    if rest:
        raise LayoutError(f"state {kind}: {others} key channels are not heads of {recurrent[2]}")
    keys = key_heads * rank.tp_size
    return (
        _Projection("q", others, key_heads, keys),
        _Projection("k", others, key_heads, keys),
        _Projection("v", values, heads, heads * rank.tp_size),
    )


def _groups(spec: MambaSpec, channels: int, state_size: int, rank: Rank) -> tuple[int, int]:
    """(groups on this rank, groups of the model). A model's single group is held by every rank."""
    groups, rest = divmod(channels, state_size)
    if rest:
        raise LayoutError(f"state MAMBA2: {channels} group channels are not groups of {state_size}")
    if rank.num_groups is None and groups == 1 and rank.tp_size > 1:
        raise LayoutError(
            f"state MAMBA2: one group on each of {rank.tp_size} ranks, and the configuration does not say how many "
            "the model has"
        )
    return groups, groups * rank.tp_size if rank.num_groups is None else rank.num_groups


def _channels(name: str, channels: int, rank: Rank, spec: MambaSpec) -> _Projection:
    """Channels without heads, dealt in shards."""
    ranks = 1 if spec.tp_replicated else rank.tp_size
    total = gcd(channels * ranks, SHARDS_OF_CHANNELS)
    if total % ranks:
        raise LayoutError(f"state {spec.mamba_type.name}: {channels * ranks} channels at TP {ranks}: no common shards")
    return _Projection(name, channels, total // ranks, total)


def _recurrent_shards(spec: MambaSpec, shape: Sequence[int], rank: Rank) -> Heads:
    if spec.mamba_type.name == "MAMBA1":
        one = _channels("ssm", shape[0], rank, spec)
        return _heads(spec, one.num_shards, one.total_shards, rank)
    return _heads(spec, shape[0], shape[0] * rank.tp_size, rank)


def _heads(spec: MambaSpec, count: int, total: int, rank: Rank) -> Heads:
    if spec.tp_replicated:
        return Heads(0, count, count)
    if count * rank.tp_size == total:
        return Heads(rank.tp_rank * count, count, total)
    if count == total == 1:
        return Heads(0, 1, 1)
    raise LayoutError(f"state {spec.mamba_type.name}: {count} shards on each of {rank.tp_size} ranks, {total} in all")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
