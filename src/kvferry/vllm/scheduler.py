"""The connector's half in the scheduler's process: what to load, what to hold, what to say to whom.

Everything here runs in the engine core's thread, inside vLLM's hooks. Nothing waits; the rendezvous agent does the
talking and leaves news in an inbox that each hook drains, so that blocks come back before the next allocation.
"""

from __future__ import annotations

import enum
import logging
import secrets
import signal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvferry import records
from kvferry.agent import EngineAgent, HoldEnded, LoadQuiet, LoadRequest, LoadResult, TransferLost
from kvferry.control.addresses import host_id, parse
from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.messages import Outcome, TransferRef
from kvferry.records import EngineRecord
from kvferry.vllm import specs
from kvferry.vllm.config import Config
from kvferry.vllm.digests import model_identity, request_digest, undigestible
from kvferry.vllm.ledger import Ledger, LedgerFull
from kvferry.vllm.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from kvferry.vllm.metrics import FerryStats, KVFerryStats
from kvferry.vllm.params import (
    BadParams,
    Offer,
    from_params,
    not_offered,
    to_params,
    wants_remote_decode,
    wants_remote_prefill,
    why_not_offered,
)
from kvferry.vllm.wiring import open_endpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

CONSUMED_REMEMBERED = 4096
"""How many transfers this engine remembers having used up, so that a repeated leg recomputes instead of failing."""


class Stage(enum.Enum):
    """How far a request's fetch is. OPEN: claimed, nothing allocated. LOADING: workers are at it. OVER: ended."""

    OPEN = "open"
    LOADING = "loading"
    OVER = "over"


@dataclass
class Fetch:
    """One request's use of a transfer on the consumer side.

    offer is None when the parameters could not be read. problem: why the KV must not or cannot be loaded.
    path: what the response will say: "remote", "local" (a full local hit) or "recomputed".
    """

    claim_id: str
    offer: Offer | None
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


class SchedulerSide:
    """One per engine core. Methods have the names of vLLM's hooks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> None:
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._is_producer: bool = transfer.is_kv_producer
        self._is_consumer: bool = transfer.is_kv_consumer
        self._recomputes: bool = transfer.kv_load_failure_policy == "recompute"
        self._parallel = parallel
        self._num_ranks: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._num_groups = len(specs.group_kinds(kv_cache_config))
        self._model = config.model_id or model_identity(vllm_config)
        endpoint = open_endpoint(config, config.port)
        self._agent = EngineAgent(transfer.engine_id, secrets.token_hex(16), endpoint, config.leases())
        self._agent.start()
        self._host, self._port = parse(self._agent.endpoint.address)
        self._manager: KVCacheManager | None = None
        self._ledger: Ledger | None = None
        self._fetches: dict[str, Fetch] = {}
        self._by_claim: dict[str, str] = {}
        self._by_load: dict[str, str] = {}
        self._consumed: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._loads: list[LoadRequest] = []
        self._cancels: list[tuple[str, str]] = []
        self._worker_records: dict[int, bytes] = {}
        self._generation = 0
        self._closing = False
        self._watching_signals = False
        self.stats = FerryStats()
        logger.info("kvferry: engine %s serves its rendezvous on %s", transfer.engine_id, self._agent.endpoint.address)

    # Start-up.

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._ledger = Ledger(manager.block_pool, self._config.max_held, self._config.max_quarantined)
        self._reset_through_us(manager.block_pool)

    def _reset_through_us(self, pool: BlockPool) -> None:
        """An idle engine resets its prefix cache without calling any hook first, and blocks that wait for readers
        make the reset fail. So the pool's own method first gives back what it may."""
        reset = pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            try:
                self._agent.void("the prefix cache is being reset")
            except TimeoutError as error:
                logger.warning("kvferry: %s", error)
            self.drain()
            return reset()

        pool.reset_prefix_cache = reset_prefix_cache

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], HandshakeMetadata]) -> None:
        """Publishes the engine's record: every worker's, sorted by rank."""
        self._handshake = next(iter(metadata.values()))
        self._worker_records = {}
        for (pp_rank, tp_rank), worker in metadata.items():
            self._worker_records[pp_rank * self._parallel.tensor_parallel_size + tp_rank] = worker.record
        self._publish()

    def _publish(self) -> None:
        workers = [records.decode_worker(self._worker_records[rank]) for rank in sorted(self._worker_records)]
        self._agent.set_record(
            EngineRecord(
                engine_id=self._agent.engine_id,
                incarnation=self._agent.incarnation,
                host_id=host_id(),
                fingerprint=self._handshake.fingerprint,
                group_kinds=self._handshake.group_kinds,
                workers=tuple(workers),
            )
        )

    # Consumer: a request's way from arrival to the end of its load.

    def on_new_request(self, request: Request) -> None:
        self._watch_for_shutdown()
        self.drain()
        if not self._is_consumer:
            return
        if wants_remote_prefill(request.kv_transfer_params):
            self._fetches[request.request_id] = self._open_fetch(request)
        elif (problem := why_not_offered(request.kv_transfer_params)) != "":
            self._fetches[request.request_id] = Fetch("", None, stage=Stage.OVER, problem=problem)

    def _open_fetch(self, request: Request) -> Fetch:
        claim_id = secrets.token_hex(16)
        try:
            offer = from_params(request.kv_transfer_params or {}, self._num_groups)
        except BadParams as error:
            return self._refused(request, Fetch(claim_id, None), str(error))
        fetch = Fetch(claim_id, offer)
        self._by_claim[claim_id] = request.request_id
        self._agent.arrived(claim_id, offer.ref, offer.address, offer.key_id, self._num_ranks)
        if request.abort_immediately:
            # The frontend rejected the request and sends its ghost, with another prompt, so that we release.
            fetch.problem = "the request was rejected before it ran"
            return fetch
        if (problem := self._why_not(request, offer)) != "":
            return self._refused(request, fetch, problem)
        fetch.digest = request_digest(
            request, offer.num_tokens, model=self._model, weights_epoch=self._config.weights_epoch
        )
        return fetch

    def _why_not(self, request: Request, offer: Offer) -> str:
        """Why this request cannot take what is offered; empty if it can."""
        if (problem := undigestible(request)) != "":
            return problem
        if offer.num_tokens > request.num_tokens:
            return f"the producer offers {offer.num_tokens} tokens, the prompt has {request.num_tokens}"
        return self._ledger.quarantine_is_full() if self._ledger is not None else ""

    def _refused(self, request: Request, fetch: Fetch, problem: str) -> Fetch:
        fetch.problem = problem
        self.stats.count_refusal("params")
        logger.warning("kvferry: request %s: %s", request.request_id, problem)
        return fetch

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.drain()
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not Stage.OPEN:
            return 0, False
        fetch.local_tokens = num_computed_tokens
        if fetch.problem or fetch.offer is None:
            return self._without_transfer(request, num_computed_tokens)
        if self._used_up(fetch.offer.ref):
            return 0, False
        missing = _wanted_tokens(fetch.offer, request) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def _without_transfer(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """By policy: compute here, or let vLLM fail the request through a load that the workers refuse."""
        if self._recomputes:
            return 0, False
        return max(request.num_tokens - num_computed_tokens, 0), request.num_tokens > num_computed_tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.drain()
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not Stage.OPEN:
            return
        if num_external_tokens == 0:
            self._no_load(request, fetch)
            return
        try:
            self._start_load(request, fetch, blocks, num_external_tokens)
        except Exception as error:
            # vLLM waits for this request's load from here on, so a load must be reported whatever happens.
            logger.exception("kvferry: load of request %s could not be described", request.request_id)
            fetch.problem = f"{type(error).__name__}: {error}"
            self._loads.append(self._load_that_fails(request, fetch))

    def _no_load(self, request: Request, fetch: Fetch) -> None:
        """Nothing will be fetched: a full local hit, prompt_logprobs, or a problem under policy recompute."""
        if not fetch.problem and fetch.offer is not None and fetch.local_tokens >= _wanted_tokens(fetch.offer, request):
            fetch.path = "local"
        self._end_fetch(fetch, "failed" if fetch.problem else "unused", fetch.problem)

    def _start_load(self, request: Request, fetch: Fetch, blocks: KVCacheBlocks, num_tokens: int) -> None:
        fetch.stage = Stage.LOADING
        fetch.load_id = secrets.token_hex(8)
        self._by_load[fetch.load_id] = request.request_id
        if fetch.problem or fetch.offer is None:
            self._loads.append(self._load_that_fails(request, fetch))
            return
        groups = [blocks.blocks[group] for group in self._kv_cache_config.transfer_group_ids]
        fetch.destination = [
            [block for block in group if not block.is_null and block.block_hash is None] for group in groups
        ]
        offer = fetch.offer
        self._loads.append(
            LoadRequest(
                request_id=request.request_id,
                load_id=fetch.load_id,
                claim_id=fetch.claim_id,
                ref=offer.ref,
                address=offer.address,
                key_id=offer.key_id,
                num_tokens=offer.num_tokens,
                first_token=fetch.local_tokens,
                end_token=fetch.local_tokens + num_tokens,
                consumer_block_ids=tuple(_to_load(group) for group in groups),
                producer_block_ids=tuple(_without_nulls(group) for group in offer.block_ids),
                digest=fetch.digest,
                blocks_digest=blocks_digest(offer.block_ids),
            )
        )

    def _load_that_fails(self, request: Request, fetch: Fetch) -> LoadRequest:
        """Carries only the reason: each worker refuses it at once, and vLLM's failure policy decides."""
        offer = fetch.offer
        return LoadRequest(
            request_id=request.request_id,
            load_id=fetch.load_id,
            claim_id=fetch.claim_id,
            ref=offer.ref if offer is not None else TransferRef("", "", "", 0),
            address=offer.address if offer is not None else "",
            key_id="",
            num_tokens=0,
            first_token=0,
            end_token=0,
            consumer_block_ids=(),
            producer_block_ids=(),
            digest=b"",
            blocks_digest=b"",
            refused=fetch.problem,
        )

    def build_connector_meta(self) -> StepMetadata:
        self.drain()
        step = StepMetadata(
            self._agent.engine_id, self._agent.incarnation, self._agent.endpoint.address, self._loads, self._cancels
        )
        self._loads, self._cancels = [], []
        return step

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.drain()
        if isinstance(output.kv_connector_worker_meta, WorkerMetadata):
            self._take_worker_metadata(output.kv_connector_worker_meta)
        for request_id in output.finished_recving or ():
            fetch = self._fetches.get(request_id)
            if fetch is not None and fetch.stage is Stage.LOADING:
                self._load_ended(request_id, fetch, request_id in output.failed_recving)

    def _take_worker_metadata(self, metadata: WorkerMetadata) -> None:
        for result in metadata.results:
            fetch = self._fetches.get(result.request_id)
            if fetch is not None and fetch.load_id == result.load_id:
                fetch.results[result.rank] = result
        if metadata.records:
            self._worker_records.update(metadata.records)
            self._publish()

    def _load_ended(self, request_id: str, fetch: Fetch, failed: bool) -> None:
        """Every rank has reported. vLLM frees a failed load's blocks right after this hook."""
        self._by_load.pop(fetch.load_id, None)
        if failed:
            bad = [result for result in fetch.results.values() if not result.ok]
            reason = next((result.reason for result in bad), "a rank failed without saying why")
            fetch.problem = reason
            if self._ledger is not None:
                unquiet = {result.rank for result in bad if not result.quiet} - fetch.quiet_ranks
                self._ledger.quarantine(fetch.load_id, fetch.destination, unquiet)
            logger.warning("kvferry: request %s: its KV did not arrive: %s", request_id, reason)
            self._end_fetch(fetch, "failed", reason)
        else:
            fetch.path = "remote"
            if fetch.offer is not None:
                self._remember_consumed(fetch.offer.ref)
            self._end_fetch(fetch, "done", "")
        fetch.destination = []
        if fetch.aborted:
            self._forget(request_id)

    def _end_fetch(self, fetch: Fetch, outcome: Outcome, reason: str) -> None:
        fetch.stage = Stage.OVER
        if self._by_claim.pop(fetch.claim_id, None) is not None:
            self._agent.over(fetch.claim_id, outcome, reason)

    def _forget(self, request_id: str) -> None:
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            self._by_claim.pop(fetch.claim_id, None)

    def _remember_consumed(self, ref: TransferRef) -> None:
        self._consumed[(ref.incarnation, ref.transfer_id, ref.generation)] = None
        while len(self._consumed) > CONSUMED_REMEMBERED:
            self._consumed.popitem(last=False)

    def _used_up(self, ref: TransferRef) -> bool:
        """Whether this engine has used the transfer before, so that its producer may have let it go."""
        return (ref.incarnation, ref.transfer_id, ref.generation) in self._consumed

    # The end of a request, on either side.

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never asks vLLM to delay the free: the ledger's own references keep what readers need."""
        self.drain()
        fetch = self._fetches.get(request.request_id)
        if fetch is not None:
            self._finish_consumer(request, fetch)
        if self._is_producer and wants_remote_decode(request.kv_transfer_params):
            return False, self._finish_producer(request, block_ids)
        return False, self._describe(fetch) if fetch is not None else None

    def _finish_consumer(self, request: Request, fetch: Fetch) -> None:
        if fetch.stage is Stage.LOADING:
            # Aborted while workers load: vLLM keeps the blocks until they report, and so does this fetch.
            fetch.aborted = True
            self._cancels.append((fetch.load_id, f"the request ended ({request.status.name})"))
            return
        if fetch.stage is Stage.OPEN:
            self._end_fetch(fetch, "unused", f"the request ended before its load ({request.status.name})")
        self._forget(request.request_id)

    def _describe(self, fetch: Fetch) -> dict[str, Any]:
        """For the response: which way the KV came."""
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

    def _finish_producer(self, request: Request, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Holds the prompt's blocks and says how to fetch them; or says why not, and the consumer computes."""
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        problem = undigestible(request)
        if not problem and num_tokens > 0:
            try:
                return self._offer(request, block_ids, num_tokens)
            except LedgerFull as error:
                problem = str(error)
        problem = problem or "no token was computed"
        self.stats.count_refusal("not_held")
        logger.warning("kvferry: request %s is not offered: %s", request.request_id, problem)
        return not_offered(problem)

    def _offer(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        manager, ledger = self._manager, self._ledger
        if manager is None or ledger is None:
            raise LedgerFull("the block pool is not bound yet")
        groups = self._kv_cache_config.transfer_group_ids
        blocks = manager.get_blocks(request.request_id).blocks
        held = [blocks[group][: len(block_ids[group])] for group in groups]
        self._generation += 1
        ref = TransferRef(self._agent.engine_id, self._agent.incarnation, secrets.token_hex(16), self._generation)
        offer = Offer(
            ref=ref,
            host=self._host,
            port=self._port,
            key_id=self._agent.endpoint.key_id,
            num_tokens=num_tokens,
            block_ids=tuple(tuple(block_ids[group]) for group in groups),
        )
        digest = request_digest(request, num_tokens, model=self._model, weights_epoch=self._config.weights_epoch)
        ledger.hold(ref, held)
        self._agent.hold(ref, num_tokens, digest, blocks_digest(offer.block_ids))
        return to_params(
            offer,
            request_id=request.request_id,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            dcp_size=self._parallel.decode_context_parallel_size,
        )

    # News from the rendezvous.

    def drain(self) -> int:
        """Applies what the rendezvous has left. Returns how many block references were given back."""
        freed = 0
        for item in self._agent.drain():
            if isinstance(item, HoldEnded):
                freed += self._ledger.release(item.ref) if self._ledger is not None else 0
                self.stats.count_hold(item.outcome)
                if item.outcome in ("expired", "lapsed"):
                    logger.warning("kvferry: transfer %s: %s", item.ref.transfer_id, item.detail)
            elif isinstance(item, LoadQuiet):
                freed += self._rank_quiet(item)
            elif isinstance(item, TransferLost):
                self._transfer_lost(item)
        return freed

    def _rank_quiet(self, news: LoadQuiet) -> int:
        fetch = self._fetches.get(self._by_load.get(news.load_id, ""))
        if fetch is not None:
            # The news may overtake the ranks' reports, which travel with vLLM's step.
            fetch.quiet_ranks.add(news.rank)
        return self._ledger.quiet(news.load_id, news.rank) if self._ledger is not None else 0

    def _transfer_lost(self, lost: TransferLost) -> None:
        fetch = self._fetches.get(self._by_claim.get(lost.claim_id, ""))
        if fetch is not None and fetch.stage is Stage.OPEN and not fetch.problem:
            fetch.problem = f"the producer no longer holds the transfer: {lost.reason}"

    def has_pending_block_frees(self) -> bool:
        """Only what this very call gave back counts: saying True while blocks are merely held stops the engine."""
        return self.drain() > 0

    def has_pending_push_work(self) -> bool:
        """Called before an idle engine blocks. Keeps a terminating engine alive while readers still read from it."""
        self.drain()
        return self._closing and self._ledger is not None and self._ledger.num_holds > 0

    def reset_cache(self) -> bool:
        """Part of /reset_prefix_cache with reset_connector: nothing beyond the pool's own reset is cached here."""
        self.drain()
        return True

    def _watch_for_shutdown(self) -> None:
        """Notices SIGTERM beside vLLM's own handler, which is installed after this object was made."""
        if self._watching_signals:
            return
        self._watching_signals = True
        try:
            previous = signal.getsignal(signal.SIGTERM)

            def on_sigterm(number: int, frame: Any) -> None:
                self._closing = True
                if callable(previous):
                    previous(number, frame)

            if callable(previous):
                signal.signal(signal.SIGTERM, on_sigterm)
        except ValueError:
            # Not in the main thread: an engine inside another program, which ends it by calling shutdown.
            return

    def get_stats(self) -> KVFerryStats | None:
        self.stats.end_step()
        if self._ledger is not None:
            self.stats.set_gauges(
                held_blocks=self._ledger.num_held_blocks,
                quarantined_blocks=self._ledger.num_quarantined_blocks,
                oldest_s=self._ledger.oldest_s(),
            )
        return self.stats.take()

    def shutdown(self) -> None:
        self._agent.stop()


def _wanted_tokens(offer: Offer, request: Request) -> int:
    """How many tokens' KV are of use. vLLM computes the last token of a prompt itself, to sample what follows it."""
    return min(offer.num_tokens, request.num_tokens - 1)


def _to_load(group: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    """Block ids by token position; -1 for null placeholders and for what the local prefix cache has (hashed)."""
    return tuple(-1 if block.is_null or block.block_hash is not None else block.block_id for block in group)


def _without_nulls(block_ids: Sequence[int]) -> tuple[int, ...]:
    """vLLM's null block has id 0 and stands where a sliding window has left."""
    return tuple(block_id if block_id != 0 else -1 for block_id in block_ids)
