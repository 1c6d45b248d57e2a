"""Which transports a worker opens, and with what."""

from __future__ import annotations

import logging

import pytest

from kvferry.control.addresses import AddressError
from kvferry.transport import registry
from kvferry.transport.base import TransportUnavailable
from kvferry.vllm import config, wiring

ELSEWHERE = "192.0.2.9"
"""For documentation only (RFC 5737): no machine has it."""


class Listening:
    """A transport that listens on an address."""

    options = ("host", "port")

    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"listening": Listening, "local": registry._class_of("local")}
    monkeypatch.setattr(registry, "_class_of", made.__getitem__)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("options", "host"),
    [({}, "127.0.0.2"), ({"port": 7}, "127.0.0.2"), ({"host": "127.0.0.3"}, "127.0.0.3")],
    ids=["none", "others", "its own"],
)
def test_a_transport_that_listens_does_so_where_peers_are_told(options, host) -> None:
    extra = {"transports": ["listening", "local"], "host_ip": "127.0.0.2", "transport_options": {"listening": options}}
    listening, local = wiring.open_transports(config.parse(extra))
    assert (listening.host, local.name) == (host, "local")


@pytest.mark.parametrize(
    ("extra", "level"),
    [({}, "INFO"), ({"transports": ["mori", "local"]}, "WARNING"), ({"backend": "xgmi"}, "WARNING")],
)
def test_what_is_not_installed_is_left_out_and_told_if_it_was_asked_for(monkeypatch, caplog, extra, level) -> None:
    def make(name: str, options: dict) -> object:
        if name == "mori":
            raise TransportUnavailable("mori: not here")
        return name

    monkeypatch.setattr(registry, "make", make)
    with caplog.at_level(logging.INFO, logger="kvferry"):
        made = wiring.open_transports(config.parse(extra))
    assert made == (["local"] if "transports" in extra else ["local", "nixl"])
    (line,) = [record for record in caplog.records if "not here" in record.getMessage()]
    assert (line.levelname, line.getMessage()) == (level, "kvferry: transport mori: not here")


def test_without_any_transport_each_is_named_once(monkeypatch) -> None:
    def make(name: str, options: dict) -> object:
        raise TransportUnavailable(f"{name}: not here")

    monkeypatch.setattr(registry, "make", make)
    with pytest.raises(TransportUnavailable) as raised:
        wiring.open_transports(config.parse({"transports": ["mori", "local"]}))
    assert str(raised.value) == "none of the configured transports is available: mori: not here; local: not here"


@pytest.mark.parametrize(
    ("extra", "by_vllm", "setting"),
    [
        ({"host_ip": ELSEWHERE}, "", "host_ip"),
        ({"host_ip": ELSEWHERE}, "127.0.0.1", "host_ip"),
        ({}, ELSEWHERE, "VLLM_HOST_IP"),
        ({"host_ip": ELSEWHERE}, ELSEWHERE, "VLLM_HOST_IP"),
    ],
)
def test_a_host_of_another_machine_is_named_with_what_set_it(monkeypatch, extra, by_vllm, setting) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", by_vllm)
    with pytest.raises(AddressError) as raised:
        wiring.open_endpoint(config.parse({**extra, "allow_open": True}), 0)
    assert str(raised.value) == f"{setting} {ELSEWHERE} is no address of this machine"
