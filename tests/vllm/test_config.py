"""The connector's settings, and that the documentation names each of them with its default."""

import logging
import re
from pathlib import Path

import msgspec
import pytest

from kvferry.vllm.config import Config, ConfigError, parse

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_nothing_set_is_the_default() -> None:
    assert parse({}) == Config()


def test_settings_are_read() -> None:
    config = parse(
        {"transports": ["nixl"], "lease_s": 12, "renew_s": 3, "transport_options": {"nixl": {"backend": "UCX"}}}
    )
    assert (config.transports, config.leases().lease_s, config.leases().renew_s) == (("nixl",), 12, 3)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"trasports": ["nixl"]}, "trasports.*known keys.*transports"),
        ({"transports": []}, "transports is empty"),
        ({"transfer_timout": 5}, r"'transfer_timout' \(did you mean 'transfer_timeout'\?\); known keys: mode, "),
        ({"lease": 5}, r"unknown key 'lease' \(did you mean 'lease_s'\?\)"),
        ({"zzzzz": 5}, "unknown key 'zzzzz'; known keys: mode, "),
        ({"transports": "nixl"}, r"transports is 'nixl', must be a list: \[\"nixl\"\]$"),
        ({"transports": "local, nixl"}, r"must be a list: \[\"local\", \"nixl\"\]$"),
        ({"allowed_peers": "10.0.0.0/8"}, r"allowed_peers is '10.0.0.0/8', must be a list: \[\"10.0.0.0/8\"\]$"),
        ({"transports": 5}, "Expected `array`, got `int` - at `\\$.transports`$"),
        ({"lease_s": -1}, "lease_s"),
        ({"lease_s": 5, "renew_s": 4}, "renew_s"),
        ({"lease_s": "soon"}, "lease_s"),
        ({"max_held": 0}, "max_held is 0"),
        ({"max_quarantined": 1.5}, "max_quarantined is 1.5"),
        ({"port": "any"}, "port"),
        ({"mode": "push"}, "push.*mode"),
        ({"write_s": 0}, "write_s"),
        ({"announce_as": "both"}, "announce_as"),
        ({"discovery": "10.0.0.1", "http_port": 8000}, "discovery is '10.0.0.1'"),
        ({"discovery": "10.0.0.1:0", "http_port": 8000}, "discovery is '10.0.0.1:0'"),
        ({"discovery": "10.0.0.1:30001"}, "http_port is 0"),
        ({"discovery": "10.0.0.1:30001", "http_port": 65536}, "http_port is 65536"),
        ({"mode": "write", "read_mode": "true"}, "mode is 'write' and read_mode"),
        ({"recv_abort_timeout": 1, "claim_reply_s": 2}, "load_s, which is 1.0.*recv_abort_timeout is load_s"),
        ({"longest_hold_s": 30, "first_hold_s": 60}, "first_hold_s is 60.0, must not exceed longest_hold_s"),
        ({"longest_hold_s": 30, "defer_timeout": 60}, "first_hold_s is 60.0.*defer_timeout is first_hold_s"),
        (
            {"longest_hold_s": 8, "renew_s": 5},
            "renew_s is 5.0.*lease_s, which is 8.0.*lease_s is not given and follows",
        ),
        ({"longest_hold_s": 0}, "longest_hold_s is 0.0"),
        ({"longest_hold_s": -1}, "longest_hold_s is -1.0"),
        ({"first_hold_s": float("inf")}, "first_hold_s is inf"),
        ({"load_s": float("nan")}, "load_s is nan"),
        ({"transports": ["local", "local"]}, "transports is local, local: 'local' is there 2 times"),
        ({"transports": ["a.b:C", "nixl", "a.b:C"]}, "'a.b:C' is there 2 times"),
        ({"transports": ["nixl"], "transport_options": {"nixxl": {}}}, "options of 'nixxl'.*transports: nixl$"),
        ({"transports": ["nixl"], "transport_options": {"nixl": {}, "local": {"threads": 1}}}, "options of 'local'"),
        ({"transports": ["local"], "transport_options": {"mori": {}}, "backend": "rdma"}, "options of 'mori'"),
        ({"transports": ["a.b:C"], "transport_options": {"C": {}}}, "options of 'C'.*transports: a.b:C"),
        ({"transport_options": {"mooncake": {}}}, "options of 'mooncake'.*transports: local, mori, nixl"),
    ],
)
def test_what_means_nothing_is_named(extra: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(extra)


@pytest.mark.parametrize(
    ("extra", "moved"),
    [
        ({"longest_hold_s": 30}, {"first_hold_s": 30}),
        ({"longest_hold_s": 8}, {"first_hold_s": 8, "lease_s": 8, "renew_s": 4}),
        ({"longest_hold_s": 8, "lease_s": 6}, {"first_hold_s": 8, "renew_s": 3}),
        ({"longest_hold_s": 300}, {}),
        ({"lease_s": 4}, {"renew_s": 2}),
        ({"first_hold_s": 900}, {"longest_hold_s": 900}),
        ({"first_hold_s": 900, "longest_hold_s": 1000}, {}),
        ({"lease_s": 700, "first_hold_s": 650}, {"longest_hold_s": 700}),
        ({"load_s": 1}, {"claim_reply_s": 1}),
        ({"load_s": 1.5, "write_s": 0.5}, {"claim_reply_s": 0.5}),
    ],
)
def test_times_that_are_not_given_follow_those_that_are(extra: dict, moved: dict) -> None:
    config = parse(extra)
    assert config == msgspec.structs.replace(Config(), **extra, **moved)
    assert config.leases().longest_hold_s == config.longest_hold_s


@pytest.mark.parametrize(
    ("key", "extra", "moved"),
    [
        ("defer_timeout", {"defer_timeout": 900}, {"first_hold_s": 900, "longest_hold_s": 900}),
        ("defer_timeout", {"defer_timeout": "900", "longest_hold_s": 1000}, {"first_hold_s": 900}),
        ("recv_abort_timeout", {"recv_abort_timeout": 1}, {"load_s": 1, "claim_reply_s": 1}),
    ],
)
def test_times_follow_moriios_too(key: str, extra: dict, moved: dict) -> None:
    native = {name: value for name, value in extra.items() if name != key}
    assert parse(extra) == msgspec.structs.replace(Config(), **native, **moved)


@pytest.mark.parametrize(
    "extra",
    [
        {"transport_options": {"local": {"threads": 2}, "nixl": {}, "mori": {}}},  # all of the default
        {"transports": ["a.b:C", "nixl"], "transport_options": {"a.b:C": {"port": 7}}},
        {"transports": ["mori"], "transport_options": {"mori": {"num_workers": 2}}, "backend": "rdma"},
        {"transports": ["local"], "backend": "rdma", "qp_per_transfer": 2},  # MoRIIO's keys only where mori is
        {"backend": "rdma"},  # mori is among the default ones
    ],
)
def test_options_of_transports_that_are_used_are_taken(extra: dict) -> None:
    config = parse(extra, log_ignored=False)
    assert config.transport_options.keys() <= set(config.transports)
    for name, options in extra.get("transport_options", {}).items():
        assert config.transport_options[name].items() >= options.items()


def test_modes_and_discovery_are_read() -> None:
    config = parse({"mode": "write", "write_s": 90, "discovery": "[::1]:30001", "http_port": 8000})
    assert (config.mode, config.leases().write_s, config.discovery, config.http_port) == (
        *("write", 90, "[::1]:30001", 8000),
    )


MORIIO = {
    "read_mode": "false",
    "proxy_ip": "10.0.0.1",
    "proxy_ping_port": "36367",
    "http_port": "20005",
    "handshake_port": "6301",
    "notify_port": "6105",
    "backend": "rdma",
}


def test_a_moriio_users_settings_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvferry"):
        config = parse(MORIIO)
    assert config == Config(
        mode="write",
        discovery="10.0.0.1:36367",
        http_port=20005,
        port=6301,
        transport_options={"mori": {"backend": "rdma"}},
    )
    assert [record.getMessage() for record in caplog.records] == [
        "kvferry: settings of MoRIIO's that mean nothing here are ignored: notify_port"
    ]


def test_what_is_ignored_for_want_of_mori_says_so(caplog: pytest.LogCaptureFixture) -> None:
    parse({"transports": ["local"], "backend": "xgmi", "notify_port": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "kvferry: settings of MoRIIO's that mean nothing here are ignored: "
        "backend (transports does not name mori), notify_port"
    ]


@pytest.mark.parametrize(("extra", "log_ignored"), [({}, True), (MORIIO, False)])
def test_nothing_is_logged_where_there_is_nothing_to_say(
    extra: dict, log_ignored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvferry"):
        parse(extra, log_ignored)
    assert not caplog.records


def test_every_setting_is_documented_with_its_default() -> None:
    documented: dict[str, str] = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4:
            continue
        names, defaults = re.findall(r"`(\w+)`", cells[1]), [default.strip(" `") for default in cells[2].split(",")]
        if len(names) > 1:
            documented.update(zip(names, defaults, strict=True))
        elif names:
            documented[names[0]] = cells[2].strip("`")
    assert documented.keys() == set(Config.__struct_fields__)
    for name, default in zip(Config.__struct_fields__, msgspec.structs.fields(Config), strict=True):
        if isinstance(default.default, float):
            assert float(documented[name]) == default.default, name
