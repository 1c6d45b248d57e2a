"""The ranks of both sides as frames: what each holds of the whole model, and arrows for what goes where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.cli.plan import canvas as draw
from kvferry.cli.plan import words
from kvferry.cli.plan.canvas import Canvas
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.survey import Pair, Survey, added
from kvferry.layout import CacheLayout, Context, Heads

MOST_RANKS = 16
"""Ranks of a side that are all drawn; of more, the first twelve and the last three."""

_CARD, _TEXT, _FRAME, _LINE = 458, 200, 230, 16


class _Shape(NamedTuple):
    """Of the cards, in pixels: all words below one another, or two lines of them where there are many ranks."""

    height: int
    gap: int
    lines: int


_ROOMY, _COMPACT = _Shape(90, 8, 4), _Shape(42, 5, 2)
_MOST_ROOMY = 6
"""Ranks of a side."""


class Band(NamedTuple):
    """Neighbouring layers of which a rank holds the same heads; start and stop count the model's layers."""

    start: int
    stop: int
    heads: Heads
    context: Context


class Model(NamedTuple):
    """What a frame stands for: these layers from top to bottom, the heads of each from left to right."""

    layers: tuple[str, ...]
    num_heads: int

    def bands(self, layout: CacheLayout) -> list[Band]:
        """What a rank holds."""
        held = {layer.name: layer for layer in layout.layers if layer.heads.total == self.num_heads}
        found: list[Band] = []
        for number, name in enumerate(self.layers):
            layer = held.get(name)
            if layer is not None and found and found[-1][1:] == (number, layer.heads, layer.context):
                found[-1] = found[-1]._replace(stop=number + 1)
            elif layer is not None:
                found.append(Band(number, number + 1, layer.heads, layer.context))
        return found


def model(found: Survey) -> Model:
    """Attention layers if there are any, else recurrent states; where layers differ in heads, the most common."""
    engines = (found.producer, found.consumer)
    layers = [layer for engine in engines for layout in engine.layouts for layer in layout.layers]
    chosen = [layer for layer in layers if "/" not in layer.name]
    chosen = chosen or [layer for layer in layers if layer.name.endswith("/ssm")] or layers
    total = Counter(layer.heads.total for layer in chosen).most_common(1)[0][0]
    names = {layer.name for layer in chosen if layer.heads.total == total}
    return Model(tuple(sorted(names, key=words.in_order)), total)


def shown(engine: Engine) -> list[int | None]:
    """The ranks that are drawn; None for those left out."""
    count = len(engine.ranks)
    if count <= MOST_RANKS:
        return list(range(count))
    return [*range(MOST_RANKS - 4), None, *range(count - 3, count)]


def panel(canvas: Canvas, found: Survey, x: float, y: float, width: float) -> float:
    """Draw both sides and the arrows; returns where the next panel may begin."""
    frame, right = model(found), x + width - _CARD
    canvas.text(x, y + 24, "producer: what it holds", 16, bold=True, room=_CARD)
    canvas.text(
        right,
        y + 24,
        f"consumer: what it takes ({found.request.num_tokens:,} tokens)",
        16,
        bold=True,
        room=_CARD,
    )
    slots = max(len(shown(engine)) for engine in (found.producer, found.consumer))
    shape = _ROOMY if slots <= _MOST_ROOMY else _COMPACT
    top, height = y + 40, slots * (shape.height + shape.gap)
    producers = _Column(canvas, found, frame, found.producer, shape, x, top, height)
    consumers = _Column(canvas, found, frame, found.consumer, shape, right, top, height)
    producers.draw()
    consumers.draw()
    _arrows(canvas, found, frame, producers, consumers)
    return canvas.lines(x, top + height + 20, draw.wrap(_legend(found, frame), width, 12), 12, fill=draw.FAINT)


class _Box(NamedTuple):
    """The frame of a rank on the canvas."""

    x: float
    y: float
    height: float

    def port(self, number: int, count: int) -> float:
        """Where the number-th of so many arrows touches the frame's side."""
        return self.y + (number + 0.5) * self.height / count


@dataclass(frozen=True)
class _Column:
    """One side: a card for each rank, all of one height, spread over the panel."""

    canvas: Canvas
    found: Survey
    model: Model
    engine: Engine
    shape: _Shape
    x: float
    top: float
    height: float

    @property
    def is_producer(self) -> bool:
        return self.engine is self.found.producer

    def box(self, rank: int) -> _Box | None:
        """None for a rank that is not drawn."""
        ranks = shown(self.engine)
        if rank not in ranks:
            return None
        y, height = self._slot(ranks.index(rank))
        frame_x = self.x + _CARD - _FRAME - 12 if self.is_producer else self.x + 12
        inset = 8 if self.shape is _ROOMY else 4
        return _Box(frame_x, y + inset, height - 2 * inset)

    def _slot(self, number: int) -> tuple[float, float]:
        slot, height = self.height / len(shown(self.engine)), self.shape.height
        return self.top + number * slot + (slot - self.shape.gap - height) / 2, height

    def draw(self) -> None:
        for number, rank in enumerate(shown(self.engine)):
            y, height = self._slot(number)
            if rank is None:
                hidden = len(self.engine.ranks) - len(shown(self.engine)) + 1
                self.canvas.text(self.x + _CARD / 2, y + height / 2, f"… {hidden} more ranks …", 13, anchor="middle")
                continue
            self.canvas.rect(self.x, y, _CARD, height, draw.PANEL, draw.LINE, radius=6)
            at = self.x + 12 if self.is_producer else self.x + _FRAME + 24
            self._words(rank, at, y + (22 if self.shape is _ROOMY else 17))
            box = self.box(rank)
            if box is not None:
                self._frame(rank, box)

    def _words(self, rank: int, x: float, y: float) -> None:
        bands = self.model.bands(self.engine.layouts[rank])
        name, held, layers = (
            f"rank {self.engine.ranks[rank].label}",
            _heads(bands, self.model),
            _layers(bands, self.model),
        )
        if self.shape is _COMPACT:
            if self.model.num_heads > 1:  # else the frame says which tokens it has
                name = f"{name}: {held}"
            lines = [layers if self.is_producer else self._taken(rank)]
        else:
            lines = [held, layers, *(() if self.is_producer else (self._taken(rank),))]
        self.canvas.text(x, y, name, 13 if self.shape is _ROOMY else 12, bold=True, room=_TEXT)
        for number, line in enumerate(lines):
            self.canvas.text(x, y + (number + 1) * _LINE, line, 11, room=_TEXT, fill=draw.FAINT)

    def _taken(self, rank: int) -> str:
        pairs = [pair for pair in self.found.pairs if pair.consumer == rank]
        if not pairs:
            return "nothing"
        total = added(0, (pair.request for pair in pairs))
        return f"{words.size(total.num_bytes)}, {words.count(total.descriptors, 'descriptor')}"

    def _frame(self, rank: int, box: _Box) -> None:
        """The whole model in outline, and what the rank holds of it in colour."""
        self.canvas.rect(box.x, box.y, _FRAME, box.height, draw.PAPER, draw.LINE)
        total, layers = self.model.num_heads, len(self.model.layers)
        for band in self.model.bands(self.engine.layouts[rank]):
            y, height = box.y + band.start / layers * box.height, (band.stop - band.start) / layers * box.height
            read, whole = self._read(rank, band), _tokens(band) or "the same on every rank"
            for head in range(band.heads.start, band.heads.start + band.heads.count):
                self._cell(box.x + head / total * _FRAME, y, _FRAME / total, height, head, head in read, whole)

    def _cell(self, x: float, y: float, width: float, height: float, head: int, moves: bool, whole: str) -> None:
        """One head of a band; `whole` says what it is where there is only one."""
        total = self.model.num_heads
        gap = 1 if width > 4 else 0
        fill = draw.head_colour(head, total, pale=not moves)
        self.canvas.rect(x + gap / 2, y + 0.5, width - gap, height - 1, fill, draw.LINE if not moves else "none")
        label = str(head) if total > 1 else whole
        every = math.ceil((draw.width(str(total - 1), 11) + 4) / width) if total > 1 else 1
        if (total == 1 and draw.width(label, 11) > width) or head % every:
            return
        if height >= 12:
            ink = draw.INK if moves else draw.FAINT
            self.canvas.text(x + width / 2, y + height / 2 + 4, label, 11, anchor="middle", fill=ink)

    def _read(self, rank: int, band: Band) -> set[int]:
        """The heads of a band that move: all of a consumer's; of a producer's those that some rank takes."""
        if not self.is_producer and any(pair.consumer == rank for pair in self.found.pairs):
            return set(range(band.heads.start, band.heads.start + band.heads.count))
        names = set(self.model.layers[band.start : band.stop])
        return {
            head
            for pair in self.found.pairs
            if self.is_producer and pair.producer == rank
            for part in pair.parts
            for layer in part.layers
            if layer.name in names
            for head in range(layer.start, layer.stop)
        }


def _heads(bands: Sequence[Band], model: Model) -> str:
    if model.num_heads == 1:
        return _tokens(bands[0]) if bands and _tokens(bands[0]) else "the whole cache"
    held = sorted({head for band in bands for head in range(band.heads.start, band.heads.start + band.heads.count)})
    return f"{'head' if len(held) == 1 else 'heads'} {words.ranges(held)}" if held else "no heads"


def _tokens(band: Band) -> str:
    """Which tokens a context parallel rank has; empty for all."""
    context = band.context
    return "" if context.is_whole else f"tokens: part {context.rank} of {context.size}"


def _layers(bands: Sequence[Band], model: Model) -> str:
    names = [name for band in bands for name in model.layers[band.start : band.stop]]
    return f"layers {words.layers(names)}" if names else "no layers"


def _arrows(canvas: Canvas, found: Survey, model: Model, producers: _Column, consumers: _Column) -> None:
    """One for each pair of ranks, in the colour of the heads in the middle of what moves."""
    for pair in found.pairs:
        start, end = producers.box(pair.producer), consumers.box(pair.consumer)
        if start is None or end is None:
            continue
        leaving = [one for one in found.pairs if one.producer == pair.producer]
        coming = [one for one in found.pairs if one.consumer == pair.consumer]
        canvas.arrow(
            start.x + _FRAME,
            start.port(leaving.index(pair), len(leaving)),
            end.x,
            end.port(coming.index(pair), len(coming)),
            draw.line_colour(_middle(pair, model), model.num_heads),
        )


def _middle(pair: Pair, model: Model) -> float:
    names = set(model.layers)
    shares = [layer for part in pair.parts for layer in part.layers if layer.name in names]
    return (shares[0].start + shares[0].stop - 1) / 2 if shares else 0


def _legend(found: Survey, model: Model) -> str:
    of, left_out = "", ""
    states = dict.fromkeys(group.label for group in found.consumer.groups if group.kept.keeps_state)
    if states and "/" in model.layers[0]:
        of = " (recurrent states)"
    elif states:
        of = " (attention layers)"
        left_out = f" Not drawn, but counted: {', '.join(states)}."
    heads = "" if model.num_heads == 1 else "heads from left to right, a colour each, and "
    return (
        f"Each frame is the cache of the whole model{of}: {heads}layers from top to bottom. "
        f"Coloured is what a rank holds; pale is what it holds and nobody takes from it.{left_out}"
    )
