"""What a request, or a peer's layout, would cost is refused by name before it is paid."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from golden import tables

from kvferry.layout import (
    Axis,
    CacheLayout,
    Examined,
    Field,
    Heads,
    Layer,
    Region,
    cpu_tiles,
    fused,
    key_only,
    physical_strides,
)
from kvferry.plan import MAX_DESCRIPTORS, BlockTable, PairPlan, Refusal, block_tables, compile
from kvferry.plan.boxes import Digit, pair
from kvferry.topology import Share, ShareLayer

HEADS, HEAD_SIZE, LAYERS = 8, 128, 32


def cache(fields: tuple[Field, ...], block_size: int, num_layers: int = LAYERS, heads: int = HEADS) -> CacheLayout:
    layers = [Layer(f"{i}", 0, i, 0, 512, block_size, "x", Heads(0, heads, heads), fields) for i in range(num_layers)]
    return CacheLayout((Region(0, 1 << 40),) * num_layers, tuple(layers))


def whole(consumer: CacheLayout, producer: CacheLayout) -> PairPlan:
    parts = tuple(ShareLayer(one.name, 0, one.heads.count) for one in consumer.layers)
    return compile(consumer, producer, Share(0, parts))


def blocks(order: str, block_size: int) -> tuple[Field, ...]:
    shape = (512, HEADS, block_size, 2 * HEAD_SIZE)
    return fused(shape, physical_strides(order, shape, 1, 2)[0], HEAD_SIZE, HEAD_SIZE, 2)


def tiles(block_size: int) -> tuple[Field, ...]:
    shape = (512, HEADS, block_size, 2 * HEAD_SIZE)
    return cpu_tiles(shape, physical_strides("LBHNC", shape, 1, 2)[0], HEAD_SIZE, 2)


class TestTransposedKeys:
    """A producer with vLLM's CPU layout, a consumer with rows: the keys have 2 bytes in a row in common. A token takes,
    of each layer and head, 128 descriptors for its keys and one for its values."""

    pair = whole(cache(blocks("LBNHC", 128), 128), cache(tiles(128), 128))
    per_token = LAYERS * HEADS * (HEAD_SIZE + 1)

    def bind(self, end: int) -> int:
        ids = list(range(-(-end // 128)))
        return self.pair.bind(tables([ids]), tables([ids]), 0, end).num_descriptors

    def test_short_prompts_go(self) -> None:
        assert self.bind(20) == 20 * self.per_token

    @pytest.mark.parametrize("end", [128, 32768])
    def test_long_ones_are_refused_with_what_would_help(self, end: int) -> None:
        text = (
            f"layer 0: tokens 0 to {end}: {end * self.per_token} descriptors, the most allowed are {MAX_DESCRIPTORS}; "
            "bytes: consumer has [token 128, head 8, content 256] in runs of 256 bytes, "
            "producer has [head 8, content 128, token 128, content 2] in runs of 32768 bytes "
            "(they have 2 bytes in a row in common; fewer descriptors need the same order of axes and the same block "
            "size on both sides (see kvferry plan), or shorter prompts)"
        )
        with pytest.raises(Refusal, match=re.escape(text)):
            self.bind(end)
        assert self.bind(20) == 20 * self.per_token


def test_layouts_that_are_alike_go_whatever_the_length() -> None:
    same = whole(cache(tiles(128), 128), cache(tiles(128), 128))
    ids = list(range(512))
    assert same.bind(tables([ids[::-1]]), tables([ids]), 0, 512 * 128).num_descriptors == LAYERS * 512


def scattered(num_layers: int) -> CacheLayout:
    """Every byte apart: 8192 of each of 8 heads of a token."""
    axes = (Axis("token", 1, 1, 1 << 20), Axis("head", 8, 1, 1 << 16), Axis("content", 8192, 1, 2))
    return cache((Field("latent", 0, 1 << 20, axes, 8192),), 1, num_layers)


def test_a_pair_that_no_request_could_use_is_refused_at_the_handshake() -> None:
    axes = (Axis("token", 1, 1, 1 << 16), Axis("head", 8, 1, 8192), Axis("content", 8192, 1, 1))

    def dense(num_layers: int) -> CacheLayout:
        return cache((Field("latent", 0, 1 << 16, axes, 8192),), 1, num_layers)

    most = MAX_DESCRIPTORS // (16 * 8 * 8192)
    whole(dense(most), scattered(most))
    text = "layer 0: any 16 tokens: 5242880 descriptors, the most allowed are 4194304; bytes: consumer has"
    with pytest.raises(Refusal, match=re.escape(text)):
        whole(dense(most + 1), scattered(most + 1))


def test_the_limit_counts_neighbours_as_one() -> None:
    """A million blocks of one token: 8 layers of them are too many, unless they are in order."""
    rows = cache(key_only(1, 2), 1, 8, heads=1)
    wide = CacheLayout(rows.regions, tuple(msgspec.structs.replace(one, num_blocks=1 << 20) for one in rows.layers))
    both, ids = whole(wide, wide), np.arange(1 << 20)
    assert both.bind([BlockTable(ids)], [BlockTable(ids)], 0, 1 << 20).num_descriptors == 8
    with pytest.raises(Refusal, match=r"layer 0: tokens 0 to 1048576: 8388608 descriptors"):
        both.bind([BlockTable(ids[::-1])], [BlockTable(ids)], 0, 1 << 20)


def test_coordinates_without_common_digits_are_not_listed_by_the_million() -> None:
    mine, theirs = (Digit(2, 1), Digit(3 << 20, 2)), (Digit(3, 1), Digit(2 << 20, 3))
    with pytest.raises(Refusal, match="6291456 coordinates without a common order, to be listed one by one: the most"):
        pair(mine, theirs, 0, 0, 6 << 20)


def test_patterns_that_cross_are_bounded() -> None:
    """Dense blocks whose heads and content alternate, cut by factors that have none in common."""

    def alternating(first: int, second: int) -> CacheLayout:
        axes = (
            Axis("token", 1, 1, 0),
            Axis("content", first, 1, 1),
            Axis("head", first, 1, first),
            Axis("content", second, first, first * first),
            Axis("head", second, first, first * first * second),
        )
        fields = (Field("latent", 0, first * first * second * second, axes, first * second),)
        return cache(fields, 1, 1, heads=first * second)

    whole(alternating(4, 9), alternating(9, 4))
    with pytest.raises(Refusal, match=r"[0-9]+ separate patterns of bytes in common: the most allowed are 16384"):
        whole(alternating(64, 81), alternating(81, 64))


def test_a_peers_layouts_share_what_looking_at_them_may_cost() -> None:
    """As of an engine with many workers, each of which alone would do."""

    def theirs(gap: int) -> CacheLayout:
        axes = (Axis("token", 1, 1, 1 << 20), Axis("head", 8, 1, 1 << 17), Axis("content", 8192, 1, gap))
        return cache((Field("latent", 0, 1 << 20, axes, 8192),), 1, 1)

    mine, share = scattered(1), Share(0, (ShareLayer("0", 0, 8),))
    examined = Examined(), Examined()
    compile(mine, theirs(2), share, examined=examined)
    compile(mine, theirs(3), share, examined=examined)
    with pytest.raises(
        Refusal, match=r"producer has a wrong one, layer 0: separate runs in a block, .*: 196608, the most"
    ):
        compile(mine, theirs(4), share, examined=examined)
    compile(mine, theirs(4), share)


def test_compiling_can_be_given_up() -> None:
    class GivenUp(Exception):
        pass

    def tick() -> None:
        raise GivenUp

    mine = cache(key_only(4, 2), 4, 2, heads=1)
    with pytest.raises(GivenUp):
        compile(mine, mine, Share(0, (ShareLayer("0", 0, 1),)), tick=tick)


class TestTables:
    """Numbers from messages, before anything is made of them. Blocks of 4 tokens, 512 of them."""

    pair = whole(cache(key_only(4, 2), 4, 1, heads=1), cache(key_only(4, 2), 4, 1, heads=1))

    @pytest.mark.parametrize("end", [9, 2**31 - 1, 2**62, 2**70])
    def test_tokens_beyond_the_table(self, end: int) -> None:
        text = f"group 0: length of the block table: consumer has 2 blocks, {-(-end // 4)} needed"
        with pytest.raises(Refusal, match=text):
            self.pair.bind(tables([[1, 2]]), tables([[1, 2]]), end - 1, end)

    def test_all_of_the_table(self) -> None:
        assert self.pair.bind(tables([[1, 2]]), tables([[1, 2]]), 0, 8).num_bytes == 16

    @pytest.mark.parametrize("bad", [2**62, 2**63, 2**64 - 1, 2**70, -2, -(2**70), 1.5, None, "1"])
    @pytest.mark.parametrize("others", [[], [1, -1]])
    def test_what_is_no_block_id(self, bad: object, others: list[int]) -> None:
        ids = [bad, *others]
        for side in ("consumer", "producer"):
            with pytest.raises(Refusal, match=rf"group 1: block id: .*{side} has .*id "):
                block_tables(side, [[0], ids])  # type: ignore[list-item]

    def test_block_tables(self) -> None:
        first, second, third = block_tables("consumer", [[3, -1], (), np.array([5], np.int32)])
        assert [one.block_ids.tolist() for one in (first, second, third)] == [[3, -1], [], [5]]
        assert {one.block_ids.dtype for one in (first, second, third)} == {np.dtype(np.int64)}

    def test_ids_that_are_not_arrays_yet(self) -> None:
        raw = [BlockTable([2**63])]  # type: ignore[arg-type]
        with pytest.raises(Refusal, match=r"group 0: block id: consumer has id 9223372036854775808"):
            self.pair.bind(raw, tables([[1]]), 0, 4)
        with pytest.raises(Refusal, match=r"group 0: block id: producer has id 9223372036854775808"):
            self.pair.bind(tables([[1]]), raw, 0, 4)
