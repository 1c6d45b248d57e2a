"""Bugs of writing, planted into the machines and into what stands in for a producer's rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from kvferry.protocol import producer, writer
from kvferry.protocol.events import Promised
from kvferry.protocol.hold import Hold, HoldTrigger
from kvferry.protocol.landings import Landings
from kvferry.protocol.load import LoadState
from kvferry.protocol.loader import Loader
from kvferry.protocol.messages import CancelWrite, Failed, OpenWrite, WriteDone, WriteOpened
from kvferry.protocol.producer import ProducerEngine, Send
from kvferry.protocol.writer import Writer
from kvsim.planted import Planted, all_of
from kvsim.writes import Write


def done_before_the_last_layer() -> AbstractContextManager[Any]:
    """A write is called done while its last piece is not posted."""

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._wanted.discard(max(self._wanted))

    real = Write.__init__
    return patch.object(Write, "__init__", init)


def attempts_overlap() -> AbstractContextManager[Any]:
    """A preempted request's prompt is written anew while writes of its old blocks are under way."""

    def post(self: Any) -> None:
        if not self._is_stopped and not self._is_of_latest_attempt():
            self._num_flying = 0
        real(self)

    real = Write.post
    return patch.object(Write, "post", post)


def failure_is_done() -> AbstractContextManager[Any]:
    """A write that fails is told as one that is done."""

    def on_failed(self: Any, job: Any, reason: str, unable: bool) -> list[Any]:
        job.done = WriteDone(landing=job.landing, num_bytes=0, num_descriptors=0, transport="")
        return [*real(self, job, reason, unable), Send(job.route, job.done)]

    real = Writer._on_writes_failed
    return patch.object(Writer, "_on_writes_failed", on_failed)


def quiet_at_once() -> AbstractContextManager[Any]:
    """A landing is called quiet as soon as it has failed, before its writes are and before it is closed."""
    failed = property(lambda self: Failed(landing=self.landing, reason=self.failure, quiet=True, unable=self.unable))
    return patch.object(writer._Job, "failed", failed)


def written_without_leave() -> AbstractContextManager[Any]:
    """A rank begins to write as soon as it reaches the consumer, whatever its own engine says."""

    def begin(self: Any, job: Any) -> list[Any]:
        if job.order is not None:
            job.opened = job.opened or WriteOpened(job.landing, 0, job.order.ref.transfer_id, ())
        return real(self, job)

    real = Writer._begin_if_ready
    return patch.object(Writer, "_begin_if_ready", begin)


def cancels_are_forgotten() -> AbstractContextManager[Any]:
    """A cancel that overtakes its order is answered, and the order is obeyed when it comes."""

    def on_cancel(self: Any, route: Any, cancel: CancelWrite, now: float) -> list[Any]:
        if self._find(cancel.landing, route) is None:
            return [Send(route, Failed(cancel.landing, "cancelled", quiet=True))]
        return real(self, route, cancel, now)

    real = Writer._on_cancel
    return patch.object(Writer, "_on_cancel", on_cancel)


def closed_is_opened_again() -> AbstractContextManager[Any]:
    """The producer's engine forgets at once what was closed."""

    def on_close(self: Any, route: Any, close: Any, now: float) -> list[Any]:
        actions = real(self, route, close, now)
        self._closed._landings.clear()
        for hold in self._all_holds():
            hold.landings._closed._landings.clear()
        return actions

    real = ProducerEngine._on_close_write
    return patch.object(ProducerEngine, "_on_close_write", on_close)


def orders_are_taken_again() -> AbstractContextManager[Any]:
    """An order that comes again, when all is over, is obeyed again."""

    def find(self: Any, landing: Any, route: Any) -> Any:
        return self._jobs.get(landing)

    return all_of(patch.object(Writer, "_find", find), closed_is_opened_again())


def freed_under_a_writer() -> AbstractContextManager[Any]:
    """A hold ends when its claims are over, whoever still writes from it."""

    def settle(self: Any, hold: Any, now: float) -> list[Any]:
        trigger = hold.verdict(now)
        return self._end(hold, trigger, trigger.value) if trigger is not None else real(self, hold, now)

    real = ProducerEngine._settle
    return patch.object(ProducerEngine, "_settle", settle)


def dropped_at_once() -> AbstractContextManager[Any]:
    """The blocks of an aborted request are given back while its computed part is being written."""

    def on_dropped(self: Any, ref: Any, reason: str, now: float) -> list[Any]:
        return self._end(self._holds[ref.transfer_id][ref.generation], HoldTrigger.FAIL, reason)  # type: ignore[no-any-return]

    return patch.object(ProducerEngine, "_on_dropped", on_dropped)


def promises_end() -> AbstractContextManager[Any]:
    """A promise whose claims are over ends, while its prompt is being computed."""

    def verdict(self: Hold, now: float) -> HoldTrigger | None:
        if not isinstance(self.offer, Promised) or self.failed or not self.claims:
            return real(self, now)
        return None if any(record.is_open for record in self.claims.values()) else HoldTrigger.ALL_OVER

    real = Hold.verdict
    return patch.object(Hold, "verdict", verdict)


def told_to_stop_once() -> AbstractContextManager[Any]:
    """A rank that has not heard that it must stop is not told again."""

    def due(self: Any, now: float) -> list[Send]:
        sends = real(self, now)
        for sent in sends:
            self._open[sent.message.landing].stop_at = float("inf")
        return sends

    def stop(self: Any, reason: str, at: float, *whom: Any) -> None:
        fresh = {landing: each for landing, each in self._open.items() if not each.reason}
        before, self._open = self._open, fresh
        real_stop(self, reason, at, *whom)
        self._open = before

    real, real_stop = Landings.due, Landings.stop
    return all_of(patch.object(Landings, "due", due), patch.object(Landings, "stop", stop))


def orders_unchecked() -> AbstractContextManager[Any]:
    """What is written is not compared with what the consumer asks for."""

    def mismatch(offer: Any, claim: Any) -> Any:
        return None if isinstance(claim, OpenWrite) else real(offer, claim)

    real = producer.mismatch
    return patch.object(producer, "mismatch", mismatch)


def first_writer_is_all() -> AbstractContextManager[Any]:
    """A load is accepted when the first of its writers is done."""

    def on_done(self: Any, done: WriteDone, now: float) -> list[Any]:
        found = self._landed_by(done.landing)
        if found is not None:
            found[1].waiting.clear()
        return real(self, done, now)

    real = Loader._on_write_done
    return patch.object(Loader, "_on_write_done", on_done)


def first_writer_is_quiet() -> AbstractContextManager[Any]:
    """A failed load is quiet when the first of its writers is."""

    def settle(self: Any, job: Any, now: float) -> list[Any]:
        if job.writers is not None and len(job.writers.unquiet) < len(job.writers.addresses):
            job.writers.unquiet.clear()
        return real(self, job, now)

    real = Loader._settle_writers
    return patch.object(Loader, "_settle_writers", settle)


def a_timer_makes_quiet() -> AbstractContextManager[Any]:
    """A writer that does not answer its second cancel is taken for quiet."""

    def cancel(self: Any, job: Any, writers: Any, now: float) -> list[Any]:
        if writers.cancels < 2:
            return real(self, job, writers, now)
        writers.unquiet.clear()
        return self._settle_writers(job, now)

    real = Loader._cancel_writers
    return patch.object(Loader, "_cancel_writers", cancel)


def cancelled_once() -> AbstractContextManager[Any]:
    """A cancel that is lost, or its answer, is not sent again."""

    def cancel(self: Any, job: Any, writers: Any, now: float) -> list[Any]:
        if not writers.cancels:
            return real(self, job, writers, now)
        self._set_ask_again(job, float("inf"))
        return []

    real = Loader._cancel_writers
    return patch.object(Loader, "_cancel_writers", cancel)


def lost_is_gone() -> AbstractContextManager[Any]:
    """A writer to which the connection is lost is taken for dead."""
    return patch.object(
        Loader, "_on_writer_lost", lambda self, address, reason, now: self._on_writer_gone(address, now)
    )


def read_while_it_is_written() -> AbstractContextManager[Any]:
    """When one of its writers can't write, a rank begins to read, whatever the others do."""

    def settle(self: Any, job: Any, now: float) -> list[Any]:
        if job.state is LoadState.SETTLING:
            job.writers.unquiet.clear()
        return real(self, job, now)

    real = Loader._settle_writers
    return patch.object(Loader, "_settle_writers", settle)


def relieved_though_asked_for() -> AbstractContextManager[Any]:
    """A hold whose blocks others need is let go of though a rank has come for it."""
    return patch.object(Hold, "may_be_relieved", lambda self: self.is_awaited and not self.is_live and not self.failed)


WRITES: tuple[Planted, ...] = (
    done_before_the_last_layer,
    attempts_overlap,
    failure_is_done,
    quiet_at_once,
    written_without_leave,
    cancels_are_forgotten,
    closed_is_opened_again,
    orders_are_taken_again,
    freed_under_a_writer,
    dropped_at_once,
    promises_end,
    told_to_stop_once,
    orders_unchecked,
    first_writer_is_all,
    first_writer_is_quiet,
    a_timer_makes_quiet,
    cancelled_once,
    lost_is_gone,
    read_while_it_is_written,
)
CROWDED: tuple[Planted, ...] = (relieved_though_asked_for,)
"""Bugs that show only where prompts wait for each other's blocks."""
