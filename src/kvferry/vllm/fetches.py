"""The consumer's half in the scheduler's process: a second leg's way from arrival to the end of its load."""

from __future__ import annotations

import enum
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.agent import LoadQuiet, LoadRequest, LoadResult, TransferLost
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.messages import Outcome, TransferRef
from kvferry.vllm.core import Core
from kvferry.vllm.digests import request_digest, undigestible
from kvferry.vllm.params import BadParams, Offer, asked_mode, from_params, wants_remote_prefill, why_not_offered
from kvferry.vllm.promises import without_nulls
from kvferry.vllm.request_addresses import peer_address, transfer_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

CONSUMED_REMEMBERED = 4096
"""How many transfers this engine remembers having used up, so that a repeated leg recomputes instead of failing."""


class Stage(enum.Enum):
    """How far a fetch is. OPEN: claimed, nothing allocated. LOADING: workers are at it. OVER: ended."""

    OPEN = "open"
    LOADING = "loading"
    OVER = "over"


@dataclass
class Fetch:
    """One request's use of a transfer.

    offer is None when there is none that could be used. writes: the producer writes it. problem: why the KV must not
    or could not be loaded.
    path: what the response will say: "remote", "local" (a full local hit) or "recomputed".
    destination: the blocks that a load writes, per group.
    """

    claim_id: str
    offer: Offer | None
    writes: bool = False
    digest: bytes = b""
    stage: Stage = Stage.OPEN
    problem: str = ""
    path: str = "recomputed"
    local_tokens: int = 0
    load_id: str = ""
    aborted: bool = False
    destination: list[list[KVCacheBlock]] = field(default_factory=list)
    results: dict[int, LoadResult] = field(default_factory=dict)
    quiet_ranks: set[int] = field(default_factory=set)


class Fetches:
    """All fetches of an engine. Methods have the names of the hooks that call them.

    recomputes: vLLM's failure policy; otherwise a request whose KV can't be had must fail.
    """

    def __init__(self, core: Core, recomputes: bool) -> None:
        self._core = core
        self._recomputes = recomputes
        self._fetches: dict[str, Fetch] = {}
        self._by_claim: dict[str, str] = {}
        self._by_load: dict[str, str] = {}
        self._consumed: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._loads: list[LoadRequest] = []
        self._cancels: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._fetches)

    # Arrival.

    def on_new_request(self, request: Request) -> None:
        if wants_remote_prefill(request.kv_transfer_params):
            self._fetches[request.request_id] = self._open(request)
        elif (problem := why_not_offered(request.kv_transfer_params)) != "":
            self._fetches[request.request_id] = Fetch("", None, stage=Stage.OVER, problem=problem)

    def _open(self, request: Request) -> Fetch:
        """Claims at once, so that the transfer lives while the request waits."""
        fetch = Fetch(secrets.token_hex(16), None)
        try:
            offer, fetch.writes = self._offer(request, request.kv_transfer_params or {})
        except BadParams as error:
            return self._refused(request, fetch, str(error))
        fetch.offer = offer
        self._by_claim[fetch.claim_id] = request.request_id
        self._core.agent.arrived(fetch.claim_id, offer.ref, offer.address, offer.key_id, self._core.num_ranks)
        if request.abort_immediately:
            # The frontend rejected the request and sends its ghost, with another prompt, so that we release.
            fetch.problem = "the request was rejected before it ran"
            return fetch
        if (problem := self._why_not(request, offer)) != "":
            return self._refused(request, fetch, problem)
        fetch.digest = request_digest(
            request, offer.num_tokens, model=self._core.model, weights_epoch=self._core.config.weights_epoch
        )
        return fetch

    def _offer(self, request: Request, params: Mapping[str, Any]) -> tuple[Offer, bool]:
        """What there is to be had, and whether the producer shall write it. Raises BadParams."""
        sampling = request.sampling_params
        mode = asked_mode(params, sampling.extra_args if sampling is not None else None)
        if "kvferry" in params or transfer_id(params) is None:
            offer = from_params(params, len(self._core.group_ids))
            return offer, (mode or self._core.config.mode) == "write"
        if mode == "read":
            raise BadParams("kv_transfer_params names a transfer that is yet to be computed, which can't be read")
        return self._to_come(request, params), True

    def _to_come(self, request: Request, params: Mapping[str, Any]) -> Offer:
        """The router has sent both legs at once: the transfer's name and the producer's address are all there is."""
        name, address = transfer_id(params), peer_address(request.request_id, params, "prefill")
        if name is None or address is None:
            raise BadParams(
                "kv_transfer_params has a transfer_id, but neither it nor the request id has the producer's address"
            )
        num_tokens = request.num_prompt_tokens - self._core.backoff_tokens
        if num_tokens < 1:
            raise BadParams(f"the prompt has {request.num_prompt_tokens} tokens, the producer leaves them to this side")
        ref = TransferRef(producer="", incarnation="", transfer_id=name, generation=0)
        return Offer(ref, address.host, address.port, "", num_tokens, ())

    def _why_not(self, request: Request, offer: Offer) -> str:
        """Why this request cannot take what is offered; empty if it can."""
        if (problem := undigestible(request)) != "":
            return problem
        if offer.num_tokens > request.num_tokens:
            return f"the producer offers {offer.num_tokens} tokens, the prompt has {request.num_tokens}"
        if self._core.keeps_state and offer.num_tokens >= request.num_tokens:
            return f"the producer's state is after all {offer.num_tokens} tokens of the prompt, one less is needed"
        return self._core.ledger.quarantine_is_full()

    def _refused(self, request: Request, fetch: Fetch, problem: str) -> Fetch:
        fetch.problem = problem
        self._core.stats.count_refusal("params")
        logger.warning("kvferry: request %s: %s", request.request_id, problem)
        return fetch

    def transfer_lost(self, lost: TransferLost) -> None:
        """The producer let go of it while the request waited, or before it had written."""
        fetch = self._fetches.get(self._by_claim.get(lost.claim_id, ""))
        if fetch is None or fetch.problem:
            return
        if fetch.stage is Stage.OPEN:
            fetch.problem = f"the producer no longer holds the transfer: {lost.reason}"
        elif fetch.stage is Stage.LOADING and fetch.writes:
            self._cancels.append((fetch.load_id, f"the producer no longer holds the transfer: {lost.reason}"))

    # Scheduling.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not Stage.OPEN:
            return 0, False
        fetch.local_tokens = num_computed_tokens
        if fetch.problem or fetch.offer is None:
            return self._without_transfer(request, num_computed_tokens)
        if _key(fetch.offer.ref) in self._consumed:
            return 0, False
        missing = _wanted_tokens(fetch.offer, request) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def _without_transfer(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """By policy: compute here, or let vLLM fail the request through a load that the workers refuse."""
        missing = request.num_tokens - num_computed_tokens
        return (missing, True) if missing > 0 and not self._recomputes else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not Stage.OPEN:
            return
        if num_external_tokens == 0:
            self._no_load(request, fetch)
            return
        # vLLM waits for this request's load from here on, so a load must be reported whatever happens.
        fetch.stage = Stage.LOADING
        fetch.load_id = secrets.token_hex(8)
        self._by_load[fetch.load_id] = request.request_id
        try:
            load = self._load(request, fetch, blocks, num_external_tokens)
        except Exception as error:
            logger.exception("kvferry: the load of request %s could not be described", request.request_id)
            fetch.problem = f"{type(error).__name__}: {error}"
            load = _load_that_fails(request, fetch)
        self._loads.append(load)

    def _no_load(self, request: Request, fetch: Fetch) -> None:
        """Nothing will be fetched: a full local hit, prompt_logprobs, or a problem under policy recompute."""
        if not fetch.problem and fetch.offer is not None and fetch.local_tokens >= _wanted_tokens(fetch.offer, request):
            fetch.path = "local"
        self._end(fetch, "failed" if fetch.problem else "unused", fetch.problem)
        if request.skip_reading_prefix_cache and not fetch.problem:
            fetch.problem = "prompt_logprobs: the whole prompt is computed"

    def _load(self, request: Request, fetch: Fetch, blocks: KVCacheBlocks, num_tokens: int) -> LoadRequest:
        if fetch.problem or fetch.offer is None:
            return _load_that_fails(request, fetch)
        end_token = fetch.local_tokens + num_tokens
        wanted = [
            group.wanted(blocks.blocks[index], end_token)
            for index, group in zip(self._core.group_ids, self._core.groups, strict=True)
        ]
        fetch.destination = [[block for block in group if block is not None] for group in wanted]
        offer = fetch.offer
        return LoadRequest(
            request_id=request.request_id,
            load_id=fetch.load_id,
            claim_id=fetch.claim_id,
            ref=offer.ref,
            address=offer.address,
            key_id=offer.key_id,
            num_tokens=offer.num_tokens,
            first_token=fetch.local_tokens,
            end_token=end_token,
            window_starts=tuple(group.window_start(end_token) for group in self._core.groups),
            consumer_block_ids=tuple(_ids(group) for group in wanted),
            producer_block_ids=without_nulls(offer.block_ids),
            digest=fetch.digest,
            blocks_digest=blocks_digest(offer.block_ids),
            write=fetch.writes,
        )

    def take_work(self) -> tuple[list[LoadRequest], list[tuple[str, str]]]:
        """Loads and cancels (load id, reason) for the workers since the last step."""
        work = self._loads, self._cancels
        self._loads, self._cancels = [], []
        return work

    # The end of a load.

    def take_results(self, results: Sequence[LoadResult]) -> None:
        for result in results:
            fetch = self._fetches.get(result.request_id)
            if fetch is not None and fetch.load_id == result.load_id:
                fetch.results[result.rank] = result

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving or ():
            fetch = self._fetches.get(request_id)
            if fetch is not None and fetch.stage is Stage.LOADING:
                self._load_ended(request_id, fetch, request_id in output.failed_recving)

    def _load_ended(self, request_id: str, fetch: Fetch, failed: bool) -> None:
        """Every rank has reported. vLLM frees a failed load's blocks right after this hook."""
        self._by_load.pop(fetch.load_id, None)
        if failed:
            self._load_failed(request_id, fetch)
        else:
            fetch.path = "remote"
            if fetch.offer is not None:
                self._remember_consumed(fetch.offer.ref)
            self._end(fetch, "done", "")
        fetch.destination = []
        if fetch.aborted:
            self._forget(request_id)

    def _load_failed(self, request_id: str, fetch: Fetch) -> None:
        bad = [result for result in fetch.results.values() if not result.ok]
        fetch.problem = next((result.reason for result in bad), "a rank failed without saying why")
        unquiet = {result.rank for result in bad if not result.quiet} - fetch.quiet_ranks
        self._core.ledger.quarantine(fetch.load_id, fetch.destination, unquiet)
        logger.warning("kvferry: request %s: its KV did not arrive: %s", request_id, fetch.problem)
        if not self._recomputes:
            self._core.stats.tell_client(request_id, fetch.problem)
        self._end(fetch, "failed", fetch.problem)

    def rank_quiet(self, news: LoadQuiet) -> int:
        """Returns how many block references this gave back."""
        fetch = self._fetches.get(self._by_load.get(news.load_id, ""))
        if fetch is not None:
            # The news may overtake the ranks' reports, which travel with vLLM's step.
            fetch.quiet_ranks.add(news.rank)
        return self._core.ledger.quiet(news.load_id, news.rank)

    # The end of a request.

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """For the response: which way the KV came. None for a request that has no fetch."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            return None
        if fetch.stage is Stage.LOADING:
            # Aborted while workers load: vLLM keeps the blocks until they report, and so does this fetch.
            fetch.aborted = True
            self._cancels.append((fetch.load_id, f"the request ended ({request.status.name})"))
            return None
        if fetch.stage is Stage.OPEN:
            self._end(fetch, "unused", f"the request ended before its load ({request.status.name})")
        self._forget(request.request_id)
        return _describe(fetch)

    def _end(self, fetch: Fetch, outcome: Outcome, reason: str) -> None:
        fetch.stage = Stage.OVER
        if self._by_claim.pop(fetch.claim_id, None) is not None:
            self._core.agent.over(fetch.claim_id, outcome, reason)

    def _forget(self, request_id: str) -> None:
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._by_claim.pop(fetch.claim_id, None)

    def _remember_consumed(self, ref: TransferRef) -> None:
        self._consumed[_key(ref)] = None
        while len(self._consumed) > CONSUMED_REMEMBERED:
            self._consumed.popitem(last=False)


def _key(ref: TransferRef) -> tuple[str, str, int]:
    return ref.incarnation, ref.transfer_id, ref.generation


def _wanted_tokens(offer: Offer, request: Request) -> int:
    """How many tokens' KV are of use. vLLM computes the last token of a prompt itself, to sample what follows it."""
    return min(offer.num_tokens, request.num_tokens - 1)


def _ids(group: Sequence[KVCacheBlock | None]) -> tuple[int, ...]:
    return tuple(-1 if block is None else block.block_id for block in group)


def _load_that_fails(request: Request, fetch: Fetch) -> LoadRequest:
    """Carries only the reason: each worker refuses it at once, and vLLM's failure policy decides."""
    offer = fetch.offer
    return LoadRequest(
        request_id=request.request_id,
        load_id=fetch.load_id,
        claim_id=fetch.claim_id,
        ref=offer.ref if offer is not None else TransferRef("", "", "", 0),
        address=offer.address if offer is not None else "",
        key_id=offer.key_id if offer is not None else "",
        num_tokens=0,
        first_token=0,
        end_token=0,
        consumer_block_ids=(),
        producer_block_ids=(),
        digest=b"",
        blocks_digest=b"",
        refused=fetch.problem,
    )


def _describe(fetch: Fetch) -> dict[str, Any]:
    results = fetch.results.values()
    return {
        "kvferry": {
            "path": fetch.path,
            "transport": "+".join(sorted({result.transport for result in results if result.transport})),
            "bytes": sum(result.num_bytes for result in results),
            "descriptors": sum(result.num_descriptors for result in results),
            "transfer_ms": round(1e3 * max((result.seconds for result in results), default=0.0), 3),
            "reason": fetch.problem,
        }
    }
