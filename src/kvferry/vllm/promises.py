"""The producer's half of a router's concurrent contract: both legs come at once, under a name that the router chose.

A consumer may have the KV written while it is computed, layer by layer. So the transfer is promised when its request
arrives, each step tells the workers what it computes, and the step that completes the prompt is the last: from then on
the ledger holds the blocks, since vLLM may preempt a request that has been written in full and still generates.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.agent import ComputeStep
from kvferry.protocol.messages import TransferRef
from kvferry.vllm.core import Core
from kvferry.vllm.digests import request_digest
from kvferry.vllm.ledger import LedgerFull
from kvferry.vllm.params import BadParams
from kvferry.vllm.request_addresses import transfer_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NAMES_REMEMBERED = 8192
"""Of routers, so that none is given to two transfers. More than the protocol remembers."""


@dataclass
class Promise:
    """block_ids: per transferred KV cache group, once the last step is scheduled; 0 is vLLM's null block.

    problem: why it can't be offered; "" if it can.
    """

    request: Request
    ref: TransferRef
    num_tokens: int
    digest: bytes
    block_ids: tuple[tuple[int, ...], ...] = ()
    problem: str = ""


class Promises:
    """Those of an engine, by request id."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._promises: dict[str, Promise] = {}
        self._names: OrderedDict[str, None] = OrderedDict()
        self._told: set[str] = set()  # transfer ids that the workers know
        self._over: list[str] = []
        self._stuck_since: float | None = None

    def __len__(self) -> int:
        return len(self._promises)

    def on_new_request(self, request: Request, ref: TransferRef, problem: str) -> None:
        """Promises `ref` under the router's name, if the request has one. problem: why it can't be offered."""
        name = self._name_of(request)
        if name is None:
            return
        core, num_tokens = self._core, request.num_prompt_tokens
        digest = b""
        if not problem:
            digest = request_digest(request, num_tokens, model=core.model, weights_epoch=core.config.weights_epoch)
        core.agent.promise(ref, num_tokens, digest, name)
        if problem:
            core.agent.drop(ref, problem)
        else:
            self._promises[request.request_id] = Promise(request, ref, num_tokens, digest)

    def _name_of(self, request: Request) -> str | None:
        try:
            name = transfer_id(request.kv_transfer_params or {})
        except BadParams as error:
            logger.warning("kvferry: request %s is not promised: %s", request.request_id, error)
            return None
        if name in self._names:  # several samples of one leg, or a name used again: the first one has it
            logger.info("kvferry: request %s is not promised: %s names another", request.request_id, name)
            return None
        if name is not None:
            self._names[name] = None
            if len(self._names) > NAMES_REMEMBERED:
                self._names.popitem(last=False)
        return name

    def steps(self, scheduled: SchedulerOutput) -> list[ComputeStep]:
        """What the workers must know of this step."""
        self._relieve(bool(scheduled.num_scheduled_tokens))
        ids = [request_id for request_id in scheduled.num_scheduled_tokens if request_id in self._promises]
        steps = [self._step(self._promises[one], scheduled.num_scheduled_tokens[one]) for one in ids]
        return [step for step in steps if step is not None]

    def _relieve(self, something_runs: bool) -> None:
        """Held blocks may keep out the very prompts for which their consumer waits, with blocks of its own."""
        now = time.monotonic()
        if something_runs or not any(self._is_waiting(promise) for promise in self._promises.values()):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= self._core.config.claim_reply_s:
            self._stuck_since = now
            self._core.agent.relieve("its blocks were needed for prompts that wait, and nobody had asked for it yet")

    def _is_waiting(self, promise: Promise) -> bool:
        return not promise.block_ids and not promise.problem

    def _step(self, promise: Promise, num_scheduled: int) -> ComputeStep | None:
        """None for what was computed before."""
        if promise.block_ids or promise.problem:
            return None
        core, request = self._core, promise.request
        num_tokens = min(request.num_computed_tokens + num_scheduled, promise.num_tokens)
        tables = core.manager.get_block_ids_for_computed_tokens(
            request_id=request.request_id, num_computed_tokens=request.num_computed_tokens + num_scheduled
        )
        block_ids = tuple(
            tuple(group.offered(tables[index])) for index, group in zip(core.group_ids, core.groups, strict=True)
        )
        is_last = num_tokens == promise.num_tokens
        if is_last:
            promise.block_ids = block_ids
            if not self._hold(promise, [len(table) for table in tables]):
                return None
        self._told.add(promise.ref.transfer_id)
        return ComputeStep(
            transfer_id=promise.ref.transfer_id,
            attempt=request.num_preemptions,
            block_ids=without_nulls(block_ids),
            num_tokens=num_tokens,
            is_last=is_last,
        )

    def _hold(self, promise: Promise, lengths: list[int]) -> bool:
        try:
            self._core.ledger.hold(promise.ref, self._blocks(promise.request, lengths))
        except LedgerFull as error:
            self._drop(promise, str(error))
        return not promise.problem

    def _blocks(self, request: Request, lengths: list[int]) -> list[list[KVCacheBlock]]:
        core = self._core
        blocks = core.manager.get_blocks(request.request_id).blocks
        kept = zip(core.group_ids, core.groups, strict=True)
        return [list(group.offered(blocks[index][: lengths[index]])) for index, group in kept]

    def _drop(self, promise: Promise, reason: str) -> None:
        promise.problem = reason
        self._core.agent.drop(promise.ref, reason)

    def fulfilled(self, request: Request) -> Promise | None:
        """At the end of a request that ran: its promise, if it made one. Held, unless it has a problem."""
        promise = self._promises.pop(request.request_id, None)
        if promise is not None and not promise.problem and not promise.block_ids:
            self._drop(promise, "its prompt was not computed")
        return promise

    def broken(self, request: Request, lengths: list[int]) -> None:
        """At the end of a request that did not: what it has may still be on its way to a consumer, and is held until
        it is not. lengths: of its block tables."""
        promise = self._promises.pop(request.request_id, None)
        if promise is None or promise.problem:
            return
        if not promise.block_ids:
            try:
                self._core.ledger.hold(promise.ref, self._blocks(request, lengths))
            except LedgerFull as error:
                # Then they may be overwritten while they are sent, to a consumer that is told not to use them.
                logger.warning("kvferry: request %s: %s", request.request_id, error)
        self._drop(promise, f"the producer's request ended early ({request.status.name})")

    def ended(self, ref: TransferRef) -> None:
        """The hold is over: the workers may forget what they know of it, if they do."""
        if ref.transfer_id in self._told:
            self._told.remove(ref.transfer_id)
            self._over.append(ref.transfer_id)

    def take_over(self) -> list[str]:
        """Transfer ids that ended since the last call."""
        over, self._over = self._over, []
        return over


def without_nulls(block_ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """vLLM's null block has id 0 and stands where a sliding window has left; here that is -1."""
    return tuple(tuple(block_id if block_id != 0 else -1 for block_id in group) for group in block_ids)
