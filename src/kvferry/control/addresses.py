"""Addresses of control endpoints: their form, which may be dialled, and which make sense on this host.

An address that arrives in a request was written by a client. So it is taken apart strictly, checked against the
ranges that the operator allows, and only the numeric address that was checked is ever dialled.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

_Literal: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_ALLOWED = (
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "fc00::/7",
)
"""Loopback and private ranges. Link-local ones (169.254.0.0/16, fe80::/10) are not: cloud metadata lives there."""

_ADDRESS = re.compile(
    r"tcp://(?:\[(?P<bracketed>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%\w+)?)\]|(?P<host>[\w.-]{1,253})):(?P<port>[0-9]{1,5})"
)
_SHOWN_CHARS = 200


class AddressError(ValueError):
    """An address that can't be used; the text names it and says why."""


def parse(address: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port". The host is an IPv4 address, an IPv6 address (in brackets) or a name.

    Raises AddressError for any other form, for a port outside 1..65535, and for a number that is not written in its
    one canonical form: whoever could spell one address in many ways would get as many connections.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise AddressError(f"{_shown(address)} is not of the form tcp://host:port (an IPv6 host goes in brackets)")
    host = match["host"] or match["bracketed"]
    if match["bracketed"] and _literal(host) is None:
        raise AddressError(f"{_shown(address)}: {host!r} is not an IPv6 address")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise AddressError(f"{_shown(address)}: port {port} is not within 1..65535")
    if "%" in host:
        raise AddressError(f"{_shown(address)}: a zone id (%...) means another interface on each host")
    canonical = join(str(_literal(host) or host), port)
    if address != canonical:
        raise AddressError(f"{_shown(address)} is not in canonical form, which is {canonical}")
    return host, port


def join(host: str, port: int) -> str:
    """The address of a host and a port: `parse` read backwards."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host (not a whole address) only means the machine that reads it. No name is looked up."""
    literal = _literal(host)
    return literal.is_loopback if literal else host.rstrip(".").lower() == "localhost"


def is_numeric(host: str) -> bool:
    return _literal(host) is not None


def resolve(host: str) -> list[str]:
    """Numeric addresses of a host, in the resolver's order. Blocks for a name. Raises AddressError."""
    literal = _literal(host)
    if literal is not None:
        return [str(literal)]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"host {_shown(host)} can't be resolved: {error}") from None
    return list(dict.fromkeys(str(_literal(str(sockaddr[0]))) for *_, sockaddr in found))


def advertised_host(host_ip: str | None, environ: Mapping[str, str]) -> str:
    """The numeric host under which this process tells others to reach it: host_ip, VLLM_HOST_IP, or loopback.

    Blocks if it is a name. Raises AddressError for a name that can't be resolved, a wildcard and a zone id.
    """
    host = host_ip or environ.get("VLLM_HOST_IP") or "127.0.0.1"
    numeric = resolve(host)[0]
    if ipaddress.ip_address(numeric).is_unspecified:
        raise AddressError(
            f"host {host!r} stands for every interface, so no peer can dial it: set host_ip to one of them"
        )
    if "%" in numeric:
        raise AddressError(f"host {host!r} is {numeric}: a zone id means nothing to a peer, so set host_ip without one")
    return numeric


class AllowedRanges:
    """The networks in which peers may be dialled."""

    def __init__(self, ranges: Sequence[str] = DEFAULT_ALLOWED) -> None:
        """ranges: networks in CIDR form. Raises AddressError naming the one that is not."""
        if isinstance(ranges, str):
            raise AddressError(f"allowed ranges must be a list of networks, not the text {ranges!r}")
        self._networks = tuple(_network(text) for text in ranges)

    def __repr__(self) -> str:
        return f"AllowedRanges({', '.join(map(str, self._networks)) or 'none'})"

    def check(self, address: str) -> str:
        """The numeric form of an address within the ranges; that, and nothing else, is what may be dialled.

        A name is resolved once, here, which blocks. Raises AddressError naming the address and the ranges.
        """
        host, port = parse(address)
        found = resolve(host)
        for numeric in found:
            if self._contains(numeric):
                return join(numeric, port)
        meaning = "" if found == [host] else f" ({', '.join(found)})"
        allowed = ", ".join(map(str, self._networks)) or "none"
        raise AddressError(f"{_shown(address)}{meaning} is outside the allowed ranges: {allowed}")

    def _contains(self, numeric: str) -> bool:
        literal = ipaddress.ip_address(numeric)
        return any(literal in network for network in self._networks)


@functools.cache
def host_id() -> str:
    """Names what loopback means here: the running kernel and the network namespace. Equal ids share loopback.

    It travels beside an advertised address. Two containers of one machine differ in it, as they must.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"


def check_reachable(advertised: str, advertiser_host_id: str, own_host_id: str | None = None) -> None:
    """Refuses a loopback address that another host handed out: here it would mean this host.

    advertised: "tcp://host:port"; advertiser_host_id: the `host_id()` that came with it. Raises AddressError.
    """
    host, _ = parse(advertised)
    own = own_host_id or host_id()
    if is_loopback(host) and advertiser_host_id != own:
        raise AddressError(
            f"{_shown(advertised)} is a loopback address handed out by another host ({_shown(advertiser_host_id)},"
            f" this is {own}): set host_ip or VLLM_HOST_IP there"
        )


def _literal(host: str) -> _Literal | None:
    """The numeric address that a host is, if it is one. An IPv4 address in IPv6 clothes is taken as IPv4."""
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
    return mapped or literal


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise AddressError(f"allowed range {text!r} is not a network in CIDR form: {error}") from None


def _shown(text: str) -> str:
    """Quoted for a message, and cut: it may come from a stranger."""
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")
