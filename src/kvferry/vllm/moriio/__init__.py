"""vLLM's MoRIIO connector over kvferry: the same class name, settings, request contract and functions.

`"kv_connector": "MoRIIOConnector", "kv_connector_module_path": "kvferry.vllm.moriio"` is all that changes for a user of
MoRIIO. The functions answer as MoRIIO's do, its limits included; the connector itself does not go by them: it compares
both sides' layouts and heads (kvferry.plan, kvferry.topology).
"""

from kvferry.vllm.moriio.caches import (
    LayerTransferGeometry,
    build_layer_to_spec,
    compute_block_transfer_offsets,
    get_layer_transfer_geometry,
    is_mla_cache_layer,
    iter_layer_registration_regions,
    merge_contiguous_offsets,
)
from kvferry.vllm.moriio.connector import MoRIIOConnector
from kvferry.vllm.moriio.notify import Notifier, read_transfer_ack, send_notify
from kvferry.vllm.moriio.ranks import (
    MoRIIOTransferAck,
    get_moriio_expected_ack_count,
    get_moriio_remote_tp_rank,
    resolve_moriio_transfer_ack,
    validate_moriio_heterogeneous_tp_kv_heads,
)

__all__ = [
    "LayerTransferGeometry",
    "MoRIIOConnector",
    "MoRIIOTransferAck",
    "Notifier",
    "build_layer_to_spec",
    "compute_block_transfer_offsets",
    "get_layer_transfer_geometry",
    "get_moriio_expected_ack_count",
    "get_moriio_remote_tp_rank",
    "is_mla_cache_layer",
    "iter_layer_registration_regions",
    "merge_contiguous_offsets",
    "read_transfer_ack",
    "resolve_moriio_transfer_ack",
    "send_notify",
    "validate_moriio_heterogeneous_tp_kv_heads",
]
