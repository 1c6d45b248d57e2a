"""Requests to plan: which tokens, in which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvferry.cli.errors import Problem
from kvferry.cli.plan.engines import CacheGroup, Engine
from kvferry.plan import BlockTable

MOST_TOKENS = 1 << 24
MOST_BLOCKS = 1 << 24
"""Over the tables of one request."""


class Request(NamedTuple):
    """Which tokens of a request move, out of and into which blocks (one table for each KV cache group)."""

    consumer_tables: Sequence[BlockTable]
    producer_tables: Sequence[BlockTable]
    first_token: int
    end_token: int

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.first_token


def scattered(consumer: Engine, producer: Engine, first_token: int, end_token: int) -> Request:
    """A request no two blocks of which are neighbours, as after some hours of serving.

    A sliding window asks only for the blocks that the next token looks at. Raises Problem for too small a cache.
    """
    return Request(
        _tables(consumer, end_token, backwards=True, step=2, only_wanted=True),
        _tables(producer, end_token, step=2),
        first_token,
        end_token,
    )


def adjacent(consumer: Engine, producer: Engine, first_token: int, end_token: int) -> Request:
    """The same with blocks that follow one another on both sides, as in a fresh cache."""
    return Request(_tables(consumer, end_token, only_wanted=True), _tables(producer, end_token), first_token, end_token)


def one_block(consumer: Engine, producer: Engine) -> Request:
    """The tokens of the consumer's longest block, or as many as both caches hold."""
    return first_tokens(consumer, producer, longest_block(consumer))


def first_tokens(consumer: Engine, producer: Engine, num_tokens: int) -> Request:
    """So many tokens, or as many as both caches hold, in blocks that lie apart."""
    end = min(num_tokens, MOST_TOKENS, *(_capacity(engine) for engine in (consumer, producer)))
    return Request(_tables(consumer, end, step=2), _tables(producer, end, step=2), 0, end)


def longest_block(engine: Engine) -> int:
    """Tokens of the largest block; 1 if the engine has only states."""
    return max((group.tokens for group in engine.groups if not group.kept.keeps_state), default=1)


def _capacity(engine: Engine) -> int:
    """Tokens that fit into every group, one at a time."""
    return engine.num_blocks * min(group.tokens for group in engine.groups)


def _tables(
    engine: Engine, num_tokens: int, backwards: bool = False, step: int = 1, only_wanted: bool = False
) -> list[BlockTable]:
    """Ids from 1 on (0 is vLLM's null block) that no two groups share, `step` apart; side by side if there are too few
    for that, and from 0 in each group if there are fewer still."""
    counts = [-(-num_tokens // group.tokens) for group in engine.groups]
    if sum(counts) > MOST_BLOCKS:
        needed = f"{num_tokens} tokens need {sum(counts):,} of the {engine.role}'s blocks"
        raise Problem(f"{needed}, at most {MOST_BLOCKS:,} are understood", "Ask for fewer with --tokens.")
    if step * sum(counts) > engine.num_blocks:
        step = 1
    starts = [1 + step * before for before in accumulate(counts[:-1], initial=0)]
    if starts[-1] + step * (counts[-1] - 1) >= engine.num_blocks:
        starts = [0] * len(counts)
        if max(counts) > engine.num_blocks:
            raise Problem(
                f"{num_tokens} tokens need {max(counts)} blocks, the {engine.role}'s cache has {engine.num_blocks}",
                "Ask for fewer with --tokens.",
            )
    tables = []
    for group, start, count in zip(engine.groups, starts, counts, strict=True):
        ids = start + step * np.arange(count, dtype=np.int64)
        ids = ids[::-1].copy() if backwards else ids
        if only_wanted:
            ids[: _behind(group, num_tokens)] = -1
        tables.append(BlockTable(ids))
    return tables


def _behind(group: CacheGroup, num_tokens: int) -> int:
    """Blocks that a sliding window has left when so many tokens are there."""
    return group.kept.window.blocks_behind(num_tokens) if group.kept.window is not None else 0
