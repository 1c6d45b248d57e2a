"""What planning may cost. A worker's one I/O thread plans for all of its requests, with what peers have announced."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout import Field, Layer, Refusal
from kvferry.layout.overlaps import folded

MAX_DESCRIPTORS = 1 << 22
"""Of one request between two workers. Planning and proving one takes about 0.1 us (benchmarks/plan.py), and posting it
a few times that: so this is a second or two of the I/O thread that all requests share. Layouts that are
alike need one for each layer and block: 300,000 for 100 layers and 50,000 tokens."""

USUAL_TOKENS = 16
"""Of a block. A pair that needs more than MAX_DESCRIPTORS for so few can serve no request worth a transfer."""

MAX_POINTS = 1 << 13
"""Coordinates of one dimension that are listed one by one, where both sides have no digits in common. Known layouts
have at most the tokens of a block."""

MAX_BOXES = 1 << 14
"""Boxes of one request between two workers. Known layouts have a few for each layer that is unlike the others."""


SEE_PLAN = " (see kvferry plan)"
"""Who asks that command already is told without it."""


def check_points(count: int) -> None:
    if count > MAX_POINTS:
        what = f"{count} coordinates without a common order, to be listed one by one"
        raise Refusal(f"{what}: the most allowed are {MAX_POINTS}", None, None)


def check_boxes(count: int) -> None:
    if count > MAX_BOXES:
        raise Refusal(f"{count} separate patterns of bytes in common: the most allowed are {MAX_BOXES}", None, None)


def too_many(what: str, count: int, consumer: Layer, producer: Layer, common_bytes: int) -> Refusal:
    """Why a pair of layers needs more descriptors than MAX_DESCRIPTORS, and what would help."""
    hint = (
        f"they have {common_bytes} bytes in a row in common; fewer descriptors need the same order of axes and the same"
        f" block size on both sides{SEE_PLAN}, or shorter prompts"
    )
    field = f"layer {consumer.name}: {what}: {count} descriptors, the most allowed are {MAX_DESCRIPTORS}; bytes"
    return Refusal(field, _order(consumer.fields), _order(producer.fields), hint)


def _order(fields: Sequence[Field]) -> str:
    """How the first field lies in memory, axes outermost first; the others are like it."""
    first = fields[0]
    axes = sorted((axis for axis in first.axes if axis.size > 1), key=lambda axis: -axis.stride_bytes)
    order = ", ".join(f"{axis.dim} {axis.size}" for axis in axes) or "one byte"
    return f"[{order}] in runs of {folded(first)[0]} bytes"
