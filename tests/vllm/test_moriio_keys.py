"""A MoRIIO user's configuration in kvferry's words."""

import re
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOMode, get_moriio_mode

from kvferry.vllm import moriio_keys
from kvferry.vllm.moriio_keys import KEYS, meanings

MORIIO = {
    "proxy_ip": "10.0.0.1",
    "proxy_port": "30001",
    "proxy_ping_port": "36367",
    "http_port": "20005",
    "local_ping_port": "61555",
    "handshake_port": "6301",
    "notify_port": 61005,
    "host_ip": "10.0.0.5",
    "read_mode": True,
    "backend": "rdma",
    "qp_per_transfer": 2,
    "post_batch_size": -1,
    "num_workers": "4",
    "transfer_timeout": 40,
    "defer_timeout": "90",
    "recv_abort_timeout": 120.0,
}
NO_MORI = "transports does not name mori"


def translate(extra: dict[str, Any], *default_transports: str) -> tuple[dict[str, Any], dict[str, str]]:
    return moriio_keys.translate(extra, default_transports or ("local", "mori"))


def test_a_whole_configuration() -> None:
    assert translate(MORIIO) == (
        {
            "discovery": "10.0.0.1:36367",
            "http_port": 20005,
            "port": 6301,
            "host_ip": "10.0.0.5",
            "mode": "read",
            "first_hold_s": 90.0,
            "load_s": 120.0,
            "transport_options": {
                "mori": {"backend": "rdma", "qp_per_transfer": 2, "post_batch_size": -1, "num_workers": 4}
            },
        },
        {
            **dict.fromkeys(("proxy_port", "local_ping_port", "notify_port"), ""),
            "transfer_timeout": "recv_abort_timeout is given",
        },
    )


@pytest.mark.parametrize(
    ("extra", "default_transports", "is_taken"),
    [
        ({}, ("local", "mori", "nixl"), True),
        ({}, ("local", "nixl"), False),
        ({"transports": ["mori"]}, ("local",), True),
        ({"transports": ["local"]}, ("mori",), False),
    ],
)
def test_settings_of_its_engine_mean_something_where_mori_is_in_force(
    extra: dict[str, Any], default_transports: tuple[str, ...], is_taken: bool
) -> None:
    native, ignored = translate({**extra, "backend": "xgmi", "num_workers": "2"}, *default_transports)
    options = {"transport_options": {"mori": {"backend": "xgmi", "num_workers": 2}}} if is_taken else {}
    assert native == {**extra, **options}
    assert ignored == ({} if is_taken else {"backend": NO_MORI, "num_workers": NO_MORI})


def test_what_is_already_ours_stays() -> None:
    ours = {"mode": "write", "transports": ["mori"], "transport_options": {"mori": {"backend": "xgmi"}}, "unknown": 1}
    assert translate(ours) == (ours, {})


def test_the_given_configuration_is_left_as_it_is() -> None:
    given = {"transports": ["mori"], "transport_options": {"mori": {}}, "backend": "xgmi"}
    translate(given)
    assert given == {"transports": ["mori"], "transport_options": {"mori": {}}, "backend": "xgmi"}


@pytest.mark.parametrize("given", [True, False, "true", "false", " True ", "FALSE", "1", "0", 1, 0])
def test_the_mode_is_the_one_that_moriio_reads_from_it(given: Any) -> None:
    moriios = get_moriio_mode(
        KVTransferConfig(
            kv_connector="MoRIIOConnector", kv_role="kv_consumer", kv_connector_extra_config={"read_mode": given}
        )
    )
    assert translate({"read_mode": given})[0]["mode"] == ("read" if moriios is MoRIIOMode.READ else "write")


@pytest.mark.parametrize("given", ["", 0, "0", None])
def test_an_empty_handshake_port_is_any(given: Any) -> None:
    assert translate({"handshake_port": given})[0].get("port", 0) == 0


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_router_is_written_with_or_without_brackets(host: str) -> None:
    assert translate({"proxy_ip": host, "proxy_ping_port": 5})[0] == {"discovery": "[::1]:5"}


@pytest.mark.parametrize("proxy", [{"proxy_ip": "", "proxy_ping_port": 36367}, {"proxy_ping_port": "36367"}])
def test_without_a_router_its_port_means_nothing(proxy: dict[str, Any]) -> None:
    assert translate(proxy) == ({}, dict.fromkeys(proxy, "there is no proxy_ip"))


def test_transfer_timeout_limits_a_load_where_nothing_else_does() -> None:
    assert translate({"transfer_timeout": 40}) == ({"load_s": 40}, {})


def test_settings_of_its_engine_go_to_the_transport() -> None:
    native, ignored = translate(
        {
            "transports": ["mori", "local"],
            "transport_options": {"mori": {"own": 1, "num_workers": 4}, "nixl": {}},
            "backend": "XGMI",
            "qp_per_transfer": "2",
            "num_workers": 4,
        }
    )
    options = {"mori": {"own": 1, "num_workers": 4, "backend": "xgmi", "qp_per_transfer": 2}, "nixl": {}}
    assert (native["transport_options"], ignored) == (options, {})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"mode": "write", "read_mode": True}, "mode is 'write' and read_mode.* is True"),
        ({"port": 6300, "handshake_port": "6301"}, "port is 6300 and handshake_port.* is '6301'"),
        ({"load_s": 60, "transfer_timeout": 30}, "load_s is 60 and transfer_timeout.* is 30"),
        ({"load_s": 60, "recv_abort_timeout": 30}, "load_s is 60 and recv_abort_timeout.* is 30"),
        ({"first_hold_s": 60, "defer_timeout": 30}, "first_hold_s is 60 and defer_timeout.* is 30"),
        (
            {"discovery": "10.0.0.1:1", "proxy_ip": "10.0.0.1", "proxy_ping_port": 2},
            "discovery is '10.0.0.1:1' and proxy_ip with proxy_ping_port.* is '10.0.0.1:2'",
        ),
        (
            {"transports": ["mori"], "transport_options": {"mori": {"num_workers": 2}}, "num_workers": 3},
            r"transport_options\.mori\.num_workers is 2 and num_workers.* is 3",
        ),
        ({"read_mode": "yes"}, "read_mode is 'yes'"),
        ({"read_mode": None}, "read_mode is None"),
        ({"handshake_port": "any"}, "handshake_port is 'any'"),
        ({"handshake_port": 65536}, "handshake_port is 65536"),
        ({"handshake_port": True}, "handshake_port is True"),
        ({"http_port": 80.5}, "http_port is 80.5"),
        ({"http_port": None}, "http_port is None"),
        ({"proxy_ip": "10.0.0.1"}, "proxy_ip is '10.0.0.1' and proxy_ping_port.* missing"),
        ({"proxy_ip": 7, "proxy_ping_port": 5}, "proxy_ip is 7"),
        *(
            ({"proxy_ip": host, "proxy_ping_port": 5}, f"proxy_ip is '{re.escape(host)}', .* without scheme or port$")
            for host in ("10.0.0.1:36367", "http://10.0.0.1", "tcp://router", "[::1]:36367", "router/")
        ),
        ({"proxy_ip": "10.0.0.1", "proxy_ping_port": float("inf")}, "proxy_ping_port is inf"),
        ({"defer_timeout": 0}, "defer_timeout is 0"),
        ({"transfer_timeout": float("inf")}, "transfer_timeout is inf"),
        ({"recv_abort_timeout": "soon"}, "recv_abort_timeout is 'soon'"),
        ({"transports": ["mori"], "backend": "tcp"}, "backend is 'tcp'"),
        ({"backend": "tcp"}, "backend is 'tcp'"),
        ({"transports": ["mori"], "num_workers": "many"}, "num_workers is 'many'"),
    ],
)
def test_what_contradicts_or_means_nothing_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        translate(extra)


@pytest.mark.parametrize(
    ("key", "alias", "value"),
    [("port", "handshake_port", 6301), ("load_s", "transfer_timeout", 30), ("first_hold_s", "defer_timeout", 30)],
)
def test_both_names_with_one_value_are_fine(key: str, alias: str, value: int) -> None:
    assert translate({key: value, alias: value})[0][key] == value


def test_no_key_of_moriios_is_left() -> None:
    native, _ = translate(MORIIO)
    assert not native.keys() & set(KEYS)
    assert native.keys() >= {"host_ip", "http_port"}


def test_meanings_of_what_was_given() -> None:
    assert meanings({"defer_timeout": 1, "lease_s": 2}) == "defer_timeout is first_hold_s"
    assert meanings({}) == ""
