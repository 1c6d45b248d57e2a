"""The connector's settings: `kv_connector_extra_config`, checked."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from kvferry.control import addresses
from kvferry.protocol.lease import Leases
from kvferry.vllm import moriio_keys

logger = logging.getLogger(__name__)

_LEASES = Leases()

_BOUNDS = (
    ("first_hold_s", "longest_hold_s", 1),
    ("lease_s", "longest_hold_s", 1),
    ("renew_s", "lease_s", 2),
    ("claim_reply_s", "load_s", 1),
    ("claim_reply_s", "write_s", 1),
)
"""What Leases asks of times: how many of the first must fit into the second."""

_LISTS = ("transports", "allowed_peers")

DEFAULT_TRANSPORTS = ("local", "mori", "nixl")
"""The best first; what is not installed is left out. Mooncake listens on every interface, so it must be asked for."""


class ConfigError(ValueError):
    """A setting is unknown or has a value that means nothing; the text names it and what is possible."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every key of `kv_connector_extra_config`, beside MoRIIO's (moriio_keys.py). Times are in seconds.

    mode: how this engine, as a consumer, gets KV by default: it reads, or the producer writes.
    transports: in order of preference. A pair of workers uses the first that both have and that connects.
    transport_options: options by transport name.
    host_ip: the address that peers are told; else VLLM_HOST_IP, else loopback. port: of the rendezvous; 0 is any.
    worker_port: first of the workers' control ports; 0 is any. Data-parallel rank d takes port + d, and its worker
    r of n takes worker_port + d * n + r.
    secret: overrides KVFERRY_SECRET. allow_open: run without a secret on an address that is not loopback.
    allowed_peers: CIDR ranges that may be dialled.
    model_id: what both sides call the model; by default a digest of its configuration and samples of its weights.
    weights_epoch: part of every prompt's digest; change it on both sides together with the weights.
    discovery: "host:port" of the router that this engine announces itself to, as vllm-router's MoRI-IO discovery wants
    it. http_port: of the engine's own HTTP server, for that router. announce_as: which side a kv_both engine takes.
    silence_s: a connection on which the other side says nothing for this long, not even to probes, is over.
    max_held, max_quarantined: largest fraction of the block pool that waits for readers, or for failed reads.
    """

    mode: Literal["read", "write"] = "read"
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    transport_options: dict[str, dict[str, Any]] = {}
    host_ip: str | None = None
    port: int = 0
    worker_port: int = 0
    secret: str | None = None
    allow_open: bool = False
    allowed_peers: tuple[str, ...] = tuple(addresses.DEFAULT_ALLOWED)
    model_id: str | None = None
    weights_epoch: str = ""
    max_held: float = 0.8
    max_quarantined: float = 0.5
    first_hold_s: float = _LEASES.first_hold_s
    lease_s: float = _LEASES.lease_s
    renew_s: float = _LEASES.renew_s
    claim_reply_s: float = _LEASES.claim_reply_s
    parking_s: float = _LEASES.parking_s
    handshake_s: float = _LEASES.handshake_s
    longest_hold_s: float = _LEASES.longest_hold_s
    silence_s: float = 9.0
    load_s: float = _LEASES.load_s
    write_s: float = _LEASES.write_s
    discovery: str | None = None
    http_port: int = 0
    announce_as: Literal["prefill", "decode"] | None = None

    def leases(self) -> Leases:
        return Leases(
            first_hold_s=self.first_hold_s,
            lease_s=self.lease_s,
            renew_s=self.renew_s,
            claim_reply_s=self.claim_reply_s,
            parking_s=self.parking_s,
            handshake_s=self.handshake_s,
            longest_hold_s=self.longest_hold_s,
            load_s=self.load_s,
            write_s=self.write_s,
        )


def parse(extra_config: Mapping[str, Any], log_ignored: bool = True) -> Config:
    """MoRIIO's keys that mean nothing here are logged, in one line.

    Raises ConfigError that names the key, its value and what is allowed.
    """
    try:
        native, ignored = moriio_keys.translate(extra_config, DEFAULT_TRANSPORTS)
        _check_keys(native.keys())
        _check_lists(native)
    except ValueError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    try:
        config = _fitted(msgspec.convert(native, Config), native.keys())
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    try:
        _check(config)
    except ValueError as error:
        moved = [f"{name} is not given and follows the others" for name in _moved(config, native.keys())]
        notes = ", ".join(filter(None, [moriio_keys.meanings(extra_config), *moved]))
        raise ConfigError(f"kv_connector_extra_config: {error}{notes and f' ({notes})'}") from None
    if ignored and log_ignored:
        told = ", ".join(f"{key} ({why})" if why else key for key, why in ignored.items())
        logger.warning("kvferry: settings of MoRIIO's that mean nothing here are ignored: %s", told)
    return config


def _check_keys(keys: Collection[str]) -> None:
    """Raises ValueError that names the first unknown key, the known ones, and the one that may be meant."""
    known = Config.__struct_fields__
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), (*known, *moriio_keys.KEYS), n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown key {key!r}{meant}; known keys: {', '.join(known)}, and MoRIIO's own")


def _check_lists(native: Mapping[str, Any]) -> None:
    """Raises ValueError for a text where a list is wanted, which shows how that is written."""
    for key in _LISTS:
        value = native.get(key)
        if isinstance(value, str):
            meant = json.dumps([part.strip() for part in value.split(",")], ensure_ascii=False)
            raise ValueError(f"{key} is {value!r}, must be a list: {meant}")


def _fitted(config: Config, given: Collection[str]) -> Config:
    """A default gives way to a limit that was given, and the longest hold's to a longer hold or lease."""
    times = {name: getattr(config, name) for name in config.__struct_fields__ if name.endswith("_s")}
    if "longest_hold_s" not in given:
        times["longest_hold_s"] = max(times[name] for name in ("longest_hold_s", "first_hold_s", "lease_s"))
    for smaller, larger, ratio in _BOUNDS:
        bound = times[larger] / ratio
        if smaller not in given and 0 < bound < times[smaller]:
            times[smaller] = bound
    return msgspec.structs.replace(config, **times)


def _moved(config: Config, given: Collection[str]) -> list[str]:
    """The times that are not the default and were not given either."""
    defaults = Config()
    times = [name for name in config.__struct_fields__ if name.endswith("_s") and name not in given]
    return [name for name in times if getattr(config, name) != getattr(defaults, name)]


def _check(config: Config) -> None:
    """Raises ValueError for values that have the right type and mean nothing."""
    _check_transports(config.transports, config.transport_options)
    for name in ("max_held", "max_quarantined"):
        if not 0.0 < getattr(config, name) <= 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}, not in (0, 1]")
    if not config.silence_s > 0:
        raise ValueError(f"silence_s is {config.silence_s}, not a positive number of seconds")
    config.leases()
    if config.discovery is not None:
        _check_discovery(config.discovery, config.http_port)


def _check_transports(transports: tuple[str, ...], options: Mapping[str, object]) -> None:
    if not transports:
        raise ValueError("transports is empty: name at least one")
    for name in transports:
        if transports.count(name) > 1:
            raise ValueError(f"transports is {', '.join(transports)}: {name!r} is there {transports.count(name)} times")
    for name in options:
        if name not in transports:
            raise ValueError(
                f"transport_options has options of {name!r}, which is not among the transports: {', '.join(transports)}"
            )


def _check_discovery(discovery: str, http_port: int) -> None:
    try:
        addresses.parse(f"tcp://{discovery}")
    except addresses.AddressError as error:
        raise ValueError(f"discovery is {discovery!r}, must be the router's host:port: {error}") from None
    if not 1 <= http_port <= 65535:
        raise ValueError(
            f"http_port is {http_port}, and discovery needs the port (1 to 65535) of this engine's HTTP server"
        )
