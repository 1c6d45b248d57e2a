import pytest
from builders import (
    ADDRESS,
    CONSUMER,
    TABLES,
    answers,
    cancel_write,
    closed,
    landing,
    notes,
    of_kind,
    opened,
    refused,
    remote_blocks,
    told,
    writer,
)

from kvferry.protocol.events import (
    AbandonWrites,
    BeginWrites,
    Connect,
    PeerFailed,
    PeerReady,
    PeerStale,
    Send,
    Tick,
    WritesDone,
    WritesFailed,
    WritesQuiet,
)
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import CloseWrite, Failed, Grant, OpenWrite, StopWrite, WriteDone
from kvferry.protocol.transitions import IllegalTransition
from kvferry.protocol.writer import Writer

READY = PeerReady(CONSUMER, "d1", b"")
DONE = WritesDone(landing(), 1000, 3, "local")


def the(kind, actions):
    (message,) = (message for message in answers(actions) if isinstance(message, kind))
    return message


def to_the_consumer(actions):
    return [action.message for action in of_kind(actions, Send) if action.to != ADDRESS]


def open_seq(actions):
    return the(OpenWrite, actions).seq


@pytest.fixture
def machine():
    return writer()


@pytest.fixture
def writing():
    """One landing is being written, ordered by route "r"."""
    machine = writer()
    seq = open_seq(told(machine, remote_blocks(), 0.0, "r"))
    machine.handle(READY, 0.0)
    assert of_kind(told(machine, opened(seq), 0.0), BeginWrites)
    return machine


# Opening


@pytest.mark.parametrize("leave_first", [True, False])
def test_nothing_is_written_before_leave_and_handshake(machine, leave_first):
    order = remote_blocks()
    asked = told(machine, order, 0.0)
    assert of_kind(asked, Connect) == [Connect(CONSUMER, "D")]
    steps = [lambda: told(machine, opened(open_seq(asked)), 1.0), lambda: machine.handle(READY, 1.0)]
    first, second = steps if leave_first else reversed(steps)
    assert first() == []
    assert second() == [BeginWrites(order, "x", TABLES)]


def test_leave_is_asked_for_what_the_consumer_ordered(machine):
    ask = the(OpenWrite, told(machine, remote_blocks(landing(rank=1), num_ranks=2), 0.0))
    assert (ask.landing, ask.num_ranks, ask.num_tokens) == (landing(rank=1), 2, 100)


def test_leave_is_asked_for_again_under_the_same_number(machine):
    seq = open_seq(told(machine, remote_blocks(), 0.0))
    assert machine.next_deadline() == 2.0
    assert machine.handle(Tick(), 1.9) == []
    assert open_seq(machine.handle(Tick(), 2.0)) == seq
    assert machine.next_deadline() == 6.0  # ever more rarely
    told(machine, opened(seq), 6.0)
    assert [open_seq(machine.handle(Tick(), now)) for now in (6.0, 14.0, 30.0, 60.0, 90.0)] == [seq] * 5
    assert machine.next_deadline() == 120.0  # so that the engine knows where to find it


def test_a_repeated_order_changes_nothing(writing):
    assert told(writing, remote_blocks(), 1.0) == []
    assert writing.num_jobs == 1


def test_leave_for_another_question_or_twice_is_nothing(machine):
    seq = open_seq(told(machine, remote_blocks(), 0.0))
    machine.handle(READY, 0.0)
    assert told(machine, opened(seq + 1), 0.0) == []
    assert told(machine, opened(seq, landing("other")), 0.0) == []
    assert len(told(machine, opened(seq), 0.0)) == 1
    assert told(machine, opened(seq), 0.0) == []


def test_one_handshake_for_all_landings_of_an_engine(machine):
    told(machine, remote_blocks(), 0.0)
    second = told(machine, remote_blocks(landing("d")), 0.0)
    assert of_kind(second, Connect) == []
    machine.handle(READY, 1.0)
    third = told(machine, remote_blocks(landing("e")), 2.0)
    assert of_kind(third, Connect) == []
    assert told(machine, opened(open_seq(third), landing("e")), 2.0)  # known: begins at once


def test_a_consumer_that_has_started_again_is_asked_again(writing):
    asked = told(writing, remote_blocks(landing("d"), incarnation="d2"), 1.0)
    assert of_kind(asked, Connect) == [Connect(CONSUMER, "D")]
    told(writing, opened(open_seq(asked), landing("d")), 1.0)
    (begun,) = writing.handle(PeerReady(CONSUMER, "d2", b""), 1.0)
    assert begun.order.landing == landing("d")


def test_an_order_from_an_earlier_life_is_given_up(machine):
    told(machine, remote_blocks(incarnation="d0"), 0.0, "r")
    close = the(CloseWrite, machine.handle(READY, 1.0))
    failed = the(Failed, told(machine, closed(seq=close.seq), 2.0))
    assert "d0" in failed.reason
    assert "d1" in failed.reason


@pytest.mark.parametrize(
    "order", [remote_blocks(landing(producer_rank=1)), remote_blocks(producer_incarnation="p0")], ids=["rank", "life"]
)
def test_an_order_for_another_process_is_dropped(machine, order):
    assert notes(told(machine, order, 0.0)) == ["stray_order"]
    assert machine.num_jobs == 0


def test_a_refusal_closes_and_tells_the_reason(machine):
    seq = open_seq(told(machine, remote_blocks(), 0.0, "r"))
    close = the(CloseWrite, told(machine, refused(seq, "digest"), 1.0))
    (failed,) = told(machine, closed(seq=close.seq), 2.0)
    assert failed == Send("r", Failed(landing(), "digest: why", True, False))


def test_busy_is_asked_again(machine):
    seq = open_seq(told(machine, remote_blocks(), 0.0))
    assert notes(told(machine, refused(seq, "busy"), 1.0)) == ["write_busy"]
    assert open_seq(machine.handle(Tick(), 2.0)) == seq


@pytest.mark.parametrize("stray", [refused(99), Grant("c", 0, 1, 1, 9.0)], ids=["seq", "kind"])
def test_what_answers_nothing_changes_nothing(machine, stray):
    told(machine, remote_blocks(), 0.0)
    assert of_kind(told(machine, stray, 1.0), Send) == []
    assert machine.num_jobs == 1


def test_a_refusal_of_somebody_elses_claim_changes_nothing(machine):
    """Numbers of questions are each asker's own."""
    seq = open_seq(told(machine, remote_blocks(), 0.0))
    assert told(machine, refused(seq, claim_id="d"), 1.0) == []
    assert told(machine, refused(seq, rank=1), 1.0) == []


# Done


def test_done_is_told_and_closed(writing):
    done, close = writing.handle(DONE, 5.0)
    assert done == Send("r", WriteDone(landing(), 1000, 3, "local"))
    assert (close.to, close.message.landing) == (ADDRESS, landing())
    assert told(writing, closed(seq=close.message.seq), 6.0) == []
    assert writing.handle(Tick(), 7.0) == []
    assert (writing.num_jobs, writing.next_deadline()) == (0, None)


def test_done_is_told_again_whenever_it_is_asked_for(writing):
    writing.handle(DONE, 5.0)
    assert the(WriteDone, told(writing, remote_blocks(), 6.0, "r2"))
    told(writing, closed(), 7.0)
    (again,) = told(writing, remote_blocks(), 8.0, "r3")
    assert (again.to, type(again.message)) == ("r3", WriteDone)
    assert the(WriteDone, told(writing, cancel_write(), 9.0))
    assert writing.num_jobs == 0


def test_closing_is_asked_for_until_it_is_answered(writing):
    close = the(CloseWrite, writing.handle(DONE, 5.0))
    assert the(CloseWrite, writing.handle(Tick(), 7.0)) == close
    assert the(CloseWrite, writing.handle(Tick(), 11.0)) == close


# Failed


def test_a_failure_is_told_at_once_and_quiet_only_when_all_is_closed(writing):
    (first,) = writing.handle(WritesFailed(landing(), "op 2"), 1.0)
    assert first == Send("r", Failed(landing(), "op 2", False, False))
    assert writing.handle(WritesFailed(landing(), "op 3"), 1.1) == []
    quiet = writing.handle(WritesQuiet(landing()), 2.0)
    assert to_the_consumer(quiet) == []
    assert the(Failed, told(writing, remote_blocks(), 2.5)).quiet is False
    assert told(writing, closed(), 3.0) == [Send("route", Failed(landing(), "op 2", True, False))]


@pytest.mark.parametrize("end", [WritesQuiet(landing()), DONE], ids=["quiet", "done"])
def test_a_cancel_stops_what_is_written_and_is_answered_when_nothing_can_land(writing, end):
    abandon, failed = told(writing, cancel_write(), 1.0, "r")
    assert abandon == AbandonWrites(landing())
    assert failed.message.quiet is False
    assert of_kind(told(writing, cancel_write(), 1.5, "r"), AbandonWrites) == []
    assert to_the_consumer(writing.handle(end, 2.0)) == []
    assert the(Failed, told(writing, closed(), 3.0)).quiet
    assert the(Failed, told(writing, cancel_write(), 4.0)).quiet


def test_a_cancel_that_overtakes_its_order_closes_it_for_good(machine):
    close = the(CloseWrite, told(machine, cancel_write(), 0.0, "r"))
    assert the(Failed, told(machine, remote_blocks(), 0.5)).quiet is False
    assert the(Failed, told(machine, closed(seq=close.seq), 1.0)).quiet
    late = told(machine, remote_blocks(), 2.0)
    assert the(Failed, late).quiet
    assert of_kind(late, Connect) == []


def test_stopped_by_its_own_engine(writing):
    actions = told(writing, StopWrite(landing(), "lapsed"), 1.0)
    assert of_kind(actions, AbandonWrites) == [AbandonWrites(landing())]
    assert the(Failed, actions).reason == "lapsed"
    assert told(writing, StopWrite(landing(), "lapsed"), 2.0) == []
    writing.handle(WritesQuiet(landing()), 3.0)
    told(writing, closed(), 3.0)
    assert the(CloseWrite, told(writing, StopWrite(landing(), "lapsed"), 4.0)).landing == landing()


def test_stopped_while_it_waits(machine):
    told(machine, remote_blocks(), 0.0)
    actions = told(machine, StopWrite(landing(), "aborted"), 1.0)
    assert [type(message) for message in answers(actions)] == [CloseWrite]
    assert machine.handle(READY, 2.0) == []


def test_a_failed_handshake_means_that_it_can_not_write_there(machine):
    told(machine, remote_blocks(), 0.0)
    close = the(CloseWrite, machine.handle(PeerFailed(CONSUMER, "no transport", lost=False), 1.0))
    failed = the(Failed, told(machine, closed(seq=close.seq), 2.0))
    assert (failed.unable, failed.quiet, failed.reason) == (True, True, "no transport")


def test_a_failed_handshake_leaves_alone_what_goes_on_under_an_earlier_one(writing):
    told(writing, remote_blocks(landing("d"), incarnation="d2"), 1.0)
    actions = writing.handle(PeerFailed(CONSUMER, "no answer", lost=False), 2.0)
    assert the(CloseWrite, actions).landing == landing("d")
    assert of_kind(actions, AbandonWrites) == []


def test_a_lost_consumer_stops_what_is_written_for_it(writing):
    actions = writing.handle(PeerFailed(CONSUMER, "connection lost"), 1.0)
    assert of_kind(actions, AbandonWrites) == [AbandonWrites(landing())]
    assert the(Failed, actions).unable is False
    assert of_kind(told(writing, remote_blocks(landing("d")), 2.0), Connect)  # asked anew


def test_unable_after_all_is_told(writing):
    (first,) = writing.handle(WritesFailed(landing(), "not registered", unable=True), 1.0)
    assert (first.message.unable, first.message.quiet) == (True, False)
    writing.handle(WritesQuiet(landing()), 2.0)
    assert the(Failed, told(writing, closed(), 3.0)) == Failed(landing(), "not registered", True, True)


# The own process, and memory


@pytest.mark.parametrize(
    "event",
    [DONE, WritesFailed(landing(), ""), WritesQuiet(landing())],
    ids=lambda event: type(event).__name__,
)
def test_the_own_process_mistakes_raise(machine, event):
    with pytest.raises(IllegalTransition):
        machine.handle(event, 0.0)
    told(machine, remote_blocks(), 0.0)
    with pytest.raises(IllegalTransition):
        machine.handle(event, 1.0)


def test_writes_end_once(writing):
    writing.handle(DONE, 1.0)
    for event in (DONE, WritesFailed(landing(), "late"), WritesQuiet(landing())):
        with pytest.raises(IllegalTransition, match="while 'closing'"):
            writing.handle(event, 2.0)


def test_what_is_over_is_remembered_without_its_block_ids_and_only_so_many():
    machine = writer(leases=Leases(max_remembered=2))
    for name in ("a", "b", "c"):
        seq = open_seq(told(machine, remote_blocks(landing(name)), 0.0))
        machine.handle(READY, 0.0)
        told(machine, opened(seq, landing(name)), 0.0)
        machine.handle(WritesDone(landing(name), 1, 1, ""), 0.0)
        told(machine, closed(landing(name)), 0.0)
    assert list(machine._over) == [landing("b"), landing("c")]
    assert all(job.order is None and job.opened is None for job in machine._over.values())
    assert not machine._questions
    asked = told(machine, remote_blocks(landing("a")), 1.0)  # forgotten here: its own engine knows better
    assert the(OpenWrite, asked).landing == landing("a")


def test_an_engine_that_never_answers_costs_one_question(machine):
    told(machine, remote_blocks(), 0.0)
    for _ in range(100):
        at = machine.next_deadline()
        assert len(answers(machine.handle(Tick(), at))) == 1
        assert machine.next_deadline() > at
    assert len(machine._questions) == 1


# Bounds, and peers that are not what they were


def test_orders_beyond_what_one_consumer_may_have_are_let_fall(machine, monkeypatch):
    monkeypatch.setattr("kvferry.protocol.writer.MAX_JOBS_PER_ROUTE", 2)
    for name in ("a", "b"):
        assert told(machine, remote_blocks(landing(name)), 0.0, "greedy")
    assert notes(told(machine, remote_blocks(landing("c")), 0.0, "greedy")) == ["too_many_orders"]
    assert notes(told(machine, cancel_write(landing("d")), 0.0, "greedy")) == ["too_many_orders"]
    assert open_seq(told(machine, remote_blocks(landing("c")), 0.0, "another"))
    assert machine.num_jobs == 3


@pytest.mark.parametrize(("limit", "value"), [("MAX_JOBS", 1), ("MAX_BLOCK_IDS", 3)])
def test_orders_beyond_what_a_writer_may_have_are_let_fall_until_others_are_over(machine, monkeypatch, limit, value):
    monkeypatch.setattr(f"kvferry.protocol.writer.{limit}", value)
    told(machine, remote_blocks(landing("a"), block_ids=((1, 2), (3,))), 0.0, "r")
    assert notes(told(machine, remote_blocks(landing("b")), 0.0, "s")) == ["too_many_orders"]
    close = the(CloseWrite, told(machine, cancel_write(landing("a")), 1.0, "r"))
    told(machine, closed(landing("a"), close.seq), 1.0)
    assert open_seq(told(machine, remote_blocks(landing("b")), 2.0, "s"))


def test_an_engine_that_nobody_found_fails_only_who_named_it(machine):
    asked = told(machine, remote_blocks(landing("a"), engine_id="nobody"), 0.0)
    assert of_kind(asked, Connect) == [Connect(CONSUMER, "nobody")]
    seq = open_seq(told(machine, remote_blocks(landing("b")), 0.0))
    actions = machine.handle(PeerFailed(CONSUMER, "nobody is there", lost=False), 1.0)
    assert of_kind(actions, Connect) == [Connect(CONSUMER, "D")]
    assert the(CloseWrite, actions).landing == landing("a")
    told(machine, opened(seq, landing("b")), 2.0)
    assert of_kind(machine.handle(READY, 2.0), BeginWrites)


def test_a_stale_peer_is_asked_anew_by_the_next_order_and_what_is_written_goes_on(writing):
    assert writing.handle(PeerStale(CONSUMER), 1.0) == []
    assert of_kind(told(writing, remote_blocks(landing("b")), 1.0), Connect) == [Connect(CONSUMER, "D")]
    assert writing.handle(PeerStale(CONSUMER), 1.0) == []  # under way already
    assert the(WriteDone, writing.handle(DONE, 2.0)).landing == landing()


def test_who_waits_for_leave_when_its_peer_goes_stale_connects_again(machine):
    seq = open_seq(told(machine, remote_blocks(), 0.0))
    machine.handle(READY, 0.0)
    assert machine.handle(PeerStale(CONSUMER), 1.0) == [Connect(CONSUMER, "D")]
    assert told(machine, opened(seq), 2.0) == []
    assert of_kind(machine.handle(READY, 3.0), BeginWrites)


def test_what_an_earlier_writer_could_not_end_is_never_called_quiet():
    machine = Writer(0, "p1", ADDRESS, Leases(), unquiet=frozenset({landing()}))
    for message in (remote_blocks(), cancel_write(), cancel_write()):
        assert the(Failed, told(machine, message, 1.0)).quiet is False
    assert told(machine, StopWrite(landing(), "stop"), 2.0) == []
    assert machine.num_jobs == 0


def test_at_its_end_the_engine_hears_of_all_that_is_quiet(writing):
    told(writing, remote_blocks(landing("b")), 1.0)
    (close,) = answers(writing.close_all(frozenset({landing()})))
    assert (type(close), close.landing) == (CloseWrite, landing("b"))
