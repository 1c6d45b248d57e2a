"""Where the bytes of a KV cache lie: fields, named axes, byte strides.

structs.py has the data that travels in handshakes, builders.py makes fields for the layouts in use, check.py says
whether a layout is sound. Nothing here knows torch or vLLM.
"""

from kvferry.layout.builders import (
    PHYSICAL_ORDERS,
    STATE_TAG,
    STATE_TOKENS,
    Channels,
    PlaneOrder,
    Spec,
    cpu_tiles,
    from_shape,
    fused,
    interleaved,
    key_only,
    opaque_cells,
    opaque_tiles,
    physical_strides,
    separated,
    state,
    with_kernel_blocks,
)
from kvferry.layout.check import Examined, check
from kvferry.layout.structs import (
    Axis,
    CacheLayout,
    Context,
    Dim,
    Field,
    Heads,
    Layer,
    LayoutError,
    Refusal,
    Region,
    memory_of,
    offset_bytes,
)

__all__ = [
    "PHYSICAL_ORDERS",
    "STATE_TAG",
    "STATE_TOKENS",
    "Axis",
    "CacheLayout",
    "Channels",
    "Context",
    "Dim",
    "Examined",
    "Field",
    "Heads",
    "Layer",
    "LayoutError",
    "PlaneOrder",
    "Refusal",
    "Region",
    "Spec",
    "check",
    "cpu_tiles",
    "from_shape",
    "fused",
    "interleaved",
    "key_only",
    "memory_of",
    "offset_bytes",
    "opaque_cells",
    "opaque_tiles",
    "physical_strides",
    "separated",
    "state",
    "with_kernel_blocks",
]
