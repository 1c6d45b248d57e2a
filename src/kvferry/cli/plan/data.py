"""What was planned, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvferry.cli.plan import text
from kvferry.cli.plan.advice import Advice, warnings
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.survey import Numbers, Pair, Part, Refused, Survey
from kvferry.layout import Refusal


def as_json(
    found: Survey, advice: Sequence[Advice] | None, differing: Sequence[str], descriptors: bool
) -> dict[str, Any]:
    """Everything, as docs/plan.md describes it: one entry for each pair of ranks."""
    return {
        "consumer": _engine(found.consumer),
        "producer": _engine(found.producer),
        "tokens": [found.request.first_token, found.request.end_token],
        "possible": not found.refused,
        "pairs": [_pair(found, pair, descriptors) for pair in found.pairs],
        "total": _numbers(found.total),
        "required_bytes": sum(pair.required_bytes for pair in found.pairs),
        "adjacent_descriptors": found.adjacent_descriptors,
        "refused": [_refused(one) for one in found.refused],
        "warnings": [
            {"consumer_rank": one.pair.consumer, "producer_rank": one.pair.producer, **_part(one.part)}
            for one in warnings(found)
        ],
        "advice": [
            {
                "settings": [{"side": side, "set": setting} for side, setting in one.change.settings],
                "consumer_rank": one.consumer_rank,
                "now": None if one.now is None else _numbers(one.now),
                "then": _numbers(one.then),
            }
            for one in advice or ()
        ],
        "notes": list(text.notes(found)),
        "differs": list(differing),
    }


def _engine(engine: Engine) -> dict[str, Any]:
    return {
        "title": engine.title,
        "settings": engine.settings,
        "ranks": [rank.label for rank in engine.ranks],
        "groups": [
            {"cache": group.label, "block_tokens": _tokens(group.tokens, group.kept.keeps_state)}
            for group in engine.groups
        ],
        "num_blocks": engine.num_blocks,
    }


def _tokens(tokens: int, keeps_state: bool) -> int | None:
    """None for a state, which is not cut into blocks."""
    return None if keeps_state else tokens


def _pair(found: Survey, pair: Pair, descriptors: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "consumer_rank": pair.consumer,
        "producer_rank": pair.producer,
        "labels": list(text.ranks_of(found, pair)),
        "parts": [_part(part) for part in pair.parts],
        "request": _numbers(pair.request),
        "required_bytes": pair.required_bytes,
    }
    if descriptors:
        data["descriptors"] = _descriptors(pair)
    return data


def _part(part: Part) -> dict[str, Any]:
    return {
        "cache": part.label,
        "layers": [{"name": one.name, "heads": [one.start, one.stop]} for one in part.layers],
        "block": None if part.block is None else _numbers(part.block),
        "request": _numbers(part.request),
    }


def _numbers(numbers: Numbers) -> dict[str, Any]:
    return {
        "tokens": numbers.tokens,
        "descriptors": numbers.descriptors,
        "bytes": numbers.num_bytes,
        "run_bytes": [numbers.shortest, numbers.longest],
    }


def _descriptors(pair: Pair) -> list[Mapping[str, Any]]:
    return [
        {
            "region": [batch.consumer_region, batch.producer_region],
            "layers": list(layers),
            "runs": np.stack((batch.consumer_offsets, batch.producer_offsets, batch.lengths), axis=1).tolist(),
        }
        for batch, layers in pair.descriptors
    ]


def _refused(refused: Refused) -> dict[str, Any]:
    error = refused.error
    data: dict[str, Any] = {"text": refused.text, "pairs": [list(pair) for pair in refused.pairs]}
    if isinstance(error, Refusal):
        data |= {"field": error.field, "consumer": _value(error.consumer), "producer": _value(error.producer)}
    return data


def _value(one: object) -> str | None:
    """None for a side that has no part in it."""
    return None if one is None else str(one)
