"""The request contract: `kv_transfer_params` as the routers of vLLM's NixlConnector carry them.

The router hands the first leg `do_remote_decode`, and the second leg whatever the first leg's response held. What
kvferry needs beyond that contract travels beside it, under the key "kvferry". Everything here came through a
client, so it is checked here and proven by digests later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvferry.protocol.messages import TransferRef

VERSION = 1
MODE_XARG = "kvferry_mode"
REASON_CHARS = 500
"""A reason that came through a client is cut to this length."""


class BadParams(ValueError):
    """kv_transfer_params that cannot be used; the text names the key and its value."""


class Offer(msgspec.Struct, frozen=True):
    """What a producer offers and a consumer is handed, or is to be had under a name that a router chose.

    block_ids: per KV cache group, by token position; 0 is vLLM's null block; no group at all where the router sent both
    legs at once. num_tokens: how many are covered.
    """

    ref: TransferRef
    host: str
    port: int
    key_id: str
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


# Bounds keep whatever a client sends within what messages and planner can hold.
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Name = Annotated[str, msgspec.Meta(pattern="^[!-~]{1,128}$")]
_KeyId = Annotated[str, msgspec.Meta(pattern="^[!-~]{0,64}$")]
_Count = Annotated[int, msgspec.Meta(gt=0, lt=2**53)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Own(msgspec.Struct):
    version: int
    transfer_id: _Id
    generation: _Count
    incarnation: _Id
    key_id: _KeyId = ""


class _Contract(msgspec.Struct):
    remote_engine_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    remote_num_tokens: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    remote_block_ids: list[list[_BlockId]]
    kvferry: _Own


def wants_remote_decode(params: object) -> bool:
    """First leg: this request's KV will be fetched by another engine."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def wants_remote_prefill(params: object) -> bool:
    """Second leg: this request's KV is to be fetched from another engine."""
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


Mode: TypeAlias = Literal["read", "write"]


def asked_mode(params: Mapping[str, Any], xargs: Mapping[str, Any] | None) -> Mode | None:
    """How the request itself wants its KV: `mode` in kv_transfer_params, or `kvferry_mode` in vllm_xargs, which routers
    leave alone. None if it does not say. Raises BadParams."""
    for name, given in (
        ("kv_transfer_params.mode", params.get("mode")),
        (f"vllm_xargs.{MODE_XARG}", (xargs or {}).get(MODE_XARG)),
    ):
        if given == "read" or given == "write":
            return given
        if given is not None:
            raise BadParams(f"{name} is {str(given)[:40]!r}, must be 'read' or 'write'")
    return None


def to_params(offer: Offer, *, request_id: str, tp_size: int, pp_size: int, dcp_size: int = 1) -> dict[str, Any]:
    """The first leg's answer, for the router to hand to the second leg."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in offer.block_ids],
        "remote_engine_id": offer.ref.producer,
        "remote_request_id": request_id,
        "remote_host": offer.host,
        "remote_port": offer.port,
        "remote_num_tokens": offer.num_tokens,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "dcp_size": dcp_size,
        "transfer_mode": "pull",
        "kvferry": {
            "version": VERSION,
            "transfer_id": offer.ref.transfer_id,
            "generation": offer.ref.generation,
            "incarnation": offer.ref.incarnation,
            "key_id": offer.key_id,
        },
    }


def not_offered(reason: str) -> dict[str, Any]:
    """The first leg's answer when its KV cannot be fetched: the second leg computes, and can say why."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "kvferry": {"refused": reason}}


def why_not_offered(params: object) -> str:
    """The reason in the answer of a first leg that offered nothing; empty if there is none."""
    own = params.get("kvferry") if isinstance(params, Mapping) else None
    reason = own.get("refused") if isinstance(own, Mapping) else None
    return reason[:REASON_CHARS] if isinstance(reason, str) else ""


def from_params(params: Mapping[str, Any], num_groups: int) -> Offer:
    """Reads what a first leg answered. A router may have turned integers into floats. Raises BadParams."""
    if "kvferry" not in params:
        raise BadParams("kv_transfer_params has no key 'kvferry': the prefill side does not run kvferry")
    version = params["kvferry"].get("version") if isinstance(params["kvferry"], Mapping) else None
    if version != VERSION:
        raise BadParams(f"kv_transfer_params.kvferry.version is {str(version)[:40]}, this side speaks {VERSION}")
    known = {name: params[name] for name in _Contract.__struct_fields__ if name in params}
    try:
        contract = msgspec.convert(_integral(known), _Contract)
    except msgspec.ValidationError as error:
        raise BadParams(f"kv_transfer_params: {error}") from None
    own = contract.kvferry
    if len(contract.remote_block_ids) != num_groups:
        raise BadParams(
            f"kv_transfer_params.remote_block_ids has {len(contract.remote_block_ids)} KV cache groups, "
            f"this side {num_groups}"
        )
    return Offer(
        ref=TransferRef(contract.remote_engine_id, own.incarnation, own.transfer_id, own.generation),
        host=contract.remote_host,
        port=contract.remote_port,
        key_id=own.key_id,
        num_tokens=contract.remote_num_tokens,
        block_ids=tuple(tuple(group) for group in contract.remote_block_ids),
    )


def _integral(value: Any, depth: int = 3) -> Any:
    """The same value with floats that are whole numbers as integers, as deep as the contract goes."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if depth and isinstance(value, Mapping):
        return {key: _integral(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_integral(item, depth - 1) for item in value]
    return value
