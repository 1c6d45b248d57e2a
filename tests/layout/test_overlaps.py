"""Regions, and layers of one group, share no byte; names of one memory do, and so may layers of different groups."""

from __future__ import annotations

from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import (
    PHYSICAL_ORDERS,
    Axis,
    CacheLayout,
    Context,
    Examined,
    Field,
    Heads,
    Layer,
    LayoutError,
    Region,
    check,
    fused,
    key_only,
    physical_strides,
    separated,
)

change = msgspec.structs.replace
ONE = Heads(0, 1, 1)


def layer(name: str, base_bytes: int = 0, fields: tuple[Field, ...] = separated(8, 4, 1, 8, 2)) -> Layer:
    """8 blocks of 4 tokens of 16 bytes, keys and then values: 1024 bytes."""
    return Layer(name, 0, 0, base_bytes, 8, 4, "bfloat16", ONE, fields)


def cache(*layers: Layer, length: int = 1 << 40) -> CacheLayout:
    return CacheLayout((Region(4096, length),), layers)


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (
            (Region(0, 4096), Region(64, 4096)),
            r"regions 0 and 1: addresses \[0, 4096\) and \[64, 4160\) of cpu overlap",
        ),
        ((Region(9000, 50), Region(100, 9000), Region(50, 50)), "regions 1 and 0: addresses .* and .*9050"),
        ((Region(100, 10, "cuda:0"), Region(8, 8), Region(109, 1, "cuda:0")), "regions 0 and 2: .* of cuda:0 overlap"),
        ((Region(100, 10), Region(100, 10)), "regions 0 and 1"),
    ],
)
def test_regions_that_overlap(regions: tuple[Region, ...], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check(CacheLayout(regions, ()))


def test_regions_that_are_apart() -> None:
    check(CacheLayout((Region(100, 10), Region(110, 10), Region(90, 10)), ()))
    check(CacheLayout((Region(100, 10, "cuda:0"), Region(100, 10, "cuda:1")), ()))
    check(CacheLayout((Region(0, 10), Region(0, 20)), ()))  # memory of no process


@pytest.mark.parametrize("base", [1, 64, 448, 512, 960, 1023])
def test_layers_of_one_group_that_overlap(base: int) -> None:
    with pytest.raises(LayoutError, match=r"layers a to b of group 0: two share the byte at offset [0-9]+ of region 0"):
        check(cache(layer("a"), layer("b", base)))


def test_layers_that_are_apart_or_one() -> None:
    check(cache(layer("a"), layer("b", 1024)))
    check(cache(layer("a"), layer("b")))
    check(cache(layer("a"), change(layer("b", 64), group=1)))
    check(CacheLayout((Region(4096, 4096), Region(8192, 4096)), (layer("a"), change(layer("b", 64), region=1))))


def test_names_of_one_memory_must_agree() -> None:
    two = Heads(0, 1, 2)
    with pytest.raises(LayoutError, match=r"layers a and b: one memory, but Heads\(start=0.*Heads\(start=1"):
        check(cache(change(layer("a"), heads=two), change(layer("b"), heads=Heads(1, 1, 2))))
    with pytest.raises(LayoutError, match=r"layers a and b: one memory, but .* in 8 blocks and .* in 7"):
        check(cache(layer("a"), change(layer("b"), num_blocks=7)))


def test_contexts_of_one_memory_are_two_memories() -> None:
    """The same bytes cannot be tokens of two ranks."""
    dealt = [change(layer(f"{rank}"), block_size=8, context=Context(rank, 2, 1)) for rank in range(2)]
    with pytest.raises(LayoutError, match="layers 0 to 1 of group 0: two share the byte at offset 0"):
        check(cache(*dealt))


def test_layers_among_one_another() -> None:
    """Keys of both, then values of both; then with strides that differ."""
    row = (Axis("token", 4, 1, 16), Axis("content", 16, 1, 1))
    fields = tuple(Field(name, i * 2048, 64, row, 16) for i, name in enumerate("kv"))
    check(cache(layer("a", 0, fields), layer("b", 512, fields)))
    with pytest.raises(LayoutError, match="layers a to b of group 0"):
        check(cache(layer("a", 0, fields), layer("b", 511, fields)))
    wider = tuple(change(field, block_stride_bytes=65) for field in fields)
    with pytest.raises(LayoutError, match=r"lie among one another, but differ in block_stride_bytes: \[64, 65\]"):
        check(cache(layer("a", 0, fields), layer("b", 600, wider)))


def pool(order: str, num_layers: int, num_heads: int) -> CacheLayout:
    shape = (8, num_heads, 16, 256)
    strides, layer_stride = physical_strides(order, shape, num_layers, 2)
    made = Layer("", 0, 0, 0, 8, 16, "x", Heads(0, num_heads, num_heads), fused(shape, strides, 128, 128, 2))
    return cache(*(change(made, name=f"{i}", base_bytes=i * layer_stride) for i in range(num_layers)))


@pytest.mark.parametrize("order", PHYSICAL_ORDERS)
def test_a_thousand_layers_of_one_tensor(order: str) -> None:
    whole = pool(order, 1000, 8)
    check(whole)
    moved = change(whole.layers[500], base_bytes=whole.layers[500].base_bytes + 1)
    with pytest.raises(LayoutError, match=r"two share the byte|ends at byte"):
        check(change(whole, layers=(*whole.layers[:500], moved, *whole.layers[501:])))


def test_what_looking_at_layers_among_one_another_may_cost() -> None:
    check(pool("BHLNC", 1000, 128))
    with pytest.raises(LayoutError, match=r"layers 0 to 1023 .*separate runs .*: 132096, the most allowed are 131072"):
        check(pool("BHLNC", 1024, 129))
    row = (Axis("token", 4, 1, 1024), Axis("content", 1024, 1, 1))
    planes = tuple(Field(name, i << 30, 4096, row, 1024) for i, name in enumerate("kv"))
    check(cache(*(layer(f"{i}", i * (8 * 4096 + 3), planes) for i in range(100))))
    with pytest.raises(LayoutError, match="layers 0 to 999 of group 0: runs overlap in too many ways"):
        check(cache(*(layer(f"{i}", i * (8 * 4096 + 3), planes) for i in range(1000))))


def test_what_layouts_that_come_together_may_cost() -> None:
    def tall(num_tokens: int, gap: int = 8) -> CacheLayout:
        row = (Axis("token", num_tokens, 1, gap), Axis("content", 4, 1, 1))
        fields = (Field("latent", 0, 1 << 40, row, 4),)
        return cache(Layer("a", 0, 0, 0, 1, num_tokens, "x", ONE, fields), length=1 << 50)

    together = Examined()
    for _ in range(10):
        check(tall(1 << 16), together)
    check(tall(1 << 16, 9), together)
    with pytest.raises(LayoutError, match=r"layer a: separate runs in a block.*131073, the most allowed are 131072"):
        check(tall(1), together)
    check(tall(1))


def test_ranks_of_a_context_are_alike() -> None:
    together = Examined()
    for rank in range(1000):
        made = Layer("a", 0, 0, 0, 8, 4000, "x", ONE, key_only(4, 2), Context(rank, 1000, 4))
        check(cache(made), together)


def addresses(one: Layer) -> set[int]:
    found = np.zeros(1, np.int64)
    (field,) = one.fields
    for axis in field.axes:
        found = np.add.outer(found, np.arange(axis.size) * axis.stride_bytes).ravel()
    blocks = np.arange(one.num_blocks) * field.block_stride_bytes
    return set((one.base_bytes + field.base_bytes + np.add.outer(blocks, found)).ravel().tolist())


@settings(deadline=None, max_examples=400)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 8)), min_size=2, max_size=3
    ),
    st.integers(4, 16),
)
def test_shared_bytes_of_layers_are_found_exactly(parts: list[tuple[int, int, int, int]], stride: int) -> None:
    """Against every address of every block, one by one."""
    layers = [
        Layer(
            f"{i}",
            0,
            0,
            base,
            num_blocks,
            2,
            "x",
            ONE,
            (Field("k", 0, stride, (Axis("token", 2, 1, gap), Axis("content", size, 1, 1)), size),),
        )
        for i, (base, num_blocks, size, gap) in enumerate(parts)
    ]
    for one in layers:
        if len(addresses(one)) < one.num_blocks * 2 * one.fields[0].content_bytes:
            with pytest.raises(LayoutError):
                check(cache(one))
            return
        check(cache(one))
    apart = {(one.base_bytes, one.fields): one for one in layers}
    agree = all(apart[one.base_bytes, one.fields].num_blocks == one.num_blocks for one in layers)
    clash = any(addresses(a) & addresses(b) for a, b in combinations(apart.values(), 2))
    if clash or not agree:
        with pytest.raises(LayoutError):
            check(cache(*layers))
    else:
        check(cache(*layers))
