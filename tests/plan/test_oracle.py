"""Drawn engines and requests: every required byte arrives at its coordinate, and nothing else is touched."""

from __future__ import annotations

from itertools import product

import numpy as np
import oracle
import pytest
from drawn import Apart, ModelLayer, Pool, Side, Situation, Slot, situations
from golden import tables
from hypothesis import given, settings

from kvferry.plan import compile
from kvferry.topology import Share, ShareLayer, sources


@settings(max_examples=100)
@given(situations())
def test_every_byte_arrives_at_its_coordinate(situation: Situation) -> None:
    oracle.transfer(situation)


@pytest.mark.wide
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(situations())
def test_every_byte_arrives_at_its_coordinate_wide(situation: Situation) -> None:
    oracle.transfer(situation)


def legal(total_heads: int, tp_size: int) -> bool:
    return max(total_heads, tp_size) % min(total_heads, tp_size) == 0


@pytest.mark.parametrize("total_heads", [1, 2, 3, 4, 6, 8, 12])
def test_all_pairs_of_tp_sizes(total_heads: int) -> None:
    """L12, byte by byte: slices, replicas, and sizes that cross, heads outermost in a block; tests/topology has all."""
    layer = ModelLayer("a", 0, "kv", total_heads, 1, 1, 1, 0)
    sizes = [tp_size for tp_size in (1, 2, 3, 4, 6, 8) if legal(total_heads, tp_size)]
    stage = Apart((layer,), (Slot("LBHNC", 0, 1, 0),))
    for consumer_tp, producer_tp in product(sizes, sizes):
        consumer = [stage.layout(rank, consumer_tp, 3, [2]) for rank in range(consumer_tp)]
        producer = [stage.layout(rank, producer_tp, 4, [2]) for rank in range(producer_tp)]
        tables = [[2, 0]], [[3, 1]]
        oracle.transfer(
            Situation(Side(consumer_tp, consumer, tables[0]), Side(producer_tp, producer, tables[1]), (0, 4))
        )


def test_a_share_of_two_intervals_of_one_layer() -> None:
    """Rank 0 holds all heads but the dealing gives head 1 to rank 1, so that rank 0 serves heads 0 and 2."""
    stage = Apart((ModelLayer("a", 0, "kv", 3, 2, 2, 1, 0),), (Slot("LBNHC", 0, 1, 0),))
    one = stage.layout(0, 1, 3, [2])
    part = stage.layout(1, 3, 3, [2])
    producers = [one, part]
    consumers = [one, one]
    shares = sources(one, 1, 2, producers)
    assert [[(p.start, p.stop) for p in share.layers] for share in shares] == [[(0, 1), (2, 3)], [(1, 2)]]
    oracle.transfer(Situation(Side(2, consumers, [[2, 0]]), Side(2, producers, [[1, 2]]), (0, 4)))


def test_a_share_of_some_layers_plans_those_alone() -> None:
    """As a producer that pushes layer by layer does."""
    stage = Pool(tuple(ModelLayer(name, 0, "kv", 2, 2, 2, 1, 0) for name in "abc"), "BLHNC")
    layout = stage.layout(0, 1, 3, [2])
    request = tables([[2, 0]]), tables([[1, 2]]), 0, 4
    whole = [ShareLayer(name, 0, 2) for name in "abc"]
    together = compile(layout, layout, Share(0, tuple(whole))).bind(*request)
    apart = [compile(layout, layout, Share(0, (one,))).bind(*request) for one in whole]
    assert (together.num_descriptors, [plan.num_descriptors for plan in apart]) == (2, [2, 2, 2])
    before = oracle.noise(layout, 1)
    results = []
    for plans in ([together], apart):
        memory, written = [one.copy() for one in before], [np.zeros(len(one), np.int64) for one in before]
        for plan in plans:
            oracle.apply(plan, memory, oracle.noise(layout, 2), written)
        results.append(memory[0])
    np.testing.assert_array_equal(*results)
