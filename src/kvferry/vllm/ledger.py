"""The engine's own references on KV blocks: holds on the producer, quarantine on the consumer.

Lives in the scheduler's process and is touched by its thread only. A hold keeps a finished request's blocks until
the protocol says that nobody reads them any more; quarantine keeps the destination of a failed load until no
operation can still write it. Both are counted and capped. Blocks are given back tail first, as vLLM does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.protocol.messages import TransferRef

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LedgerFull(RuntimeError):
    """A cap is reached; the text names it, its value and what was asked."""


@dataclass
class _Entry:
    blocks: list[KVCacheBlock]
    since: float
    waiting_ranks: set[int] = field(default_factory=set)


class Ledger:
    """Counts references per purpose. max_held and max_quarantined are fractions of the pool's blocks."""

    def __init__(self, pool: BlockPool, max_held: float, max_quarantined: float) -> None:
        self._pool = pool
        self._max_held_blocks = int(pool.num_gpu_blocks * max_held)
        self._max_quarantined_blocks = int(pool.num_gpu_blocks * max_quarantined)
        self._holds: dict[TransferRef, _Entry] = {}
        self._quarantine: dict[str, _Entry] = {}
        self._held_blocks: Counter[int] = Counter()
        self._quarantined_blocks: Counter[int] = Counter()

    # Producer.

    def hold(self, ref: TransferRef, groups: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Takes one reference on every block. Raises LedgerFull, with nothing taken, if the cap would be passed."""
        if ref in self._holds:
            raise ValueError(f"transfer {ref.transfer_id}, generation {ref.generation}, is held already")
        blocks = _own_blocks(groups)
        fresh = {id(block) for block in blocks} - self._held_blocks.keys()
        if len(self._held_blocks) + len(fresh) > self._max_held_blocks:
            raise LedgerFull(
                f"{len(self._held_blocks)} blocks wait for readers, {len(fresh)} more would pass max_held "
                f"({self._max_held_blocks} of {self._pool.num_gpu_blocks} blocks)"
            )
        self._take(blocks, self._held_blocks)
        self._holds[ref] = _Entry(blocks, time.monotonic())

    def release(self, ref: TransferRef) -> int:
        """Gives a hold back. Returns the number of references; 0 if it is not held (any more)."""
        return self._give_back(self._holds.pop(ref, None), self._held_blocks)

    # Consumer.

    def quarantine(self, load_id: str, groups: Iterable[Sequence[KVCacheBlock]], ranks: Iterable[int]) -> None:
        """Keeps the destination of a failed load from being used again until each of these ranks is quiet.

        Never refused: these blocks may still be written. The cap is for new loads, see `quarantine_is_full`.
        """
        waiting = set(ranks)
        if not waiting or load_id in self._quarantine:
            return
        blocks = _own_blocks(groups)
        self._take(blocks, self._quarantined_blocks)
        self._quarantine[load_id] = _Entry(blocks, time.monotonic(), waiting)

    def quiet(self, load_id: str, rank: int) -> int:
        """A rank's part of a failed load can no longer write. Returns the number of references given back."""
        entry = self._quarantine.get(load_id)
        if entry is None:
            return 0
        entry.waiting_ranks.discard(rank)
        if entry.waiting_ranks:
            return 0
        return self._give_back(self._quarantine.pop(load_id), self._quarantined_blocks)

    def quarantine_is_full(self) -> str:
        """Why no new load may start; empty if one may."""
        if len(self._quarantined_blocks) < self._max_quarantined_blocks:
            return ""
        return (
            f"{len(self._quarantined_blocks)} blocks are in quarantine after failed loads, max_quarantined is "
            f"{self._max_quarantined_blocks} of {self._pool.num_gpu_blocks} blocks"
        )

    # For metrics and checks.

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    @property
    def num_held_blocks(self) -> int:
        """Distinct blocks that wait for readers."""
        return len(self._held_blocks)

    @property
    def num_quarantined_blocks(self) -> int:
        return len(self._quarantined_blocks)

    def oldest_s(self) -> float:
        """Age of the oldest hold or quarantine; 0 if there is none."""
        since = [entry.since for entry in (*self._holds.values(), *self._quarantine.values())]
        return time.monotonic() - min(since) if since else 0.0

    def _take(self, blocks: list[KVCacheBlock], counts: Counter[int]) -> None:
        self._pool.touch(blocks)
        counts.update(id(block) for block in blocks)

    def _give_back(self, entry: _Entry | None, counts: Counter[int]) -> int:
        if entry is None:
            return 0
        for block in entry.blocks:
            counts[id(block)] -= 1
            if not counts[id(block)]:
                del counts[id(block)]
        self._pool.free_blocks(reversed(entry.blocks))
        return len(entry.blocks)


def _own_blocks(groups: Iterable[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """All blocks but null placeholders, which belong to nobody. Block ids repeat over pools, objects do not."""
    return [block for group in groups for block in group if not block.is_null]
