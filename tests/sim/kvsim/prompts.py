"""What both sides agree on: prompts, their digests, the pieces of their KV, and what a client carries between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvferry.protocol.digest import prompt_digest
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import TransferRef
from kvsim.world import Weather

TOPOLOGY = b"topology of all!"
TOKENS_PER_BLOCK = 4
LAYERS = 2

Place: TypeAlias = tuple[int, int]
"""Block id, layer: a place in an engine's memory."""
Piece: TypeAlias = tuple[int, int]
"""Index of the block in the prompt, layer: a piece of the prompt's KV."""


def digest_of(prompt: str, num_blocks: int) -> bytes:
    tokens = [ord(letter) for letter in prompt.ljust(num_blocks * TOKENS_PER_BLOCK)]
    return prompt_digest(tokens, model="m", lora="", cache_salt="", mm_hashes=(), weights_epoch="")


def content_of(prompt: str, piece: Piece) -> str:
    return f"{prompt}/{piece[0]}/{piece[1]}"


@dataclass(frozen=True)
class Habits:
    """How transports and handshakes behave. Probabilities per load or write; slow_read_s, slow_write_s: from, to.

    unable: the producer can't write to the consumer.
    """

    slow_read: float = 0.0
    slow_read_s: tuple[float, float] = (0.0, 0.0)
    read_fails: float = 0.0
    slow_write: float = 0.0
    slow_write_s: tuple[float, float] = (0.0, 0.0)
    write_fails: float = 0.0
    unable: float = 0.0
    wrong_topology: float = 0.0
    silent_handshake: float = 0.0


class Setting(NamedTuple):
    """pool_blocks: of each producer."""

    leases: Leases
    weather: Weather
    habits: Habits
    pool_blocks: int = 16


@dataclass(frozen=True)
class Params:
    """What a client carries from the first leg to the second. blocks: None where both are sent at once."""

    ref: TransferRef
    address: str
    prompt: str
    num_blocks: int
    blocks: tuple[int, ...] | None


class RealClaim(NamedTuple):
    ref: TransferRef
    num_ranks: int


@dataclass
class ClaimTruth:
    """What the producer has promised to a claim, and what it was told.

    granted_until: on its own clock; proof_until: of those that a rank may trust. is_disowned: its reader was refused
    for what it wants. released: ranks whose release came; in_time: those that came while the hold was known.
    What came earlier is parked, and may be answered behind a renewal that is parked as well, or turned away.
    """

    num_ranks: int
    granted_until: float = float("-inf")
    proof_until: float = float("-inf")
    is_disowned: bool = False
    released: set[int] = field(default_factory=set)
    in_time: set[int] = field(default_factory=set)

    @property
    def is_final(self) -> bool:
        return len(self.in_time) == self.num_ranks

    @property
    def is_promised(self) -> bool:
        """Granted once, and not released since."""
        return self.granted_until > float("-inf") and len(self.released) < self.num_ranks


@dataclass
class HoldTruth:
    """blocks: as they are computed. told_at: when the machine heard that all are held, on the producer's clock.

    is_dropped: its request ended before. was_written: a rank of the producer was allowed to write it.
    may_be_relieved: others needed its blocks when no rank of its consumer had come for it.
    """

    claims: dict[str, ClaimTruth]
    blocks: list[int]
    told_at: float | None = None
    is_dropped: bool = False
    was_written: bool = False
    may_be_relieved: bool = False

    @property
    def nobody_came(self) -> bool:
        return not self.was_written and all(claim.proof_until == float("-inf") for claim in self.claims.values())
