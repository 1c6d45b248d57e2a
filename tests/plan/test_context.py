"""Context parallel shards: golden cases as data (tests/cases/context.json), and what holds for any two dealings.

In the golden cases a rank's block has 16 tokens of 4 bytes; tokens 20 to 35 are wanted. "producer" and "consumer" are
(ranks of the context, tokens of a run); descriptors are (consumer rank, producer rank, offset, offset, length).
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import oracle
import pytest
from drawn import Apart, Deal, ModelLayer, Pool, Side, Situation, Slot
from golden import tables

from kvferry.layout import CacheLayout, Context, Heads, Layer, Refusal, Region, key_only, opaque_tiles
from kvferry.plan import compile
from kvferry.topology import Share, ShareLayer, sources

CASES = json.loads((Path(__file__).parent.parent / "cases" / "context.json").read_text())

change = msgspec.structs.replace


def latent(context: Context, block_size: int = 16) -> CacheLayout:
    """One layer, 10 blocks of block_size tokens of each rank, 4 bytes a token."""
    made = Layer("a", 0, 0, 0, 10, block_size * context.size, "x", Heads(0, 1, 1), key_only(block_size, 4), context)
    return CacheLayout((Region(0, 10 * block_size * 4),), (made,))


def ranks(size: int, interleave: int) -> list[CacheLayout]:
    return [latent(Context(rank, size, interleave)) for rank in range(size)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_descriptors(case: dict[str, Any]) -> None:
    producers, found = ranks(*case["producer"]), []
    for rank, consumer in enumerate(ranks(*case["consumer"])):
        for share in sources(consumer, rank, case["consumer"][0], producers):
            pair = compile(consumer, producers[share.producer_rank], share)
            plan = pair.bind(tables([case["consumer_table"]]), tables([case["producer_table"]]), 20, 36)
            for batch in plan.batches:
                rows = zip(*(column.tolist() for column in batch[2:]), strict=True)
                found += [[rank, share.producer_rank, *row] for row in rows]
            assert plan.num_bytes == plan.required_bytes
    assert found == case["descriptors"]


LATENT = ModelLayer("a", 0, "latent", 1, 2, 0, 1, 0)
ROWS = Slot("key_only", 0, 1, 0)


def engine(stage: Apart | Pool, tp_size: int, deal: Deal, block_size: int, table: list[int]) -> Side:
    layouts = [stage.layout(rank, tp_size, 1 + max(table), [block_size], deal) for rank in range(tp_size)]
    assert {one.layers[0].context.size for one in layouts} == {deal.size}
    return Side(tp_size, layouts, [table])


DEALS = [Deal(1, 1), *(Deal(size, run) for size in (2, 4) for run in (1, 2, 4))]


@pytest.mark.parametrize("consumer", DEALS)
def test_all_pairs_of_contexts(consumer: Deal) -> None:
    """Byte by byte: N ranks to M ranks, replicas on both sides, requests that begin and end inside runs and blocks."""
    stage = Apart((LATENT,), (ROWS,))
    mine = engine(stage, 4, consumer, 16, [2, 0, 3])
    for producer, block_size in zip(DEALS, (16, 32, 8, 16, 32, 4, 16), strict=True):
        entries = -(-39 // (block_size := max(block_size, producer.period)))
        theirs = engine(stage, 4, producer, block_size, list(range(entries))[::-1])
        for tokens in ((7, 39), (17, 18), (0, 21)):
            oracle.transfer(Situation(mine, theirs, tokens))


@pytest.mark.parametrize(
    ("consumer", "producer"), [((3, 1), (2, 1)), ((2, 3), (3, 2)), ((3, 2), (1, 1)), ((2, 6), (3, 4))]
)
def test_contexts_that_do_not_divide(consumer: tuple[int, int], producer: tuple[int, int]) -> None:
    stage = Apart((LATENT,), (ROWS,))
    mine, theirs = engine(stage, 6, Deal(*consumer), 24, [1, 0]), engine(stage, 6, Deal(*producer), 12, [0, 3, 1, 2])
    for tokens in ((0, 48), (5, 43), (11, 13)):
        oracle.transfer(Situation(mine, theirs, tokens))


def test_heads_and_contexts_together() -> None:
    """Two heads over 8 ranks: 4 hold each, and share out its tokens; to 2 ranks that hold a head's tokens all."""
    stage = Apart((ModelLayer("a", 0, "kv", 2, 2, 2, 1, 0),), (Slot("LBNHC", 0, 1, 0),))
    sides = [
        engine(stage, 8, Deal(4, 2), 16, [1, 0]),
        engine(stage, 8, Deal(2, 2), 8, [3, 1, 0, 2]),
        engine(stage, 2, Deal(1, 1), 4, [5, 4, 3, 2, 1, 0]),
    ]
    for consumer, producer in product(sides, sides):
        oracle.transfer(Situation(consumer, producer, (3, 22)))


SHARE = Share(0, (ShareLayer("a", 0, 1),))


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_equal_contexts_move_whole_blocks(interleave: int) -> None:
    """As if there were none: a descriptor for each block, and neighbouring blocks as one."""
    context = Context(1, 2, interleave)
    pair = compile(latent(context), latent(context), SHARE)
    plan = pair.bind(tables([[4, 7, 8]]), tables([[2, 5, 6]]), 0, 96)
    assert [column.tolist() for column in plan.batches[0][2:]] == [[256, 448], [128, 320], [64, 128]]


def test_layers_of_equal_contexts_join() -> None:
    """A block of all layers is one descriptor where the block is outermost."""
    stage = Pool(tuple(ModelLayer(name, 0, "kv", 1, 2, 2, 1, 0) for name in "abc"), "BLNHC")
    one = engine(stage, 2, Deal(2, 2), 8, [2, 0])
    shares = sources(one.layouts[0], 0, 2, one.layouts)
    assert [share.producer_rank for share in shares] == [0]
    plan = compile(one.layouts[0], one.layouts[0], shares[0]).bind(tables([[2, 0]]), tables([[1, 2]]), 0, 16)
    assert plan.batches[0].lengths.tolist() == [3 * 4 * 4] * 2


def test_chunks_are_as_long_as_runs_allow() -> None:
    """Runs of 16: a whole block of one side is one descriptor, though the other's is dealt to four."""
    pair = compile(latent(Context()), latent(Context(2, 4, 16)), SHARE)
    plan = pair.bind(tables([[0, 1, 2, 3, 4, 5, 6, 7]]), tables([[9, 3]]), 0, 128)
    assert [column.tolist() for column in plan.batches[0][2:]] == [[128, 384], [576, 192], [64, 64]]


def test_ranks_without_a_token_in_common_are_refused() -> None:
    with pytest.raises(Refusal, match=r"layer a: context: .*rank=0.*rank=1.*no token in common"):
        compile(latent(Context(0, 2, 4)), latent(Context(1, 2, 4)), SHARE)
    compile(latent(Context(0, 2, 4)), latent(Context(1, 2, 2)), SHARE)


def test_a_request_whose_tokens_are_all_on_other_ranks() -> None:
    pair = compile(latent(Context()), latent(Context(3, 4, 16)), SHARE)
    plan = pair.bind(tables([[0, 1]]), tables([[5]]), 0, 32)
    assert (plan.batches, plan.num_bytes, plan.required_bytes) == ((), 0, 0)


class TestTiles:
    """Tiles of 4 tokens whose packing is not known."""

    def layout(self, context: Context, block_size: int = 16) -> CacheLayout:
        fields = opaque_tiles((10 * block_size // 4, 1, 4, 2), (8, 8, 2, 1), "kernel")
        axes = (msgspec.structs.replace(fields[0].axes[1], size=block_size // 4, stride_bytes=8), *fields[0].axes[2:])
        field = change(fields[0], axes=axes, block_stride_bytes=block_size * 2)
        made = Layer("a", 0, 0, 0, 10, block_size * context.size, "x", Heads(0, 1, 1), (field,), context)
        return CacheLayout((Region(0, 10 * block_size * 2),), (made,))

    def engine(self, size: int, interleave: int, table: list[int]) -> Side:
        return Side(size, [self.layout(Context(rank, size, interleave)) for rank in range(size)], [table])

    @pytest.mark.parametrize(("consumer", "producer"), [((2, 4), (1, 1)), ((1, 1), (2, 8)), ((2, 4), (4, 8))])
    def test_that_lie_in_one_run_move_between_any_contexts(
        self, consumer: tuple[int, int], producer: tuple[int, int]
    ) -> None:
        mine, theirs = self.engine(*consumer, [4, 0, 3, 1]), self.engine(*producer, [2, 5, 1, 9])
        for tokens in ((0, 64), (6, 43)):
            oracle.transfer(Situation(mine, theirs, tokens))

    @pytest.mark.parametrize("interleave", [1, 2])
    def test_that_hold_several_runs_move_between_equal_contexts(self, interleave: int) -> None:
        mine, theirs = self.engine(2, interleave, [4, 0]), self.engine(2, interleave, [2, 5])
        for tokens in ((0, 64), (9, 43)):
            oracle.transfer(Situation(mine, theirs, tokens))

    @pytest.mark.parametrize("other", [Context(), Context(0, 4, 1), Context(0, 2, 4)])
    def test_that_hold_several_runs_are_refused_between_others(self, other: Context) -> None:
        one = self.layout(Context(0, 2, 1))
        text = r"layer a, field tile: context of tiles of 4 tokens: .*a tile moves whole"
        for consumer, producer in ((one, self.layout(other)), (self.layout(other), one)):
            with pytest.raises(Refusal, match=text):
                compile(consumer, producer, SHARE)
