"""What a vLLM server of a cluster is started with: its command line, its environment, its connector's settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.cli import api
from kvferry.cli.ports import HOST

PREFILL, DECODE = "prefill", "decode"
ROLE_OF = {PREFILL: "kv_producer", DECODE: "kv_consumer"}

_SHUTDOWN_TIMEOUT_S = 5  # vLLM's own; without one it kills its engine, which leaves shared memory behind


@dataclass(frozen=True)
class ServerSpec:
    """One vLLM server. role is prefill or decode; kv_config None serves without a connector.

    args and env come after the defaults and win over them. port 0 takes a free one. discovery: "host:port" at which a
    router of the MoRI-IO contract listens for servers; this one announces itself there.
    """

    role: str
    model: Path
    tp_size: int = 1
    kv_config: Mapping[str, Any] | None = None
    name: str = ""
    port: int = 0
    dtype: str = "float32"
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    cache_gib: int = 1
    discovery: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLE_OF:
            raise ValueError(f"role: {self.role!r} is neither {PREFILL!r} nor {DECODE!r}")

    @property
    def label(self) -> str:
        return self.name or self.role

    def command(self, port: int) -> list[str]:
        """The command line that serves on this loopback port."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", HOST, "--port", str(port)),
            *("--model", str(self.model), "--served-model-name", api.MODEL_NAME),
            *("--dtype", self.dtype, "--enforce-eager", "--tensor-parallel-size", str(self.tp_size)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S), "--disable-uvicorn-access-log"),
        ]
        if self.kv_config is not None:
            command += ["--kv-transfer-config", json.dumps(self._kv_config(self.kv_config, port))]
        return [*command, *self.args]

    def _kv_config(self, kv_config: Mapping[str, Any], port: int) -> dict[str, Any]:
        if not self.discovery:
            return dict(kv_config)
        extra = {**kv_config["kv_connector_extra_config"], "discovery": self.discovery, "http_port": port}
        return {**kv_config, "kv_connector_extra_config": extra}

    def environment(self, scratch: Path) -> dict[str, str]:
        """What is added to our environment; temporary files go below `scratch`."""
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": HOST,
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(scratch),
            "PYTHONUNBUFFERED": "1",
            **self.env,
        }


def kvferry_config(role: str, transport: str | None = None, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A --kv-transfer-config for kvferry. `extra` joins kv_connector_extra_config."""
    extra_config = {**({"transports": [transport]} if transport else {}), **extra}
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": ROLE_OF[role],
        "kv_connector_extra_config": extra_config,
        "kv_load_failure_policy": policy,
    }


def pair(
    model: Path,
    tp_prefill: int = 1,
    tp_decode: int = 1,
    transport: str | None = None,
    policy: str = "recompute",
    extra: Mapping[str, Any] | None = None,
    **fields: Any,
) -> list[ServerSpec]:
    """A prefill and a decode server joined by kvferry. `fields` are those of ServerSpec, for both."""
    return [
        ServerSpec(role, model, tp_size, kvferry_config(role, transport, policy, **(extra or {})), **fields)
        for role, tp_size in ((PREFILL, tp_prefill), (DECODE, tp_decode))
    ]
