"""Where descriptors explode, and what other settings would make of the same request, found by planning it with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeVar

from kvferry.cli.errors import Problem
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.requests import Request, longest_block, scattered
from kvferry.cli.plan.sides import CPU_LAYOUTS, Side
from kvferry.cli.plan.survey import Numbers, Pair, Part, Survey, added, survey
from kvferry.layout import PHYSICAL_ORDERS
from kvferry.plan.limits import MAX_DESCRIPTORS

FEW_BYTES = 4096
"""A descriptor costs about as much as moving so many bytes."""

MANY_DESCRIPTORS = 8
"""For a block of one layer."""

WORTH_IT = 2
"""Advice must save at least this factor of descriptors."""

Value = TypeVar("Value", str, int)

Maker = Callable[[str, Side, int], Engine]
"""An engine by role, settings, and the tokens that it must have room for."""


class Warning(NamedTuple):
    """Layers of one kind that take too many descriptors, on the worst pair of ranks."""

    pair: Pair
    part: Part

    @property
    def numbers(self) -> Numbers:
        return self.part.block or self.part.request


class Change(NamedTuple):
    """Other settings of one side or both. settings: (side, as it is typed)."""

    settings: tuple[tuple[str, str], ...]
    consumer: Side
    producer: Side

    @property
    def joins_layers(self) -> bool:
        """Whether all layers of a block come to lie together, which fewer attention backends can do."""
        return any(value.startswith("layout=B") for _, value in self.settings)


class Advice(NamedTuple):
    """What a change would make of the request, for one consumer rank, from all the producer ranks that it reads.

    num_sources: how many these are. now: without the change, None if that is refused.
    """

    change: Change
    consumer_rank: str
    num_sources: int
    now: Numbers | None
    then: Numbers


def warnings(found: Survey) -> list[Warning]:
    """The worst pair of each kind of layers whose descriptors are too many or too short."""
    worst: dict[str, Warning] = {}
    for pair in found.pairs:
        for part in pair.parts:
            one = Warning(pair, part)
            known = worst.get(part.label)
            if _is_too_much(one) and (known is None or one.numbers.descriptors > known.numbers.descriptors):
                worst[part.label] = one
    return list(worst.values())


def _is_too_much(one: Warning) -> bool:
    numbers, layers = one.numbers, len(one.part.layers)
    many = one.part.block is not None and numbers.descriptors > MANY_DESCRIPTORS * layers
    return many or (numbers.descriptors > layers and numbers.mean_bytes < FEW_BYTES)


def advise(
    found: Survey, consumer: Side, producer: Side, make: Maker, refused: Request | None = None
) -> tuple[Advice, ...]:
    """The best change that keeps each layer's cache apart, and the best of all if that is better still.

    Planned for one consumer rank, the one with most descriptors. refused: a longer request than that of `found`, which
    takes too many of them, and for which the advice is then.
    """
    tokens = found.request.num_tokens
    taken = [
        added(tokens, (pair.request for pair in found.pairs if pair.consumer == rank))
        for rank in range(len(found.consumer.ranks))
    ]
    planner = _Alternatives(found, max(range(len(taken)), key=lambda one: taken[one].descriptors), make)
    label, changes = found.consumer.ranks[planner.rank].label, list(_changes(found, consumer, producer))
    num_sources = sum(pair.consumer == planner.rank for pair in found.pairs)
    now = None if refused else taken[planner.rank]
    least, advice = now.descriptors // WORTH_IT + 1 if now else MAX_DESCRIPTORS, []
    end = (refused or found.request).end_token
    for some in ([change for change in changes if not change.joins_layers], changes):
        change = planner.best(some)
        then = None if change is None else planner.numbers(change, end)
        if change is not None and then is not None and then.descriptors < least:
            advice.append(Advice(change, label, num_sources, now, then))
            least = then.descriptors
    return tuple(advice)


@dataclass(frozen=True)
class _Alternatives:
    """Plans changes for one consumer rank: many of them for a few tokens, the best for the whole request."""

    found: Survey
    rank: int
    make: Maker

    def best(self, changes: Sequence[Change]) -> Change | None:
        """The one with fewest descriptors; of equal ones that with the fewest settings, and then the first."""
        tokens = max(longest_block(self.found.consumer), longest_block(self.found.producer))
        sample = min(tokens, self.found.request.end_token)
        planned = [(self.numbers(change, sample), change) for change in changes]
        able = [(numbers.descriptors, len(change.settings), change) for numbers, change in planned if numbers]
        return min(able, key=lambda one: one[:2])[2] if able else None

    def numbers(self, change: Change, num_tokens: int) -> Numbers | None:
        """What the first tokens take after a change; None if that can't be."""
        room = max(num_tokens, *(longest_block(engine) for engine in (self.found.consumer, self.found.producer)))
        try:
            engines = self.make("consumer", change.consumer, room), self.make("producer", change.producer, room)
            after = survey(*engines, scattered(*engines, 0, num_tokens), consumer_ranks=(self.rank,))
        except Problem:
            return None
        return None if after.refused else after.total


def _changes(found: Survey, consumer: Side, producer: Side) -> Iterator[Change]:
    """Settings that could help those layers that take too many: memory orders, blocks, runs; or a window's order."""
    labels = {one.part.label for one in warnings(found)}
    states = {group.label for group in found.consumer.groups if group.kept.keeps_state}
    keep = [(None, None)]
    orders = list(_orders(consumer.layout, producer.layout)) if labels - states else keep
    blocks = list(_alike(_block_tokens(found.consumer), _block_tokens(found.producer))) if labels - states else keep
    runs = list(_longer_runs(found, consumer, producer)) if labels - states else keep
    windows = list(_alike(consumer.conv, producer.conv)) if labels & states else keep
    for choice in product(orders, blocks, runs, windows):
        ours, theirs = ({key: one[side] for key, one in zip(_KEYS, choice, strict=True)} for side in (0, 1))
        settings = (*_settings("consumer", ours), *_settings("producer", theirs))
        if settings:
            yield Change(settings, consumer._replace(**_given(ours)), producer._replace(**_given(theirs)))


_KEYS = ("layout", "block", "interleave", "conv")


def _orders(consumer: str, producer: str) -> Iterator[tuple[str | None, str | None]]:
    """None keeps a side as it is; a CPU's attention has only one order."""
    yield None, None
    for order in PHYSICAL_ORDERS:
        ours = None if order == consumer or consumer in CPU_LAYOUTS else order
        theirs = None if order == producer or producer in CPU_LAYOUTS else order
        yield from (pair for pair in dict.fromkeys(((ours, None), (None, theirs), (ours, theirs))) if any(pair))


def _longer_runs(found: Survey, consumer: Side, producer: Side) -> Iterator[tuple[int | None, int | None]]:
    """Context parallel ranks as they are, or each dealt whole blocks of its own."""
    yield None, None
    if consumer.dcp != producer.dcp:
        ours, theirs = _block_tokens(found.consumer) // consumer.dcp, _block_tokens(found.producer) // producer.dcp
        yield (
            ours if consumer.dcp > 1 and ours != consumer.interleave else None,
            theirs if producer.dcp > 1 and theirs != producer.interleave else None,
        )


def _alike(consumer: Value, producer: Value) -> Iterator[tuple[Value | None, Value | None]]:
    """As they are, or either side as the other."""
    yield None, None
    if consumer != producer:
        yield producer, None
        yield None, consumer


def _block_tokens(engine: Engine) -> int:
    return next((group.tokens for group in engine.groups if not group.kept.keeps_state), 0)


def _given(new: Mapping[str, str | int | None]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if value is not None}


def _settings(role: str, new: Mapping[str, str | int | None]) -> list[tuple[str, str]]:
    return [(role, f"{key}={value}") for key, value in _given(new).items()]
