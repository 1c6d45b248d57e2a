import math

import pytest
from builders import ADDRESS, TOPOLOGY, answers, claim, grant, load, loader, notes, of_kind, reading, ref, refused, told

from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import (
    AbandonReads,
    Cancel,
    Connect,
    PeerFailed,
    PeerReady,
    PostReads,
    Quieted,
    ReadsDone,
    ReadsFailed,
    ReadsQuiet,
    Report,
    Start,
    Tick,
)
from kvferry.protocol.messages import Claim, Release, Released
from kvferry.protocol.transitions import IllegalTransition

OK = Report("l", ok=True, reason="", quiet=True)
READY = PeerReady(ADDRESS, "p1", TOPOLOGY)


def reports(actions):
    return of_kind(actions, Report)


def claims(actions):
    return [message for message in answers(actions) if isinstance(message, Claim)]


def the_release(actions):
    (release,) = (message for message in answers(actions) if isinstance(message, Release))
    return release


@pytest.fixture
def machine():
    machine = loader()
    reading(machine)
    return machine


# Handshakes


def test_a_peer_is_asked_once_and_then_known():
    machine = loader(rank=1, num_ranks=2)
    assert machine.handle(Start(load("a")), 0.0) == [Connect(ADDRESS, "P")]
    assert machine.handle(Start(load("b", "d")), 0.1) == []
    actions = machine.handle(READY, 0.2)
    assert [action.load_id for action in of_kind(actions, PostReads)] == ["a", "b"]
    assert claims(actions)[0] == claim("c", rank=1, num_ranks=2, seq=1)
    (sent, posts) = machine.handle(Start(load("e", "f")), 0.3)
    assert (sent.message.claim_id, posts) == ("f", PostReads("e"))


def test_another_incarnation_is_asked_for_again():
    machine = loader()
    reading(machine)
    assert machine.handle(Start(load("new", "d", ref=ref(incarnation="p2"))), 1.0) == [Connect(ADDRESS, "P")]
    assert machine.handle(Start(load("same", "e")), 1.0)[1] == PostReads("same")  # the known one still serves
    actions = machine.handle(PeerReady(ADDRESS, "p2", TOPOLOGY), 2.0)
    assert {(report.load_id, report.ok) for report in reports(actions)} == {("l", False), ("same", False)}
    assert "the load needs p1, the peer is p2" in reports(actions)[0].reason
    assert of_kind(actions, PostReads) == [PostReads("new")]


def test_a_stale_load_harms_no_other():
    machine = loader()
    reading(machine)
    machine.handle(Start(load("stale", "d", ref=ref(incarnation="p0"))), 1.0)
    (report,) = reports(machine.handle(READY, 2.0))
    assert (report.load_id, report.ok, report.quiet) == ("stale", False, True)
    told(machine, grant(), 2.0)
    assert reports(machine.handle(ReadsDone("l"), 3.0)) == [OK]


def test_a_failed_handshake_fails_only_who_waits_for_it():
    machine = loader()
    reading(machine)
    machine.handle(Start(load("new", "d", ref=ref(incarnation="p2"))), 1.0)
    (report,) = reports(machine.handle(PeerFailed(ADDRESS, "refused", lost=False), 2.0))
    assert (report.load_id, report.reason, report.quiet) == ("new", "refused", True)
    assert machine.handle(Start(load("again", "e")), 3.0)[1] == PostReads("again")


def test_a_bogus_engine_id_fails_its_own_load_alone():
    machine = loader()
    assert machine.handle(Start(load("bogus", ref=ref(producer="nobody"))), 0.0) == [Connect(ADDRESS, "nobody")]
    assert machine.handle(Start(load("bogus too", "d", ref=ref(producer="nobody"))), 0.0) == []
    assert machine.handle(Start(load("good", "e")), 0.0) == []
    actions = machine.handle(PeerFailed(ADDRESS, "this is P", lost=False), 1.0)
    assert [report.load_id for report in reports(actions)] == ["bogus", "bogus too"]
    assert of_kind(actions, Connect) == [Connect(ADDRESS, "P")]
    assert of_kind(machine.handle(READY, 2.0), PostReads) == [PostReads("good")]


def test_each_engine_that_was_named_has_its_own_time_for_a_handshake():
    machine = loader()
    machine.handle(Start(load("bogus", ref=ref(producer="nobody"))), 0.0)
    machine.handle(Start(load("good", "d")), 0.0)
    actions = machine.handle(Tick(), 15.0)
    assert [report.load_id for report in reports(actions)] == ["bogus"]
    assert of_kind(actions, Connect) == [Connect(ADDRESS, "P")]
    assert [report.load_id for report in reports(machine.handle(Tick(), 30.0))] == ["good"]


def test_a_lost_connection_fails_every_load_of_the_peer_and_no_other(machine):
    other = "tcp://other:1"
    machine.handle(Start(load("other", "d", other)), 0.0)
    actions = machine.handle(PeerFailed(ADDRESS, "connection lost"), 1.0)
    assert actions[:2] == [AbandonReads("l"), Report("l", False, "connection lost", quiet=False)]
    assert machine.handle(Start(load("again", "e")), 2.0) == [Connect(ADDRESS, "P")]
    assert of_kind(machine.handle(PeerReady(other, "p1", TOPOLOGY), 2.0), PostReads) == [PostReads("other")]


def test_a_handshake_without_answer_fails_in_time_and_is_tried_anew():
    machine = loader()
    machine.handle(Start(load()), 0.0)
    assert machine.next_deadline() == 15.0
    (report,) = reports(machine.handle(Tick(), 15.0))
    assert "handshake: no answer in 15.0 s" in report.reason
    assert report.quiet
    assert machine.handle(Start(load("again", "d")), 16.0) == [Connect(ADDRESS, "P")]


def test_an_empty_incarnation_is_no_known_peer():
    assert loader().handle(Start(load(ref=ref(incarnation=""))), 0.0) == [Connect(ADDRESS, "P")]


def test_a_load_that_must_fail_still_releases():
    actions = loader(rank=1, num_ranks=2).handle(Start(load(refused="too many blocks")), 0.0)
    assert reports(actions) == [Report("l", False, "too many blocks", quiet=True)]
    assert (the_release(actions).ranks, the_release(actions).num_ranks) == ((1,), 2)
    assert the_release(actions).reason == "too many blocks"


# What proves the bytes


def test_grant_then_reads(machine):
    assert told(machine, grant(), 0.5) == []
    actions = machine.handle(ReadsDone("l"), 14.0)
    assert reports(actions) == [OK]
    assert (the_release(actions).outcome, the_release(actions).ranks) == ("done", (0,))
    assert machine.num_loads == 0


def test_reads_then_grant(machine):
    assert machine.handle(ReadsDone("l"), 0.5) == []
    assert reports(told(machine, grant(), 1.0)) == [OK]


def test_half_the_lease_is_trusted(machine):
    told(machine, grant(), 0.5)
    assert reports(machine.handle(ReadsDone("l"), 15.0)) == [OK]


def test_later_the_producer_is_asked_once_more(machine):
    told(machine, grant(), 0.5)
    actions = machine.handle(ReadsDone("l"), 15.1)
    assert reports(actions) == []
    assert [message.seq for message in claims(actions)] == [2]
    assert told(machine, grant(1), 15.2) == []  # the old answer again proves nothing new
    assert reports(told(machine, grant(2), 99.0)) == [OK]


def test_the_lease_is_counted_from_when_the_claim_was_sent_not_from_its_grant(machine):
    told(machine, grant(), 14.0)
    actions = machine.handle(ReadsDone("l"), 20.0)
    assert reports(actions) == []
    assert len(claims(actions)) == 1


def test_a_shortened_lease_is_taken_for_what_it_is(machine):
    told(machine, grant(lease_s=8.0), 0.5)
    assert len(claims(machine.handle(ReadsDone("l"), 4.1))) == 1


@pytest.mark.parametrize("lease_s", [math.nan, -5.0, 0.0])
def test_a_senseless_lease_makes_it_ask(machine, lease_s):
    told(machine, grant(lease_s=lease_s), 0.5)
    assert len(claims(machine.handle(ReadsDone("l"), 0.6))) == 1


def test_a_read_after_the_lease_that_is_still_held_is_good_and_one_that_is_not_is_rejected(machine):
    told(machine, grant(), 0.5)
    machine.handle(ReadsDone("l"), 40.0)
    actions = told(machine, refused(2, "lapsed"), 40.1)
    assert reports(actions) == [Report("l", False, "lapsed: why", quiet=True)]
    assert the_release(actions).outcome == "failed"


@pytest.mark.parametrize(
    "stray",
    [grant(seq=2), grant(claim_id="d"), grant(rank=1), grant(generation=2), refused(seq=2), refused(claim_id="d")],
)
def test_an_answer_to_another_question_proves_nothing(machine, stray):
    assert notes(told(machine, stray, 0.5)) == ["stray_answer"]
    assert machine.handle(ReadsDone("l"), 1.0) == []


def test_a_claim_without_answer_is_sent_again(machine):
    assert claims(machine.handle(Tick(), 1.9)) == []
    assert [message.seq for message in claims(machine.handle(Tick(), 2.0))] == [2]
    told(machine, grant(1), 2.5)
    assert claims(machine.handle(Tick(), 4.0)) == []  # answered: nobody waits for another
    assert reports(machine.handle(ReadsDone("l"), 5.0)) == [OK]


def test_the_question_behind_the_reads_is_repeated_too(machine):
    machine.handle(ReadsDone("l"), 1.0)
    machine.handle(Tick(), 2.0)
    assert reports(told(machine, grant(2), 30.0)) == [OK]


def test_a_claim_sent_after_the_reads_proves_them_however_late_its_answer(machine):
    machine.handle(ReadsDone("l"), 1.0)
    (again,) = claims(machine.handle(Tick(), 2.0))
    assert reports(told(machine, grant(again.seq), 59.0)) == [OK]


# Failures


def test_a_refusal_abandons_reads_and_waits_for_quiet(machine):
    actions = told(machine, refused(1, "digest"), 1.0)
    assert actions[:2] == [AbandonReads("l"), Report("l", False, "digest: why", quiet=False)]
    assert the_release(actions).ranks == (0,)
    assert of_kind(actions, Quieted) == []
    assert machine.num_draining == 1
    assert machine.handle(ReadsQuiet("l"), 99.0) == [Quieted("l")]
    assert machine.num_loads == 0


def test_busy_is_asked_again_later(machine):
    assert notes(told(machine, refused(1, "busy"), 1.5)) == ["claim_busy"]
    assert claims(machine.handle(Tick(), 3.4)) == []
    assert [message.seq for message in claims(machine.handle(Tick(), 3.5))] == [2]
    told(machine, grant(2), 4.0)
    assert reports(machine.handle(ReadsDone("l"), 5.0)) == [OK]


def test_busy_for_ever_fails_at_the_deadline(machine):
    machine.handle(ReadsDone("l"), 0.5)
    seq, report = 1, []
    while not report:
        told(machine, refused(seq, "busy"), machine.next_deadline() - 1.0)
        actions = machine.handle(Tick(), machine.next_deadline())
        seq, report = seq + len(claims(actions)), reports(actions)
    assert report == [Report("l", False, "deadline: proving after 60.0 s", quiet=True)]


def test_reads_that_end_after_all_are_quiet_and_not_accepted(machine):
    told(machine, refused(), 1.0)
    assert machine.handle(ReadsDone("l"), 2.0) == [Quieted("l")]


def test_one_read_fails_while_its_sibling_may_still_land(machine):
    """F2: failed at once, not quiet before the last operation has ended, reported once."""
    told(machine, grant(), 0.001)
    actions = machine.handle(ReadsFailed("l", "op 2"), 0.010)
    assert reports(actions) == [Report("l", False, "op 2", quiet=False)]
    assert machine.handle(ReadsFailed("l", "op 3"), 0.2) == []
    assert machine.handle(ReadsQuiet("l"), 0.5) == [Quieted("l")]


def test_cancelled_is_unused_not_failed(machine):
    actions = machine.handle(Cancel("l", "aborted"), 1.0)
    assert reports(actions) == [Report("l", False, "cancelled: aborted", quiet=False)]
    assert the_release(actions).outcome == "unused"
    assert machine.handle(Cancel("l", "aborted"), 1.0) == []
    assert machine.handle(Cancel("never heard of", "aborted"), 1.0) == []


def test_a_load_ends_at_its_deadline(machine):
    told(machine, grant(), 1.0)
    assert machine.next_deadline() <= 60.0
    assert reports(machine.handle(Tick(), 59.9)) == []
    actions = machine.handle(Tick(), 60.0)
    assert reports(actions) == [Report("l", False, "deadline: reading after 60.0 s", quiet=False)]
    assert machine.handle(Tick(), 1000.0) == []
    assert machine.handle(ReadsQuiet("l"), 2000.0) == [Quieted("l")]


def test_reads_without_a_grant_fail_at_the_deadline(machine):
    """A lost answer is asked for again and again; without any the bytes are never taken."""
    machine.handle(ReadsDone("l"), 1.0)
    asked, report = 1, []
    while (at := machine.next_deadline()) is not None:
        actions = machine.handle(Tick(), at)
        asked, report = asked + len(claims(actions)), report + reports(actions)
    assert asked == 30
    assert report == [Report("l", False, "deadline: proving after 60.0 s", quiet=True)]


def test_answers_after_the_end_change_nothing(machine):
    machine.handle(Cancel("l", "aborted"), 1.0)
    assert reports(told(machine, grant(), 2.0)) == []
    assert reports(told(machine, refused(), 2.0)) == []
    assert told(machine, Released("c", 2), 2.0) == []
    machine.handle(ReadsQuiet("l"), 3.0)
    assert notes(told(machine, grant(), 4.0)) == ["stray_answer"]


def test_what_is_not_for_a_loader_is_noted(machine):
    assert notes(told(machine, claim(), 1.0)) == ["unexpected_message"]


@pytest.mark.parametrize(
    "event",
    [
        Start(load()),
        ReadsQuiet("l"),
        ReadsDone("stranger"),
        ReadsFailed("stranger", ""),
        ReadsQuiet("stranger"),
    ],
)
def test_the_own_process_mistakes_raise_and_change_nothing(machine, event):
    with pytest.raises(IllegalTransition):
        machine.handle(event, 1.0)
    told(machine, grant(), 1.0)
    assert reports(machine.handle(ReadsDone("l"), 2.0)) == [OK]


def test_reads_end_once(machine):
    machine.handle(ReadsDone("l"), 1.0)
    for event in (ReadsDone("l"), ReadsFailed("l", "late"), ReadsQuiet("l")):
        with pytest.raises(IllegalTransition, match="while 'proving'"):
            machine.handle(event, 1.0)
    assert reports(told(machine, grant(), 2.0)) == [OK]


def test_nothing_is_left_when_all_is_over():
    machine = loader(Leases(claim_reply_s=1.0))
    reading(machine)
    machine.handle(Start(load("m", "d")), 0.0)
    machine.handle(Tick(), 1.0)
    machine.handle(ReadsDone("l"), 1.0)
    told(machine, grant(1), 1.5)
    machine.handle(Cancel("m", ""), 2.0)
    machine.handle(ReadsQuiet("m"), 2.0)
    machine.handle(Tick(), 100.0)
    assert (machine.num_loads, machine.num_draining, machine.next_deadline()) == (0, 0, None)
    assert not machine._questions
