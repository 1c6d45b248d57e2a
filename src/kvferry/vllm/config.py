"""The connector's settings: `kv_connector_extra_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.control.addresses import DEFAULT_ALLOWED
from kvferry.protocol.lease import Leases

_LEASES = Leases()


class ConfigError(ValueError):
    """A setting is unknown or has a value that means nothing; the text names it and what is possible."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every key of `kv_connector_extra_config`. Times are in seconds.

    transports: in order of preference. A pair of workers uses the first that both have and that connects.
    transport_options: options by transport name.
    host_ip: the address that peers are told; else VLLM_HOST_IP, else loopback. port: of the rendezvous; 0 is any.
    worker_port: first of the workers' control ports (worker of rank r takes worker_port + r); 0 is any.
    secret: overrides KVFERRY_SECRET. allow_open: run without a secret on an address that is not loopback.
    allowed_peers: CIDR ranges that may be dialled.
    model_id: what both sides call the model; by default a digest of its configuration and samples of its weights.
    weights_epoch: part of every prompt's digest; change it on both sides together with the weights.
    silence_s: a connection on which the other side says nothing for this long, not even to probes, is over.
    max_held, max_quarantined: largest fraction of the block pool that waits for readers, or for failed reads.
    """

    transports: tuple[str, ...] = ("local", "nixl")
    transport_options: dict[str, dict[str, Any]] = {}
    host_ip: str | None = None
    port: int = 0
    worker_port: int = 0
    secret: str | None = None
    allow_open: bool = False
    allowed_peers: tuple[str, ...] = tuple(DEFAULT_ALLOWED)
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
        )


def parse(extra_config: Mapping[str, Any]) -> Config:
    """Raises ConfigError that names the key, its value and what is allowed."""
    try:
        config = msgspec.convert(dict(extra_config), Config)
    except msgspec.ValidationError as error:
        known = ", ".join(Config.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error} (known keys: {known})") from None
    if not config.transports:
        raise ConfigError("kv_connector_extra_config: transports is empty: name at least one")
    for name in ("max_held", "max_quarantined"):
        if not 0.0 < getattr(config, name) <= 1.0:
            raise ConfigError(f"kv_connector_extra_config: {name} is {getattr(config, name)}, not in (0, 1]")
    if not config.silence_s > 0:
        raise ConfigError(
            f"kv_connector_extra_config: silence_s is {config.silence_s}, not a positive number of seconds"
        )
    try:
        config.leases()
    except ValueError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    return config
