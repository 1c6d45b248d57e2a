"""Where a request of the concurrent contract finds its peer."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import (
    get_peer_zmq_from_request_id,
    parse_moriio_zmq_address,
)

from kvferry.control.addresses import parse
from kvferry.vllm.params import BadParams
from kvferry.vllm.request_addresses import Address, peer_address, transfer_id

T = TypeVar("T")
HEX = "1a9b7d48323e42cfbcf2cfda8371a2a7"


def announced(host: str, port: int) -> str:
    return f"host:{host},handshake:{port},notify:{port}"


def router_id(prefill: str, decode: str) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{HEX}"


ID = router_id(announced("10.0.0.5", 40001), announced("10.0.0.6", 40002))
WRAPPED = [ID, f"cmpl-{ID}-0-1a2b3c4d", f"chatcmpl-{ID}-1a2b3c4d", f"0_cmpl-{ID}-0-1a2b3c4d", f"cmpl-{ID}-12"]


@pytest.mark.parametrize("request_id", WRAPPED)
def test_an_id_as_vllm_wraps_it(request_id: str) -> None:
    assert peer_address(request_id, {}, "prefill") == Address("10.0.0.5", 40001)
    assert peer_address(request_id, {}, "decode") == Address("10.0.0.6", 40002)


@pytest.mark.parametrize("request_id", WRAPPED)
def test_vllms_own_connector_reads_the_same(request_id: str) -> None:
    for side in ("prefill", "decode"):
        peer = get_peer_zmq_from_request_id(request_id, is_producer=side == "decode")
        assert peer is not None
        host, port, _ = parse_moriio_zmq_address(peer)
        assert peer_address(request_id, {}, side) == Address(host, port)


@pytest.mark.parametrize(
    ("host", "meant"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("2001:DB8::0005", "2001:db8::5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("prefill-0.vllm_pool", "prefill-0.vllm_pool"),
    ],
)
def test_hosts(host: str, meant: str) -> None:
    request_id = f"cmpl-{router_id(announced(host, 40001), announced('10.0.0.6', 2))}-0-1a2b3c4d"
    found = peer_address(request_id, {}, "prefill")
    assert found == Address(meant, 40001)
    assert found == peer_address("cmpl-1", {"remote_host": host, "remote_port": 40001}, "prefill")
    assert parse(str(found)) == (meant, 40001)


def test_the_address_as_it_is_dialled() -> None:
    assert str(Address("10.0.0.5", 40001)) == "tcp://10.0.0.5:40001"
    assert str(Address("::1", 40001)) == "tcp://[::1]:40001"


@pytest.mark.parametrize(
    "request_id",
    [
        "cmpl-7-0-1a2b3c4d",
        "",
        router_id("127.0.0.1:8000", "127.0.0.1:8001"),
        router_id("http://[::1]:8000", "http://[::1]:8001"),
        router_id("prefill.svc", "decode.svc"),
    ],
)
def test_an_id_without_a_rendezvous(request_id: str) -> None:
    for side in ("prefill", "decode"):
        assert peer_address(request_id, {}, side) is None


@pytest.mark.parametrize(
    ("request_id", "named"),
    [
        (f"___prefill_addr_{announced('10.0.0.5', 1)}_{HEX}", "request id '___prefill_addr_.* not of the router's"),
        (f"___decode_addr_{announced('10.0.0.5', 1)}_{HEX}", "not of the router's form"),
        (router_id(announced("10.0.0.5", 1), announced("10.0.0.6", 2))[:-1], "not of the router's form"),
        (f"{ID}0", "not of the router's form"),
        (ID.upper(), None),
        (router_id("", announced("10.0.0.6", 2)), "prefill_addr of request id .* is ''"),
        (router_id("host:10.0.0.5,handshake:1", "d"), "is 'host:10.0.0.5,handshake:1', must be host:HOST"),
        (router_id("host:10.0.0.5,handshake:x,notify:1", "d"), "handshake:x"),
        (router_id("host:10.0.0.5,notify:1,handshake:1", "d"), "must be host:HOST"),
        (router_id("host:,handshake:1,notify:1", "d"), "must be host:HOST"),
        (router_id(announced("10.0.0.5", 0), "d"), "port 0 is not within"),
        (router_id(announced("10.0.0.5", 65536), "d"), "port 65536 is not within"),
        (router_id(announced("10.0.0.5/8", 1), "d"), "10.0.0.5/8"),
        (router_id(announced("fe80::1%eth0", 1), "d"), "zone id"),
        (router_id(announced("[::1", 1), "d"), r"\[::1"),
        (router_id(announced("a", 1), "x" * 10_000), "not of the router's form"),
    ],
)
def test_a_malformed_id_is_named(request_id: str, named: str | None) -> None:
    if named is None:
        assert peer_address(request_id, {}, "prefill") is None
        return
    with pytest.raises(BadParams, match=named) as raised:
        peer_address(request_id, {}, "prefill")
    assert len(str(raised.value)) < 1000


# Explicit parameters.

EXPLICIT = {"remote_host": "10.0.0.7", "remote_handshake_port": 6301, "remote_notify_port": 61005}


@pytest.mark.parametrize("port", [6301, 6301.0, "6301"])
@pytest.mark.parametrize("key", ["remote_handshake_port", "remote_port"])
def test_explicit_parameters(key: str, port: Any) -> None:
    params = {"remote_host": "10.0.0.7", key: port}
    assert peer_address("cmpl-7", params, "prefill") == Address("10.0.0.7", 6301)


def test_explicit_parameters_come_before_the_id() -> None:
    assert peer_address(ID, EXPLICIT, "decode") == Address("10.0.0.7", 6301)


def test_null_is_absent() -> None:
    nothing = {"remote_host": None, "remote_port": None, "remote_handshake_port": None, "remote_dp_size": None}
    assert peer_address("cmpl-7", nothing, "prefill") is None
    assert peer_address(ID, nothing, "prefill") == Address("10.0.0.5", 40001)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"remote_host": "10.0.0.7"}, "remote_host is '10.0.0.7', with no port"),
        ({"remote_port": 5}, "remote_host is None.*remote_port 5"),
        ({"remote_host": 7, "remote_port": 5}, "remote_host is 7"),
        ({"remote_host": "", "remote_port": 5}, "remote_host with remote_port 5"),
        ({"remote_host": "10.0.0.7", "remote_port": 5, "remote_handshake_port": 6}, "remote_handshake_port 6 and"),
        ({"remote_host": "10.0.0.7", "remote_port": 5.5}, r"remote_port is 5\.5"),
        ({"remote_host": "10.0.0.7", "remote_port": float("inf")}, "remote_port is inf"),
        ({"remote_host": "10.0.0.7", "remote_port": float("nan")}, "remote_port is nan"),
        ({"remote_host": "10.0.0.7", "remote_port": True}, "remote_port is True"),
        ({"remote_host": "10.0.0.7", "remote_port": "5 "}, "remote_port is '5 '"),
        ({"remote_host": "10.0.0.7", "remote_port": [5]}, r"remote_port is \[5\]"),
        ({"remote_host": "10.0.0.7", "remote_port": 0}, "port 0"),
        ({"remote_host": "10.0.0.7", "remote_port": -5}, "remote_port -5"),
        ({"remote_host": "10.0.0.7", "remote_port": 1e300}, "remote_port 1e[+]300"),
        ({"remote_host": "tcp://10.0.0.7", "remote_port": 5}, "tcp://10.0.0.7"),
    ],
)
def test_malformed_parameters_are_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(BadParams, match=f"kv_transfer_params.*{named}") as raised:
        peer_address("cmpl-7", params, "prefill")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("size", [2, 2.0, "8", 0, "many"])
def test_several_data_parallel_ranks_are_refused(size: Any) -> None:
    with pytest.raises(BadParams, match=f"remote_dp_size is {size!r}, must be"):
        peer_address(ID, {"remote_dp_size": size}, "decode")
    assert peer_address("cmpl-7", {"remote_dp_size": size}, "decode") is None


@pytest.mark.parametrize("size", [1, 1.0, "1"])
def test_one_data_parallel_rank_is_fine(size: Any) -> None:
    assert peer_address(ID, {"remote_dp_size": size}, "decode") == Address("10.0.0.6", 40002)


# The id of the transfer.


def test_the_routers_transfer_id() -> None:
    assert transfer_id({"transfer_id": f"tx-{HEX}"}) == f"tx-{HEX}"
    assert transfer_id({"transfer_id": "!" + "~" * 127}) == "!" + "~" * 127
    assert transfer_id({"transfer_id": None}) is None
    assert transfer_id({}) is None


@pytest.mark.parametrize("given_id", ["", "a b", "a\n", "é", "x" * 129, 7, ["tx"], {"a": 1}])
def test_a_malformed_transfer_id_is_named(given_id: Any) -> None:
    with pytest.raises(BadParams, match=r"kv_transfer_params\.transfer_id is") as raised:
        transfer_id({"transfer_id": given_id})
    assert len(str(raised.value)) < 1000


# Whatever a client sends.

PIECES = st.sampled_from(
    [
        *("___prefill_addr_", "___decode_addr_", f"_{HEX}", "-0-1a2b3c4d", "cmpl-"),
        *("host:", ",handshake:", ",notify:", "40001", "10.0.0.5", "::1", "[", "]", "_", ",", ":"),
    ]
)
LIKE_IDS = st.lists(PIECES | st.text(max_size=5), max_size=16).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("10.0.0.5"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("remote_host", "remote_port", "remote_handshake_port", "remote_dp_size", "transfer_id")
PARAMS = st.dictionaries(st.sampled_from(KEYS), JSON)


def outcome(call: Callable[[], T]) -> tuple[T | None, str]:
    """What a call returned, and why it refused."""
    try:
        return call(), ""
    except BadParams as error:
        return None, str(error)


@given(LIKE_IDS | st.text(), PARAMS, st.sampled_from(["prefill", "decode"]))
def test_whatever_comes_is_an_address_or_nothing_or_refused(request_id: str, params: dict[str, Any], side: Any) -> None:
    found, refusal = outcome(lambda: peer_address(request_id, params, side))
    assert found is None or parse(str(found)) == (found.host, found.port)
    assert not refusal or "request id" in refusal or "kv_transfer_params" in refusal


@given(PARAMS)
def test_whatever_transfer_id_comes_is_one_or_refused(params: dict[str, Any]) -> None:
    found, refusal = outcome(lambda: transfer_id(params))
    assert found is None or found == params["transfer_id"]
    assert not refusal or "kv_transfer_params.transfer_id" in refusal


@given(
    st.ip_addresses().filter(lambda ip: getattr(ip, "scope_id", None) is None),
    st.integers(1, 65535),
    st.sampled_from(["{}", "cmpl-{}-0-1a2b3c4d", "chatcmpl-{}-1a2b3c4d", "1_cmpl-{}-3-1a2b3c4d"]),
)
def test_what_an_engine_announces_comes_back(ip: Any, port: int, wrapping: str) -> None:
    request_id = wrapping.format(router_id(announced("10.0.0.9", 9), announced(str(ip), port)))
    found = peer_address(request_id, {}, "decode")
    mapped = getattr(ip, "ipv4_mapped", None)
    assert found == Address(str(mapped or ip), port)
