"""The settings of vLLM's MoRIIO connector in kvferry's words, so that its users' configurations start unchanged.

| MoRIIO | here |
| --- | --- |
| read_mode | mode; where it is absent, kvferry's default holds, not MoRIIO's (write) |
| proxy_ip and proxy_ping_port | discovery |
| http_port, host_ip | the same |
| handshake_port | port: one rendezvous serves all ranks, so MoRIIO's port per rank is not computed from it |
| defer_timeout, how long a finished prefill's blocks wait | first_hold_s |
| recv_abort_timeout, when a READ under way is given up | load_s |
| transfer_timeout, how long transfers are waited for | load_s, unless recv_abort_timeout is there |
| backend, qp_per_transfer, post_batch_size, num_workers | transport_options["mori"], if "mori" is in force |
| notify_port, local_ping_port, proxy_port | nothing |

transfer_timeout is not write_s: a load in WRITE also waits for the prefill, for which MoRIIO has no limit.
Like MoRIIO, all numbers are taken as text too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.control import addresses

ALIASES = {
    "read_mode": "mode",
    "proxy_ip": "discovery",
    "proxy_ping_port": "discovery",
    "handshake_port": "port",
    "defer_timeout": "first_hold_s",
    "recv_abort_timeout": "load_s",
    "transfer_timeout": "load_s",
}
_ENGINE_KEYS = ("backend", "qp_per_transfer", "post_batch_size", "num_workers")
_NOTHING_HERE = ("notify_port", "local_ping_port", "proxy_port")
_HOST_NAME = re.compile(r"[\w.-]{1,253}")
KEYS = (*ALIASES, *_ENGINE_KEYS, *_NOTHING_HERE)
"""The keys that only MoRIIO has. host_ip and http_port are called the same in both."""


def translate(
    extra_config: Mapping[str, Any], default_transports: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The same settings under kvferry's keys, and those keys of MoRIIO that were given and mean nothing here.

    default_transports: those in force where none are given. Each key that means nothing comes with the reason, empty
    where kvferry never has a use for it.

    Raises ValueError for a value of MoRIIO's that means nothing, and for one that contradicts kvferry's own key.
    """
    translation = _Translation(extra_config, default_transports)
    translation.mode()
    translation.addresses()
    translation.times()
    translation.engine()
    ignored = translation.ignored
    return translation.native, {key: ignored[key] for key in extra_config if key in ignored}


def meanings(extra_config: Mapping[str, Any]) -> str:
    """What the keys of MoRIIO's that were given stand for, to explain a message about kvferry's own."""
    return ", ".join(f"{alias} is {key}" for alias, key in ALIASES.items() if alias in extra_config)


class _Translation:
    """One configuration on its way: `native` grows, `ignored` too."""

    def __init__(self, extra_config: Mapping[str, Any], default_transports: Sequence[str]) -> None:
        self._default_transports = default_transports
        self._given = {key: extra_config[key] for key in KEYS if key in extra_config}
        self.native = {key: value for key, value in extra_config.items() if key not in KEYS}
        self.ignored = {key: "" for key in _NOTHING_HERE if key in self._given}

    def _put(self, key: str, value: Any, alias: str, given: Any) -> None:
        own = self.native.setdefault(key, value)
        if own != value:
            raise _contradiction(key, own, alias, given)

    def _ignore(self, keys: Sequence[str], why: str) -> None:
        self.ignored |= {key: why for key in keys if key in self._given}

    def _number(self, alias: str, convert: Callable[[str, Any], Any], key: str) -> None:
        if alias in self._given:
            self._put(key, convert(alias, self._given[alias]), alias, self._given[alias])

    def mode(self) -> None:
        if "read_mode" in self._given:
            given = self._given["read_mode"]
            self._put("mode", "read" if _flag("read_mode", given) else "write", "read_mode", given)

    def addresses(self) -> None:
        if self._given.get("handshake_port"):  # MoRIIO takes an empty one as none
            self._number("handshake_port", _port, "port")
        if "http_port" in self.native:
            self.native["http_port"] = _port("http_port", self.native["http_port"])
        if self._given.get("proxy_ip"):
            self._discovery(self._given["proxy_ip"])
        else:
            self._ignore(("proxy_ip", "proxy_ping_port"), "there is no proxy_ip")

    def _discovery(self, proxy_ip: Any) -> None:
        host = proxy_ip.strip("[]") if isinstance(proxy_ip, str) else ""
        if not (addresses.is_numeric(host) or _HOST_NAME.fullmatch(host)):
            raise ValueError(f"proxy_ip is {proxy_ip!r}, must be the router's host without scheme or port")
        port = _port("proxy_ping_port", self._given.get("proxy_ping_port", 0))
        if port == 0:
            raise ValueError(f"proxy_ip is {proxy_ip!r} and proxy_ping_port, the port of its discovery, is missing")
        router = addresses.join(host, port).removeprefix("tcp://")
        self._put("discovery", router, "proxy_ip with proxy_ping_port", router)

    def times(self) -> None:
        self._number("defer_timeout", _seconds, "first_hold_s")
        self._number("recv_abort_timeout", _seconds, "load_s")
        if "recv_abort_timeout" not in self._given:
            self._number("transfer_timeout", _seconds, "load_s")
        else:
            self._ignore(("transfer_timeout",), "recv_abort_timeout is given")

    def engine(self) -> None:
        given = {key: self._given[key] for key in _ENGINE_KEYS if key in self._given}
        transports = self.native.get("transports", self._default_transports)
        if not isinstance(transports, list | tuple) or "mori" not in transports:
            self._ignore(_ENGINE_KEYS, "transports does not name mori")
            return
        options = self.native.get("transport_options", {})
        own = options.get("mori", {}) if isinstance(options, Mapping) else None
        if not given or not isinstance(own, Mapping):
            return  # what is not a mapping is refused, by name, with kvferry's own keys
        wanted = {key: _backend(value) if key == "backend" else _whole(key, value) for key, value in given.items()}
        for key, value in wanted.items():
            if own.get(key, value) != value:
                raise _contradiction(f"transport_options.mori.{key}", own[key], key, given[key])
        self.native["transport_options"] = {**options, "mori": {**own, **wanted}}


def _contradiction(key: str, own: Any, alias: str, given: Any) -> ValueError:
    return ValueError(f"{key} is {own!r} and {alias}, MoRIIO's name for it, is {given!r}: give one of them")


def _flag(key: str, value: Any) -> bool:
    word = str(value).strip().lower()
    if word in ("true", "1"):
        return True
    if word in ("false", "0"):
        return False
    raise ValueError(f"{key} is {value!r}, must be true or false")


def _whole(key: str, value: Any) -> int:
    try:
        number = int(value)
        if number == float(value) and not isinstance(value, bool):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{key} is {value!r}, must be an integer")


def _port(key: str, value: Any) -> int:
    port = _whole(key, value)
    if not 0 <= port <= 65535:
        raise ValueError(f"{key} is {value!r}, must be a port (0 to 65535)")
    return port


def _seconds(key: str, value: Any) -> float:
    try:
        seconds = float(value)
        if math.isfinite(seconds) and seconds > 0 and not isinstance(value, bool):
            return seconds
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{key} is {value!r}, must be a positive number of seconds")


def _backend(value: Any) -> str:
    name = str(value).lower()
    if name not in ("rdma", "xgmi"):
        raise ValueError(f"backend is {value!r}, must be 'rdma' or 'xgmi'")
    return name
