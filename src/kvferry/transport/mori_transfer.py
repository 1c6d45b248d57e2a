"""One transfer of MoRI-IO: calls made while the send queue has room, their ends, and what may still land after them."""

from __future__ import annotations

import re
from collections import deque
from typing import Any, NamedTuple

from kvferry.transport.base import PeerLost
from kvferry.transport.mori_data import Piece, Record
from kvferry.transport.mori_engine import Engine, Link, text_of
from kvferry.transport.remote import RemoteWorker

_SQ_FULL = re.compile(r"SQ full .*? max=(\d+)")
_STARTED_NOTHING = ("ERR_INVALID_ARGS", "ERR_NOT_FOUND")
"""Codes with which a call is refused before it posts. ERR_BAD_STATE is none: also a part that is dropped by MoRI's
worker threads gets it, while the other parts go on."""
_COMPLETIONS = ("Work Request Flushed", "local ", "remote ", "transport retry", "RNR retry", "bad response")
"""How verbs' words for a failed completion begin; what a call says that fails as it posts begins otherwise."""


class MoriPeer(RemoteWorker):
    """A connected worker, and the link over which one of our engines reaches it."""

    def __init__(self, record: Record, engine: Engine, link: Link) -> None:
        super().__init__(f"mori:{record.engine}", record.regions, record.process)
        self.engine = engine
        self.link = link

    def check_alive(self) -> None:
        """Raises PeerLost for a peer that is known to be gone, or can't be reached over this link any more."""
        super().check_alive()
        if self.link.dead:
            raise PeerLost(f"{self.name}: the queue pair to it has died ({self.link.dead}); connect again")


class _Posted(NamedTuple):
    """A call that has not ended. MoRI writes into status until then. share: work requests in the fullest queue."""

    status: Any
    share: int


class MoriHandle:
    """One posted transfer.

    waiting: what the queue has had no room for yet. posted: calls that have not ended. failure: why it failed, or
    empty. maybe_moving: some of it may be under way that MoRI no longer tells about. uses_link: whether it is one of
    the link's users.
    """

    def __init__(self, peer: MoriPeer, waiting: deque[Piece], *, write: bool) -> None:
        self.peer = peer
        self.write = write
        self.waiting = waiting
        self.posted: list[_Posted] = []
        self.failure = ""
        self.maybe_moving = False
        self.uses_link = False
        self._settings = peer.engine.settings

    @property
    def ended(self) -> bool:
        """Whether no call is under way or to be made."""
        return not (self.posted or self.waiting)

    def fail(self, text: str) -> None:
        """The first reason stays; nothing more of it is posted."""
        self.failure = self.failure or f"{self.peer.name}: {text}"
        self.waiting.clear()

    def fill(self) -> None:
        """Makes calls while there is room."""
        while self.waiting and self.send():
            pass

    def send(self) -> bool:
        """Makes the next call. False when there is no room for it, and nothing of it was started."""
        link, piece = self.peer.link, self._next_piece()
        share = self._settings.queue_share(len(piece.lengths))
        if link.queued + share > self._settings.max_send_wr:
            return False
        try:
            session = link.session(*piece.regions)
            call = session.batch_write if self.write else session.batch_read
            status = call(piece.local_offsets, piece.remote_offsets, piece.lengths, session.allocate_transfer_uid())
        except Exception as error:
            # What of it was started is not known then.
            self._call_failed("the library raised", text_of(error))
            return True
        code = status.Code().name
        if code not in ("SUCCESS", "IN_PROGRESS") and not self._refused(len(piece.lengths), code, status.Message()):
            return False
        if self.waiting:
            self.waiting.popleft()
        if code == "IN_PROGRESS":
            link.queued += share
            self.posted.append(_Posted(status, share))
        return True

    def _next_piece(self) -> Piece:
        """The first that waits, cut if the card has turned out to take less since it was made."""
        most = self._settings.piece_descriptors()
        if len(self.waiting[0].lengths) > most:
            self.waiting.extendleft(reversed(self.waiting.popleft().cut(most)))
        return self.waiting[0]

    def drive(self) -> None:
        """Looks at the calls under way, then makes the next."""
        for posted in list(self.posted):
            code = posted.status.Code().name
            if code == "IN_PROGRESS":
                continue
            self.posted.remove(posted)
            self.peer.link.queued -= posted.share
            if code != "SUCCESS":
                self._call_failed(code, posted.status.Message())
        if not self.ended:
            self._look_at_peer()
            self.fill()

    def abandon(self, text: str) -> list[Any]:
        """Gives up what is under way, when its engine is about to end. Keep the statuses until it has."""
        self.fail(text)
        statuses = [posted.status for posted in self.posted]
        self.maybe_moving |= bool(statuses)
        self.posted = []
        return statuses

    def quiet(self) -> bool:
        """Whether nothing of it can move any more."""
        if not self.ended or not self.maybe_moving:
            return self.ended
        if self.write:
            return self.peer.process_gone()
        return self._settings.backend == "rdma" and self.peer.engine.closed

    def _look_at_peer(self) -> None:
        if self.peer.process_gone():
            self.fail(f"its process {self.peer.process.pid} is gone")
        elif self.peer.link.dead and self.waiting:
            self.fail(self.peer.link.dead)

    def _refused(self, descriptors: int, code: str, message: str) -> bool:
        """Of a call that failed at once. False when that is for want of room alone, and nothing was started."""
        full = _SQ_FULL.match(message)
        takes = int(full[1]) if full else 0
        if full and self.peer.link.queued and descriptors <= takes and self._settings.in_one_post(descriptors):
            return False
        if full:
            self._settings.limit(takes)
        self._call_failed(code, message)
        return True

    def _call_failed(self, code: str, message: str) -> None:
        text = f"{code}: {message}"
        self.fail(text)
        if code in _STARTED_NOTHING and not self._settings.in_parts:
            return
        rdma = self._settings.backend == "rdma"
        if rdma:
            self.peer.link.dead = self.peer.link.dead or text
            self.peer.engine.failed.add(self.peer.link.key)
        # A call that fails as it posts may have queued a part that goes on; one queue pair that has failed does not.
        stopped = rdma and self._settings.qp_per_transfer == 1 and message.startswith(_COMPLETIONS)
        self.maybe_moving |= self.write or not stopped
