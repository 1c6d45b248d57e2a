"""Wrong combinations: each must be refused at the handshake, by a text that names the field and both values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvferry.layout import STATE_TOKENS
from kvmatrix.combination import Combination
from kvmatrix.models import Apart, Attention, Keep, Kept, Latent, Projection, Side, State

PLAIN = (Attention("a"), Keep("LBNHC"))
CPU = (Attention("a"), Keep("cpu"))


def _sides(ours: Kept, theirs: Kept, **more: object) -> tuple[Side, Side]:
    """(producer, consumer), of one layer each."""
    return Side((Apart((ours,)),), **more), Side((Apart((theirs,)),), **more)  # type: ignore[arg-type]


def _scaled(scale: int) -> Kept:
    return Attention("a", itemsize=1, dtype="uint8"), Keep("LBNHC", scales=f"k={scale}")


def _refused(what: str, sides: tuple[Side, Side], *named: str) -> Combination:
    return Combination(f"refused: {what}", *sides, refused=named)


def _fingerprints() -> Iterator[Combination]:
    """What engines say of themselves, beside their layouts."""
    for field, theirs, ours in (
        ("model", "m", "another"),
        ("model dtype", "bfloat16", "float16"),
        ("KV cache dtype", "auto", "fp8"),
    ):
        producer, consumer = _sides(PLAIN, PLAIN)
        both = (
            replace(producer, fingerprint=((field, theirs),)),
            replace(consumer, fingerprint=((field, ours),), tp=2),
        )
        yield _refused(field, both, field, f"consumer has {ours}", f"producer has {theirs}")
    producer, consumer = _sides(PLAIN, PLAIN)
    kinds = replace(consumer, group_kinds=("SlidingWindowSpec",))
    yield _refused(
        "kinds of the groups", (producer, kinds), "KV cache groups", "SlidingWindowSpec", "FullAttentionSpec"
    )
    more = replace(consumer, group_kinds=("FullAttentionSpec", "MambaSpec"))
    yield _refused("number of groups", (producer, more), "KV cache groups", "MambaSpec", "['FullAttentionSpec']")
    nixl = replace(consumer, transport="nixl")
    yield _refused("no common transport", (producer, nixl), "transport", "['nixl']", "['local']")


def _layers() -> Iterator[Combination]:
    """What differs in a layer. Every text names it."""
    for what, theirs, ours, *named in (
        (
            "head size",
            PLAIN,
            (Attention("a", size=8), PLAIN[1]),
            "field k: content_bytes",
            "consumer has 16",
            "producer has 8",
        ),
        ("head size of V", PLAIN, (Attention("a", size_v=6), PLAIN[1]), "field v: content_bytes", "has 12", "has 8"),
        ("itemsize", PLAIN, (Attention("a", itemsize=4), PLAIN[1]), "content_bytes", "has 16", "has 8"),
        ("dtype", PLAIN, (Attention("a", dtype="float16"), PLAIN[1]), "dtype", "has float16", "has bfloat16"),
        ("total heads", PLAIN, (Attention("a", heads=8), PLAIN[1]), "total KV heads", "has 8", "has 4"),
        ("scales", *(_scaled(1), _scaled(2)), "scales", "consumer has k=2", "producer has k=1"),
        ("group", PLAIN, (Attention("a", group=1), PLAIN[1]), "group", "consumer has 1", "producer has 0"),
        ("layer's name", PLAIN, (Attention("b"), PLAIN[1]), "layer b", "no such layer"),
        (
            "fields of equal bytes",
            (Latent("a", 8), Keep("key only")),
            (Attention("a", 1), PLAIN[1]),
            "fields",
            "['k', 'v']",
            "['latent']",
        ),
        (
            "opaque tag",
            (CPU[0], Keep("opaque", tag="amx")),
            (CPU[0], Keep("opaque", tag="vec")),
            "packing",
            "has vec",
            "has amx",
        ),
        ("opaque to known", (CPU[0], Keep("opaque", tag="amx")), CPU, "['k', 'v']", "['tile']"),
        ("known to opaque", PLAIN, (CPU[0], Keep("opaque", tag="amx")), "fields", "['tile']", "['k', 'v']"),
        (
            "cells to tiles",
            (CPU[0], Keep("cells", tag="x")),
            (CPU[0], Keep("opaque", tag="x")),
            "fields",
            "['tile']",
            "['cell']",
        ),
        (
            "tag of cells",
            (CPU[0], Keep("cells", tag="x")),
            (CPU[0], Keep("cells", tag="y")),
            "packing",
            "has y",
            "has x",
        ),
    ):
        sides = _sides(theirs, ours, block_sizes=(4, 4), group_kinds=("FullAttentionSpec", "FullAttentionSpec"))
        yield _refused(what, sides, "layer ", *named)
    tiles = (CPU[0], Keep("opaque")), (CPU[0], Keep("opaque", kernel_tokens=4))
    yield _refused("tile tokens", _sides(*tiles, block_sizes=(8,)), "layer a", "tile tokens", "has 4", "has 8")
    one_head = (Attention("a", heads=1), Keep("opaque"))
    producer, consumer = _sides(one_head, one_head)
    dealt = replace(producer, tp=2, dcp=2, block_sizes=(8,))
    yield _refused("tiles whose tokens are dealt", (dealt, consumer), "layer a", "tile")
    producer, consumer = _sides(PLAIN, PLAIN)
    two = Apart((PLAIN, (Attention("b"), PLAIN[1])))
    one = Apart((PLAIN,), aliases=(("b", "a"),))
    memories = replace(producer, stages=(two,)), replace(consumer, stages=(one,))
    yield _refused("one memory for two", memories, "layers a and b", "consumer has one memory", "producer has two")


def _states() -> Iterator[Combination]:
    x = (Projection("x", 4, 2),)
    for what, theirs, ours, *named in (
        ("state's steps", State("a", x, 4, 5), State("a", x, 4, 5, steps=4), "content_bytes", "has 16", "has 12"),
        ("state's size", State("a", x, 4, 5), State("a", x, 4, 6), "a/ssm", "content_bytes", "has 24", "has 20"),
        (
            "state's shards",
            State("a", x, 4, 5),
            State("a", (Projection("x", 8, 1),), 4, 5),
            "total KV heads",
            "has 8",
            "has 4",
        ),
        ("state's dtype", State("a", x, 4, 5), State("a", x, 4, 5, itemsize=4), "dtype", "has float32", "has float16"),
    ):
        sides = _sides(
            (theirs, Keep("DS")), (ours, Keep("DS")), block_sizes=(STATE_TOKENS,), group_kinds=("MambaSpec",)
        )
        yield _refused(what, sides, "layer a/", *named)


COMBINATIONS: tuple[Combination, ...] = (*_fingerprints(), *_layers(), *_states())

CHOSEN: tuple[str, ...] = ("refused: model", "refused: head size", "refused: opaque to known")
