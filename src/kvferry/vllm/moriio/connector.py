"""MoRIIOConnector: kvferry's connector with MoRIIO's defaults, and with its keys in a first leg's answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.vllm import config
from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.moriio.settings import with_defaults

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.request import Request


class MoRIIOConnector(KVFerryConnector):
    """In place of vLLM's class of this name: `"kv_connector_module_path": "kvferry.vllm.moriio"`."""

    @classmethod
    def parse_settings(cls, extra_config: Mapping[str, Any], log_ignored: bool) -> config.Config:
        return config.parse(with_defaults(extra_config, os.environ), log_ignored)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only where kvferry's own key asks for layer by layer: MoRIIO leaves vLLM's graphs alone, on both sides."""
        return extra_config.get("mode") == "write"

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished_all_groups(request, block_ids)
        parallel = self._vllm_config.parallel_config
        return delayed, self._guarded(with_moriios_keys, params, params, request.kv_transfer_params, parallel)


def with_moriios_keys(
    params: dict[str, Any] | None, given: Mapping[str, Any] | None, parallel: ParallelConfig
) -> dict[str, Any] | None:
    """A first leg's answer under MoRIIO's keys too, for routers and sidecars that look at them; other answers stay as
    they are. given: the leg's own kv_transfer_params. Both ports are the rendezvous."""
    if not params or not params.get("do_remote_prefill"):
        return params
    return {
        **params,
        "remote_handshake_port": params["remote_port"],
        "remote_notify_port": params["remote_port"],
        "remote_dp_rank": parallel.data_parallel_index,
        "remote_dp_rank_override": True,
        "remote_dp_size": parallel.data_parallel_size,
        "remote_dp_size_local": parallel.data_parallel_size_local,
        "transfer_id": (given or {}).get("transfer_id") or params["kvferry"]["transfer_id"],
    }
