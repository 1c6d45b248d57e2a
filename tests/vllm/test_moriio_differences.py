"""Where kvferry's functions of MoRIIO's answer otherwise than vLLM's: what docs/configuration.md lists, and no more."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_layout as vllms
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from kvferry.vllm import moriio as ours

BF16 = torch.bfloat16


def full(block_size: int = 4, num_kv_heads: int = 2, head_size: int = 3) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=BF16)


def latent() -> KVCacheSpec:
    return MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=3, dtype=BF16)


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def padded(shape: tuple[int, ...], page: int) -> torch.Tensor:
    """Pages of so many elements, with `shape[1:]` at the start of each."""
    strides = cache(*shape).stride()
    return cache(shape[0] * page).as_strided(shape, (page, *strides[1:]))


def geometry(module: Any, tensor: torch.Tensor, spec: KVCacheSpec, *remote_num_blocks: int) -> tuple[Any, ...]:
    return tuple(module.get_layer_transfer_geometry("a", tensor, {"a": spec}, *remote_num_blocks))


def lengths(module: Any, tensor: torch.Tensor, spec: KVCacheSpec) -> list[int]:
    return [length for _, length in module.iter_layer_registration_regions("a", tensor, {"a": spec})]


@pytest.mark.parametrize(
    ("tensor", "spec", "named"),
    [
        (cache(2, 2, 4, 2, 3), full(), "ambiguous.*2BNHD and as B2NHD"),  # two blocks
        (cache(2, 2, 2, 4, 3), full(), "ambiguous.*2BHND and as B2HND"),
        (cache(2, 16, 2, 2, 3), full(), "ambiguous.*2BNHD and as 2BHND"),  # as many heads as tokens in a kernel block
        (cache(16, 2, 2, 2, 3), full(), "ambiguous.*B2NHD and as B2HND"),
        (cache(2, 8, 4, 4, 3), full(num_kv_heads=4), "ambiguous.*2BNHD and as 2BHND"),  # or in a block
        (cache(8, 2, 4, 4, 3), full(num_kv_heads=4), "ambiguous.*B2NHD and as B2HND"),
        (cache(2, 8, 4, 4, 3), full(), "nothing that fits"),  # other heads than the spec's
        (cache(8, 2, 4, 1, 3), full(), "nothing that fits"),
        (cache(2, 8, 4, 2, 5), full(), "nothing that fits"),  # another head size
        (cache(8, 2, 4, 2, 5), full(), "nothing that fits"),
        (cache(2, 0, 4, 2, 3), full(), "nothing in it"),
        (cache(0, 2, 4, 6), full(), "nothing in it"),
        (cache(2, 8, 4, 6).transpose(0, 1), full(), "2 runs with gaps"),  # LHBNC
        (padded((16, 2, 2, 4, 3), 56), full(num_kv_heads=4), "2 runs with gaps"),  # padded kernel blocks
    ],
)
def test_what_vllms_takes_and_ours_refuses(tensor: torch.Tensor, spec: KVCacheSpec, named: str) -> None:
    assert geometry(vllms, tensor, spec)
    assert vllms.iter_layer_registration_regions("a", tensor, {"a": spec})
    for call in (geometry, lengths):
        with pytest.raises(ValueError, match=f"layer a, K/V cache.*{named}"):
            call(ours, tensor, spec)


@pytest.mark.parametrize(
    ("tensor", "spec", "expected"),
    [
        (cache(8, 4, 3), latent(), (8, 4, 24, 6, 12, None, None, 1, 1, False)),
        (cache(16, 2, 3), latent(), (8, 4, 24, 6, 12, None, None, 1, 1, False)),
        (cache(16, 1, 2, 3), latent(), (8, 4, 24, 6, 12, None, None, 1, 1, False)),
        (cache(16, 2, 2, 6), full(), (8, 4, 96, 24, 48, None, None, 1, 1, False)),
    ],
)
def test_what_ours_takes_and_vllms_refuses(tensor: torch.Tensor, spec: KVCacheSpec, expected: tuple[Any, ...]) -> None:
    assert geometry(ours, tensor, spec) == expected
    with pytest.raises(ValueError, match="Unsupported"):
        geometry(vllms, tensor, spec)


def test_the_specs_heads_say_what_a_kernel_block_is() -> None:
    """[2, 8, 4, 2, 3] of a spec with 4 heads: kernel blocks of 2 tokens, not blocks of 4 tokens with 2 heads."""
    tensor, spec = cache(2, 8, 4, 2, 3), full(num_kv_heads=4)
    assert geometry(ours, tensor, spec) == (4, 4, 96, 24, 48, 192, 192, 2, 1, True)
    assert geometry(vllms, tensor, spec) == (8, 4, 48, 12, 24, 192, 192, 2, 1, True)


@pytest.mark.parametrize("shape", [(2, 8, 4, 2, 3), (8, 2, 4, 2, 3)])
def test_a_transposed_tensor_is_what_its_memory_is(shape: tuple[int, ...]) -> None:
    plain, transposed = cache(*shape), cache(*shape).transpose(0, 1)
    assert geometry(ours, transposed, full(), 16) == geometry(ours, plain, full(), 16)
    assert geometry(ours, plain, full(), 16) == geometry(vllms, plain, full(), 16)
    assert geometry(vllms, transposed, full(), 16) != geometry(vllms, plain, full(), 16)


def test_a_negative_number_of_remote_blocks_is_refused() -> None:
    assert geometry(vllms, cache(2, 8, 4, 2, 3), full(), -1)
    with pytest.raises(ValueError, match="layer a: remote_num_blocks is -1"):
        geometry(ours, cache(2, 8, 4, 2, 3), full(), -1)


@pytest.mark.parametrize("name", ["get_layer_transfer_geometry", "iter_layer_registration_regions"])
def test_a_layer_without_a_spec_is_a_value_error(name: str) -> None:
    with pytest.raises(KeyError, match="missing"):
        getattr(vllms, name)("missing", cache(2, 8, 4, 2, 3), {})
    with pytest.raises(ValueError, match="layer missing has no KV cache spec"):
        getattr(ours, name)("missing", cache(2, 8, 4, 2, 3), {})


def test_ids_that_are_no_integers_are_refused() -> None:
    arguments = ("a", cache(2, 8, 4, 2, 3), {"a": full()})
    integers = ours.compute_block_transfer_offsets(*arguments, [np.int64(1)], [np.int32(4)], 16)
    assert integers == vllms.compute_block_transfer_offsets(*arguments, [1], [4], 16)
    assert vllms.compute_block_transfer_offsets(*arguments, [1.0], [4], 16) == integers
    with pytest.raises(ValueError, match=r"local_block_ids: block id 1\.0"):
        ours.compute_block_transfer_offsets(*arguments, [1.0], [4], 16)


def test_lists_of_different_lengths_are_refused_also_where_the_local_one_is_empty() -> None:
    assert vllms.merge_contiguous_offsets([], [1], [1]) == ([], [], [])
    with pytest.raises(ValueError, match="0 offsets_local, 1 offsets_remote, 1 sizes"):
        ours.merge_contiguous_offsets([], [1], [1])


def test_regions_reach_to_the_last_byte_of_padded_pages() -> None:
    tensor = padded((8, 2, 4, 2, 3), 60)
    assert lengths(ours, tensor, full()) == [7 * 120 + 96]
    assert lengths(vllms, tensor, full()) == [8 * 96]


def answer(module: Any, tensor: torch.Tensor, spec: KVCacheSpec) -> tuple[Any, ...] | None:
    """None: refused."""
    try:
        offsets = module.compute_block_transfer_offsets("a", tensor, {"a": spec}, [0], [5], 16)
        return geometry(module, tensor, spec, 16), offsets, lengths(module, tensor, spec)
    except ValueError:
        return None


@pytest.mark.parametrize("is_split", [True, False], ids=["separated", "interleaved"])
@pytest.mark.parametrize("head_major", [True, False], ids=["heads first", "tokens first"])
def test_elsewhere_both_answer_alike_or_refuse(is_split: bool, head_major: bool) -> None:
    """Keys and values side by side, with the spec's heads, and never as many of them as tokens."""
    num_answers = 0
    for block_size, heads, kernel, rows in product((1, 2, 4, 8), (3, 5), (1, 2, 4, 8), (3, 4, 6, 8)):
        outer = (2, rows) if is_split else (rows, 2)
        tensor = cache(*outer, *((heads, kernel) if head_major else (kernel, heads)), 7)
        spec = full(block_size, heads, 7)
        found = answer(ours, tensor, spec)
        assert found == answer(vllms, tensor, spec), (block_size, heads, kernel, rows)
        num_answers += found is not None
    assert num_answers == 2 * (4 * 4 + 3 * 3 + 2 * 2 + 1)  # by how many rows a block has: 1, 2, 4 and 8
