"""One load that fails fails alone, and a transport's back-pressure is no failure."""

from __future__ import annotations

import pytest
from agent_engines import Engine, eventually, request_for

from kvferry.transport.base import PeerLost, QueueFull, State, Status, Transport


class Faulty:
    """The real transport behind a fault: each test sets what `read`, `poll` or `release` does instead, by call."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.on_read: list[Exception] = []
        self.on_poll: list[Status] = []
        self.unquiet = 0

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def read(self, peer, batches):
        if self.on_read:
            raise self.on_read.pop(0)
        return self._transport.read(peer, batches)

    def poll(self, handle) -> Status:
        return self.on_poll.pop(0) if self.on_poll else self._transport.poll(handle)

    def release(self, handle) -> bool:
        if self.unquiet:
            self.unquiet -= 1
            return False
        return self._transport.release(handle)


@pytest.fixture
def faulty(make_engine) -> tuple[Engine, Engine, Faulty]:
    made: list[Faulty] = []

    def wrap(transport: Transport) -> Faulty:
        made.append(Faulty(transport))
        return made[-1]

    producer, consumer = make_engine(), make_engine(wrap=wrap)
    producer.fill([1, 2], 8)
    return producer, consumer, made[0]


def load_of(producer: Engine):
    ref = producer.hold([1, 2], 8)
    return request_for(producer, ref, [1, 2], [5, 6], 8)


def test_queue_full_is_back_pressure(faulty) -> None:
    producer, consumer, transport = faulty
    transport.on_read = [QueueFull("busy")] * 3
    (result,) = consumer.load(load_of(producer))
    assert result.ok
    assert consumer.holds_prompt([5, 6], 8)


@pytest.mark.parametrize("error", [PeerLost("gone"), ValueError("a library's own error")])
def test_a_read_that_cannot_be_posted_fails_its_load_only(faulty, error) -> None:
    producer, consumer, transport = faulty
    transport.on_read = [error]
    (failed,) = consumer.load(load_of(producer))
    assert (failed.ok, str(error) in failed.reason) == (False, True)
    (result,) = consumer.load(load_of(producer))
    assert result.ok


def test_a_read_that_fails_is_reported_at_once_and_quiet_later(faulty) -> None:
    producer, consumer, transport = faulty
    transport.on_poll = [Status(State.FAILED, "wire cut")]
    transport.unquiet = 20
    load = load_of(producer)
    (failed,) = consumer.load(load)
    assert (failed.ok, failed.quiet, failed.reason) == (False, False, "wire cut")
    eventually(lambda: consumer.inbox(), "the engine hears that the load is quiet")
    assert [(item.load_id, item.rank) for item in consumer.inbox()] == [(load.load_id, 0)]
    assert transport.unquiet == 0
    (result,) = consumer.load(load_of(producer))
    assert result.ok


def test_a_cancelled_load_is_reported_once(faulty) -> None:
    producer, consumer, transport = faulty
    transport.on_read = [QueueFull("for ever")] * 100_000
    load = load_of(producer)
    consumer.workers[0].agent.load(load)
    consumer.workers[0].agent.cancel(load.load_id, "the client left")
    eventually(lambda: consumer.collected(load.load_id), "a result")
    transport.on_read = []
    assert consumer.load(load_of(producer))[0].ok
    assert [(result.ok, "the client left" in result.reason) for result in consumer.collected(load.load_id)] == [
        (False, True)
    ]
    eventually(lambda: producer.freed(load.ref), "the producer is released")


def test_what_no_agent_understands_is_counted(make_engine) -> None:
    producer, consumer = make_engine(), make_engine()
    sender = consumer.agent
    for frame in (b"", b"\xff\x01\x02", b"\xc1", b"GET / HTTP/1.1\r\n", b"\x81\xa4type\xa4boom"):
        sender.submit(lambda frame=frame: sender.endpoint.send(producer.agent.endpoint.address, frame))
    dropped = producer.agent
    # An empty frame does not get past the socket's own checks.
    eventually(lambda: (dropped.counters["bad_messages"], dropped.endpoint.counters["malformed"]) == (4, 1), "counted")
    producer.fill([1, 2], 8)
    assert consumer.load(load_of(producer))[0].ok
