"""Reads the JSON files that a person names: bounded, and with one line about what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.cli.errors import Problem
from kvferry.cli.plan import words

MOST_BYTES = 1 << 23
_MOST_DIGITS = 40


def read_json(file: Path) -> Any:
    """What a file holds. Raises Problem, which names the file."""
    where = words.brief(str(file))
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise Problem(f"{where} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file can have
        raise Problem(f"{where} can't be read: {error}") from None
    if len(content) > MOST_BYTES:
        raise Problem(f"{where} is larger than {words.size(MOST_BYTES)}")
    try:
        return json.loads(content.decode(), parse_int=_integer)
    except RecursionError:
        raise Problem(f"{where} is not JSON that can be read: it is nested too deep") from None
    except ValueError as error:
        raise Problem(f"{where} is not JSON that can be read: {error}") from None


def _integer(digits: str) -> int:
    """Without a bound the time that a number takes would grow with the square of its digits."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)
