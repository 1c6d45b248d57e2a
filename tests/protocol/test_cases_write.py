"""Cases from public reports, where the producer writes, each with its right value."""

import itertools
from collections import Counter

import pytest
from builders import by_router, held, landing, of_kind, promised, ref
from trio import Trio

from kvferry.protocol.events import Cancel, Dropped, WriterGone, WritesFailed, WritesQuiet
from kvferry.protocol.messages import (
    CancelWrite,
    CloseWrite,
    Failed,
    OpenWrite,
    Release,
    Released,
    RemoteBlocks,
    Renew,
    Renewed,
    StopWrite,
    WriteClosed,
    WriteDone,
    WriteOpened,
)


def outcomes(trio):
    return [freed.outcome for freed in trio.freed]


def by(rank, producer_rank):
    return landing("c", f"l{rank}", rank, producer_rank)


# C5: every order


LATE = {"remote_blocks": RemoteBlocks, "write_done": WriteDone, "release": Release}
EVENTS = ("ends", "installed", *LATE, "abort")


class Race:
    """One request through one order of events, whose prompt is computed or (is_dropped) is not."""

    def __init__(self, of, is_dropped):
        self.trio = Trio()
        self.trio.keeps = lambda message: not isinstance(message, tuple(LATE.values()))
        self.of, self.is_dropped = of, is_dropped
        self.ended = self.started = self.computed = self.aborted = False
        self.trio.feed(self.trio.producer, promised(routers_id="R"))
        self.trio.arrive(of)

    def step(self, event, again=False):
        """Whether it was possible. again: the message comes once more later."""
        if event in LATE and not self.trio.deliver(LATE[event], again):
            return False
        if event == "installed" and self.ended:
            return False
        {"ends": self._ends, "installed": self._install, "abort": self._abort}.get(event, lambda: None)()
        self._go_on()
        return True

    def _ends(self):
        self.computed = not self.is_dropped
        self.trio.feed(self.trio.producer, held() if self.computed else Dropped(ref(), "too long"))

    def _install(self):
        self.started = True
        self.trio.start(self.of, may_read=False)

    def _abort(self):
        self.aborted = True
        if self.started and not self.ended:
            self.trio.feed(self.trio.loaders[0], Cancel("l0", "aborted"))

    def _go_on(self):
        """What is computed is written; the engine hears of its rank's report, or of the abort of what no rank saw."""
        if self.computed:
            self.trio.finish()
        if not self.ended and (self.trio.reports or (self.aborted and not self.started)):
            self.ended = True
            is_ok = bool(self.trio.reports) and self.trio.reports[0].ok
            self.trio.over("done" if is_ok else "unused", "" if is_ok else "aborted")

    def settle(self):
        """What is on its way arrives, and time passes."""
        self.trio.keeps = lambda message: True
        for kind in LATE.values():
            self.trio.deliver(kind)
        self._go_on()
        self.trio.until(1000.0)
        self._go_on()
        self.trio.until(2000.0)


def _orders():
    """Every order of all events, of all but the abort, and of all but what an abort prevents; each without a duplicate,
    or with one of the messages once more, at any later place. Not all are possible."""
    for missing in (
        (),
        ("abort",),
        ("write_done",),
        ("write_done", "abort"),
        ("installed", "remote_blocks", "write_done"),
    ):
        for order in itertools.permutations(event for event in EVENTS if event not in missing):
            yield order, None
            for first, event in enumerate(order):
                for second in range(first + 1, len(order) + 1) if event in LATE else ():
                    yield (*order[:second], event, *order[second:]), first


@pytest.mark.parametrize(
    ("is_dropped", "expected"), [(False, (81, 132)), (True, (0, 114))], ids=["computed", "dropped"]
)
@pytest.mark.parametrize("of", [ref(), by_router()], ids=["the producer's name", "the router's name"])
def test_c5_every_order_with_one_duplicate_ends_and_frees_once(of, is_dropped, expected):
    ends = Counter()
    for order, repeated in _orders():
        race = Race(of, is_dropped)
        if not all(race.step(event, again=index == repeated) for index, event in enumerate(order)):
            continue
        race.settle()
        trio = race.trio
        assert race.ended, order
        assert len(trio.reports) == race.started, order
        assert trio.quieted == [each.load_id for each in trio.reports if not each.quiet], order
        assert outcomes(trio) == ["failed" if is_dropped else "released"], order
        assert trio.left == {}, order
        ends[bool(trio.reports) and trio.reports[0].ok] += 1
    assert (ends[True], ends[False]) == expected  # accepted, and not


# The others


def test_c3_a_duplicate_never_stands_for_another_rank():
    """Two consumer ranks, two producer ranks: each of four landings closes once and counts for itself."""
    trio = Trio(num_ranks=2, num_writers=2)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    assert set(trio.writing) == {by(rank, source) for rank in range(2) for source in range(2)}
    trio.keeps = lambda message: not isinstance(message, Release)
    trio.finish()
    assert [(report.load_id, report.ok) for report in trio.reports] == [("l0", True), ("l1", True)]
    first, second = trio.late
    for late, freed in ((first, 0), (first, 0), (second, 1), (second, 1)):
        trio.feed(*late)
        assert len(trio.freed) == freed


def test_c9_ready_only_when_the_last_of_four_writers_is_done():
    trio = Trio(num_writers=4)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.finish(by(0, 3))
    trio.until(2.0)
    for source in range(3):
        assert trio.reports == []
        trio.finish(by(0, source))
    assert [report.ok for report in trio.reports] == [True]


def test_c9_a_writer_done_twice_is_one_writer():
    trio = Trio(num_writers=2)
    trio.keeps = lambda message: not isinstance(message, WriteDone)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.finish(by(0, 1))
    for _ in range(3):
        trio.deliver(WriteDone, again=True)
    assert trio.reports == []


EVERY_KIND = [
    RemoteBlocks,
    OpenWrite,
    WriteOpened,
    WriteDone,
    CloseWrite,
    WriteClosed,
    Release,
    Released,
    Renew,
    Renewed,
]


@pytest.mark.parametrize("lost", EVERY_KIND, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("which", [1, 2])
def test_f5_one_lost_message_of_each_kind_is_made_up_for(lost, which):
    trio, seen = Trio(num_ranks=2), []

    def keeps(message):
        seen.extend([message] if isinstance(message, lost) else [])
        return not isinstance(message, lost) or len(seen) != which

    trio.keeps = keeps
    trio.feed(trio.producer, promised())
    trio.arrive()
    trio.start()
    trio.until(5.0)
    trio.feed(trio.producer, held())
    trio.finish()
    trio.until(10.0)
    trio.finish()  # what was begun late
    trio.until(20.0)
    assert [report.ok for report in trio.reports] == [True, True]
    trio.over()
    trio.until(40.0)
    assert outcomes(trio) == ["released"]
    assert trio.left == {}
    assert len(seen) >= which


@pytest.mark.parametrize(
    "lost", [CancelWrite, Failed, StopWrite, CloseWrite, WriteClosed], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("which", [1, 2])
def test_f5_one_lost_message_of_an_abort_is_made_up_for(lost, which):
    trio, seen = Trio(num_writers=2), []

    def keeps(message):
        seen.extend([message] if isinstance(message, lost) else [])
        return not isinstance(message, lost) or len(seen) != which

    trio.keeps = keeps
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.feed(trio.loaders[0], Cancel("l0", "aborted"))
    trio.over("unused", "aborted")
    trio.until(60.0)
    assert [(report.ok, report.quiet) for report in trio.reports] == [(False, False)]
    assert trio.quieted == ["l0"]
    assert outcomes(trio) == ["released"]
    assert trio.left == {}


def test_f5_a_producer_that_says_nothing_fails_in_time_and_keeps_its_quarantine():
    trio = Trio()
    trio.feed(trio.producer, held())
    trio.keeps = lambda message: not isinstance(message, WriteDone | Failed)
    trio.arrive()
    trio.start()
    trio.finish()
    trio.until(300.0)
    (report,) = trio.reports
    assert (report.ok, report.quiet, report.reason) == (False, False, "deadline: landing after 300.0 s")
    trio.over("failed", report.reason)
    trio.until(10_000.0)
    assert (trio.quieted, trio.left) == ([], {"loads": 1})
    trio.keeps = lambda message: True
    trio.until(10_100.0)
    assert (trio.quieted, trio.left) == (["l0"], {})


def test_f9_aborted_half_way_the_blocks_are_kept_until_the_transport_is_done():
    trio = Trio(num_writers=2)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.finish(by(0, 0))
    trio.is_stubborn = True
    trio.feed(trio.loaders[0], Cancel("l0", "aborted"))
    trio.over("unused", "aborted")
    trio.until(1000.0)
    assert (trio.quieted, trio.freed) == ([], [])
    trio.finish(by(0, 1))
    assert trio.quieted == ["l0"]
    assert outcomes(trio) == ["released"]
    assert trio.left == {}


def test_f9_a_writer_that_died_is_waited_for_until_that_is_proven():
    trio = Trio()
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.keeps = lambda message: not isinstance(message, CancelWrite | StopWrite)  # nobody is there
    trio.feed(trio.loaders[0], Cancel("l0", "aborted"))
    trio.until(10_000.0)
    assert trio.quieted == []
    trio.feed(trio.loaders[0], WriterGone("w0"))
    assert trio.quieted == ["l0"]


def test_f13_a_producer_that_gives_up_after_some_chunks_is_heard():
    trio = Trio(num_writers=2)
    trio.feed(trio.producer, promised())
    trio.arrive()
    trio.start()
    trio.feed(trio.producer, Dropped(ref(), "the prompt is too long"))
    (report,) = trio.reports
    assert (report.ok, report.reason) == (False, "the prompt is too long")
    trio.over("failed", report.reason)
    trio.until(10.0)
    assert outcomes(trio) == ["failed"]
    assert trio.quieted == ["l0"]
    assert trio.left == {}


def test_f13_a_write_that_fails_is_heard_and_nothing_is_accepted():
    trio = Trio(num_writers=2)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.finish(by(0, 1))
    trio.writing.pop(by(0, 0))
    trio.feed(trio.writers[0], WritesFailed(by(0, 0), "the queue pair broke"))
    (report,) = trio.reports
    assert (report.ok, report.reason, report.quiet) == (False, "the queue pair broke", False)
    trio.over("failed", report.reason)
    assert (trio.freed, trio.quieted) == ([], [])
    trio.feed(trio.writers[0], WritesQuiet(by(0, 0)))
    assert (outcomes(trio), trio.quieted) == (["released"], ["l0"])
    assert "consumer_failed" in trio.notes


def test_a_claim_that_lapses_under_a_writer_fails_the_load_and_frees_when_it_has_closed():
    trio = Trio()
    trio.keeps = lambda message: not isinstance(message, Renew)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.until(29.0)
    assert (trio.freed, trio.reports) == ([], [])
    trio.until(31.0)
    assert outcomes(trio) == ["lapsed"]
    assert [report.reason for report in trio.reports] == ["lapsed: the claim's lease ran out"]
    assert trio.quieted == ["l0"]


def test_an_unable_writer_is_read_from():
    trio = Trio(num_writers=2)
    trio.feed(trio.producer, held())
    trio.arrive()
    trio.start()
    trio.writing.pop(by(0, 0))
    trio.feed(trio.writers[0], WritesFailed(by(0, 0), "not registered", unable=True))
    assert trio.reading == set()
    trio.feed(trio.writers[0], WritesQuiet(by(0, 0)))
    assert trio.reading == {"l0"}
    assert trio.reports == []
    assert of_kind(trio.freed, object) == []
