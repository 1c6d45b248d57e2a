"""What moves between every pair of ranks of two engines, for a block and for a request: the real planner's answer.

Nothing is counted by hand: shares come from `topology.sources`, descriptors from `plan.compile` and `bind`, each with
its proof. What the planner refuses is collected over all pairs of ranks, instead of ending at the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.cli.errors import Problem
from kvferry.cli.plan.engines import CacheGroup, Engine
from kvferry.cli.plan.requests import Request, one_block
from kvferry.layout import CacheLayout, Heads
from kvferry.plan import PairPlan, PlanBatch, Refusal, TransferPlan, compile, prove_shares
from kvferry.plan.limits import SEE_PLAN
from kvferry.records import EngineRecord, compare
from kvferry.topology import Share, ShareLayer, TopologyError, sources


class Numbers(NamedTuple):
    """What some tokens take: descriptors, their bytes in all, and the shortest and the longest of them in bytes."""

    tokens: int
    descriptors: int
    num_bytes: int
    shortest: int
    longest: int

    @property
    def mean_bytes(self) -> float:
        return self.num_bytes / max(self.descriptors, 1)


class Owned(NamedTuple):
    """The descriptors of one batch, and whose they are: layers that move together."""

    batch: PlanBatch
    layers: tuple[str, ...]


class Part(NamedTuple):
    """Layers of one kind that one rank takes from another. block: None where the cache is not cut into blocks."""

    label: str
    layers: tuple[ShareLayer, ...]
    block: Numbers | None
    request: Numbers


@dataclass(frozen=True)
class Pair:
    """A consumer rank, and what it takes of a producer rank. descriptors: the request's, layer by layer."""

    consumer: int
    share: Share
    parts: tuple[Part, ...]
    descriptors: tuple[Owned, ...]
    request: Numbers
    required_bytes: int

    @property
    def producer(self) -> int:
        return self.share.producer_rank


class Refused(NamedTuple):
    """Something that can't be planned. pairs: the (consumer rank, producer rank) that it keeps apart, None for all."""

    error: Refusal | TopologyError
    pairs: list[tuple[int | None, int | None]]

    @property
    def text(self) -> str:
        return str(self.error).replace(SEE_PLAN, "")


@dataclass(frozen=True)
class Survey:
    """Two engines, the request that was planned, and what came out.

    adjacent_descriptors: of the same request if block ids follow one another on both sides, None if not planned.
    notes: what the request leaves out.
    """

    consumer: Engine
    producer: Engine
    request: Request
    pairs: tuple[Pair, ...]
    refused: tuple[Refused, ...]
    adjacent_descriptors: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Numbers:
        """The request's, over all pairs of ranks."""
        return added(self.request.num_tokens, (pair.request for pair in self.pairs))


def survey(consumer: Engine, producer: Engine, request: Request, consumer_ranks: Sequence[int] | None = None) -> Survey:
    """Plan the request between all ranks, or only for some of the consumer's.

    Raises Problem if there is too much to compare.
    """
    ranks = range(len(consumer.ranks)) if consumer_ranks is None else consumer_ranks
    _check_cost(consumer, producer, len(ranks))
    refused = _Refusals()
    try:
        record = EngineRecord("", "", "", producer.fingerprint, _kinds(producer), ())
        compare(consumer.fingerprint, _kinds(consumer), record)
    except Refusal as error:
        refused.add(error, None, None)
    planner = _Planner(consumer, producer, request)
    pairs: list[Pair] = []
    for rank in ranks:
        try:
            shares = _shares(consumer, producer, rank)
        except (Refusal, TopologyError) as error:
            refused.add(error, rank, None)
            continue
        for share in shares:
            try:
                pairs.append(planner.pair(rank, share))
            except Refusal as error:
                refused.add(error, rank, share.producer_rank)
    return Survey(consumer, producer, request, tuple(pairs), tuple(refused.found.values()))


def descriptors(found: Survey, request: Request) -> int | None:
    """How many another request between the same ranks would take; None if it is refused."""
    planner = _Planner(found.consumer, found.producer, request)
    try:
        return sum(planner.pair(pair.consumer, pair.share).request.descriptors for pair in found.pairs)
    except Refusal:
        return None


MOST_COMPARED = 1 << 21
"""Heads of one rank with ranks of the other side that have the layer: some seconds."""


def _check_cost(consumer: Engine, producer: Engine, num_ranks: int) -> None:
    owners = Counter(layer.name for layout in producer.layouts for layer in layout.layers)
    heads = (layer.heads.count * owners[layer.name] for layout in consumer.layouts for layer in layout.layers)
    compared = sum(heads) * num_ranks // len(consumer.ranks)
    if compared > MOST_COMPARED:
        raise Problem(
            f"{len(consumer.ranks):,} ranks of the consumer and {len(producer.ranks):,} of the producer: "
            f"{compared:,} pairs of heads to compare, at most {MOST_COMPARED:,} are understood"
        )


class _Refusals:
    """Refusals by their text, since most come once for every pair of ranks."""

    def __init__(self) -> None:
        self.found: dict[str, Refused] = {}

    def add(self, error: Refusal | TopologyError, consumer: int | None, producer: int | None) -> None:
        self.found.setdefault(str(error), Refused(error, [])).pairs.append((consumer, producer))


def _kinds(engine: Engine) -> tuple[str, ...]:
    return tuple(group.label for group in engine.groups)


def _shares(consumer: Engine, producer: Engine, rank: int) -> tuple[Share, ...]:
    one = consumer.ranks[rank]
    shares = sources(one.layout, one.tp_rank, one.tp_size, producer.layouts)
    prove_shares(one.layout, [(share, producer.layouts[share.producer_rank]) for share in shares])
    return shares


class _Planner:
    """Plans pairs of ranks; pairs whose layouts agree in everything but the heads' numbers are planned once."""

    def __init__(self, consumer: Engine, producer: Engine, request: Request) -> None:
        self._consumer = consumer
        self._producer = producer
        self._request = request
        self._block = one_block(consumer, producer)
        self._known: dict[Hashable, Pair] = {}

    def pair(self, rank: int, share: Share) -> Pair:
        """Raises Refusal if what the rank is to take can't be planned."""
        mine, theirs = self._consumer.layouts[rank], self._producer.layouts[share.producer_rank]
        geometry = _geometry(mine, share), _geometry(theirs, share)
        if geometry not in self._known:
            self._known[geometry] = self._pair(mine, theirs, share)
        known = self._known[geometry]
        moved = tuple(zip(known.parts, self._kinds(mine, share).values(), strict=True))
        parts = tuple(part._replace(layers=tuple(layers)) for part, (_, layers) in moved)
        return replace(known, consumer=rank, share=share, parts=parts)

    def _pair(self, mine: CacheLayout, theirs: CacheLayout, share: Share) -> Pair:
        whole = compile(mine, theirs, share)
        plan = whole.bind(*self._request)
        numbers = _numbers(self._request, plan)
        parts = []
        kinds = self._kinds(mine, share)
        for label, (group, layers) in kinds.items():
            only = Share(share.producer_rank, tuple(layers))
            pair = compile(mine, theirs, only)
            request = numbers if len(kinds) == 1 else _numbers(self._request, pair.bind(*self._request))
            block = None
            if not group.kept.keeps_state:
                tokens = self._block._replace(end_token=min(group.tokens, self._block.end_token))
                block = _numbers(tokens, pair.bind(*tokens))
            parts.append(Part(label, only.layers, block, request))
        return Pair(0, share, tuple(parts), _owned(whole, plan), numbers, plan.required_bytes)

    def _kinds(self, mine: CacheLayout, share: Share) -> dict[str, tuple[CacheGroup, list[ShareLayer]]]:
        """The share's layers by the kind of their group."""
        groups = {layer.name: layer.group for layer in mine.layers}
        found: dict[str, tuple[CacheGroup, list[ShareLayer]]] = {}
        for layer in share.layers:
            group = self._consumer.groups[groups[layer.name]]
            found.setdefault(group.label, (group, []))[1].append(layer)
        return found


def _geometry(layout: CacheLayout, share: Share) -> Hashable:
    """All of a rank's layout that decides what a share of it is, heads counted from the start of the rank's own."""
    layers = {layer.name: layer for layer in layout.layers}
    seen = []
    for part in share.layers:
        layer = layers[part.name]
        start = layer.heads.start
        own = msgspec.structs.replace(layer, heads=Heads(0, layer.heads.count, layer.heads.total))
        seen.append((own, part.start - start, part.stop - start))
    return layout.regions, tuple(seen)


def _owned(pair: PairPlan, plan: TransferPlan) -> tuple[Owned, ...]:
    found = []
    for placement, number, start, stop in plan.slices:
        batch, span = plan.batches[number], slice(start, stop)
        columns = (batch.consumer_offsets[span], batch.producer_offsets[span], batch.lengths[span])
        part = PlanBatch(batch.consumer_region, batch.producer_region, *columns)
        found.append(Owned(part, pair.layers[placement]))
    return tuple(found)


def _numbers(request: Request, plan: TransferPlan) -> Numbers:
    lengths = np.concatenate([batch.lengths for batch in plan.batches]) if plan.batches else np.zeros(0, np.int64)
    ends = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    return Numbers(request.num_tokens, len(lengths), plan.num_bytes, *ends)


def added(tokens: int, numbers: Iterable[Numbers]) -> Numbers:
    """Of several pairs or parts together; those that move nothing do not count as the shortest."""
    some: Sequence[Numbers] = [one for one in numbers if one.descriptors]
    return Numbers(
        tokens,
        sum(one.descriptors for one in some),
        sum(one.num_bytes for one in some),
        min((one.shortest for one in some), default=0),
        max((one.longest for one in some), default=0),
    )
