"""A producer that writes, and the consumer that it writes for: real agents, sockets and transports."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from agent_engines import BLOCK, HEAD, LAYERS, Engine, digest_of, eventually, open_endpoint, request_for, values

from kvferry.agent import ComputeStep, LoadRequest
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import CloseWrite, Landing, StopWrite, TransferRef, WriteDone, WriteOpened, encode
from kvferry.protocol.writer import FIRST_SEQ
from kvferry.transport.base import Batch, Handle, Peer, Transport, TransportError

NAMES = [f"layer.{index}" for index in range(LAYERS)]


def bytes_of(num_blocks: int) -> int:
    """Of so many blocks in all layers, 4 heads of K and V in float32."""
    return num_blocks * BLOCK * 4 * 2 * HEAD * 4 * LAYERS


class Prefill:
    """One request of a producer's engine, computed when a test says so; what the engine's scheduler and runner do."""

    def __init__(self, engine: Engine, num_tokens: int, routers_id: str) -> None:
        self.engine, self.num_tokens, self.attempt, self.block_ids = engine, num_tokens, 0, [3, 7, 5, 9]
        number = next(engine.numbers) + 1
        self.ref = TransferRef(engine.agent.engine_id, engine.agent.incarnation, secrets.token_hex(16), number)
        engine.agent.promise(self.ref, num_tokens, digest_of(num_tokens), routers_id)

    def begin(self, upto: int) -> None:
        blocks = tuple(self.block_ids[: -(-upto // BLOCK)])
        step = ComputeStep(self.ref.transfer_id, self.attempt, (blocks,), upto, upto == self.num_tokens)
        for worker in self.engine.workers:
            worker.agent.begin_step([step])

    def layer(self, index: int, upto: int) -> None:
        for worker in self.engine.workers:
            heads = worker.agent.record().layout.layers[0].heads
            for head in range(heads.count):
                for token in range(upto):
                    row = values(index, heads.start + head, np.array([token]))[0]
                    worker.cache[index, self.block_ids[token // BLOCK], head, token % BLOCK] = row
            worker.agent.computed_layer(NAMES[index], None)

    def end(self) -> None:
        for worker in self.engine.workers:
            worker.agent.end_step(None)

    def step(self, upto: int) -> None:
        self.begin(upto)
        for index in range(LAYERS):
            self.layer(index, upto)
        self.end()

    def hold(self) -> None:
        self.engine.agent.hold(
            self.ref,
            self.num_tokens,
            digest_of(self.num_tokens),
            blocks_digest([self.block_ids]),
            (tuple(self.block_ids),),
        )

    def preempt(self, block_ids: list[int]) -> None:
        """Its blocks go to others, who write into them."""
        for worker in self.engine.workers:
            worker.cache[:, self.block_ids] = -1.0
        self.attempt, self.block_ids = self.attempt + 1, block_ids


def order_for(prefill: Prefill, blocks: list[int], **changes: object) -> LoadRequest:
    """A load of the concurrent contract, in which only the router's name is known."""
    routers = TransferRef("", "", "tx-1", 0)
    producer, tokens = prefill.engine, prefill.num_tokens
    return request_for(producer, routers, [], blocks, tokens, write=True, producer_block_ids=(), **changes)


def start(consumer: Engine, load: LoadRequest) -> None:
    for worker in consumer.workers:
        worker.agent.load(load)


@pytest.mark.parametrize("transport", ["local", "nixl"])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_what_is_held_is_written_byte_for_byte(make_engine, transport, producer_tp, consumer_tp) -> None:
    producer: Engine = make_engine(producer_tp, transports=(transport,))
    consumer: Engine = make_engine(consumer_tp, transports=(transport,))
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    results = consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=True))
    assert [(result.ok, result.reason, result.quiet) for result in results] == [(True, "", True)] * consumer_tp
    assert {result.transport for result in results} == {transport}
    assert bytes_of(2) < sum(result.num_bytes for result in results) <= bytes_of(3)
    assert consumer.holds_prompt([9, 2, 4], 10)
    eventually(lambda: producer.freed(ref), "the hold ends")
    assert [item.outcome for item in producer.freed(ref)] == ["released"]


@pytest.mark.parametrize("first", ["order", "promise"])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1)])
def test_each_layer_is_written_when_it_is_computed(make_engine, first, producer_tp, consumer_tp) -> None:
    producer, consumer = make_engine(producer_tp), make_engine(consumer_tp)
    prefill = Prefill(producer, 14, "tx-1") if first == "promise" else None
    placeholder = prefill or Prefill(producer, 14, "another")
    load = order_for(placeholder, [9, 2, 4, 8])
    start(consumer, load)
    prefill = prefill or Prefill(producer, 14, "tx-1")

    def arrived(layer: int, tokens: int) -> bool:
        """Of one layer, so many tokens, and no later block."""
        blocks = [9, 2, 4, 8]
        for worker in consumer.workers:
            heads = worker.agent.record().layout.layers[0].heads
            expected = values(layer, heads.start, np.arange(tokens))
            rows = np.concatenate([worker.cache[layer, block, 0] for block in blocks])
            if not np.array_equal(rows[:tokens], expected) or rows[-(-tokens // BLOCK) * BLOCK :].any():
                return False
        return True

    prefill.begin(9)  # two blocks and a token
    prefill.layer(0, 9)
    eventually(lambda: arrived(0, 8), "whole blocks of the first layer")
    assert all(arrived(layer, 0) for layer in range(1, LAYERS))
    prefill.layer(1, 9)
    prefill.end()
    eventually(lambda: all(arrived(layer, 8) for layer in range(LAYERS)), "whole blocks of all layers")
    prefill.begin(14)
    prefill.layer(0, 14)
    eventually(lambda: arrived(0, 14), "all of the first layer")
    assert arrived(1, 8)
    assert consumer.collected(load.load_id) == []
    prefill.layer(1, 14)
    prefill.end()
    prefill.hold()
    eventually(lambda: len(consumer.collected(load.load_id)) == consumer_tp, "all ranks are done")
    assert all(result.ok and result.quiet for result in consumer.collected(load.load_id))
    assert consumer.holds_prompt([9, 2, 4, 8], 14)
    eventually(lambda: producer.freed(prefill.ref), "the hold ends")
    assert [item.outcome for item in producer.freed(prefill.ref)] == ["released"]


def test_only_what_is_missing_is_written(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    load = order_for(prefill, [-1, -1, 4, 8], first_token=8)
    start(consumer, load)
    for upto in (5, 9, 14):
        prefill.step(upto)
    prefill.hold()
    eventually(lambda: consumer.collected(load.load_id), "the load is done")
    (result,) = consumer.collected(load.load_id)
    assert (result.ok, result.num_bytes) == (True, bytes_of(2))
    assert consumer.holds_prompt([0, 0, 4, 8], 14, first_token=8)
    assert not consumer.workers[0].cache[:, 0].any()


def test_a_preempted_prompt_begins_again_in_other_blocks(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    load = order_for(prefill, [9, 2, 4, 8])
    start(consumer, load)
    prefill.step(9)
    first_rows = values(0, 0, np.arange(4))
    eventually(lambda: np.array_equal(consumer.workers[0].cache[0, 9, 0], first_rows), "the first attempt's blocks")
    prefill.preempt([10, 11, 12, 13])
    for upto in (6, 14):
        prefill.step(upto)
    prefill.hold()
    eventually(lambda: consumer.collected(load.load_id), "the load is done")
    (result,) = consumer.collected(load.load_id)
    assert (result.ok, result.num_bytes) == (True, bytes_of(4))  # of the attempt that counts
    assert consumer.holds_prompt([9, 2, 4, 8], 14)


def test_a_request_that_ends_before_its_prompt_is_computed_is_told(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    load = order_for(prefill, [9, 2, 4, 8])
    start(consumer, load)
    prefill.step(9)
    producer.agent.drop(prefill.ref, "the client went away")
    eventually(lambda: consumer.collected(load.load_id), "the load has failed")
    (result,) = consumer.collected(load.load_id)
    assert not result.ok
    assert "the client went away" in result.reason
    eventually(lambda: result.quiet or consumer.inbox(), "nothing can land any more")
    eventually(lambda: producer.freed(prefill.ref), "the blocks come back")
    assert [item.outcome for item in producer.freed(prefill.ref)] == ["failed"]


def test_another_prompt_is_never_written(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    (result,) = consumer.load(order_for(prefill, [9, 2, 4, 8], digest=digest_of(14, salt="other")))
    assert (result.ok, result.quiet) == (False, True)
    assert "digest" in result.reason
    assert not consumer.workers[0].cache.any()


def test_a_consumer_that_cancels_is_told_when_nothing_can_land(make_engine) -> None:
    gate = Gate()
    producer, consumer = make_engine(wrap=gate.wrap), make_engine()
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    load = request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=True)
    start(consumer, load)
    eventually(lambda: gate.posted, "the write is posted")
    consumer.workers[0].agent.cancel(load.load_id, "no longer wanted")
    eventually(lambda: consumer.collected(load.load_id), "the load has failed")
    (result,) = consumer.collected(load.load_id)
    assert (result.ok, result.quiet) == (False, False)
    # The write may still land: the consumer's blocks wait, and so do the producer's.
    assert consumer.inbox() == []
    assert producer.freed(ref) == []
    gate.is_open = True
    eventually(lambda: consumer.inbox(), "nothing can land any more")
    eventually(lambda: producer.freed(ref), "the blocks come back")


def test_a_producer_that_cannot_write_is_read_from(make_engine) -> None:
    producer, consumer = make_engine(wrap=Unreachable), make_engine()
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    (result,) = consumer.load(request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=True))
    assert (result.ok, result.reason) == (True, "")
    assert consumer.holds_prompt([9, 2, 4], 10)
    assert consumer.workers[0].agent.counters["reads_instead"] == 1


def test_a_load_fails_at_its_deadline_and_the_producer_stops(make_engine) -> None:
    producer, consumer = make_engine(), make_engine(leases=Leases(write_s=0.5, claim_reply_s=0.2))
    prefill = Prefill(producer, 14, "tx-1")
    load = order_for(prefill, [9, 2, 4, 8])
    (result,) = consumer.load(load)
    assert not result.ok
    assert "deadline" in result.reason
    eventually(lambda: result.quiet or consumer.inbox(), "the writer has stopped")
    for upto in (9, 14):
        prefill.step(upto)
    prefill.hold()
    eventually(lambda: producer.freed(prefill.ref), "the hold ends")
    assert not consumer.workers[0].cache.any()


class Gate:
    """Holds back the end of writes: they are posted, and stay under way until it opens."""

    def __init__(self) -> None:
        self.is_open = False
        self.posted = False
        self.quiet_by_close = False
        self.is_closed = False

    def wrap(self, transport: Transport) -> Transport:
        from kvferry.transport.base import State, Status

        gate = self

        class Gated(Passing):
            def write(self, peer: Peer, batches: list[Batch]) -> Handle:
                gate.posted = True
                return (peer, batches)  # type: ignore[return-value]

            def poll(self, handle: Handle) -> Status:
                if not gate.is_open:
                    return Status(State.PENDING)
                self.inner.write(*handle)  # type: ignore[misc]
                return Status(State.DONE)

            def release(self, handle: Handle) -> bool:
                return gate.is_open or (gate.quiet_by_close and gate.is_closed)

            def close(self) -> None:
                self.inner.close()
                gate.is_closed = True

        return Gated(transport)


class Passing:
    """A transport that does what another does."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Unreachable(Passing):
    """One that reaches nobody."""

    def connect(self, record: bytes) -> Peer:
        raise TransportError("this side may not touch that side's memory")


def test_a_table_that_names_a_block_twice_is_never_written(make_engine) -> None:
    """Each span of tokens is planned by itself, so the writer would not see it."""
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    (result,) = consumer.load(order_for(prefill, [9, 2, 9, 8]))
    assert (result.ok, result.quiet) == (False, True)
    assert "destination block 9" in result.reason
    assert not consumer.workers[0].cache.any()


def test_a_writer_that_is_proven_gone_is_quiet(make_engine) -> None:
    gate, mortal = Gate(), Mortal()
    producer, consumer = make_engine(wrap=gate.wrap), make_engine(wrap=mortal.wrap)
    producer.fill([3, 7, 5], 10)
    ref = producer.hold([3, 7, 5], 10)
    load = request_for(producer, ref, [3, 7, 5], [9, 2, 4], 10, write=True)
    start(consumer, load)
    eventually(lambda: gate.posted, "the write is posted")
    producer.stop()
    eventually(lambda: consumer.collected(load.load_id), "the load has failed")
    (result,) = consumer.collected(load.load_id)
    assert (result.ok, result.quiet) == (False, False)
    assert consumer.inbox() == []
    mortal.are_gone = True
    eventually(lambda: consumer.inbox(), "its process is gone")


def test_strangers_cannot_speak_for_an_engine_or_a_writer(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    prefill = Prefill(producer, 14, "tx-1")
    load = order_for(prefill, [9, 2, 4, 8])
    start(consumer, load)
    landing = Landing(load.claim_id, load.load_id, 0, 0)
    forged = {
        producer.workers[0].agent: [
            WriteOpened(
                landing=landing, seq=FIRST_SEQ + 1, transfer_id=prefill.ref.transfer_id, block_ids=((1, 2, 3, 4),)
            ),
            StopWrite(landing=landing, reason="stop"),
        ],
        consumer.workers[0].agent: [WriteDone(landing=landing, num_bytes=1, num_descriptors=1, transport="local")],
        producer.agent: [CloseWrite(landing=landing, seq=1)],
    }
    with open_endpoint() as stranger:
        for agent, messages in forged.items():
            for message in messages:
                stranger.send(agent.endpoint.address, encode(message))
        for agent, names in {
            producer.workers[0].agent: ("foreign_writeopened", "foreign_stopwrite"),
            consumer.workers[0].agent: ("foreign_writedone",),
            producer.agent: ("foreign_writers",),
        }.items():
            for name in names:
                counts = agent.counters
                eventually(lambda c=counts, n=name: not stranger.receive(0.001) and c[n] == 1, f"{name} is counted")
    assert consumer.collected(load.load_id) == []
    for upto in (9, 14):
        prefill.step(upto)
    prefill.hold()
    eventually(lambda: consumer.collected(load.load_id), "the load is done")
    assert consumer.collected(load.load_id)[0].ok
    assert consumer.holds_prompt([9, 2, 4, 8], 14)


class Mortal:
    """Knows whether the processes of peers are gone."""

    def __init__(self) -> None:
        self.are_gone = False

    def wrap(self, transport: Transport) -> Transport:
        mortal = self

        class Knowing(Passing):
            def gone(self, peer: Peer) -> bool:
                return mortal.are_gone

        return Knowing(transport)
