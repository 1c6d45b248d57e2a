"""What a case of bulk.py has to do with, by name, so that counts show that nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator

from bulk_drawn import BLOCK_OUTERMOST, KV_HEADS, TP_SIZES, Engine, Engines, Overlaid, Request
from drawn import KV_LAYOUTS, LAYOUTS, Pool

from kvferry.layout import PHYSICAL_ORDERS, STATE_TOKENS, CacheLayout, Layer
from kvferry.topology import Share, ShareLayer

ALL_LAYOUTS = tuple(dict.fromkeys((*KV_LAYOUTS, *PHYSICAL_ORDERS, *(name for one in LAYOUTS.values() for name in one))))

FEATURES = (
    "producer's TP larger",
    "consumer's TP larger",
    "TP sizes that do not divide",
    "heads from several ranks",
    "some of a rank's heads",
    "replicated heads",
    "MLA, the same on all ranks",
    "other layers on the ranks (pipeline stages)",
    "DCP on the producer only",
    "DCP on the consumer only",
    "DCP alike",
    "DCP unequal",
    "DCP of replicated heads",
    *(f"layout {name}" for name in ALL_LAYOUTS),
    "layouts differ",
    "layouts mixed in one rank",
    "opaque tiles",
    "opaque cells",
    "state",
    "state with the order of its axes changed",
    "kernel blocks",
    "kernel blocks unequal",
    "padded pages",
    "block sizes unequal, one divides",
    "block sizes unequal, none divides",
    "several groups",
    "groups overlaid",
    "state overlaid with attention",
    "two names of one memory",
    "hit inside a block",
    "last block partly filled",
    "null blocks",
    "surplus in the last block",
    "sliding window",
    "window begins inside a consumer's block",
    "window begins inside a producer's block",
    "window with unequal block sizes",
    "window's first block no longer whole on the producer",
    "surplus before a window",
)


def split_name(producer_tp: int, consumer_tp: int) -> str:
    return f"TP {producer_tp} to {consumer_tp}"


def splits() -> set[str]:
    """All pairs of TP sizes, and with each the numbers of KV heads that both sizes can share out."""
    found = {split_name(producer, consumer) for producer in TP_SIZES for consumer in TP_SIZES}
    for heads in KV_HEADS:
        legal = [tp for tp in TP_SIZES if max(tp, heads) % min(tp, heads) == 0]
        found |= {f"{split_name(producer, consumer)}, {heads} KV heads" for producer in legal for consumer in legal}
    return found


def of_pair(engines: Engines, mine: CacheLayout, theirs: CacheLayout, share: Share) -> frozenset[str]:
    """What does not depend on the request."""
    left, right = ({layer.name: layer for layer in layout.layers} for layout in (mine, theirs))
    split = split_name(engines.producer.recipe.tp_size, engines.consumer.recipe.tp_size)
    heads = {part.name: left[part.name].heads.total for part in share.layers if _has_kv_heads(left[part.name])}
    found = {split, *(f"{split}, {total} KV heads" for total in heads.values())}
    found.update(_of_sizes(engines.consumer.recipe.tp_size, engines.producer.recipe.tp_size))
    for part in share.layers:
        found.update(_of_heads(engines, part, left[part.name], right[part.name]))
        found.update(_of_contexts(left[part.name], right[part.name]))
        found.update(_of_layers(left[part.name], right[part.name]))
    names = {part.name for part in share.layers}
    kept = [_kept(engine) for engine in (engines.consumer, engines.producer)]
    own = [name for name in names if name in kept[0]]
    for one in kept:
        found.update(f"layout {one[name][0]}" for name in own)
        found.update("padded pages" for name in own if one[name][1])
        if len({one[name][0] for name in own}) > 1:
            found.add("layouts mixed in one rank")
    if any(kept[0][name][0] != kept[1][name][0] for name in own):
        found.add("layouts differ")
    if any(sorted((kept[0][name][0], kept[1][name][0])) == ["DS", "SD"] for name in own):
        found.add("state with the order of its axes changed")
    if left.keys() != right.keys():
        found.add("other layers on the ranks (pipeline stages)")
    if names & set(engines.other_names.values()):
        found.add("two names of one memory")
    for side in (left, right):
        found.update(_of_groups([side[name] for name in names]))
    return frozenset(found)


def of_request(engines: Engines, request: Request) -> dict[int, frozenset[str]]:
    """By group, what a consumer's block table and the wanted tokens have."""
    found = {}
    for group, (size, _) in enumerate(engines.block_sizes):
        table = request.tables[0][group]
        first, last = request.first // size, (request.end - 1) // size
        seen = {"null blocks"} if -1 in table[first : last + 1] else set()
        if size < STATE_TOKENS:
            seen |= {"hit inside a block"} if request.first % size and table[first] >= 0 else set()
            seen |= {"last block partly filled"} if request.end % size and table[last] >= 0 else set()
            seen.update(_of_window(request, group, engines.block_sizes[group]))
        found[group] = frozenset(seen)
    return found


def _of_window(request: Request, group: int, sizes: tuple[int, int]) -> Iterator[str]:
    """Of a window that begins among the wanted tokens, where the consumer has a block."""
    start, (mine, theirs) = request.window_starts[group], sizes
    if not request.first < start < request.end or request.tables[0][group][start // mine] < 0:
        return
    yield "sliding window"
    if start % mine:
        yield "window begins inside a consumer's block"
    if start % theirs:
        yield "window begins inside a producer's block"
    if mine != theirs:
        yield "window with unequal block sizes"
    before = range(max(request.first, start // mine * mine), start)
    if any(request.tables[1][group][token // theirs] < 0 for token in before):
        yield "window's first block no longer whole on the producer"


def _has_kv_heads(layer: Layer) -> bool:
    return layer.fields[0].name in ("k", "tile", "cell")


def _of_sizes(mine: int, theirs: int) -> Iterator[str]:
    if mine != theirs:
        yield "consumer's TP larger" if mine > theirs else "producer's TP larger"
    if max(mine, theirs) % min(mine, theirs):
        yield "TP sizes that do not divide"


def _of_heads(engines: Engines, part: ShareLayer, left: Layer, right: Layer) -> Iterator[str]:
    heads = part.stop - part.start
    if left.fields[0].name == "latent":
        yield "MLA, the same on all ranks"
        return
    if heads < left.heads.count:
        yield "heads from several ranks"
    if heads < right.heads.count:
        yield "some of a rank's heads"
    if max(engines.consumer.recipe.tp_size, engines.producer.recipe.tp_size) > left.heads.total:
        yield "replicated heads"


def _of_contexts(left: Layer, right: Layer) -> Iterator[str]:
    if left.context.is_whole and right.context.is_whole:
        return
    if left.context.is_whole or right.context.is_whole:
        yield "DCP on the producer only" if left.context.is_whole else "DCP on the consumer only"
    else:
        yield "DCP alike" if left.context == right.context else "DCP unequal"
    if left.fields[0].name != "latent":
        yield "DCP of replicated heads"


def _of_layers(left: Layer, right: Layer) -> Iterator[str]:
    kernel_blocks = [sum(axis.dim == "token" and axis.size > 1 for axis in one.fields[0].axes) for one in (left, right)]
    if max(kernel_blocks) > 1:
        yield "kernel blocks"
        if kernel_blocks[0] != kernel_blocks[1]:
            yield "kernel blocks unequal"
    if left.fields[0].opaque is not None:
        yield {"tile": "opaque tiles", "cell": "opaque cells", "part": "state"}[left.fields[0].name]
    if left.block_size != right.block_size:
        divides = max(left.block_size, right.block_size) % min(left.block_size, right.block_size) == 0
        yield "block sizes unequal, one divides" if divides else "block sizes unequal, none divides"


def _of_groups(layers: list[Layer]) -> Iterator[str]:
    if len({layer.group for layer in layers}) > 1:
        yield "several groups"
    places: dict[tuple[int, int], dict[int, bool]] = {}
    for layer in layers:
        at = places.setdefault((layer.region, layer.base_bytes), {})
        at[layer.group] = layer.block_size == STATE_TOKENS
    for groups in places.values():
        if len(groups) > 1:
            yield "groups overlaid"
        if len(set(groups.values())) > 1:
            yield "state overlaid with attention"


def _kept(engine: Engine) -> dict[str, tuple[str, bool]]:
    """For each layer how an engine keeps it: the layout's name, and whether its pages are padded."""
    found = {}
    for stage in engine.recipe.stages:
        if isinstance(stage, Pool):
            found.update({layer.name: (stage.order, False) for layer in stage.layers})
            continue
        for layer, slot in zip(stage.layers, stage.slots, strict=True):
            padded = slot.padding > 0 and slot.layout in BLOCK_OUTERMOST
            found[layer.name] = slot.layout, padded or isinstance(stage, Overlaid)
    return found
