"""Golden cases (tests/cases/plan.json): layouts, block tables and answers as data, as `kvferry plan` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.cli.plan.cases import cache, tables
from kvferry.layout import CacheLayout
from kvferry.plan import TransferPlan, compile, prove_shares
from kvferry.topology import sources

CASES = json.loads((Path(__file__).parent.parent / "cases" / "plan.json").read_text())


def plan_case(
    case: dict[str, Any], order: list[int] | None = None
) -> tuple[CacheLayout, list[tuple[TransferPlan, CacheLayout]]]:
    """The consumer's layout, and the plan for each source with that producer's layout."""
    consumer = cache(case["consumer"], order)
    producers = [cache(one) for one in case["producers"]]
    rank, num_ranks = case.get("consumer_rank", (0, 1))
    shares = sources(consumer, rank, num_ranks, producers)
    prove_shares(consumer, [(share, producers[share.producer_rank]) for share in shares])
    plans = []
    for share in shares:
        producer = producers[share.producer_rank]
        pair = compile(consumer, producer, share)
        request = tables(case["consumer_tables"]), tables(case["producer_tables"]), *case["tokens"]
        plans.append((pair.bind(*request), producer))
    return consumer, plans


def by_layer(consumer: CacheLayout, plan: TransferPlan) -> dict[str, list[list[int]]]:
    """Descriptors by layer name, which is by region here: [consumer offset, producer offset, length]."""
    return {consumer.layers[batch.consumer_region].name: np.stack(batch[2:], axis=1).tolist() for batch in plan.batches}
