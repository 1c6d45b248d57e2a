"""Are two config.json those of one model? The handshake compares a digest of all that they say.

A key that only one of them has may have that value by default in the other, which only transformers could tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvferry.cli.plan import words
from kvferry.cli.plan.keys import Config
from kvferry.cli.plan.models import Model
from kvferry.vllm.digests import NOT_THE_MODEL

_MOST_KEYS = 4
_ALWAYS_NAMED = ("model_type", "num_hidden_layers")


class Difference(NamedTuple):
    """A key, by its path in the file, and what either side has there."""

    key: str
    consumer: Any
    producer: Any


def differences(consumer: Config, producer: Config) -> list[Difference]:
    """What a digest of both would differ in for sure: keys that both have, with other values."""
    return list(_differences("", consumer, producer))


def _differences(path: str, consumer: Config, producer: Config) -> Iterator[Difference]:
    for key in _compared(consumer):
        if key not in producer or consumer[key] == producer[key]:
            continue
        mine, theirs, where = consumer[key], producer[key], f"{path}{key}"
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(f"{where}.", mine, theirs)
        else:
            yield Difference(where, mine, theirs)


def one_sided(one: Config, other: Config) -> list[str]:
    """Keys that only one of two configurations has."""
    return [key for key in _compared(one) if key not in other]


def _compared(config: Config) -> list[str]:
    return [key for key in config if key not in NOT_THE_MODEL and not str(key).startswith("_")]


def names(consumer: Model, producer: Model) -> tuple[str, str]:
    """What each side calls its model: equal unless their files differ in what the handshake compares."""
    found = [one for one in differences(consumer.config, producer.config) if one.key not in _ALWAYS_NAMED]
    return _name(consumer, [(one.key, one.consumer) for one in found]), _name(
        producer, [(one.key, one.producer) for one in found]
    )


def notes(consumer: Model, producer: Model, model_ids: tuple[str | None, str | None]) -> Iterator[str]:
    """What is not compared here of that by which the handshake tells models apart."""
    if None not in model_ids:
        yield "Of the models only their model_id is compared, as at the handshake."
        return
    sides = (("consumer", consumer, producer), ("producer", producer, consumer))
    for role, one, other in sides:
        if keys := one_sided(one.config, other.config):
            yield (
                f"Only the {role}'s config.json has {words.brief(', '.join(keys))}: the handshake refuses that unless "
                "it is the other side's default."
            )
    yield "The models' weights are not compared: the handshake refuses models whose weights differ."


def _name(model: Model, differing: Sequence[tuple[str, Any]]) -> str:
    of = f"{model.model_type} of {model.num_layers} layers"
    listed = [f"{words.brief(key)} {words.value(value)}" for key, value in differing[:_MOST_KEYS]]
    if len(differing) > _MOST_KEYS:
        listed.append(f"{len(differing) - _MOST_KEYS} more keys")
    return f"{of} with {', '.join(listed)}" if listed else of
