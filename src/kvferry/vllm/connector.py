"""KVFerryConnector: vLLM's connector interface, thin. Each hook goes to the scheduler's or the worker's half.

An exception in any hook would end vLLM's engine, and with it every request. So none leaves one: a hook that
fails is logged, counted, and answered with what means "no transfer" to vLLM. Start-up is the exception: there an
error must be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.vllm import client_errors, config
from kvferry.vllm.metadata import HandshakeMetadata, StepMetadata
from kvferry.vllm.metrics import FerryStats, KVFerryPromMetrics, KVFerryStats
from kvferry.vllm.wiring import join_logs

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
T = TypeVar("T")


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """The consumer gets what its own prefix cache lacks, asynchronously: it reads, or the producer writes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logs()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = self.parse_settings(extra, log_ignored=role is KVConnectorRole.SCHEDULER)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            from kvferry.vllm.scheduler import SchedulerSide

            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            from kvferry.vllm.worker import WorkerSide

            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)

    def _guarded(self, hook: Callable[..., T], otherwise: T, *args: Any) -> T:
        """Runs one hook, counts its time, and lets no exception out."""
        stats = self._stats
        with stats.in_hook():
            try:
                return hook(*args)
            except Exception:
                stats.count_error(hook.__name__)
                logger.exception("kvferry: hook %s failed", hook.__name__)
                return otherwise

    @property
    def _stats(self) -> FerryStats:
        half = self._scheduler if self._scheduler is not None else self._worker
        if half is None:
            raise RuntimeError("the connector has no half: it was not made by vLLM's factory")
        return half.stats

    # Class-level answers.

    @classmethod
    def parse_settings(cls, extra_config: Mapping[str, Any], log_ignored: bool) -> config.Config:
        """`kv_connector_extra_config`, checked. Raises ConfigError."""
        return config.parse(extra_config, log_ignored)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data=data) if data else KVFerryStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        client_errors.install()  # vLLM asks for metrics in the API server, and only there
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers can be sent one by one only if each calls `save_kv_layer`, which a full graph's replay does not.

        Without it WRITE works all the same: everything is sent when the step has ended.
        """
        return cls.parse_settings(extra_config, log_ignored=False).mode == "write"

    @property
    def supports_sleep_mode(self) -> bool:
        """vLLM 0.33 asks; the cache's memory may go and come back through the two methods below."""
        return True

    # The scheduler's half.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is not None:
            ours = {ranks: worker for ranks, worker in metadata.items() if isinstance(worker, HandshakeMetadata)}
            self._scheduler.set_xfer_handshake_metadata_pp_aware(ours)

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._guarded(self._scheduler.on_new_request, None, request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        nothing: tuple[int | None, bool] = (0, False)
        return self._guarded(self._scheduler.get_num_new_matched_tokens, nothing, request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._guarded(self._scheduler.update_state_after_alloc, None, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata("", "", "")
        return self._guarded(self._scheduler.build_connector_meta, StepMetadata("", "", ""), scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._guarded(self._scheduler.update_connector_output, None, connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        return self._guarded(self._scheduler.request_finished, nothing, request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._guarded(self._scheduler.has_pending_block_frees, False)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._guarded(self._scheduler.has_pending_push_work, False)

    def reset_cache(self) -> bool | None:
        return self._guarded(self._scheduler.reset_cache, True) if self._scheduler is not None else None

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Before sleep takes the cache's memory."""
        if self._worker is not None:
            self._guarded(self._worker.unregister_kv_caches, None)

    def restore_kv_caches(self, kv_caches: Mapping[str, torch.Tensor] | None = None) -> None:
        """After sleep has given it back."""
        if self._worker is not None:
            self._worker.restore_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.get_handshake_metadata() if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first hook of every step, before anything of it is computed."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._guarded(self._worker.begin_step, None, kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        step = self._connector_metadata
        if self._worker is not None and isinstance(step, StepMetadata):
            self._guarded(self._worker.start_load_kv, None, step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """The layer's part of the step is launched: a consumer that waits for it can have it soon."""
        if self._worker is not None:
            self._guarded(self._worker.computed_layer, None, layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """All of the step is launched. Nothing is waited for: blocks stay held until they are written."""
        if self._worker is not None:
            self._guarded(self._worker.end_step, None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        return self._guarded(self._worker.get_transfer_results, KVConnectorTransferResults())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        return self._guarded(self._worker.build_connector_worker_meta, None)

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        if self._scheduler is not None:
            return self._guarded(self._scheduler.get_stats, None)
        return self._guarded(self._worker.get_stats, None) if self._worker is not None else None

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._guarded(half.shutdown, None)


if TYPE_CHECKING:
    from kvferry.vllm.scheduler import SchedulerSide
    from kvferry.vllm.worker import WorkerSide
