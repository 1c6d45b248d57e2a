"""Where a request of a router's concurrent contract (WRITE) finds its peer: in its parameters, or in its id.

The router dispatches both legs at once, so neither knows the other from an answer. A sidecar names the peer in
`kv_transfer_params`; vllm-router writes what each engine announced (discovery.py) into the id of the request, which
vLLM then wraps: "cmpl-" + id + "-0-1a2b3c4d". All of it came through a client: it is checked for form here, and
whether it may be dialled where peers are dialled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry.control import addresses
from kvferry.vllm.params import BadParams

_PREFILL_MARK = "___prefill_addr_"
_DECODE_MARK = "___decode_addr_"
_MAX_SEGMENT_CHARS = 400
_DECODE_SEGMENT = re.compile(rf"(.{{1,{_MAX_SEGMENT_CHARS}}}?)_[0-9a-f]{{32}}(?:-.*)?", re.DOTALL)
_ANNOUNCED = re.compile(r"host:(?P<host>[^,]+),handshake:(?P<port>[0-9]{1,5}),notify:[0-9]{1,5}")
_TRANSFER_ID = re.compile(r"[!-~]{1,128}")
_SHOWN_CHARS = 200


class Address(msgspec.Struct, frozen=True):
    """A rendezvous. host: in canonical form if it is numeric; an IPv6 address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """ "tcp://host:port", as it is dialled."""
        return addresses.join(self.host, self.port)


def peer_address(request_id: str, params: Mapping[str, Any], side: Literal["prefill", "decode"]) -> Address | None:
    """The rendezvous of the engine on `side`: a consumer asks for "prefill", a producer for "decode".

    The parameters come before the id. None if neither holds one, as in every contract but the concurrent one; an id
    with the addresses of HTTP servers (a router without discovery) holds none. Raises BadParams.
    """
    found = _from_params(params) or _from_id(request_id, side)
    if found is not None:
        _check_dp_size(params)
    return found


def transfer_id(params: Mapping[str, Any]) -> str | None:
    """The router's own id of a transfer, the same on both legs; None if there is none. Raises BadParams."""
    given = params.get("transfer_id")
    if given is None:
        return None
    if not isinstance(given, str) or not _TRANSFER_ID.fullmatch(given):
        raise BadParams(f"kv_transfer_params.transfer_id is {_shown(given)}, must be 1 to 128 printable characters")
    return given


def _from_params(params: Mapping[str, Any]) -> Address | None:
    host = params.get("remote_host")
    ports = {key: params[key] for key in ("remote_handshake_port", "remote_port") if params.get(key) is not None}
    if host is None and not ports:
        return None
    if not isinstance(host, str):
        raise BadParams(f"kv_transfer_params.remote_host is {_shown(host)}, must be a host, to go with {_named(ports)}")
    numbers = {_integer(key, value) for key, value in ports.items()}
    if len(numbers) != 1:
        raise BadParams(
            f"kv_transfer_params.remote_host is {_shown(host)}, with {_named(ports) or 'no port'}: there must be one "
            "remote_handshake_port or remote_port"
        )
    return _address(f"kv_transfer_params.remote_host with {_named(ports)}", host, numbers.pop())


def _from_id(request_id: str, side: Literal["prefill", "decode"]) -> Address | None:
    if _PREFILL_MARK not in request_id and _DECODE_MARK not in request_id:
        return None
    prefill, separator, rest = request_id.partition(_PREFILL_MARK)[2].partition(_DECODE_MARK)
    decode = _DECODE_SEGMENT.fullmatch(rest)
    if not separator or decode is None:
        raise BadParams(
            f"request id {_shown(request_id)} is not of the router's form {_PREFILL_MARK}...{_DECODE_MARK}..."
            "_<32 hexadecimal digits>"
        )
    segment = prefill if side == "prefill" else decode[1]
    announced = _ANNOUNCED.fullmatch(segment)
    if announced is not None:
        return _address(f"{side}_addr of request id {_shown(request_id)}", announced["host"], int(announced["port"]))
    if segment and "," not in segment:
        return None
    raise BadParams(
        f"{side}_addr of request id {_shown(request_id)} is {_shown(segment)}, must be "
        "host:HOST,handshake:PORT,notify:PORT"
    )


def _address(named: str, host: str, port: int) -> Address:
    try:
        return Address(*addresses.parse(addresses.join(_canonical(host), port)))
    except addresses.AddressError as error:
        raise BadParams(f"{named}: {error}") from None


def _canonical(host: str) -> str:
    """A numeric host in its one form, without brackets; a name as it is."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        literal = ipaddress.ip_address(bare)
    except ValueError:
        return host
    mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
    return str(mapped or literal)


def _check_dp_size(params: Mapping[str, Any]) -> None:
    given = params.get("remote_dp_size")
    size = 1 if given is None else _integer("remote_dp_size", given)
    if size != 1:
        raise BadParams(
            f"kv_transfer_params.remote_dp_size is {_shown(given)}, must be 1: each data-parallel rank has a "
            "rendezvous of its own, and the router names that of one rank only; use READ, or one engine per rank"
        )


def _integer(key: str, value: Any) -> int:
    """A number as routers carry it: an integer, a float that is whole, or digits."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value):
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    raise BadParams(f"kv_transfer_params.{key} is {_shown(value)}, must be an integer")


def _named(ports: Mapping[str, Any]) -> str:
    return " and ".join(f"{key} {_shown(value)}" for key, value in ports.items())


def _shown(value: object) -> str:
    """As it was given, and cut: it came from a client."""
    text = repr(value[:_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
