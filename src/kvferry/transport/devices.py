"""Names of GPU memory: "cuda:N", as torch calls it."""

from __future__ import annotations

import re

_GPU = re.compile(r"([a-z]+)(?::([0-9]{1,4}))?")
"""A number without end comes from nobody's machine, but may come in a record."""


def gpu_number(device: str, *kinds: str) -> int | None:
    """N of "kind:N" where the kind is one of these; 0 of "kind" alone; None for what is no such name."""
    match = _GPU.fullmatch(device)
    if match is None or match[1] not in kinds:
        return None
    return int(match[2] or "0")
