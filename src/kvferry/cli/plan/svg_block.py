"""One block of one layer byte by byte, on both sides, and the runs that are copied from one to the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.cli.plan import canvas as draw
from kvferry.cli.plan import strips, text, words
from kvferry.cli.plan.canvas import Canvas
from kvferry.cli.plan.requests import first_tokens
from kvferry.cli.plan.strips import Piece
from kvferry.cli.plan.survey import Part, Survey
from kvferry.layout import Layer, Refusal
from kvferry.plan import compile
from kvferry.topology import Share

_STRIP, _RIBBONS, _LENS, _ARROW = 36, 96, 58, 26
_MOST_RIBBONS = 256
_MOST_BLOCKS = 4
_LENS_PIECES = 8
_MOST_LABELS = 64
_FIELDS = {"k": "keys", "v": "values", "latent": "latent", "tile": "tile", "cell": "cell"}


class Run(NamedTuple):
    """A descriptor of the sample."""

    consumer: int
    producer: int
    length: int


class Side(NamedTuple):
    """One side of the sample: its rank, its layer, which blocks are drawn, and what lies where in them."""

    rank: str
    layer: Layer
    block_ids: tuple[int, ...]
    areas: tuple[Piece, ...]


class Sample(NamedTuple):
    """A layer between two ranks: the blocks of its first tokens, and the runs between them."""

    title: str
    producer: Side
    consumer: Side
    runs: tuple[Run, ...]


def sample(found: Survey) -> Sample | None:
    """The first attention layer of the first pair of ranks; None if nothing moves, or too much to draw."""
    if not found.pairs:
        return None
    pair = found.pairs[0]
    part = next((one for one in pair.parts if one.block is not None), pair.parts[0])
    share = Share(pair.producer, part.layers[:1])
    layers = [
        next(layer for layer in layout.layers if layer.name == part.layers[0].name)
        for layout in (found.producer.layouts[pair.producer], found.consumer.layouts[pair.consumer])
    ]
    least, most = sorted(layer.block_size for layer in layers)
    request = first_tokens(found.consumer, found.producer, min(most, _MOST_BLOCKS * least))
    tables = (request.producer_tables, request.consumer_tables)
    ids = [
        tuple(table[layer.group].block_ids[: -(-request.end_token // layer.block_size)].tolist())
        for table, layer in zip(tables, layers, strict=True)
    ]
    if any(strips.num_units(layer, len(one)) > strips.MOST_UNITS for layer, one in zip(layers, ids, strict=True)):
        return None
    try:
        plan = compile(found.consumer.layouts[pair.consumer], found.producer.layouts[pair.producer], share).bind(
            *request
        )
    except Refusal:
        return None
    runs = [Run(*run) for batch in plan.batches for run in zip(*(column.tolist() for column in batch[2:]), strict=True)]
    consumer, producer = text.ranks_of(found, pair)
    sides = [
        Side(rank, layer, one, tuple(strips.areas(layer, one)))
        for rank, layer, one in zip((producer, consumer), layers, ids, strict=True)
    ]
    return Sample(_title(part), sides[0], sides[1], tuple(sorted(runs)))


def _title(part: Part) -> str:
    """ "a block of layer 0 (full attention)", "conv.x of layer 0 (mamba2 state)"."""
    name, _, state = part.layers[0].name.partition("/")
    label = f" ({part.label})" if part.label else ""
    return f"{state or 'a block'} of layer {words.layers([name])}{label}"


def panel(canvas: Canvas, found: Survey, x: float, y: float, width: float) -> float:
    """Draw the sample; returns where the next panel may begin."""
    one = sample(found)
    if one is None:
        return y
    y += 34
    canvas.text(x, y, f"How {one.title} lies in memory, and what is copied", 16, bold=True, room=width)
    y = canvas.lines(x, y + 24, draw.wrap(_caption(one), width, 12), 12, fill=draw.FAINT) + 4
    scale = min(_scale(side.areas, width) for side in (one.producer, one.consumer))
    upper = _Strip(canvas, one.producer, {run.producer: run.length for run in one.runs}, x, scale)
    lower = _Strip(canvas, one.consumer, {run.consumer: run.length for run in one.runs}, x, scale)
    total = one.consumer.layer.heads.total
    y = _named(canvas, "producer", one.producer, x, y, width)
    y = _lens(canvas, upper, x, y, width, above=True)
    upper.draw(y)
    _ribbons(canvas, one, upper, lower, y + _STRIP, total)
    y += _STRIP + _RIBBONS
    lower.draw(y)
    y = _lens(canvas, lower, x, y + _STRIP, width, above=False)
    return _named(canvas, "consumer", one.consumer, x, y + 18, width)


def _caption(one: Sample) -> str:
    shortest, longest = min(run.length for run in one.runs), max(run.length for run in one.runs)
    some = f"; {_MOST_RIBBONS} of them are drawn" if len(one.runs) > _MOST_RIBBONS else ""
    text = (
        f"Addresses grow from left to right. Between the two bars: {words.count(len(one.runs), 'descriptor')} of "
        f"{words.sizes(shortest, longest)}{some}, each one copy of neighbouring bytes."
    )
    if one.consumer.layer.heads.total > 1:
        text += " The colour is the head's."
    if any(area.field == "v" for area in one.consumer.areas):
        text += " Values are darker than keys."
    return f"{text} Pale bytes do not move here. Enlarged: the first pieces that move."


def _named(canvas: Canvas, role: str, side: Side, x: float, y: float, width: float) -> float:
    """Whose blocks they are, how large, and how they are nested."""
    count, size = len(side.block_ids), sum(area.length for area in side.areas)
    tokens = f"{words.count(count, 'block')} of {side.layer.block_size:,} tokens"
    if side.layer.block_size >= strips.ENDLESS:
        tokens = "one state"
    elif not side.layer.context.is_whole:
        tokens += f" ({strips.own_tokens(side.layer):,} here)"
    canvas.text(x, y + 14, f"{role} rank {side.rank}", 13, bold=True, room=200)
    line = f"{tokens}, {words.size(size)}; from the outside in: {strips.nesting(side.layer)}"
    canvas.text(x + 200, y + 14, line, 13, room=width - 200)
    return y + 24


def _clusters(areas: Sequence[Piece]) -> list[tuple[int, int]]:
    """Spans of addresses without a hole."""
    found: list[tuple[int, int]] = []
    for area in areas:
        if found and found[-1][1] == area.offset:
            found[-1] = (found[-1][0], area.end)
        else:
            found.append((area.offset, area.end))
    return found


def _hole(count: int) -> float:
    """Pixels between clusters."""
    return 22 if count <= 16 else 3


def _scale(areas: Sequence[Piece], width: float) -> float:
    """Pixels for each byte, so that all clusters and the holes between them fit."""
    clusters = _clusters(areas)
    return (width - (len(clusters) - 1) * _hole(len(clusters))) / sum(end - start for start, end in clusters)


class _Strip:
    """The bar of one side: from addresses to pixels."""

    def __init__(self, canvas: Canvas, side: Side, moved: dict[int, int], x: float, scale: float) -> None:
        self.side = side
        self._canvas = canvas
        self._scale = scale
        self._moved = moved
        self._first = sorted(moved)
        self._clusters = _clusters(side.areas)
        self._starts = [start for start, _ in self._clusters]
        self._xs: list[float] = []
        for start, end in self._clusters:
            self._xs.append(x)
            x += (end - start) * scale + _hole(len(self._clusters))

    def x(self, offset: int, is_end: bool = False) -> float:
        """Where an address lies; the end of a run belongs to the cluster before it."""
        number = max(bisect_right(self._starts, offset - is_end) - 1, 0)
        return self._xs[number] + (offset - self._starts[number]) * self._scale

    @property
    def first_moved(self) -> int:
        """The first address that moves."""
        return self._first[0]

    def moved(self, piece: Piece) -> list[tuple[int, int]]:
        """The spans of it that move, neighbours as one."""
        spans: list[tuple[int, int]] = []
        number = max(bisect_right(self._first, piece.offset) - 1, 0)
        while number < len(self._first) and self._first[number] < piece.end:
            start, end = self._first[number], self._first[number] + self._moved[self._first[number]]
            start, end, number = max(start, piece.offset), min(end, piece.end), number + 1
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            elif start < end:
                spans.append((start, end))
        return spans

    def draw(self, y: float) -> None:
        """The areas, in full colour where they move, and dots where addresses are left out."""
        last = -1.0
        for area in self.side.areas:
            left, right = self.x(area.offset), self.x(area.end, is_end=True)
            if right - last < 0.5:  # less than a pixel is not seen
                continue
            self._area(area, left, right, y)
            last = right
        for number in range(1, len(self._clusters)):
            if _hole(len(self._clusters)) > 10:
                self._canvas.text(self._xs[number] - 11, y + _STRIP / 2 + 4, "…", 12, anchor="middle", fill=draw.FAINT)

    def _area(self, area: Piece, left: float, right: float, y: float) -> None:
        total, moved = self.side.layer.heads.total, self.moved(area)
        label = _owner(area, total)
        title = f"{label}, bytes {area.offset:,} to {area.end:,}"
        if moved != [(area.offset, area.end)]:
            self._canvas.rect(left, y, max(right - left, 0.5), _STRIP, draw.head_colour(area.head, total, pale=True))
        fill = draw.head_colour(area.head, total, deep=area.field == "v")
        for start, end in moved:
            first, last = self.x(start), self.x(end, is_end=True)
            self._canvas.rect(first, y, max(last - first, 0.5), _STRIP, fill, title=title)
        if draw.width(label, 11) + 4 > right - left and len(self.side.areas) <= _MOST_LABELS:
            label = str(area.head)
        if draw.width(label, 11) + 4 <= right - left:
            ink = draw.INK if moved else draw.FAINT
            self._canvas.text((left + right) / 2, y + _STRIP / 2 + 4, label, 11, anchor="middle", fill=ink)


def _owner(piece: Piece, total: int) -> str:
    what = _FIELDS.get(piece.field, piece.field)
    return what if total == 1 else f"head {piece.head} {what}"


def _ribbons(canvas: Canvas, one: Sample, upper: _Strip, lower: _Strip, y: float, total: int) -> None:
    """A band for each descriptor, from where it is read to where it is written."""
    step = max(len(one.runs) // _MOST_RIBBONS, 1)
    owners = [area.offset for area in one.consumer.areas]
    for run in one.runs[::step][:_MOST_RIBBONS]:
        first = bisect_right(owners, run.consumer) - 1
        last = bisect_right(owners, run.consumer + run.length - 1) - 1
        heads = {area.head for area in one.consumer.areas[first : last + 1]}
        colour = draw.line_colour(heads.pop(), total) if len(heads) == 1 else draw.FAINT
        points = (
            (upper.x(run.producer), y + 2),
            (upper.x(run.producer + run.length, is_end=True), y + 2),
            (lower.x(run.consumer + run.length, is_end=True), y + _RIBBONS - 2),
            (lower.x(run.consumer), y + _RIBBONS - 2),
        )
        canvas.polygon(points, colour, 0.3)


def _lens(canvas: Canvas, strip: _Strip, x: float, y: float, width: float, above: bool) -> float:
    """The first pieces that move, enlarged, and from where in the bar they are; returns the other edge."""
    pieces = strips.pieces(strip.side.layer, strip.side.block_ids, strip.first_moved, _LENS_PIECES)
    total, cell = strip.side.layer.heads.total, width / _LENS_PIECES
    top = y if above else y + _ARROW
    left, right = strip.x(pieces[0].offset), strip.x(pieces[-1].end, is_end=True)
    far, near = (top + _LENS, top + _LENS + _ARROW) if above else (top, top - _ARROW)
    canvas.polygon(
        ((x, far), (x + cell * len(pieces), far), (max(right, left + 1), near), (left, near)), draw.LINE, 0.5
    )
    for number, piece in enumerate(pieces):
        at = x + number * cell
        fill = draw.head_colour(piece.head, total, pale=not strip.moved(piece), deep=piece.field == "v")
        canvas.rect(at, top, cell, _LENS, fill, draw.PAPER)
        whole = next(field for field in strip.side.layer.fields if field.name == piece.field).content_bytes
        part = words.size(piece.length)
        if piece.length < whole:
            part += f" from byte {piece.content}"
        for row, line in enumerate((_token(strip.side.layer, piece), _owner(piece, total), part)):
            canvas.text(at + cell / 2, top + 17 + row * 16, line, 11, anchor="middle", room=cell - 6)
    return top + _LENS + (_ARROW if above else 0)


def _token(layer: Layer, piece: Piece) -> str:
    return "all tokens" if layer.block_size >= strips.ENDLESS else f"token {piece.token}"
