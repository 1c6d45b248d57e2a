"""Peers that are not what a handshake told any more: workers that slept, engines that restarted, connections that were
idle, and strangers who say so."""

from __future__ import annotations

import pytest
from agent_engines import Engine, eventually, open_endpoint, request_for
from test_writing import Gate, Passing, Prefill, start

from kvferry.agent import LoadResult
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Landing, RemoteBlocks, TransferRef, encode
from kvferry.transport.base import Batch, Handle, Peer, State, Status, Transport

IDLE_S = 0.5
QUICK = Leases(claim_reply_s=0.3, lease_s=10.0, renew_s=2.0, first_hold_s=10.0, longest_hold_s=20.0, write_s=20.0)


def moved(producer: Engine, consumer: Engine, write: bool) -> LoadResult:
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    for worker in consumer.workers:
        worker.cache[:] = 0.0
    results = consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=write))
    assert not results[0].ok or consumer.holds_prompt([9, 2, 4], 10)
    return results[0]


def by_routers_name(producer: Engine, consumer: Engine, name: str) -> LoadResult:
    """One transfer of the concurrent contract; nobody knows the producer's incarnation beforehand."""
    prefill = Prefill(producer, 14, name)
    ref = TransferRef("", "", name, 0)
    load = request_for(producer, ref, [], [9, 2, 4, 8], 14, write=True, producer_block_ids=())
    start(consumer, load)
    for upto in (9, 14):
        prefill.step(upto)
    prefill.hold()
    eventually(lambda: consumer.collected(load.load_id), f"the load {name} ends")
    return consumer.collected(load.load_id)[0]


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_workers_that_slept_are_found_again(make_engine, who, write) -> None:
    """One load may fail, by which the other side learns of it."""
    producer, consumer = make_engine(leases=QUICK), make_engine(leases=QUICK)
    assert moved(producer, consumer, write).ok
    (producer if who == "producer" else consumer).sleep_and_wake()
    results = [moved(producer, consumer, write) for _ in range(3)]
    assert [result.ok for result in results[1:]] == [True, True], results
    eventually(lambda: results[0].quiet or consumer.inbox(), "what failed is quiet")


def test_a_consumer_that_slept_before_it_was_first_written_to_is_asked_anew(make_engine) -> None:
    """What its handshake told is no way to it any more, and no peer was there to be lost."""
    producer, consumer = make_engine(leases=QUICK), make_engine(leases=QUICK)
    assert moved(producer, consumer, True).ok
    writing = producer.workers[0].agent._writing
    assert writing is not None
    (met,) = writing._consumers.values()
    met.leave()
    consumer.sleep_and_wake()
    assert all(moved(producer, consumer, True).ok for _ in range(3))
    assert consumer.workers[0].agent.counters["reads_instead"] == 1


def posted(producer: Engine, consumer: Engine, gate: Gate) -> tuple[TransferRef, str]:
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    load = request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=True)
    start(consumer, load)
    eventually(lambda: gate.posted, "the write is posted")
    return ref, load.load_id


def test_a_producer_that_sleeps_closes_what_is_quiet_when_its_transports_are(make_engine) -> None:
    gate = Gate()
    producer, consumer = make_engine(leases=QUICK, wrap=gate.wrap), make_engine(leases=QUICK)
    ref, load_id = posted(producer, consumer, gate)
    gate.quiet_by_close = True
    producer.sleep_and_wake()
    eventually(lambda: consumer.collected(load_id), "the load fails")
    assert not consumer.collected(load_id)[0].ok
    eventually(lambda: consumer.inbox(), "the consumer hears that it is quiet")
    eventually(lambda: producer.freed(ref), "the hold ends")


def test_a_producer_that_sleeps_never_calls_quiet_what_it_could_not_end(make_engine) -> None:
    gate = Gate()
    producer, consumer = make_engine(leases=QUICK, wrap=gate.wrap), make_engine(leases=QUICK)
    ref, load_id = posted(producer, consumer, gate)
    producer.sleep_and_wake()
    eventually(lambda: consumer.collected(load_id), "the load fails")
    result = consumer.collected(load_id)[0]
    assert (result.ok, result.quiet) == (False, False)
    told = producer.workers[0].agent.counters
    eventually(lambda: told["unquiet_landing"] > 1, "the next agent has answered for it")
    assert consumer.inbox() == []
    assert producer.freed(ref) == []


def test_an_engine_that_restarted_at_its_address_while_nobody_looked(make_engine) -> None:
    consumer = make_engine(leases=QUICK, idle_s=IDLE_S)
    producer = make_engine(leases=QUICK, idle_s=IDLE_S)
    assert by_routers_name(producer, consumer, "tx-1").ok
    port = int(producer.agent.endpoint.address.rpartition(":")[2])
    worker = consumer.workers[0].agent
    eventually(lambda: not worker.endpoint._peers, "the connection has been forgotten")
    producer.stop()
    producer = make_engine(leases=QUICK, port=port)
    assert by_routers_name(producer, consumer, "tx-2").ok


def test_of_consumers_that_are_gone_nothing_is_kept(make_engine) -> None:
    producer = make_engine(idle_s=IDLE_S)
    writing = producer.workers[0].agent
    for _ in range(3):
        consumer = make_engine()
        assert moved(producer, consumer, True).ok
        consumer.stop()
    eventually(lambda: not writing._writing._consumers and not writing._writing._machine._ready, "they are forgotten")
    eventually(lambda: not writing._writing._retired, "and disconnected")


def stray_order(producer: Engine, **fields: object) -> RemoteBlocks:
    given = {
        "landing": Landing("claim", "load", 0, 77),
        "ref": TransferRef("", "", "nothing", 0),
        "producer_incarnation": producer.agent.incarnation,
        "engine_id": "nobody",
        "incarnation": "none",
        "address": producer.agent.endpoint.address,
        "key_id": "bogus",
        "transport": "local",
        "num_ranks": 1,
        "num_tokens": 1,
        "digest": b"",
        "topology_digest": b"",
        "first_token": 0,
        "end_token": 1,
        "window_starts": (),
        "block_ids": ((1,),),
    }
    return RemoteBlocks(**{**given, **fields})


@pytest.mark.parametrize("landing", [Landing("claim", "load", 0, 77), Landing("claim", "load", 0, 0)])
def test_nobody_renames_the_key_of_a_workers_own_engine(make_engine, landing) -> None:
    secret = (b"a secret that all of them share.",)
    producer = make_engine(leases=QUICK, secret_keys=secret, idle_s=IDLE_S)
    consumer = make_engine(leases=QUICK, secret_keys=secret)
    assert by_routers_name(producer, consumer, "tx-1").ok
    worker = producer.workers[0].agent
    with open_endpoint(secret) as stranger:
        stranger.send(worker.endpoint.address, encode(stray_order(producer, landing=landing)))
        names = ("stray_order", "failed_handshakes")
        eventually(lambda: not stranger.receive(0.001) and any(worker.counters[name] for name in names), "it came")
    eventually(lambda: not worker.endpoint._peers, "the connection to the own engine has been forgotten")
    assert by_routers_name(producer, consumer, "tx-2").ok


def test_an_order_for_another_engine_at_the_address_fails_alone(make_engine) -> None:
    producer, consumer = make_engine(leases=QUICK), make_engine(leases=QUICK)
    address = consumer.agent.endpoint.address
    with open_endpoint() as stranger:
        for number in range(20):
            order = stray_order(producer, landing=Landing(f"claim {number}", "load", 0, 0), address=address, key_id="")
            stranger.send(producer.workers[0].agent.endpoint.address, encode(order))
        failed = producer.workers[0].agent.counters
        eventually(lambda: not stranger.receive(0.001) and failed["failed_handshakes"], "the first handshake")
        assert by_routers_name(producer, consumer, "tx-1").ok


class Broken:
    """Its writes fail, and only later can it be told that nothing more of them lands."""

    def __init__(self) -> None:
        self.posts = 0
        self.is_quiet = False

    def wrap(self, transport: Transport) -> Transport:
        broken = self

        class Breaking(Passing):
            def write(self, peer: Peer, batches: list[Batch]) -> Handle:
                broken.posts += 1
                return self.inner.write(peer, batches)

            def poll(self, handle: Handle) -> Status:
                return Status(State.FAILED, "the wire is cut")

            def release(self, handle: Handle) -> bool:
                return broken.is_quiet and self.inner.release(handle)

        return Breaking(transport)


def test_what_has_failed_posts_nothing_more_and_becomes_quiet(make_engine) -> None:
    """Not in a later step of the same prompt, nor in a new attempt after a preemption."""
    broken = Broken()
    producer, consumer = make_engine(leases=QUICK, wrap=broken.wrap), make_engine(leases=QUICK)
    prefill = Prefill(producer, 14, "tx-1")
    ref = TransferRef("", "", "tx-1", 0)
    load = request_for(producer, ref, [], [9, 2, 4, 8], 14, write=True, producer_block_ids=())
    start(consumer, load)
    prefill.step(9)
    eventually(lambda: consumer.collected(load.load_id), "the load fails")
    posts = broken.posts
    prefill.begin(14)
    prefill.layer(0, 14)
    prefill.preempt([10, 11, 12, 13])
    prefill.step(9)
    broken.is_quiet = True
    eventually(lambda: consumer.inbox(), "the consumer hears that it is quiet")
    prefill.step(14)
    producer.agent.drop(prefill.ref, "the client went away")
    eventually(lambda: producer.freed(prefill.ref), "the hold ends")
    assert broken.posts == posts


def test_a_writer_is_stopped_though_its_connection_home_was_idle(make_engine) -> None:
    leases = Leases(claim_reply_s=0.2, lease_s=3.0, renew_s=1.0, first_hold_s=5.0, write_s=60.0)
    producer, consumer = make_engine(leases=leases, idle_s=IDLE_S), make_engine(leases=leases)
    prefill = Prefill(producer, 14, "tx-1")
    ref = TransferRef("", "", "tx-1", 0)
    load = request_for(producer, ref, [], [9, 2, 4, 8], 14, write=True, producer_block_ids=())
    start(consumer, load)
    writing = producer.workers[0].agent
    eventually(lambda: writing._writing is not None and writing._writing._jobs, "it may write")
    eventually(lambda: not writing.endpoint._peers, "its connections have been forgotten")
    consumer.stop()
    producer.agent.drop(prefill.ref, "the client went away")
    eventually(lambda: producer.freed(prefill.ref), "the hold ends")
