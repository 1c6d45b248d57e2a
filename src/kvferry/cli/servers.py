"""Real vLLM servers and a real router on this host, started together and stopped without a trace.

with Cluster(pair(model), router=True) as cluster:
    answer = api.complete(cluster.router.url, "The capital of France is")
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.cli import api, logs, preflight, proc, trial
from kvferry.cli.children import Child, Children
from kvferry.cli.errors import Problem
from kvferry.cli.ports import HOST, free_ports, require_free
from kvferry.cli.report import Reporter, Silent
from kvferry.cli.specs import DECODE, PREFILL, ROLE_OF, ServerSpec, kvferry_config, pair

__all__ = ["DECODE", "PREFILL", "ROLE_OF", "ROUTER", "Cluster", "Server", "ServerSpec", "kvferry_config", "pair"]

ROUTER = "router"

_GRACE_S = 12.0  # from SIGTERM to SIGKILL: vLLM's own shutdown takes 4 to 7 s
_POLL_S = 0.25
_ANNOUNCED_S = 60.0
_START_TIMEOUT_S = 600.0


class Server:
    """A running server or router. Made by Cluster."""

    def __init__(self, child: Child, port: int, children: Children, spec: ServerSpec | None) -> None:
        self.child = child
        self.port = port
        self.spec = spec
        self._children = children

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def alive(self) -> bool:
        """Whether its main process runs (a dead engine ends it within a second or so)."""
        return self.child.exit_status() is None

    def ready(self) -> bool:
        """Whether it answers /health, and it is this one that answers: the port's listener is a process of ours."""
        return self.alive() and api.is_healthy(self.url) and self._listens()

    def metrics(self) -> api.Metrics:
        """Its metrics page, read now. Raises HttpError."""
        return api.metrics(self.url)

    def num_blocks(self) -> int:
        """Blocks in its KV cache."""
        return int(self.metrics().label("vllm:cache_config_info", "num_gpu_blocks"))

    def used_blocks(self) -> int:
        """Blocks in use by requests or holds. Runs one plain request first: the gauge of an idle engine is stale."""
        api.complete(self.url, "x", max_tokens=1)
        page = self.metrics()
        total = int(page.label("vllm:cache_config_info", "num_gpu_blocks"))
        return round(page.value("vllm:kv_cache_usage_perc") * (total - 1))  # the null block does not count

    def suspend(self) -> None:
        """SIGSTOP all its processes: it answers nothing until resume."""
        self.child.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT all its processes."""
        self.child.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL all its processes, as a crash would; returns when they are gone."""
        self._children.kill(self.child)

    def stop(self) -> None:
        """Stop it in order; returns when it is gone."""
        self._children.stop(self.child)

    def log_lines(self, count: int = 20) -> list[str]:
        """The last lines of its log."""
        return self.child.log_lines(count)

    def _listens(self) -> bool:
        return bool(proc.listeners(self.port) & self.child.pids())


class Cluster:
    """Servers, and a router if asked for, as a context manager. Entering returns when all answer.

    Raises Problem, with the last lines of the log, when one can't be started. Logs are kept (and their place told)
    when the block ends by an exception; otherwise they are removed. Signals: see signals.stop_on_signals.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        router: bool = False,
        router_port: int = 0,
        reporter: Reporter | None = None,
        start_timeout_s: float = _START_TIMEOUT_S,
        discovery: bool = False,
    ) -> None:
        """discovery: the router learns of the servers from their announcements, by the MoRI-IO contract; which legs it
        sends when follows from their `mode`. Otherwise it is told of them, and speaks the NIXL contract."""
        self.specs = list(specs)
        self.servers: list[Server] = []
        self.log_dir = Path()
        self._with_router = router
        self._discovery = discovery
        self._router_port = router_port
        self._router: Server | None = None
        self._reporter: Reporter = reporter or Silent()
        self._start_timeout_s = start_timeout_s
        self._children: Children | None = None

    def __enter__(self) -> Cluster:
        self._check()
        self.log_dir = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self._children = Children(self.log_dir)
        try:
            self._start()
        except BaseException as error:
            self.close(keep_logs=not isinstance(error, KeyboardInterrupt | SystemExit))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep_logs=error is not None and not isinstance(error, KeyboardInterrupt | SystemExit))

    @property
    def prefill(self) -> Server:
        """The first prefill server."""
        return self._first(PREFILL)

    @property
    def decode(self) -> Server:
        """The first decode server."""
        return self._first(DECODE)

    @property
    def router(self) -> Server:
        """The router. Raises ValueError if the cluster has none."""
        if self._router is None:
            raise ValueError("this cluster was started without a router")
        return self._router

    @property
    def everything(self) -> list[Server]:
        """The servers, and the router if there is one."""
        return [*self.servers, *([self._router] if self._router else [])]

    def alive(self) -> bool:
        """Whether all its servers and its router run."""
        return bool(self.servers) and all(server.alive() for server in self.everything)

    def server(self, name: str) -> Server:
        """The server of this name. Raises KeyError."""
        for server in self.servers:
            if server.name == name:
                return server
        raise KeyError(name)

    def restart(self, server: Server) -> Server:
        """Start a server again on its port, after stopping what is left of it; returns when it answers."""
        if server.spec is None or self._children is None:
            raise ValueError(f"{server.name} is not a running vLLM server of this cluster")
        server.stop()
        again = self._spawn(server.spec, server.port)
        self.servers[self.servers.index(server)] = again
        self._wait_ready([again])
        return again

    def two_legs(self, prompt: str | Sequence[int], **fields: Any) -> api.Legs:
        """A request by way of the prefill and the decode server, without the router. Raises HttpError."""
        return api.two_legs(self.prefill.url, self.decode.url, prompt, **fields)

    def failure_report(self, lines: int = 25) -> str:
        """The last log lines of all servers, for a message about a failure."""
        parts = []
        for server in self.everything:
            parts += [f"--- {server.name} ({server.child.log}), last lines:", *server.log_lines(lines)]
        return "\n".join(parts)

    def close(self, keep_logs: bool = False) -> None:
        """Stop everything. Idempotent."""
        if self._children is None:
            return
        for server in self.everything:
            self._reporter.state(server.name, "stopping")
        self._children.close()
        self._children = None
        if keep_logs:
            self._reporter.say(f"the logs are in {self.log_dir}")
        else:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _first(self, role: str) -> Server:
        for server in self.servers:
            if server.spec is not None and server.spec.role == role:
                return server
        raise ValueError(f"this cluster has no {role} server")

    def _check(self) -> None:
        names = [spec.label for spec in self.specs]
        if len(set(names)) != len(names):
            raise ValueError(f"name: servers need different names, these are {names}")
        preflight.require_vllm()
        preflight.require_plugin()
        if self._with_router:
            preflight.require_router()
        preflight.require_matching_torch()
        for spec in self.specs:
            if not (spec.model / "config.json").is_file():
                raise Problem(f"{spec.model} is no model directory: it has no config.json")
            preflight.require_divisible_heads(spec.model, spec.tp_size)
        preflight.require_memory(
            sum(
                preflight.needed_memory_bytes(spec.model, spec.tp_size, spec.cache_gib * preflight.GIB)
                for spec in self.specs
            )
        )
        for port, owner in [(self._router_port, ROUTER), *((spec.port, spec.label) for spec in self.specs)]:
            if port:
                require_free(port, owner)

    def _start(self) -> None:
        # All at once, so that they differ: one for each server, and the router's own, its metrics' and its discovery's.
        *ports, router_port, router_metrics_port, discovery_port = free_ports(len(self.specs) + 3)
        discovery = f"{HOST}:{discovery_port}" if self._discovery else ""
        self.servers = []
        for spec, port in zip(self.specs, ports, strict=True):
            self.servers.append(self._spawn(replace(spec, discovery=discovery), spec.port or port))
        self._wait_ready(self.servers)
        if self._with_router:
            port = self._router_port or router_port
            self._router = self._spawn_router(port, router_metrics_port, discovery)
            self._wait_ready([self._router])
            if discovery:
                self._wait_routable(self._router)

    def _wait_routable(self, router: Server) -> None:
        """The servers announce themselves every few seconds."""
        deadline_s = time.monotonic() + _ANNOUNCED_S
        while not api.is_routable(router.url):
            if time.monotonic() > deadline_s:
                raise Problem(
                    f"the router has not heard of both servers after {_ANNOUNCED_S:.0f} s",
                    details="\n".join(["its last lines:", *router.log_lines(15)]),
                )
            time.sleep(_POLL_S)

    def _spawn(self, spec: ServerSpec, port: int) -> Server:
        children = self._running()
        require_free(port, spec.label)
        child = children.start(spec.label, spec.command(port), spec.environment(self.log_dir), grace_s=_GRACE_S)
        return Server(child, port, children, spec)

    def _spawn_router(self, port: int, metrics_port: int, discovery: str) -> Server:
        children = self._running()
        require_free(port, ROUTER)
        command = [
            *(sys.executable, "-m", "vllm_router.launch_router"),
            *("--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)),
            *("--vllm-pd-disaggregation", "--policy", "round_robin"),
            *("--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", "60"),
        ]
        if discovery:
            command += ["--kv-connector", "moriio", "--vllm-discovery-address", discovery]
            return Server(children.start(ROUTER, command), port, children, None)
        command += ["--kv-connector", "nixl"]
        for server in self.servers:
            if server.spec is not None:
                command += [f"--{server.spec.role}", server.url]
        return Server(children.start(ROUTER, command), port, children, None)

    def _running(self) -> Children:
        if self._children is None:
            raise ValueError("this cluster is not running: use it in a `with` block")
        return self._children

    def _wait_ready(self, servers: Sequence[Server]) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                if not server.alive():
                    raise self._ended(server)
                if server.ready():
                    waiting.remove(server)
                    self._reporter.state(server.name, f"up at {server.url}", done=True)
                elif server.spec is not None:
                    self._reporter.state(server.name, logs.phase(server.log_lines(400)))
                else:
                    self._reporter.state(server.name, "starting")
            if waiting and time.monotonic() > deadline_s:
                raise self._too_late(waiting[0])
            self._running().note_segments()
            if waiting:
                time.sleep(_POLL_S)

    def _ended(self, server: Server) -> Problem:
        status = server.child.exit_status()
        lines = server.log_lines(2000)
        error = logs.last_error(lines)
        advice = logs.advice(error) or logs.advice("\n".join(lines))
        if status == -signal.SIGKILL:
            advice = "It was killed from outside; most likely the system ran out of memory."
        return Problem(
            f"the {server.name} server ended with status {status} while it was starting"
            + (f": {error}" if error else ""),
            advice=advice,
            details="\n".join(["its last lines:", *lines[-15:]]),
        )

    def _too_late(self, server: Server) -> Problem:
        return Problem(
            f"the {server.name} server does not answer after {self._start_timeout_s:.0f} s",
            details="\n".join(["its last lines:", *server.log_lines(15)]),
        )


def require_transport(name: str | None) -> None:
    """Raise Problem for a transport that is not known, or that a server here could not make: its library is missing."""
    from kvferry.transport import registry
    from kvferry.transport.base import TransportError

    if name is None:
        return
    try:
        registry.options(name)
    except TransportError as error:
        raise Problem(f"--transport: {error}") from None
    why = trial.failure_of(name, HOST)
    if why:
        raise Problem(f"--transport {name}: {why}")
