"""Who takes from whom, in few words: each group of ranks where that is short, else a rule that holds for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvferry.cli.plan.words import ranges

_LABEL = re.compile(r"(?:pp(\d+)\.tp)?(\d+)")
_MOST_NAMES = 4
_MOST_LETTERS = 36

Pairs = Sequence[tuple[str, str]]
"""Labels of a consumer rank and of a producer rank that it takes from."""


def ranks(pairs: Pairs) -> str:
    """ "0-1 ← 0; 2-3 ← 1": every rank before an arrow takes from every rank behind it. Where that gets long:
    "2i, 2i+1 ← i, i = 0-7"; or, without such a rule, "each of 0-7 ← 4 of 0-7"."""
    return _in_full(pairs) or _rule(pairs) or _counted(pairs)


def labels(names: Iterable[str]) -> str:
    """Ranks: numbers as ranges, those of a pipeline stage too, others listed, or the first and the last of many."""
    stages: dict[str, list[int]] = {}
    listed = list(dict.fromkeys(names))
    for name in listed:
        place = _place(name)
        if place is None:
            return ", ".join(listed) if len(listed) <= _MOST_NAMES else f"{listed[0]} … {listed[-1]}"
        stages.setdefault(place.stage, []).append(place.number)
    if len(stages) > _MOST_NAMES:
        return f"{listed[0]} … {listed[-1]}"
    return ", ".join(f"{f'pp{stage}.tp' if stage else ''}{ranges(numbers)}" for stage, numbers in stages.items())


class _Place(NamedTuple):
    """stage: of the pipeline, empty where there is one. number: the TP rank."""

    stage: str
    number: int


def _place(label: str) -> _Place | None:
    found = _LABEL.fullmatch(label)
    return None if found is None else _Place(found[1] or "", int(found[2]))


def _in_full(pairs: Pairs) -> str:
    """Consumer ranks that take from the same producer ranks together; empty if that is too long."""
    sources: dict[str, list[str]] = {}
    for consumer, producer in pairs:
        sources.setdefault(consumer, []).append(producer)
    groups: dict[tuple[str, ...], list[str]] = {}
    for consumer, producers in sources.items():
        groups.setdefault(tuple(producers), []).append(consumer)
    text = "; ".join(f"{labels(consumers)} ← {labels(producers)}" for producers, consumers in groups.items())
    return text if len(groups) <= _MOST_NAMES and len(text) <= _MOST_LETTERS else ""


def _rule(pairs: Pairs) -> str:
    """One that makes exactly these pairs; empty if none of those here does."""
    places = [(_place(consumer), _place(producer)) for consumer, producer in pairs]
    numbers = {(c.number, p.number) for c, p in places if c is not None and p is not None}
    stages = {(c.stage, p.stage) for c, p in places if c is not None and p is not None}
    if len(numbers) < len(pairs) or len(stages) != 1:
        return ""
    ((consumer_stage, producer_stage),) = stages
    consumers, producers = ({pair[side] for pair in numbers} for side in (0, 1))
    for left, right, indices, made in _rules(sorted(consumers), sorted(producers)):
        if numbers == {pair for index in indices for pair in made(index)}:
            sides = _of_stage(left, consumer_stage), _of_stage(right, producer_stage)
            return f"{sides[0]} ← {sides[1]}, i = {ranges(indices)}"
    return ""


Rule = tuple[str, str, Sequence[int], Callable[[int], Iterable[tuple[int, int]]]]
"""Both sides in words, the values of i, and the pairs that one of them makes."""


def _rules(consumers: Sequence[int], producers: Sequence[int]) -> Iterable[Rule]:
    """Equal ranks, several consumers of a producer, several producers of a consumer, one of several replicas."""
    times, short = divmod(len(consumers), len(producers))
    if not short:
        yield _several(times), "i", producers, lambda i: ((times * i + nth, i) for nth in range(times))
    times, short = divmod(len(producers), len(consumers))
    if not short:
        yield "i", _several(times), consumers, lambda i: ((i, times * i + nth) for nth in range(times))
    step = producers[-1] // consumers[-1] if consumers[-1] else 0
    if step > 1:
        yield "i", f"{step}i", consumers, lambda i: ((i, step * i),)


def _several(times: int) -> str:
    """The ranks that come in one's place: "i", "2i, 2i+1", "4i to 4i+3"."""
    if times == 1:
        return "i"
    return f"{times}i, {times}i+1" if times == 2 else f"{times}i to {times}i+{times - 1}"


def _of_stage(text: str, stage: str) -> str:
    return f"{text} of pp{stage}" if stage else text


def _counted(pairs: Pairs) -> str:
    """How many producer ranks each consumer rank takes from."""
    taken: dict[str, set[str]] = {}
    for consumer, producer in pairs:
        taken.setdefault(consumer, set()).add(producer)
    counts = sorted({len(producers) for producers in taken.values()})
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"each of {labels(taken)} ← {many} of {labels(dict.fromkeys(producer for _, producer in pairs))}"
