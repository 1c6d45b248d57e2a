"""Sound layouts pass; each kind of unsound one is refused with its layer, field and values."""

from __future__ import annotations

from typing import Any

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
    Field,
    Heads,
    Layer,
    LayoutError,
    Refusal,
    Region,
    check,
    cpu_tiles,
    fused,
    interleaved,
    key_only,
    opaque_tiles,
    physical_strides,
    separated,
    with_kernel_blocks,
)

change = msgspec.structs.replace
small = st.integers(0, 9)


def layer(fields: tuple[Field, ...], **changes: Any) -> Layer:
    made = Layer("layers.3", 0, 0, 0, 10, 16, "bfloat16", Heads(0, 2, 2), fields)
    return change(made, **changes)


def cache(*layers: Layer, length: int = 10240) -> CacheLayout:
    return CacheLayout((Region(4096, length),), layers)


SHAPE = (10, 2, 16, 16)
STRIDES = physical_strides("LBHNC", SHAPE, 1, 2)[0]


@pytest.mark.parametrize(
    "fields",
    [
        separated(10, 16, 2, 8, 2),
        separated(10, 16, 2, 8, 2, head_major=True),
        interleaved(10, 16, 2, 8, 2),
        interleaved(10, 16, 2, 8, 2, head_major=True),
        *(fused(SHAPE, physical_strides(order, SHAPE, 1, 2)[0], 8, 8, 2) for order in PHYSICAL_ORDERS),
        cpu_tiles(SHAPE, STRIDES, 8, 2),
        opaque_tiles(SHAPE, STRIDES, "amx"),
        with_kernel_blocks(cpu_tiles((40, 2, 4, 16), physical_strides("LBHNC", (40, 2, 4, 16), 1, 2)[0], 8, 2), 4, 16),
        with_kernel_blocks(separated(40, 4, 2, 8, 2), 4, 16),
    ],
)
def test_layouts_in_use_fill_their_region(fields: tuple[Field, ...]) -> None:
    check(cache(layer(fields)))
    with pytest.raises(LayoutError, match=r"layer layers\.3: ends at byte 10240 of region 0, which has 10239"):
        check(cache(layer(fields), length=10239))


@pytest.mark.parametrize("order", PHYSICAL_ORDERS)
def test_layers_of_one_tensor(order: str) -> None:
    strides, layer_stride = physical_strides(order, SHAPE, 3, 2)
    fields = fused(SHAPE, strides, 8, 8, 2)
    layers = [layer(fields, name=f"{i}", base_bytes=i * layer_stride) for i in range(3)]
    check(cache(*layers, length=3 * 10240))


def test_padded_pages_and_no_layers() -> None:
    check(cache(layer(fused(SHAPE, (1152, *STRIDES[1:]), 8, 8, 2)), length=9 * 1152 + 1024))
    check(CacheLayout((), ()))


@pytest.mark.parametrize(
    ("tokens", "opaque", "context"),
    [
        ((Axis("token", 16, 1, 4),), None, Context(1, 2, 1)),
        ((Axis("token", 16, 1, 4),), None, Context(3, 4, 16)),
        ((Axis("token", 4, 4, 16), Axis("token", 4, 1, 4)), None, Context(1, 2, 2)),
        ((Axis("token", 4, 4, 16), Axis("token", 4, 1, 4)), None, Context(1, 2, 8)),
        ((Axis("token", 4, 4, 16),), "x", Context(1, 2, 8)),
        ((Axis("token", 4, 4, 16),), "x", Context(1, 2, 2)),
        ((Axis("token", 16, 1, 4),), None, Context(0, 1, 7)),
    ],
)
def test_contexts(tokens: tuple[Axis, ...], opaque: str | None, context: Context) -> None:
    """16 tokens of a block are this rank's, in kernel blocks or tiles of 4."""
    content = 16 if opaque else 4
    field = Field("latent", 0, 64, (*tokens, Axis("content", content, 1, 1)), content, opaque)
    check(cache(layer((field,), heads=Heads(0, 1, 1), block_size=16 * context.size, context=context)))


KEY = key_only(16, 4)[0]
TOKENS, CONTENT = KEY.axes
MLA = Heads(0, 1, 1)


def with_axes(*axes: Axis, **changes: Any) -> Layer:
    return layer((change(KEY, axes=axes, **changes),), heads=MLA)


@pytest.mark.parametrize(
    ("unsound", "words"),
    [
        (with_axes(change(TOKENS, size=15), CONTENT), "layers.3, field latent: token axes cover 15, the layer has 16"),
        (with_axes(change(TOKENS, step=2), CONTENT), "token axis has step 2, the axes inside it cover 1"),
        (with_axes(TOKENS, TOKENS, CONTENT), "token axis has step 1, the axes inside it cover 16"),
        (with_axes(TOKENS), "content axes cover 1, the layer has 4"),
        (with_axes(TOKENS, CONTENT, content_bytes=8), "content axes cover 4, the layer has 8"),
        (with_axes(TOKENS, CONTENT, Axis("head", 2, 1, 64)), "head axes cover 2, the layer has 1"),
        (with_axes(TOKENS, CONTENT, Axis("layer", 1, 1, 1)), "axis 'layer' is none of"),  # type: ignore[arg-type]
        (with_axes(change(TOKENS, stride_bytes=-4), CONTENT), "token axis stride -4"),
        (with_axes(change(TOKENS, size=0), CONTENT), "token axis size 0"),
        (with_axes(change(TOKENS, stride_bytes=1 << 62), CONTENT), "token axis stride"),
        (with_axes(change(TOKENS, stride_bytes=2), CONTENT), "share the byte at offset 2 of the layer"),
        (with_axes(change(TOKENS, stride_bytes=0), CONTENT), "share the byte at offset 0 of the layer"),
        (
            with_axes(TOKENS, CONTENT, block_stride_bytes=60),
            "run of 64 bytes in a block, .* 60 bytes apart",
        ),
        (with_axes(TOKENS, CONTENT, block_stride_bytes=0), "block_stride_bytes 0 is not in"),
        (with_axes(change(TOKENS, stride_bytes=8), CONTENT, block_stride_bytes=64), "share the byte at offset 64"),
        (with_axes(TOKENS, CONTENT, base_bytes=-1), "field latent: base_bytes -1"),
        (with_axes(TOKENS, CONTENT, opaque=""), "opaque: the tag is empty"),
        (with_axes(CONTENT, opaque="x", block_stride_bytes=4), "field latent: opaque: no token axis"),
        (with_axes(Axis("token", 1, 16, 4), CONTENT), "token axes cover 1, the layer has 16"),
        (with_axes(Axis("token", 1, 8, 4), CONTENT, opaque="x"), "token axes cover 8, the layer has 16"),
        (layer((KEY, KEY), heads=MLA), "layers.3: field latent: appears twice"),
        (layer((KEY, change(KEY, name="v")), heads=MLA), "share the byte at offset 0"),
        (layer((KEY, change(KEY, name="v", base_bytes=639)), heads=MLA), "share the byte at offset 639"),
        (layer((KEY, change(KEY, name="v", block_stride_bytes=65)), heads=MLA), r"block_stride_bytes: \[64, 65\]"),
        (layer((), heads=MLA), "fields: none"),
        (layer((KEY,), heads=MLA, context=Context(0, 0)), "layers.3: context.size 0"),
        (layer((KEY,), heads=MLA, context=Context(0, 2, 0)), "layers.3: context.interleave 0"),
        (layer((KEY,), heads=MLA, context=Context(2, 2)), r"layers.3: context.rank 2 is not in \[0, 1\]"),
        (layer((KEY,), heads=MLA, context=Context(-1, 2)), "layers.3: context.rank -1"),
        (layer((KEY,), heads=MLA, context=Context(0, 2, 1 << 60)), "context.interleave"),
        (
            layer((KEY,), heads=MLA, context=Context(0, 2, 16)),
            "block_size 16 is not a multiple of context.size 2 times context.interleave 16",
        ),
        (
            layer((KEY,), heads=MLA, context=Context(0, 2, 8)),
            "field latent: token axes cover 16, the layer has 8",
        ),
        (
            layer(
                (change(KEY, axes=(Axis("token", 2, 3, 12), change(TOKENS, size=3), CONTENT)),),
                heads=MLA,
                block_size=12,
                context=Context(1, 2, 2),
            ),
            r"field latent: token axes of steps \[1, 3\] cannot be cut at context.interleave 2",
        ),
        (
            layer(
                (change(KEY, axes=(Axis("token", 2, 6, 8), CONTENT), opaque="x"),),
                heads=MLA,
                block_size=48,
                context=Context(1, 4, 4),
            ),
            r"field latent: token axes of steps \[6\] cannot be cut at context.interleave 4",
        ),
        (layer((KEY,), heads=MLA, region=1), "region 1 of 1"),
        (layer((KEY,), heads=MLA, region=-1), "region -1 of 1"),
        (layer((KEY,), heads=MLA, num_blocks=0), "num_blocks 0"),
        (layer((KEY,), heads=MLA, group=-1), "group -1"),
        (layer((KEY,), heads=MLA, base_bytes=-1), "layers.3: base_bytes -1"),
        (layer((KEY,), heads=Heads(1, 1, 1)), "heads 1 to 2 of 1"),
        (layer((KEY,), heads=Heads(0, 0, 1)), "heads.count 0"),
        (layer((KEY,), heads=MLA, block_size=1 << 60), "block_size"),
    ],
)
def test_unsound_layers_are_named(unsound: Layer, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check(cache(unsound))


def test_layers_that_disagree() -> None:
    one = layer((KEY,), heads=MLA)
    with pytest.raises(LayoutError, match=r"layer name layers\.3: appears twice"):
        check(cache(one, one))
    other = layer(key_only(8, 4), heads=MLA, name="other", block_size=8)
    with pytest.raises(LayoutError, match=r"layer other: block_size 8, but 16 in layer layers\.3 of the same group 0"):
        check(cache(one, other))
    check(cache(one, change(other, group=1)))


def test_a_layout_that_would_take_for_ever_to_look_at() -> None:
    axes = (Axis("token", 16, 1, 1 << 40), Axis("content", 1 << 30, 1, 2))
    huge = layer((Field("latent", 0, 1 << 50, axes, 1 << 30),), heads=MLA, num_blocks=1)
    with pytest.raises(LayoutError, match="separate runs"):
        check(cache(huge, length=1 << 55))


def scattered(name: str, num_tokens: int, gap: int = 8) -> Layer:
    """A layer whose tokens are num_tokens separate runs in a block."""
    axes = (Axis("token", num_tokens, 1, gap), CONTENT)
    field = Field("latent", 0, 1 << 40, axes, 4)
    return layer((field,), heads=MLA, name=name, num_blocks=2, block_size=num_tokens, group=num_tokens)


def test_the_runs_of_all_geometries_together_are_bounded() -> None:
    most = 1 << 17
    check(cache(scattered("one", most), length=1 << 50))
    with pytest.raises(LayoutError, match=r"layer one: separate runs in a block.*131073, the most allowed are 131072"):
        check(cache(scattered("one", most + 1), length=1 << 50))
    pair = scattered("one", most // 2), scattered("two", most // 2 + 1)
    with pytest.raises(LayoutError, match=r"layer two: separate runs in a block.*131073"):
        check(cache(*pair, length=1 << 50))


def test_layers_that_are_alike_count_once() -> None:
    alike = [scattered(f"{i}", 1 << 16) for i in range(1000)]
    check(cache(*alike, length=1 << 50))


def test_layers_that_are_alike_are_each_held_to_their_region() -> None:
    one = layer((KEY,), heads=MLA)
    beyond = change(one, name="beyond", base_bytes=9601)
    with pytest.raises(LayoutError, match="layer beyond: ends at byte 10241 of region 0, which has 10240"):
        check(cache(one, beyond))


def test_the_same_fields_under_other_heads_are_looked_at_again() -> None:
    one = layer((KEY,), heads=MLA)
    with pytest.raises(LayoutError, match="layer two, field latent: head axes cover 1, the layer has 2"):
        check(cache(one, change(one, name="two", heads=Heads(0, 2, 2))))


UNIT = Axis("token", 1, 1, 0)


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        (CacheLayout((Region(0, 1),) * 4097, ()), "regions: 4097, the most allowed are 4096"),
        (cache(*(layer((KEY,), heads=MLA, name=f"{i}") for i in range(4097))), "layers: 4097, the most allowed"),
        (cache(layer(tuple(change(KEY, name=f"{i}") for i in range(17)), heads=MLA)), "fields: 17, the most allowed"),
        (cache(with_axes(TOKENS, CONTENT, *(UNIT,) * 15)), "field latent: axes: 17, the most allowed are 16"),
        (cache(*(scattered(f"{i}", 2, 8 + i) for i in range(129)), length=1 << 50), "different geometries.*129"),
        (CacheLayout((Region(1 << 63, 1),), ()), "region 0: address"),
        (CacheLayout((Region(-1, 1),), ()), "region 0: address -1"),
        (CacheLayout((Region(0, 1 << 62),), ()), "region 0: length_bytes"),
        (cache(layer((KEY,), heads=Heads(0, 1, 1 << 63))), "heads.total"),
        (cache(with_axes(TOKENS, CONTENT, content_bytes=1 << 63)), "content_bytes"),
    ],
)
def test_what_would_be_expensive_or_senseless_is_refused(hostile: CacheLayout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check(hostile)


def test_runs_that_cross_in_many_ways_are_refused() -> None:
    # Each run overlaps, modulo the block stride, nearly every other one.
    axes = (Axis("token", 4096, 1, (1 << 20) + 1), Axis("content", 1 << 19, 1, 1))
    crossing = layer((Field("latent", 0, 1 << 20, axes, 1 << 19),), heads=MLA, num_blocks=1 << 20, block_size=4096)
    with pytest.raises(LayoutError, match="overlap in too many ways"):
        check(cache(crossing, length=1 << 55))


TALL = (100, 128, 128, 256)


@pytest.mark.parametrize(
    ("fields", "block_size", "num_heads"),
    [
        (separated(100, 128, 8, 128, 2), 128, 8),
        (cpu_tiles(TALL, physical_strides("LBHNC", TALL, 1, 2)[0], 128, 2), 128, 128),
        (key_only(64, 1152), 64, 1),
        *((fused(TALL, physical_strides(o, TALL, 1, 2)[0], 128, 128, 2), 128, 128) for o in PHYSICAL_ORDERS),
    ],
)
def test_a_thousand_layers_of_a_real_geometry_pass(fields: tuple[Field, ...], block_size: int, num_heads: int) -> None:
    heads = Heads(0, num_heads, num_heads)
    check(
        cache(
            *(
                layer(fields, name=f"{i}", num_blocks=100, block_size=block_size, heads=heads, base_bytes=i << 40)
                for i in range(1000)
            ),
            length=1 << 52,
        )
    )


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3), small, small), min_size=1, max_size=2),
    st.integers(1, 24),
    st.integers(1, 4),
)
def test_shared_bytes_are_found_exactly(parts: list[tuple[int, int, int, int]], stride: int, num_blocks: int) -> None:
    """Against every address of every block, one by one."""
    fields = tuple(
        Field(f"{i}", base, stride, (Axis("token", 3, 1, step), Axis("content", size, 1, gap)), size)
        for i, (base, size, step, gap) in enumerate(parts)
    )
    addresses = np.concatenate(
        [
            (field.base_bytes + np.add.outer(np.arange(num_blocks) * stride, inside)).ravel()
            for field in fields
            for inside in [np.add.outer(*(np.arange(a.size) * a.stride_bytes for a in field.axes)).ravel()]
        ]
    )
    layout = cache(layer(fields, heads=MLA, block_size=3, num_blocks=num_blocks), length=1000)
    if len(np.unique(addresses)) == len(addresses):
        check(layout)
    else:
        with pytest.raises(LayoutError):
            check(layout)


def test_refusals_carry_both_values() -> None:
    refusal = Refusal("layer a: dtype", "float16", "bfloat16", "set kv_cache_dtype")
    assert (refusal.field, refusal.consumer, refusal.producer) == ("layer a: dtype", "float16", "bfloat16")
    assert str(refusal) == "layer a: dtype: consumer has float16, producer has bfloat16 (set kv_cache_dtype)"


def test_layouts_travel_in_messages() -> None:
    layout = cache(layer(cpu_tiles(SHAPE, STRIDES, 8, 2)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout) == layout
