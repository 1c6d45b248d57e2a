"""Drawn engines and requests: every required byte arrives at its coordinate, and nothing else is touched."""

from __future__ import annotations

import oracle
import pytest
from drawn import Situation, situations
from golden import tables
from hypothesis import given, settings

from kvferry.plan import compile, prove_shares
from kvferry.topology import sources


def transfer(situation: Situation) -> None:
    """Plan and run the situation for each consumer rank."""
    consumer, producer, tokens = situation
    for rank, layout in enumerate(consumer.layouts):
        tp_rank = rank % consumer.tp_size
        shares = sources(layout, tp_rank, consumer.tp_size, producer.layouts)
        prove_shares(layout, [(share, producer.layouts[share.producer_rank]) for share in shares])
        plans = []
        for share in shares:
            source = producer.layouts[share.producer_rank]
            pair = compile(layout, source, share)
            plans.append((pair.bind(tables(consumer.tables), tables(producer.tables), *tokens), source))
        oracle.run(layout, consumer.tables, tokens, plans, producer.tables)


@settings(max_examples=150)
@given(situations())
def test_every_byte_arrives_at_its_coordinate(situation: Situation) -> None:
    transfer(situation)


@pytest.mark.wide
@settings(max_examples=10_000)
@given(situations())
def test_every_byte_arrives_at_its_coordinate_wide(situation: Situation) -> None:
    transfer(situation)
