"""The plan as a picture: both caches side by side with what moves where, one block byte by byte, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cli.plan import canvas as draw
from kvferry.cli.plan import svg_block, svg_ranks, text
from kvferry.cli.plan.advice import Advice, warnings
from kvferry.cli.plan.canvas import Anchor, Canvas
from kvferry.cli.plan.survey import Survey

WIDTH, MARGIN = 1260, 32
INNER = WIDTH - 2 * MARGIN

_MOST_ROWS = 8
_COLUMNS: tuple[tuple[str, int, int, Anchor], ...] = (
    ("consumer ← producer", 0, 276, "start"),
    ("cache", 282, 120, "start"),
    ("layers", 408, 90, "start"),
    ("heads", 504, 196, "start"),
)
_NUMBERS = ((846, 140), (1026, 174), (INNER, 164))
"""Where the columns with numbers end, and the pixels that they have."""


def picture(found: Survey, advice: Sequence[Advice] | None) -> str:
    """The SVG of a survey."""
    canvas = Canvas(WIDTH)
    y = _header(canvas, found, bool(warnings(found)))
    y = _box(canvas, list(text.refusals(found)), y, draw.RED, draw.RED_PAPER)
    y = svg_ranks.panel(canvas, found, MARGIN, y, INNER)
    y = svg_block.panel(canvas, found, MARGIN, y, INNER)
    y = _numbers(canvas, found, y)
    y = _box(canvas, list(text.warning_lines(found, advice)), y, draw.AMBER, draw.AMBER_PAPER)
    for note in text.notes(found):
        y = canvas.lines(MARGIN, y + 4, draw.wrap(note, INNER, 12), 12, fill=draw.FAINT)
    return canvas.svg(y + 12)


def _header(canvas: Canvas, found: Survey, explodes: bool) -> float:
    title = found.consumer.title or found.producer.title
    canvas.text(
        MARGIN, 42, f"Which KV cache moves where{': ' if title else ''}{title}", 22, bold=True, room=INNER - 150
    )
    word, colour = "can be moved", draw.AMBER if explodes else draw.GREEN
    if found.refused:
        word, colour = "refused", draw.RED
    canvas.rect(MARGIN + INNER - 132, 20, 132, 30, colour, radius=6)
    canvas.text(MARGIN + INNER - 66, 40, word, 14, bold=True, fill=draw.PAPER, anchor="middle")
    y = 70.0
    for engine, what in ((found.producer, "prefill"), (found.consumer, "decode")):
        canvas.text(MARGIN, y, f"{engine.role} ({what})", 13, bold=True)
        canvas.text(MARGIN + 160, y, text.side(engine), 13, room=INNER - 160)
        y += 21
    return y + 6


def _numbers(canvas: Canvas, found: Survey, y: float) -> float:
    """The rows of the table, and the totals."""
    if not found.pairs:
        return y + 10
    y += 34
    what = "How much would move if it were not refused" if found.refused else "How much moves"
    canvas.text(MARGIN, y, f"{what}: what one rank takes of one other", 16, bold=True)
    y += 24
    rows = text.rows(found)
    columns = [*_COLUMNS]
    for (above, name), (x, room) in zip(text.number_columns(found, rows), _NUMBERS, strict=True):
        canvas.text(MARGIN + x, y, above, 11, bold=True, room=room, anchor="end")
        columns.append((name, x, room, "end"))
    y += 16
    for name, x, room, anchor in columns:
        canvas.text(MARGIN + x, y, name, 11, bold=True, room=room, anchor=anchor)
    for part, pairs in rows[:_MOST_ROWS]:
        y += 20
        for value, (_, x, room, anchor) in zip(text.cells(found, part, pairs), columns, strict=True):
            canvas.text(MARGIN + x, y, value, 12, room=room, anchor=anchor)
    if len(rows) > _MOST_ROWS:
        y += 20
        canvas.text(MARGIN, y, f"{len(rows) - _MOST_ROWS} more rows, see the table", 12, fill=draw.FAINT)
    return canvas.lines(MARGIN, y + 24, draw.wrap(text.summary(found), INNER, 13), 13) + 6


def _box(canvas: Canvas, lines: Sequence[str], y: float, ink: str, paper: str) -> float:
    """Lines that must not be missed."""
    wrapped = [part for line in lines for part in draw.wrap(line, INNER - 32, 13)]
    if not wrapped:
        return y
    height = len(wrapped) * 13 * 1.45 + 18
    canvas.rect(MARGIN, y, INNER, height, paper, ink, radius=6)
    canvas.lines(MARGIN + 16, y + 24, wrapped, 13, fill=ink)
    return y + height + 22
