"""The workers that a NIXL agent knows: made known once, kept while they may live, known anew after a broken link.

To make a worker known and to forget it again leaves sockets behind, on both sides, until the agents end (seen with
nixl 1.5.1). So one that nobody uses any more is kept, unless it is gone, lost, or one of too many.
"""

from __future__ import annotations

from typing import Any

from kvferry.transport.base import PeerLost, TransportError
from kvferry.transport.hostmem import Process
from kvferry.transport.nixl_data import Record

MAX_IDLE = 256
"""Known workers that nobody uses; beyond it the one that was used longest ago is forgotten."""


class Remote:
    """One known worker. peers: connected ones that stand for it; pending: transfers that NIXL is at work on.

    lost: NIXL has reported it disconnected, and fails all that names it until it is known anew.
    """

    def __init__(self, agent: str, process: Process) -> None:
        self.agent = agent
        self.process = process
        self.peers = 0
        self.pending = 0
        self.lost = False


class Remotes:
    """own: NIXL's agent of this side."""

    def __init__(self) -> None:
        self._known: dict[str, Remote] = {}  # by agent; the idle ones in the order in which they were last used

    def open(self, own: Any, record: Record) -> Remote:
        """Known, if it was not before. Raises PeerLost while transfers name a lost one; TransportError."""
        remote = self._known.get(record.agent)
        if remote is not None and remote.lost:
            if remote.pending:  # NIXL would free them
                left = f"with {remote.pending} transfers to end"
                raise PeerLost(f"nixl:{record.agent}: NIXL has reported it disconnected, {left}")
            self._forget(own, remote)
            remote = None
        if remote is None:
            self._make_room(own)
            try:
                own.add_remote_agent(record.metadata)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise TransportError(f"nixl:{record.agent}: NIXL refuses its record: {text}") from error
            remote = self._known[record.agent] = Remote(record.agent, record.process)
        return remote

    def leave(self, own: Any, remote: Remote) -> None:
        """After one peer or transfer less."""
        if remote.peers or remote.pending or self._known.get(remote.agent) is not remote:
            return
        if remote.lost or remote.process.gone():
            self._forget(own, remote)
        else:
            self._known[remote.agent] = self._known.pop(remote.agent)

    def clear(self, own: Any) -> None:
        for remote in list(self._known.values()):
            self._forget(own, remote)

    def _make_room(self, own: Any) -> None:
        idle = [remote for remote in self._known.values() if not (remote.peers or remote.pending)]
        gone = [remote for remote in idle if remote.process.gone()]
        kept = [remote for remote in idle if remote not in gone]
        for remote in [*gone, *kept[: max(0, len(kept) - MAX_IDLE + 1)]]:
            self._forget(own, remote)

    def _forget(self, own: Any, remote: Remote) -> None:
        del self._known[remote.agent]
        quietly(own.remove_remote_agent, remote.agent)


def quietly(call: Any, *args: Any) -> None:
    """For giving back: NIXL's complaint about what is gone already helps nobody."""
    try:
        call(*args)
    except Exception:
        return
