"""`kvferry plan` itself: from options to engines and a request, and from the survey to what is printed."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import typer
from rich.console import Console

from kvferry.cli.errors import Problem
from kvferry.cli.plan import cases, data, identity, models, sides, svg, text, words
from kvferry.cli.plan.advice import Advice, Maker, advise, warnings
from kvferry.cli.plan.answers import differing
from kvferry.cli.plan.caches import engine
from kvferry.cli.plan.cases import BlockIds
from kvferry.cli.plan.engines import Engine
from kvferry.cli.plan.models import Model
from kvferry.cli.plan.requests import MOST_TOKENS, Request, adjacent, longest_block, scattered
from kvferry.cli.plan.sides import Side
from kvferry.cli.plan.sizes import sizes
from kvferry.cli.plan.survey import Survey, descriptors, survey
from kvferry.layout import LayoutError
from kvferry.protocol.messages import shorten
from kvferry.topology import TopologyError

DEFAULT_TOKENS = 1024

_MOST_TO_PLAN_TWICE = 1 << 18
"""Descriptors of a request that is planned a second time, with adjacent blocks."""

_MOST_TO_LIST = 1 << 18


class Options(NamedTuple):
    """What was typed; see `kvferry plan --help`."""

    consumer: str = ""
    producer: str = ""
    model: Path | None = None
    case: Path | None = None
    name: str | None = None
    tokens: str | None = None
    block_ids: str | None = None
    descriptors: bool = False
    as_json: bool = False
    svg: Path | None = None


class Planned(NamedTuple):
    """A survey, and what would be better; None if nothing else was planned. differs: where a case says otherwise."""

    survey: Survey
    advice: tuple[Advice, ...] | None = None
    differs: tuple[str, ...] = ()


def run(options: Options, console: Console) -> int:
    """0 if all of it can be planned, else 1. Raises Problem, in one line, for what can't be understood."""
    try:
        return _run(options, console)
    except Problem as problem:
        raise Problem(shorten(problem.message), problem.advice) from None


def _run(options: Options, console: Console) -> int:
    planned = _of_cases(options) if options.case is not None else [_of_models(options)]
    if options.svg is not None:
        if len(planned) > 1:
            raise Problem(
                f"--svg draws one case, {words.brief(str(options.case))} has {len(planned)}", "Choose one with --name."
            )
        _write(options.svg, svg.picture(planned[0].survey, planned[0].advice))
    listed = options.descriptors or options.block_ids is not None
    count = sum(one.survey.total.descriptors for one in planned)
    if listed and count > _MOST_TO_LIST:
        raise Problem(f"{count:,} descriptors to list, at most {_MOST_TO_LIST:,} are", "Ask for fewer with --tokens.")
    if options.as_json:
        found = [data.as_json(*one, listed) for one in planned]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2, ensure_ascii=False))
    else:
        for number, one in enumerate(planned):
            if number:
                typer.echo()
            text.show(*one, console, listed)
    return 1 if any(one.survey.refused or one.differs for one in planned) else 0


def _of_cases(options: Options) -> list[Planned]:
    """Layouts that a file spells out."""
    for option in ("consumer", "producer", "model"):
        if getattr(options, option):
            raise Problem(f"--case and --{option} exclude each other: a case has its own layouts")
    found = []
    for case in cases.load(options.case or Path(), options.name):
        others, tokens = _block_ids(options.block_ids), _tokens(options.tokens)
        is_as_written = others is None and tokens is None
        if is_as_written:  # the case's own tokens need not fit into other blocks
            tokens = case.tokens
        _check_groups((case.consumer, case.producer), others)
        request = _request(case.consumer, case.producer, tokens, others or case.block_ids)
        one = survey(case.consumer, case.producer, request)
        if is_as_written:
            found.append(Planned(one, differs=tuple(differing(case.answers, one))))
        else:
            note = ("The answers in the file are not compared: they are for its own blocks and tokens.",)
            found.append(Planned(replace(one, notes=note if case.answers.are_any else ())))
    return found


def _of_models(options: Options) -> Planned:
    """Layouts that vLLM would make for a model."""
    if options.name is not None:
        raise Problem("--name chooses a case, and there is no --case")
    consumer = sides.parse("--consumer", options.consumer, options.model)
    producer = sides.parse("--producer", options.producer, options.model)
    read = {"consumer": _model(consumer, producer), "producer": _model(producer, consumer)}
    names = dict(zip(read, identity.names(read["consumer"], read["producer"]), strict=True))
    ids, tokens = _block_ids(options.block_ids), _tokens(options.tokens)
    most = max((max(group, default=0) for side in ids or () for group in side), default=0)
    end = tokens[1] if tokens else 1 if ids else DEFAULT_TOKENS

    @functools.lru_cache(maxsize=32)
    def make(role: str, side: Side, num_tokens: int) -> Engine:
        return engine(role, read[role], side, num_tokens, most + 1 if ids else 0, names[role])

    blocks = (_block(role, side, read[role]) for role, side in (("consumer", consumer), ("producer", producer)))
    room = max(end, *blocks)
    engines = make("consumer", consumer, room), make("producer", producer, room)
    _check_groups(engines, ids)
    request = _request(*engines, tokens or (None if ids else (0, end)), ids)
    found = survey(*engines, request)
    ids_of_models = consumer.model_id, producer.model_id
    about_models = tuple(identity.notes(read["consumer"], read["producer"], ids_of_models))
    if ids is not None:
        return Planned(replace(found, notes=about_models))
    found = replace(found, adjacent_descriptors=_adjacent(found), notes=(*_notes(found), *about_models))
    return Planned(found, _advice(found, consumer, producer, make))


def _advice(found: Survey, consumer: Side, producer: Side, make: Maker) -> tuple[Advice, ...] | None:
    """What would take fewer descriptors; None where they are few, or something else is refused than their number."""
    if warnings(found):
        return advise(found, consumer, producer, make)
    if not found.refused:
        return None
    engines = found.consumer, found.producer
    few = min(found.request.end_token, max(map(longest_block, engines)))
    fewer = survey(*engines, scattered(*engines, 0, few))
    if fewer.refused or not warnings(fewer):
        return None
    return advise(fewer, consumer, producer, make, refused=found.request)


def _model(side: Side, other: Side) -> Model:
    """The model of a side, or of the other where it has none."""
    path = side.model or other.model
    if path is None:
        raise Problem(
            "which model? Give --model, or a side's own as --consumer config.json,tp=4",
            f"Understood are: {models.understood()}.",
        )
    return models.read(path)


def _block(role: str, side: Side, model: Model) -> int:
    try:
        return sizes(model, side).block_tokens
    except (LayoutError, TopologyError) as error:
        raise Problem(f"--{role}: {error}") from None


def _check_groups(engines: tuple[Engine, Engine], given: BlockIds | None) -> None:
    """Raises Problem unless --block-ids has a list for each KV cache group of both sides."""
    for one, lists in zip(engines, given or (), strict=False):
        if len(lists) != len(one.groups):
            kinds = Counter(group.label for group in one.groups if group.label)
            of = ", ".join(f"{count} {label}" for label, count in kinds.items())
            groups = f"{words.count(len(one.groups), 'KV cache group')}{f': {of}' if of else ''}"
            lists_given = "1 list is" if len(lists) == 1 else f"{len(lists)} lists are"
            raise Problem(f"--block-ids: the {one.role} has {groups}; {lists_given} given")


def _request(consumer: Engine, producer: Engine, tokens: tuple[int, int] | None, block_ids: BlockIds | None) -> Request:
    """The request of the given blocks, or of blocks that lie scattered."""
    if block_ids is None:
        return scattered(consumer, producer, *(tokens or (0, min(longest_block(consumer), MOST_TOKENS))))
    if tokens is None:
        held = zip(consumer.groups, block_ids[0], strict=False)
        counts = (group.tokens * len(ids) for group, ids in held if not group.kept.keeps_state)
        tokens = 0, min(min(counts, default=1), MOST_TOKENS)
    return Request(cases.tables(block_ids[0]), cases.tables(block_ids[1]), *tokens)


def _adjacent(found: Survey) -> int | None:
    """Descriptors of the same request if block ids follow one another on both sides."""
    if found.refused or found.total.descriptors > _MOST_TO_PLAN_TWICE:
        return None
    tokens = found.request.first_token, found.request.end_token
    return descriptors(found, adjacent(found.consumer, found.producer, *tokens))


def _notes(found: Survey) -> Iterator[str]:
    """What a person should know about a request that was made up."""
    if found.refused:
        return
    yield "Block ids are taken as scattered over both caches, as after some time of serving."
    if any(group.kept.window is not None for group in found.consumer.groups):
        yield "Of a sliding window only those blocks move that the next token looks at."
    if any(group.kept.keeps_state for group in found.consumer.groups):
        yield "A state is not cut into blocks: it moves whole, once for a request."


def _tokens(given: str | None) -> tuple[int, int] | None:
    """ "1024", or "16:48" from the first token on that is wanted. Raises Problem."""
    if given is None:
        return None
    first, colon, end = given.rpartition(":")
    first, where = first if colon else "0", f"--tokens {words.brief(given)}"
    if not (first.isdecimal() and end.isdecimal()):
        raise Problem(f"{where}: must be a number of tokens, or FIRST:END")
    start, stop = sides.decimal(first), sides.decimal(end)
    if start is None or stop is None or max(start, stop) > MOST_TOKENS:
        raise Problem(f"{where}: more than {MOST_TOKENS:,}")
    if start >= stop:
        raise Problem(f"{where}: from token {start} to token {stop} there is none")
    return start, stop


def _block_ids(given: str | None) -> BlockIds | None:
    """ "[[1,2,7]]:[[4,5,9]]": the consumer's and the producer's, one list for each KV cache group. Raises Problem."""
    if given is None:
        return None
    where, parts = f"--block-ids {words.brief(given)}", given.split(":")
    if len(parts) != 2:
        raise Problem(f"{where}: must be CONSUMER:PRODUCER, such as [[1,2,7]]:[[4,5,9]]")
    return _ids(where, "consumer", parts[0]), _ids(where, "producer", parts[1])


def _ids(where: str, side: str, part: str) -> list[list[int]]:
    try:
        return msgspec.json.decode(part, type=cases.Tables)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        what = f"the {side}'s must be one list of numbers for each KV cache group"
        raise Problem(f"{where}: {what}, such as [[1,2,7]]: {error}") from None


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise Problem(f"--svg {words.brief(str(file))} can't be written: {error.strerror or error}") from None
    except ValueError as error:  # a path that no file can have
        raise Problem(f"--svg {words.brief(str(file))} can't be written: {error}") from None
