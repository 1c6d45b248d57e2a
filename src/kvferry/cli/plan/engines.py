"""An engine as the planner sees it: the layouts of its ranks, and the KV cache groups that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.layout import CacheLayout
from kvferry.vllm.groups import Group


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group. label: its kind in words; groups of one kind are shown together. tokens: of a block.

    kept: which blocks of a request a consumer asks for.
    """

    label: str
    tokens: int
    kept: Group = field(default_factory=Group)


@dataclass(frozen=True)
class Rank:
    """One worker. label: its number, or "pp1.tp0" where there are pipeline stages."""

    label: str
    tp_rank: int
    tp_size: int
    layout: CacheLayout


@dataclass(frozen=True)
class Engine:
    """role: consumer or producer. title: what it serves. settings: the rest in words. fingerprint: what must be equal.

    notes: what a person should know about it.
    """

    role: str
    title: str
    settings: str
    ranks: tuple[Rank, ...]
    groups: tuple[CacheGroup, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def layouts(self) -> tuple[CacheLayout, ...]:
        return tuple(rank.layout for rank in self.ranks)

    @property
    def num_blocks(self) -> int:
        """Blocks that every layer of every rank has."""
        return min(layer.num_blocks for layout in self.layouts for layer in layout.layers)
