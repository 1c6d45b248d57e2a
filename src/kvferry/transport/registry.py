"""Transports by name. Their libraries are imported when one is made, never before."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from kvferry.transport.base import Transport, TransportError

_CLASSES = {
    "local": ("kvferry.transport.local", "LocalTransport"),
    "nixl": ("kvferry.transport.nixl", "NixlTransport"),
}


def known() -> tuple[str, ...]:
    """The names that `make` takes, whether or not their libraries are installed."""
    return tuple(_CLASSES)


def options(name: str) -> tuple[str, ...]:
    """The options of a transport. Raises TransportError for an unknown name."""
    return cast("tuple[str, ...]", _class_of(name).options)


def make(name: str, options: Mapping[str, object] | None = None) -> Transport:
    """A new transport with its options (docs/transports.md).

    Raises TransportError for an unknown name or option, TransportUnavailable where the library is missing.
    """
    transport_class = _class_of(name)
    given = dict(options or {})
    unknown = sorted(set(given) - set(transport_class.options))
    if unknown:
        raise TransportError(f"{name}: unknown option {unknown[0]!r}; known are {', '.join(transport_class.options)}")
    return cast(Transport, transport_class(**given))


def _class_of(name: str) -> Any:
    if name not in _CLASSES:
        raise TransportError(f"unknown transport {name!r}; known are {', '.join(known())}")
    module, class_name = _CLASSES[name]
    return getattr(importlib.import_module(module), class_name)
