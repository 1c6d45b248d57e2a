"""What is special about some models, caches and requests: one combination for each."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.layout import STATE_TOKENS
from kvmatrix.combination import Combination
from kvmatrix.models import Apart, Attention, Keep, Kept, Latent, Pages, Pool, Projection, Side, Stage, State

FULL, SLIDING, MAMBA, MLA = "FullAttentionSpec", "SlidingWindowSpec", "MambaSpec", "MLAAttentionSpec"


def _apart(*layers: Kept, **more: int) -> tuple[Stage, ...]:
    return (Apart(layers, **more),)


def _kept(layout: str, count: int = 2, **more: int) -> tuple[Stage, ...]:
    return _apart(*((Attention(name), Keep(layout, **more)) for name in "abcdefgh"[:count]))


# Requests.


def _requests() -> Iterator[Combination]:
    producer, consumer = Side(_kept("LBNHC"), tp=2), Side(_kept("cpu"))
    for first, end, what in (
        (0, 1, "one token"),
        (0, 4, "a full block"),
        (0, 5, "a full block and a token"),
        (4, 12, "a hit of whole blocks"),
        (7, 8, "a hit of all but one token"),
        (3, 12, "a hit that ends inside a block"),
        (5, 7, "a hit and an end inside one block"),
        (9, 9, "a full hit: nothing moves"),
        (0, 63, "many blocks"),
    ):
        yield Combination(f"requests: {what}", producer, consumer, first, end)
    for ours, theirs in (("ascending", "ascending"), ("descending", "descending"), ("ascending", "descending")):
        sides = Side(_kept("LBNHC"), ids=ours), Side(_kept("LBNHC"), ids=theirs)
        yield Combination(f"requests: {ours} block ids to {theirs}", *sides, end=30)


# Tensors.


def _tensors() -> Iterator[Combination]:
    for ours, theirs, what in (
        (2, 0, "small to plain"),
        (0, 2, "plain to small"),
        (2, 4, "2 tokens to 4"),
        (4, 2, "4 to 2"),
    ):
        stages = [
            _apart(
                (Attention("a"), Keep("LBNHC", kernel_tokens=tokens)),
                (Attention("b"), Keep("cpu", kernel_tokens=tokens)),
                (Attention("c"), Keep("2BHND", kernel_tokens=tokens)),
            )
            for tokens in (ours, theirs)
        ]
        sides = (Side(stage, block_sizes=(8,)) for stage in stages)
        yield Combination(f"kernel blocks: {what}", *sides, first=3, end=21)
    for ours, theirs, what in ((24, 0, "padded to plain"), (0, 24, "plain to padded"), (24, 8, "padded otherwise")):
        stages = [
            _apart(
                (Attention("a"), Keep("LBNHC", gap_bytes=gap)),
                (Attention("b"), Keep("cpu", gap_bytes=gap)),
                (Attention("c"), Keep("B2NHD", gap_bytes=gap)),
                (Latent("d"), Keep("key only", gap_bytes=gap)),
            )
            for gap in (ours, theirs)
        ]
        yield Combination(f"padded pages: {what}", *(Side(stage) for stage in stages), end=14)
    for itemsize, dtype in ((1, "uint8"), (1, "float8_e4m3fn"), (4, "float32"), (8, "float64")):
        stages = [
            _apart(*((Attention(name, size=3, itemsize=itemsize, dtype=dtype), Keep(layout)) for name, layout in pairs))
            for pairs in (zip("ab", ("LBNHC", "cpu"), strict=True), zip("ab", ("cpu", "2BHND"), strict=True))
        ]
        yield Combination(f"dtypes: {dtype}", Side(stages[0]), Side(stages[1], tp=2))
    uneven = Attention("a", size=6, size_v=4)
    stages = [_apart((uneven, Keep(order))) for order in ("LBNHC", "LHBNC")]
    yield Combination("dtypes: K and V of different sizes", Side(stages[0], tp=2), Side(stages[1]))
    for what, tp in (("equal TP", (2, 2)), ("split", (1, 2)), ("merged", (4, 1))):
        stage = _apart((Attention("a"), Keep("opaque")), (Attention("b"), Keep("opaque", gap_bytes=16)))
        sides = Side(stage, tp=tp[0]), Side(stage, tp=tp[1])
        yield Combination(f"opaque tiles: {what}", *sides, first=3, end=10)
    stages = [_apart((Attention("a"), Keep("opaque", kernel_tokens=4))) for _ in range(2)]
    sides = Side(stages[0], block_sizes=(8,)), Side(stages[1], block_sizes=(12,))
    yield Combination("opaque tiles: blocks of 8 to 12, in tiles of 4", *sides, first=5, end=22)
    quantised = Attention("a", size=5, size_v=3, itemsize=1, dtype="int8"), Keep("cells", tag="int8 and scales")
    for tp, blocks in (((1, 1), (4, 4)), ((2, 1), (4, 4)), ((1, 2), (4, 6))):
        sides = (Side(_apart(quantised), tp=one, block_sizes=(size,)) for one, size in zip(tp, blocks, strict=True))
        what = f"scales inside each (token, head), TP {tp[0]} to {tp[1]}, blocks of {blocks[0]} to {blocks[1]}"
        yield Combination(f"quantised: {what}", *sides, first=1, end=11)

    scaled = _apart(
        (Attention("a", itemsize=1, dtype="uint8"), Keep("LBNHC", scales="k=0.5 v=1.0")),
        (Attention("b", itemsize=1, dtype="uint8"), Keep("cpu", scales="k=0.25 v=1.0")),
    )
    yield Combination("quantised: scales of a layer, outside the cache", Side(scaled, tp=2), Side(scaled))


# Models.

MIXED = (
    (Attention("a"), Keep("2BNHD")),
    (Attention("b"), Keep("B2NHD")),
    (Latent("c"), Keep("key only")),
    (Attention("d", heads=8), Keep("cpu")),
    (Attention("e", size=6), Keep("LHBNC")),
)


def _mixed() -> Iterator[Combination]:
    other = tuple(
        (layer, Keep(name)) for (layer, _), name in zip(MIXED, ("cpu", "LBHNC", "LBNHC", "B2HND", "2BHND"), strict=True)
    )
    orders = (("the same order", (0, 1, 2, 3, 4)), ("another order", (3, 0, 4, 2, 1)), ("reversed", (4, 3, 2, 1, 0)))
    for what, order in orders:
        turned = tuple(MIXED[index] for index in order)
        yield Combination(f"mixed layouts: {what}", Side(_apart(*MIXED)), Side(_apart(*turned)), first=2)
    sides = Side(_apart(*MIXED), tp=2), Side(_apart(*other[::-1], num_regions=3))
    yield Combination("mixed layouts: others on the other side, and three regions", *sides, first=2)
    twice = _apart(*MIXED[:2]), (Apart(MIXED[:2], aliases=(("a again", "a"),)),)
    sides = Side(twice[1]), Side(twice[1], tp=2)
    yield Combination("mixed layouts: one tensor under two names", *sides)
    many = tuple(Attention(f"layers.{index}", 2) for index in range(48))
    for ours, theirs in (("LBNHC", "LBNHC"), ("BLHNC", "BLHNC"), ("BLNHC", "LBHNC")):
        pools = Side((Pool(many, ours),)), Side((Pool(many, theirs),))
        yield Combination(f"many layers: 48 in {ours} to {theirs}", *pools)


def _m3(heads: int, size: int, index: int, plane: str, index_group: int) -> tuple[Kept, ...]:
    """Two dense layers, each with the key-only cache of its indexer."""
    return tuple(
        kept
        for number in range(2)
        for kept in (
            (Attention(f"kv.{number}", heads, size), Keep(plane)),
            (Latent(f"index.{number}", index, group=index_group), Keep("key only")),
        )
    )


def _minimax_m3() -> Iterator[Combination]:
    for what, ours, theirs, tp in (
        ("separated to separated", "2BNHD", "2BNHD", (1, 1)),
        ("interleaved to interleaved", "B2NHD", "B2NHD", (1, 1)),
        ("separated to interleaved", "2BNHD", "B2NHD", (1, 1)),
        ("interleaved to separated, TP 2 to 1", "B2NHD", "2BNHD", (2, 1)),
        ("fused to separated, TP 1 to 2", "LBNHC", "2BNHD", (1, 2)),
    ):
        sides = (
            Side(_apart(*_m3(2, 3, 3, plane, 0)), tp=one, group_kinds=(f"{FULL}+{MLA}",))
            for plane, one in zip((ours, theirs), tp, strict=True)
        )
        yield Combination(f"MiniMax-M3: {what}", *sides, first=4, end=15)
    for what, ours, theirs, tp, first in (
        ("TP 1 to 2", "LBHNC", "LBHNC", (1, 2), 128),
        ("TP 4 to 2", "LBNHC", "LBNHC", (4, 2), 0),
        ("fused to separated, TP 4 to 2", "LBNHC", "2BNHD", (4, 2), 0),
    ):
        sides = (
            Side(_apart(*_m3(4, 128, 128, plane, 1)), one, (128, 128), group_kinds=(FULL, MLA))
            for plane, one in zip((ours, theirs), tp, strict=True)
        )
        yield Combination(f"MiniMax-M3: its own sizes, {what}", *sides, first=first, end=300)


def _stages(*names: str, latent: bool = False) -> tuple[Stage, ...]:
    """A pipeline: the layers of each stage by their letters."""
    return tuple(
        Apart(tuple((Latent(name), Keep("key only")) if latent else (Attention(name), Keep("LBNHC")) for name in one))
        for one in names
    )


def _pipelines() -> Iterator[Combination]:
    for what, ours, theirs, tp in (
        ("2 stages to 1", ("abc", "def"), ("abcdef",), (1, 1)),
        ("1 stage to 2", ("abcdef",), ("abc", "def"), (1, 1)),
        ("2 stages to 3", ("abc", "def"), ("ab", "cd", "ef"), (1, 1)),
        ("3 unequal stages to 2, TP 2 to 1", ("a", "bcd", "ef"), ("abcd", "ef"), (2, 1)),
        ("2 stages to 2 cut elsewhere, TP 1 to 4", ("ab", "cdef"), ("abcde", "f"), (1, 4)),
    ):
        sides = (Side(_stages(*names), tp=one) for names, one in zip((ours, theirs), tp, strict=True))
        yield Combination(f"pipelines: {what}", *sides)
    sides = Side(_stages("ab", "cd", latent=True), tp=2), Side(_stages("abc", "d", latent=True), tp=2)
    yield Combination("pipelines: no heads, 2 stages to 2, TP 2 to 2", *sides)


def _windows() -> Iterator[Combination]:
    """Gemma's and gpt-oss's groups: one sees everything, one only the last tokens."""
    layers = [Attention("a"), Attention("b", group=1), Attention("c"), Attention("d", group=1)]
    for what, layouts, sizes, tp, end in (
        ("null blocks", ("LBNHC", "LBNHC"), (4, 4), (1, 1), 27),
        ("null blocks, TP 2 to 1, CPU tiles", ("cpu", "cpu"), (4, 4), (2, 1), 27),
        ("blocks of 8 to 4", ("LBNHC", "cpu"), (8, 4), (1, 1), 27),
        ("blocks of 2 to 4, a window that begins with a block", ("LBNHC", "cpu"), (2, 4), (1, 1), 25),
        # The consumer's first block reaches back to tokens 20 and 21, which the producer has let go of.
        ("blocks of 2 to 4, a window that begins inside a block", ("LBNHC", "cpu"), (2, 4), (1, 1), 27),
    ):
        sides = (
            Side(_apart(*((layer, Keep(layout)) for layer in layers)), one, (size, size), group_kinds=(FULL, SLIDING))
            for layout, size, one in zip(layouts, sizes, tp, strict=True)
        )
        yield Combination(f"sliding windows: {what}", *sides, end=end, windows=(None, 6))


def _overlaid() -> Iterator[Combination]:
    layers = tuple(Attention(name, group=group) for group, name in enumerate("abcabc"[:3] * 1))
    layers += tuple(Attention(f"{name}2", group=group) for group, name in enumerate("ab"))
    for ours, theirs, tp in (("LBNHC", "LBNHC", (1, 1)), ("LBHNC", "BLHNC", (2, 1)), ("BHLNC", "LBNHC", (1, 2))):
        sides = (
            Side((Pool(layers, order),), one, (4, 4, 4), group_kinds=(FULL, SLIDING, SLIDING))
            for order, one in zip((ours, theirs), tp, strict=True)
        )
        what = f"3 groups in one {ours} to {theirs}, TP {tp[0]} to {tp[1]}"
        yield Combination(f"overlaid groups: {what}", *sides, end=19, windows=(None, 6, 6))
    mixed = (
        (Attention("a"), Keep("cpu")),
        (Attention("b", heads=2, size=6, group=1), Keep("LBNHC")),
        (Latent("c", group=2), Keep("key only")),
    )
    sizes, kinds = (4, 6, 8), (FULL, FULL, MLA)
    sides = Side((Pages(mixed),), 1, sizes, group_kinds=kinds), Side((Pages(mixed),), 2, sizes, group_kinds=kinds)
    yield Combination("overlaid groups: pages of different specs, TP 1 to 2", *sides, first=3, end=19)
    sides = Side((Pages(mixed),), 1, sizes, group_kinds=kinds), Side(_apart(*mixed), 1, sizes, group_kinds=kinds)
    yield Combination("overlaid groups: pages to tensors of their own", *sides, first=3, end=19)


# Recurrent layers.

STATES = {
    "mamba2": State("s", (Projection("x", 8, 2), Projection("b", 4, 3), Projection("c", 4, 3)), 8, 5),
    "mamba2 of one group": State("s", (Projection("x", 8, 2), Projection("b", 1, 3), Projection("c", 1, 3)), 8, 5),
    "GDN": State("s", (Projection("q", 4, 2), Projection("k", 4, 2), Projection("v", 8, 2)), 8, 5),
    "short convolution": State("s", (Projection("x", 12, 1),)),
    "linear attention": State("s", (), 8, 5),
}


def _hybrid(state: State, order: str, pages: bool = True) -> tuple[Stage, ...]:
    """Attention and two states, which lie on top of one another as in vLLM's hybrid models."""
    attention, kept = Attention("a", 4, 6), (Keep("LBNHC"), Keep(order))
    states = [state._replace(name=name, group=1) for name in ("s", "t")]
    layers = ((attention, kept[0]), (states[0], kept[1]), (attention._replace(name="b"), kept[0]), (states[1], kept[1]))
    return (Pages(layers),) if pages else (Apart(layers),)


def _states() -> Iterator[Combination]:
    for model, state in STATES.items():
        for ours, theirs, tp in (
            ("DS", "DS", (1, 1)),
            ("DS", "DS", (2, 1)),
            ("DS", "DS", (1, 4)),
            ("SD", "SD", (2, 2)),
            ("SD", "DS", (1, 2)),
            ("DS", "SD", (4, 2)),
        ):
            if not state.projections and "SD" in (ours, theirs):
                continue  # without a convolution there is no such order
            yield _of_states(f"{model}, {ours} to {theirs}, TP {tp[0]} to {tp[1]}", state, (ours, theirs), tp)
    mamba2 = STATES["mamba2"]
    yield _of_states("mamba2, pages to tensors of their own", mamba2, ("DS", "DS"), (1, 1), pages=(True, False))
    yield _of_states("mamba2, blocks of 4 to 6", mamba2, ("DS", "SD"), (1, 1), sizes=(4, 6))


def _of_states(
    what: str,
    state: State,
    orders: tuple[str, str],
    tp: tuple[int, int],
    pages: tuple[bool, bool] = (True, True),
    sizes: tuple[int, int] = (4, 4),
) -> Combination:
    sides = (
        Side(_hybrid(state, order, paged), one, (size, STATE_TOKENS), group_kinds=(FULL, MAMBA))
        for order, one, paged, size in zip(orders, tp, pages, sizes, strict=True)
    )
    return Combination(f"states: {what}", *sides, first=4, end=15)


# Context parallelism.


def _dealt(kept: tuple[Kept, ...], tp: int, dcp: int, interleave: int, own_tokens: int = 4) -> Side:
    return Side((Apart(kept),), tp, (own_tokens * dcp,), dcp=dcp, interleave=interleave)


def _contexts() -> Iterator[Combination]:
    latents = (Latent("a"), Keep("key only")), (Latent("b", size=6), Keep("LBNHC"))
    for what, ours, theirs in (
        ("with replicas, TP 4 DCP 2 to TP 2 DCP 2", (4, 2, 1), (2, 2, 1)),
        ("with replicas, TP 2 DCP 1 to TP 4 DCP 2", (2, 1, 1), (4, 2, 1)),
        ("with replicas, TP 6 DCP 3 to TP 4 DCP 2", (6, 3, 1), (4, 2, 1)),
        ("runs of 2 to single tokens", (2, 2, 2), (2, 2, 1)),
        ("runs of 4 to one rank", (4, 4, 4), (1, 1, 1)),
        ("runs of 4 to runs of 2 on 3 ranks", (2, 2, 4), (3, 3, 2)),
    ):
        yield Combination(f"context parallel: {what}", _dealt(latents, *ours), _dealt(latents, *theirs), 5, 43)
    heads = (Attention("a", 2), Keep("LBNHC")), (Attention("b", 2), Keep("cpu"))
    for what, ours, theirs in (
        ("2 heads, TP 4 DCP 2 to TP 1", (4, 2, 1), (1, 1, 1)),
        ("2 heads, TP 2 to TP 4 DCP 2 in runs of 4", (2, 1, 1), (4, 2, 4)),
        ("2 heads, TP 8 DCP 4 to TP 4 DCP 2", (8, 4, 1), (4, 2, 1)),
    ):
        yield Combination(f"context parallel: {what}", _dealt(heads, *ours), _dealt(heads, *theirs), 5, 43)
    kernel = (Latent("a"), Keep("key only", kernel_tokens=2)), (Latent("b"), Keep("LBNHC", gap_bytes=8))
    sides = _dealt(kernel, 2, 2, 1, own_tokens=8), _dealt(latents[:1] + kernel[1:], 3, 3, 2, own_tokens=6)
    yield Combination("context parallel: kernel blocks and padding", *sides, first=5, end=43)
    tiles = ((Attention("a", 1), Keep("opaque", kernel_tokens=4)),)
    sides = _dealt(tiles, 2, 2, 4, own_tokens=8), _dealt(tiles, 1, 1, 1, own_tokens=12)
    yield Combination("context parallel: opaque tiles that are a run each", *sides, first=5, end=43)
    stages = tuple(Apart(((Latent(name), Keep("key only")),)) for name in "ab")
    two = Side(stages, 2, (8,), dcp=2)
    yield Combination("context parallel: two stages, TP 2 DCP 2 to TP 1", two, Side(stages, 1, (4,)), end=21)
    yield Combination("context parallel: two stages, TP 1 to TP 2 DCP 2", Side(stages, 1, (4,)), two, end=21)


COMBINATIONS: tuple[Combination, ...] = (
    *_requests(),
    *_tensors(),
    *_mixed(),
    *_minimax_m3(),
    *_pipelines(),
    *_windows(),
    *_overlaid(),
    *_states(),
    *_contexts(),
)

OVER_NIXL: tuple[str, ...] = (
    "requests: a hit that ends inside a block",
    "requests: a full hit: nothing moves",
    "kernel blocks: 2 tokens to 4",
    "padded pages: padded otherwise",
    "opaque tiles: merged",
    "mixed layouts: others on the other side, and three regions",
    "many layers: 48 in BLNHC to LBHNC",
    "MiniMax-M3: interleaved to separated, TP 2 to 1",
    "MiniMax-M3: its own sizes, TP 1 to 2",
    "pipelines: 2 stages to 3",
    "sliding windows: null blocks",
    "overlaid groups: 3 groups in one LBHNC to BLHNC, TP 2 to 1",
    "states: mamba2, DS to DS, TP 2 to 1",
    "states: GDN, SD to DS, TP 1 to 2",
)

CHOSEN: tuple[str, ...] = (
    "requests: a hit that ends inside a block",
    "kernel blocks: 2 tokens to 4",
    "padded pages: padded otherwise",
    "opaque tiles: merged",
    "quantised: scales inside each (token, head), TP 1 to 2, blocks of 4 to 6",
    "mixed layouts: others on the other side, and three regions",
    "MiniMax-M3: interleaved to separated, TP 2 to 1",
    "pipelines: 3 unequal stages to 2, TP 2 to 1",
    "sliding windows: null blocks, TP 2 to 1, CPU tiles",
    "overlaid groups: 3 groups in one LBHNC to BLHNC, TP 2 to 1",
    "states: mamba2, DS to SD, TP 4 to 2",
    "states: GDN, SD to DS, TP 1 to 2",
)
