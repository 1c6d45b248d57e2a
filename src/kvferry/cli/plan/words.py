"""Numbers, layers and heads in few words, for tables and pictures."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence

from kvferry.protocol.messages import shorten
from kvferry.topology import ShareLayer

_DECODER_LAYER = re.compile(r"\.layers\.(\d+)\.")
_MOST_NAMES = 4
_MOST_RANGES = 4
_MOST_BRIEF = 160

_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxother = _VALUES.maxlong = 60
_VALUES.maxlevel = 2


def brief(text: str) -> str:
    """What a person typed, for a line about it: what does not print is escaped, a long text loses its middle."""
    half = _MOST_BRIEF // 2
    return shorten(text if len(text) <= _MOST_BRIEF else f"{text[:half]}…{text[-half:]}")


def value(found: object) -> str:
    """A value of a file or an option, in Python's notation, for a line about it; bounded likewise."""
    return _VALUES.repr(found)


def size(count: float) -> str:
    """Bytes: "512 B", "16 KiB", "1.25 MiB"; three digits where there are more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    if count == int(count) or count >= 100:
        return f"{count:.0f} {unit}"
    digits = f"{count:.1f}" if count >= 10 else f"{count:.2f}"
    return f"{digits.rstrip('0').rstrip('.')} {unit}"


def count(number: int, what: str) -> str:
    """ "1 descriptor", "1,024 descriptors"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def sizes(shortest: int, longest: int) -> str:
    """The length of descriptors, or both ends of it."""
    return size(shortest) if shortest == longest else f"{size(shortest)} to {size(longest)}"


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 8": ascending numbers as ranges."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in _runs(numbers))


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def layers(names: Sequence[str]) -> str:
    """Decoder layers by number, other layers by name: "0-31", "10 of 5-59", "A, B"."""
    numbers = {int(match[1]) for name in names if (match := _DECODER_LAYER.search(name))}
    if not numbers:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more
    if len(_runs(numbers)) > _MOST_RANGES:
        return f"{len(numbers)} of {min(numbers)}-{max(numbers)}"
    return ranges(numbers)


def in_order(name: str) -> tuple[int, str]:
    """A key that sorts layers by decoder layer, then by name."""
    match = _DECODER_LAYER.search(name)
    return (int(match[1]) if match else -1, name)


def heads(parts: Sequence[ShareLayer]) -> str:
    """ "0-3": the heads of all layers; of a state's parts, those of the last."""
    last = parts[-1]
    return ranges(range(last.start, last.stop))
