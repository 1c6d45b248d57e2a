"""What a worker makes of another engine's record: compared, planned, proven and connected, or refused by name; the same
for a consumer that reads and for a producer that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from agent_engines import Engine, eventually, request_for

from kvferry.agent import peers
from kvferry.agent.loads import LoadRequest
from kvferry.agent.peers import Side, Unreachable
from kvferry.control.addresses import host_id
from kvferry.layout import Axis, CacheLayout, Context, Field, Heads, Layer, LayoutError, Region, key_only
from kvferry.plan import Refusal, Unproven
from kvferry.protocol import messages
from kvferry.protocol.messages import TransferRef
from kvferry.records import BadRecord, EngineRecord, TransportRecord, WorkerRecord, decode_engine, encode
from kvferry.transport.base import Transport, TransportError
from kvferry.transport.local import LocalTransport

change = msgspec.structs.replace
ADDRESS = "tcp://127.0.0.1:5"
ONE = Heads(0, 1, 1)


def layer(name: str, *, group: int = 0, base_bytes: int = 0, heads: Heads = ONE) -> Layer:
    return Layer(name, group, 0, base_bytes, 8, 4, "x", heads, key_only(4, 2))


def cache(*layers: Layer) -> CacheLayout:
    return CacheLayout((Region(0, 256),), layers)


@pytest.fixture
def memory() -> Iterator[Callable[[CacheLayout], LocalTransport]]:
    """memory(layout) registers memory of that layout's sizes."""
    kept: list[tuple[LocalTransport, list[np.ndarray]]] = []

    def make(layout: CacheLayout) -> LocalTransport:
        buffers = [np.zeros(region.length_bytes, np.uint8) for region in layout.regions]
        transport = LocalTransport()
        transport.register([Region(one.ctypes.data, one.nbytes) for one in buffers])
        kept.append((transport, buffers))
        return transport

    yield make
    for transport, _ in kept:
        transport.close()


Memory = Callable[[CacheLayout], LocalTransport]


def record(layouts: list[CacheLayout], tp_size: int = 1, payloads: list[bytes] | None = None) -> EngineRecord:
    workers = tuple(
        WorkerRecord(
            rank,
            rank // tp_size,
            rank % tp_size,
            "tcp://127.0.0.1:6",
            "",
            layout,
            (TransportRecord("local", payloads[rank]),) if payloads else (),
        )
        for rank, layout in enumerate(layouts)
    )
    return EngineRecord("e", "i", host_id(), {}, ("full",), workers)


def side(layout: CacheLayout, *transports: Transport) -> Side:
    return Side(0, 1, layout, {}, ("full",), transports)


def read(consumer: CacheLayout, producers: list[CacheLayout]) -> None:
    """Everything up to the connection, for which there is no transport here."""
    with pytest.raises(TransportError, match="no transport reaches"):
        peers.shake_hands(side(consumer), record(producers), ADDRESS)


def write(consumer: CacheLayout, producers: list[CacheLayout]) -> None:
    for rank, layout in enumerate(producers):
        met = peers.meet_consumer(side(layout), rank, record(producers), record([consumer]), ADDRESS)
        assert list(met.targets) == [0]
        with pytest.raises(Unreachable, match=r"by 'local': this side has \[\], that side \[\]"):
            met.way(0, "local")


BOTH_WAYS = pytest.mark.parametrize("direction", [read, write])


@BOTH_WAYS
def test_one_memory_cannot_come_from_two_ranks(direction: Callable[..., None]) -> None:
    shared = cache(layer("a"), layer("b"))
    direction(shared, [shared])
    with pytest.raises(Refusal, match=r"layers a and b: consumer has one memory, producer has two, of ranks \[0\] and"):
        direction(shared, [cache(layer("a")), cache(layer("b"))])


@BOTH_WAYS
def test_tokens_that_nobody_has(direction: Callable[..., None]) -> None:
    def dealt(rank: int) -> CacheLayout:
        return cache(change(layer("a"), block_size=8, context=Context(rank, 2, 4)))

    direction(cache(layer("a")), [dealt(0), dealt(1)])
    with pytest.raises(Unproven, match="layer a, head 0: times that a token is covered"):
        direction(cache(layer("a")), [dealt(1)])


@BOTH_WAYS
def test_layers_that_overlap(direction: Callable[..., None]) -> None:
    """On either side, whichever of them is the peer."""
    sound, overlapping = cache(layer("a"), layer("b", base_bytes=64)), cache(layer("a"), layer("b", base_bytes=8))
    text = "layers a to b of group 0: two share the byte at offset 8 of region 0"
    for consumer, producer in ((sound, overlapping), (overlapping, sound)):
        with pytest.raises((Refusal, LayoutError), match=text):
            direction(consumer, [producer])


def scattered(num_blocks: int, context: Context) -> CacheLayout:
    """One layer, a block of which is 131072 separate bytes."""
    axes = (Axis("token", 64, 1, 4096), Axis("content", 2048, 1, 2))
    fields = (Field("latent", 0, 1 << 18, axes, 2048),)
    one = Layer("a", 0, 0, 0, num_blocks, 64 * context.size, "x", ONE, fields, context)
    return CacheLayout((Region(0, 1 << 50),), (one,))


@BOTH_WAYS
def test_workers_that_are_all_unlike_share_one_budget(direction: Callable[..., None]) -> None:
    """Each of them alone may cost that much, and all of them if they are alike."""
    own = CacheLayout((Region(0, 1 << 20),), (Layer("a", 0, 0, 0, 8, 64, "x", ONE, key_only(64, 2048)),))
    alike = [scattered(4, Context(rank, 16, 1)) for rank in range(16)]
    unlike = [scattered(4 + rank, Context(rank, 16, 1)) for rank in range(16)]
    text = r"layer a: separate runs in a block, with those of other geometries: 262144, the most allowed are 131072"
    if direction is read:
        read(own, alike)
        with pytest.raises(Refusal, match=text):
            read(own, unlike)
        return
    with pytest.raises(LayoutError, match=text):
        peers.meet_consumer(side(own), 0, record([own]), record(unlike, 16), ADDRESS)


@BOTH_WAYS
def test_a_handshake_that_takes_too_long_is_refused(
    direction: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PLANNING_S", -1.0)
    with pytest.raises(Refusal, match=r"processor time to compare and plan: .*engine e's record takes longer"):
        direction(cache(layer("a")), [cache(layer("a"))])


class TestRegions:
    """What the transport's record tells of must be what the layout was planned with."""

    mine = cache(layer("a"))

    def test_the_same_connect(self, memory: Memory) -> None:
        own, theirs = memory(self.mine), memory(self.mine)
        met = peers.shake_hands(side(self.mine, own), record([self.mine], payloads=[theirs.record()]), ADDRESS)
        assert [one.transport.name for one in met.sources] == ["local"]
        peers.disconnect(met.sources)
        fed = peers.meet_consumer(
            side(self.mine, own), 0, record([self.mine]), record([self.mine], payloads=[theirs.record()]), ADDRESS
        )
        assert list(fed.targets) == [0]
        assert fed.peers == []
        way = fed.way(0, "local")
        assert (way.transport, fed.peers) == (own, [way.peer])
        assert fed.way(0, "local") is way
        with pytest.raises(Unreachable, match=r"by 'nixl': this side has \['local'\], that side \['local'\]"):
            fed.way(0, "nixl")
        fed.leave()
        with pytest.raises(TransportError, match="disconnected"):
            own.write(way.peer, [])
        assert fed.peers == []

    @pytest.mark.parametrize("registered", [(255,), (257,), (256, 1)])
    def test_others_are_refused(self, memory: Memory, registered: tuple[int, ...]) -> None:
        own = memory(self.mine)
        theirs = memory(CacheLayout(tuple(Region(0, length) for length in registered), ()))
        met = record([self.mine], payloads=[theirs.record()])
        text = rf"local: regions of \[{', '.join(map(str, registered))}\] bytes are registered, the layout has \[256\]"
        with pytest.raises(TransportError, match=text):
            peers.shake_hands(side(self.mine, own), met, ADDRESS)
        fed = peers.meet_consumer(side(self.mine, own), 0, record([self.mine]), met, ADDRESS)
        with pytest.raises(Unreachable, match=text.removeprefix("local: ")):
            fed.way(0, "local")


def test_a_transport_that_does_not_fit_says_why_with_both_values(memory: Memory) -> None:
    layout = cache(layer("a"))
    own, payload = memory(layout), msgspec.msgpack.decode(memory(layout).record())
    payload["process"]["host"] = "5f0c/pid:[1]"
    met = record([layout], payloads=[msgspec.msgpack.encode(payload)])
    text = (
        r"no transport reaches rank 0 .*; local: the peer is on another host: 5f0c/pid:\[1\], this is " + host_id()[:8]
    )
    with pytest.raises(TransportError, match=text):
        peers.shake_hands(side(layout, own), met, ADDRESS)


def test_sources_that_would_write_the_same_blocks_are_refused(memory: Memory) -> None:
    """Groups that lie over one another, from two pipeline stages."""
    consumer = cache(layer("a"), layer("b", group=1))
    stages = [cache(layer("a")), cache(layer("b", group=1))]
    payloads = [memory(one).record() for one in stages]
    met = peers.shake_hands(side(consumer, memory(consumer)), record(stages, payloads=payloads), ADDRESS)

    def load(*consumer_ids: int) -> LoadRequest:
        return LoadRequest(
            request_id="r",
            load_id="l",
            claim_id="c",
            ref=TransferRef("e", "i", "t", 1),
            address=ADDRESS,
            key_id="",
            num_tokens=4,
            first_token=0,
            end_token=4,
            consumer_block_ids=tuple((one,) for one in consumer_ids),
            producer_block_ids=((7,), (6,)),
            digest=b"",
            blocks_digest=b"",
        )

    parts, num_bytes, num_descriptors = peers.bind(met, load(5, 4))
    assert (len(parts), num_bytes, num_descriptors) == (2, 16, 2)
    with pytest.raises(Unproven, match="destination in region 0 written twice"):
        peers.bind(met, load(5, 5))
    with pytest.raises(Refusal, match="group 1: block id: consumer has id 9223372036854775808"):
        peers.bind(met, load(5, 2**63))
    peers.disconnect(met.sources)


class TestRecords:
    def test_a_record_of_several_stages(self) -> None:
        made = record([cache(layer("a"))] * 6, tp_size=2)
        assert decode_engine(encode(made)) == made

    def test_too_many_workers(self) -> None:
        made = record([cache()] * 1025)
        with pytest.raises(BadRecord, match="engine e: 1025 workers, the most allowed are 1024"):
            decode_engine(encode(made))
        decode_engine(encode(change(made, workers=made.workers[:1024])))

    @pytest.mark.parametrize(("pp_rank", "tp_rank"), [(0, 2**62), (0, 2), (1, 0), (0, -1), (-1, 1)])
    def test_ranks_that_cannot_be(self, pp_rank: int, tp_rank: int) -> None:
        first, second, *rest = record([cache()] * 4, tp_size=2).workers
        odd = change(record([]), workers=(first, change(second, pp_rank=pp_rank, tp_rank=tp_rank), *rest))
        with pytest.raises(BadRecord, match=r"engine e: rank \d has pp_rank -?\d+ and tp_rank -?\d+, "):
            decode_engine(encode(odd))


def test_a_record_that_no_message_can_carry(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """It is an error at start-up, and each peer is told the sizes instead of waiting in vain."""
    producer, consumer = make_engine(), make_engine()
    worker = producer.workers[0].agent.record()
    big = change(worker, transports=(*worker.transports, TransportRecord("other", bytes(9 << 20))))
    own = producer.agent
    own.set_record(
        EngineRecord(own.engine_id, own.incarnation, host_id(), {"model": "m"}, ("FullAttentionSpec",), (big,))
    )
    errors = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert len(errors) == 1
    for _ in range(2):
        ref = producer.hold([1], 4)
        (result,) = consumer.load(request_for(producer, ref, [1], [2], 4))
        assert not result.ok
        size = result.reason.split(" bytes, the limit is 8388608")[0].rsplit(" ", 1)[1]
        assert 9 << 20 < int(size) < (9 << 20) + 4096
        assert f"has {size} bytes, the limit is 8388608" in errors[0]
    assert [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"] == errors


def test_what_a_peer_says_of_itself_is_logged_in_one_line(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    producer, sender = make_engine(), make_engine().agent
    address = producer.agent.endpoint.address
    for engine_id in ("other\n2026 ERROR all is lost", ""):
        hello = messages.Hello(
            version=messages.PROTOCOL_VERSION + (not engine_id),
            engine_id=engine_id,
            incarnation="i\n2026 ERROR \x1b[31mroot",
            seq=1,
        )
        sender.submit(lambda hello=hello: sender.endpoint.send(address, messages.encode(hello)))

    def said_of_it() -> list[str]:
        return [entry.getMessage() for entry in list(caplog.records) if "2026 ERROR" in entry.getMessage()]

    eventually(lambda: len(said_of_it()) == 2, "both are refused, and logged")
    said = said_of_it()
    assert producer.agent.counters["refused_handshakes"] == 2
    assert all(text.isprintable() and r"i\n2026 ERROR \x1b[31mroot" in text for text in said)
