"""Figures of both halves: counted in their processes, merged by vLLM, shown in its log and on its metrics page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.agent import LoadResult
from kvferry.vllm import client_errors

SAMPLES = ("load_s", "wait_s", "bytes", "descriptors", "hook_s")
"""Lists of samples; each load of each rank adds one, each step adds its time in kvferry's hooks."""
COUNTS = ("failures", "refusals", "holds")
"""Counts by name."""
GAUGES = ("held_blocks", "quarantined_blocks", "oldest_s")
REASONS = "reasons"
"""Why requests failed, by request id: for their clients, not for the log (see client_errors)."""
HOOK_SAMPLES_KEPT = 512
"""Hook times ride along with other news, or alone once there are this many: an idle engine sends nothing."""


@dataclass
class KVFerryStats(KVConnectorStats):
    """What vLLM carries from workers and scheduler to its logger. `data` holds SAMPLES, COUNTS, GAUGES and REASONS."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        counts: dict[str, Any] = {name: {} for name in (*COUNTS, REASONS)}
        self.data = {name: [] for name in SAMPLES} | counts | dict.fromkeys(GAUGES)

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in (*SAMPLES, *COUNTS, REASONS)) and all(
            self.data[name] is None for name in GAUGES
        )

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        for name in SAMPLES:
            self.data[name].extend(other.data[name])
        for name in COUNTS:
            for key, count in other.data[name].items():
                self.data[name][key] = self.data[name].get(key, 0) + count
        self.data[REASONS].update(other.data[REASONS])
        for name in GAUGES:
            if other.data[name] is not None:
                self.data[name] = other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's log: loads, their sizes and times, failures by reason, holds, time in hooks."""
        data = self.data
        line: dict[str, int | float] = {
            "loads": len(data["load_s"]),
            "MB": round(sum(data["bytes"]) / 1e6, 2),
            "descriptors": sum(data["descriptors"]),
        }
        if data["load_s"]:
            line["load ms p50"] = _percentile_ms(data["load_s"], 50)
            line["load ms p99"] = _percentile_ms(data["load_s"], 99)
            line["wait ms p50"] = _percentile_ms(data["wait_s"], 50)
        line["failed"] = sum(data["failures"].values())
        for name in COUNTS:
            line.update({f"{name}:{key}": count for key, count in sorted(data[name].items())})
        for name in GAUGES:
            if data[name]:
                line[name.replace("_", " ")] = round(data[name], 1)
        if data["hook_s"]:
            line["hooks ms/step p50"] = _percentile_ms(data["hook_s"], 50)
            line["hooks ms/step p99"] = _percentile_ms(data["hook_s"], 99)
        return line


def _percentile_ms(samples: list[float], percentile: float) -> float:
    return round(float(np.percentile(samples, percentile)) * 1e3, 3)


class FerryStats:
    """Collects in one process, in one thread."""

    def __init__(self) -> None:
        self._stats = KVFerryStats()
        self._gauges: dict[str, float] = {}
        self._step_s = 0.0

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self._step_s += perf_counter() - begin

    def end_step(self) -> None:
        """The hooks' time since the last call is one sample."""
        samples = self._stats.data["hook_s"]
        if len(samples) < HOOK_SAMPLES_KEPT:
            samples.append(self._step_s)
        self._step_s = 0.0

    def add_result(self, result: LoadResult) -> None:
        data = self._stats.data
        if result.ok:
            data["load_s"].append(result.seconds)
            data["wait_s"].append(result.wait_s)
            data["bytes"].append(result.num_bytes)
            data["descriptors"].append(result.num_descriptors)
        else:
            self._count("failures", reason_kind(result.reason))

    def count_refusal(self, kind: str) -> None:
        self._count("refusals", kind)

    def count_hold(self, outcome: str) -> None:
        self._count("holds", outcome)

    def count_error(self, hook: str) -> None:
        self._count("failures", f"error in {hook}")

    def tell_client(self, request_id: str, reason: str) -> None:
        """This request will fail, and this is why."""
        self._stats.data[REASONS][request_id] = reason

    def set_gauges(self, **values: float) -> None:
        """Sent when they change; an age alone is no news."""
        if {**values, "oldest_s": 0} != {**self._gauges, "oldest_s": 0}:
            self._gauges = values
            self._stats.data.update(values)

    def take(self) -> KVFerryStats | None:
        """What there is to tell, or None."""
        data = self._stats.data
        news = (
            any(data[name] for name in (*COUNTS, REASONS, "load_s"))
            or any(data[name] is not None for name in GAUGES)
            or len(data["hook_s"]) >= HOOK_SAMPLES_KEPT
        )
        if not news:
            return None
        taken, self._stats = self._stats, KVFerryStats()
        return taken

    def _count(self, name: str, key: str) -> None:
        counts = self._stats.data[name]
        counts[key] = counts.get(key, 0) + 1


KINDS = (
    ("handshake", "handshake"),
    ("Refusal", "mismatch"),
    ("connection", "connection"),
    ("PeerLost", "connection"),
    ("digest", "digest"),
    ("blocks", "blocks"),
    ("generation", "stale"),
    ("incarnation", "stale"),
    ("released", "stale"),
    ("lapsed", "lapsed"),
    ("unknown", "unknown"),
    ("deadline", "deadline"),
    ("ended", "cancelled"),
)
"""Words of a reason, first match first, and the label that they make."""


def reason_kind(reason: str) -> str:
    """A few words for a metric's label: a reason in full would make a new series each time."""
    for word, kind in KINDS:
        if word in reason:
            return kind
    return "other"


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """The same figures for Prometheus, each with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labelled: dict[tuple[str, int, str], Any] = {}
        seconds = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]
        self._load = self._histogram("kvferry_load_seconds", "From the first post to the last byte, per rank.", seconds)
        self._wait = self._histogram("kvferry_wait_seconds", "From the engine's step to the first post.", seconds)
        self._hooks = self._histogram(
            "kvferry_hook_seconds",
            "Time in kvferry's hooks per engine step.",
            [1e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1],
        )
        self._bytes = self._counter("kvferry_bytes", "Bytes of KV received.")
        self._descriptors = self._counter("kvferry_descriptors", "Descriptors that carried them.")
        self._loads = self._counter("kvferry_loads", "Loads that succeeded, per rank.")
        self._failures = self._family("kvferry_failures", "Loads that failed, by reason.", "reason")
        self._refusals = self._family("kvferry_refusals", "Transfers refused before any load, by kind.", "kind")
        self._holds = self._family("kvferry_holds", "Holds that ended, by outcome.", "outcome")
        self._gauges = {
            "held_blocks": self._gauge("kvferry_held_blocks", "Blocks that wait for readers."),
            "quarantined_blocks": self._gauge("kvferry_quarantined_blocks", "Blocks kept after failed loads."),
            "oldest_s": self._gauge("kvferry_oldest_seconds", "Age of the oldest hold or quarantine."),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        client_errors.remember(data[REASONS])
        for metric, name in ((self._load, "load_s"), (self._wait, "wait_s"), (self._hooks, "hook_s")):
            for sample in data[name]:
                metric[engine_idx].observe(sample)
        self._bytes[engine_idx].inc(sum(data["bytes"]))
        self._descriptors[engine_idx].inc(sum(data["descriptors"]))
        self._loads[engine_idx].inc(len(data["load_s"]))
        for family, name in ((self._failures, "failures"), (self._refusals, "refusals"), (self._holds, "holds")):
            for key, count in data[name].items():
                self._child(family, name, engine_idx, key).inc(count)
        for name, gauge in self._gauges.items():
            if data[name] is not None:
                gauge[engine_idx].set(data[name])

    def _child(self, family: Any, name: str, engine_idx: int, key: str) -> Any:
        labels = (name, engine_idx, key)
        if labels not in self._labelled:
            self._labelled[labels] = family.labels(*self.per_engine_labelvalues[engine_idx], key)
        return self._labelled[labels]

    def _per_engine(self, metric: Any) -> Any:
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _counter(self, name: str, text: str) -> Any:
        return self._per_engine(self._counter_cls(name=f"vllm:{name}", documentation=text, labelnames=self._labelnames))

    def _gauge(self, name: str, text: str) -> Any:
        return self._per_engine(
            self._gauge_cls(
                name=f"vllm:{name}", documentation=text, labelnames=self._labelnames, multiprocess_mode="mostrecent"
            )
        )

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Any:
        return self._per_engine(
            self._histogram_cls(name=f"vllm:{name}", documentation=text, labelnames=self._labelnames, buckets=buckets)
        )

    def _family(self, name: str, text: str, label: str) -> Any:
        return self._counter_cls(name=f"vllm:{name}", documentation=text, labelnames=[*self._labelnames, label])
