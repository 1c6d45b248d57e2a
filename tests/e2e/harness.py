"""What the e2e fixtures are made of: configurations, the pool that keeps one pair running, and the check for leaks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.cli import models, proc
from kvferry.cli.errors import Problem
from kvferry.cli.servers import Cluster, Server, ServerSpec, pair

PATIENT: Mapping[str, Any] = {"handshake_s": 60, "silence_s": 30, "load_s": 120}
"""Settings for a host on which everything may be slow: no test is about these limits."""


@dataclass(frozen=True)
class PairConfig:
    """Which pair of servers a test wants. `extra` joins kv_connector_extra_config on both sides.

    discovery: the router is of the MoRI-IO contract. `specs`, if given, makes the servers from the model's directory in
    place of the rest.
    """

    tp_prefill: int = 1
    tp_decode: int = 1
    kind: str = "llama"
    policy: str = "recompute"
    transport: str | None = None
    router: bool = False
    discovery: bool = False
    max_model_len: int = 2048
    extra: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    max_num_batched_tokens: int = 512
    specs: Callable[..., list[ServerSpec]] | None = None

    def servers(self) -> list[ServerSpec]:
        model = models.tiny(self.kind)
        if self.specs is not None:
            return self.specs(model)
        return pair(
            model,
            self.tp_prefill,
            self.tp_decode,
            self.transport,
            self.policy,
            {**PATIENT, **self.extra},
            args=self.args,
            env=self.env,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )


PLAIN = PairConfig(
    router=True,
    extra={"first_hold_s": 20},  # some tests wait for what nobody fetches
    env={"VLLM_SERVER_DEV_MODE": "1"},  # the mode that has /reset_prefix_cache and /pause
)
"""The pair of most tests."""


class PairPool:
    """At most one pair of servers, started when asked for and kept while the next test wants the same."""

    def __init__(self) -> None:
        self.current: Cluster | None = None
        self._config: PairConfig | None = None
        self._failures: dict[str, Problem] = {}
        self._seen: list[Server] = []

    def get(self, config: PairConfig) -> Cluster:
        """A running pair of this configuration; a new one if the current differs or a server of it has ended."""
        if self.current is not None and config == self._config and self.current.alive():
            return self.current
        self.close()
        if (known := self._failures.get(repr(config))) is not None:
            raise known  # the next test of this configuration need not wait for the same failure
        cluster = Cluster(config.servers(), router=config.router, discovery=config.discovery)
        try:
            self.current, self._config = cluster.__enter__(), config
        except Problem as problem:
            self._failures[repr(config)] = problem
            raise
        self._seen += cluster.everything
        return cluster

    def close(self) -> None:
        """Stop the current pair, if there is one."""
        if self.current is not None:
            cluster, self.current, self._config = self.current, None, None
            self._seen += cluster.everything  # a test may have restarted one
            cluster.close()

    def leaks(self, segments_before: set[str]) -> list[str]:
        """What is left of all pairs: live processes, ports that are listened on, shared memory that nobody uses."""
        processes = [f"process {pid} of {server.name}" for server in self._seen for pid in server.child.pids()]
        ports = [f"port {server.port} of {server.name}" for server in self._seen if proc.listeners(server.port)]
        return [*processes, *ports, *sorted(orphaned_segments() - segments_before)]


def orphaned_segments() -> set[str]:
    """Paths below /dev/shm that no process uses. A named semaphore counts only if no resource tracker may own it."""
    pids = proc.all_pids()
    tracked = any(proc.is_resource_tracker(pid) for pid in pids)
    return {
        path
        for path in (f"/dev/shm/{name}" for name in os.listdir("/dev/shm"))
        if not (tracked and path.startswith("/dev/shm/sem."))
    } - proc.shared_memory(pids)


def clean_up_on_signals() -> None:
    """SIGTERM and SIGHUP end the test run as Ctrl-C does, so that fixtures are torn down."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
