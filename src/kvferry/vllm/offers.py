"""The producer's half in the scheduler's process: holds what a first leg has computed, and says how to fetch it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvferry.control.addresses import parse
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.messages import TransferRef
from kvferry.vllm.core import Core
from kvferry.vllm.digests import request_digest, undigestible
from kvferry.vllm.ledger import LedgerFull
from kvferry.vllm.params import Offer, not_offered, to_params
from kvferry.vllm.promises import Promise, Promises, without_nulls

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class Offers:
    """Makes one offer per finished first leg. The blocks stay held until the rendezvous says that they are read."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._host, self._port = parse(core.agent.endpoint.address)
        self._generation = 0
        self._cut: set[str] = set()
        self.promises = Promises(core)

    def on_new_request(self, request: Request) -> None:
        self._cut_prompt(request)
        self.promises.on_new_request(request, self._new_ref(), self._why_not(request))

    def _new_ref(self) -> TransferRef:
        self._generation += 1
        agent = self._core.agent
        return TransferRef(agent.engine_id, agent.incarnation, secrets.token_hex(16), self._generation)

    def _why_not(self, request: Request) -> str:
        """Why this request's KV can't be offered, whatever becomes of it; empty if it can."""
        problem = undigestible(request)
        if not problem and self._core.keeps_state and request.request_id not in self._cut:
            problem = self._uncut(request) or "the prompt was not cut before its last token"
        return problem

    def _cut_prompt(self, request: Request) -> None:
        """Cuts the last tokens off a first leg's prompt where the consumer has to compute them from what lies before:
        see `groups.backoff_tokens`. Its own next token is of no use then, and nobody asks for it."""
        backoff = self._core.backoff_tokens
        if not backoff or self._uncut(request):
            return
        del request.prompt_token_ids[-backoff:]
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        self._cut.add(request.request_id)

    def _uncut(self, request: Request) -> str:
        """Why a prompt keeps its last tokens; empty if they can be cut off."""
        backoff = self._core.backoff_tokens
        if problem := undigestible(request):
            return problem
        if request.num_prompt_tokens <= backoff:
            return f"the prompt has {request.num_prompt_tokens} tokens, {backoff} are left to the consumer"
        if request.skip_reading_prefix_cache:
            return "prompt_logprobs: the consumer computes the whole prompt"
        end = request.num_prompt_tokens - backoff
        if any(feature.mm_position.offset + feature.mm_position.length > end for feature in request.mm_features):
            return f"a multimodal item reaches into the last {backoff} tokens of the prompt"
        return ""

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The parameters for the second leg: an offer, or why there is none. None for a request that did not finish.

        block_ids: per KV cache group of vLLM, clipped to the computed tokens.
        """
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            self._cut.discard(request.request_id)
            self.promises.broken(request, [len(ids) for ids in block_ids])
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        problem = self._why_not(request) or ("" if num_tokens > 0 else "no token was computed")
        self._cut.discard(request.request_id)
        promise = self.promises.fulfilled(request)
        if not problem and promise is not None:
            problem = promise.problem
        if not problem:
            try:
                return self._keep(promise) if promise is not None else self._offer(request, block_ids, num_tokens)
            except LedgerFull as error:
                problem = str(error)
        self._core.stats.count_refusal("not_held")
        logger.warning("kvferry: request %s is not offered: %s", request.request_id, problem)
        return not_offered(problem)

    def _offer(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        core = self._core
        blocks = core.manager.get_blocks(request.request_id).blocks
        kept = list(zip(core.group_ids, core.groups, strict=True))
        ref = self._new_ref()
        offered = tuple(tuple(group.offered(block_ids[index])) for index, group in kept)
        digest = request_digest(request, num_tokens, model=core.model, weights_epoch=core.config.weights_epoch)
        core.ledger.hold(ref, [group.offered(blocks[index][: len(block_ids[index])]) for index, group in kept])
        return self._tell(request, ref, num_tokens, digest, offered)

    def _keep(self, promise: Promise) -> dict[str, Any]:
        """What was promised, and is in the ledger already."""
        return self._tell(promise.request, promise.ref, promise.num_tokens, promise.digest, promise.block_ids)

    def _tell(
        self, request: Request, ref: TransferRef, num_tokens: int, digest: bytes, block_ids: tuple[tuple[int, ...], ...]
    ) -> dict[str, Any]:
        core = self._core
        core.agent.hold(ref, num_tokens, digest, blocks_digest(block_ids), without_nulls(block_ids))
        return to_params(
            Offer(ref, self._host, self._port, core.agent.endpoint.key_id, num_tokens, block_ids),
            request_id=request.request_id,
            tp_size=core.parallel.tensor_parallel_size,
            pp_size=core.parallel.pipeline_parallel_size,
            dcp_size=core.parallel.decode_context_parallel_size,
        )
