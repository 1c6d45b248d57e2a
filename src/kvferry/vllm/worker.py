"""The connector's half in a worker process: registers memory, hands loads to the agent, reports their ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry import records
from kvferry.agent import Leftovers, LoadRequest, LoadResult, WorkerAgent
from kvferry.vllm import attention, specs
from kvferry.vllm.config import Config
from kvferry.vllm.digests import model_identity
from kvferry.vllm.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from kvferry.vllm.metrics import FerryStats, KVFerryStats
from kvferry.vllm.wiring import open_endpoint, open_transports

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

MAX_WAIT_S = 0.01
"""How long an engine that computes nothing waits in a step for its loads: a request that comes meanwhile waits too."""
SHARE_OF_WAIT = 0.1
"""Of the time that the newest load has taken so far."""
STOP_S = 60.0
"""How long sleep mode waits for transports to close: some take seconds, and the memory must not go before."""


def device_event(device: torch.device) -> Callable[[], bool] | None:
    """Asks whether the device has done what was launched so far; None on a CPU, which has."""
    if device.type == "cpu":
        return None
    import torch

    event = torch.Event(device)
    event.record()
    return event.query


class WorkerSide:
    """One per worker process. Methods have the names of vLLM's hooks; all run in the worker's main thread."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        parallel = vllm_config.parallel_config
        self._tp_rank: int = get_tensor_model_parallel_rank()
        self._pp_rank: int = get_pp_group().rank_in_group
        self._rank = self._pp_rank * parallel.tensor_parallel_size + self._tp_rank
        self._num_ranks: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._group_kinds = specs.group_kinds(kv_cache_config)
        self._fingerprint = specs.fingerprint(
            vllm_config, kv_cache_config, config.model_id or model_identity(vllm_config)
        )
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._agent: WorkerAgent | None = None
        self._running: dict[str, LoadRequest] = {}
        self._ended: list[LoadResult] = []
        self._new_record: bytes | None = None
        self._identity: tuple[str, str, str, str] | None = None
        self._leftovers = Leftovers()
        self._computes = False
        self._computes_nothing = False
        self._newest_load_at = 0.0
        self.stats = FerryStats()

    # Start-up, sleep and shutdown.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises what keeps this worker from moving its cache, by name: better at start-up than in traffic."""
        self._kv_caches = dict(kv_caches)
        place = self._vllm_config.parallel_config.data_parallel_index * self._num_ranks + self._rank
        port = self._config.worker_port and self._config.worker_port + place
        backends = attention.backends_of(self._vllm_config, self._kv_cache_config)
        agent = WorkerAgent(
            rank=self._rank,
            pp_rank=self._pp_rank,
            tp_rank=self._tp_rank,
            num_ranks=self._num_ranks,
            tp_size=self._vllm_config.parallel_config.tensor_parallel_size,
            endpoint=open_endpoint(self._config, port),
            make_transports=lambda: open_transports(self._config),
            layout=specs.cache_layout(
                self._vllm_config, self._kv_cache_config, self._kv_caches, backends, self._tp_rank
            ),
            fingerprint=self._fingerprint,
            group_kinds=self._group_kinds,
            leases=self._config.leases(),
            leftovers=self._leftovers,
        )
        agent.start()
        self._agent = agent
        offered = ", ".join(transport.name for transport in agent.record().transports)
        logger.info("kvferry: worker %d offers the transports %s", self._rank, offered)
        if self._identity is not None:
            agent.identify(*self._identity)

    def unregister_kv_caches(self) -> None:
        """Sleep mode is about to take the cache's memory: nothing may be read from or into it any more.

        Raises RuntimeError while that is not certain; call again then.
        """
        if self._agent is None:
            return
        self._agent.stop(STOP_S)
        if self._agent.alive:
            raise RuntimeError(
                f"kvferry: the worker's I/O thread has not ended within {STOP_S:g} s, so a transport may still touch "
                "the KV cache: its memory can't be given up"
            )
        for result in self._agent.collect():
            self._end(result)
        self._leftovers = self._agent.leftovers
        self._agent = None

    def restore_kv_caches(self, kv_caches: Mapping[str, torch.Tensor] | None = None) -> None:
        """The cache's memory is back: registers it anew and lets the engine publish the new record."""
        self.register_kv_caches(kv_caches if kv_caches is not None else self._kv_caches)
        self._new_record = self._encoded_record()

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        if self._agent is None:
            return None
        return HandshakeMetadata(self._encoded_record(), self._fingerprint, self._group_kinds)

    def _encoded_record(self) -> bytes:
        return records.encode(self._agent.record()) if self._agent is not None else b""

    def shutdown(self) -> None:
        if self._agent is not None:
            self._agent.stop()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._kv_caches.values())).device

    # Each step.

    def begin_step(self, step: StepMetadata) -> None:
        """Tells the agent what the step computes of transfers that a consumer may want written meanwhile."""
        self._computes = bool(step.computes)
        self._computes_nothing = step.computes_nothing
        if self._agent is None or not step.engine_id:
            return
        if self._identity is None:
            self._identity = (step.engine_id, step.incarnation, step.rendezvous, step.home)
            self._agent.identify(*self._identity)
        if step.computes:
            self._agent.begin_step(step.computes)
        if step.over:
            self._agent.forget_transfers(step.over)

    def computed_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:
        if self._computes and self._agent is not None:
            self._agent.computed_layer(layer_name, device_event(kv_layer.device))

    def end_step(self) -> None:
        if self._computes and self._agent is not None:
            self._agent.end_step(device_event(self._device))
        self._computes = False

    def start_load_kv(self, step: StepMetadata) -> None:
        """The device has been told to clear the step's new blocks, and earlier steps may still run on it: what comes
        from outside may land once it has done all that."""
        for load in step.loads:
            self._running[load.load_id] = load
            self._newest_load_at = time.monotonic()
        if self._agent is None or not self._agent.alive:
            return
        is_ready = device_event(self._device) if step.loads else None
        for load in step.loads:
            self._agent.load(load, is_ready)  # appends to a queue: nothing here can fail halfway
        for load_id, reason in step.cancels:
            self._agent.cancel(load_id, reason)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Each load once: a failed one is finished as well. Nothing is ever reported as sent: the engine holds."""
        if self._running and (self._agent is None or not self._agent.alive):
            self._fail_running("the worker's I/O thread has ended")
        if self._agent is not None:
            for result in self._agent.collect(self._patience_s()):
                self._end(result)
        return KVConnectorTransferResults(
            finished_recving={result.request_id for result in self._ended},
            failed_recving={result.request_id for result in self._ended if not result.ok},
        )

    def _patience_s(self) -> float:
        """vLLM steps an engine all the time while loads are all that it waits for, and its processes spin between the
        steps: whatever else needs this processor, the agent's thread first of all, gets little of it. So a step that
        has nothing to do ends with the next result, or after a wait that is short beside what the loads take."""
        if not (self._computes_nothing and self._running) or self._ended:
            return 0.0
        return min(MAX_WAIT_S, SHARE_OF_WAIT * (time.monotonic() - self._newest_load_at))

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Called right after `get_transfer_results`, in the same step: carries the same loads' figures."""
        if not self._ended and self._new_record is None:
            return None
        metadata = WorkerMetadata(results=self._ended)
        if self._new_record is not None:
            metadata.records[self._rank] = self._new_record
        self._ended, self._new_record = [], None
        return metadata

    def _end(self, result: LoadResult) -> None:
        if self._running.pop(result.load_id, None) is None:
            return
        self._ended.append(result)
        self.stats.add_result(result)
        if not result.ok:
            logger.warning(
                "kvferry: rank %d: load of request %s failed: %s", self._rank, result.request_id, result.reason
            )

    def _fail_running(self, reason: str) -> None:
        for load in list(self._running.values()):
            self._end(
                LoadResult(
                    request_id=load.request_id,
                    load_id=load.load_id,
                    rank=self._rank,
                    ok=False,
                    quiet=False,
                    reason=reason,
                    transport="",
                    num_bytes=0,
                    num_descriptors=0,
                    seconds=0.0,
                    wait_s=0.0,
                )
            )

    def get_stats(self) -> KVFerryStats | None:
        self.stats.end_step()
        return self.stats.take()
