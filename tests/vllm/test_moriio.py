"""MoRIIO's functions: its numbers and rules, and the same bytes as kvferry's planner."""

from __future__ import annotations

from itertools import permutations
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_layout
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.layout import (
    CacheLayout,
    Field,
    Heads,
    Layer,
    Region,
    fused,
    interleaved,
    key_only,
    physical_strides,
    separated,
    with_kernel_blocks,
)
from kvferry.plan import block_tables, compile
from kvferry.topology import Share, ShareLayer
from kvferry.vllm.moriio import (
    LayerTransferGeometry,
    MoRIIOTransferAck,
    build_layer_to_spec,
    compute_block_transfer_offsets,
    get_layer_transfer_geometry,
    get_moriio_expected_ack_count,
    get_moriio_remote_tp_rank,
    is_mla_cache_layer,
    iter_layer_registration_regions,
    merge_contiguous_offsets,
    read_transfer_ack,
    resolve_moriio_transfer_ack,
    validate_moriio_heterogeneous_tp_kv_heads,
)

BF16 = torch.bfloat16


def full(block_size: int = 4, num_kv_heads: int = 2, head_size: int = 3, dtype: torch.dtype = BF16) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)


def latent(block_size: int = 4, head_size: int = 3, dtype: torch.dtype = BF16) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=head_size, dtype=dtype)


SPECS = {"separated": full(), "interleaved": full(), "indexer": latent()}
SHAPES = {"separated": (2, 8, 4, 2, 3), "interleaved": (8, 2, 4, 2, 3), "indexer": (8, 4, 3)}


def cache(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CACHES = {name: cache(*shape) for name, shape in SHAPES.items()}


# Geometry: 8 local and 16 remote blocks of 4 tokens, 2 KV heads of 3 elements, bf16.

GEOMETRIES = {
    "separated": LayerTransferGeometry(8, 4, 48, 12, 24, 8 * 24, 16 * 24, 2, 1, True),
    "interleaved": LayerTransferGeometry(8, 4, 48, 12, 48, 24, 24, 2, 2, False),
    "indexer": LayerTransferGeometry(8, 4, 24, 6, 12, None, None, 1, 1, False),
}
OFFSETS = {
    "separated": ([48, 144, 432, 528], [192, 240, 960, 1008], [48, 48, 48, 48]),
    "interleaved": ([96, 288, 144, 336], [384, 480, 432, 528], [48, 48, 48, 48]),
    "indexer": ([24, 72], [96, 120], [24, 24]),
}
"""Of the local blocks 1 and 3 and the remote blocks 4 and 5, before neighbours become one: keys, then values."""


def as_it_is(local: list[int], remote: list[int], sizes: list[int]) -> tuple[list[int], list[int], list[int]]:
    return local, remote, sizes


@pytest.mark.parametrize("name", SHAPES)
def test_geometry_and_offsets(name: str) -> None:
    assert get_layer_transfer_geometry(name, CACHES[name], SPECS, 16) == GEOMETRIES[name]
    arguments = (name, CACHES[name], SPECS, [1, 3], [4, 5], 16)
    assert compute_block_transfer_offsets(*arguments, merge_fn=as_it_is) == OFFSETS[name]
    assert compute_block_transfer_offsets(*arguments) == merge_contiguous_offsets(*OFFSETS[name])


@pytest.mark.parametrize("of", [get_layer_transfer_geometry, moriio_layout.get_layer_transfer_geometry])
@pytest.mark.parametrize("given", [(), (None,), (0,)])
def test_the_remote_stride_is_the_local_one_where_no_number_of_blocks_is_given(of: Any, given: tuple[Any, ...]) -> None:
    geometry = of("separated", CACHES["separated"], SPECS, *given)
    assert geometry.local_kv_stride == geometry.remote_kv_stride == 8 * 24


@pytest.mark.parametrize("of", [compute_block_transfer_offsets, moriio_layout.compute_block_transfer_offsets])
def test_of_no_remote_blocks_nothing_is_moved(of: Any) -> None:
    assert of("separated", CACHES["separated"], SPECS, [], [], 0) == ([], [], [])


@pytest.mark.parametrize("order", list(permutations(SHAPES)))
def test_mixed_layers_have_their_own_answers_in_any_order(order: tuple[str, ...]) -> None:
    groups = [KVCacheGroupSpec([name], SPECS[name]) for name in order]
    specs = build_layer_to_spec(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))
    assert list(specs) == list(order)
    for name in order:
        assert get_layer_transfer_geometry(name, CACHES[name], specs, 16) == GEOMETRIES[name]
        offsets = compute_block_transfer_offsets(name, CACHES[name], specs, [1, 3], [4, 5], 16, as_it_is)
        assert offsets == OFFSETS[name]


def test_regions_to_register() -> None:
    found = {
        name: [
            (tensor.data_ptr() - CACHES[name].data_ptr(), length_bytes)
            for tensor, length_bytes in iter_layer_registration_regions(name, CACHES[name], SPECS)
        ]
        for name in SHAPES
    }
    assert found == {"separated": [(0, 384), (384, 384)], "interleaved": [(0, 768)], "indexer": [(0, 192)]}


def test_padding_is_neither_moved_nor_registered_at_the_end() -> None:
    padded = cache(8 * 60).as_strided((8, 2, 4, 2, 3), (60, 24, 6, 3, 1))  # 60 elements a page, 48 of them live
    geometry = get_layer_transfer_geometry("interleaved", padded, SPECS, 16)
    assert geometry == GEOMETRIES["interleaved"]._replace(block_stride=60)
    offsets = compute_block_transfer_offsets("interleaved", padded, SPECS, [1, 2], [4, 5], 16)
    assert offsets == ([120, 240], [480, 600], [96, 96])
    ((_, length_bytes),) = iter_layer_registration_regions("interleaved", padded, SPECS)
    assert length_bytes == 7 * 120 + 96


def test_bytes_count_not_the_order_of_a_tensors_axes() -> None:
    separated_in_memory = cache(2, 8, 4, 2, 3).transpose(0, 1)
    assert get_layer_transfer_geometry("separated", separated_in_memory, SPECS, 16) == GEOMETRIES["separated"]
    regions = iter_layer_registration_regions("separated", separated_in_memory, SPECS)
    assert [tensor.data_ptr() - regions[0][0].data_ptr() for tensor, _ in regions] == [0, 384]
    interleaved_in_memory = cache(8, 2, 4, 2, 3).transpose(0, 1)
    assert get_layer_transfer_geometry("interleaved", interleaved_in_memory, SPECS, 16) == GEOMETRIES["interleaved"]


def test_heads_before_tokens() -> None:
    geometry = get_layer_transfer_geometry("separated", cache(2, 8, 2, 4, 3), SPECS, 16)
    assert geometry == GEOMETRIES["separated"]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("separated", (2, 16, 2, 4, 3), LayerTransferGeometry(8, 4, 96, 24, 48, 384, 768, 2, 1, True)),
        ("interleaved", (16, 2, 2, 4, 3), LayerTransferGeometry(8, 4, 192, 48, 96, None, None, 1, 1, False)),
        ("indexer", (16, 2, 3), GEOMETRIES["indexer"]),
    ],
)
def test_kernel_blocks_smaller_than_a_block(name: str, shape: tuple[int, ...], expected: LayerTransferGeometry) -> None:
    """Two rows of two tokens make a block. With 4 heads, so that 2 tokens and 4 heads can be told apart."""
    specs = {**SPECS, "separated": full(num_kv_heads=4), "interleaved": full(num_kv_heads=4)}
    assert get_layer_transfer_geometry(name, cache(*shape), specs, 16) == expected


def test_vllms_view_of_a_layer() -> None:
    """[B, H, N, C] with keys and values of a token side by side, in either order of heads and tokens."""
    expected = LayerTransferGeometry(8, 4, 96, 24, 48, None, None, 1, 1, False)
    heads_first, tokens_first = cache(8, 2, 4, 6), cache(8, 4, 2, 6).transpose(1, 2)
    for view in (heads_first, tokens_first):
        assert get_layer_transfer_geometry("separated", view, SPECS, 16) == expected
    assert get_layer_transfer_geometry("indexer", cache(8, 1, 4, 3), SPECS, 16) == GEOMETRIES["indexer"]


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("separated", cache(2, 8, 2, 2, 3), "ambiguous.*2BNHD and as 2BHND"),  # 2 heads, kernel blocks of 2 tokens
        ("separated", cache(2, 2, 4, 2, 3), "ambiguous.*2BNHD and as B2NHD"),
        ("separated", cache(2, 8, 3, 2, 3), "nothing that fits"),
        ("separated", cache(2, 8, 4, 2, 5), "nothing that fits"),
        ("separated", cache(8, 4, 3), "3 axes"),
        ("separated", cache(8, 4, 2, 6), "heads: the tensor has 4, the spec 2"),
        ("separated", cache(8, 2, 4, 8), "the tensor has 16, the spec 12"),
        ("separated", cache(8, 2, 3, 6), "3 does not divide block_size 4"),
        ("separated", cache(2, 0, 4, 2, 3), "nothing in it"),
        ("separated", cache(2, 8, 4, 6).transpose(0, 1), "2 runs with gaps"),  # heads outside blocks
        ("indexer", cache(2, 8, 4, 2, 3), "5 axes"),
        ("indexer", cache(7, 2, 3), "7 rows of 2 tokens"),
        ("indexer", cache(8, 4, 4), "the tensor has 8, the spec 6"),
    ],
)
def test_what_cannot_be_read_one_way_is_refused(name: str, tensor: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=f"layer {name}, .*{named}"):
        get_layer_transfer_geometry(name, tensor, SPECS, 16)


def test_an_equal_number_of_heads_and_tokens_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        get_layer_transfer_geometry("a", cache(2, 8, 4, 4, 3), {"a": full(num_kv_heads=4)})


def test_kernel_blocks_of_a_spec_without_heads_are_ambiguous() -> None:
    spec = SimpleNamespace(block_size=8)
    with pytest.raises(ValueError, match="ambiguous"):
        get_layer_transfer_geometry("a", cache(2, 8, 4, 2, 3), {"a": spec})
    assert get_layer_transfer_geometry("a", cache(2, 8, 8, 2, 3), {"a": spec}).block_size == 8


# A page of 112 bytes: a convolution's window of 3 steps and 8 channels in floats, then a state of 2 x 2 in floats.
STATES = MambaSpec(block_size=16, shapes=((3, 8), (2, 2)), dtypes=(torch.float32,) * 2)
REGIONS_OF = [iter_layer_registration_regions, moriio_layout.iter_layer_registration_regions]


def pages(
    num_pages: int = 8, page_bytes: int = 112, stride_bytes: int = 112, first: int = 0, after: int = 0
) -> torch.Tensor:
    """Of a larger memory, with so many bytes after the last page's stride."""
    memory = cache(first + num_pages * stride_bytes + after, dtype=torch.int8)
    shape, strides = (num_pages, 1, 1, page_bytes), (stride_bytes, page_bytes, page_bytes, 1)
    return memory.as_strided(shape, strides, first)


@pytest.mark.parametrize("of", REGIONS_OF, ids=["kvferry", "vllm"])
@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (pages(), [(0, 8 * 112), (96, 7 * 112 + 16)]),
        (pages(stride_bytes=128), [(0, 8 * 128), (96, 7 * 128 + 32)]),
        (pages(page_bytes=128, stride_bytes=256, first=64, after=128), [(0, 8 * 256), (96, 8 * 256)]),
    ],
    ids=["dense", "padded", "of a larger memory"],
)
def test_regions_of_states(of: Any, tensor: torch.Tensor, expected: list[tuple[int, int]]) -> None:
    """Both reach over all pages, as far as there is memory; and the tensors are the states."""
    regions = of("mixer", tensor, {"mixer": STATES})
    assert [(state.data_ptr() - tensor.data_ptr(), length_bytes) for state, length_bytes in regions] == expected
    assert [tuple(state.shape) for state, _ in regions] == [(8, 3, 8), (8, 2, 2)]
    regions[1][0][5, 1, 1] = 1.0  # the last float of page 5
    assert tensor[5, 0, 0, 108:112].tolist() == [0, 0, -128, 63]
    assert tensor.count_nonzero() == 2


@pytest.mark.parametrize("of", REGIONS_OF, ids=["kvferry", "vllm"])
@pytest.mark.parametrize(
    ("tensor", "spec", "named"),
    [
        (pages(), MambaSpec(block_size=16, shapes=((3, 8),), dtypes=(torch.float32,)), "1 states"),
        (pages(page_bytes=111), STATES, "no page of 112 bytes"),
        (pages()[:0], STATES, "no page"),
        (cache(8, 1, 1, 28, dtype=torch.float32), STATES, "float32.*bytes"),
        (cache(8, 112, dtype=torch.int8), STATES, "must be"),
        (cache(8, 2, 1, 56, dtype=torch.int8), STATES, "must be"),
        (cache(8, 1, 1, 224, dtype=torch.int8)[..., ::2], STATES, "side by side"),
    ],
)
def test_states_that_cannot_be_registered_are_refused(of: Any, tensor: Any, spec: KVCacheSpec, named: str) -> None:
    vllms = of is REGIONS_OF[1]
    with pytest.raises(ValueError, match=None if vllms else f"layer mixer, recurrent cache .*{named}"):
        of("mixer", tensor, {"mixer": spec})


def test_states_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="layer mixer, recurrent cache"):
        iter_layer_registration_regions("mixer", pages(stride_bytes=113), {"mixer": STATES})


def test_states_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer mixer.*state"):
        get_layer_transfer_geometry("mixer", pages(), {"mixer": STATES})


@pytest.mark.parametrize("call", [get_layer_transfer_geometry, iter_layer_registration_regions])
def test_a_layer_without_a_spec_is_named(call: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.7"):
        call("model.layers.7", CACHES["separated"], SPECS)
    with pytest.raises(ValueError, match=r"model\.layers\.7"):
        is_mla_cache_layer(SPECS, "model.layers.7")


def test_the_kind_comes_from_the_spec() -> None:
    window = SlidingWindowMLASpec(block_size=4, num_kv_heads=1, head_size=3, dtype=BF16, sliding_window=8)
    specs = {**SPECS, "window": window}
    assert [is_mla_cache_layer(specs, name) for name in specs] == [False, False, True, True]


def test_specs_of_all_groups_and_of_each_layer_of_a_group() -> None:
    per_layer = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": full(), "b": full(head_size=5)})
    groups = [KVCacheGroupSpec(["a", "b"], per_layer), KVCacheGroupSpec(["c"], latent())]
    found = build_layer_to_spec(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))
    assert found == {"a": full(), "b": full(head_size=5), "c": latent()}


@pytest.mark.parametrize(
    ("local", "remote", "num_remote", "named"),
    [
        ([1, 2], [4], 16, "local_block_ids has 2 blocks, remote_block_ids 1"),
        ([8], [4], 16, r"local_block_ids: block id 8 is outside \[0, 8\)"),
        ([-1], [4], 16, "local_block_ids: block id -1"),
        ([1], [16], 16, r"remote_block_ids: block id 16 is outside \[0, 16\)"),
        ([1], [4, -1], 16, "remote_block_ids: block id -1"),
        ([1], [4.0], 16, r"remote_block_ids: block id 4\.0"),
        ([1], [0], 0, r"remote_block_ids: block id 0 is outside \[0, 0\)"),
        ([1], [0], -1, "remote_num_blocks is -1"),
    ],
)
def test_blocks_that_are_not_there_are_refused(
    local: list[int], remote: list[Any], num_remote: int, named: str
) -> None:
    with pytest.raises(ValueError, match=f"layer separated: {named}"):
        compute_block_transfer_offsets("separated", CACHES["separated"], SPECS, local, remote, num_remote)


def test_fewer_local_blocks_take_the_first_remote_ones() -> None:
    offsets = compute_block_transfer_offsets("indexer", CACHES["indexer"], SPECS, [1], [4, 5], 16)
    assert offsets == ([24], [96], [24])
    assert compute_block_transfer_offsets("indexer", CACHES["indexer"], SPECS, [], [4, 5], 16) == ([], [], [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (([], [], []), ([], [], [])),
        (([0, 48], [96, 144], [48, 48]), ([0], [96], [96])),
        (([48, 0, 96], [144, 96, 192], [48, 48, 16]), ([0], [96], [112])),
        (([0, 48], [96, 192], [48, 48]), ([0, 48], [96, 192], [48, 48])),  # adjacent on one side only
        (([0, 64], [96, 144], [48, 48]), ([0, 64], [96, 144], [48, 48])),
    ],
)
def test_neighbours_on_both_sides_become_one(given: tuple[list[int], ...], expected: tuple[list[int], ...]) -> None:
    assert merge_contiguous_offsets(*given) == expected


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 offsets_local, 1 offsets_remote, 2 sizes"):
        merge_contiguous_offsets([0, 1], [0], [1, 1])


# Beside kvferry's planner.


class Drawn(NamedTuple):
    """A layer as a tensor and its spec; what kvferry's builders say of it on both sides; and a request's blocks."""

    tensor: torch.Tensor
    spec: KVCacheSpec
    fields: tuple[tuple[Field, ...], tuple[Field, ...]]
    num_blocks: tuple[int, int]
    block_ids: tuple[list[int], list[int]]

    def layout(self, side: int) -> CacheLayout:
        fields, num_blocks = self.fields[side], self.num_blocks[side]
        end = max(one.base_bytes + num_blocks * one.block_stride_bytes for one in fields)
        layer = Layer("a", 0, 0, 0, num_blocks, self.spec.block_size, "any", Heads(0, self.heads, self.heads), fields)
        return CacheLayout((Region(0, end),), (layer,))

    @property
    def heads(self) -> int:
        return self.spec.num_kv_heads if isinstance(self.spec, FullAttentionSpec) else 1


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    kind = draw(st.sampled_from(["separated", "interleaved", "latent", "view"]))
    dtype = draw(st.sampled_from([torch.int8, BF16, torch.float32]))
    kernel, ratio = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    heads = draw(st.sampled_from([one for one in (1, 2, 3, 5) if one != kernel]))
    head_size, head_major = draw(st.integers(1, 4)), draw(st.booleans())
    num_blocks = draw(st.integers(3, 6)), draw(st.integers(3, 9))
    itemsize, rows = dtype.itemsize, [ratio * number for number in num_blocks]
    spec: KVCacheSpec = full(kernel * ratio, heads, head_size, dtype)
    if kind == "latent":
        spec = latent(kernel * ratio, head_size, dtype)
        tensor = cache(rows[0], kernel, head_size, dtype=dtype)
        fields = [key_only(kernel, head_size * itemsize) for _ in rows]
    elif kind == "view":
        order = draw(st.sampled_from(["LBHNC", "LBNHC", *(["BLHNC", "BLNHC"] if ratio == 1 else [])]))
        shapes = [(number, heads, kernel, 2 * head_size) for number in rows]
        strides = [physical_strides(order, shape, 2, itemsize)[0] for shape in shapes]
        elements = [stride // itemsize for stride in strides[0]]
        tensor = cache(2 * prod(shapes[0]), dtype=dtype).as_strided(shapes[0], elements)
        fields = [fused(*both, head_size, head_size, itemsize) for both in zip(shapes, strides, strict=True)]
    else:
        build = separated if kind == "separated" else interleaved
        inner = (heads, kernel) if head_major else (kernel, heads)
        outer = (2, rows[0]) if kind == "separated" else (rows[0], 2)
        tensor = cache(*outer, *inner, head_size, dtype=dtype)
        fields = [build(number, kernel, heads, head_size, itemsize, head_major=head_major) for number in rows]
    ours, theirs = (with_kernel_blocks(one, kernel, kernel * ratio) for one in fields)
    ids = [draw(st.lists(st.integers(0, number - 1), min_size=3, max_size=3, unique=True)) for number in num_blocks]
    return Drawn(tensor, spec, (ours, theirs), num_blocks, (ids[0], ids[1]))


@given(drawn())
@settings(deadline=None, max_examples=200)
def test_the_same_descriptors_as_the_planners(case: Drawn) -> None:
    consumer, producer = case.layout(0), case.layout(1)
    pair = compile(consumer, producer, Share(0, (ShareLayer("a", 0, case.heads),)))
    tables = [block_tables(side, [ids]) for side, ids in zip(("consumer", "producer"), case.block_ids, strict=True)]
    (batch,) = pair.bind(*tables, 0, 3 * case.spec.block_size).batches
    planned = tuple(column.tolist() for column in batch[2:])
    specs = {"a": case.spec}
    found = compute_block_transfer_offsets("a", case.tensor, specs, *case.block_ids, case.num_blocks[1])
    assert found == planned


@given(drawn())
@settings(deadline=None, max_examples=50)
def test_regions_hold_each_block(case: Drawn) -> None:
    """All of what is moved lies in what is registered, and the last byte of it is the last one registered."""
    specs, every = {"a": case.spec}, list(range(case.num_blocks[0]))
    local, _, sizes = compute_block_transfer_offsets("a", case.tensor, specs, every, every, case.num_blocks[0])
    moved = np.zeros(case.tensor.untyped_storage().nbytes(), np.int64)
    for offset, size in zip(local, sizes, strict=True):
        moved[offset : offset + size] += 1
    assert moved.max() == 1
    start = case.tensor.data_ptr()
    for tensor, length_bytes in iter_layer_registration_regions("a", case.tensor, specs):
        at = tensor.data_ptr() - start
        assert moved[at] == moved[at + length_bytes - 1] == 1
        moved[at : at + length_bytes] = 0
    assert not moved.any()


@given(drawn())
@settings(deadline=None, max_examples=100)
def test_the_same_answers_as_vllms(case: Drawn) -> None:
    """Where it has one: it has no [B, N, C], no parts of blocks in [B, H, N, C], and takes as many heads as a block has
    tokens for the tokens."""
    specs, num_remote = {"a": case.spec}, case.num_blocks[1]
    has_planes = case.tensor.dim() == 5
    assume(has_planes or (case.tensor.dim() == 4 and case.tensor.shape[2] == case.spec.block_size))
    assume(case.heads != case.spec.block_size)
    ours = get_layer_transfer_geometry("a", case.tensor, specs, num_remote)
    assert ours == moriio_layout.get_layer_transfer_geometry("a", case.tensor, specs, num_remote)
    request = ("a", case.tensor, specs, *case.block_ids, num_remote)
    assert compute_block_transfer_offsets(*request) == moriio_layout.compute_block_transfer_offsets(*request)
    regions, theirs = (
        [(tensor.data_ptr(), length_bytes) for tensor, length_bytes in of("a", case.tensor, specs)]
        for of in (iter_layer_registration_regions, moriio_layout.iter_layer_registration_regions)
    )
    assert regions == theirs


# TP sizes.


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        (4, 4, [0, 1, 2, 3]),
        (8, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (4, 8, [0, 2, 4, 6]),
        (1, 8, [0]),
        (8, 1, [0] * 8),
    ],
)
def test_ranks(local: int, remote: int, expected: list[int]) -> None:
    assert [get_moriio_remote_tp_rank(rank, local, remote) for rank in range(local)] == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 6, 4), "multiple"),
        ((0, 4, 6), "multiple"),
        ((0, 0, 4), "positive"),
        ((0, 4, -4), "positive"),
        ((4, 4, 4), "local_rank 4"),
        ((-1, 4, 4), "local_rank -1"),
    ],
)
def test_ranks_that_pair_with_none(arguments: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        get_moriio_remote_tp_rank(*arguments)


@pytest.mark.parametrize("sizes", [(4, 4, 8, False), (8, 4, 8, True), (8, 4, 4, False), (4, 8, 1, False)])
def test_heads_that_moriio_moves(sizes: tuple[int, int, int, bool]) -> None:
    validate_moriio_heterogeneous_tp_kv_heads(*sizes)


@pytest.mark.parametrize("sizes", [(8, 4, 8), (4, 8, 8), (1, 2, 2)])
def test_heads_that_moriio_does_not(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"local_tp_size .*, remote_tp_size .*, total_num_kv_heads .*replicated"
    ):
        validate_moriio_heterogeneous_tp_kv_heads(*sizes, is_mla=False)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="total_num_kv_heads is 0"):
        validate_moriio_heterogeneous_tp_kv_heads(2, 4, 0, False)


# Releases.


@pytest.mark.parametrize(("producer", "consumer", "expected"), [(4, 4, 1), (8, 4, 1), (6, 4, 1), (4, 8, 2), (1, 8, 8)])
def test_expected_releases(producer: int, consumer: int, expected: int) -> None:
    assert get_moriio_expected_ack_count(producer, consumer) == expected


@pytest.mark.parametrize(
    ("producer", "consumer", "named"), [(4, 6, "multiple"), (0, 4, "positive"), (4, 0, "positive")]
)
def test_expected_releases_of_sizes_that_cannot_be(producer: int, consumer: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        get_moriio_expected_ack_count(producer, consumer)


def test_a_transfer_completes_once_with_its_last_release() -> None:
    counts: dict[str, int] = {}
    completed: set[str] = set()
    ack = MoRIIOTransferAck("tx", consumer_tp_size=8)
    answers = [resolve_moriio_transfer_ack(ack, 4, {"tx", "other"}, counts, completed) for _ in range(4)]
    assert (answers, counts, completed) == ([None, "tx", None, None], {}, {"tx"})


@pytest.mark.parametrize("ack", ["tx", MoRIIOTransferAck("tx"), MoRIIOTransferAck("tx", 2)])
def test_a_bare_id_is_the_release_of_one_rank(ack: MoRIIOTransferAck | str) -> None:
    completed: set[str] = set()
    assert resolve_moriio_transfer_ack(ack, 2, ["tx"], {}, completed) == "tx"


def test_releases_of_unknown_transfers_change_nothing() -> None:
    counts: dict[str, int] = {}
    completed = {"done"}
    for name in ("unknown", "done"):
        assert resolve_moriio_transfer_ack(MoRIIOTransferAck(name, 8), 4, {"done"}, counts, completed) is None
    assert (counts, completed) == ({}, {"done"})


def test_transfers_count_apart() -> None:
    counts: dict[str, int] = {}
    for name in ("a", "b"):
        assert resolve_moriio_transfer_ack(MoRIIOTransferAck(name, 2), 1, {"a", "b"}, counts, set()) is None
    assert counts == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (b"tx-1", ("tx-1", 1)),
        ("übertragung".encode(), ("übertragung", 1)),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1"}), ("tx-1", 1)),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "tx-1", "consumer_tp_size": 8}), ("tx-1", 8)),
        (msgspec.msgpack.encode({"consumer_tp_size": 2, "new": [1], "transfer_id": "t", "type": "release"}), ("t", 2)),
    ],
)
def test_all_forms_of_a_release_are_read(frame: bytes, expected: tuple[str, int]) -> None:
    assert read_transfer_ack(frame) == MoRIIOTransferAck(*expected)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (b"", "the frame is empty"),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": ""}), "no release: Expected `str` of length >= 1"),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "", "consumer_tp_size": 2}), "transfer_id`"),
        (b"\xff\xfe", "no release"),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "t", "consumer_tp_size": 0}), "consumer_tp_size"),
        (msgspec.msgpack.encode({"type": "release", "transfer_id": "t", "consumer_tp_size": "x"}), "consumer_tp_size"),
        (msgspec.msgpack.encode({"type": "release"}), "transfer_id"),
        (msgspec.msgpack.encode({"type": "write_done", "transfer_id": "t"}), "write_done"),
    ],
)
def test_what_is_no_release_is_refused(frame: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_transfer_ack(frame)
