"""What was planned, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from kvferry.cli.plan import rank_rules, words
from kvferry.cli.plan.advice import FEW_BYTES, MANY_DESCRIPTORS, Advice, warnings
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.survey import Numbers, Owned, Pair, Part, Refused, Survey
from kvferry.layout import CacheLayout

_MOST_REFUSALS = 8
_MOST_LETTERS = 26


def show(
    found: Survey, advice: Sequence[Advice] | None, differing: Sequence[str], console: Console, descriptors: bool
) -> None:
    """Both sides, what is refused or not as a case says, what moves, what takes too many descriptors, and what else to
    know."""

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for engine in (found.consumer, found.producer):
        say(f"{engine.role}  {side(engine)}")
    for line in (*refusals(found), *(f"differs: {one}" for one in differing)):
        say(line, "bold red")
    if found.pairs:
        say(heading(found))
        console.print(table(found))
        say(summary(found))
    for line in warning_lines(found, advice):
        say(line, "yellow")
    for line in notes(found):
        say(line, "dim")
    if descriptors:
        for line in descriptor_lines(found):
            print(line, file=console.file)  # there may be very many, and they have no style


def side(engine: Engine) -> str:
    """ "llama: tp 4, block 16, LBHNC, bfloat16, 4 ranks"."""
    title = f"{engine.title}: " if engine.title else ""
    ranks = words.count(len(engine.ranks), "rank")
    return title + ", ".join(part for part in (engine.settings, ranks) if part)


Row = tuple[Part, tuple[Pair, ...]]
"""Pairs of ranks that take the same from one another, but for the heads; and one of the parts."""


def rows(found: Survey) -> list[Row]:
    """Parts that take the same numbers for as many heads of the same layers, over all pairs."""
    alike: dict[object, list[tuple[Part, Pair]]] = {}
    for pair in found.pairs:
        for part in pair.parts:
            layers = tuple((layer.name, layer.stop - layer.start) for layer in part.layers)
            alike.setdefault((part.label, layers, part.block, part.request), []).append((part, pair))
    return [(group[0][0], tuple(pair for _, pair in group)) for group in alike.values()]


def table(found: Survey) -> Table:
    """For each pair of ranks; those that are alike share a row."""
    made = Table(box=None, header_style="bold", padding=(0, 1))
    shown = rows(found)
    has_labels = any(part.label for part, _ in shown)
    made.add_column("consumer ← producer")
    for column in ("cache",) * has_labels + ("layers", "heads"):
        made.add_column(column)
    for lines in number_columns(found, shown):
        made.add_column("\n".join(lines), justify="right")
    for part, pairs in shown:
        ranks, label, *rest = cells(found, part, pairs)
        made.add_row(ranks, *((label,) if has_labels else ()), *rest)
    return made


def cells(found: Survey, part: Part, pairs: Sequence[Pair]) -> tuple[str, ...]:
    """A row: ranks, cache, layers, heads, length of a descriptor, a block, the request."""
    return (
        rank_rules.ranks([ranks_of(found, pair) for pair in pairs]),
        part.label,
        words.layers([layer.name for layer in part.layers]),
        _heads(found, part, pairs),
        words.sizes(part.request.shortest, part.request.longest) if part.request.descriptors else "-",
        "-" if part.block is None else _counted(part.block),
        _counted(part.request),
    )


def number_columns(found: Survey, shown: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """The names of the columns with numbers, two lines each."""
    counted = "descriptors, bytes of"
    return (
        ("bytes of", "a descriptor"),
        (counted, _block(found, shown)),
        (counted, f"{found.request.num_tokens:,} tokens"),
    )


def _block(found: Survey, shown: Sequence[Row]) -> str:
    """ "a block of 16"; "the first block of 16" where later ones may meet the producer's blocks otherwise."""
    tokens = sorted({part.block.tokens for part, _ in shown if part.block is not None})
    sizes = [[g.tokens for g in engine.groups if not g.kept.keeps_state] for engine in (found.consumer, found.producer)]
    differ = any(max(pair) % min(pair) for pair in zip(*sizes, strict=False))
    num_ranks = max(layer.context.size for layout in found.consumer.layouts for layer in layout.layers)
    over = f" ({num_ranks} ranks)" if num_ranks > 1 else ""
    block = "the first block" if differ else "a block"
    return f"{block} of {' or '.join(f'{one:,}' for one in tokens)}{over}" if tokens else "a block"


def heading(found: Survey) -> str:
    """What a row of the table is about."""
    each = "Each row is what one consumer rank takes of one producer rank"
    return f"What is not refused would move like this. {each}." if found.refused else f"{each}:"


def ranks_of(found: Survey, pair: Pair) -> tuple[str, str]:
    """The labels of a pair's consumer and producer rank."""
    return found.consumer.ranks[pair.consumer].label, found.producer.ranks[pair.producer].label


def _counted(numbers: Numbers) -> str:
    return f"{numbers.descriptors:,}, {words.size(numbers.num_bytes)}"


def _heads(found: Survey, part: Part, pairs: Sequence[Pair]) -> str:
    """The heads that each pair of ranks shares, of how many."""
    name = part.layers[-1].name
    total = next(layer.heads.total for layer in found.consumer.layouts[pairs[0].consumer].layers if layer.name == name)
    if total == 1:
        return "all"
    shares = [words.heads(one.layers) for pair in pairs for one in pair.parts if one.label == part.label]
    listed = " | ".join(dict.fromkeys(shares))
    if len(listed) > _MOST_LETTERS:
        return f"{part.layers[-1].stop - part.layers[-1].start} of {total} each"
    return f"{listed} of {total}"


def summary(found: Survey) -> str:
    """The totals over all pairs of ranks."""
    total, count = found.total, len(found.pairs)
    text = f"In all {words.count(total.descriptors, 'descriptor')} and {words.size(total.num_bytes)}"
    text += f" over {count} pairs of ranks" if count > 1 else ""
    required = sum(pair.required_bytes for pair in found.pairs)
    if required < total.num_bytes:
        text += f", {words.size(required)} of them for the tokens that were asked for"
    if found.adjacent_descriptors not in (None, total.descriptors):
        text += f"; {found.adjacent_descriptors:,} descriptors where block ids follow one another on both sides"
    return text + "."


def refusals(found: Survey) -> Iterator[str]:
    """What can't be planned, and which ranks it keeps apart."""
    for refused in found.refused[:_MOST_REFUSALS]:
        yield f"refused: {refused.text}{_where(found, refused)}"
    if len(found.refused) > _MOST_REFUSALS:
        yield f"refused: {len(found.refused) - _MOST_REFUSALS} more, see --json"


def _where(found: Survey, refused: Refused) -> str:
    pairs = [
        (found.consumer.ranks[consumer].label, "any" if producer is None else found.producer.ranks[producer].label)
        for consumer, producer in refused.pairs
        if consumer is not None
    ]
    return f" [ranks {rank_rules.ranks(pairs)}]" if pairs else ""


def warning_lines(found: Survey, advice: Sequence[Advice] | None) -> Iterator[str]:
    """Where descriptors explode, and what would help."""
    found_warnings = warnings(found)
    for one in found_warnings:
        numbers, block = one.numbers, one.part.block
        what = f"a block of {block.tokens:,} tokens" if block else "a request"
        name = f" ({one.part.label})" if one.part.label else ""
        consumer, producer = ranks_of(found, one.pair)
        yield (
            f"warning: descriptors explode{name}: {what} takes {numbers.descriptors:,} of "
            f"{words.size(numbers.mean_bytes)} on average (consumer {consumer} ← producer {producer}). More than "
            f"{MANY_DESCRIPTORS} for a layer of a block, or less than {words.size(FEW_BYTES)} each, cost more to post "
            "than to move."
        )
    for advised in advice or ():
        yield f"  {advice_text(advised)}"
    if advice == ():
        yield "  Nothing else that was planned (memory orders, block sizes, orders of a state) takes half as many."


def advice_text(advice: Advice) -> str:
    """What to set, and what it saves."""
    sides: dict[str, list[str]] = {}
    for role, setting in advice.change.settings:
        sides.setdefault(setting, []).append(role)
    settings = " and ".join(f"{setting} on {_sides(roles)}" for setting, roles in sides.items())
    able = " if the attention backend can," if advice.change.joins_layers else ""
    now, then = advice.now, advice.then
    sources = f" from its {advice.num_sources} producer ranks together" if advice.num_sources > 1 else ""
    instead = f", instead of {now.descriptors:,} of {words.size(now.mean_bytes)}" if now else ""
    return (
        f"With {settings},{able} consumer rank {advice.consumer_rank} takes {then.descriptors:,} descriptors of "
        f"{words.size(then.mean_bytes)} for {then.tokens:,} tokens{sources}{instead}."
    )


def _sides(roles: Sequence[str]) -> str:
    return "both sides" if len(roles) > 1 else f"the {roles[0]}"


def notes(found: Survey) -> Iterator[str]:
    """What the numbers do not say."""
    yield from found.notes
    yield from found.consumer.notes
    yield from found.producer.notes


def descriptor_lines(found: Survey) -> Iterator[str]:
    """Every descriptor: offsets in bytes from the start of either region, and whose it is."""
    for pair in found.pairs:
        consumer, producer = ranks_of(found, pair)
        regions: dict[tuple[int, int], list[Owned]] = {}
        for one in pair.descriptors:
            regions.setdefault((one.batch.consumer_region, one.batch.producer_region), []).append(one)
        for (region, _), owned in regions.items():
            owner = _only_layer(found.consumer.layouts[pair.consumer], region)
            count = words.count(sum(len(one.batch.lengths) for one in owned), "descriptor")
            where = f"layer {owner}" if owner else f"region {region}"
            yield f"consumer {consumer} ← producer {producer}, {where}: {count}"
            header = f"{'consumer offset':>20} {'producer offset':>20} {'bytes':>12}"
            yield header if owner else f"{header}  layer"
            for one in owned:
                yield from _run_lines(one, "" if owner else f"  {_names(one.layers)}")


def _run_lines(one: Owned, end: str) -> Iterator[str]:
    batch = one.batch
    columns = (batch.consumer_offsets.tolist(), batch.producer_offsets.tolist(), batch.lengths.tolist())
    for ours, theirs, length in zip(*columns, strict=True):
        yield f"{ours:>20} {theirs:>20} {length:>12}{end}"


def _names(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"layers {words.layers(layers)}"


def _only_layer(layout: CacheLayout, region: int) -> str:
    """The layer that has a region for itself; empty if there are several."""
    names = [layer.name for layer in layout.layers if layer.region == region]
    return names[0] if len(names) == 1 else ""
