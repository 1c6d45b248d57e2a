"""How vLLM keeps the blocks of each KV cache group, and so which of a request's blocks are offered and wanted.

Full attention keeps all blocks by token position; a sliding window leaves null blocks behind; a recurrent layer keeps
one slot that holds the state after the last computed token, perhaps with earlier slots before it and spare ones behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Block = TypeVar("Block")


class UnsupportedCache(ValueError):
    """A KV cache group that kvferry cannot move; the text names the group, its layers and what is supported."""


class Window(NamedTuple):
    """Of a sliding-window group: how many tokens back it looks, and its block size."""

    tokens: int
    block_size: int

    def start(self, num_computed_tokens: int) -> int:
        """The first token that the token after `num_computed_tokens` looks at."""
        return max(num_computed_tokens - self.tokens + 1, 0)

    def blocks_behind(self, num_computed_tokens: int) -> int:
        """How many whole blocks that token and all later ones never look at."""
        return self.start(num_computed_tokens) // self.block_size


class Group(NamedTuple):
    """One KV cache group. window: None where every block is kept. spare_slots: None unless it keeps states; else how
    many slots behind the running state are scratch space for speculation."""

    window: Window | None = None
    spare_slots: int | None = None

    @property
    def keeps_state(self) -> bool:
        return self.spare_slots is not None

    def window_start(self, num_computed_tokens: int) -> int:
        """The first token that is still looked at when so many have been computed or loaded; 0 without a window."""
        return self.window.start(num_computed_tokens) if self.window is not None else 0

    def offered(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The part of a finished request's blocks, or of their ids, that a consumer may ask for."""
        if self.spare_slots is None or not blocks:
            return blocks
        running = max(len(blocks) - self.spare_slots, 1) - 1
        return blocks[running : running + 1]

    def wanted(self, blocks: Sequence[KVCacheBlock], num_computed_tokens: int) -> list[KVCacheBlock | None]:
        """The blocks to load, by token position, when `num_computed_tokens` will have been computed or loaded.

        None for null blocks, for what the local prefix cache has (hashed), and for what a sliding window has left
        behind by then: the producer has let go of that as well. Raises ValueError if a state has no slot of its own.
        """
        if self.keeps_state:
            slots = list(self.offered(blocks))
            if not slots or slots[0].is_null or slots[0].block_hash is not None:
                raise ValueError(f"the state's slot among {len(blocks)} blocks is not this request's own")
            return list(slots)
        behind = self.window.blocks_behind(num_computed_tokens) if self.window is not None else 0
        return [
            None if position < behind or block.is_null or block.block_hash is not None else block
            for position, block in enumerate(blocks)
        ]


def groups(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """One for each transfer group, in their order."""
    return tuple(_group(one_spec(group)) for group in kv_cache_config.transfer_groups)


def spec_of(kv_cache_config: KVCacheConfig, layer_name: str) -> KVCacheSpec:
    """The spec of one layer; a group may hold one spec per layer. Raises UnsupportedCache for an unknown layer."""
    for group in kv_cache_config.transfer_groups:
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            per_layer = getattr(spec, "kv_cache_specs", None)
            return spec if per_layer is None else per_layer[layer_name]
    raise UnsupportedCache(f"layer {layer_name} is in none of the KV cache groups")


def one_spec(group: Any) -> Any:
    """A group's spec; of a group with one spec for each layer, the first: what is asked here is alike in all."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if per_layer is None else next(iter(per_layer.values()))


def _group(spec: Any) -> Group:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return Group(spare_slots=spec.num_speculative_blocks)
    if kind == "SlidingWindowSpec":
        return Group(window=Window(spec.sliding_window, spec.block_size))
    return Group()


def backoff_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many of a prompt's last tokens a producer leaves to the consumer, which computes them anyway.

    A state cannot be cut at a token, and the consumer needs the one before the last token. A sliding window moves on
    with the last token, and may let go of a block that the last token itself still looks at. Several multi-token
    prediction modules read ahead of the last token. Elsewhere nothing is left.
    """
    kept = groups(kv_cache_config)
    moves_on = any(group.keeps_state or group.window is not None for group in kept)
    return max(int(moves_on), vllm_config.num_prefill_lookahead_tokens - 1, 0)
