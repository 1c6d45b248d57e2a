"""Compare two sides at the handshake, once; afterwards a request only brings its block tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvferry.layout import CacheLayout, Examined, Layer, Refusal, memory_of
from kvferry.plan.boxes import Ints
from kvferry.plan.compare import Examinations, LayerPair, Scope, check_sound, layer_pairs
from kvferry.plan.limits import MAX_DESCRIPTORS, USUAL_TOKENS, check_boxes, too_many
from kvferry.plan.proof import ClaimKey, Claims, TokenWalk, prove, token_walk, walk_rest
from kvferry.plan.request import (
    BlockTable,
    Chunks,
    Group,
    Move,
    TransferPlan,
    UnitRuns,
    bind_unit,
    block_tables,
    check_reach,
    match,
    moves,
    place,
)
from kvferry.plan.sums import NOTHING, Sums, sums_of_point
from kvferry.plan.units import (
    FieldPair,
    Placement,
    Selection,
    Unit,
    common_chunk,
    pair_fields,
    select,
    span_tokens,
)
from kvferry.topology import Share


@dataclass(frozen=True)
class PairPlan:
    """What a consumer worker and a producer worker share, worked out once at the handshake; made by `compile`.

    groups: by index, the KV cache groups with layers in it. units: what moves together, each in one group.
    placements: where, in the consumer's layer order. layers: of each placement, the names of the layers whose memory
    it is. claims: what a proof asks for. region_bytes: lengths of the consumer's regions, and of the producer's.
    examples: of each unit, one layer as both sides have it.
    """

    groups: dict[int, Group]
    units: tuple[Unit, ...]
    examples: tuple[tuple[Layer, Layer], ...]
    placements: tuple[Placement, ...]
    layers: tuple[tuple[str, ...], ...]
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
        not fit the layouts or one another, or where it takes more than MAX_DESCRIPTORS, and Unproven (a Refusal) if the
        plan does not pass its proof; then nothing may move.
        """
        if not 0 <= first_token <= end_token:
            raise Refusal(f"tokens: first_token {first_token} is negative or behind end_token {end_token}", None, None)
        _check_groups(self.groups, consumer_tables, producer_tables)
        if window_starts and len(window_starts) != len(consumer_tables):
            raise Refusal("number of windows", f"{len(window_starts)} for {len(consumer_tables)} groups", None)
        if first_token == end_token:
            return TransferPlan((), (), 0, 0, (end_token,) * len(self.units), (first_token,) * len(self.units))
        consumer_ids, producer_ids = (
            [table.block_ids for table in block_tables(side, [given.block_ids for given in tables])]
            for side, tables in (("consumer", consumer_tables), ("producer", producer_tables))
        )
        for group in self.groups.values():
            check_reach(group, consumer_ids[group.number], end_token)
        starts = tuple(_first_token(unit, first_token, window_starts) for unit in self.units)
        bound = self._bind_units(consumer_ids, producer_ids, starts, end_token)
        batches, slices = place(self.placements, [one.runs for one in bound])
        plan = TransferPlan(
            batches=batches,
            slices=slices,
            num_bytes=sum(int(batch.lengths.sum()) for batch in batches),
            required_bytes=sum(bound[placement.unit].required_bytes for placement in self.placements),
            stops=tuple(one.stop for one in bound),
            starts=starts,
        )
        prove(
            self.claims, self.region_bytes, (consumer_ids, producer_ids), (first_token, end_token), plan, window_starts
        )
        return plan

    def _bind_units(
        self, consumer_ids: Sequence[Ints], producer_ids: Sequence[Ints], starts: Sequence[int], end_token: int
    ) -> list[UnitRuns]:
        """Counts before it lists: first what each unit takes, then, neighbours being one, what all placements take."""
        matched: dict[tuple[int, int, Selection], Chunks] = {}
        found: list[tuple[Chunks, list[Move]]] = []
        counts: list[int] = []
        num_boxes = 0
        for unit, start in zip(self.units, starts, strict=True):
            self._check_counts([*counts, (end_token - start) // unit.chunk_tokens], (start, end_token))
            key = (unit.group, unit.chunk_tokens, unit.selection)
            if key not in matched:
                group, ids = self.groups[unit.group], (consumer_ids[unit.group], producer_ids[unit.group])
                matched[key] = match(group, unit.chunk_tokens, *ids, start, end_token, unit.selection)
            found.append((matched[key], moves(unit, matched[key], start, end_token)))
            num_boxes += sum(move.num_boxes for move in found[-1][1])
            check_boxes(num_boxes)
            counts.append(sum(move.num_runs for move in found[-1][1]))
            self._check_counts(counts, (start, end_token))
        bound = [bind_unit(unit, *one, end_token) for unit, one in zip(self.units, found, strict=True)]
        counts = [len(one.runs.lengths) for one in bound]
        if self._over_placements(counts) > MAX_DESCRIPTORS:
            raise self._too_many(counts, (min(starts), end_token))
        return bound

    def _check_counts(self, counts: Sequence[int], tokens: tuple[int, int]) -> None:
        """Of the first units, before neighbours become one."""
        if sum(counts) > MAX_DESCRIPTORS:
            raise self._too_many(counts, tokens)

    def _over_placements(self, counts: Sequence[int]) -> int:
        return sum(counts[placement.unit] for placement in self.placements if placement.unit < len(counts))

    def _too_many(self, counts: Sequence[int], tokens: tuple[int, int]) -> Refusal:
        largest = max(range(len(counts)), key=counts.__getitem__)
        what = f"tokens {tokens[0]} to {tokens[1]}"
        total = self._over_placements(counts)
        return too_many(what, total, *self.examples[largest], self.units[largest].run_bytes)


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


class Piece(NamedTuple):
    """A layer pair with what its geometry class has in common: fields and, for the proof, walks and sums, relative to
    the bases. number: of the class."""

    pair: LayerPair
    number: int
    fields: tuple[FieldPair, ...]
    walks: tuple[tuple[int, TokenWalk, TokenWalk], ...]
    sums: tuple[Sums, ...]
    chunk_tokens: int


def compile(
    consumer: CacheLayout,
    producer: CacheLayout,
    share: Share,
    *,
    by_layer: bool = False,
    examined: Examinations | None = None,
    tick: Callable[[], None] = lambda: None,
) -> PairPlan:
    """Everything about a share that does not depend on a request; only the share's layers are looked at.

    by_layer: each layer gets a placement of its own, as a writer needs it that sends layers one after another; else
    neighbours that touch on both sides move together, in fewer descriptors. examined: what `layout.check` has seen of
    either side's layouts. tick: called before each step that peers can make long; it may raise to give up.

    Raises Refusal, naming layer, field and both values, if a layout is unsound (`layout.check`), if the two do not mean
    the same bytes (dtype, scales, heads, contexts, groups, fields, content sizes, opaque tags, tiles, shared storage),
    or if a few tokens would take more than MAX_DESCRIPTORS.
    """
    names = {part.name for part in share.layers}
    consumer, producer = _only(consumer, names), _only(producer, names)
    check_sound(consumer, producer, examined or (Examined(), Examined()))
    pairs = list(layer_pairs(consumer, producer, share))
    order = {layer.name: i for i, layer in enumerate(consumer.layers)}
    pieces = _pieces(pairs, tick)
    chains = [[piece] for piece in pieces] if by_layer else _chains(pieces)
    chains.sort(key=lambda chain: min(order[piece.pair.consumer.name] for piece in chain))
    units, examples, placements, claims = _units(chains)
    _check_usual(units, examples, placements, tick)
    aliases = _aliases(consumer)
    return PairPlan(
        groups=_groups(pairs),
        units=units,
        examples=examples,
        placements=placements,
        layers=tuple(
            tuple(name for piece in chain for name in aliases[memory_of(piece.pair.consumer)]) for chain in chains
        ),
        claims=claims,
        region_bytes=(
            tuple(region.length_bytes for region in consumer.regions),
            tuple(region.length_bytes for region in producer.regions),
        ),
    )


def _only(layout: CacheLayout, names: set[str]) -> CacheLayout:
    return CacheLayout(layout.regions, tuple(layer for layer in layout.layers if layer.name in names))


def _aliases(layout: CacheLayout) -> dict[Hashable, list[str]]:
    """The names of each memory."""
    names: dict[Hashable, list[str]] = {}
    for layer in layout.layers:
        names.setdefault(memory_of(layer), []).append(layer.name)
    return names


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


def _pieces(pairs: Sequence[LayerPair], tick: Callable[[], None]) -> Iterator[Piece]:
    """Each layer pair with the fields of its geometry class, which are worked out once."""
    classes: dict[Hashable, Piece] = {}
    for pair in pairs:
        key = pair.geometry
        if key not in classes:
            tick()
            both = list(zip(pair.consumer.fields, pair.producer.fields, strict=True))
            fields = tuple(pair_fields(left, right, pair.contexts, *pair[2:]) for left, right in both)
            sums = tuple(walk_rest(left, right, *pair[2:]) for left, right in both)
            walks = tuple(
                (span_tokens(left, pair.contexts[0]), token_walk(pair.consumer, left), token_walk(pair.producer, right))
                for left, right in both
            )
            chunk = common_chunk(pair.consumer.name, fields)
            classes[key] = Piece(pair, len(classes), fields, walks, sums, chunk)
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


def _check_usual(
    units: Sequence[Unit],
    examples: Sequence[tuple[Layer, Layer]],
    placements: Sequence[Placement],
    tick: Callable[[], None],
) -> None:
    """What no request could use is refused at once, and so is what has no pattern."""
    counts, num_boxes = [], 0
    for unit in units:
        tick()
        num_boxes += sum(len(boxes) for boxes in unit.cut(0, unit.chunk_tokens).values())
        check_boxes(num_boxes)
        counts.append(unit.num_runs_of(USUAL_TOKENS))
    total = sum(counts[placement.unit] for placement in placements)
    if total > MAX_DESCRIPTORS:
        largest = max(range(len(counts)), key=lambda index: counts[index])
        raise too_many(f"any {USUAL_TOKENS} tokens", total, *examples[largest], units[largest].run_bytes)


def _units(
    chains: Sequence[Sequence[Piece]],
) -> tuple[tuple[Unit, ...], tuple[tuple[Layer, Layer], ...], tuple[Placement, ...], Claims]:
    """A placement for each chain. Chains that are alike are placements of one unit; claims add up over them."""
    known: dict[Hashable, int] = {}
    units: list[Unit] = []
    examples: list[tuple[Layer, Layer]] = []
    placements: list[Placement] = []
    bases: dict[tuple[int, Scope, int], tuple[Piece, Sums]] = {}
    for chain in chains:
        group, consumer_region, producer_region = chain[0].pair.scope
        key = (group, tuple((piece.pair.geometry, _distance(chain[0], piece)) for piece in chain))
        unit = known.setdefault(key, len(units))
        if unit == len(units):
            chunk = chain[0].chunk_tokens
            examples.append((chain[0].pair.consumer, chain[0].pair.producer))
            units.append(Unit(group, chunk, _fields(chain), select(chain[0].pair.contexts, chunk)))
        begin = chain[0].pair.consumer.base_bytes, chain[0].pair.producer.base_bytes
        placements.append(Placement(unit, consumer_region, producer_region, *begin))
        for piece in chain:
            which = (unit, piece.pair.scope, piece.number)
            one = sums_of_point(piece.pair.consumer.base_bytes, piece.pair.producer.base_bytes)
            bases[which] = (piece, bases[which][1].plus(one) if which in bases else one)
    return tuple(units), tuple(examples), tuple(placements), _claims(bases)


def _claims(bases: Mapping[tuple[int, Scope, int], tuple[Piece, Sums]]) -> Claims:
    """bases: by unit, scope and geometry class, the sums over where its layers begin."""
    claims: Claims = {}
    for (unit, scope, _), (piece, total) in bases.items():
        for walk, rest in zip(piece.walks, piece.sums, strict=True):
            key = ClaimKey(unit, *scope, *walk)
            claims[key] = claims.get(key, NOTHING).plus(rest.times(total))
    return claims
