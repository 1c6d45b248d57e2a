"""The states of vLLM's recurrent layers, described as layouts: values worked out by hand from vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.layout import STATE_TOKENS, CacheLayout, Heads, Layer, LayoutError, Region, check
from kvferry.vllm.states import Rank, parts

SLOT = 1 << 16


def spec(kind: Kind, shapes: Any, *dtypes: torch.dtype, **more: Any) -> MambaSpec:
    return MambaSpec(block_size=1024, shapes=tuple(shapes), dtypes=dtypes, mamba_type=kind, **more)


def mamba2(tp_size: int, n_groups: int) -> MambaSpec:
    """8 heads of 4, states of 16, window of 3; a float is 4 bytes, a half 2."""
    shapes = Shapes.mamba2_state_shape(
        tp_world_size=tp_size,
        intermediate_size=32,
        n_groups=n_groups,
        num_heads=8,
        head_dim=4,
        state_size=16,
        conv_kernel=4,
    )
    return spec(Kind.MAMBA2, shapes, torch.float16, torch.float32)


def summary(found: Any) -> list[tuple[str, Heads, int, int]]:
    """(name, heads, first byte, bytes of a shard)"""
    return [(part.name, part.heads, part.fields[0].base_bytes, part.fields[0].content_bytes) for part in found]


def test_mamba2_has_x_b_c_and_the_state() -> None:
    # [steps, channels]: 32 + 2 * 2 * 16 = 96 channels of 3 steps in halves: 576 bytes, then 8 heads of 4 * 16 floats.
    found = parts(mamba2(1, n_groups=2), Rank(0, 1, num_groups=2, steps_outermost=True), SLOT)
    assert summary(found) == [
        ("conv.x", Heads(0, 8, 8), 0, 4 * 3 * 2),
        ("conv.b", Heads(0, 2, 2), 32 * 2, 16 * 3 * 2),
        ("conv.c", Heads(0, 2, 2), 64 * 2, 16 * 3 * 2),
        ("ssm", Heads(0, 8, 8), 576, 4 * 16 * 4),
    ]
    assert [part.dtype for part in found] == ["float16"] * 3 + ["float32"]


def test_mamba2_on_one_of_two_ranks() -> None:
    found = parts(mamba2(2, n_groups=2), Rank(1, 2, num_groups=2, steps_outermost=True), SLOT)
    assert summary(found) == [
        ("conv.x", Heads(4, 4, 8), 0, 24),
        ("conv.b", Heads(1, 1, 2), 16 * 2, 96),
        ("conv.c", Heads(1, 1, 2), 32 * 2, 96),
        ("ssm", Heads(4, 4, 8), (16 + 32) * 3 * 2, 256),
    ]


def test_a_single_group_is_on_every_rank() -> None:
    heads = [part.heads for part in parts(mamba2(4, n_groups=1), Rank(3, 4, num_groups=1, steps_outermost=True), SLOT)]
    assert heads == [Heads(6, 2, 8), Heads(0, 1, 1), Heads(0, 1, 1), Heads(6, 2, 8)]


def test_without_the_models_number_of_groups_one_on_each_rank_is_not_guessed() -> None:
    with pytest.raises(LayoutError, match=r"one group on each of 2 ranks"):
        parts(mamba2(2, n_groups=2), Rank(0, 2, steps_outermost=True), SLOT)


def test_both_orders_of_a_window_number_its_bytes_alike() -> None:
    """Channel 5, step 1, second byte: content byte (1 * 3 + 1) * 2 + 1 of shard 1 (shards of 4 channels)."""
    outermost = parts(mamba2(1, 2), Rank(0, 1, 2, steps_outermost=True), SLOT)[0].fields[0]
    shapes = ((96, 3), (8, 4, 16))
    innermost = parts(spec(Kind.MAMBA2, shapes, torch.float16, torch.float32), Rank(0, 1, 2), SLOT)[0].fields[0]

    def address(field: Any, head: int, content: int) -> int:
        total = field.base_bytes
        for axis in field.axes:
            index = {"head": head, "content": content, "token": 0}[axis.dim]
            total += index // axis.step % axis.size * axis.stride_bytes
        return total

    assert address(outermost, 1, 9) == (1 * 96 + 5) * 2 + 1
    assert address(innermost, 1, 9) == (5 * 3 + 1) * 2 + 1


def test_gdn_has_q_k_v() -> None:
    shapes = Shapes.gated_delta_net_state_shape(
        tp_world_size=2, num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16, conv_kernel_size=4
    )
    rank = Rank(1, 2, steps_outermost=True)
    found = parts(spec(Kind.GDN_ATTN, shapes, torch.bfloat16, torch.float32), rank, SLOT)
    assert summary(found) == [
        ("conv.q", Heads(1, 1, 2), 0, 8 * 3 * 2),
        ("conv.k", Heads(1, 1, 2), 8 * 2, 8 * 3 * 2),
        ("conv.v", Heads(2, 2, 4), 16 * 2, 16 * 3 * 2),
        ("ssm", Heads(2, 2, 4), 48 * 3 * 2, 16 * 8 * 4),
    ]


def test_kda_has_q_k_v_of_one_size() -> None:
    shapes = Shapes.kda_state_shape(tp_world_size=1, num_heads=4, head_dim=8)
    found = parts(spec(Kind.GDN_ATTN, shapes, torch.bfloat16, torch.float32), Rank(0, 1, steps_outermost=True), SLOT)
    assert [(part.name, part.heads.count) for part in found] == [
        ("conv.q", 4),
        ("conv.k", 4),
        ("conv.v", 4),
        ("ssm", 4),
    ]


def test_channels_without_heads_are_dealt_in_shards_that_any_tp_size_divides() -> None:
    """6144 channels have 192 shards in common with 2**6 * 3**2 * 5 * 7, at TP 1 as at TP 3."""
    counts = []
    for tp_size in (1, 3):
        shapes = Shapes.mamba1_state_shape(tp_world_size=tp_size, intermediate_size=6144, state_size=16, conv_kernel=4)
        rank = Rank(tp_size - 1, tp_size, steps_outermost=True)
        found = parts(spec(Kind.MAMBA1, shapes, torch.float32, torch.float32), rank, 1 << 24)
        counts.append([part.heads for part in found])
    assert counts == [[Heads(0, 192, 192)] * 2, [Heads(128, 64, 192)] * 2]


def test_a_short_convolution_has_one_part_and_may_be_on_every_rank() -> None:
    shapes = Shapes.short_conv_state_shape(tp_world_size=1, intermediate_size=64, conv_kernel=3)
    replicated = spec(Kind.SHORT_CONV, shapes, torch.float32, tp_replicated=True)
    (part,) = parts(replicated, Rank(1, 2, steps_outermost=True), SLOT)
    assert (part.name, part.heads) == ("conv.x", Heads(0, 64, 64))


def test_linear_attention_has_one_state() -> None:
    shapes = Shapes.linear_attention_state_shape(num_heads=8, tp_size=2, head_dim=4)
    (part,) = parts(spec(Kind.LINEAR, shapes, torch.float32), Rank(1, 2), SLOT)
    assert (part.name, part.heads, part.fields[0].content_bytes) == ("ssm", Heads(4, 4, 8), 64)


def test_states_with_more_than_is_known_are_refused() -> None:
    ring = spec(Kind.MAMBA2, ((3, 96), (8, 4, 16), (8, 5, 4)), torch.float16, torch.float32, torch.float32)
    with pytest.raises(LayoutError, match="its parts are not known"):
        parts(ring, Rank(0, 1, 2, steps_outermost=True), SLOT)


@pytest.mark.parametrize("steps_outermost", [True, False])
def test_the_parts_cover_the_state_and_nothing_twice(steps_outermost: bool) -> None:
    shapes = ((3, 96) if steps_outermost else (96, 3), (8, 4, 16))
    one = spec(Kind.MAMBA2, shapes, torch.float16, torch.float32)
    found = parts(one, Rank(0, 1, 2, steps_outermost), SLOT)
    layers = tuple(
        Layer(f"a/{part.name}", 0, 0, 0, 4, STATE_TOKENS, part.dtype, part.heads, part.fields) for part in found
    )
    check(CacheLayout((Region(0, 4 * SLOT),), layers))
    covered = set()
    for part in found:
        (field,) = part.fields
        addresses = {field.base_bytes}
        for axis in field.axes:
            addresses = {at + index * axis.stride_bytes for at in addresses for index in range(axis.size)}
        assert not covered & addresses
        covered |= addresses
    assert covered == set(range(one.state_content_size_bytes))
