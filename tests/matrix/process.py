"""One side of the matrix: a process that is one engine after another, as its pipe says.

One JSON object a line on stdin, one on stdout: {"do": name, ...} -> {"ok": value} or {"error": text}.
It ends when its stdin does, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from kvmatrix import coordinates
from kvmatrix.combination import CONSUMER_SPARE, PRODUCER_SPARE, tables
from kvmatrix.combinations import BY_NAME
from kvmatrix.coordinates import Wrong
from kvmatrix.engines import Engine, Offer
from kvmatrix.plants import BLOCKS_PLANT, CONSUMER_PLANTS, PRODUCER_PLANTS, Situation

_PR_SET_PDEATHSIG = 1


class Process:
    """Its public methods are what the pipe can ask for."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._offer: Offer | None = None

    def offer(self, combination: str, plant: str = "", transport: str = "") -> Any:
        """Starts a producer, fills its caches and holds the request's blocks. transport: in place of its own."""
        wanted = BY_NAME[combination].over(transport)
        block_ids, num_blocks = tables(wanted.producer, wanted.producer_entries(), PRODUCER_SPARE)
        self._engine = Engine(wanted.producer, num_blocks, "producer")
        for cache, memory in zip(self._engine.caches, self._engine.memory, strict=True):
            coordinates.fill(cache, memory, block_ids)
        if plant in PRODUCER_PLANTS:
            PRODUCER_PLANTS[plant](Situation(self._engine, wanted, block_ids))
        self._engine.start()
        self._offer = self._engine.offer(wanted, block_ids)
        return msgspec.to_builtins(self._offer)

    def end(self) -> str:
        """Waits for the hold to end, then stops the producer."""
        if self._engine is None or self._offer is None:
            raise ValueError("there is no offer")
        outcome = self._engine.hold_end(self._offer)
        self.stop()
        return outcome

    def load(
        self, combination: str, offer: Any, plant: str = "", transport: str = "", write: bool = False
    ) -> dict[str, Any]:
        """Starts a consumer, loads what is offered, looks at every byte, and stops it. write: the producer does."""
        wanted = BY_NAME[combination].over(transport)
        block_ids, num_blocks = tables(wanted.consumer, wanted.consumer_entries(), CONSUMER_SPARE)
        self._engine = Engine(wanted.consumer, num_blocks, "consumer")
        try:
            for cache, memory in zip(self._engine.caches, self._engine.memory, strict=True):
                coordinates.spoil(cache, memory, block_ids)
            return self._load(Situation(self._engine, wanted, block_ids), msgspec.convert(offer, Offer), plant, write)
        finally:
            self.stop()

    def _load(self, situation: Situation, offer: Offer, plant: str, write: bool) -> dict[str, Any]:
        engine = situation.engine
        before = [[region.copy() for region in memory] for memory in engine.memory]
        engine.start()
        asked = [list(group) for group in situation.block_ids]
        if plant == BLOCKS_PLANT:
            asked = [group[::-1] for group in asked]
        results = engine.load(situation.combination, offer, asked, write)
        if plant in CONSUMER_PLANTS:
            CONSUMER_PLANTS[plant](situation)
        bad = next((result.reason for result in results if not result.ok), "")
        return {
            "reason": bad,
            "all_refused": not any(result.ok for result in results),
            "transport": "+".join(sorted({result.transport for result in results if result.transport})),
            "bytes": sum(result.num_bytes for result in results),
            "descriptors": sum(result.num_descriptors for result in results),
            **_verdict(situation, before, refused=bool(bad)),
        }

    def left(self) -> dict[str, int]:
        """What this process has now."""
        return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}

    def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()


def _verdict(situation: Situation, before: list[list[coordinates.Bytes]], refused: bool) -> dict[str, Any]:
    """What is wrong with the bytes, "" if nothing, and how many were required. Refused, none may have come."""
    engine, combination = situation.engine, situation.combination
    tokens = (combination.first, combination.first if refused else combination.end)
    block_ids = [[-1] * len(group) for group in situation.block_ids] if refused else situation.block_ids
    required = 0
    for rank, (cache, old, new) in enumerate(zip(engine.caches, before, engine.memory, strict=True)):
        try:
            required += coordinates.check(cache, old, new, block_ids, tokens, combination.window_starts())
        except Wrong as error:
            return {"wrong": f"rank {rank}: {error}", "required": required}
    return {"wrong": "", "required": required}


def answer(process: Process, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": getattr(process, command.pop("do"))(**command)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print: keep the pipe for answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    process = Process()
    for line in sys.stdin:
        answers.write(json.dumps(answer(process, json.loads(line))) + "\n")
    process.stop()


if __name__ == "__main__":
    main()
