"""What both halves of a scheduler's side share: identity, settings, the rendezvous, the ledger, the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.agent import EngineAgent
from kvferry.vllm.config import Config
from kvferry.vllm.groups import Group
from kvferry.vllm.ledger import Ledger
from kvferry.vllm.metrics import FerryStats

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class NotBound(RuntimeError):
    """vLLM has not handed over its block pool yet."""


@dataclass
class Core:
    """One engine core.

    model: names the model in digests. group_ids: of the KV cache groups that are transferred; groups: how each is kept.
    backoff_tokens: how many of a prompt's last tokens a producer leaves to the consumer.
    """

    config: Config
    model: str
    parallel: ParallelConfig
    group_ids: tuple[int, ...]
    groups: tuple[Group, ...]
    backoff_tokens: int
    agent: EngineAgent
    stats: FerryStats = field(default_factory=FerryStats)
    _manager: KVCacheManager | None = None
    _ledger: Ledger | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._ledger = Ledger(manager.block_pool, self.config.max_held, self.config.max_quarantined)

    @property
    def keeps_state(self) -> bool:
        """Whether some group keeps a state, which cannot be cut at a token."""
        return any(group.keeps_state for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """Workers of this engine; each reads its part of a transfer, and releases it."""
        return self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size

    @property
    def manager(self) -> KVCacheManager:
        if self._manager is None:
            raise NotBound("the KV cache manager is not bound yet")
        return self._manager

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise NotBound("the block pool is not bound yet")
        return self._ledger
