"""Golden plans: each case's numbers, and a byte-exact copy where every byte says which coordinate it is."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import oracle
import pytest
from golden import CASES, by_layer, cache, plan_case

from kvferry.plan import Refusal
from kvferry.topology import sources

PLANS = [case for case in CASES if "refused" not in case]
REFUSALS = [case for case in CASES if "refused" in case]


def name(case: dict[str, Any]) -> str:
    return case["name"]


@pytest.mark.parametrize("case", PLANS, ids=name)
def test_plan(case: dict[str, Any]) -> None:
    consumer, plans = plan_case(case)
    expected = case["descriptors_by_source"] if "descriptors_by_source" in case else [case["descriptors"]]
    assert [by_layer(consumer, plan) for plan, _ in plans] == expected
    assert sum(plan.num_bytes for plan, _ in plans) == case["num_bytes"]
    assert sum(plan.required_bytes for plan, _ in plans) == case.get("required_bytes", case["num_bytes"])
    found = sum(len(layer) for plan in expected for layer in plan.values())
    assert sum(plan.num_descriptors for plan, _ in plans) == found


@pytest.mark.parametrize("case", [case for case in PLANS if "source_ranks" in case], ids=name)
def test_source_ranks(case: dict[str, Any]) -> None:
    producers = [cache(one) for one in case["producers"]]
    shares = sources(cache(case["consumer"]), *case["consumer_rank"], producers)
    assert [share.producer_rank for share in shares] == case["source_ranks"]


@pytest.mark.parametrize("case", [case for case in PLANS if not case.get("huge")], ids=name)
def test_every_byte_arrives_at_its_coordinate(case: dict[str, Any]) -> None:
    consumer, plans = plan_case(case)
    oracle.run(consumer, case["consumer_tables"], case["tokens"], plans, case["producer_tables"])


@pytest.mark.parametrize("case", [case for case in PLANS if case.get("any_order")], ids=name)
def test_answers_do_not_depend_on_the_order_of_registration(case: dict[str, Any]) -> None:
    for order in permutations(range(len(case["consumer"]["layers"]))):
        consumer, [(plan, producer)] = plan_case(case, list(order))
        assert by_layer(consumer, plan) == case["descriptors"], order
        layers = [consumer.layers[batch.consumer_region].name for batch in plan.batches]
        assert layers == [layer.name for layer in consumer.layers]
        request = case["consumer_tables"], case["tokens"], [(plan, producer)], case["producer_tables"]
        oracle.run(consumer, *request)


@pytest.mark.parametrize("case", REFUSALS, ids=name)
def test_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refusal:
        plan_case(case)
    for word in case["refused"]:
        assert word in str(refusal.value)
