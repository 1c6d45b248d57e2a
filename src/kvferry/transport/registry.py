"""Transports by name: kvferry's own, and those of other packages. What makes one is imported when it is asked for.

A package offers one as an entry point of the group "kvferry.transports" (docs/transports.md); any other class is
named by where it is, "package.module:Class".
"""

from __future__ import annotations

import difflib
import functools
import importlib
import typing
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import msgspec

from kvferry.transport.base import Transport, TransportError

_CLASSES = {
    "local": ("kvferry.transport.local", "LocalTransport"),
    "nixl": ("kvferry.transport.nixl", "NixlTransport"),
    "mori": ("kvferry.transport.mori", "MoriTransport"),
    "mooncake": ("kvferry.transport.mooncake", "MooncakeTransport"),
}

GROUP = "kvferry.transports"
"""The group of entry points by which other packages offer transports: name = "package.module:Class"."""

_SHOWN_CHARS = 200
_NEEDED = {"name", "options", *(method for method in vars(Transport) if not method.startswith("_"))}


def known() -> tuple[str, ...]:
    """The names that `make` takes, whether or not their libraries are installed; import paths are taken besides."""
    return (*_CLASSES, *sorted({point.name for point in entry_points(group=GROUP)} - _CLASSES.keys()))


def options(name: str) -> tuple[str, ...]:
    """The options of a transport. Raises TransportError for an unknown name, or another package's broken transport."""
    return cast("tuple[str, ...]", _class_of(name).options)


def make(name: str, options: Mapping[str, object] | None = None) -> Transport:
    """A new transport with its options (docs/transports.md).

    Raises TransportError for an unknown name or option, a value that is not of the type that the constructor's
    annotation tells, or another package's broken transport; TransportUnavailable where the library is missing.
    """
    transport_class = _class_of(name)
    given = dict(options or {})
    unknown = sorted(set(given) - set(transport_class.options))
    if unknown:
        raise TransportError(f"{name}: unknown option {unknown[0]!r}; known are {', '.join(transport_class.options)}")
    hints = _hints_of(transport_class)
    for option, value in given.items():
        _check_type(f"{name}: option {option}", value, hints.get(option, Any))
    return cast(Transport, transport_class(**given))


def _hints_of(transport_class: Any) -> dict[str, Any]:
    """The constructor's annotations by option; none where they can't be told, as another package may write them."""
    try:
        return typing.get_type_hints(transport_class.__init__, include_extras=True)
    except Exception:
        return {}


def _check_type(what: str, value: object, hint: Any) -> None:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise TransportError(f"{what}: {error}: {_shown(value)}") from error
    except TypeError:
        # A kind of annotation that msgspec does not know: a callable among others, say. Its constructor has to look.
        return


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _class_of(name: str) -> Any:
    if name in _CLASSES:
        module, class_name = _CLASSES[name]
        return getattr(importlib.import_module(module), class_name)
    if ":" not in name:
        return _offered(name)
    found = _load(name, f"transport {name!r}")
    if found.name in _CLASSES:
        raise TransportError(f"transport {name!r} calls itself {found.name!r}, as one of kvferry's own")
    return found


def _offered(name: str) -> Any:
    """The class of that name of another package."""
    # A package that is found in two ways (installed, and on the path) is listed twice.
    offers = {(_package_of(point), point.value) for point in entry_points(group=GROUP, name=name)}
    if not offers:
        near = difflib.get_close_matches(name.lower(), known(), n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise TransportError(
            f'unknown transport {name!r}{meant}; known are {", ".join(known())}, or "package.module:Class"'
        )
    if len(offers) > 1:
        texts = " and ".join(f"{package} ({path})" for package, path in sorted(offers))
        raise TransportError(f"transport {name!r} is offered by {texts}; name one by its path")
    [(package, path)] = offers
    found = _load(path, f"transport {name!r} of package {package}")
    if found.name != name:
        raise TransportError(f"transport {name!r} of package {package}: {path} calls itself {found.name!r}")
    return found


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "(unknown)"


def _load(path: str, what: str) -> Any:
    """The class at "package.module:Class". Raises TransportError that says what failed, whatever it was."""
    module, _, class_name = path.partition(":")
    try:
        found = functools.reduce(getattr, class_name.split("."), importlib.import_module(module))
    except Exception as error:
        raise TransportError(f"{what}: {path} can't be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(_NEEDED - set(dir(found)))
    if missing:
        raise TransportError(f"{what}: {path} is no transport: it has no {', '.join(missing)}")
    return found
