"""The bytes of a few blocks of one layer in the order of memory: whose they are, for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.layout import STATE_TOKENS, Axis, Field, Layer, offset_bytes

Ints = npt.NDArray[np.int64]

MOST_UNITS = 1 << 20
"""Units of blocks that are still drawn; no cache in use has more in a few blocks."""


class Piece(NamedTuple):
    """Bytes that lie together and belong together. offset: in the region. head: of the whole model. token: of the
    request; content: byte within one (token, head)."""

    offset: int
    length: int
    head: int
    field: str
    token: int
    content: int

    @property
    def end(self) -> int:
        return self.offset + self.length


ENDLESS = STATE_TOKENS
"""The block size of a cache that is not cut into blocks of tokens."""


def pieces(layer: Layer, block_ids: Sequence[int], offset: int, most: int) -> list[Piece]:
    """What the blocks hold from an address on: one piece for each part of a (head, token, field) that lies together."""
    units = _units(layer, block_ids)
    first = int(np.searchsorted(units.offset, offset))
    parts_of_content = max(field.content_bytes // _dense_bytes(field.axes) for field in layer.fields)
    few = _Units(*(column[first : first + most * parts_of_content] for column in units))
    return _pieces(few, layer, by_token=True)[:most]


def areas(layer: Layer, block_ids: Sequence[int]) -> list[Piece]:
    """What the blocks hold, by address: one piece for each part of a (head, field) that lies together."""
    return _pieces(_units(layer, block_ids), layer, by_token=False)


class _Units(NamedTuple):
    """Columns of the smallest dense parts, by address."""

    offset: Ints
    length: Ints
    head: Ints
    field: Ints
    token: Ints
    content: Ints


def _units(layer: Layer, block_ids: Sequence[int]) -> _Units:
    columns = [_of_field(layer, number, field, block_ids) for number, field in enumerate(layer.fields)]
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return _Units(*(column[order] for column in joined))


def _of_field(layer: Layer, number: int, field: Field, block_ids: Sequence[int]) -> _Units:
    dense, tile = _dense_bytes(field.axes), min(axis.step for axis in field.axes if axis.dim == "token")
    blocks = np.array(block_ids, np.int64)
    heads = np.arange(layer.heads.count, dtype=np.int64)
    tokens = np.arange(0, own_tokens(layer), tile, dtype=np.int64)
    contents = np.arange(0, field.content_bytes, dense, dtype=np.int64)
    nth, head, token, content = (
        grid.ravel() for grid in np.meshgrid(np.arange(len(blocks)), heads, tokens, contents, indexing="ij")
    )
    offset = layer.base_bytes + field.base_bytes + blocks[nth] * field.block_stride_bytes
    offset = offset + offset_bytes(field.axes, "head", head) + offset_bytes(field.axes, "token", token)
    return _Units(
        offset=offset + offset_bytes(field.axes, "content", content),
        length=np.full(len(offset), dense, np.int64),
        head=head + layer.heads.start,
        field=np.full(len(offset), number, np.int64),
        token=nth * layer.block_size + _in_block(layer, token),
        content=content,
    )


def own_tokens(layer: Layer) -> int:
    """Tokens of a block that lie on this rank."""
    return layer.block_size // layer.context.size


def _in_block(layer: Layer, own: Ints) -> Ints:
    """Positions in a block of a context parallel rank's own tokens."""
    context = layer.context
    return own // context.interleave * context.period + context.rank * context.interleave + own % context.interleave


def num_units(layer: Layer, num_blocks: int) -> int:
    """How many units there are to look at."""
    return num_blocks * sum(
        layer.heads.count
        * (own_tokens(layer) // min(axis.step for axis in field.axes if axis.dim == "token"))
        * (field.content_bytes // _dense_bytes(field.axes))
        for field in layer.fields
    )


def _dense_bytes(axes: Sequence[Axis]) -> int:
    """Bytes of content that lie together whatever else is between."""
    dense = 1
    for axis in sorted((axis for axis in axes if axis.dim == "content"), key=lambda axis: axis.step):
        if axis.size > 1 and (axis.step, axis.stride_bytes) == (dense, dense):
            dense *= axis.size
    return dense


def _pieces(units: _Units, layer: Layer, by_token: bool) -> list[Piece]:
    """Neighbours that agree in head and field, and in token if asked for, as one."""
    agree = units.offset[1:] == units.offset[:-1] + units.length[:-1]
    for column in (units.head, units.field) + ((units.token,) if by_token else ()):
        agree &= column[1:] == column[:-1]
    starts = np.flatnonzero(np.concatenate([[True], ~agree]))
    ends = np.concatenate([starts[1:], [len(units.offset)]]) - 1
    lengths = units.offset[ends] + units.length[ends] - units.offset[starts]
    columns = (units.offset, units.head, units.field, units.token, units.content)
    offset, head, field, token, content = (column[starts].tolist() for column in columns)
    names = [one.name for one in layer.fields]
    return [
        Piece(*where, whose, names[of], *first)
        for where, whose, of, *first in zip(
            zip(offset, lengths.tolist(), strict=True), head, field, token, content, strict=True
        )
    ]


_NAMES = {"head": "heads", "token": "tokens", "content": "elements"}


def nesting(layer: Layer) -> str:
    """How a block is nested, outermost first: "heads > tokens > keys, values"."""
    chains = {field.name: _chain(layer, field) for field in layer.fields}
    if len(layer.fields) == 1:
        return " > ".join(chains[layer.fields[0].name]) or "one piece"
    both = "keys, values" if set(chains) == {"k", "v"} else ", ".join(chains)
    distance = abs(layer.fields[1].base_bytes - layer.fields[0].base_bytes)
    outer = [name for name, stride in _strides(layer.fields[0]) if stride > distance]
    inner = {name: chain[len(outer) :] for name, chain in chains.items()}
    if len(set(map(tuple, inner.values()))) == 1:
        return " > ".join([*outer, both, *next(iter(inner.values()))])
    apart = "; ".join(f"{_FIELD_NAMES.get(name, name)}: {' > '.join(chain)}" for name, chain in inner.items())
    return " > ".join([*outer, f"{both} ({apart})"])


_FIELD_NAMES = {"k": "keys", "v": "values"}


def _chain(layer: Layer, field: Field) -> list[str]:
    return [name for name, _ in _strides(field)]


def _strides(field: Field) -> list[tuple[str, int]]:
    """Axes that are not dense content, outermost first."""
    dense = _dense_bytes(field.axes)
    axes = [axis for axis in field.axes if axis.size > 1 and not (axis.dim == "content" and axis.step < dense)]
    axes.sort(key=lambda axis: axis.stride_bytes, reverse=True)
    return [(_NAMES[axis.dim], axis.stride_bytes) for axis in axes]
