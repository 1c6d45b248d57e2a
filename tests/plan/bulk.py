"""The coordinate oracle at scale: seeded engine pairs, many requests for each, and every plan judged byte by byte.

One seed draws one pair of engines, some of the consumer's ranks, and requests. A case is one bound plan: of one
consumer rank, one producer rank and one request, with bytes to move. Memory here holds a number for each byte, which
says the whole coordinate, so that no two bytes of a cache look alike. What does not depend on a request (the sheets) is
worked out once, by walking all axes forwards as in oracle.py; a request only adds where its blocks lie.

    python tests/plan/bulk.py --cases 100000 --seed 7

goes through the seeds 7, 8, ... until there are that many cases. `--cases 1` replays a single seed.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from random import Random
from typing import NamedTuple

import numpy as np
import oracle
from bulk_drawn import Engines, Request, draw_engines, draw_request, window_block
from bulk_features import FEATURES, of_pair, of_request, splits

from kvferry.layout import CacheLayout
from kvferry.plan import BlockTable, PairPlan, TransferPlan, compile, prove_shares
from kvferry.topology import Share, sources

Ints = oracle.Ints

CASES_PER_SEED = 48
"""About: so many that working out a pair of engines takes less time than its requests."""

MOST_RANKS = 3
"""Consumer ranks looked at for one pair of engines."""

NOTHING, NOISE = -1, -2
"""What memory holds before: the consumer's, and the producers' where no coordinate of the request lies."""


class Sheet(NamedTuple):
    """Every byte of block 0 of one group, over all its layers and fields, in one or more ranks' memory.

    coordinate: a number for (layer, field, head, content byte, token), the token in its lowest bits, so that a block's
    first token can be added. start, span: the first token and the number of tokens of the byte's tile.
    """

    address: Ints
    block_stride: Ints
    coordinate: Ints
    token: Ints
    start: Ints
    span: Ints


TOKEN_BITS, CONTENT_BITS, HEAD_BITS = 20, 12, 8


class Numbers:
    """A number for each (layer name, field name) of a model."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], int] = {}

    def __getitem__(self, key: tuple[str, str]) -> int:
        return self._found.setdefault(key, len(self._found))


def sheets(layout: CacheLayout, begin: int, numbers: Numbers) -> dict[int, Sheet]:
    """By group. A rank's regions lie one behind the other, from `begin` on; a second name of the same bytes is left
    out."""
    starts = begin + region_starts(layout)
    parts: dict[int, list[Sheet]] = {}
    seen = set()
    for layer in layout.layers:
        memory = (layer.group, layer.region, layer.base_bytes, layer.fields, layer.context)
        if memory in seen:
            continue
        seen.add(memory)
        for field in layer.fields:
            inside = oracle.cells(field)
            token, span = oracle.dealt(layer.context, inside.token), oracle.span_tokens(layer, field)
            number = (numbers[layer.name, field.name] << HEAD_BITS) + layer.heads.start + inside.head
            coordinate = ((number << CONTENT_BITS) + inside.content << TOKEN_BITS) + token
            one = Sheet(
                starts[layer.region] + layer.base_bytes + inside.offset,
                np.full(len(token), field.block_stride_bytes),
                coordinate,
                token,
                token // span * span,
                np.full(len(token), span),
            )
            parts.setdefault(layer.group, []).append(one)
    return {group: together(found) for group, found in parts.items()}


def together(parts: Sequence[Sheet]) -> Sheet:
    return Sheet(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def region_starts(layout: CacheLayout) -> Ints:
    return np.cumsum([0, *(region.length_bytes for region in layout.regions)])


class Source(NamedTuple):
    """A producer rank that some consumer rank reads from. regions: where each begins in all sources' memory."""

    producer_rank: int
    pair: PairPlan
    regions: Ints
    features: frozenset[str]
    groups: frozenset[int]


class Rank(NamedTuple):
    """A consumer rank. regions: where each begins in its memory, and the end of the last."""

    layout: CacheLayout
    regions: Ints
    sheets: dict[int, Sheet]
    sources: tuple[Source, ...]


class Bench(NamedTuple):
    """A pair of engines, ready for requests. memory_bytes: of all its sources, whose sheets are made one."""

    engines: Engines
    ranks: tuple[Rank, ...]
    memory_bytes: int
    sheets: dict[int, Sheet]


def bench(engines: Engines, rng: Random) -> Bench:
    """Compile what some consumer ranks share with the producer's ranks, and prove that the shares are all."""
    consumer, producer = engines.consumer, engines.producer
    numbers = Numbers()
    begins: dict[int, int] = {}
    found: dict[int, list[Sheet]] = {}
    ranks, end = [], 0
    for rank in rng.sample(range(len(consumer.layouts)), min(MOST_RANKS, len(consumer.layouts))):
        layout = consumer.layouts[rank]
        tp_size = consumer.recipe.tp_size
        shares = sources(layout, rank % tp_size, tp_size, producer.layouts)
        prove_shares(layout, [(share, producer.layouts[share.producer_rank]) for share in shares])
        for share in shares:
            theirs = producer.layouts[share.producer_rank]
            if share.producer_rank not in begins:
                begins[share.producer_rank] = end
                for group, sheet in sheets(theirs, end, numbers).items():
                    found.setdefault(group, []).append(sheet)
                end += int(region_starts(theirs)[-1])
        made = tuple(source(engines, layout, share, begins[share.producer_rank]) for share in shares)
        ranks.append(Rank(layout, region_starts(layout), sheets(layout, 0, numbers), made))
    return Bench(engines, tuple(ranks), end, {group: together(parts) for group, parts in found.items()})


def source(engines: Engines, layout: CacheLayout, share: Share, begin: int) -> Source:
    theirs = engines.producer.layouts[share.producer_rank]
    pair = compile(layout, theirs, share)
    return Source(
        share.producer_rank,
        pair,
        begin + region_starts(theirs),
        of_pair(engines, layout, theirs, share),
        frozenset(pair.groups),
    )


def bind(rank: Rank, request: Request) -> list[TransferPlan]:
    consumer, producer = ([BlockTable(np.array(one)) for one in side] for side in request.tables)
    tokens = request.first, request.end, request.window_starts
    return [source.pair.bind(consumer, producer, *tokens) for source in rank.sources]


def blocks(table: Sequence[int], block_size: int) -> tuple[Ints, Ints]:
    """The blocks that a request has in one group, as columns: ids, and the first token of each."""
    positions = [position for position, block_id in enumerate(table) if block_id >= 0]
    ids = np.array([table[position] for position in positions], np.int64)
    return ids[:, None], np.array(positions, np.int64)[:, None] * block_size


def fill(bench: Bench, request: Request) -> Ints:
    """All sources' memory, with every coordinate of the request where the layouts say."""
    memory = np.full(bench.memory_bytes, NOISE)
    for group, sheet in bench.sheets.items():
        ids, first_tokens = blocks(request.tables[1][group], bench.engines.producer.block_sizes[group])
        memory[sheet.address + ids * sheet.block_stride] = sheet.coordinate + first_tokens
    return memory


class Runs(NamedTuple):
    """The descriptors of all plans of a consumer rank, as addresses in its memory and in that of all sources."""

    consumer: Ints
    producer: Ints
    lengths: Ints
    plan: Ints


def runs(rank: Rank, plans: Sequence[TransferPlan]) -> Runs:
    """Looks at the bounds of every descriptor."""
    parts, scalars = [], []
    for index, (plan, source) in enumerate(zip(plans, rank.sources, strict=True)):
        for batch in plan.batches:
            c, p = batch.consumer_region, batch.producer_region
            parts.append(batch[2:])
            scalars.append((index, *rank.regions[c : c + 2], *source.regions[p : p + 2], len(batch.lengths)))
    if not parts:
        return Runs(*np.zeros((4, 0), np.int64))
    consumer, producer, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    table = np.array(scalars)
    index, c, c_end, p, p_end = np.repeat(table[:, :5], table[:, 5], axis=0).T
    assert min(consumer.min(), producer.min()) >= 0, "a negative offset"
    assert lengths.min() > 0, "an empty descriptor"
    consumer, producer = consumer + c, producer + p
    assert (consumer + lengths <= c_end).all(), "behind the end of a consumer's region"
    assert (producer + lengths <= p_end).all(), "behind the end of a producer's region"
    return Runs(consumer, producer, lengths, index)


class Marks(NamedTuple):
    """Addresses of bytes in a consumer rank's memory, and their coordinates."""

    addresses: Ints
    coordinates: Ints


class Demand(NamedTuple):
    """What must be written, and what may be: the head before a window's start, and the tail behind the last token."""

    required: Marks
    head: Marks
    tail: Marks


def demand(rank: Rank, engines: Engines, request: Request) -> Demand:
    """Required are bytes whose tile has a wanted token, in blocks that the consumer has.

    The head are earlier wanted tokens that share a block with the window's start on both sides; the tail are later
    tokens in the block of the last.
    """
    first, end = request.first, request.end
    parts: list[list[Ints]] = [[np.zeros((2, 0), np.int64)] for _ in Demand._fields]
    for group, sheet in rank.sheets.items():
        sizes, window = engines.block_sizes[group], request.window_starts[group]
        ids, first_tokens = blocks(request.tables[0][group], sizes[0])
        if first == end or not len(ids):
            continue
        both = np.stack([sheet.address + ids * sheet.block_stride, sheet.coordinate + first_tokens])
        starts, low = sheet.start + first_tokens, max(first, window)
        required = (starts > low - sheet.span) & (starts < end) & (low < end)
        parts[0].append(both[:, required])
        row = np.searchsorted(first_tokens[:, 0], window // sizes[0] * sizes[0])
        if window > first and row < len(ids):
            at_least = max(first, window_block(window, sizes))
            head = (starts[row] > at_least - sheet.span) & (starts[row] < end) & ~required[row]
            parts[1].append(both[:, row, head])
        if first_tokens[-1, 0] <= end - 1 < first_tokens[-1, 0] + sizes[0]:
            parts[2].append(both[:, -1, starts[-1] >= end])
    return Demand(*(Marks(*np.concatenate(part, axis=1)) for part in parts))


class Surplus(NamedTuple):
    """Bytes of the head and of the tail that were written, by plan."""

    head: Ints
    tail: Ints


def judge(rank: Rank, wanted: Demand, plans: Sequence[TransferPlan], memory: Ints) -> Surplus:
    """Apply the plans of a consumer rank with plain copies, and look at every byte of its memory.

    Each required byte was written once, with its own coordinate; no other byte was, but for the head and the tail, and
    then with their own coordinates too. Each plan counts its bytes right; those of the head count as required.
    """
    moved = runs(rank, plans)
    firsts = np.cumsum(moved.lengths) - moved.lengths
    total = int(moved.lengths.sum())
    steps = np.arange(total)
    targets = np.repeat(moved.consumer - firsts, moved.lengths) + steps
    size = int(rank.regions[-1])
    times = np.bincount(targets, minlength=size)
    assert times.max() <= 1, "a byte was written twice"
    after, writer = np.full(size, NOTHING), np.full(size, len(plans))
    after[targets] = memory[np.repeat(moved.producer - firsts, moved.lengths) + steps]
    writer[targets] = np.repeat(moved.plan, moved.lengths)

    named = np.zeros(size, np.bool_)
    for marks in wanted:
        named[marks.addresses] = True
    assert named.sum() == sum(len(marks.addresses) for marks in wanted), "two coordinates share a byte"
    assert not times[~named].any(), "written outside"
    right = [after[marks.addresses] == marks.coordinates for marks in wanted]
    assert right[0].all(), "a required byte is missing or wrong"
    untouched = [times[marks.addresses] == 0 for marks in wanted]
    assert (right[1] | untouched[1]).all(), "a byte of the head is wrong"
    assert (right[2] | untouched[2]).all(), "a byte of the tail is wrong"

    required, head, tail = (
        np.bincount(writer[marks.addresses], minlength=len(plans) + 1)[: len(plans)] for marks in wanted
    )
    assert [plan.required_bytes for plan in plans] == (required + head).tolist(), "required_bytes"
    assert [plan.num_bytes for plan in plans] == (required + head + tail).tolist(), "num_bytes"
    return Surplus(head, tail)


class Failure(AssertionError):
    """A case did not pass, or could not be planned; the text says how to see it again."""


def run_seed(seed: int) -> Counter[str]:
    """All requests of one seed's engines. Returns counts: of cases, of bytes, and of cases with each feature."""
    counts: Counter[str] = Counter()
    where = "engines"
    try:
        made = prepare(seed)
        counts["engine pairs"] = 1
        counts["pairs of ranks"] = sum(len(rank.sources) for rank in made.bench.ranks)
        for number, request in enumerate(made.requests):
            where = f"request {number}: {request}"
            counts.update(run_request(made.bench, request))
    except Exception as error:
        raise Failure(
            f"seed {seed}, {where}: {error!r}; replay: python tests/plan/bulk.py --seed {seed} --cases 1"
        ) from error
    return counts


class Made(NamedTuple):
    bench: Bench
    requests: Iterator[Request]


def prepare(seed: int) -> Made:
    """What a seed draws."""
    rng = Random(seed)
    ready = bench(draw_engines(rng), rng)
    num_requests = max(4, CASES_PER_SEED // max(1, sum(len(rank.sources) for rank in ready.ranks)))
    return Made(ready, (draw_request(ready.engines, rng) for _ in range(num_requests)))


def run_request(bench: Bench, request: Request) -> Counter[str]:
    counts: Counter[str] = Counter()
    memory, seen = fill(bench, request), of_request(bench.engines, request)
    for rank in bench.ranks:
        plans = bind(rank, request)
        surplus = judge(rank, demand(rank, bench.engines, request), plans, memory)
        for source, plan, head, tail in zip(rank.sources, plans, *surplus, strict=True):
            counts["plans"] += 1
            if not plan.num_bytes:
                continue
            counts["cases"] += 1
            counts["bytes"] += plan.num_bytes
            counts["descriptors"] += plan.num_descriptors
            counts["surplus in the last block"] += bool(tail)
            counts["surplus before a window"] += bool(head)
            counts.update(source.features)
            counts.update(frozenset().union(*(seen[group] for group in source.groups)))
    return counts


def run_chunk(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_seed(seed))
    return counts


def run(seed: int, num_cases: int) -> Counter[str]:
    """Seed after seed, from the given one on, until there are so many cases."""
    counts: Counter[str] = Counter()
    for one in count(seed):
        counts.update(run_seed(one))
        if counts["cases"] >= num_cases:
            break
    return counts


def run_on_cores(seed: int, num_cases: int, workers: int, seeds_per_chunk: int = 25) -> Counter[str]:
    """The same in several processes, which are given a chunk of seeds at a time; all seeds of a chunk count."""
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        chunks = (range(at, at + seeds_per_chunk) for at in count(seed, seeds_per_chunk))
        pending: list[Future[Counter[str]]] = [pool.submit(run_chunk, next(chunks)) for _ in range(3 * workers)]
        try:
            while counts["cases"] < num_cases:
                counts.update(pending.pop(0).result())
                pending.append(pool.submit(run_chunk, next(chunks)))
        finally:
            for future in pending:
                future.cancel()
    return counts


def report(counts: Counter[str]) -> list[str]:
    """What was looked at, line by line."""
    totals = ("cases", "plans", "engine pairs", "pairs of ranks", "bytes", "descriptors")
    lines = [", ".join(f"{counts[key]:,} {key}" for key in totals)]
    for what, wanted in (("pairs of TP sizes", False), ("pairs of TP sizes with a number of KV heads", True)):
        every = [key for key in splits() if key.endswith("heads") == wanted]
        lines.append(f"{sum(key in counts for key in every)} of {len(every)} {what}")
    return lines + [f"{counts[key]:>9,} {key}" for key in FEATURES]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan drawn cases and judge each byte by byte.")
    parser.add_argument("--cases", type=int, default=10_000, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    if args.workers > 1:
        counts = run_on_cores(args.seed, args.cases, args.workers)
    else:
        counts = run(args.seed, args.cases)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    print("\n".join(report(counts)))
    rate = f"{counts['cases'] / wall_s:.0f} cases/s in {wall_s:.1f} s"
    print(rate + (f", {counts['cases'] / cpu_s:.0f} per second of processor" if args.workers == 1 else ""))


if __name__ == "__main__":
    main()
