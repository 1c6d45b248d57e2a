"""One combination: two engines, one request, and what is to come of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import gcd

from kvmatrix.models import Side

PRODUCER_SPARE, CONSUMER_SPARE = 3, 5
"""Blocks of an engine beyond those that the request has; one of them, id 0, stands for vLLM's null block."""


@dataclass(frozen=True)
class Combination:
    """name: "section: what is special". The consumer wants the tokens [first, end) of the `end + 1` that are offered,
    as vLLM does, which computes the last one of a prompt itself.

    windows: of each KV cache group, tokens that it looks back, None for all. refused: what the refusal must name;
    empty if the transfer is to succeed.
    """

    name: str
    producer: Side
    consumer: Side
    first: int = 0
    end: int = 9
    windows: tuple[int | None, ...] = ()
    refused: tuple[str, ...] = ()

    def over(self, transport: str) -> Combination:
        """The same over another transport; "" for its own."""
        if not transport:
            return self
        sides = (dataclasses.replace(side, transport=transport) for side in (self.producer, self.consumer))
        producer, consumer = sides
        return dataclasses.replace(self, producer=producer, consumer=consumer)

    @property
    def section(self) -> str:
        return self.name.partition(": ")[0]

    @property
    def num_tokens(self) -> int:
        """What the producer offers."""
        return self.end + 1

    def producer_entries(self) -> list[list[bool]]:
        """Which entries of the producer's block tables have a block: all that its windows have not left behind."""
        return [
            [entry >= self._behind(group, size) for entry in range(-(-self.num_tokens // size))]
            for group, size in enumerate(self.producer.block_sizes)
        ]

    def consumer_entries(self) -> list[list[bool]]:
        """Likewise of the consumer's, less what its prefix cache has."""
        return [
            [
                entry >= self._behind(group, size) and (entry + 1) * size > self.first
                for entry in range(-(-self.end // size))
            ]
            for group, size in enumerate(self.consumer.block_sizes)
        ]

    def window_starts(self) -> tuple[int, ...]:
        """By group, the first token that the token after `end` looks at."""
        windows = self.windows or (None,) * len(self.consumer.block_sizes)
        return tuple(0 if window is None else max(self.end - window + 1, 0) for window in windows)

    def _behind(self, group: int, block_size: int) -> int:
        """Whole blocks that the token after `end` and all later ones never look at."""
        return self.window_starts()[group] // block_size


def tables(side: Side, entries: list[list[bool]], spare: int) -> tuple[list[list[int]], int]:
    """Block ids by group, -1 where there is no block, and how many blocks the engine has. Groups share one pool."""
    num_blocks = sum(map(sum, entries)) + spare
    ids = iter(_ids(side.ids, num_blocks - 1))
    return [[next(ids) if there else -1 for there in group] for group in entries], num_blocks


def _ids(order: str, count: int) -> list[int]:
    """The ids 1 to `count` in some order, always the same."""
    if order == "ascending":
        return [*range(2, count + 1), 1]
    if order == "descending":
        return list(range(count, 0, -1))
    step = next(step for step in range(count // 2 + 1, 2 * count + 2) if gcd(step, count) == 1)
    return [1 + (index * step + 1) % count for index in range(count)]
