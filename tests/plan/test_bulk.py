"""Cases of bulk.py by the thousand and by the million, and that its oracle can fail."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice

import bulk
import numpy as np
import oracle
import pytest
from bulk_drawn import Request
from bulk_features import FEATURES, of_request, splits

from kvferry.layout import STATE_TOKENS, CacheLayout
from kvferry.plan import PlanBatch, TransferPlan, Unproven
from kvferry.plan.proof import prove

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


def with_data(seed: int, windows: bool = True) -> tuple[bulk.Made, Request]:
    """A seed's engines, and the first request for which some consumer rank reads bytes; without windows, or any."""
    made = bulk.prepare(seed)
    for request in made.requests:
        if any(request.window_starts) and not windows:
            continue
        if any(plan.num_bytes for rank in made.bench.ranks for plan in bulk.bind(rank, request)):
            return made, request
    raise AssertionError(f"seed {seed} draws nothing to move")


def with_windows() -> Iterator[tuple[bulk.Made, Request]]:
    """Of each seed that draws one, the first request with a sliding window that leaves something out."""
    for seed in count():
        made = bulk.prepare(seed)
        for request in made.requests:
            if any("sliding window" in seen for seen in of_request(made.bench.engines, request).values()):
                yield made, request
                break


@pytest.mark.parametrize("seed", range(8))
def test_the_slow_oracle_agrees(seed: int) -> None:
    """oracle.py finds required bytes and those of the tail in its own way. It gives a second name of the same bytes
    other values, so those are left out; and it knows no windows."""
    made, request = with_data(seed, windows=False)
    engines = made.bench.engines
    second_names = engines.other_names.values()

    def without(layout: CacheLayout) -> CacheLayout:
        return CacheLayout(layout.regions, tuple(one for one in layout.layers if one.name not in second_names))

    memory = bulk.fill(made.bench, request)
    for rank in made.bench.ranks:
        plans = bulk.bind(rank, request)
        wanted = bulk.demand(rank, engines, request)
        surplus = bulk.judge(rank, wanted, plans, memory)
        ranks = [without(engines.producer.layouts[source.producer_rank]) for source in rank.sources]
        sides = list(zip(plans, ranks, strict=True))
        verdict = oracle.run(
            without(rank.layout), request.tables[0], (request.first, request.end), sides, request.tables[1]
        )
        required = len(wanted.required.addresses)
        assert (verdict.required_bytes, verdict.tail_bytes, 0) == (required, surplus.tail.sum(), surplus.head.sum())


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
    for seed, (made, request) in enumerate([*map(with_data, range(8)), *islice(with_windows(), 4)]):
        memory = bulk.fill(made.bench, request)
        for rank in made.bench.ranks:
            plans = bulk.bind(rank, request)
            wanted = bulk.demand(rank, made.bench.engines, request)
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
        wanted = bulk.demand(rank, made.bench.engines, request)
        for name in ("required_bytes", "num_bytes"):
            wrong = [plan._replace(**{name: getattr(plan, name) + 1}) for plan in plans]
            with pytest.raises(AssertionError, match=name):
                bulk.judge(rank, wanted, wrong, memory)


def begun_late(made: bulk.Made, request: Request) -> Iterator[tuple[bulk.Rank, int, TransferPlan]]:
    """Plans of consumer ranks (by the number of their source) in which some unit begins behind the window's start."""
    late = request._replace(window_starts=[request.end] * len(request.window_starts))
    for rank in made.bench.ranks:
        for number, (plan, source) in enumerate(zip(bulk.bind(rank, late), rank.sources, strict=True)):
            if any(have > begin for have, begin in zip(plan.starts, begins(source, request), strict=True)):
                yield rank, number, plan


def begins(source: bulk.Source, request: Request) -> list[int]:
    """For each unit, the first token that is wanted."""
    return [max(request.first, request.window_starts[unit.group]) for unit in source.pair.units]


def prove_for(source: bulk.Source, request: Request, plan: TransferPlan) -> None:
    mine, theirs = ([np.array(table, np.int64) for table in side] for side in request.tables)
    pair = source.pair
    prove(pair.claims, pair.region_bytes, (mine, theirs), (request.first, request.end), plan, request.window_starts)


def test_a_start_that_was_raised_does_not_pass_the_proof() -> None:
    planted = 0
    for made, request in islice(with_windows(), 8):
        for rank in made.bench.ranks:
            for plan, source in zip(bulk.bind(rank, request), rank.sources, strict=True):
                prove_for(source, request, plan)
                for unit, begin in enumerate(begins(source, request)):
                    raised = (*plan.starts[:unit], begin + 1, *plan.starts[unit + 1 :])
                    group = source.pair.units[unit].group
                    text = (
                        f"group {group}: first token: consumer has ({request.first}, {begin}), producer has {begin + 1}"
                    )
                    with pytest.raises(Unproven, match=re.escape(text)):
                        prove_for(source, request, plan._replace(starts=raised))
                    planted += 1
    assert planted >= 8


@pytest.mark.parametrize(("what", "moved"), [("starts", -1), ("stops", -1), ("stops", STATE_TOKENS)])
def test_an_extent_beyond_what_is_asked_for_or_short_of_it_does_not_pass(what: str, moved: int) -> None:
    """A plan that begins too early would write what the consumer has; one that ends too early leaves tokens out."""
    planted = 0
    for made, request in islice(with_windows(), 8):
        for rank in made.bench.ranks:
            for plan, source in zip(bulk.bind(rank, request), rank.sources, strict=True):
                least = (request.first if what == "starts" else request.end) + moved
                changed = plan._replace(**{what: (least, *getattr(plan, what)[1:])})
                with pytest.raises(Unproven, match=r"first token|end of tokens"):
                    prove_for(source, request, changed)
                planted += 1
    assert planted >= 8


def test_a_plan_that_begins_late_throughout_does_not_pass_the_proof() -> None:
    """Its descriptors are as its starts say."""
    planted = 0
    for made, request in islice(with_windows(), 8):
        for rank, number, plan in begun_late(made, request):
            with pytest.raises(Unproven, match="first token"):
                prove_for(rank.sources[number], request, plan)
            planted += 1
    assert planted >= 8


def test_a_plan_that_begins_late_leaves_bytes_out() -> None:
    planted = 0
    for made, request in islice(with_windows(), 8):
        memory = bulk.fill(made.bench, request)
        for rank, number, late in begun_late(made, request):
            plans = bulk.bind(rank, request)
            if late.num_bytes < plans[number].num_bytes:
                plans[number] = late
                with pytest.raises(AssertionError, match="a required byte is missing"):
                    bulk.judge(rank, bulk.demand(rank, made.bench.engines, request), plans, memory)
                planted += 1
    assert planted >= 8


def with_all_blocks(made: bulk.Made, request: Request) -> Request:
    """As from a producer that has not dropped what lies before a window."""
    consumer, producer = request.tables
    free = iter(set(range(made.bench.engines.producer.num_blocks)) - {one for table in producer for one in table})
    return request._replace(tables=(consumer, [[next(free) if one < 0 else one for one in of] for of in producer]))


def test_a_plan_that_forgets_the_window_writes_too_much() -> None:
    planted = 0
    for made, windowed in islice(with_windows(), 24):
        request = with_all_blocks(made, windowed)
        memory = bulk.fill(made.bench, request)
        for rank in made.bench.ranks:
            wanted = bulk.demand(rank, made.bench.engines, request)
            plans = bulk.bind(rank, request._replace(window_starts=[0] * len(request.window_starts)))
            if sum(plan.num_bytes for plan in plans) > sum(len(marks.addresses) for marks in wanted):
                with pytest.raises(AssertionError, match="written outside"):
                    bulk.judge(rank, wanted, plans, memory)
                planted += 1
    assert planted >= 8


def test_a_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every plan loses its descriptors."""
    bind = bulk.bind
    monkeypatch.setattr(bulk, "bind", lambda *of: [plan._replace(batches=()) for plan in bind(*of)])
    with pytest.raises(bulk.Failure, match=r"seed 5, request 0: .* required .*--seed 5 --cases 1"):
        bulk.run(5, 1)
