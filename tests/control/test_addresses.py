"""Addresses: their form, the ranges that may be dialled, and loopback on the wrong host."""

from __future__ import annotations

import re
import socket

import pytest

from kvferry.control import addresses
from kvferry.control.addresses import AddressError, AllowedRanges


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("tcp://node-7.rack_2.example:1", ("node-7.rack_2.example", 1)),
        ("tcp://[::1]:65535", ("::1", 65535)),
        ("tcp://[fd00::1:2]:80", ("fd00::1:2", 80)),
        ("tcp://[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_parse_and_join_are_inverse(address: str, expected: tuple[str, int]) -> None:
    assert addresses.parse(address) == expected
    assert addresses.join(*expected) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5555",
        "ipc:///tmp/socket",
        "inproc://zeromq.zap.01",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:5555 ",
        "tcp://127.0.0.1:5555\n",
        "tcp://127.0.0.1:\N{ARABIC-INDIC DIGIT FIVE}",
        "tcp://::1:5555",
        "tcp://[127.0.0.1]:5555",
        "tcp://[::1::2]:5555",
        "tcp://*:5555",
        "tcp://10.0.0.1:0;127.0.0.1:5555",
        "tcp://user@10.0.0.1:5555",
        "tcp://" + "a" * 254 + ":5555",
    ],
)
def test_other_forms_are_refused_by_name(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(address)[:100])):
        addresses.parse(address)


@pytest.mark.parametrize(
    ("address", "canonical"),
    [
        ("tcp://[::ffff:127.0.0.1]:5", "tcp://127.0.0.1:5"),
        ("tcp://[::FfFf:7f00:1]:5", "tcp://127.0.0.1:5"),
        ("tcp://[0:0:0:0:0:ffff:7f00:0001]:5", "tcp://127.0.0.1:5"),
        ("tcp://[0:0:0:0:0:0:0:1]:5", "tcp://[::1]:5"),
        ("tcp://[0::1]:5", "tcp://[::1]:5"),
        ("tcp://[FD00::1]:5", "tcp://[fd00::1]:5"),
        ("tcp://[fd00::0001]:5", "tcp://[fd00::1]:5"),
        ("tcp://[::0.0.0.1]:5", "tcp://[::1]:5"),
        ("tcp://127.0.0.1:05", "tcp://127.0.0.1:5"),
        ("tcp://[::1]:00005", "tcp://[::1]:5"),
    ],
)
def test_other_spellings_of_a_number_are_refused_with_the_canonical_one(address: str, canonical: str) -> None:
    with pytest.raises(AddressError, match=re.escape(address)) as refused:
        addresses.parse(address)
    assert str(refused.value).endswith(canonical)
    assert addresses.join(*addresses.parse(canonical)) == canonical


@pytest.mark.parametrize("address", ["tcp://[fe80::1%eth0]:80", "tcp://[::1%1]:80", "tcp://[::1%abc]:80"])
def test_zone_ids_are_refused(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(address) + ".*zone id"):
        addresses.parse(address)


def test_a_strangers_long_address_is_cut_in_the_message() -> None:
    with pytest.raises(AddressError) as refused:
        addresses.parse("x" * 1_000_000)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST."])
def test_loopback(host: str) -> None:
    assert addresses.is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "::", "0.0.0.0", "fd00::1", "localhost.example", "128.0.0.1", ""])
def test_not_loopback(host: str) -> None:
    assert not addresses.is_loopback(host)


@pytest.mark.parametrize(
    ("host_ip", "environ", "expected"),
    [
        ("10.1.2.3", {"VLLM_HOST_IP": "10.9.9.9"}, "10.1.2.3"),
        (None, {"VLLM_HOST_IP": "10.9.9.9"}, "10.9.9.9"),
        ("", {"VLLM_HOST_IP": ""}, "127.0.0.1"),
        (None, {}, "127.0.0.1"),
        ("fd00::0:1", {}, "fd00::1"),
    ],
)
def test_advertised_host(host_ip: str | None, environ: dict[str, str], expected: str) -> None:
    assert addresses.advertised_host(host_ip, environ) == expected


def test_an_advertised_name_becomes_a_number() -> None:
    assert addresses.advertised_host("localhost", {}) in ("127.0.0.1", "::1")


def test_a_zone_id_is_no_advertised_host() -> None:
    with pytest.raises(AddressError, match=r"fe80::1%eth0.*set host_ip"):
        addresses.advertised_host("fe80::1%eth0", {})


@pytest.mark.parametrize("host_ip", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_advertised_host(host_ip: str) -> None:
    with pytest.raises(AddressError, match="set host_ip"):
        addresses.advertised_host(host_ip, {})


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "tcp://10.255.0.1:1",
        "tcp://172.31.0.1:1",
        "tcp://192.168.1.1:1",
        "tcp://[::1]:1",
        "tcp://[fd12::1]:1",
    ],
)
def test_private_and_loopback_addresses_are_allowed_by_default(address: str) -> None:
    assert AllowedRanges().check(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "tcp://8.8.8.8:53",
        "tcp://169.254.169.254:80",
        "tcp://172.32.0.1:1",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://[fe80::1]:1",
        "tcp://[2001:db8::1]:1",
    ],
)
def test_other_addresses_are_refused_by_default(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(address)) as refused:
        AllowedRanges().check(address)
    assert "10.0.0.0/8" in str(refused.value)


def test_an_ipv4_address_in_ipv6_clothes_is_advertised_as_ipv4() -> None:
    assert addresses.advertised_host("::ffff:10.0.0.1", {}) == "10.0.0.1"


def test_own_ranges_replace_the_default() -> None:
    ranges = AllowedRanges(["203.0.113.0/24"])
    assert ranges.check("tcp://203.0.113.9:1") == "tcp://203.0.113.9:1"
    with pytest.raises(AddressError, match=r"203\.0\.113\.0/24"):
        ranges.check("tcp://127.0.0.1:1")
    with pytest.raises(AddressError, match="allowed ranges: none"):
        AllowedRanges([]).check("tcp://127.0.0.1:1")


@pytest.mark.parametrize("ranges", [["10.0.0.0/33"], ["10.0.0.1/8"], ["everything"], "10.0.0.0/8"])
def test_bad_ranges_are_refused_by_name(ranges: list[str] | str) -> None:
    with pytest.raises(AddressError, match=re.escape(ranges if isinstance(ranges, str) else ranges[0])):
        AllowedRanges(ranges)


def test_a_name_is_resolved_once_and_its_number_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["10.0.0.5", "8.8.8.8"])

    def rebinding(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "peer.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    ranges = AllowedRanges()
    assert ranges.check("tcp://peer.example:9") == "tcp://10.0.0.5:9"
    with pytest.raises(AddressError, match=r"peer\.example:9' \(8\.8\.8\.8\) is outside"):
        ranges.check("tcp://peer.example:9")


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(AddressError, match=r"nowhere\.invalid"):
        AllowedRanges().check("tcp://nowhere.invalid:9")


def test_loopback_of_this_host_is_reachable() -> None:
    addresses.check_reachable("tcp://127.0.0.1:5", addresses.host_id())
    addresses.check_reachable("tcp://[::1]:5", addresses.host_id())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5", "tcp://[::1]:5", "tcp://localhost:5"])
def test_loopback_of_another_host_is_refused_by_name(address: str) -> None:
    with pytest.raises(AddressError, match=re.escape(address)) as refused:
        addresses.check_reachable(address, "another boot/4026531840")
    assert "another boot/4026531840" in str(refused.value)
    assert addresses.host_id() in str(refused.value)
    assert "host_ip" in str(refused.value)


def test_a_real_address_of_another_host_is_reachable() -> None:
    addresses.check_reachable("tcp://10.0.0.1:5", "another boot/4026531840")


def test_containers_of_one_machine_do_not_share_loopback() -> None:
    boot_id, namespace = addresses.host_id().split("/")
    assert len(boot_id) == 36
    with pytest.raises(AddressError):
        addresses.check_reachable("tcp://127.0.0.1:5", f"{boot_id}/{int(namespace) + 1}")
