"""Faults that the check of the bytes must find, by name. Each breaks one thing in a situation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvmatrix.combination import Combination
from kvmatrix.coordinates import Block, Bytes, blocks
from kvmatrix.engines import Engine


class Situation(NamedTuple):
    """An engine before or after a transfer, and the request's blocks in it."""

    engine: Engine
    combination: Combination
    block_ids: list[list[int]]

    def block(self, rank: int = -1, entry: int = -1) -> tuple[Bytes, Block]:
        """The memory of a block of the last layer, and its bytes."""
        cache, memory = self.engine.caches[rank], self.engine.memory[rank]
        last = cache.places[-1].layer
        found = [one for one in blocks(cache, self.block_ids) if one.place.layer == last]
        return memory[last.region], [one for one in found if one.field == found[-1].field][entry]


def _flip(memory: Bytes, offset: int) -> None:
    memory[offset] ^= 1


def a_required_byte_is_flipped(situation: Situation) -> None:
    memory, block = situation.block(entry=0)
    _flip(memory, int(block.offsets[-1].flat[-1]))


def a_byte_behind_the_last_token_is_flipped(situation: Situation) -> None:
    memory, block = situation.block()
    _flip(memory, int(block.offsets[-1].flat[-1]))


def a_byte_of_the_null_block_is_flipped(situation: Situation) -> None:
    memory, block = situation.block()
    numbers = block.place.bytes_of[block.field]
    _flip(memory, block.place.layer.base_bytes + int(numbers[0].flat[0]))


def two_heads_are_exchanged(situation: Situation) -> None:
    memory, block = situation.block(rank=0, entry=0)
    memory[block.offsets] = np.roll(memory[block.offsets], 1, axis=1)


def two_layers_are_exchanged(situation: Situation) -> None:
    cache, memory = situation.engine.caches[0], situation.engine.memory[0]
    first, *_, last = blocks(cache, situation.block_ids)
    one, other = memory[first.place.layer.region], memory[last.place.layer.region]
    count = min(first.offsets.size, last.offsets.size)
    here, there = first.offsets.flat[:count], last.offsets.flat[:count]
    one[here], other[there] = other[there].copy(), one[here].copy()


Plant = Callable[[Situation], None]
CONSUMER_PLANTS: dict[str, Plant] = {
    "a required byte is flipped": a_required_byte_is_flipped,
    "a byte behind the last token is flipped": a_byte_behind_the_last_token_is_flipped,
    "a byte of the null block is flipped": a_byte_of_the_null_block_is_flipped,
}
"""After a transfer, in what it wrote or must not have written."""
PRODUCER_PLANTS: dict[str, Plant] = {
    "two heads are exchanged": two_heads_are_exchanged,
    "two layers are exchanged": two_layers_are_exchanged,
}
"""Before a transfer, in what it reads: as if the wrong bytes were fetched."""
BLOCKS_PLANT = "blocks are asked for in another order"
"""The request names the consumer's blocks wrongly."""
