"""What the handshake compares beyond the golden cases: unsound layouts, shared memory, groups; and what it folds."""

from __future__ import annotations

from itertools import product

import msgspec
import oracle
import pytest
from drawn import Side, Situation
from golden import tables

from kvferry.layout import (
    PHYSICAL_ORDERS,
    STATE_TOKENS,
    CacheLayout,
    Channels,
    Heads,
    Layer,
    Region,
    cpu_tiles,
    fused,
    key_only,
    physical_strides,
    state,
)
from kvferry.plan import PairPlan, Refusal, TransferPlan, compile
from kvferry.topology import Share, ShareLayer, kv_heads, sources

change = msgspec.structs.replace


def layer(name: str = "a", base_bytes: int = 0, group: int = 0) -> Layer:
    return Layer(name, group, 0, base_bytes, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2))


def cache(*layers: Layer) -> CacheLayout:
    return CacheLayout((Region(0, 128),), layers)


def whole(consumer: CacheLayout, producer: CacheLayout) -> PairPlan:
    parts = tuple(ShareLayer(one.name, 0, one.heads.total) for one in consumer.layers)
    return compile(consumer, producer, Share(0, parts))


def test_an_unsound_peer_is_refused() -> None:
    with pytest.raises(Refusal, match=r"^layout: producer has a wrong one, layer a: num_blocks 0"):
        whole(cache(layer()), cache(change(layer(), num_blocks=0)))
    with pytest.raises(
        Refusal, match=r"^layout: consumer has a wrong one, layer a: ends at byte 144 [^,]*, which has \d+$"
    ):
        whole(cache(layer(base_bytes=112)), cache(layer()))


def test_only_the_shares_layers_matter() -> None:
    broken = change(layer("other"), num_blocks=0)
    compile(cache(layer(), broken), cache(layer(), broken), Share(0, (ShareLayer("a", 0, 1),)))


def test_a_share_of_heads_or_layers_that_a_side_lacks() -> None:
    with pytest.raises(Refusal, match=r"layer a: heads 0 to 2 of the share"):
        compile(cache(layer()), cache(layer()), Share(0, (ShareLayer("a", 0, 2),)))
    with pytest.raises(Refusal, match="layer b: consumer has none, producer has none"):
        compile(cache(layer()), cache(layer()), Share(0, (ShareLayer("b", 0, 1),)))


@pytest.mark.parametrize("theirs", ["", "k=0.5 v=2.0"])
def test_scales_that_lie_outside_the_cache_must_be_equal(theirs: str) -> None:
    mine = change(layer(), scales="k=0.5 v=1.0")
    text = f"layer a: scales: consumer has k=0.5 v=1.0, producer has {theirs or 'none'}"
    with pytest.raises(Refusal, match=text):
        whole(cache(mine), cache(change(mine, scales=theirs)))
    whole(cache(mine), cache(mine))


def test_two_names_of_one_memory_move_once() -> None:
    shared = cache(layer("a"), layer("b"))
    plan = whole(shared, shared).bind(tables([[1]]), tables([[2]]), 0, 4)
    assert (plan.num_bytes, plan.num_descriptors) == (8, 1)
    oracle.run(cache(layer("a")), [[1]], (0, 4), [(plan, cache(layer("a")))], [[2]])


def test_one_memory_cannot_come_from_two() -> None:
    with pytest.raises(Refusal, match="layers a and b: consumer has one memory, producer has two"):
        whole(cache(layer("a"), layer("b")), cache(layer("a"), layer("b", 32)))
    apart = whole(cache(layer("a"), layer("b", 32)), cache(layer("a"), layer("b")))
    assert apart.bind(tables([[1]]), tables([[2]]), 0, 4).num_bytes == 16


def test_one_memory_of_two_groups_is_two_caches() -> None:
    overlaid = cache(layer("a"), layer("b", group=1))
    plan = whole(overlaid, overlaid).bind(tables([[1], [2]]), tables([[3], [0]]), 0, 4)
    assert [batch.consumer_offsets.tolist() for batch in plan.batches] == [[8, 16]]
    assert [batch.producer_offsets.tolist() for batch in plan.batches] == [[24, 0]]


def test_a_table_for_each_group() -> None:
    pair = whole(cache(layer(group=1)), cache(layer(group=1)))
    with pytest.raises(Refusal, match="block table of group 1: consumer has 1 tables"):
        pair.bind(tables([[1]]), tables([[1]]), 0, 4)
    assert pair.bind(tables([[], [1]]), tables([[7, 7], [1]]), 0, 4).num_bytes == 8


def test_a_window_leaves_out_the_chunks_before_it() -> None:
    """Blocks of 4 from blocks of 2, 2 bytes a token: of the tokens 20 to 23 in the consumer's block 3, the producer has
    22 and 23 only."""
    mine, theirs = (cache(change(layer(), num_blocks=8, block_size=size, fields=key_only(size, 2))) for size in (4, 2))
    my_ids, their_ids = [[-1] * 5 + [3, 1]], [[-1] * 11 + [5, 0, 4]]
    pair = whole(mine, theirs)
    plan = pair.bind(tables(my_ids), tables(their_ids), 0, 27, [22])
    assert rows(plan) == [(8, 0, 4), (12, 16, 2), (28, 20, 4)]
    assert (plan.starts, plan.required_bytes, plan.num_bytes) == ((22,), 10, 10)
    oracle.run(mine, my_ids, (22, 27), [(plan, theirs)], their_ids)
    with pytest.raises(Refusal, match="group 0: block of token 20: consumer has 3, producer has none"):
        pair.bind(tables(my_ids), tables(their_ids), 0, 27, [21])


def test_the_first_chunk_of_a_window_moves_whole() -> None:
    """Two heads far apart, each tile with keys that a cut would scatter; the window begins inside the second block."""
    heads = Heads(0, 2, 2)
    fields = cpu_tiles((4, 2, 4, 4), (16, 64, 4, 1), head_size=2, itemsize=1)
    both = cache(Layer("a", 0, 0, 0, 4, 4, "x", heads, fields))
    my_ids, their_ids = [[-1, 3, 1]], [[-1, 0, 2]]
    plan = whole(both, both).bind(tables(my_ids), tables(their_ids), 0, 12, [5])
    assert rows(plan) == [(16, 32, 16), (48, 0, 16), (80, 96, 16), (112, 64, 16)]
    assert (plan.starts, plan.required_bytes, plan.num_bytes) == ((4,), 64, 64)
    oracle.run(both, my_ids, (4, 12), [(plan, both)], their_ids)


def test_tokens_that_a_consumer_has_stay_although_a_window_begins_behind_them() -> None:
    """A hit of 6 tokens, inside the chunk in which the window begins."""
    both = cache(layer())
    plan = whole(both, both).bind(tables([[2, 1]]), tables([[-1, 3]]), 6, 8, [7])
    assert (rows(plan), plan.starts) == ([(12, 28, 4)], (6,))


def rows(plan: TransferPlan) -> list[tuple[int, ...]]:
    """All descriptors between the first regions, by consumer offset."""
    (batch,) = plan.batches
    return sorted(zip(*(column.tolist() for column in batch[2:]), strict=True))


def pool(order: str, heads: Heads, num_layers: int = 3) -> CacheLayout:
    shape = (8, heads.count, 4, 4)
    strides, layer_stride = physical_strides(order, shape, num_layers, 2)
    fields = fused(shape, strides, 2, 2, 2)
    layers = [Layer(f"{i}", 0, 0, i * layer_stride, 8, 4, "x", heads, fields) for i in range(num_layers)]
    return CacheLayout((Region(0, 8 * heads.count * 32 * num_layers),), tuple(layers))


@pytest.mark.parametrize(
    ("order", "whole_blocks", "one_head"),
    [
        ("LBHNC", 3 * 2, 3 * 2),  # a page of each layer
        ("LBNHC", 3 * 2, 3 * 2 * 4),  # heads are not apart: a descriptor for each token
        ("LHBNC", 3 * 2 * 2, 3 * 2),  # heads are far apart: one for each
        ("BLHNC", 2, 3 * 2),  # all layers of a block at once
        ("BLNHC", 2, 3 * 2 * 4),
        ("BHLNC", 2, 2),  # all layers of a head of a block at once
    ],
)
def test_descriptors_of_two_blocks_of_three_layers(order: str, whole_blocks: int, one_head: int) -> None:
    assert order in PHYSICAL_ORDERS
    request = tables([[1, 4]]), tables([[2, 7]]), 0, 8
    two = pool(order, Heads(0, 2, 2))
    assert whole(two, two).bind(*request).num_descriptors == whole_blocks
    share = Share(0, tuple(ShareLayer(f"{i}", 1, 2) for i in range(3)))
    assert compile(pool(order, Heads(1, 1, 2)), two, share).bind(*request).num_descriptors == one_head


def mixer(tp_rank: int, tp_size: int, steps_outermost: bool) -> CacheLayout:
    """The state of a layer of 4 heads and 2 groups, 3 slots in one region, as vLLM packs it.

    The window of x (2 channels a head), B and C (2 channels a group) over 3 steps of 2 bytes, then what the recurrence
    carries on (6 bytes a head).
    """
    heads, groups = kv_heads(tp_rank, tp_size, 4), kv_heads(tp_rank, tp_size, 2)
    parts = (("x", heads, 0), ("b", groups, 2 * heads.count), ("c", groups, 2 * heads.count + 2 * groups.count))
    channels = 2 * heads.count + 4 * groups.count
    recurrent, slot = channels * 3 * 2, channels * 3 * 2 + heads.count * 6
    made = [
        (f"m/conv.{name}", one, state("conv", Channels(one.count, 2, 3, first, steps_outermost, channels), 2, 0, slot))
        for name, one, first in parts
    ]
    made.append(("m/ssm", heads, state("ssm", Channels(heads.count, 3), 2, recurrent, slot)))
    layers = [Layer(name, 0, 0, 0, 3, STATE_TOKENS, "bfloat16", one, fields) for name, one, fields in made]
    return CacheLayout((Region(0, 3 * slot),), tuple(layers))


def mixers(tp_size: int, steps_outermost: bool, slot: int) -> Side:
    return Side(tp_size, [mixer(rank, tp_size, steps_outermost) for rank in range(tp_size)], [[slot]])


@pytest.mark.parametrize("steps_outermost", list(product((False, True), repeat=2)))
def test_states_move_whole_whatever_the_split_and_the_order(steps_outermost: tuple[bool, bool]) -> None:
    """Parts with different numbers of shards, replicated groups, sizes that do not matter to one another."""
    for consumer_tp, producer_tp in product((1, 2, 4), repeat=2):
        consumer, producer = mixers(consumer_tp, steps_outermost[0], 2), mixers(producer_tp, steps_outermost[1], 1)
        for tokens in ((0, 1), (0, 1000), (999, 1000)):
            oracle.transfer(Situation(consumer, producer, tokens))


def test_descriptors_of_a_state() -> None:
    """Slot 1 of 120 bytes (x from 0, B 48, C 72, recurrent 96) to slot 2 of 60 (0, 24, 36, 48): the second half of each
    part."""
    half, all_of_it = mixer(1, 2, False), mixer(0, 1, False)
    (share,) = sources(half, 1, 2, [all_of_it])
    plan = compile(half, all_of_it, share).bind(tables([[2]]), tables([[1]]), 0, 77)
    assert rows(plan) == [(120, 144, 24), (144, 180, 12), (156, 204, 12), (168, 228, 12)]


def test_what_is_kept_for_states_does_not_grow_with_requests() -> None:
    one = mixer(0, 1, False)
    (share,) = sources(one, 0, 1, [one])
    pair = compile(one, one, share)
    for end in range(1, 100):
        assert pair.bind(tables([[2]]), tables([[1]]), 0, end).num_descriptors == 1
    assert max(len(unit._cuts) for unit in pair.units) <= 2
