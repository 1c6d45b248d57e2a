"""Opens sockets and transports as the settings say, and joins kvferry's log to vLLM's."""

from __future__ import annotations

import logging
import os

from kvferry.control.addresses import AddressError, AllowedRanges, advertised_host
from kvferry.control.endpoint import Endpoint, HostNotHere, Limits
from kvferry.control.security import Security, load_secret
from kvferry.transport import registry
from kvferry.transport.base import Transport, TransportUnavailable
from kvferry.vllm.config import DEFAULT_TRANSPORTS, Config

logger = logging.getLogger(__name__)


def open_endpoint(config: Config, port: int) -> Endpoint:
    """A control endpoint on the advertised host. Raises AddressError or SecurityError, which say what to set."""
    host = advertised_host(config.host_ip, os.environ)
    security = Security.choose(host, load_secret(config.secret, os.environ), config.allow_open)
    limits = Limits(heartbeat_s=config.silence_s / 3, handshake_s=config.handshake_s)
    try:
        return Endpoint(host, security, AllowedRanges(config.allowed_peers), port, limits=limits)
    except HostNotHere:
        raise AddressError(f"{_host_setting(config)} {host} is no address of this machine") from None


def _host_setting(config: Config) -> str:
    """What the advertised host was set by."""
    by_vllm = os.environ.get("VLLM_HOST_IP")
    return "VLLM_HOST_IP" if by_vllm and config.host_ip in (None, "", by_vllm) else "host_ip"


def open_transports(config: Config) -> list[Transport]:
    """The configured transports that this machine has, in order. Raises TransportUnavailable if it has none."""
    transports: list[Transport] = []
    missing: list[str] = []
    for name in config.transports:
        try:
            transports.append(registry.make(name, _options(name, config)))
        except TransportUnavailable as error:
            missing.append(f"{name}: {str(error).removeprefix(f'{name}: ')}")
            is_asked_for = config.transports != DEFAULT_TRANSPORTS or name in config.transport_options
            logger.log(logging.WARNING if is_asked_for else logging.INFO, "kvferry: transport %s", missing[-1])
    if not transports:
        raise TransportUnavailable(f"none of the configured transports is available: {'; '.join(missing)}")
    return transports


def _options(name: str, config: Config) -> dict[str, object]:
    """A transport that peers reach by an address of this machine gets the one that they are told of."""
    host: dict[str, object] = {}
    if "host" in registry.options(name):
        host["host"] = advertised_host(config.host_ip, os.environ)
    return host | config.transport_options.get(name, {})


def join_logs() -> None:
    """Lets what any module of kvferry logs appear as vLLM's own lines do. Idempotent.

    vLLM configures the logger "vllm" alone; without this, kvferry's information would be lost in a server.
    """
    ours, vllms = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers and vllms.handlers:
        ours.handlers = list(vllms.handlers)
        ours.setLevel(vllms.level)
        ours.propagate = False
