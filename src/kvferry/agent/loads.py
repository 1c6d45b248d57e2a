"""What the engine's step hands to a worker's agent, and what comes back."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from kvferry.protocol.messages import Landing, TransferRef


class LoadRequest(msgspec.Struct, frozen=True):
    """One request's KV to get, as the scheduler decided it; the same for every rank of the engine.

    load_id: unique per attempt; claim_id: this request's claim on the producer's transfer.
    address, key_id: of the producer's rendezvous.
    num_tokens: what the producer offers and the digest covers. [first_token, end_token): what is missing here.
    window_starts: per KV cache group, the first token that is still looked at when the load has ended.
    consumer_block_ids, producer_block_ids: per KV cache group, by token position; -1 where nothing is to be
      loaded (a null placeholder, or there already).
    refused: not empty when the load must fail at once, with this reason.
    write: the producer writes; then its block ids may be unknown here (no group at all).
    """

    request_id: str
    load_id: str
    claim_id: str
    ref: TransferRef
    address: str
    key_id: str
    num_tokens: int
    first_token: int
    end_token: int
    consumer_block_ids: tuple[tuple[int, ...], ...]
    producer_block_ids: tuple[tuple[int, ...], ...]
    digest: bytes
    blocks_digest: bytes
    window_starts: tuple[int, ...] = ()
    refused: str = ""
    write: bool = False


class LoadResult(msgspec.Struct, frozen=True):
    """How one rank's part of a load ended. Reported exactly once per load.

    quiet: no operation can still write the destination blocks. seconds: from the first post to the last byte.
    wait_s: from the engine's step to the first post, handshake included. Where the producer writes: seconds from
    the first order to the last writer's word, wait_s until the first order.
    """

    request_id: str
    load_id: str
    rank: int
    ok: bool
    quiet: bool
    reason: str
    transport: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    wait_s: float


class Leftovers(msgspec.Struct, frozen=True):
    """What an agent that has stopped could not end; for the next one of the same worker.

    quiet: loads that were reported before and have become quiet, which the engine may not have heard. unquiet: landings
    of which nobody knows whether something may still land.
    """

    quiet: tuple[str, ...] = ()
    unquiet: frozenset[Landing] = frozenset()


class Results:
    """Results on their way from the agent's thread to the one that takes them."""

    def __init__(self) -> None:
        self._results: deque[LoadResult] = deque()
        self._any = threading.Event()

    def put(self, result: LoadResult) -> None:
        self._results.append(result)
        self._any.set()

    def take(self, wait_s: float = 0.0) -> list[LoadResult]:
        """All since the last call; waits for the first of them, up to `wait_s` seconds."""
        if wait_s > 0:
            self._any.wait(wait_s)
        self._any.clear()  # first: what is put from here on sets it again
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        return taken
