"""The table: every combination that is run, in order, by name. Nothing here is drawn; the same list comes each time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd

from kvmatrix import refusals, special
from kvmatrix.combination import Combination
from kvmatrix.models import Apart, Attention, Keep, Latent, Pool, Side
from kvmatrix.tensors import PLANES, POOLS

TP_SIZES = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 3, 4, 6, 8, 12)
LAYOUTS = (*PLANES, *POOLS, "cpu")
BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12)
CONTEXT_SIZES = (1, 2, 3, 4, 6, 8)
NIXL_SUFFIX = ", over nixl"


def split_name(heads: int, producer_tp: int, consumer_tp: int) -> str:
    return f"splits of {heads} head{'s' if heads > 1 else ''}: {producer_tp} to {consumer_tp}"


def latent_split_name(producer_tp: int, consumer_tp: int) -> str:
    return f"splits without heads: {producer_tp} to {consumer_tp}"


def layouts_name(producer: str, consumer: str) -> str:
    return f"layouts: {producer} to {consumer}"


def blocks_name(producer: int, consumer: int) -> str:
    return f"block sizes: {producer} to {consumer}"


def legal(heads: int, tp: int) -> bool:
    """Whether a model of so many KV heads can run at this TP size: a slice for each rank, or a head for several."""
    return gcd(heads, tp) in (heads, tp)


def _splits(heads: int) -> list[Combination]:
    """Three layers, each in a layout of its own, of every split that the heads allow."""
    layers = [Attention(name, heads) for name in "abc"]
    stage = Apart(tuple(zip(layers, (Keep("LBNHC"), Keep("cpu"), Keep("2BNHD")), strict=True)))
    sizes = [tp for tp in TP_SIZES if legal(heads, tp)]
    return [
        Combination(split_name(heads, *tp), Side((stage,), tp=tp[0]), Side((stage,), tp=tp[1]))
        for tp in product(sizes, sizes)
    ]


def _latent_splits() -> list[Combination]:
    stage = Apart(((Latent("a"), Keep("key only")), (Latent("b", size=6), Keep("LBNHC"))))
    return [
        Combination(latent_split_name(*tp), Side((stage,), tp=tp[0]), Side((stage,), tp=tp[1]))
        for tp in product(TP_SIZES, TP_SIZES)
    ]


def _kept_as(layout: str) -> tuple[Apart | Pool, ...]:
    """Two layers; in vLLM's physical orders as one tensor."""
    layers = Attention("a"), Attention("b")
    if layout in POOLS:
        return (Pool(layers, layout),)
    return (Apart(tuple((layer, Keep(layout)) for layer in layers)),)


def _layouts() -> list[Combination]:
    return [
        Combination(layouts_name(one, other), Side(_kept_as(one), tp=2), Side(_kept_as(other)), first=2)
        for one, other in product(LAYOUTS, LAYOUTS)
    ]


def _block_sizes() -> list[Combination]:
    """A prefix hit that ends inside a block of most sizes, and a last block that is partly filled in most."""
    stage = Apart(
        (
            (Attention("a", 2), Keep("LBNHC")),
            (Attention("b", 2), Keep("cpu")),
            (Attention("c", 2), Keep("B2HND")),
            (Latent("d"), Keep("key only")),
        )
    )
    return [
        Combination(
            blocks_name(*sizes),
            Side((stage,), block_sizes=sizes[:1]),
            Side((stage,), block_sizes=sizes[1:]),
            first=5,
            end=29,
        )
        for sizes in product(BLOCK_SIZES, BLOCK_SIZES)
    ]


def context_name(producer: int, consumer: int) -> str:
    return f"context parallel: {producer} to {consumer}"


def _contexts() -> list[Combination]:
    """Tokens dealt over all ranks, one at a time, blocks of 4 on each rank."""
    stage = Apart(((Latent("a"), Keep("key only")), (Latent("b", size=6), Keep("LBHNC"))))
    return [
        Combination(
            context_name(*sizes), *(Side((stage,), tp=dcp, block_sizes=(4 * dcp,), dcp=dcp) for dcp in sizes), 3, 39
        )
        for sizes in product(CONTEXT_SIZES, CONTEXT_SIZES)
    ]


def _over_nixl(combination: Combination) -> Combination:
    return replace(
        combination,
        name=combination.name + NIXL_SUFFIX,
        producer=replace(combination.producer, transport="nixl"),
        consumer=replace(combination.consumer, transport="nixl"),
    )


_LOCAL = (
    *(one for heads in HEADS for one in _splits(heads)),
    *_latent_splits(),
    *_layouts(),
    *_block_sizes(),
    *_contexts(),
    *special.COMBINATIONS,
    *refusals.COMBINATIONS,
)

_NIXL_NAMES = (
    *(split_name(heads, *tp) for heads, tp in ((1, (1, 2)), (2, (2, 1)), (3, (3, 1)), (4, (4, 2)), (4, (2, 4)))),
    *(split_name(heads, *tp) for heads, tp in ((6, (3, 2)), (6, (2, 3)), (8, (4, 1)), (12, (4, 3)), (2, (1, 4)))),
    *(latent_split_name(*tp) for tp in ((1, 1), (2, 3), (4, 1))),
    *(layouts_name(*pair) for pair in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True)),
    *(blocks_name(*sizes) for sizes in ((8, 2), (2, 8), (4, 6), (6, 4), (12, 8), (1, 12), (3, 3))),
    *(context_name(*sizes) for sizes in ((4, 1), (2, 3))),
    *special.OVER_NIXL,
)
"""What is run over NIXL too: a representative of each section. Its agents take half a second each to start."""

_BY_LOCAL_NAME = {one.name: one for one in _LOCAL}

OVER_NIXL: tuple[Combination, ...] = tuple(_over_nixl(_BY_LOCAL_NAME[name]) for name in _NIXL_NAMES)

COMBINATIONS: tuple[Combination, ...] = (*_LOCAL, *OVER_NIXL)
"""All of them, in the order of docs/matrix.md."""

BY_NAME = {one.name: one for one in COMBINATIONS}

CHOSEN: tuple[str, ...] = (
    *(split_name(heads, *tp) for heads, tp in ((2, (2, 1)), (4, (1, 2)), (6, (3, 2)), (12, (4, 6)), (8, (8, 4)))),
    latent_split_name(3, 2),
    *(layouts_name(*pair) for pair in (("cpu", "2BNHD"), ("BLHNC", "cpu"), ("B2HND", "LHBNC"), ("BHLNC", "BLNHC"))),
    *(blocks_name(*sizes) for sizes in ((4, 6), (12, 8), (1, 3))),
    context_name(3, 2),
    *special.CHOSEN,
    *refusals.CHOSEN,
    f"{split_name(4, 2, 4)}, over nixl",
    f"{layouts_name('cpu', '2BNHD')}, over nixl",
)
"""What `make test` runs."""
