"""Which transports a worker opens, and with what."""

from __future__ import annotations

import logging

import pytest

from kvferry.transport import registry
from kvferry.transport.base import TransportUnavailable
from kvferry.vllm import config, wiring


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


@pytest.mark.parametrize(("extra", "level"), [({}, "INFO"), ({"transports": ["mori", "local"]}, "WARNING")])
def test_what_is_not_installed_is_left_out_and_told_if_it_was_asked_for(monkeypatch, caplog, extra, level) -> None:
    def make(name: str, options: dict) -> object:
        if name == "mori":
            raise TransportUnavailable("not here")
        return name

    monkeypatch.setattr(registry, "make", make)
    with caplog.at_level(logging.INFO, logger="kvferry"):
        made = wiring.open_transports(config.parse(extra))
    assert made == (["local"] if extra else ["local", "nixl"])
    (line,) = [record for record in caplog.records if "not here" in record.getMessage()]
    assert line.levelname == level
