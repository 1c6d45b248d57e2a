import pytest
from builders import (
    ADDRESS,
    ORDER,
    TOPOLOGY,
    answers,
    by_router,
    failed,
    grant,
    landing,
    load,
    loader,
    notes,
    of_kind,
    sources,
    told,
    write_done,
    written,
)

from kvferry.protocol.events import WriterGone, WriterLost
from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import (
    LONGEST_CANCEL_S,
    AbandonReads,
    Cancel,
    Connect,
    PeerFailed,
    PeerReady,
    PeerStale,
    PostReads,
    Quieted,
    ReadsDone,
    Report,
    SourceRank,
    Start,
    Tick,
)
from kvferry.protocol.messages import CancelWrite, Claim, Release, RemoteBlocks

OK = Report("l", ok=True, reason="", quiet=True)


def of_type(actions, kind):
    return [message for message in answers(actions) if isinstance(message, kind)]


def ranks(actions, kind):
    """Producer ranks to which such messages go."""
    return [message.landing.producer_rank for message in of_type(actions, kind)]


def by(rank):
    return landing(producer_rank=rank)


@pytest.fixture
def machine():
    """Two producer ranks, 0 and 3, are told to write one load."""
    machine = loader()
    assert ranks(written(machine, 0, 3), RemoteBlocks) == [0, 3]
    return machine


def test_every_rank_that_feeds_this_one_is_told_where_to_write():
    machine = loader(rank=1, num_ranks=2)
    first, second = of_type(written(machine, 0, 3), RemoteBlocks)
    assert (first.landing, second.landing) == (landing(rank=1), landing(rank=1, producer_rank=3))
    assert (first.producer_incarnation, first.topology_digest, first.num_ranks) == ("p1", TOPOLOGY, 2)
    assert (first.transport, second.transport) == ("local", "nixl")
    assert (first.address, first.block_ids, first.end_token) == (ORDER.address, ORDER.block_ids, 100)


def test_a_router_names_no_engine():
    machine = loader()
    assert machine.handle(Start(load(order=ORDER, ref=by_router())), 0.0) == [Connect(ADDRESS, "")]
    (order,) = of_type(machine.handle(PeerReady(ADDRESS, "p1", TOPOLOGY, sources(0)), 0.0), RemoteBlocks)
    assert (order.ref, order.producer_incarnation) == (by_router(), "p1")


def test_a_known_peer_is_told_at_once(machine):
    assert ranks(machine.handle(Start(load("m", "d", order=ORDER)), 1.0), RemoteBlocks) == [0, 3]


def test_accepted_when_the_last_writer_is_done(machine):
    """C9: the last layers' rank reports first; that one is done twice counts once."""
    assert told(machine, write_done(by(3)), 1.0) == []
    assert told(machine, write_done(by(3)), 1.0) == []
    report, release = told(machine, write_done(by(0)), 3.0)
    assert report == OK
    assert (release.message.outcome, release.message.ranks) == ("done", (0,))
    assert (machine.num_loads, of_kind(machine.handle(Tick(), 1000.0), Report)) == (0, [])
    assert machine.next_deadline() is None


@pytest.mark.parametrize(
    "stray",
    [landing("d"), landing(load_id="m"), landing(rank=1), landing(producer_rank=7)],
    ids=["claim", "load", "rank", "writer"],
)
def test_another_landings_end_is_not_this_ones(machine, stray):
    told(machine, write_done(by(3)), 1.0)
    assert notes(told(machine, write_done(stray), 1.0)) == ["stray_answer"]
    assert notes(told(machine, failed(stray, quiet=True), 1.0)) == ["stray_answer"]
    assert machine.num_loads == 1


def test_who_has_not_answered_is_told_again(machine):
    told(machine, write_done(by(0)), 1.0)
    assert machine.next_deadline() == 2.0
    assert ranks(machine.handle(Tick(), 2.0), RemoteBlocks) == [3]
    assert ranks(machine.handle(Tick(), 4.0), RemoteBlocks) == [3]


def test_a_failure_is_reported_at_once_and_quiet_when_every_writer_is(machine):
    actions = told(machine, failed(by(0), "op 2"), 1.0)
    assert of_kind(actions, Report) == [Report("l", False, "op 2", quiet=False)]
    assert ranks(actions, CancelWrite) == [0, 3]
    assert of_type(actions, Release)[0].outcome == "failed"
    assert told(machine, failed(by(0), quiet=True), 2.0) == []
    assert told(machine, failed(by(3)), 2.0) == []
    assert told(machine, failed(by(3), quiet=True), 90.0) == [Quieted("l")]
    assert machine.num_loads == 0


def test_the_quiet_answer_may_overtake_the_first(machine):
    told(machine, write_done(by(3)), 1.0)
    actions = told(machine, failed(by(0), quiet=True), 1.0)
    assert of_kind(actions, Report) == [Report("l", False, "why", quiet=True)]
    assert of_type(actions, CancelWrite) == []
    assert notes(told(machine, failed(by(0)), 1.1)) == ["stray_answer"]


def test_done_after_all_is_quiet_and_not_accepted(machine):
    machine.handle(Cancel("l", "aborted"), 1.0)
    assert told(machine, write_done(by(0)), 2.0) == []
    assert told(machine, write_done(by(3)), 2.0) == [Quieted("l")]


def test_f9_an_abort_waits_for_the_writers_however_long(machine):
    actions = machine.handle(Cancel("l", "aborted"), 1.0)
    assert of_kind(actions, Report) == [Report("l", False, "cancelled: aborted", quiet=False)]
    assert of_type(actions, Release)[0].outcome == "unused"
    assert of_kind(actions, AbandonReads) == []
    machine.handle(Tick(), 2.0)  # of the order's answer, which nobody waits for any more
    gaps, last = [], 1.0
    while last < 600.0:
        at = machine.next_deadline()
        actions = machine.handle(Tick(), at)
        assert ranks(actions, CancelWrite) == [0, 3]
        assert of_kind(actions, Quieted) == []
        gaps.append(at - last)
        last = at
    assert gaps[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(gaps[5:]) == {LONGEST_CANCEL_S}


def test_the_deadline_is_that_of_writes_and_ends_nothing_that_may_land():
    machine = loader(leases=Leases(load_s=10.0, write_s=20.0))
    written(machine, 0)
    while (at := machine.next_deadline()) < 20.0:
        assert ranks(machine.handle(Tick(), at), RemoteBlocks) == [0]
    actions = machine.handle(Tick(), 20.0)
    assert of_kind(actions, Report) == [Report("l", False, "deadline: landing after 20.0 s", quiet=False)]
    assert ranks(actions, CancelWrite) == [0]
    assert machine.next_deadline() > 20.0


def test_a_lost_connection_fails_the_load_and_proves_nothing(machine):
    actions = machine.handle(WriterLost("w3", "connection lost"), 1.0)
    assert of_kind(actions, Report) == [Report("l", False, "connection lost", quiet=False)]
    told(machine, failed(by(0), quiet=True), 2.0)
    assert machine.num_draining == 1
    assert machine.handle(WriterGone("w3"), 3.0) == [Quieted("l")]


def test_a_lost_connection_to_who_is_done_is_nothing(machine):
    told(machine, write_done(by(3)), 1.0)
    assert machine.handle(WriterLost("w3", "connection lost"), 1.0) == []
    assert machine.handle(WriterGone("w3"), 1.0) == []
    assert told(machine, write_done(by(0)), 2.0)[0] == OK


def test_a_process_that_is_gone_fails_the_load_and_is_quiet(machine):
    actions = machine.handle(WriterGone("w0"), 1.0)
    (report,) = of_kind(actions, Report)
    assert (report.reason, report.quiet) == ("the process of producer rank 0 is gone", False)
    assert ranks(actions, CancelWrite) == [3]
    assert machine.handle(WriterGone("w3"), 2.0) == [Quieted("l")]
    assert machine.handle(WriterGone("w3"), 2.0) == []


def test_a_producer_that_starts_again_fails_the_load_and_not_its_quarantine(machine):
    for event in (PeerFailed(ADDRESS, "connection lost"), PeerReady(ADDRESS, "p2", TOPOLOGY, sources(0, 3))):
        other = loader()
        written(other, 0, 3)
        (report,) = of_kind(other.handle(event, 1.0), Report)
        assert (report.ok, report.quiet) == (False, False)
        assert other.num_draining == 1


# A writer that can't


def test_who_can_not_write_is_read_from_when_all_are_quiet(machine):
    actions = told(machine, failed(by(0), "no transport", quiet=True, unable=True), 1.0)
    assert notes(actions) == ["reads_instead"]
    assert ranks(actions, CancelWrite) == [3]
    assert of_kind(actions, Report) == []
    claim, post = told(machine, failed(by(3), quiet=True), 2.0)
    assert isinstance(claim.message, Claim)
    assert post == PostReads("l")
    told(machine, grant(claim.message.seq), 3.0)
    assert machine.handle(ReadsDone("l"), 4.0)[0] == OK


def test_cancels_are_sent_again_before_it_reads(machine):
    told(machine, failed(by(0), quiet=True, unable=True), 1.0)
    assert ranks(machine.handle(Tick(), 3.0), CancelWrite) == [3]
    assert told(machine, write_done(by(3)), 4.0)[1] == PostReads("l")


def test_where_nothing_can_be_read_it_fails():
    machine = loader()
    written(machine, 0, may_read=False)
    actions = told(machine, failed(by(0), "no transport", quiet=True, unable=True), 1.0)
    assert of_kind(actions, Report) == [Report("l", False, "no transport", quiet=True)]


def test_the_deadline_while_it_waits_to_read(machine):
    told(machine, failed(by(0), quiet=True, unable=True), 299.5)
    actions = machine.handle(Tick(), 301.5)
    (report,) = of_kind(actions, Report)
    assert report.reason.startswith("deadline: settling")
    assert ranks(actions, CancelWrite) == [3]
    assert machine.next_deadline() > 301.5
    assert told(machine, failed(by(3), quiet=True), 400.0) == [Quieted("l")]


def test_a_rank_without_a_share_is_done_at_once():
    machine = loader()
    machine.handle(Start(load(order=ORDER)), 0.0)
    assert machine.handle(PeerReady(ADDRESS, "p1", TOPOLOGY), 0.0)[0] == OK


# Peers that are not what they were


def moved(machine, now):
    """The producer's rank 3 has another address, in the same life of its engine."""
    there = (*sources(0), SourceRank(3, "tcp://127.0.0.1:9999", "nixl"))
    return machine.handle(PeerReady(ADDRESS, "p1", TOPOLOGY, there), now)


def test_a_stale_peer_is_asked_anew_by_the_next_load(machine):
    assert machine.handle(PeerStale(ADDRESS), 1.0) == []
    assert machine.handle(Start(load("m", "d", order=ORDER)), 1.0) == [Connect(ADDRESS, "P")]
    assert machine.num_loads == 2


def test_cancels_follow_a_writer_to_its_new_address(machine):
    told(machine, write_done(by(0)), 0.5)
    machine.handle(PeerStale(ADDRESS), 1.0)
    lost = machine.handle(WriterLost(sources(3)[0].address, "gone to sleep"), 1.0)
    assert of_kind(lost, Report)[0].quiet is False
    assert of_kind(lost, Connect) == [Connect(ADDRESS, "P")]
    (cancel,) = [action for action in moved(machine, 2.0) if isinstance(getattr(action, "message", None), CancelWrite)]
    assert (cancel.to, cancel.message.landing) == ("tcp://127.0.0.1:9999", by(3))
    assert of_kind(told(machine, failed(by(3), quiet=True), 3.0), Quieted)


def test_a_load_whose_writer_was_replaced_is_given_up(machine):
    (report,) = of_kind(moved(machine, 1.0), Report)
    assert "another address" in report.reason


def test_an_engine_in_another_life_has_no_say_in_what_the_earlier_one_wrote(machine):
    machine.handle(PeerFailed(ADDRESS, "lost"), 1.0)
    assert of_kind(machine.handle(PeerReady(ADDRESS, "p2", TOPOLOGY, sources(0, 3)), 2.0), Quieted) == []
    assert notes(told(machine, failed(by(3)), 3.0)) == []
    assert machine.num_loads == 1
