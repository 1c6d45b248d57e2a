"""What the handshake compares beyond the golden cases: unsound layouts, shared memory, groups; and what it folds."""

from __future__ import annotations

import msgspec
import oracle
import pytest
from golden import tables

from kvferry.layout import (
    PHYSICAL_ORDERS,
    CacheLayout,
    Heads,
    Layer,
    Region,
    fused,
    key_only,
    physical_strides,
)
from kvferry.plan import PairPlan, Refusal, compile
from kvferry.topology import Share, ShareLayer

change = msgspec.structs.replace


def layer(name: str = "a", base_bytes: int = 0, group: int = 0) -> Layer:
    return Layer(name, group, 0, base_bytes, 4, 4, "x", Heads(0, 1, 1), key_only(4, 2))


def cache(*layers: Layer) -> CacheLayout:
    return CacheLayout((Region(0, 128),), layers)


def whole(consumer: CacheLayout, producer: CacheLayout) -> PairPlan:
    parts = tuple(ShareLayer(one.name, 0, one.heads.total) for one in consumer.layers)
    return compile(consumer, producer, Share(0, parts))


def test_an_unsound_peer_is_refused() -> None:
    with pytest.raises(Refusal, match="layout: consumer has a sound one, producer has layer a: num_blocks 0"):
        whole(cache(layer()), cache(change(layer(), num_blocks=0)))
    with pytest.raises(Refusal, match=r"layout: consumer has layer a: ends at byte 144 .*, producer has a sound one"):
        whole(cache(layer(base_bytes=112)), cache(layer()))


def test_only_the_shares_layers_matter() -> None:
    broken = change(layer("other"), num_blocks=0)
    compile(cache(layer(), broken), cache(layer(), broken), Share(0, (ShareLayer("a", 0, 1),)))


def test_a_share_of_heads_or_layers_that_a_side_lacks() -> None:
    with pytest.raises(Refusal, match=r"layer a: heads 0 to 2 of the share"):
        compile(cache(layer()), cache(layer()), Share(0, (ShareLayer("a", 0, 2),)))
    with pytest.raises(Refusal, match="layer b: consumer has None, producer has None"):
        compile(cache(layer()), cache(layer()), Share(0, (ShareLayer("b", 0, 1),)))


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
