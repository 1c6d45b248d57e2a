"""What the scheduler's and the workers' halves of the connector hand each other through vLLM. All of it is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.agent import ComputeStep, LoadRequest, LoadResult


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step. cancels: (load_id, reason). computes: what this step computes of promised
    transfers. over: ids of promised transfers that nobody can want any more. computes_nothing: neither does the engine
    in this step, nor in one before it that still runs."""

    engine_id: str
    incarnation: str
    rendezvous: str
    home: str = ""
    loads: list[LoadRequest] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)
    computes: list[ComputeStep] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    computes_nothing: bool = False


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, in steps in which a load ended. records: of workers that registered memory anew."""

    results: list[LoadResult] = field(default_factory=list)
    records: dict[int, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        if isinstance(other, WorkerMetadata):
            return WorkerMetadata(self.results + other.results, self.records | other.records)
        return self


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """An encoded WorkerRecord, and what must be equal on both sides."""

    record: bytes
    fingerprint: dict[str, str]
    group_kinds: tuple[str, ...]
