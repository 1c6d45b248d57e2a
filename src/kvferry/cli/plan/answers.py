"""What a case says will come of it, and where that differs from what was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.cli.plan import words
from kvferry.cli.plan.survey import Pair, Survey

Run = tuple[int, int, int]
"""Offset in the consumer's region and in the producer's, and length, in bytes."""

Runs = Mapping[str, Sequence[Run]]
"""Descriptors by layer."""


class Answers(NamedTuple):
    """All of them may be missing. descriptors: of each pair of ranks. refused: words that a refusal has."""

    num_bytes: int | None = None
    required_bytes: int | None = None
    source_ranks: Sequence[int] | None = None
    descriptors: Sequence[Runs] | None = None
    refused: Sequence[str] | None = None

    @property
    def are_any(self) -> bool:
        return any(one is not None for one in self)


def differing(answers: Answers, found: Survey) -> Iterator[str]:
    """A line for each answer that is another one, with both."""
    texts = [one.text for one in found.refused]
    if answers.refused is not None:
        if not any(all(word in text for word in answers.refused) for text in texts):
            came = "; ".join(texts) or "a plan"
            yield f"the case says a refusal with {words.value(list(answers.refused))}, there is {words.brief(came)}"
    elif texts and answers.are_any:
        yield "the case says a plan, there is a refusal"
    else:
        yield from _numbers(answers, found)


def _numbers(answers: Answers, found: Survey) -> Iterator[str]:
    for name, said, planned in (
        ("num_bytes", answers.num_bytes, found.total.num_bytes),
        ("required_bytes", answers.required_bytes, sum(pair.required_bytes for pair in found.pairs)),
        ("source_ranks", _list(answers.source_ranks), [pair.producer for pair in found.pairs]),
        ("pairs of ranks", _length(answers.descriptors), len(found.pairs)),
    ):
        if said is not None and said != planned:
            yield f"{name}: the case says {words.value(said)}, planned is {words.value(planned)}"
    for runs, pair in zip(answers.descriptors or (), found.pairs, strict=False):
        yield from _runs(runs, by_layer(pair), f"descriptors from producer {pair.producer}")


def _list(given: Sequence[int] | None) -> list[int] | None:
    return None if given is None else list(given)


def _length(given: Sequence[Runs] | None) -> int | None:
    return None if given is None else len(given)


def by_layer(pair: Pair) -> dict[str, list[Run]]:
    """The descriptors under the first of the layers that they belong to."""
    found: dict[str, list[Run]] = {}
    for batch, layers in pair.descriptors:
        columns = (batch.consumer_offsets, batch.producer_offsets, batch.lengths)
        runs = found.setdefault(layers[0], [])
        runs += [(run[0], run[1], run[2]) for run in np.stack(columns, axis=1).tolist()]
    return found


def _runs(said: Runs, planned: Mapping[str, Sequence[Run]], where: str) -> Iterator[str]:
    """The first descriptor of each layer that is another one, or missing, on either side."""
    for layer in dict.fromkeys((*said, *planned)):
        left, right = sorted(said.get(layer, ())), sorted(planned.get(layer, ()))
        if left == right:
            continue
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        ours, theirs = (str(list(runs[at])) if at < len(runs) else "none" for runs in (left, right))
        counts = f"of {len(left)} the case says {ours}, of {len(right)} planned is {theirs}"
        yield f"{where}, layer {words.brief(layer)}: number {at}: {counts}"
