"""Cases of bulk.py by the thousand and by the million, and that its oracle can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import bulk
import numpy as np
import oracle
import pytest
from bulk_drawn import Request
from bulk_features import FEATURES, splits

from kvferry.layout import CacheLayout
from kvferry.plan import PlanBatch, TransferPlan

Columns = list[bulk.Ints]

THOUSANDS, MILLION = 4000, 1_000_000
SEED, WIDE_SEED = 1, 1_000_000


@pytest.fixture
def shown(record_property: Callable[[str, object], None]) -> Callable[[Counter[str]], None]:
    """Prints counts in pytest's summary, also from a process of xdist's (see conftest.py)."""
    return lambda counts: record_property("bulk", "\n".join(bulk.report(counts)))


def missing(counts: Counter[str]) -> list[str]:
    return [feature for feature in FEATURES if not counts[feature]]


def test_thousands_of_cases(shown: Callable[[Counter[str]], None]) -> None:
    counts = bulk.run(SEED, THOUSANDS)
    shown(counts)
    assert counts["cases"] >= THOUSANDS
    assert missing(counts) == []


@pytest.mark.wide
@pytest.mark.timeout(7200)
def test_a_million_cases(shown: Callable[[Counter[str]], None]) -> None:
    counts = bulk.run_on_cores(WIDE_SEED, MILLION, workers=2)
    shown(counts)
    assert counts["cases"] >= MILLION
    assert missing(counts) == []
    assert splits() - counts.keys() == set()


def test_several_processes_count_the_same() -> None:
    assert bulk.run_on_cores(SEED, 100, workers=2, seeds_per_chunk=1) == bulk.run(SEED, 100)


def with_data(seed: int) -> tuple[bulk.Made, Request]:
    """A seed's engines, and the first request for which some consumer rank reads bytes."""
    made = bulk.prepare(seed)
    for request in made.requests:
        if any(plan.num_bytes for rank in made.bench.ranks for plan in bulk.bind(rank, request)):
            return made, request
    raise AssertionError(f"seed {seed} draws nothing to move")


@pytest.mark.parametrize("seed", range(8))
def test_the_slow_oracle_agrees(seed: int) -> None:
    """oracle.py finds required bytes and those of the tail in its own way. It gives a second name of the same bytes
    other values, so those are left out."""
    made, request = with_data(seed)
    engines = made.bench.engines
    second_names = engines.other_names.values()

    def without(layout: CacheLayout) -> CacheLayout:
        return CacheLayout(layout.regions, tuple(one for one in layout.layers if one.name not in second_names))

    memory = bulk.fill(made.bench, request)
    for rank in made.bench.ranks:
        plans = bulk.bind(rank, request)
        wanted = bulk.demand(rank, engines.consumer.block_sizes, request)
        tails = bulk.judge(rank, wanted, plans, memory)
        ranks = [without(engines.producer.layouts[source.producer_rank]) for source in rank.sources]
        sides = list(zip(plans, ranks, strict=True))
        verdict = oracle.run(
            without(rank.layout), request.tables[0], (request.first, request.end), sides, request.tables[1]
        )
        assert (verdict.required_bytes, verdict.tail_bytes) == (len(wanted.required), tails.sum())


def shift_consumer(columns: Columns, i: int) -> Columns:
    columns[0][i] += 1
    return columns


def shift_producer(columns: Columns, i: int) -> Columns:
    columns[1][i] -= 1
    return columns


def shift_both(columns: Columns, i: int) -> Columns:
    return shift_producer(shift_consumer(columns, i), i)


def shift_alike(columns: Columns, i: int) -> Columns:
    columns[0][i] += 1
    columns[1][i] += 1
    return columns


def lengthen(columns: Columns, i: int) -> Columns:
    columns[2][i] += 1
    return columns


def shorten(columns: Columns, i: int) -> Columns:
    columns[2][i] -= 1
    return columns


def drop(columns: Columns, i: int) -> Columns:
    return [np.delete(column, i) for column in columns]


def double(columns: Columns, i: int) -> Columns:
    return [np.append(column, column[i]) for column in columns]


def exchange_sources(columns: Columns, i: int) -> Columns:
    columns[1][[i, i - 1]] = columns[1][[i - 1, i]]
    return columns


def exchange_targets(columns: Columns, i: int) -> Columns:
    columns[0][[i, i - 1]] = columns[0][[i - 1, i]]
    return columns


FAULTS = [
    shift_consumer,
    shift_producer,
    shift_both,
    shift_alike,
    lengthen,
    shorten,
    drop,
    double,
    exchange_sources,
    exchange_targets,
]


def spoilt(plan: TransferPlan, fault: Callable[[Columns, int], Columns], i: int) -> TransferPlan:
    """A fault in one descriptor of the largest batch; what the plan says of itself stays."""
    at = max(range(len(plan.batches)), key=lambda one: len(plan.batches[one].lengths))
    batch = plan.batches[at]
    columns = fault([column.copy() for column in batch[2:]], i % len(batch.lengths))
    faulty = PlanBatch(batch.consumer_region, batch.producer_region, *columns)
    return plan._replace(batches=(*plan.batches[:at], faulty, *plan.batches[at + 1 :]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: Callable[[Columns, int], Columns]) -> None:
    planted = 0
    for seed in range(8):
        made, request = with_data(seed)
        memory = bulk.fill(made.bench, request)
        for rank in made.bench.ranks:
            plans = bulk.bind(rank, request)
            wanted = bulk.demand(rank, made.bench.engines.consumer.block_sizes, request)
            for number, plan in enumerate(plans):
                if plan.num_descriptors < 2 * len(plan.batches):
                    continue
                plans[number] = spoilt(plan, fault, seed)
                with pytest.raises(AssertionError):
                    bulk.judge(rank, wanted, plans, memory)
                plans[number] = plan
                planted += 1
    assert planted >= 8


def test_a_required_byte_count_that_is_wrong_is_found() -> None:
    made, request = with_data(0)
    memory = bulk.fill(made.bench, request)
    ranks = [rank for rank in made.bench.ranks if rank.sources]  # a stage may be without layers
    assert ranks
    for rank in ranks:
        plans = bulk.bind(rank, request)
        wanted = bulk.demand(rank, made.bench.engines.consumer.block_sizes, request)
        for name in ("required_bytes", "num_bytes"):
            wrong = [plan._replace(**{name: getattr(plan, name) + 1}) for plan in plans]
            with pytest.raises(AssertionError, match=name):
                bulk.judge(rank, wanted, wrong, memory)


def test_a_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every plan loses its descriptors."""
    bind = bulk.bind
    monkeypatch.setattr(bulk, "bind", lambda *of: [plan._replace(batches=()) for plan in bind(*of)])
    with pytest.raises(bulk.Failure, match=r"seed 5, request 0: .* required .*--seed 5 --cases 1"):
        bulk.run(5, 1)
