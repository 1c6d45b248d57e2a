"""MoRIIO's defaults in kvferry's settings; moriio_keys.py has its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.utils.network_utils import get_ip

from kvferry.control.security import load_secret
from kvferry.transport import registry

TRANSPORT = "mori"

_DEFAULTS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("mode", "write", ("read_mode",)),
    ("port", 6301, ("handshake_port",)),
    ("load_s", 120.0, ("recv_abort_timeout", "transfer_timeout")),
)
"""Of kvferry's keys what MoRIIO does where nothing is set, and MoRIIO's names for the same. Its defer_timeout is not
here: it is kvferry's first_hold_s, and what is here counts as given, so it gives way to no other time."""


def with_defaults(extra_config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The same settings, and MoRIIO's defaults where neither its name of one nor kvferry's is given.

    The transport is MoRI-IO, if this kvferry has it. Raises SecurityError for a secret that can't be one.
    """
    settings = dict(extra_config)
    if not settings.get("handshake_port", True):
        del settings["handshake_port"]  # MoRIIO takes an empty one for none
    for key, value, aliases in _DEFAULTS:
        if not any(alias in settings for alias in aliases):
            settings.setdefault(key, value)
    if TRANSPORT in registry.known():
        settings.setdefault("transports", [TRANSPORT])
    settings["host_ip"] = settings.get("host_ip") or environ.get("VLLM_HOST_IP") or _found_host(settings, environ)
    return settings


def _found_host(settings: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """This host's address as vLLM finds it. None, so loopback, where nothing protects what listens there."""
    secret = settings.get("secret")
    if settings.get("allow_open") or load_secret(secret if isinstance(secret, str) else None, environ):
        found = get_ip()
        return found if found != "0.0.0.0" else None
    return None
