"""Compare two sides at the handshake, once; afterwards a request only brings its block tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvferry.layout import CacheLayout, Context, Field, Layer, LayoutError, Refusal, check
from kvferry.plan.proof import NOTHING, ClaimKey, Claims, Sums, prove, sums_of_point, token_walk, walk_rest
from kvferry.plan.request import BlockTable, Chunks, Group, TransferPlan, bind_unit, match, place
from kvferry.plan.units import (
    FieldPair,
    Placement,
    Selection,
    Unit,
    common_chunk,
    pair_fields,
    select,
    span_tokens,
    spans_runs,
    tile_tokens,
)
from kvferry.topology import Share


@dataclass(frozen=True)
class PairPlan:
    """What a consumer worker and a producer worker share, worked out once at the handshake; made by `compile`.

    groups: by index, the KV cache groups with layers in it. units: what moves together, each in one group.
    placements: where, in the consumer's layer order. claims: what a proof asks for. region_bytes: lengths of the
    consumer's regions, and of the producer's.
    """

    groups: dict[int, Group]
    units: tuple[Unit, ...]
    placements: tuple[Placement, ...]
    claims: Claims
    region_bytes: tuple[tuple[int, ...], tuple[int, ...]]

    def bind(
        self,
        consumer_tables: Sequence[BlockTable],
        producer_tables: Sequence[BlockTable],
        first_token: int,
        end_token: int,
        window_starts: Sequence[int] = (),
    ) -> TransferPlan:
        """The descriptors of one request: the tokens [first_token, end_token) where the consumer has a block.

        Tables: one per KV cache group of the model, on each side. window_starts: by group, the first token that is
        still looked at; what lies before it is left out, but for the rest of its chunk. Raises Refusal where tables do
        not fit the layouts or one another, and Unproven (a Refusal) if the plan does not pass its proof; then nothing
        may move.
        """
        if not 0 <= first_token <= end_token:
            raise Refusal("tokens", f"first_token {first_token}", f"end_token {end_token}")
        _check_groups(self.groups, consumer_tables, producer_tables)
        if window_starts and len(window_starts) != len(consumer_tables):
            raise Refusal("number of windows", f"{len(window_starts)} for {len(consumer_tables)} groups", "any")
        if first_token == end_token:
            return TransferPlan((), 0, 0, (end_token,) * len(self.units), (first_token,) * len(self.units))
        consumer_ids = [np.asarray(table.block_ids, dtype=np.int64) for table in consumer_tables]
        producer_ids = [np.asarray(table.block_ids, dtype=np.int64) for table in producer_tables]
        starts = tuple(_first_token(unit, first_token, window_starts) for unit in self.units)
        matched: dict[tuple[int, int, Selection], Chunks] = {}
        bound = []
        for unit, start in zip(self.units, starts, strict=True):
            key = (unit.group, unit.chunk_tokens, unit.selection)
            if key not in matched:
                group, ids = self.groups[unit.group], (consumer_ids[unit.group], producer_ids[unit.group])
                matched[key] = match(group, unit.chunk_tokens, *ids, start, end_token, unit.selection)
            bound.append(bind_unit(unit, matched[key], start, end_token))
        batches = place(self.placements, [one.runs for one in bound])
        plan = TransferPlan(
            batches=batches,
            num_bytes=sum(int(batch.lengths.sum()) for batch in batches),
            required_bytes=sum(bound[placement.unit].required_bytes for placement in self.placements),
            stops=tuple(one.stop for one in bound),
            starts=starts,
        )
        prove(
            self.claims, self.region_bytes, (consumer_ids, producer_ids), (first_token, end_token), plan, window_starts
        )
        return plan


def _first_token(unit: Unit, first_token: int, window_starts: Sequence[int]) -> int:
    """Where a unit begins. Of a window's first chunk all moves: a chunk is part of one block on either side, so both
    have it, and a cut inside it could cost many descriptors."""
    if not window_starts:
        return first_token
    return max(first_token, window_starts[unit.group] // unit.chunk_tokens * unit.chunk_tokens)


def _check_groups(groups: dict[int, Group], consumer: Sequence[BlockTable], producer: Sequence[BlockTable]) -> None:
    if len(consumer) != len(producer):
        raise Refusal("number of KV cache groups", len(consumer), len(producer))
    if groups and max(groups) >= len(consumer):
        raise Refusal(f"block table of group {max(groups)}", f"{len(consumer)} tables", f"{len(producer)} tables")


class LayerPair(NamedTuple):
    """One layer on both sides, and the heads that go from one to the other, counted from the start of each shard."""

    consumer: Layer
    producer: Layer
    consumer_head: int
    producer_head: int
    num_heads: int

    @property
    def geometry(self) -> Hashable:
        """Equal for layers whose fields agree in everything but the base address, on both sides."""
        return (self.consumer.fields, self.producer.fields, self.contexts, *self[2:])

    @property
    def contexts(self) -> tuple[Context, Context]:
        return self.consumer.context, self.producer.context

    @property
    def scope(self) -> tuple[int, int, int]:
        """Only layers of one group and the same regions can move together."""
        return self.consumer.group, self.consumer.region, self.producer.region


class Piece(NamedTuple):
    """A layer pair with what its geometry class has in common: fields and proof sums, relative to the bases."""

    pair: LayerPair
    fields: tuple[FieldPair, ...]
    sums: tuple[Sums, ...]
    chunk_tokens: int


def compile(consumer: CacheLayout, producer: CacheLayout, share: Share) -> PairPlan:
    """Everything about a share that does not depend on a request; only the share's layers are looked at.

    Raises Refusal, naming layer, field and both values, if a layout is unsound (`layout.check`) or the two do not mean
    the same bytes: dtype, scales, heads, contexts, groups, fields, content sizes, opaque tags, tiles, shared storage.
    """
    names = {part.name for part in share.layers}
    consumer, producer = _only(consumer, names), _only(producer, names)
    _check_sound(consumer, producer)
    pairs = list(_layer_pairs(consumer, producer, share))
    chains = _chains(_pieces(pairs))
    units, placements, claims = _units(chains, {layer.name: i for i, layer in enumerate(consumer.layers)})
    return PairPlan(
        groups=_groups(pairs),
        units=units,
        placements=placements,
        claims=claims,
        region_bytes=(
            tuple(region.length_bytes for region in consumer.regions),
            tuple(region.length_bytes for region in producer.regions),
        ),
    )


def _only(layout: CacheLayout, names: set[str]) -> CacheLayout:
    return CacheLayout(layout.regions, tuple(layer for layer in layout.layers if layer.name in names))


def _check_sound(consumer: CacheLayout, producer: CacheLayout) -> None:
    faults = []
    for layout in (consumer, producer):
        try:
            check(layout)
            faults.append("a sound one")
        except LayoutError as error:
            faults.append(str(error))
    if faults != ["a sound one"] * 2:
        raise Refusal("layout", *faults)


def _layer_pairs(consumer: CacheLayout, producer: CacheLayout, share: Share) -> Iterator[LayerPair]:
    """The share's layers, compared; layers that are one and the same memory on both sides come once."""
    mine = {layer.name: layer for layer in consumer.layers}
    theirs = {layer.name: layer for layer in producer.layers}
    seen: dict[Hashable, tuple[str, Hashable]] = {}
    for part in share.layers:
        left, right = mine.get(part.name), theirs.get(part.name)
        if left is None or right is None:
            raise Refusal(f"layer {part.name}", left and left.name, right and right.name)
        _compare(left, right, part.start, part.stop)
        memory = (left.group, left.region, left.base_bytes, left.fields, left.context)
        source = (right.region, right.base_bytes, right.fields, right.context)
        first, first_source = seen.setdefault(memory, (part.name, source))
        if first_source != source:
            raise Refusal(f"layers {first} and {part.name}", "one memory", "two")
        if first == part.name:
            heads = (part.start - left.heads.start, part.start - right.heads.start, part.stop - part.start)
            yield LayerPair(left, right, *heads)


def _compare(left: Layer, right: Layer, start: int, stop: int) -> None:
    where = f"layer {left.name}"
    for name, mine, theirs in (
        ("group", left.group, right.group),
        ("dtype", left.dtype, right.dtype),
        ("scales", left.scales or "none", right.scales or "none"),
        ("total KV heads", left.heads.total, right.heads.total),
        ("fields", [field.name for field in left.fields], [field.name for field in right.fields]),
    ):
        if mine != theirs:
            raise Refusal(f"{where}: {name}", mine, theirs)
    for heads in (left.heads, right.heads):
        if not heads.start <= start < stop <= heads.start + heads.count:
            raise Refusal(f"{where}: heads {start} to {stop} of the share", left.heads, right.heads)
    if not left.context.overlaps(right.context):
        raise Refusal(f"{where}: context", left.context, right.context, "they have no token in common")
    for mine_field, their_field in zip(left.fields, right.fields, strict=True):
        _compare_fields(f"{where}, field {mine_field.name}", mine_field, their_field)
        _compare_runs(f"{where}, field {mine_field.name}", mine_field, left.context, right.context)


def _compare_fields(where: str, left: Field, right: Field) -> None:
    if left.opaque != right.opaque:
        raise Refusal(f"{where}: packing", left.opaque or "known", right.opaque or "known")
    if tile_tokens(left) != tile_tokens(right):
        raise Refusal(f"{where}: tile tokens", tile_tokens(left), tile_tokens(right))
    if left.content_bytes != right.content_bytes:
        raise Refusal(f"{where}: content_bytes", left.content_bytes, right.content_bytes)


def _compare_runs(where: str, field: Field, left: Context, right: Context) -> None:
    """A tile that holds several runs of a context cannot be taken apart."""
    if left != right and (spans_runs(field, left) or spans_runs(field, right)):
        raise Refusal(f"{where}: context of tiles of {tile_tokens(field)} tokens", left, right, "a tile moves whole")


def _groups(pairs: Sequence[LayerPair]) -> dict[int, Group]:
    found: dict[int, Group] = {}
    for left, right, *_ in pairs:
        known = found.get(left.group)
        least = (known.consumer_num_blocks, known.producer_num_blocks) if known else (left.num_blocks, right.num_blocks)
        found[left.group] = Group(
            number=left.group,
            consumer_block_size=left.block_size,
            producer_block_size=right.block_size,
            consumer_num_blocks=min(least[0], left.num_blocks),
            producer_num_blocks=min(least[1], right.num_blocks),
        )
    return found


def _pieces(pairs: Sequence[LayerPair]) -> Iterator[Piece]:
    """Each layer pair with the fields of its geometry class, which are worked out once."""
    classes: dict[Hashable, Piece] = {}
    for pair in pairs:
        key = pair.geometry
        if key not in classes:
            both = list(zip(pair.consumer.fields, pair.producer.fields, strict=True))
            fields = tuple(pair_fields(left, right, pair.contexts, *pair[2:]) for left, right in both)
            sums = tuple(walk_rest(left, right, *pair[2:]) for left, right in both)
            classes[key] = Piece(pair, fields, sums, common_chunk(pair.consumer.name, fields))
        yield classes[key]._replace(pair=pair)


def _chains(pieces: Iterator[Piece]) -> list[list[Piece]]:
    """Layers that touch on both sides, as in a cache that keeps all layers of a block together, form one chain."""
    chains: list[list[Piece]] = []
    for piece in sorted(
        pieces,
        key=lambda piece: (piece.pair.scope, piece.chunk_tokens, piece.pair.contexts, piece.pair.consumer.base_bytes),
    ):
        if chains and _touch(chains[-1][-1], piece):
            chains[-1].append(piece)
        else:
            chains.append([piece])
    return chains


def _touch(first: Piece, second: Piece) -> bool:
    alike = (first.pair.scope, first.chunk_tokens, first.pair.contexts)
    if alike != (second.pair.scope, second.chunk_tokens, second.pair.contexts):
        return False
    return _join_up(first.chunk_tokens, first.fields, second.fields, _distance(first, second))


@lru_cache(maxsize=256)
def _join_up(
    chunk: int, first: tuple[FieldPair, ...], second: tuple[FieldPair, ...], distance: tuple[int, int]
) -> bool:
    """Whether moving both together takes fewer descriptors. Cached: most neighbours of a model are alike."""
    moved = tuple(field.shifted(*distance) for field in second)
    together, one, other = (Unit(0, chunk, fields).num_runs(0, chunk) for fields in (first + moved, first, second))
    return together < one + other


def _fields(chain: Sequence[Piece]) -> tuple[FieldPair, ...]:
    """The fields of a chain, relative to the bases of its first layer."""
    return tuple(field.shifted(*_distance(chain[0], piece)) for piece in chain for field in piece.fields)


def _distance(first: Piece, other: Piece) -> tuple[int, int]:
    consumer = other.pair.consumer.base_bytes - first.pair.consumer.base_bytes
    return consumer, other.pair.producer.base_bytes - first.pair.producer.base_bytes


def _units(
    chains: Sequence[Sequence[Piece]], order: dict[str, int]
) -> tuple[tuple[Unit, ...], tuple[Placement, ...], Claims]:
    """Chains that are alike are placements of one unit; claims add up over them."""
    known: dict[Hashable, int] = {}
    units: list[Unit] = []
    placed: list[tuple[int, Placement]] = []
    claims: Claims = {}
    for chain in chains:
        group, consumer_region, producer_region = chain[0].pair.scope
        key = (group, tuple((piece.pair.geometry, _distance(chain[0], piece)) for piece in chain))
        unit = known.setdefault(key, len(units))
        if unit == len(units):
            chunk = chain[0].chunk_tokens
            units.append(Unit(group, chunk, _fields(chain), select(chain[0].pair.contexts, chunk)))
        bases = chain[0].pair.consumer.base_bytes, chain[0].pair.producer.base_bytes
        first = min(order[piece.pair.consumer.name] for piece in chain)
        placed.append((first, Placement(unit, consumer_region, producer_region, *bases)))
        for piece in chain:
            _add_claims(claims, unit, piece)
    return tuple(units), tuple(placement for _, placement in sorted(placed)), claims


def _add_claims(claims: Claims, unit: int, piece: Piece) -> None:
    left, right = piece.pair.consumer, piece.pair.producer
    base = sums_of_point(left.base_bytes, right.base_bytes)
    for mine, theirs, rest in zip(left.fields, right.fields, piece.sums, strict=True):
        walks = token_walk(left, mine), token_walk(right, theirs)
        key = ClaimKey(unit, *piece.pair.scope, span_tokens(mine, left.context), *walks)
        claims[key] = claims.get(key, NOTHING).plus(rest.times(base))
