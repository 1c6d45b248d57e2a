"""A first leg whose second leg did not wait for it: promised, computed step by step, preempted, dropped or held."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.events import Dropped, Held, Promised
from kvferry.protocol.messages import TransferRef
from kvsim.prompts import LAYERS, TOKENS_PER_BLOCK, TOPOLOGY, HoldTruth, content_of, digest_of

if TYPE_CHECKING:
    from kvsim.producer import Producer

WAITS_FOR_BLOCKS = 50
WAITS_FOR_RELIEF = 10


@dataclass(frozen=True)
class Compute:
    """delay_s: until the request reaches its engine. steps: of the prompt's computation; step_s: each one's time.

    preempted_at, dropped_at: before which of them; -1 for never. resume_s: from preemption on.
    """

    delay_s: float
    steps: int
    step_s: float
    preempted_at: int = -1
    dropped_at: int = -1
    resume_s: float = 0.0


class Prefill:
    """routers_id: the name that the router gave it."""

    def __init__(self, producer: Producer, routers_id: str, prompt: str, num_blocks: int, compute: Compute) -> None:
        self._producer, self._compute = producer, compute
        self._prompt, self._num_blocks = prompt, num_blocks
        self._rng: Random = producer.world.rng(f"prefill {prompt}")
        self._ref = TransferRef(producer.name, producer.incarnation, f"{routers_id} of {prompt}", 1)
        self._step, self._attempt, self._waits = 0, 0, 0
        self._may_be_preempted = True
        is_taken = producer.engine.knows_routers_id(routers_id)
        self._hold: HoldTruth = producer.promise(self._ref, "" if is_taken else routers_id)
        promise = Promised(
            self._ref,
            num_blocks * TOKENS_PER_BLOCK,
            digest_of(prompt, num_blocks),
            TOPOLOGY,
            "" if is_taken else routers_id,
        )
        producer.driver.feed(promise)
        self._go_on()

    def _go_on(self) -> None:
        self._producer.later(self._compute.step_s * self._rng.uniform(0.5, 1.0), self._next)

    def _next(self) -> None:
        chunk = range(self._first_index(self._step), self._first_index(self._step + 1))
        if self._step == self._compute.dropped_at:
            self._drop("aborted")
        elif self._step == self._compute.preempted_at and self._may_be_preempted:
            self._preempt()
        elif self._step == self._compute.steps:
            self._hold_blocks()
        elif len(self._producer.free) >= len(chunk):
            self._hold.blocks += [self._producer.free.pop() for _ in chunk]
            self._compute_layer(chunk, 0)
        elif self._waits < WAITS_FOR_BLOCKS:
            self._waits += 1
            if self._waits % WAITS_FOR_RELIEF == 0:
                self._producer.relieve()
            self._go_on()
        else:
            self._drop("no free blocks")

    def _first_index(self, step: int) -> int:
        return step * self._num_blocks // self._compute.steps

    def _compute_layer(self, chunk: range, layer: int) -> None:
        if layer == LAYERS:
            self._step += 1
            self._go_on()
            return
        for index in chunk:
            block = self._hold.blocks[index]
            self._producer.memory[block, layer] = content_of(self._prompt, (index, layer))
            for worker in self._producer.workers:
                worker.learn(self._ref.transfer_id, self._attempt, (index, layer), block)
        layer_s = self._compute.step_s / LAYERS / 2
        self._producer.later(layer_s, lambda: self._compute_layer(chunk, layer + 1))

    def _preempt(self) -> None:
        """Its blocks are free at once, whoever writes from them."""
        self._may_be_preempted = False
        self._step, self._attempt = 0, self._attempt + 1
        self._producer.give_back(self._hold.blocks, "what came after a preemption")
        self._hold.blocks.clear()
        for worker in self._producer.workers:
            worker.unlearn(self._ref.transfer_id, self._attempt)
        self._producer.later(self._compute.resume_s, self._next)

    def _drop(self, reason: str) -> None:
        self._hold.is_dropped = True
        self._producer.later(
            self._rng.uniform(0.0, 0.02), lambda: self._producer.driver.feed(Dropped(self._ref, reason))
        )

    def _hold_blocks(self) -> None:
        blocks = tuple(self._hold.blocks)
        num_tokens, digest = self._num_blocks * TOKENS_PER_BLOCK, digest_of(self._prompt, self._num_blocks)
        offer = Held(self._ref, num_tokens, digest, blocks_digest([blocks]), TOPOLOGY, (blocks,))
        self._producer.later(self._rng.uniform(0.0, 0.02), lambda: self._producer.tell(offer))
