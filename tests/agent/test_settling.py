"""Which transport a pair of workers settles on: the first in the consumer's order, among what both have."""

from __future__ import annotations

import pytest
from agent_engines import Engine, LoadResult, request_for

READ, WRITE = False, True


def moved(producer: Engine, consumer: Engine, write: bool) -> list[LoadResult]:
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    return consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=write))


@pytest.mark.parametrize(
    ("producers", "consumers", "write", "settled"),
    [
        (("nixl", "local"), ("local", "nixl"), READ, "local"),
        (("local", "nixl"), ("nixl", "local"), READ, "nixl"),
        (("nixl", "local"), ("local", "nixl"), WRITE, "local"),
        (("local", "nixl"), ("nixl", "local"), WRITE, "nixl"),
        (("local", "nixl"), ("nixl",), READ, "nixl"),
        (("nixl",), ("local", "nixl"), READ, "nixl"),
        (("local",), ("nixl", "local"), WRITE, "local"),
    ],
)
def test_the_consumers_first_that_both_have(make_engine, producers, consumers, write, settled) -> None:
    producer, consumer = make_engine(transports=producers), make_engine(2, transports=consumers)
    results = moved(producer, consumer, write)
    assert [(result.ok, result.transport) for result in results] == [(True, settled)] * 2, results
    assert consumer.holds_prompt([9, 2, 4], 10)


@pytest.mark.parametrize("write", [READ, WRITE], ids=["read", "write"])
def test_nothing_in_common_is_refused_by_name(make_engine, write) -> None:
    producer, consumer = make_engine(transports=("local",)), make_engine(transports=("nixl",))
    (result,) = moved(producer, consumer, write)
    assert not result.ok
    assert "no transport reaches rank 0" in result.reason
    assert "['local']" in result.reason
    assert "['nixl']" in result.reason


def test_a_dead_writer_is_judged_by_the_transport_that_it_wrote_by(make_engine) -> None:
    """What NIXL had sent may still land when its sender is gone, though `local`, which both have too, knows better."""
    producer, consumer = make_engine(transports=("local", "nixl")), make_engine(transports=("nixl", "local"))
    (result,) = moved(producer, consumer, WRITE)
    assert (result.ok, result.transport) == (True, "nixl")
    agent = consumer.workers[0].agent
    (met,) = agent._producers.values()
    assert [source.transport.name for source in met.sources] == ["nixl"]
    assert not met.sources[0].transport.gone(met.sources[0].peer)


@pytest.mark.parametrize("write", [READ, WRITE], ids=["read", "write"])
def test_each_pair_of_workers_settles_for_itself(make_engine, write) -> None:
    """Of an engine's workers one may have what another lacks: a rank without the first choice takes the next."""
    producer = make_engine(2, transports=("local", "nixl"))
    consumer = make_engine(2, transports_of=[("local",), ("nixl",)])
    results = moved(producer, consumer, write)
    assert {(result.rank, result.ok, result.transport) for result in results} == {(0, True, "local"), (1, True, "nixl")}
    assert consumer.holds_prompt([9, 2, 4], 10)
