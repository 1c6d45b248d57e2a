"""Ranks and shards: who owns which heads of which layers, who reads from or writes to whom.

Pure functions of both sides' announced layouts, so that both sides can evaluate them and get the same answer. One rule
covers unequal TP, sizes that do not divide, replicas and pipeline stages: intersect the head intervals of each layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from kvferry.layout import CacheLayout, Context, Heads, Layer, Refusal


class TopologyError(ValueError):
    """A TP size or rank that cannot be; the text names both numbers."""


class ShareLayer(msgspec.Struct, frozen=True):
    """The KV heads [start, stop) of one layer, counted over the whole model."""

    name: str
    start: int
    stop: int


class Share(msgspec.Struct, frozen=True):
    """What one consumer rank takes from one producer rank; producer_rank is an index into the producers' sequence."""

    producer_rank: int
    layers: tuple[ShareLayer, ...]


def kv_heads(tp_rank: int, tp_size: int, total_heads: int) -> Heads:
    """The KV heads of a TP rank: a slice of them, or with more ranks than heads one head, held by several ranks.

    total_heads is the model's; heads per rank times tp_size is not that once heads are replicated. Raises TopologyError
    unless one of the two numbers is a multiple of the other.
    """
    _check_rank("tp_rank", tp_rank, "tp_size", tp_size)
    if total_heads < 1:
        raise TopologyError(f"total_heads {total_heads}: must be positive")
    if max(tp_size, total_heads) % min(tp_size, total_heads):
        raise TopologyError(f"tp_size {tp_size} and total_heads {total_heads}: one must be a multiple of the other")
    if tp_size > total_heads:
        return Heads(tp_rank * total_heads // tp_size, 1, total_heads)
    count = total_heads // tp_size
    return Heads(tp_rank * count, count, total_heads)


def remote_tp_rank(local_rank: int, local_tp: int, remote_tp: int) -> int:
    """The remote rank that a rank pairs with when a cache is the same on all ranks and one size divides the other."""
    _check_multiple("local_tp", local_tp, "remote_tp", remote_tp)
    _check_rank("local_rank", local_rank, "local_tp", local_tp)
    if remote_tp >= local_tp:
        return local_rank * (remote_tp // local_tp)
    return local_rank // (local_tp // remote_tp)


def expected_ack_count(producer_tp: int, consumer_tp: int) -> int:
    """Consumer ranks that read from each producer rank, if any does; a larger consumer must be a multiple."""
    if 1 <= consumer_tp <= producer_tp:
        return 1
    _check_multiple("consumer_tp", consumer_tp, "producer_tp", producer_tp)
    return consumer_tp // producer_tp


def sources(
    consumer: CacheLayout, consumer_rank: int, num_consumer_ranks: int, producers: Sequence[CacheLayout]
) -> tuple[Share, ...]:
    """What a consumer rank takes from which producer ranks: each head and token of each of its layers from one of them.

    consumer_rank, num_consumer_ranks: its place among the ranks that hold the same layers (its tp_rank and tp_size).
    They only choose among replicas, which are producer ranks with the same head and the same context. Those consumer
    ranks that need the head, and tokens of the context, are dealt evenly, in order, over its replicas: of two replicas
    neither serves two consumer ranks more than the other. For a cache that is the same on every rank this gives
    `remote_tp_rank`.
    producers: the layouts of all ranks of the producer's engine, of every pipeline stage, in rank order.

    Shares come in producer order, their layers in the consumer's order. Raises Refusal, naming the layer and both
    values, where total head counts differ or no producer rank holds a head, TopologyError for an impossible rank.
    """
    _check_rank("consumer_rank", consumer_rank, "num_consumer_ranks", num_consumer_ranks)
    owners = _owners(producers)
    taken: dict[int, list[ShareLayer]] = {}
    for layer in consumer.layers:
        for context, holders in _replicas(layer, owners.get(layer.name, [])).items():
            turn = _turn(consumer_rank, num_consumer_ranks, layer.heads, layer.context, context)
            for rank, start, stop in _pieces(layer, holders, turn):
                taken.setdefault(rank, []).append(ShareLayer(layer.name, start, stop))
    return tuple(Share(rank, tuple(taken[rank])) for rank in sorted(taken))


def targets(
    producer_rank: int,
    producers: Sequence[CacheLayout],
    consumers: Sequence[CacheLayout],
    consumer_tp_size: int | None = None,
) -> tuple[tuple[int, Share], ...]:
    """The consumer ranks that a producer rank writes to, each with its share: the inverse of `sources`.

    consumers: all ranks of the consumer's engine, TP ranks innermost; consumer_tp_size: None if that is all of them.
    """
    _check_rank("producer_rank", producer_rank, "producers", len(producers))
    tp_size = len(consumers) if consumer_tp_size is None else consumer_tp_size
    return tuple(
        (rank, share)
        for rank, consumer in enumerate(consumers)
        for share in sources(consumer, rank % tp_size, tp_size, producers)
        if share.producer_rank == producer_rank
    )


def digest(layouts: Sequence[CacheLayout]) -> bytes:
    """16 bytes that change with what `sources` depends on: layer names, groups, heads and contexts, rank by rank."""
    seen = [[(layer.name, layer.group, layer.heads, layer.context) for layer in layout.layers] for layout in layouts]
    return hashlib.blake2b(msgspec.msgpack.encode(seen), digest_size=16).digest()


Owner = tuple[int, Layer]
"""A producer rank, and what it has under a layer's name."""


def _owners(producers: Sequence[CacheLayout]) -> dict[str, list[Owner]]:
    """Layer name -> the producer ranks that hold some of its heads."""
    owners: dict[str, list[Owner]] = {}
    for rank, producer in enumerate(producers):
        for layer in producer.layers:
            owners.setdefault(layer.name, []).append((rank, layer))
    return owners


def _replicas(layer: Layer, owners: Sequence[Owner]) -> dict[Context, list[Owner]]:
    """The owners by their context, as far as that has tokens which the consumer holds too."""
    found: dict[Context, list[Owner]] = {}
    for rank, theirs in owners:
        if theirs.heads.total != layer.heads.total:
            raise Refusal(f"layer {layer.name}: total KV heads", layer.heads.total, theirs.heads.total)
        context = theirs.context
        if context.interleave < 1 or not 0 <= context.rank < context.size:
            raise Refusal(f"layer {layer.name}: context", layer.context, context, "there is no such rank")
        if layer.context.overlaps(context):
            found.setdefault(context, []).append((rank, theirs))
    if owners and not found:
        held = sorted({theirs.context for _, theirs in owners})
        raise Refusal(f"layer {layer.name}: context", layer.context, held, "they have no token in common")
    return found or {layer.context: []}


@lru_cache(maxsize=4096)
def _turn(consumer_rank: int, num_consumer_ranks: int, heads: Heads, mine: Context, theirs: Context) -> tuple[int, int]:
    """(i, n): the rank is the i-th of n consumer ranks that need these heads, and tokens of the producer's context.

    Ranks with the same heads are neighbours, and neighbours have the context's ranks in turn, as vLLM places them.
    """
    sharers = max(1, num_consumer_ranks * heads.count // heads.total)
    place = consumer_rank % sharers
    needy = [
        other
        for other in range(sharers)
        if Context((mine.rank + other - place) % mine.size, mine.size, mine.interleave).overlaps(theirs)
    ]
    return needy.index(place), len(needy)


def _pieces(layer: Layer, owners: Sequence[Owner], turn: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """(producer rank, start, stop) over a consumer's heads of one layer, neighbours of one rank as one interval.

    owners: which have the same tokens. turn: (i, n), this is the i-th of n consumer ranks that need these heads.
    """
    piece: tuple[int, int, int] | None = None
    for head, stop in pairwise(_cuts(layer.heads, owners)):
        holders = [rank for rank, theirs in owners if 0 <= head - theirs.heads.start < theirs.heads.count]
        if not holders:
            held = ", ".join(_interval(theirs.heads) for _, theirs in owners)
            theirs_in_words = f"KV heads {held}" if held else "no such layer"
            raise Refusal(f"layer {layer.name}", f"KV head {head}", theirs_in_words)
        rank = holders[turn[0] * len(holders) // turn[1]]
        if piece and piece[0] == rank:
            piece = (rank, piece[1], stop)
            continue
        if piece:
            yield piece
        piece = (rank, head, stop)
    if piece:
        yield piece


def _cuts(heads: Heads, owners: Sequence[Owner]) -> list[int]:
    """Both ends of a consumer's heads, and between them each head at which the ranks that hold it change."""
    first, stop = heads.start, heads.start + heads.count
    ends = {end for _, theirs in owners for end in (theirs.heads.start, theirs.heads.start + theirs.heads.count)}
    return sorted({first, stop} | {end for end in ends if first < end < stop})


def _interval(heads: Heads) -> str:
    return f"{heads.start} to {heads.start + heads.count - 1}"


def _check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise TopologyError(f"{size_name} {size}: must be positive")
    if not 0 <= rank < size:
        raise TopologyError(f"{rank_name} {rank}: must be in [0, {size}), {size_name} is {size}")


def _check_multiple(name: str, size: int, other_name: str, other: int) -> None:
    if size < 1 or other < 1:
        raise TopologyError(f"{name} {size} and {other_name} {other}: sizes must be positive")
    if max(size, other) % min(size, other):
        raise TopologyError(f"{name} {size} and {other_name} {other}: one must be a multiple of the other")
