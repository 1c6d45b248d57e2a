"""Where peers reach a library's own server on this machine: one numeric IPv4 address, as the library wants it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

from kvferry.transport.base import TransportError, TransportUnavailable


def is_address(host: str) -> bool:
    """Whether it is the numeric IPv4 address of one machine, in its canonical form."""
    try:
        literal = ipaddress.IPv4Address(host)
    except ValueError:
        return False
    is_broadcast = int(literal) == 2**32 - 1
    return not (literal.is_unspecified or literal.is_multicast or is_broadcast)


def resolved(host: str, transport: str) -> str:
    """The numeric address of a host; blocks for a name.

    Raises TransportUnavailable for a host without an IPv4 address, TransportError for one that peers can't dial.
    """
    try:
        found: Any = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    # ValueError: what Python can't write as a name.
    except (OSError, ValueError) as error:
        raise TransportUnavailable(f"{transport}: host {host!r} has no IPv4 address: {error}") from error
    if not is_address(str(found)):
        raise TransportError(f"{transport}: host {host!r} is {found}, which peers can't dial")
    return str(found)


def check_is_here(address: str, transport: str) -> None:
    """Raises TransportUnavailable for a numeric address on which this machine can't listen."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as throw_away:
        try:
            throw_away.bind((address, 0))
        except OSError as error:
            raise TransportUnavailable(
                f"{transport}: host {address} is no address of this machine: {error.strerror}"
            ) from error
