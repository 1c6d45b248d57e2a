"""A picture as SVG text: shapes, words that stay within their width, colours."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

from kvferry.protocol import messages

INK, FAINT, LINE, PAPER, PANEL = "#1f2933", "#5f6b7a", "#c3cad3", "#ffffff", "#f6f7f9"
GREEN, RED, AMBER = "#2f7d4f", "#b3261e", "#8a5a00"
RED_PAPER, AMBER_PAPER = "#fdecea", "#fff4dc"

Anchor = Literal["start", "middle", "end"]

_LETTER = 0.62
"""Width of a letter in units of its size: an upper bound for the mean over a text in usual fonts."""


def _escaped(text: str) -> str:
    """XML has no way to write what does not print."""
    return escape(messages.shorten(text))


def width(text: str, size: float) -> float:
    """At most so wide is a text, in pixels."""
    return len(text) * size * _LETTER


def shorten(text: str, room: float, size: float) -> str:
    """The text, or as much of it as fits into so many pixels."""
    if width(text, size) <= room:
        return text
    return text[: max(int(room / (size * _LETTER)) - 1, 0)] + "…"


def wrap(text: str, room: float, size: float) -> list[str]:
    """Lines of whole words that fit into so many pixels."""
    lines, most = [""], max(int(room / (size * _LETTER)), 1)
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= most or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [shorten(line, room, size) for line in lines]


def head_colour(head: int, total: int, *, pale: bool = False, deep: bool = False) -> str:
    """One hue for each head; pale for what does not move, deep for values next to their keys."""
    hue = (212 + 360 * head / total) % 360
    saturation, lightness = (45, 92) if pale else (55, 62) if deep else (62, 77)
    return _hex(hue, saturation, lightness)


def line_colour(head: float, total: int) -> str:
    """A head's hue, dark enough for a line."""
    return _hex((212 + 360 * head / total) % 360, 50, 42)


def _hex(hue: float, saturation: float, lightness: float) -> str:
    """Degrees and percent as #rrggbb, which every viewer of SVG knows."""
    colour = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


class Canvas:
    """Collects shapes. Coordinates are pixels from the left and the top."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str = "none",
        *,
        radius: float = 0,
        title: str = "",
    ) -> None:
        """A rectangle; `title` shows where a pointer rests on it."""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{w:.2f}" height="{h:.1f}" fill="{fill}" stroke="{stroke}"'
        corner = f' rx="{radius:g}"' if radius else ""
        self._parts.append(
            f"<rect {shape}{corner}><title>{_escaped(title)}</title></rect>" if title else f"<rect {shape}{corner}/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        *,
        room: float | None = None,
        bold: bool = False,
        fill: str = INK,
        anchor: Anchor = "start",
    ) -> None:
        """One line; y is its base line. room: pixels that it may take, else it is cut."""
        shown = words if room is None else shorten(words, room, size)
        weight = ' font-weight="600"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}"{weight}{place}>{_escaped(shown)}</text>'
        )

    def lines(self, x: float, y: float, lines: Iterable[str], size: float = 13, *, fill: str = INK) -> float:
        """Several lines, the first with its base line at y; returns the base line of the next."""
        for line in lines:
            self.text(x, y, line, size, fill=fill)
            y += size * 1.45
        return y

    def path(
        self,
        d: str,
        *,
        fill: str = "none",
        stroke: str = "none",
        stroke_width: float = 1,
        opacity: float = 1,
        end: str = "",
    ) -> None:
        """A path. end: the id of a marker for its end."""
        marker = f' marker-end="url(#{end})"' if end else ""
        faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
        self._parts.append(
            f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{stroke_width:g}"{faint}{marker}/>'
        )

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, opacity: float) -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{at}" fill="{fill}" opacity="{opacity:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        """A curved line from left to right with a tip."""
        middle = (x1 + x2) / 2
        self.path(
            f"M{x1:.1f},{y1:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2:.1f} {x2 - 8:.1f},{y2:.1f}",
            stroke=colour,
            stroke_width=2,
            opacity=0.85,
        )
        self.path(f"M{x2:.1f},{y2:.1f} l-10,-5 l0,10 z", fill=colour)

    def svg(self, height: float) -> str:
        """The whole picture."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" '
            f'height="{height:.0f}" font-family="\'DejaVu Sans\', Verdana, Helvetica, Arial, sans-serif">'
        )
        paper = f'<rect width="{self.width}" height="{height:.0f}" fill="{PAPER}"/>'
        return "\n".join([head, paper, *self._parts, "</svg>\n"])
