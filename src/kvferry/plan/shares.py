"""Do a consumer rank's shares, all together, bring each of its bytes once and from one place?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import lcm

import numpy as np

from kvferry.layout import CacheLayout, Context, Heads, Layer, Refusal, memory_of
from kvferry.plan.proof import Unproven
from kvferry.topology import Share

Shares = Sequence[tuple[Share, CacheLayout]]
"""Each with the layout of its producer rank."""

MAX_HELD = 1 << 22
"""Tokens after which the contexts of both sides repeat, times producers, over all layers that differ in them: those in
use repeat within a few blocks."""


def prove_shares(consumer: CacheLayout, shares: Shares) -> None:
    """Raise Unproven unless each (layer, head, token) of the consumer is in exactly one share, whose producer holds it;
    Refusal where names of one memory of the consumer come from different memories."""
    _prove_coverage(consumer, shares)
    _prove_aliases(consumer, shares)


def _prove_coverage(consumer: CacheLayout, shares: Shares) -> None:
    served: dict[str, dict[int, list[Context]]] = {}
    for share, producer in shares:
        held = {layer.name: layer for layer in producer.layers}
        for part in share.layers:
            layer = held.get(part.name)
            if layer is None or not _has(layer.heads, part.start, part.stop):
                held_by = "no such layer" if layer is None else layer.heads
                raise Unproven(f"layer {part.name}: heads {part.start} to {part.stop}", "a share of them", held_by)
            for head in range(part.start, part.stop):
                served.setdefault(part.name, {}).setdefault(head, []).append(layer.context)
    counter = _Counter()
    for layer in consumer.layers:
        contexts = served.pop(layer.name, {})
        first, last = layer.heads.start, layer.heads.start + layer.heads.count - 1
        if len(contexts) != layer.heads.count or (min(contexts), max(contexts)) != (first, last):
            raise Unproven(f"layer {layer.name}: heads covered", f"{first} to {last}", sorted(contexts))
        for head, holders in sorted(contexts.items()):
            times = counter.times_covered(f"layer {layer.name}", layer.context, *holders)
            if times != [1]:
                raise Unproven(f"layer {layer.name}, head {head}: times that a token is covered", [1], times)
    if served:
        raise Unproven("layers covered", [layer.name for layer in consumer.layers], sorted(served))


def _has(heads: Heads, start: int, stop: int) -> bool:
    return heads.start <= start < stop <= heads.start + heads.count


class _Counter:
    """How often tokens are held: each combination of contexts is looked at once, and all looks together are bounded."""

    def __init__(self) -> None:
        self._known: dict[tuple[Context, ...], list[int]] = {}
        self._left = MAX_HELD

    def times_covered(self, where: str, consumer: Context, *producers: Context) -> list[int]:
        """How often the tokens of a consumer are held by the producers: each number that occurs, in order."""
        key = (consumer, *producers)
        if key not in self._known:
            self._known[key] = self._count(where, consumer, producers)
        return self._known[key]

    def _count(self, where: str, consumer: Context, producers: Sequence[Context]) -> list[int]:
        period = lcm(consumer.period, *(context.period for context in producers if not context.is_whole))
        if period * len(producers) > self._left:
            most = f"at most {self._left // len(producers)} for {len(producers)} producer ranks"
            raise Unproven(f"{where}: tokens after which contexts repeat", most, period)
        self._left -= period * len(producers)
        tokens = np.arange(period, dtype=np.int64)
        tokens = tokens[consumer.holds(tokens)]
        times = np.zeros(len(tokens), np.int64)
        for context in producers:
            times += context.holds(tokens)
        return [int(number) for number in np.unique(times)]


def _prove_aliases(consumer: CacheLayout, shares: Shares) -> None:
    """Names of one memory move once, so all of them must mean the same bytes of the same producer rank."""
    names: dict[Hashable, list[Layer]] = {}
    for layer in consumer.layers:
        names.setdefault(memory_of(layer), []).append(layer)
    aliases = [layers for layers in names.values() if len(layers) > 1]
    if not aliases:
        return
    found = _origins({layer.name: layer for layers in aliases for layer in layers}, shares)
    for first, *others in aliases:
        for other in others:
            if found[first.name] != found[other.name]:
                ranks = [sorted({origin[0] for origin in found[layer.name].values()}) for layer in (first, other)]
                where = f"two, of ranks {ranks[0]} and {ranks[1]}"
                raise Refusal(f"layers {first.name} and {other.name}", "one memory", where)


Origin = tuple[int, Hashable, int]
"""A producer rank, the memory of a layer there, and the head, counted from the start of its shard."""


def _origins(consumer: dict[str, Layer], shares: Shares) -> dict[str, dict[tuple[int, Context], Origin]]:
    """By the name of each layer of the consumer, where its heads (from the start of its shard) and the tokens of a
    producer's context come from."""
    found: dict[str, dict[tuple[int, Context], Origin]] = {name: {} for name in consumer}
    for share, producer in shares:
        held = {layer.name: layer for layer in producer.layers if layer.name in consumer}
        for part in share.layers:
            if part.name in consumer:
                mine, theirs = consumer[part.name], held[part.name]
                memory = memory_of(theirs)
                for head in range(part.start, part.stop):
                    origin = (share.producer_rank, memory, head - theirs.heads.start)
                    found[part.name][head - mine.heads.start, theirs.context] = origin
    return found
