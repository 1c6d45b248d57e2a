"""What each cache of a model takes on one rank of an engine, by the rules of vLLM 0.32."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from kvferry.cli.plan import words
from kvferry.cli.plan.keys import STATE_DTYPES
from kvferry.cli.plan.models import Attention, Cache, Model, Recurrent
from kvferry.cli.plan.sides import ITEM_BYTES, Side
from kvferry.layout import LayoutError
from kvferry.topology import kv_heads

GPU_BLOCK, CPU_BLOCK, CPU_MLA_BLOCK = 16, 128, 16
"""vLLM's default block sizes, in tokens."""

CPU_BLOCK_STEP = 32
"""Blocks of vLLM's CPU attention are a multiple of this, except for MLA."""


@dataclass(frozen=True)
class StateKind:
    """vLLM's name of a kind of state."""

    name: str


@dataclass(frozen=True)
class StateDtype:
    """A torch dtype, as far as a layout looks at it; itemsize in bytes, as torch calls it."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class StateSpec:
    """One rank's state, as vLLM's MambaSpec describes it to `kvferry.vllm.states`."""

    mamba_type: StateKind
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[StateDtype, ...]
    tp_replicated: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


class Sizes(NamedTuple):
    """dtype: of attention's cache, by name. state_dtype: of a convolution's window. block_tokens: on one rank.

    page_bytes: of a block of a layer with that cache.
    """

    dtype: str
    state_dtype: str
    item_bytes: int
    block_tokens: int
    page_bytes: dict[Cache, int]


def sizes(model: Model, side: Side) -> Sizes:
    """Raises LayoutError or TopologyError for what vLLM would refuse, with the values."""
    _check_query_heads(model, side)
    _check_context(model, side)
    dtype = side.dtype or model.dtype
    state_dtype = model.dtype if dtype.startswith("fp8") else dtype  # only attention's cache is quantised
    if state_dtype not in STATE_DTYPES:
        raise LayoutError(f"dtype {words.brief(state_dtype)} is none of {', '.join(STATE_DTYPES)}")
    caches = set(model.caches)
    attentions = {one for one in caches if isinstance(one, Attention)}
    states = {one: state_spec(one, side, state_dtype).num_bytes for one in caches if isinstance(one, Recurrent)}
    token_bytes = {
        one: num_heads(one, side) * (one.key_size + one.value_size) * ITEM_BYTES[dtype] for one in attentions
    }
    block = _block_tokens(side, attentions)
    if states and attentions:
        largest, per_token = max(states.values()), max(token_bytes.values())
        block *= -(-largest // (block * per_token))
    pages: dict[Cache, int] = {one: per_token * block for one, per_token in token_bytes.items()}
    # All pages are of one size, so that a block may belong to any group.
    page = max([*pages.values(), *states.values()])
    return Sizes(dtype, state_dtype, ITEM_BYTES[dtype], block, pages | dict.fromkeys(states, page))


def _check_query_heads(model: Model, side: Side) -> None:
    """As vLLM's ModelConfig.verify_with_parallel_config does."""
    if model.query_heads % side.tp:
        raise LayoutError(f"tp {side.tp} does not divide the model's {model.query_heads} query heads")


def _check_context(model: Model, side: Side) -> None:
    """Decode context parallel ranks share the heads of one another, so there must be so many ranks with the same."""
    if side.dcp == 1:
        return
    if side.tp % side.dcp:
        raise LayoutError(f"dcp {side.dcp} does not divide tp {side.tp}")
    for cache in model.caches:
        if isinstance(cache, Recurrent) or cache.window is not None:
            raise LayoutError(f"dcp {side.dcp}: only understood for full attention and latents")
        if not cache.is_latent:
            _check_shared_heads(cache.num_heads, side)


def _check_shared_heads(kv_heads: int, side: Side) -> None:
    """The query heads of a KV head are as many for each of its ranks, so vLLM can share them out over dcp as well."""
    ranks = max(side.tp // kv_heads, 1)
    if ranks % side.dcp:
        of = f"with tp {side.tp} each of the {kv_heads} KV heads is on {words.count(ranks, 'rank')}"
        raise LayoutError(f"dcp {side.dcp}: {of}, which dcp must divide")


def _block_tokens(side: Side, attentions: set[Attention]) -> int:
    is_latent = any(one.is_latent for one in attentions)
    default = GPU_BLOCK
    if side.is_cpu:
        default = CPU_MLA_BLOCK if is_latent else CPU_BLOCK
    block = side.block or default
    if side.is_cpu and not is_latent and block % CPU_BLOCK_STEP:
        raise LayoutError(f"block {block}: vLLM's CPU attention needs a multiple of {CPU_BLOCK_STEP}")
    return block


def num_heads(cache: Attention, side: Side) -> int:
    """KV heads on each rank."""
    return 1 if cache.is_latent else kv_heads(0, side.tp, cache.num_heads).count


def state_spec(cache: Recurrent, side: Side, dtype: str) -> StateSpec:
    """One rank's state. A single group of mamba2 is held by every rank. Raises LayoutError where TP does not divide."""
    groups = cache.groups
    if cache.kind == "MAMBA2" and groups == 1:
        groups = side.tp
    shards = {"heads": cache.heads, "groups": groups}
    if cache.kind == "SHORT_CONV":
        shards = {"channels": cache.head_size}
    for what, count in shards.items():
        if count % side.tp:
            raise LayoutError(f"tp {side.tp} does not divide the {count} {what} of the state")
    channels = (cache.heads * cache.head_size + 2 * groups * cache.state_size) // side.tp
    window = (cache.steps, channels) if side.conv == "SD" else (channels, cache.steps)
    kept = StateDtype(dtype, ITEM_BYTES[dtype])
    if cache.kind == "SHORT_CONV":
        return StateSpec(StateKind(cache.kind), (window,), (kept,))
    name = _state_dtype(cache, side) or dtype
    carried = StateDtype(name, ITEM_BYTES[name])
    state = (cache.heads // side.tp, cache.head_size, cache.state_size)
    return StateSpec(StateKind(cache.kind), (window, state), (kept, carried))


def _state_dtype(cache: Recurrent, side: Side) -> str | None:
    """vLLM's CPU backend keeps GDN's states in float32."""
    return side.ssm or ("float32" if side.is_cpu and cache.kind == "GDN_ATTN" else cache.state_dtype)
