"""Which blocks of a request vLLM keeps, and so which are offered and wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvferry.vllm.groups import Group, Window, backoff_tokens, groups

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=256)
STATE = MambaSpec(block_size=64, shapes=((3, 4), (2, 2, 2)), dtypes=(torch.float32, torch.float32))


def config(*specs: Any) -> KVCacheConfig:
    named = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named)


def block(block_id: int, *, is_null: bool = False, block_hash: bytes | None = None) -> Any:
    return SimpleNamespace(block_id=block_id, is_null=is_null, block_hash=block_hash)


def ids(blocks: Any) -> list[int | None]:
    return [None if one is None else one.block_id for one in blocks]


def test_the_kind_of_each_group_comes_from_its_spec() -> None:
    speculative = MambaSpec(block_size=64, shapes=((3, 4),), dtypes=(torch.float32,), num_speculative_blocks=2)
    assert groups(config(FULL, WINDOW, STATE, speculative)) == (
        Group(),
        Group(window=Window(256, 16)),
        Group(spare_slots=0),
        Group(spare_slots=2),
    )


def test_windows_tell_which_blocks_are_behind() -> None:
    # Of 63 blocks, token 1007 looks at tokens 752 to 1007: the last 16. Token 1006 looks at one block more.
    assert Window(256, 16).blocks_behind(1007) == 47
    assert Window(256, 16).blocks_behind(1006) == 46
    assert Window(256, 16).blocks_behind(255) == 0
    assert Window(256, 16).blocks_behind(271) == 1


def test_a_window_wants_only_what_is_looked_at() -> None:
    blocks = [block(0, is_null=True), block(7), block(8), block(9, block_hash=b"hit"), block(10)]
    assert ids(Group(window=Window(32, 16)).wanted(blocks, 64)) == [None, None, 8, None, 10]


def test_full_attention_wants_what_the_local_cache_lacks() -> None:
    assert ids(Group().wanted([block(5, block_hash=b"hit"), block(6), block(7)], 40)) == [None, 6, 7]
    assert Group().offered([5, 6, 7]) == [5, 6, 7]


@pytest.mark.parametrize(
    ("spare_slots", "table", "running"),
    [(0, [4], [4]), (0, [0, 0, 6], [6]), (2, [3, 8, 9], [3]), (2, [0, 5, 8, 9], [5]), (3, [2], [2]), (1, [], [])],
)
def test_of_a_state_only_the_running_slot_is_offered(spare_slots: int, table: list[int], running: list[int]) -> None:
    assert Group(spare_slots=spare_slots).offered(table) == running


def test_a_state_wants_the_running_slot() -> None:
    assert ids(Group(spare_slots=1).wanted([block(0, is_null=True), block(4), block(5)], 100)) == [4]


@pytest.mark.parametrize("slot", [block(0, is_null=True), block(4, block_hash=b"shared")])
def test_a_state_without_a_slot_of_its_own_is_an_error(slot: Any) -> None:
    with pytest.raises(ValueError, match="not this request's own"):
        Group(spare_slots=0).wanted([block(3), slot], 100)


@pytest.mark.parametrize(
    ("specs", "lookahead", "backoff"),
    [
        ((FULL,), 0, 0),
        ((FULL,), 1, 0),
        ((FULL,), 3, 2),
        ((FULL, WINDOW), 0, 1),
        ((FULL, STATE), 0, 1),
        ((STATE,), 3, 2),
    ],
)
def test_what_a_producer_leaves_to_the_consumer(specs: tuple[Any, ...], lookahead: int, backoff: int) -> None:
    vllm_config: Any = SimpleNamespace(num_prefill_lookahead_tokens=lookahead)
    assert backoff_tokens(vllm_config, config(*specs)) == backoff
