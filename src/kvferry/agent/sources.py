"""What this worker has computed of the transfers that others may want written: fed by the engine's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

IsDone = Callable[[], bool]
"""Whether the device has done what was launched before; None stands for yes."""


class ComputeStep(msgspec.Struct, frozen=True):
    """One request's part in a step of the engine, as its scheduler knows it before the step.

    transfer_id: of the promise. attempt: counts preemptions; each begins again, in other blocks. block_ids: per KV
    cache group, by token position, as far as this step; -1 where there is none. num_tokens: computed after the step,
    from the first one; is_last: that is all that will be offered.
    """

    transfer_id: str
    attempt: int
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    is_last: bool


@dataclass
class Source:
    """One transfer as far as this worker has computed it.

    num_ready: tokens that are final in all layers; num_tokens: in the layers of `computed` as well. is_final: nothing
    will be added. A prefix that the engine's cache has counts with the first step that computes more: another request
    of that very step may be computing it.
    """

    attempt: int
    block_ids: tuple[tuple[int, ...], ...]
    num_ready: int
    num_tokens: int
    is_last: bool = True
    is_final: bool = True
    computed: set[str] = field(default_factory=set)

    def has_all(self, layers: Iterable[str], num_tokens: int) -> bool:
        """Whether these layers have so many tokens. A layer's parts (`<layer>/<part>`) are never early."""
        return num_tokens <= self.num_ready or (
            num_tokens <= self.num_tokens and all(name in self.computed for name in layers)
        )


def held(block_ids: tuple[tuple[int, ...], ...], num_tokens: int) -> Source:
    """A transfer that is computed and held."""
    return Source(0, block_ids, num_tokens, num_tokens)


class Sources:
    """News of the steps in their order, each once the device has got there; for the agent's thread."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._news: deque[tuple[IsDone | None, Callable[[], None]]] = deque()
        self._stepping: list[Source] = []

    def get(self, transfer_id: str) -> Source | None:
        return self._sources.get(transfer_id)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def waits_for_device(self) -> bool:
        return bool(self._news)

    def begin_step(self, steps: list[ComputeStep]) -> None:
        self._news.append((None, lambda: self._begin(steps)))

    def computed_layer(self, layer: str, is_done: IsDone | None) -> None:
        """In this step the layer has written its cache, once `is_done`."""
        self._news.append((is_done, lambda: self._computed(layer)))

    def end_step(self, is_done: IsDone | None) -> None:
        """All layers have."""
        self._news.append((is_done, self._end))

    def forget(self, transfer_ids: list[str]) -> None:
        self._news.append((None, lambda: self._forget(transfer_ids)))

    def advance(self) -> bool:
        """Takes in what the device has done. Whether there was any."""
        took = False
        while self._news and (self._news[0][0] is None or self._news[0][0]()):
            self._news.popleft()[1]()
            took = True
        return took

    def _begin(self, steps: list[ComputeStep]) -> None:
        self._stepping = []
        for step in steps:
            source = self._sources.get(step.transfer_id)
            if source is None or source.attempt != step.attempt:
                source = Source(step.attempt, step.block_ids, 0, step.num_tokens, step.is_last, is_final=False)
                self._sources[step.transfer_id] = source
            source.block_ids, source.num_tokens, source.is_last = step.block_ids, step.num_tokens, step.is_last
            source.computed.clear()
            self._stepping.append(source)

    def _computed(self, layer: str) -> None:
        for source in self._stepping:
            source.computed.add(layer)

    def _end(self) -> None:
        for source in self._stepping:
            source.num_ready = source.num_tokens
            source.is_final = source.is_last
            source.computed.clear()
        self._stepping = []

    def _forget(self, transfer_ids: list[str]) -> None:
        for transfer_id in transfer_ids:
            self._sources.pop(transfer_id, None)
