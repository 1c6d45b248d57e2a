"""The connector's side in the scheduler's process: start-up, news from the rendezvous, and the two halves.

Everything here runs in the engine core's thread, inside vLLM's hooks. Nothing waits; the rendezvous agent does the
talking and leaves news in an inbox that each hook drains, so that blocks come back before the next allocation.
"""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry import records
from kvferry.agent import EngineAgent, HoldEnded, LoadQuiet
from kvferry.control.addresses import host_id
from kvferry.records import EngineRecord
from kvferry.vllm import specs
from kvferry.vllm.config import Config
from kvferry.vllm.core import Core
from kvferry.vllm.digests import model_identity
from kvferry.vllm.discovery import announcer
from kvferry.vllm.fetches import Fetches
from kvferry.vllm.groups import backoff_tokens, groups
from kvferry.vllm.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from kvferry.vllm.metrics import FerryStats, KVFerryStats
from kvferry.vllm.offers import Offers
from kvferry.vllm.params import wants_remote_decode
from kvferry.vllm.wiring import open_endpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SchedulerSide:
    """One per engine core. Methods have the names of vLLM's hooks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> None:
        specs.group_kinds(kv_cache_config)  # refuses, by name, what can't be moved
        transfer = vllm_config.kv_transfer_config
        # Each data-parallel rank is an engine of its own, perhaps on one host with others.
        port = config.port and config.port + vllm_config.parallel_config.data_parallel_index
        endpoint = open_endpoint(config, port)
        self._announcer = announcer(config, vllm_config, endpoint.address)
        self._agent = EngineAgent(transfer.engine_id, secrets.token_hex(16), endpoint, config.leases())
        self._agent.start()
        self._core = Core(
            config=config,
            model=config.model_id or model_identity(vllm_config),
            parallel=vllm_config.parallel_config,
            group_ids=kv_cache_config.transfer_group_ids,
            groups=groups(kv_cache_config),
            backoff_tokens=backoff_tokens(vllm_config, kv_cache_config),
            agent=self._agent,
        )
        self.fetches = Fetches(self._core, transfer.kv_load_failure_policy == "recompute")
        self.offers = Offers(self._core)
        self._is_producer: bool = transfer.is_kv_producer
        self._is_consumer: bool = transfer.is_kv_consumer
        self._handshake: HandshakeMetadata | None = None
        self._worker_records: dict[int, bytes] = {}
        self._announced = False
        self._closing = False
        self._watching_signals = False
        self._running: set[str] = set()
        logger.info("kvferry: engine %s serves its rendezvous on %s", transfer.engine_id, endpoint.address)

    @property
    def stats(self) -> FerryStats:
        return self._core.stats

    # Start-up.

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._core.bind(manager)
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
        """Publishes the engine's record: every worker's, keyed by vLLM as (pp_rank, tp_rank), sorted by rank."""
        tp_size = self._core.parallel.tensor_parallel_size
        self._handshake = next(iter(metadata.values()), None)
        self._worker_records = {pp * tp_size + tp: worker.record for (pp, tp), worker in metadata.items()}
        self._publish()

    def _publish(self) -> None:
        if self._handshake is None:
            return
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
        if self._announcer is not None and not self._announced:
            self._announced = True
            self._announcer.start()

    # Hooks.

    def on_new_request(self, request: Request) -> None:
        self._watch_for_shutdown()
        self.drain()
        if self._is_consumer:
            self.fetches.on_new_request(request)
        if self._is_producer and wants_remote_decode(request.kv_transfer_params):
            self.offers.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.drain()
        return self.fetches.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.drain()
        self.fetches.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduled: SchedulerOutput) -> StepMetadata:
        self.drain()
        agent = self._agent
        promises = self.offers.promises
        computes, runs = promises.steps(scheduled), self._runs(scheduled)  # first: work that is taken must get there
        return StepMetadata(
            agent.engine_id,
            agent.incarnation,
            agent.endpoint.address,
            agent.home,
            *self.fetches.take_work(),
            computes,
            promises.take_over(),
            computes_nothing=not runs,
        )

    def _runs(self, scheduled: SchedulerOutput) -> bool:
        """Whether a request has been computed that has neither ended since nor been preempted: a step without tokens
        may still stand behind one with tokens, or between two (pipeline stages, asynchronous scheduling)."""
        self._running -= scheduled.finished_req_ids
        self._running -= scheduled.preempted_req_ids or set()
        self._running |= scheduled.num_scheduled_tokens.keys()
        return bool(self._running)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.drain()
        if isinstance(output.kv_connector_worker_meta, WorkerMetadata):
            self.fetches.take_results(output.kv_connector_worker_meta.results)
            if output.kv_connector_worker_meta.records:
                self._worker_records.update(output.kv_connector_worker_meta.records)
                self._publish()
        self.fetches.update_connector_output(output)

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never asks vLLM to delay the free: the ledger's own references keep what readers need."""
        self.drain()
        report = self.fetches.request_finished(request)
        if self._is_producer and wants_remote_decode(request.kv_transfer_params):
            return False, self.offers.request_finished(request, block_ids)
        return False, report

    def has_pending_block_frees(self) -> bool:
        """Only what this very call gave back counts: saying True while blocks are merely held stops the engine."""
        return self.drain() > 0

    def has_pending_push_work(self) -> bool:
        """Called before an idle engine blocks. Keeps a terminating engine alive while readers still read from it."""
        self.drain()
        return self._closing and self._core.ledger.num_holds > 0

    def reset_cache(self) -> bool:
        """Part of /reset_prefix_cache with reset_connector: nothing beyond the pool's own reset is cached here."""
        self.drain()
        return True

    # News from the rendezvous.

    def drain(self) -> int:
        """Applies what the rendezvous has left. Returns how many block references were given back."""
        freed = 0
        for item in self._agent.drain():
            if isinstance(item, HoldEnded):
                freed += self._hold_ended(item)
            elif isinstance(item, LoadQuiet):
                freed += self.fetches.rank_quiet(item)
            else:
                self.fetches.transfer_lost(item)
        return freed

    def _hold_ended(self, ended: HoldEnded) -> int:
        self.stats.count_hold(ended.outcome)
        if ended.outcome in ("expired", "lapsed"):
            logger.warning("kvferry: transfer %s: %s", ended.ref.transfer_id, ended.detail)
        self.offers.promises.ended(ended.ref)
        return self._core.ledger.release(ended.ref)

    # Figures and the end.

    def get_stats(self) -> KVFerryStats | None:
        ledger = self._core.ledger
        self.stats.end_step()
        self.stats.set_gauges(
            held_blocks=ledger.num_held_blocks,
            quarantined_blocks=ledger.num_quarantined_blocks,
            oldest_s=ledger.oldest_s(),
        )
        return self.stats.take()

    def _watch_for_shutdown(self) -> None:
        """Notices SIGTERM beside vLLM's own handler, which is installed after this object was made."""
        if self._watching_signals:
            return
        self._watching_signals = True
        previous = signal.getsignal(signal.SIGTERM)

        def on_sigterm(number: int, frame: Any) -> None:
            self._closing = True
            if callable(previous):
                previous(number, frame)

        try:
            if callable(previous):
                signal.signal(signal.SIGTERM, on_sigterm)
        except ValueError:
            # Not in the main thread: an engine inside another program, which ends it by calling shutdown.
            logger.info("kvferry: no SIGTERM handler outside the main thread; holds do not outlast this process")

    def shutdown(self) -> None:
        if self._announcer is not None:
            self._announcer.stop()
        self._agent.stop()
