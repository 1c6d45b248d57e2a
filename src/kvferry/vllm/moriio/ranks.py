"""MoRIIO's rules for unequal TP sizes: which rank pairs with which, and how many releases a transfer gets.

They are the simple cases of kvferry.topology. The connector itself intersects heads, and counts a set of ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvferry import topology


class MoRIIOTransferAck(NamedTuple):
    """One rank of a consumer has done with a transfer. consumer_tp_size: how many ranks that consumer has; 1 if an
    older peer did not say."""

    transfer_id: str
    consumer_tp_size: int = 1


def get_moriio_remote_tp_rank(local_tp_rank: int, local_tp_size: int, remote_tp_size: int) -> int:
    """The remote rank that a local rank pairs with.

    Raises ValueError unless sizes are positive, one a multiple of the other, and the rank is in range.
    """
    return topology.remote_tp_rank(local_tp_rank, local_tp_size, remote_tp_size)


def validate_moriio_heterogeneous_tp_kv_heads(
    local_tp_size: int, remote_tp_size: int, total_num_kv_heads: int, is_mla: bool
) -> None:
    """Passes for what MoRIIO can move: equal TP, MLA, or on both sides at most one KV head to a rank.

    Raises NotImplementedError for other pairs, which MoRIIOConnector moves all the same, and ValueError for numbers
    that are not positive.
    """
    if is_mla or local_tp_size == remote_tp_size:
        return
    for name, value in (
        ("local_tp_size", local_tp_size),
        ("remote_tp_size", remote_tp_size),
        ("total_num_kv_heads", total_num_kv_heads),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}: must be positive")
    if min(local_tp_size, remote_tp_size) < total_num_kv_heads:
        raise NotImplementedError(
            f"local_tp_size {local_tp_size}, remote_tp_size {remote_tp_size}, total_num_kv_heads {total_num_kv_heads}: "
            "between unequal TP sizes MoRIIO moves KV heads that are replicated on both sides. kvferry's connector has "
            "no such limit; `kvferry plan` shows what would move"
        )


def get_moriio_expected_ack_count(producer_tp_size: int, consumer_tp_size: int) -> int:
    """How many consumer ranks release each producer rank's part. Raises ValueError as `get_moriio_remote_tp_rank`, but
    a smaller consumer may have any size."""
    return topology.expected_ack_count(producer_tp_size, consumer_tp_size)


def resolve_moriio_transfer_ack(
    ack: MoRIIOTransferAck | str,
    producer_tp_size: int,
    live_transfer_ids: Collection[str],
    notification_counts: dict[str, int],
    completed_transfer_ids: set[str],
) -> str | None:
    """Counts one release. Returns the transfer's id when it is the last one expected, and that once, else None.

    notification_counts and completed_transfer_ids are brought up to date; releases of transfers that are not live, or
    complete already, change nothing. A bare id is a release of a consumer with one rank.
    """
    transfer_id, consumer_tp_size = MoRIIOTransferAck(ack) if isinstance(ack, str) else ack
    if transfer_id not in live_transfer_ids or transfer_id in completed_transfer_ids:
        return None
    expected = get_moriio_expected_ack_count(producer_tp_size, consumer_tp_size)
    count = notification_counts.get(transfer_id, 0) + 1
    if count < expected:
        notification_counts[transfer_id] = count
        return None
    notification_counts.pop(transfer_id, None)
    completed_transfer_ids.add(transfer_id)
    return transfer_id
