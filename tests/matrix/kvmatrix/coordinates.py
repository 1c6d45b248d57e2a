"""What every byte of a request must be: a function of its coordinate, written on one side, looked for on the other."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmatrix.caches import Cache, Place
from kvmatrix.tensors import Ints

Bytes = npt.NDArray[np.uint8]
Tables = Sequence[Sequence[int]]
"""Block ids by KV cache group and token position; -1 where there is none."""


class Wrong(AssertionError):
    """A byte is not what it must be; the text says which and what it is."""


def value(layer: str, field: str, token: Ints, head: Ints, content: Ints) -> Bytes:
    """One byte for each coordinate of the whole model, well mixed; arrays are broadcast."""
    x = np.uint64(zlib.crc32(f"{layer}/{field}".encode()))
    for part in (token, head, content):
        x = (x ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = x ^ (x >> np.uint64(29))
    return (x >> np.uint64(32)).astype(np.uint8)


class Block(NamedTuple):
    """All bytes of one field in one block of a request, as [tile, head, content byte].

    offsets: in the layer's region. tokens: of each tile's first token, from the request's start. values: what they are
    to be.
    """

    place: Place
    field: str
    entry: int
    offsets: Ints
    tokens: Ints
    values: Bytes

    def named(self, index: int) -> str:
        """The coordinate of the index-th byte."""
        tile, head, content = np.unravel_index(index, self.offsets.shape)
        where = f"layer {self.place.layer.name}, field {self.field}, token {self.tokens[tile]}"
        return f"{where}, head {self.place.heads[head]}, byte {content}"


def blocks(cache: Cache, tables: Tables) -> Iterator[Block]:
    for place in cache.places:
        layer = place.layer
        for field, numbers in place.bytes_of.items():
            heads = place.heads[:, np.newaxis]
            content = np.arange(numbers.shape[3])
            for entry, block_id in enumerate(tables[layer.group]):
                if block_id >= 0:
                    tokens = entry * layer.block_size + place.positions
                    values = value(layer.name, field, tokens[:, np.newaxis, np.newaxis], heads, content)
                    yield Block(place, field, entry, layer.base_bytes + numbers[block_id], tokens, values)


def noise(cache: Cache, seed: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, region.length_bytes, np.uint8) for region in cache.layout.regions]


def fill(cache: Cache, memory: Sequence[Bytes], tables: Tables) -> None:
    """A producer's: every byte of the request's blocks is its coordinate's."""
    for block in blocks(cache, tables):
        memory[block.place.layer.region][block.offsets] = block.values


def spoil(cache: Cache, memory: Sequence[Bytes], tables: Tables) -> None:
    """A consumer's: every byte of the request's blocks is something else than its coordinate's."""
    for block in blocks(cache, tables):
        memory[block.place.layer.region][block.offsets] = ~block.values


def check(
    cache: Cache,
    before: Sequence[Bytes],
    after: Sequence[Bytes],
    tables: Tables,
    tokens: tuple[int, int],
    window_starts: Sequence[int],
) -> int:
    """Returns the number of bytes that hold tokens of [first, end) from the start of their group's window on. Raises
    Wrong unless each is its coordinate's, and every other byte is what it was; only behind `end`, in the block of the
    last token, and before the window, in the block where it starts, may right bytes have come too.
    """
    untouched = [np.ones(len(one), np.bool_) for one in after]
    num_bytes = 0
    for block in blocks(cache, tables):
        region, (first, end) = block.place.layer.region, tokens
        window = window_starts[block.place.layer.group]
        last_entry = (end - 1) // block.place.layer.block_size
        in_time = (block.tokens + block.place.tile_tokens > first) & (block.tokens < end) & (first < end)
        wanted = in_time & (block.tokens + block.place.tile_tokens > window)
        before_window = in_time & ~wanted & (block.entry == window // block.place.layer.block_size)
        surplus = before_window | (block.tokens >= end) & (block.entry == last_entry)
        found = after[region][block.offsets]
        right = found == block.values
        _first_wrong(block, found, right | ~_whole(wanted, found), "must be its coordinate's")
        same = found == before[region][block.offsets]
        _first_wrong(block, found, right | same | ~_whole(surplus, found), "may only be its coordinate's or untouched")
        come = block.offsets[wanted | surplus]
        if not untouched[region][come].all():
            raise Wrong(f"layer {block.place.layer.name}: another coordinate lies on the same byte")
        untouched[region][come] = False
        num_bytes += int(wanted.sum()) * block.offsets[0].size
    for region, mask in enumerate(untouched):
        changed = np.flatnonzero(mask & (after[region] != before[region]))
        if len(changed):
            raise Wrong(f"byte {changed[0]} of region {region}, outside what was asked for, was written")
    return num_bytes


def _whole(tiles: npt.NDArray[np.bool_], like: Bytes) -> npt.NDArray[np.bool_]:
    return np.broadcast_to(tiles[:, np.newaxis, np.newaxis], like.shape)


def _first_wrong(block: Block, found: Bytes, fine: npt.NDArray[np.bool_], must: str) -> None:
    wrong = np.flatnonzero(~fine)
    if len(wrong):
        have, want = found.flat[wrong[0]], block.values.flat[wrong[0]]
        raise Wrong(f"{block.named(int(wrong[0]))}: {have}, {must}, which is {want}")
