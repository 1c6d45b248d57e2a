"""MoRIIOConnector as vLLM makes it: its defaults, what a router gets from it, and what releases it understands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOConstants
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from kvferry.transport import registry
from kvferry.vllm.config import Config, ConfigError
from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.discovery import INTERVAL_S
from kvferry.vllm.moriio import MoRIIOConnector, Notifier, read_transfer_ack, send_notify
from kvferry.vllm.moriio import settings as moriio_settings

BLOCK, NUM_BLOCKS = 16, 33
RECEIVE_MS = 30_000


@pytest.fixture
def mori(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kvferry that has the transport, whichever this is."""
    monkeypatch.setitem(registry._CLASSES, "mori", ("kvferry.transport.local", "LocalTransport"))


@pytest.fixture
def no_mori(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._CLASSES, "mori", raising=False)


# How vLLM finds it.


def transfer_config(role: str = "kv_producer", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MoRIIOConnector",
        kv_connector_module_path="kvferry.vllm.moriio",
        kv_role=role,
        kv_connector_extra_config=extra,
    )


def test_a_module_path_is_all_that_changes() -> None:
    ours = KVConnectorFactory.get_connector_class(transfer_config())
    assert ours is MoRIIOConnector
    assert issubclass(ours, KVFerryConnector)
    assert KVConnectorFactory.supports_hma_config(transfer_config())
    assert ours.__name__ in KVConnectorFactory._registry  # so vLLM itself has another of this name


# Settings.


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_HOST_IP", "KVFERRY_SECRET", "KVFERRY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def parsed(**extra: Any) -> Config:
    return MoRIIOConnector.parse_settings(extra, True)


@pytest.mark.usefixtures("mori")
def test_the_defaults_are_moriios() -> None:
    assert parsed() == Config(
        mode="write",
        port=int(MoRIIOConstants.DEFAULT_HANDSHAKE_PORT),
        first_hold_s=MoRIIOConstants.DEFAULT_DEFER_TIMEOUT,
        load_s=MoRIIOConstants.DEFAULT_RECV_ABORT_TIMEOUT,
        transports=("mori",),
    )
    assert INTERVAL_S == MoRIIOConstants.PING_INTERVAL


@pytest.mark.usefixtures("no_mori")
def test_without_the_transport_it_takes_those_that_there_are() -> None:
    assert parsed().transports == Config().transports


@pytest.mark.usefixtures("mori")
@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"read_mode": "true"}, {"mode": "read"}),
        ({"mode": "read"}, {"mode": "read"}),
        ({"handshake_port": "7301"}, {"port": 7301}),
        ({"handshake_port": ""}, {"port": 6301}),
        ({"handshake_port": 0}, {"port": 6301}),
        ({"port": 0}, {"port": 0}),
        ({"defer_timeout": 900}, {"first_hold_s": 900, "longest_hold_s": 900}),
        ({"first_hold_s": 5}, {"first_hold_s": 5}),
        ({"longest_hold_s": 30}, {"longest_hold_s": 30, "first_hold_s": 30}),
        ({"recv_abort_timeout": 40, "transfer_timeout": 30}, {"load_s": 40}),
        ({"transfer_timeout": 30}, {"load_s": 30}),
        ({"load_s": 20}, {"load_s": 20}),
        ({"transports": ["local"]}, {"transports": ("local",)}),
        (
            {"proxy_ip": "10.0.0.1", "proxy_ping_port": "36367", "http_port": "8000", "host_ip": "10.0.0.5"},
            {"discovery": "10.0.0.1:36367", "http_port": 8000, "host_ip": "10.0.0.5"},
        ),
        (
            {"backend": "XGMI", "qp_per_transfer": "2", "post_batch_size": -1, "num_workers": 4},
            {
                "transport_options": {
                    "mori": {"backend": "xgmi", "qp_per_transfer": 2, "post_batch_size": -1, "num_workers": 4}
                }
            },
        ),
    ],
)
def test_what_is_given_wins(extra: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parsed(**extra) == msgspec.structs.replace(parsed(), **expected)


@pytest.mark.parametrize(
    ("extra", "environ", "host"),
    [
        ({}, {}, None),
        ({}, {"KVFERRY_SECRET": "a secret of sixteen"}, "10.0.0.9"),
        ({"secret": "a secret of sixteen"}, {}, "10.0.0.9"),
        ({"allow_open": True}, {}, "10.0.0.9"),
        ({"host_ip": ""}, {"VLLM_HOST_IP": "10.0.0.7"}, "10.0.0.7"),
        ({"host_ip": "10.0.0.5"}, {"VLLM_HOST_IP": "10.0.0.7"}, "10.0.0.5"),
    ],
)
def test_the_host_is_the_one_that_vllm_finds_where_it_is_protected(
    extra: dict[str, Any], environ: dict[str, str], host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moriio_settings, "get_ip", lambda: "10.0.0.9")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert parsed(**extra).host_ip == host


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"transport_options": 5}, "transport_options"),
        ({"transports": 5}, "transports"),
        ({"secret": 5}, "secret"),
        ({"read_mode": True, "mode": "write"}, "read_mode"),
        ({"port": 1, "handshake_port": 2}, "handshake_port"),
        ({"reed_mode": True}, "reed_mode"),
        ({"backend": "tcp", "transports": ["mori"]}, "backend"),
        ({"transports": ["local"], "transport_options": {"mori": {}}}, "options of 'mori'.*transports: local"),
    ],
)
def test_what_contradicts_or_means_nothing_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parsed(**extra)


def test_full_graphs_stay_unless_layer_by_layer_is_asked_for() -> None:
    assert not MoRIIOConnector.requires_piecewise_for_cudagraph({})
    assert not MoRIIOConnector.requires_piecewise_for_cudagraph({"read_mode": False})
    assert MoRIIOConnector.requires_piecewise_for_cudagraph({"mode": "write"})


# Engines.


class Engine:
    """One engine core with the connector that vLLM's factory makes, and what vLLM's scheduler does around it."""

    def __init__(self, role: str, **extra: Any) -> None:
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=BLOCK)
        self.tables: dict[str, tuple[list[Any], ...]] = {}
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        vllm_config = SimpleNamespace(
            kv_transfer_config=transfer_config(role, **{"model_id": "m", "port": 0, **extra}),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                data_parallel_size=4,
                data_parallel_size_local=2,
                data_parallel_index=0,
            ),
            num_prefill_lookahead_tokens=0,
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        cache_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.connector: Any = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, cache_config)
        self.connector.bind_kv_cache_manager(
            SimpleNamespace(
                block_pool=self.pool,
                get_blocks=lambda request_id: KVCacheBlocks(self.tables[request_id]),
                get_block_ids_for_computed_tokens=self.block_ids,
            )
        )

    @property
    def num_held(self) -> int:
        """Blocks that are in use, but for the null block."""
        self.connector.has_pending_block_frees()
        return NUM_BLOCKS - 1 - self.pool.get_num_free_blocks()

    @property
    def rendezvous(self) -> tuple[str, int]:
        host, _, port = self.connector._scheduler._agent.endpoint.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def block_ids(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        (blocks,) = self.tables[request_id]
        return ([block.block_id for block in blocks[: -(-num_computed_tokens // BLOCK)]],)

    def prefill(self, params: dict[str, Any], status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        """A first leg, whole; its answer."""
        request = request_of(f"first-{time.monotonic_ns()}", params)
        self.connector.on_new_request(request)
        self.tables[request.request_id] = (self.pool.get_new_blocks(3),)
        step = SimpleNamespace(
            num_scheduled_tokens={request.request_id: 40}, finished_req_ids=set(), preempted_req_ids=None
        )
        self.connector.build_connector_meta(step)
        request.num_computed_tokens, request.status = 40, status
        delayed, answer = self.connector.request_finished_all_groups(request, self.block_ids(request.request_id, 40))
        assert delayed is False
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id)[0]))
        return answer


def request_of(request_id: str, params: dict[str, Any]) -> Request:
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(range(40)), sampling, None)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.002)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.connector.shutdown()


FIRST_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "transfer_id": "tx-0123456789abcdef0123456789abcdef",
    "remote_dp_size": 1,
}
"""As vllm-router sends it for MoRIIO's READ."""


def test_settings_that_mean_nothing_are_named_once(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    ignored = {"notify_port": 61005, "local_ping_port": 1, "proxy_port": 2, "num_workers": 1}
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        engine = make_engine("kv_producer", transports=["local"], **ignored)
        MoRIIOConnector.requires_piecewise_for_cudagraph(ignored)  # as vLLM asks in other processes
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert told == [
        "kvferry: settings of MoRIIO's that mean nothing here are ignored: "
        "notify_port, local_ping_port, proxy_port, num_workers (transports does not name mori)"
    ]
    assert isinstance(engine.connector, MoRIIOConnector)


def test_the_engine_announces_itself_as_moriios_do(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("kv_producer", proxy_ip="127.0.0.1", proxy_ping_port="9", http_port="8000")
    host, port = engine.rendezvous
    assert msgspec.to_builtins(engine.connector._scheduler._announcer.announcement) == {
        "type": "P",
        "http_address": f"{host}:8000",
        "zmq_address": f"host:{host},handshake:{port},notify:{port}",
        "dp_size": 4,
        "tp_size": 2,
        "transfer_mode": "WRITE",
    }


def test_a_first_legs_answer_has_moriios_keys(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("kv_producer")
    answer = engine.prefill(FIRST_LEG)
    host, port = engine.rendezvous
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": host,
        "remote_handshake_port": port,
        "remote_notify_port": port,
        "remote_dp_rank": 0,
        "remote_dp_rank_override": True,
        "remote_dp_size": 4,
        "remote_dp_size_local": 2,
        "tp_size": 2,
        "transfer_id": FIRST_LEG["transfer_id"],
    }
    assert {key: answer[key] for key in expected} == expected
    assert len(answer["remote_block_ids"][0]) == 3


def test_without_a_routers_id_the_answer_has_our_own(make_engine: Callable[..., Engine]) -> None:
    answer = make_engine("kv_producer").prefill({"do_remote_decode": True})
    assert answer["transfer_id"] == answer["kvferry"]["transfer_id"]


@pytest.mark.parametrize(
    ("extra", "status"),
    [({"max_held": 0.01}, RequestStatus.FINISHED_LENGTH_CAPPED), ({}, RequestStatus.FINISHED_ABORTED)],
)
def test_what_is_not_offered_names_no_address(
    make_engine: Callable[..., Engine],
    extra: dict[str, Any],
    status: RequestStatus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    answer = make_engine("kv_producer", **extra).prefill(FIRST_LEG, status)
    assert not {"remote_handshake_port", "transfer_id"} & (answer or {}).keys()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("extra", "writes"), [({}, True), ({"read_mode": True}, False)])
def test_a_second_leg_takes_the_answer_as_a_router_hands_it_on(
    make_engine: Callable[..., Engine], extra: dict[str, Any], writes: bool
) -> None:
    """Integers may have become floats, and the router puts in the number of the producer's data-parallel ranks."""
    producer, consumer = make_engine("kv_producer", **extra), make_engine("kv_consumer", **extra)
    answer = producer.prefill(FIRST_LEG)
    routed = {key: float(value) if type(value) is int else value for key, value in answer.items()}
    request = request_of("second", {**routed, "remote_dp_size": 4})
    consumer.connector.on_new_request(request)
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == (39, True)
    consumer.tables["second"] = (consumer.pool.get_new_blocks(3),)
    consumer.connector.update_state_after_alloc(request, KVCacheBlocks(consumer.tables["second"]), 39)
    step = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=set(), preempted_req_ids=None)
    (load,) = consumer.connector.build_connector_meta(step).loads
    assert (load.write, load.refused) == (writes, "")
    assert load.producer_block_ids == (tuple(answer["remote_block_ids"][0]),)


# Releases of older peers.


def test_a_release_frees_what_it_names(make_engine: Callable[..., Engine]) -> None:
    """By the router's name or by our own; and one from a connection of each rank, however often it is said."""
    engine = make_engine("kv_producer")
    answers = [engine.prefill(params) for params in (FIRST_LEG, {"do_remote_decode": True})]
    assert engine.num_held == 6
    send_notify(answers[0]["transfer_id"], *engine.rendezvous)
    eventually(lambda: engine.num_held == 3)
    first, second = Notifier(), Notifier()
    release = (answers[1]["transfer_id"], *engine.rendezvous, "release", {"consumer_tp_size": 2})
    for _ in range(2):
        first.send_notify(*release)
    second.send_notify("a-transfer-nobody-knows", *engine.rendezvous, "release")
    assert engine.num_held == 3
    second.send_notify(*release)
    eventually(lambda: engine.num_held == 0)
    first.close()
    second.close()


class Peer:
    """The notification socket of a producer of vLLM's."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.ipv6 = ":" in host
        self._socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self.host, self.port = host, int(self._socket.last_endpoint.rpartition(b":")[2])

    def receive(self) -> tuple[bytes, bytes]:
        """Who says it, and what."""
        assert self._socket.poll(RECEIVE_MS), "nothing came"
        identity, *frames = self._socket.recv_multipart()
        assert len(frames) == 1
        return identity, frames[0]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(params=["127.0.0.1", "::1"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(request.param)
    yield peer
    peer.close()


@pytest.fixture
def notifier() -> Iterator[Notifier]:
    notifier = Notifier()
    yield notifier
    notifier.close()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    with ExitStack() as made:
        yield lambda *address: made.enter_context(closing(Peer(*address)))


@pytest.fixture
def make_notifier() -> Iterator[Callable[..., Notifier]]:
    with ExitStack() as made:
        yield lambda **options: made.enter_context(closing(Notifier(**options)))


def test_what_a_peer_of_vllms_hears(peer: Peer, notifier: Notifier) -> None:
    notifier.send_notify(["tx-1", "tx-2"], peer.host, peer.port, "release", {"consumer_tp_size": 8})
    notifier.send_notify("tx-3", peer.host, str(peer.port))
    notifier.send_notify("tx-4", peer.host, peer.port, message_type="write_done")
    heard = [peer.receive() for _ in range(4)]
    assert len({identity for identity, _ in heard}) == 1  # one connection is one rank
    frames = [frame for _, frame in heard]
    assert [msgspec.msgpack.decode(frames[index]) for index in (0, 1, 3)] == [
        {"type": "release", "transfer_id": "tx-1", "consumer_tp_size": 8},
        {"type": "release", "transfer_id": "tx-2", "consumer_tp_size": 8},
        {"type": "write_done", "transfer_id": "tx-4"},
    ]
    assert frames[2] == b"tx-3"
    assert [read_transfer_ack(frame).consumer_tp_size for frame in frames[:3]] == [8, 8, 1]


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, None])
def test_a_release_with_a_size_that_cannot_be_is_not_sent(peer: Peer, notifier: Notifier, size: Any) -> None:
    with pytest.raises(ValueError, match=r"release of 'tx-1'.*consumer_tp_size"):
        notifier.send_notify("tx-1", peer.host, peer.port, "release", {"consumer_tp_size": size})
    notifier.send_notify("tx-2", peer.host, peer.port)
    assert peer.receive()[1] == b"tx-2"  # and nothing before it


@pytest.mark.parametrize(("host", "port"), [("", 5), ("127.0.0.1", 0), (None, 5), ("127.0.0.1", None)])
def test_without_an_address_nothing_is_sent(
    host: Any, port: Any, notifier: Notifier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    notifier.send_notify("tx-1", host, port)
    assert "no notification: remote_ip" in caplog.text


def test_ids_that_are_no_text_are_left_out(
    notifier: Notifier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    peer = Peer()
    notifier.send_notify([7, "tx-1"], peer.host, peer.port)
    assert peer.receive()[1] == b"tx-1"
    assert "no notification for 7" in caplog.text
    peer.close()


def test_all_of_a_burst_arrive_at_a_peer_that_reads(notifier: Notifier, make_peer: Callable[..., Peer]) -> None:
    """Many times what a connection's queue holds, in order."""
    peer, sent = make_peer(), [f"tx-{number}" for number in range(20_000)]
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(lambda: [peer.receive()[1].decode() for _ in sent])
        notifier.send_notify(sent, peer.host, peer.port)
        assert heard.result() == sent


def test_a_peer_that_takes_nothing_is_waited_for_a_while_and_told_how_far_it_went(
    make_notifier: Callable[..., Notifier], make_peer: Callable[..., Peer]
) -> None:
    """What was queued stays, in case the peer does come; and others hear meanwhile."""
    gone, other = make_peer(), make_peer()
    host, port = gone.host, gone.port
    gone.close()
    notifier = make_notifier(wait_s=0.05)
    with pytest.raises(zmq.ZMQError, match=rf"^1000 of 1500 messages went to tcp://{host}:{port}, .*0\.05 s$"):
        notifier.send_notify([f"tx-{number}" for number in range(1500)], host, port)
    with pytest.raises(zmq.ZMQError, match=r"^0 of 1 messages"):
        notifier.send_notify("tx-1500", host, port)
    notifier.send_notify("tx-1", other.host, other.port)
    assert other.receive()[1] == b"tx-1"
    late = make_peer(host, port)
    assert [late.receive()[1] for _ in range(1000)] == [f"tx-{number}".encode() for number in range(1000)]
    notifier.send_notify("tx-1500", host, port)
    assert late.receive()[1] == b"tx-1500"


def test_a_peer_that_takes_nothing_holds_up_no_other(
    make_notifier: Callable[..., Notifier], make_peer: Callable[..., Peer]
) -> None:
    gone, other = make_peer(), make_peer()
    gone.close()
    notifier = make_notifier(wait_s=RECEIVE_MS / 1000)
    notifier.send_notify(["tx"] * 1000, gone.host, gone.port)
    (connection,) = notifier._connections.values()
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(notifier.send_notify, "tx", gone.host, gone.port)
        eventually(connection._lock.locked)
        notifier.send_notify("tx-1", other.host, other.port)
        assert other.receive()[1] == b"tx-1"
        assert not stuck.done()
        make_peer(gone.host, gone.port)
        stuck.result()


@pytest.mark.parametrize("port", [70000, "70000", -1, "0", "any", 6105.5, float("nan")])
def test_a_port_that_is_none_is_named(port: Any, notifier: Notifier) -> None:
    with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port}: .*port within 1\.\.65535"):
        notifier.send_notify("tx-1", "127.0.0.1", port)


def test_a_host_that_is_no_text_is_named(notifier: Notifier) -> None:
    host: Any = 5
    with pytest.raises(ValueError, match=r"5:6105: that is no host"):
        notifier.send_notify("tx-1", host, 6105)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_peer_is_written_with_or_without_brackets(
    host: str, notifier: Notifier, make_peer: Callable[..., Peer]
) -> None:
    peer = make_peer("::1")
    notifier.send_notify("tx-1", host, peer.port)
    assert peer.receive()[1] == b"tx-1"


def test_a_release_of_no_transfer_is_not_sent(
    notifier: Notifier,
    make_peer: Callable[..., Peer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    peer = make_peer()
    for message_type in (None, "release"):
        notifier.send_notify("", peer.host, peer.port, message_type)
    with pytest.raises(ValueError, match=r"release of '', .* of length >= 1 - at `\$\.transfer_id`"):
        notifier.send_notify("tx-1", peer.host, peer.port, "release", {"transfer_id": ""})
    notifier.send_notify("tx-2", peer.host, peer.port)
    assert peer.receive()[1] == b"tx-2"  # and nothing before it
    assert caplog.text.count("no notification for ''") == 2


def test_after_a_bad_address_others_still_hear(notifier: Notifier) -> None:
    with pytest.raises(zmq.ZMQError):
        notifier.send_notify("tx-1", "no such host!", 5)
    peer = Peer()
    notifier.send_notify("tx-1", peer.host, peer.port)
    assert peer.receive()[1] == b"tx-1"
    peer.close()


def test_a_connection_that_was_closed_is_opened_again(notifier: Notifier) -> None:
    peer = Peer()
    for name in ("tx-1", "tx-2"):
        notifier.send_notify(name, peer.host, peer.port)
        notifier.close()
        assert peer.receive()[1] == name.encode()
    peer.close()
