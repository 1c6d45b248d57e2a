"""A producer and a consumer engine, whole but for vLLM."""

from __future__ import annotations

import secrets
import threading

import pytest
from agent_engines import Engine, digest_of, eventually, request_for

from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import TransferRef


@pytest.mark.parametrize("transport", ["local", "nixl"])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_a_prompt_arrives_byte_for_byte_and_is_released(make_engine, transport, producer_tp, consumer_tp) -> None:
    producer: Engine = make_engine(producer_tp, transports=(transport,))
    consumer: Engine = make_engine(consumer_tp, transports=(transport,))
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    results = consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10))
    assert [(result.ok, result.reason) for result in results] == [(True, "")] * consumer_tp
    assert {result.transport for result in results} == {transport}
    assert consumer.holds_prompt([9, 2, 4], 10)
    eventually(lambda: producer.freed(ref), "the hold ends")
    assert [item.outcome for item in producer.freed(ref)] == ["released"]


def test_only_what_is_missing_moves(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    producer.fill([3, 7, 5], 12)
    ref = producer.hold([3, 7, 5], 12)
    (result,) = consumer.load(request_for(producer, ref, [3, 7, 5], [-1, -1, 4], 12, first_token=8))
    assert result.ok
    assert result.num_bytes == 4 * 4 * 2 * 8 * 4 * 2  # tokens, heads, K and V of 8, float32, layers
    assert consumer.holds_prompt([0, 0, 4], 12, first_token=8)
    assert not consumer.workers[0].cache[:, 0].any()


def test_the_hold_lasts_until_every_rank_has_released(make_engine) -> None:
    producer, consumer = make_engine(1), make_engine(2)
    producer.fill([1], 4)
    ref = producer.hold([1], 4)
    load = request_for(producer, ref, [1], [1], 4)
    consumer.workers[0].agent.load(load)
    eventually(lambda: consumer.collected(load.load_id), "the first rank is done")
    producer.agent.void("a reset gives back only what nobody claimed")
    assert producer.freed(ref) == []
    consumer.workers[1].agent.load(load)
    eventually(lambda: producer.freed(ref), "the hold ends")
    assert [item.outcome for item in producer.freed(ref)] == ["released"]


def test_two_requests_on_one_transfer_both_get_it(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    producer.fill([1, 2], 8)
    ref = producer.hold([1, 2], 8)
    first = request_for(producer, ref, [1, 2], [1, 2], 8)
    second = request_for(producer, ref, [1, 2], [3, 4], 8)
    for load in (first, second):
        consumer.agent.arrived(load.claim_id, ref, load.address, "", 1)
    assert consumer.load(first)[0].ok
    consumer.agent.over(first.claim_id, "done")
    assert producer.freed(ref) == []
    assert consumer.load(second)[0].ok
    assert consumer.holds_prompt([3, 4], 8)
    eventually(lambda: producer.freed(ref), "the hold ends")


def test_a_request_that_never_loads_still_releases(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    ref = producer.hold([1], 4)
    claim_id = secrets.token_hex(16)
    consumer.agent.arrived(claim_id, ref, producer.agent.endpoint.address, "", 1)
    consumer.agent.over(claim_id, "unused", "a full local hit")
    eventually(lambda: producer.freed(ref), "the hold ends")
    assert producer.freed(ref)[0].outcome == "released"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"digest": digest_of(10, salt="another user's")}, "digest"),
        ({"blocks_digest": b"\0" * 16}, "blocks"),
        ({"num_tokens": 9, "digest": digest_of(9)}, "digest"),
    ],
)
def test_what_is_not_the_prompts_is_refused(make_engine, change, word) -> None:
    producer, consumer = make_engine(), make_engine()
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    (result,) = consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, **change))
    assert not result.ok
    assert word in result.reason


def test_another_generation_is_refused_and_the_hold_stays(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    ref = producer.hold([1], 4)
    stale = TransferRef(ref.producer, ref.incarnation, ref.transfer_id, ref.generation + 1)
    (result,) = consumer.load(request_for(producer, stale, [1], [1], 4))
    assert not result.ok
    assert "generation" in result.reason
    assert producer.freed(ref) == []


def test_an_unknown_transfer_is_refused(make_engine) -> None:
    producer, consumer = make_engine(leases=Leases(parking_s=0.05)), make_engine()
    ref = TransferRef(producer.agent.engine_id, producer.agent.incarnation, "ab" * 16, 1)
    (result,) = consumer.load(request_for(producer, ref, [1], [1], 4))
    assert not result.ok
    assert "unknown" in result.reason


def test_a_late_reader_of_a_released_transfer_is_refused(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    producer.fill([1], 4)
    ref = producer.hold([1], 4)
    assert consumer.load(request_for(producer, ref, [1], [1], 4))[0].ok
    eventually(lambda: producer.freed(ref), "the hold ends")
    (late,) = consumer.load(request_for(producer, ref, [1], [2], 4))
    assert not late.ok
    assert "released" in late.reason


@pytest.mark.parametrize(
    ("consumer_options", "named"),
    [
        ({"fingerprint": {"model": "another"}}, "model"),
        ({"total_heads": 8}, "heads"),
        ({"transports": ("nixl",)}, "transport"),
    ],
)
def test_a_mismatch_is_named_at_the_handshake(make_engine, consumer_options, named) -> None:
    producer, consumer = make_engine(), make_engine(**consumer_options)
    ref = producer.hold([1], 4)
    (result,) = consumer.load(request_for(producer, ref, [1], [1], 4))
    assert not result.ok
    assert named in result.reason
    assert not consumer.workers[0].cache.any()


def test_block_ids_outside_the_cache_are_refused(make_engine) -> None:
    producer, consumer = make_engine(num_blocks=8), make_engine()
    ref = producer.hold([9], 4)
    (result,) = consumer.load(request_for(producer, ref, [9], [1], 4))
    assert not result.ok
    assert "9" in result.reason


def test_nobody_at_the_address_fails_without_waiting_for_the_deadline(make_engine) -> None:
    producer, consumer = make_engine(), make_engine(leases=Leases(handshake_s=300, load_s=300))
    address = producer.agent.endpoint.address
    ref = producer.hold([1], 4)
    producer.stop()
    (result,) = consumer.load(request_for(producer, ref, [1], [1], 4, address=address))
    assert not result.ok
    assert address in result.reason


def test_a_refused_load_is_reported_with_its_reason_and_moves_nothing(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    ref = producer.hold([1], 4)
    (result,) = consumer.load(request_for(producer, ref, [1], [1], 4, refused="the parameters make no sense"))
    assert (result.ok, result.quiet, result.num_bytes) == (False, True, 0)
    assert "the parameters make no sense" in result.reason


def test_unclaimed_holds_expire(make_engine) -> None:
    producer = make_engine(leases=Leases(first_hold_s=0.2))
    ref = producer.hold([1], 4)
    eventually(lambda: producer.freed(ref), "the hold expires")
    assert producer.freed(ref)[0].outcome == "expired"


def test_claims_lapse_when_their_engine_is_gone(make_engine) -> None:
    producer, consumer = make_engine(leases=Leases(lease_s=0.4, renew_s=0.1)), make_engine()
    ref = producer.hold([1], 4)
    consumer.agent.arrived(secrets.token_hex(16), ref, producer.agent.endpoint.address, "", 1)
    eventually(lambda: producer.agent._producer.num_open_claims, "the claim is open")
    consumer.stop()
    eventually(lambda: producer.freed(ref), "the claim lapses")
    assert producer.freed(ref)[0].outcome == "lapsed"


def test_a_renewed_claim_outlives_its_lease(make_engine) -> None:
    leases = Leases(lease_s=0.6, renew_s=0.1, first_hold_s=0.6)
    producer, consumer = make_engine(leases=leases), make_engine(leases=leases)
    producer.fill([1], 4)
    ref = producer.hold([1], 4)
    load = request_for(producer, ref, [1], [1], 4)
    consumer.agent.arrived(load.claim_id, ref, load.address, "", 1)
    other = producer.hold([2], 4)
    eventually(lambda: producer.freed(other), "a hold beside it expires")
    third = producer.hold([2], 4)
    eventually(lambda: producer.freed(third), "and another")
    assert producer.freed(ref) == []
    assert consumer.load(load)[0].ok


def test_a_stale_request_does_not_disturb_loads_of_the_same_address(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    producer.fill([1], 4)
    assert consumer.load(request_for(producer, producer.hold([1], 4), [1], [1], 4))[0].ok
    ref = producer.hold([1], 4)
    former = TransferRef(ref.producer, "of an earlier start", ref.transfer_id, ref.generation)
    stale, good = request_for(producer, former, [1], [2], 4), request_for(producer, ref, [1], [3], 4)
    for load in (stale, good):
        consumer.workers[0].agent.load(load)
    eventually(lambda: consumer.collected(stale.load_id) and consumer.collected(good.load_id), "both end")
    assert not consumer.collected(stale.load_id)[0].ok
    assert "incarnation" in consumer.collected(stale.load_id)[0].reason
    assert consumer.collected(good.load_id)[0].ok
    assert consumer.load(request_for(producer, producer.hold([1], 4), [1], [4], 4))[0].ok


def test_nothing_lands_before_the_device_has_done_what_it_was_told_before(make_engine) -> None:
    """It may be clearing the blocks, or still be computing for the request that had them. What is cancelled meanwhile
    never starts."""
    producer, consumer = make_engine(), make_engine()
    producer.fill([3, 7, 5], 10)
    refs = [producer.hold([3, 7, 5], 10) for _ in range(2)]
    first, second = (request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10) for ref in refs)
    is_done = threading.Event()
    asked: list[bool] = []
    worker = consumer.workers[0].agent
    worker.load(first, lambda: asked.append(True) or is_done.is_set())
    worker.load(second)
    worker.cancel(second.load_id, "the client went away")
    eventually(lambda: len(asked) > 3, "the device is asked again and again")
    assert not consumer.workers[0].cache.any()
    is_done.set()
    eventually(lambda: consumer.collected(first.load_id) and consumer.collected(second.load_id), "both end")
    assert [consumer.collected(load.load_id)[0].ok for load in (first, second)] == [True, False]
    assert consumer.holds_prompt([9, 2, 4], 10)


def test_a_load_that_waited_for_the_device_when_its_worker_stopped_has_failed_and_is_quiet(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    load = request_for(producer, producer.hold([3, 7, 5], 10), [3, 7, 5], [9, 2, 4], 10)
    worker = consumer.workers[0].agent
    worker.load(load, lambda: False)
    worker.stop()
    (result,) = consumer.collected(load.load_id)
    assert (result.ok, result.quiet) == (False, True)
