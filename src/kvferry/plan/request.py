"""From a pair's units and a request's block tables to descriptors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout import Refusal
from kvferry.plan.boxes import Digits, Ints, Runs, address, expand, merge
from kvferry.plan.units import ALL, Cut, Lane, Placement, Selection, Unit


class BlockTable(NamedTuple):
    """A request's blocks in one KV cache group, by token position.

    Entry i is the id of the block of the tokens [i * block_size, (i + 1) * block_size), or -1 where there is none:
    a null placeholder, or on the consumer a block that it has already.
    """

    block_ids: Ints


def block_tables(side: str, block_ids: Sequence[Sequence[int] | Ints]) -> list[BlockTable]:
    """By KV cache group, what a message or a scheduler says. side: "consumer" or "producer".

    Raises Refusal for what is no block id; whether a layout has that block is seen when a plan is bound.
    """
    return [BlockTable(_block_ids(side, group, ids)) for group, ids in enumerate(block_ids)]


def _block_ids(side: str, group: int, ids: Sequence[int] | Ints) -> Ints:
    found = np.asarray(ids)
    if not found.size:
        return np.zeros(0, np.int64)
    if found.dtype.kind == "i" and int(found.min()) >= -1 and int(found.max()) < _MOST_BLOCKS:
        return found.astype(np.int64, copy=False)
    for one in found.tolist():
        if not isinstance(one, int) or not -1 <= one < _MOST_BLOCKS:
            raise _one_sided(f"group {group}: block id", side, f"id {one}", f"ids are from -1 to {_MOST_BLOCKS - 1}")
    return found.astype(np.int64)


_MOST_BLOCKS = 1 << 62


class PlanBatch(NamedTuple):
    """Descriptors between two regions: int64 arrays of equal length; bytes, offsets from the start of the region."""

    consumer_region: int
    producer_region: int
    consumer_offsets: Ints
    producer_offsets: Ints
    lengths: Ints


class Slice(NamedTuple):
    """The descriptors [start, stop) of one batch: those of one placement of the pair."""

    placement: int
    batch: int
    start: int
    stop: int


class TransferPlan(NamedTuple):
    """All descriptors of one request between one consumer worker and one producer worker.

    They go layer by layer in the consumer's order, by ascending consumer offset; layers that move as one come with
    the first of them. slices: which are whose, for placements that have any, in that order. num_bytes counts what
    moves, required_bytes what holds required tokens (opaque tiles whole).
    stops: for each unit of the pair, the token where the last chunk was cut (see Unit.last_stop). starts: the first.
    """

    batches: tuple[PlanBatch, ...]
    slices: tuple[Slice, ...]
    num_bytes: int
    required_bytes: int
    stops: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def num_descriptors(self) -> int:
        return sum(len(batch.lengths) for batch in self.batches)

    def of(self, placements: Container[int]) -> tuple[PlanBatch, ...]:
        """The descriptors of some placements of the pair; their arrays are views of this plan's where they can be."""
        wanted: dict[int, list[slice]] = {}
        for placement, batch, start, stop in self.slices:
            if placement in placements:
                spans = wanted.setdefault(batch, [])
                if spans and spans[-1].stop == start:
                    start = spans.pop().start
                spans.append(slice(start, stop))
        return tuple(_part(self.batches[batch], spans) for batch, spans in wanted.items())


def _part(batch: PlanBatch, spans: Sequence[slice]) -> PlanBatch:
    columns = (batch.consumer_offsets, batch.producer_offsets, batch.lengths)
    if len(spans) == 1:
        return PlanBatch(batch.consumer_region, batch.producer_region, *(column[spans[0]] for column in columns))
    parts = (np.concatenate([column[span] for span in spans]) for column in columns)
    return PlanBatch(batch.consumer_region, batch.producer_region, *parts)


class Group(NamedTuple):
    """One KV cache group as both sides have it; num_blocks is the least of its layers'. Blocks count the tokens of all
    ranks of a context."""

    number: int
    consumer_block_size: int
    producer_block_size: int
    consumer_num_blocks: int
    producer_num_blocks: int


def check_reach(group: Group, consumer_ids: Ints, end_token: int) -> None:
    """Raises Refusal unless the consumer's table goes as far as the tokens, before anything is made of their number."""
    needed = -(-end_token // group.consumer_block_size)
    if needed > len(consumer_ids):
        where = f"group {group.number}: length of the block table"
        raise _one_sided(where, "consumer", f"{len(consumer_ids)} blocks", f"{needed} needed")


class Chunks(NamedTuple):
    """The chunks of a request's tokens that both sides hold and the consumer has blocks for, in token order.

    numbers: of the chunk, from the request's first token. positions: of the chunk inside its block.
    """

    numbers: Ints
    consumer_ids: Ints
    consumer_positions: Ints
    producer_ids: Ints
    producer_positions: Ints


class Span(NamedTuple):
    """Chunks [begin, end) of a request, of which the tokens [start, stop) are wanted."""

    begin: int
    end: int
    start: int
    stop: int


def match(
    group: Group,
    chunk: int,
    consumer_ids: Ints,
    producer_ids: Ints,
    first_token: int,
    end_token: int,
    selection: Selection = ALL,
) -> Chunks:
    """Pair blocks by token position, chunk by chunk; a chunk is part of one block on either side. Not for no tokens.

    Raises Refusal where a table is too short, an id is out of range, a destination is named twice, or a block is
    wanted that the producer does not have.
    """
    numbers = selection.held(np.arange(first_token // chunk, -(-end_token // chunk), dtype=np.int64))
    wanted, consumer_positions = np.divmod(numbers, group.consumer_block_size // chunk)
    _check_length(group, "consumer", wanted, consumer_ids)
    keep = consumer_ids[wanted] != -1
    numbers, wanted, consumer_positions = numbers[keep], wanted[keep], consumer_positions[keep]
    given, producer_positions = np.divmod(numbers, group.producer_block_size // chunk)
    _check_length(group, "producer", given, producer_ids)
    consumer, producer = consumer_ids[wanted], producer_ids[given]
    check_destinations(group.number, _of_entries(wanted, consumer), group.consumer_num_blocks)
    missing = np.flatnonzero(producer == -1)
    if len(missing):
        token = int(numbers[missing[0]]) * chunk
        raise Refusal(f"group {group.number}: block of token {token}", int(consumer[missing[0]]), "none")
    _check_ids(group.number, "producer", producer, group.producer_num_blocks)
    return Chunks(numbers, consumer, consumer_positions, producer, producer_positions)


def _check_length(group: Group, side: str, entries: Ints, block_ids: Ints) -> None:
    if len(entries) and int(entries[-1]) >= len(block_ids):
        have, need = f"{len(block_ids)} blocks", f"{int(entries[-1]) + 1} needed"
        raise _one_sided(f"group {group.number}: length of the block table", side, have, need)


def _check_ids(group: int, side: str, block_ids: Ints, num_blocks: int) -> None:
    bad = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if len(bad):
        raise _one_sided(f"group {group}: block id", side, f"id {int(bad[0])}", f"num_blocks {num_blocks}")


def check_destinations(group: int, block_ids: Ints, num_blocks: int) -> None:
    """Raises Refusal for a block that the consumer does not have, or that is named twice."""
    _check_ids(group, "consumer", block_ids, num_blocks)
    ids, counts = np.unique(block_ids, return_counts=True)
    if len(ids) and int(counts.max()) > 1:
        twice = int(ids[counts > 1][0])
        raise Refusal(f"group {group}: destination block {twice}", "it twice in its table", None)


def _one_sided(field: str, side: str, have: str, limit: str) -> Refusal:
    text = f"{have}, {limit}"
    return Refusal(field, text, None) if side == "consumer" else Refusal(field, None, text)


def _of_entries(entries: Ints, block_ids: Ints) -> Ints:
    """The blocks of table entries, each once: chunks of one entry share its block."""
    first_of_entry = np.ones(len(entries), np.bool_)
    first_of_entry[1:] = entries[1:] != entries[:-1]
    return block_ids[first_of_entry]


def spans(unit: Unit, chunks: Chunks, first_token: int, end_token: int) -> Iterator[Span]:
    """Chunks by which of their tokens are wanted: at most a cut first one, whole ones, and a cut last one."""
    count, size = len(chunks.numbers), unit.chunk_tokens
    if count == 0:
        return
    start = max(first_token - int(chunks.numbers[0]) * size, 0)
    stop = min(end_token - int(chunks.numbers[-1]) * size, size)
    if count == 1:
        yield Span(0, 1, start, stop)
        return
    whole_from, whole_to = int(start > 0), count - int(stop < size)
    if start > 0:
        yield Span(0, 1, start, size)
    if whole_from < whole_to:
        yield Span(whole_from, whole_to, 0, size)
    if stop < size:
        yield Span(whole_to, count, 0, stop)


class Move(NamedTuple):
    """Chunks that move alike, up to the token `stop` of each."""

    span: Span
    stop: int
    cut: Cut

    @property
    def num_boxes(self) -> int:
        return sum(len(boxes) for boxes in self.cut.values())

    @property
    def num_runs(self) -> int:
        """Descriptors, before neighbours become one."""
        runs = sum(box.num_runs for boxes in self.cut.values() for box in boxes)
        return (self.span.end - self.span.begin) * runs


def moves(unit: Unit, chunks: Chunks, first_token: int, end_token: int) -> list[Move]:
    """What a unit moves of the tokens [first_token, end_token)."""
    found = []
    for span in spans(unit, chunks, first_token, end_token):
        stop = unit.last_stop(span.start, span.stop)
        found.append(Move(span, stop, unit.cut(span.start, stop)))
    return found


class UnitRuns(NamedTuple):
    """What a unit moves for one request, relative to a placement's bases; stop as in TransferPlan.stops."""

    runs: Runs
    required_bytes: int
    stop: int


def bind_unit(unit: Unit, chunks: Chunks, found: Sequence[Move], end_token: int) -> UnitRuns:
    parts: list[Runs] = []
    required, end = 0, end_token
    starts: dict[Lane, tuple[Ints, Ints]] = {}
    for span, stop, cut in found:
        required += (span.end - span.begin) * unit.num_bytes(span.start, span.stop)
        if stop > span.stop:
            end = int(chunks.numbers[span.begin]) * unit.chunk_tokens + stop
        for lane, boxes in cut.items():
            if lane not in starts:
                starts[lane] = _starts(lane, chunks)
            consumer, producer = (side[span.begin : span.end] for side in starts[lane])
            parts.extend(expand(box, consumer, producer) for box in boxes)
    return UnitRuns(merge(parts), required, end)


def _starts(lane: Lane, chunks: Chunks) -> tuple[Ints, Ints]:
    """The offset of each chunk on both sides."""
    return (
        _start(chunks.consumer_ids, lane.consumer_block_stride, chunks.consumer_positions, lane.consumer_chunks),
        _start(chunks.producer_ids, lane.producer_block_stride, chunks.producer_positions, lane.producer_chunks),
    )


def _start(block_ids: Ints, block_stride: int, positions: Ints, inside: Digits) -> Ints:
    return block_ids * block_stride + address(inside, positions) if inside else block_ids * block_stride


def place(placements: Sequence[Placement], runs: Sequence[Runs]) -> tuple[tuple[PlanBatch, ...], tuple[Slice, ...]]:
    """The descriptors of all placements, by pair of regions, and which are whose; runs[i] are those of unit i."""
    batches: dict[tuple[int, int], list[Runs]] = {}
    filled: dict[tuple[int, int], int] = {}
    slices: list[Slice] = []
    for index, placement in enumerate(placements):
        c, p, n = runs[placement.unit]
        if len(n):
            regions = (placement.consumer_region, placement.producer_region)
            at = batches.setdefault(regions, [])
            at.append(Runs(c + placement.consumer_base, p + placement.producer_base, n))
            start = filled.get(regions, 0)
            filled[regions] = start + len(n)
            slices.append(Slice(index, list(batches).index(regions), start, start + len(n)))
    joined = tuple(
        PlanBatch(*regions, *(np.concatenate(column) for column in zip(*parts, strict=True)))
        for regions, parts in batches.items()
    )
    return joined, tuple(slices)
