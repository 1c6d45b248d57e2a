"""Announcements, as a router's ZMQ socket receives them."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config import KVTransferConfig, ParallelConfig

from kvferry.control import addresses
from kvferry.control.addresses import AddressError
from kvferry.vllm import config, discovery
from kvferry.vllm.config import ConfigError
from kvferry.vllm.discovery import Announcement, Announcer, announcer

RECEIVE_MS = 30_000
QUIET_MS = 300
NEVER_S = 3600.0
ANNOUNCEMENT = Announcement(
    type="P",
    http_address="10.0.0.5:8000",
    zmq_address="host:10.0.0.5,handshake:40001,notify:40001",
    dp_size=1,
    tp_size=2,
    transfer_mode="READ",
)


class Router:
    """The socket of a router's discovery."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.ipv6 = ":" in host
        self._socket.bind(addresses.join(host, port).replace(":0", ":*") if port == 0 else addresses.join(host, port))
        self.address = self._socket.last_endpoint.decode()

    @property
    def port(self) -> int:
        return addresses.parse(self.address)[1]

    def receive(self) -> dict[str, Any]:
        assert self._socket.poll(RECEIVE_MS), "no announcement came"
        _, *frames = self._socket.recv_multipart()
        assert len(frames) == 1
        return msgspec.msgpack.decode(frames[0])

    def is_quiet(self) -> bool:
        return not self._socket.poll(QUIET_MS)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts announcers, and stops them after the test."""
    started: list[Announcer] = []

    def start(address: str, interval_s: float = 0.02) -> Announcer:
        started.append(Announcer(address, ANNOUNCEMENT, interval_s))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


def announcing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvferry-announcer"]


def test_the_first_announcement_leaves_at_once(router: Router, start: Any) -> None:
    start(router.address, interval_s=NEVER_S)
    assert router.receive() == {
        "type": "P",
        "http_address": "10.0.0.5:8000",
        "zmq_address": "host:10.0.0.5,handshake:40001,notify:40001",
        "dp_size": 1,
        "tp_size": 2,
        "transfer_mode": "READ",
    }


def test_announcements_repeat_until_stopped(router: Router, start: Any) -> None:
    announcing = start(router.address)
    for _ in range(3):
        router.receive()
    announcing.stop()
    assert not announcing_threads()
    while not router.is_quiet():
        router.receive()


def test_a_router_that_restarts_hears_of_the_engine_again(start: Any) -> None:
    first = Router()
    start(first.address)
    first.receive()
    first.close()
    second = Router(port=first.port)
    try:
        assert second.receive()["http_address"] == "10.0.0.5:8000"
    finally:
        second.close()


class CountedWaits(threading.Event):
    """An event whose first waits return at once; after them `reached` is set, and waits are real."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.reached = threading.Event()
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self._count -= 1
        if self._count > 0:
            return self.is_set()
        self.reached.set()
        return super().wait(timeout)


def test_only_one_announcement_waits_for_a_router_that_is_not_there() -> None:
    gone = Router()
    gone.close()
    announcing = Announcer(gone.address, ANNOUNCEMENT, interval_s=NEVER_S)
    announcing._stopped = waits = CountedWaits(20)
    announcing.start()
    assert waits.reached.wait(RECEIVE_MS / 1000)
    late = Router(port=gone.port)
    try:
        late.receive()
        assert late.is_quiet()
    finally:
        announcing.stop()
        late.close()
    assert not announcing_threads()


def test_stopping_does_not_wait_for_a_router_that_is_not_there(start: Any) -> None:
    gone = Router()
    gone.close()
    announcing = start(gone.address)
    announcing.stop()
    announcing.stop()
    assert not announcing_threads()


def test_stopping_what_was_never_started() -> None:
    Announcer("tcp://127.0.0.1:1", ANNOUNCEMENT).stop()


def test_a_router_without_an_address_is_asked_for_again(
    router: Router, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[AddressError | list[str]] = [AddressError("no such host"), AddressError("no such host")]

    def resolve(host: str) -> list[str]:
        answer = answers.pop(0) if answers else [host]
        if isinstance(answer, AddressError):
            raise answer
        return answer

    monkeypatch.setattr(addresses, "resolve", resolve)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        start(router.address)
        router.receive()
    assert [record.getMessage() for record in caplog.records] == [
        f"kvferry: cannot announce this engine to the router at {router.address}: no such host"
    ]


def test_ipv6(start: Any) -> None:
    router = Router("::1")
    try:
        start(router.address)
        assert router.receive()["type"] == "P"
    finally:
        router.close()


# What an engine says of itself.


def vllm_config(kv_role: str, dp_size: int = 1, dp_rank: int = 0) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="KVFerryConnector", kv_role=kv_role),
        parallel_config=ParallelConfig(
            tensor_parallel_size=2, data_parallel_size=dp_size, data_parallel_rank=dp_rank, is_moe_model=True
        ),
    )


def made(kv_role: str, rendezvous: str = "tcp://10.0.0.5:40001", dp_size: int = 1, **extra: Any) -> Announcer:
    settings = config.parse({"discovery": "10.0.0.1:30001", "http_port": 8000, **extra})
    result = announcer(settings, vllm_config(kv_role, dp_size), rendezvous)
    assert result is not None
    return result


def test_a_prefill_engine() -> None:
    result = made("kv_producer", mode="write", dp_size=4)
    assert result.router == "tcp://10.0.0.1:30001"
    assert result.announcement == Announcement(
        type="P",
        http_address="10.0.0.5:8000",
        zmq_address="host:10.0.0.5,handshake:40001,notify:40001",
        dp_size=4,
        tp_size=2,
        transfer_mode="WRITE",
    )


def test_a_decode_engine_on_ipv6() -> None:
    said = made("kv_consumer", "tcp://[fd00::5]:40001").announcement
    assert (said.type, said.transfer_mode) == ("D", "READ")
    assert (said.http_address, said.zmq_address) == ("[fd00::5]:8000", "host:fd00::5,handshake:40001,notify:40001")


@pytest.mark.parametrize(("announce_as", "type_"), [("prefill", "P"), ("decode", "D")])
def test_an_engine_of_both_roles_says_which_side_it_takes(announce_as: str, type_: str) -> None:
    assert made("kv_both", announce_as=announce_as).announcement.type == type_


def test_what_leaves_the_side_open_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_role is 'kv_both'.*announce_as"):
        made("kv_both")


def test_a_side_that_contradicts_the_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="announce_as is 'decode' and kv_role is 'kv_producer'"):
        made("kv_producer", announce_as="decode")
    assert made("kv_producer", announce_as="prefill").announcement.type == "P"


def test_without_a_router_there_is_no_announcer() -> None:
    assert announcer(config.parse({}), vllm_config("kv_both"), "tcp://10.0.0.5:40001") is None


def test_one_data_parallel_rank_announces() -> None:
    settings = config.parse({"discovery": "10.0.0.1:30001", "http_port": 8000})
    assert announcer(settings, vllm_config("kv_producer", dp_size=2, dp_rank=1), "tcp://10.0.0.5:40001") is None


def test_ranks_of_a_dense_model_announce_once() -> None:
    """vLLM makes each rank of a dense model an engine with data_parallel_rank 0."""
    settings = config.parse({"discovery": "10.0.0.1:30001", "http_port": 8000})
    second = vllm_config("kv_producer", dp_size=2, dp_rank=1)
    second.parallel_config.reconfigure_for_independent_dp_rank()
    assert announcer(settings, second, "tcp://10.0.0.5:40001") is None


@pytest.mark.parametrize(
    ("rendezvous", "router", "warns"),
    [
        ("tcp://127.0.0.1:40001", "10.0.0.1:30001", True),
        ("tcp://127.0.0.1:40001", "127.0.0.1:30001", False),
        ("tcp://127.0.0.1:40001", "localhost:30001", False),
        ("tcp://10.0.0.5:40001", "10.0.0.1:30001", False),
    ],
)
def test_a_loopback_address_for_another_host_is_warned_of(
    rendezvous: str, router: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        made("kv_producer", rendezvous, discovery=router)
    assert ["set host_ip" in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.parametrize(
    ("extra", "environ", "is_protected"),
    [
        ({}, {}, False),
        ({"allow_open": True}, {}, True),
        ({"secret": "a secret of sixteen"}, {}, True),
        ({}, {"KVFERRY_SECRET": "a secret of sixteen"}, True),
    ],
)
def test_what_keeps_it_on_loopback_is_named(
    extra: dict[str, Any],
    environ: dict[str, str],
    is_protected: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    made("kv_producer", "tcp://127.0.0.1:40001", **extra)
    (told,) = [record.getMessage() for record in caplog.records]
    rest = "" if is_protected else "; it stays on loopback until KVFERRY_SECRET (or allow_open) is set"
    assert told.endswith(f"unless both are on one host, set host_ip{rest}")


def test_the_interval_is_the_routers() -> None:
    assert discovery.INTERVAL_S == 3.0
