"""One load that fails fails alone, and a transport's back-pressure is no failure."""

from __future__ import annotations

import msgspec
import pytest
from agent_engines import Engine, eventually, request_for

from kvferry.agent import engine as engine_module
from kvferry.protocol.lease import Leases
from kvferry.transport.base import BadTransfer, PeerLost, QueueFull, State, Status, Transport, TransportUnavailable


class Faulty:
    """The real transport behind a fault: each test sets what `read`, `poll` or `release` does instead, by call."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.on_read: list[Exception] = []
        self.on_poll: list[Status | Exception] = []
        self.unquiet = 0

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def read(self, peer, batches):
        if self.on_read:
            raise self.on_read.pop(0)
        return self._transport.read(peer, batches)

    def poll(self, handle) -> Status:
        instead = self.on_poll.pop(0) if self.on_poll else self._transport.poll(handle)
        if isinstance(instead, Exception):
            raise instead
        return instead

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


def test_a_transport_that_breaks_its_contract_fails_one_load(faulty) -> None:
    producer, consumer, transport = faulty
    transport.on_poll = [RuntimeError("polling must not raise")]
    (failed,) = consumer.load(load_of(producer))
    assert (failed.ok, "polling must not raise" in failed.reason) == (False, True)
    assert consumer.load(load_of(producer))[0].ok


def test_memory_that_is_gone_is_asked_for_anew(faulty) -> None:
    producer, consumer, transport = faulty
    assert consumer.load(load_of(producer))[0].ok
    transport.on_read = [PeerLost("its worker registered anew")]
    assert not consumer.load(load_of(producer))[0].ok
    assert consumer.load(load_of(producer))[0].ok
    assert consumer.workers[0].agent.counters["handshakes"] == 2


def test_stopping_an_agent_reports_what_was_running(faulty) -> None:
    producer, consumer, transport = faulty
    transport.on_read = [QueueFull("for ever")] * 100_000
    load = load_of(producer)
    consumer.workers[0].agent.load(load)
    eventually(lambda: len(transport.on_read) < 100_000, "the load is under way")
    consumer.workers[0].agent.stop()
    assert [(one.load_id, one.ok, one.quiet) for one in consumer.collected(load.load_id)] == [
        (load.load_id, False, True)
    ]


def test_what_cannot_be_put_on_the_wire_disturbs_no_other_load(make_engine) -> None:
    leases = Leases(claim_reply_s=0.2, load_s=1, lease_s=1, renew_s=0.2)
    producer, consumer = make_engine(), make_engine(leases=leases)
    producer.fill([1, 2], 8)
    good, bad = load_of(producer), load_of(producer)
    bad = msgspec.structs.replace(bad, ref=msgspec.structs.replace(bad.ref, generation=10**30))
    for load in (bad, good):
        consumer.agent.arrived(load.claim_id, load.ref, load.address, "", 1)
    for load in (bad, good):
        consumer.workers[0].agent.load(load)
    eventually(lambda: consumer.collected(bad.load_id) and consumer.collected(good.load_id), "both end")
    assert [one.ok for one in consumer.collected(good.load_id)] == [True]
    assert [one.ok for one in consumer.collected(bad.load_id)] == [False]
    assert consumer.load(load_of(producer))[0].ok


def test_an_engine_answers_for_itself_alone(make_engine) -> None:
    producer, other, consumer = make_engine(), make_engine(), make_engine()
    other.fill([1, 2], 8)
    producer.agent._record_payload = other.agent._record_payload
    (result,) = consumer.load(load_of(producer))
    assert not result.ok
    assert other.agent.engine_id in result.reason


def test_secrets_rotate_under_a_transport_whose_target_must_be_nudged(make_engine) -> None:
    old, new = b"the old secret, long enough", b"the new secret, long enough"
    producer = make_engine(transports=("nixl",), secret_keys=(new, old))
    consumer = make_engine(transports=("nixl",), secret_keys=(old, new))
    producer.fill([1, 2], 8)
    (result,) = consumer.load(load_of(producer))
    assert (result.ok, result.reason) == (True, "")
    assert producer.workers[0].agent.endpoint.counters["handshake_failed"] == 0


def test_news_that_nobody_takes_are_bounded_and_repeated(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_INBOX", 1)
    engine = make_engine()
    sender = engine.workers[0].agent
    for load_id in ("a", "b"):
        sender.submit(lambda load_id=load_id: sender._tell_quiet(load_id))
    eventually(lambda: engine.agent.counters["inbox_full"] > 0, "the second is turned away")
    assert [item.load_id for item in engine.agent.drain()] == ["a"]
    eventually(lambda: engine.inbox(), "it is said again")
    assert [item.load_id for item in engine.inbox()] == ["b"]
    eventually(lambda: not sender._unacknowledged, "and answered")


def test_a_transport_that_cannot_register_the_memory_is_left_out(make_engine) -> None:
    """As `local` cannot with a GPU's memory: the next one in the settings serves."""

    def first_refuses(transport: Transport) -> Transport:
        if transport.name == "local":
            transport.register = refuse
        return transport

    def refuse(regions) -> None:
        raise BadTransfer("not this memory")

    producer, consumer = (make_engine(transports=("local", "nixl"), wrap=first_refuses) for _ in range(2))
    producer.fill([1, 2], 8)
    (result,) = consumer.load(load_of(producer))
    assert (result.ok, result.transport) == (True, "nixl")
    with pytest.raises(TransportUnavailable, match="not this memory"):
        make_engine(transports=("local",), wrap=first_refuses)
