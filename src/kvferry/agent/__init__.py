"""The one I/O thread of a process: joins protocol, plan, transport and control.

`EngineAgent` runs in the scheduler's process and serves the engine's rendezvous; `WorkerAgent` runs in each
worker and moves bytes. The engine's step only enqueues work for them and collects results.
"""

from kvferry.agent.engine import EngineAgent, HoldEnded, LoadQuiet, TransferLost
from kvferry.agent.loads import Leftovers, LoadRequest, LoadResult
from kvferry.agent.loop import boottime
from kvferry.agent.sources import ComputeStep
from kvferry.agent.worker import WorkerAgent

__all__ = [
    "ComputeStep",
    "EngineAgent",
    "HoldEnded",
    "Leftovers",
    "LoadQuiet",
    "LoadRequest",
    "LoadResult",
    "TransferLost",
    "WorkerAgent",
    "boottime",
]
