import pytest
from builders import (
    BLOCKS,
    answers,
    claim,
    grant,
    held,
    notes,
    of_kind,
    producer,
    ref,
    release,
    renew,
    told,
)

from kvferry.protocol.hold import MAX_DISOWNED
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import CLAIM_OVER, Grant, Hello, Refused, Released, Renew, Renewed
from kvferry.protocol.producer import Closing, FreeHold, Note, Send, Tick, Void
from kvferry.protocol.transitions import IllegalTransition


def freed(actions):
    return [(action.ref.transfer_id, action.outcome) for action in of_kind(actions, FreeHold)]


def the_refusal(actions):
    (answer,) = answers(actions)
    assert isinstance(answer, Refused)
    return answer


@pytest.fixture
def holding():
    machine = producer()
    assert machine.handle(held(), 0.0) == []
    return machine


# Leases


def test_nobody_claims(holding):
    assert holding.next_deadline() == 60.0
    assert holding.handle(Tick(), 59.9) == []
    assert freed(holding.handle(Tick(), 60.0)) == [("x", "expired")]
    assert holding.next_deadline() is None
    assert holding.num_holds == 0


def test_a_claim_is_granted_for_a_lease_and_says_what_it_answers(holding):
    assert told(holding, claim(rank=1, num_ranks=2, seq=7), 1.0, route="r") == [
        Send("r", Grant(claim_id="c", rank=1, seq=7, generation=1, lease_s=30.0))
    ]
    assert holding.num_open_claims == 1


def test_a_claim_without_news_lapses_with_its_lease_not_with_the_first_hold(holding):
    told(holding, claim(), 1.0)
    assert freed(holding.handle(Tick(), 30.9)) == []
    actions = holding.handle(Tick(), 31.0)
    assert freed(actions) == [("x", "lapsed")]
    assert notes(actions) == ["claim_lapsed"]


def test_a_lapsed_claim_ends_the_hold_at_the_next_event_of_any_kind(holding):
    told(holding, claim(), 1.0)
    actions = told(holding, claim("other"), 40.0)
    assert freed(actions) == [("x", "lapsed")]
    assert the_refusal(actions).reason == "lapsed"


def test_one_claim_lapses_and_the_hold_waits_for_the_other(holding):
    told(holding, claim("dead"), 1.0)
    told(holding, renew("alive"), 20.0)
    assert freed(holding.handle(Tick(), 31.0)) == []
    assert the_refusal(told(holding, claim("dead", seq=2), 32.0)).reason == "lapsed"
    assert freed(told(holding, release("alive"), 33.0)) == [("x", "lapsed")]


def test_a_renewal_opens_a_claim_and_keeps_it(holding):
    (answer,) = answers(told(holding, renew("c", num_ranks=2), 55.0))
    assert answer.seq == 5
    assert [(entry.claim_id, entry.held, entry.lease_s) for entry in answer.entries] == [("c", True, 30.0)]
    told(holding, renew("c", num_ranks=2), 84.0)
    assert freed(holding.handle(Tick(), 113.9)) == []
    assert freed(holding.handle(Tick(), 114.0)) == [("x", "lapsed")]


def test_no_hold_is_longer_than_the_longest_and_grants_are_shortened_to_it():
    machine = producer(Leases(longest_hold_s=70.0))
    machine.handle(held(), 0.0)
    told(machine, claim(), 20.0)
    (answer,) = answers(told(machine, claim(seq=2), 45.0))
    assert answer.lease_s == 25.0
    assert freed(machine.handle(Tick(), 69.9)) == []
    assert freed(machine.handle(Tick(), 70.0)) == [("x", "lapsed")]


def test_the_deadline_is_never_late(holding):
    told(holding, claim(), 10.0)
    told(holding, claim(seq=2), 35.0)
    assert holding.next_deadline() <= 65.0
    now = 0.0
    while (now := holding.next_deadline()) is not None:
        actions = holding.handle(Tick(), now)
    assert freed(actions) == [("x", "lapsed")]


# Releases


def test_the_last_rank_frees_once(holding):
    for rank in range(3):
        told(holding, claim(rank=rank, num_ranks=3), 1.0)
    assert freed(told(holding, release(ranks=(0,), num_ranks=3), 2.0)) == []
    assert freed(told(holding, release(ranks=(2, 1), num_ranks=3), 2.0)) == [("x", "released")]
    late = told(holding, release(ranks=(1,), num_ranks=3, seq=4), 2.0)
    assert freed(late) == []
    assert answers(late) == [Released(claim_id="c", seq=4)]
    assert notes(late) == ["duplicate_release"]


def test_the_engines_release_stands_for_ranks_whose_own_was_lost(holding):
    told(holding, claim(rank=0, num_ranks=2), 1.0)
    told(holding, release(ranks=(0,), num_ranks=2), 2.0)
    assert freed(told(holding, release(ranks=None, num_ranks=2), 3.0)) == [("x", "released")]


def test_the_engines_release_behind_its_ranks_is_ordinary(holding):
    told(holding, claim(), 1.0)
    told(holding, release(ranks=(0,)), 2.0)
    actions = told(holding, release(ranks=None), 2.1)
    assert notes(actions) == []
    assert answers(actions) == [Released(claim_id="c", seq=9)]


def test_claims_are_counted_from_their_renewal(holding):
    told(holding, renew("first"), 1.0)
    told(holding, renew("second"), 1.0)
    assert freed(told(holding, release("first"), 2.0)) == []
    assert isinstance(answers(told(holding, claim("second"), 3.0))[0], Grant)
    assert freed(told(holding, release("second"), 4.0)) == [("x", "released")]


def test_a_released_claim_can_not_come_back(holding):
    told(holding, renew("other"), 1.0)
    told(holding, claim(), 1.0)
    told(holding, release(ranks=(0,)), 2.0)
    assert the_refusal(told(holding, claim(seq=2), 3.0)).reason == "released"
    (answer,) = answers(told(holding, renew("c"), 3.0))
    assert [(entry.held, entry.reason) for entry in answer.entries] == [(False, CLAIM_OVER)]


def test_a_rank_that_has_released_can_not_claim_again(holding):
    told(holding, claim(rank=0, num_ranks=2), 1.0)
    told(holding, release(ranks=(0,), num_ranks=2), 2.0)
    assert the_refusal(told(holding, claim(rank=0, num_ranks=2, seq=2), 3.0)).reason == "released"
    assert isinstance(answers(told(holding, claim(rank=1, num_ranks=2), 3.0))[0], Grant)


def test_what_went_wrong_at_the_consumer_is_told_here(holding):
    told(holding, claim(), 1.0)
    actions = told(holding, release(ranks=(0,), outcome="failed", reason="a read failed"), 2.0)
    assert notes(actions) == ["consumer_failed"]
    assert "a read failed" in actions[0].detail


def test_a_late_user_learns_that_the_transfer_is_over(holding):
    told(holding, release(), 1.0)
    assert the_refusal(told(holding, claim("late"), 2.0)).reason == "released"
    (answer,) = answers(told(holding, renew("late"), 2.0))
    assert not answer.entries[0].held
    assert answer.entries[0].reason.startswith("released: ")


# What does not fit


@pytest.mark.parametrize(
    ("changes", "reason", "values"),
    [
        ({"digest": b"\x01" * 16}, "digest", ["01" * 16, b"d".hex() * 16]),
        ({"num_tokens": 99}, "digest", ["99", "100"]),
        ({"blocks_digest": b"\x02" * 16}, "blocks", ["02" * 16, BLOCKS.hex()]),
        ({"topology_digest": b""}, "topology", [b"t".hex() * 16]),
        ({"ref": ref(incarnation="p0")}, "incarnation", ["p0", "p1"]),
        ({"ref": ref(producer="Q")}, "incarnation", ["Q", "P"]),
        ({"ref": ref(generation=0)}, "generation", ["0", "1"]),
    ],
)
def test_a_mismatch_is_refused_with_both_values_and_ends_nothing(holding, changes, reason, values):
    actions = told(holding, claim("wrong", **changes), 1.0)
    answer = the_refusal(actions)
    assert answer.reason == reason
    assert all(value in answer.detail for value in values)
    assert notes(actions) == ["claim_refused"]
    assert holding.num_open_claims == 0
    assert isinstance(answers(told(holding, claim("right"), 2.0))[0], Grant)


def test_a_refused_reader_neither_ends_nor_keeps_the_hold(holding):
    told(holding, renew("wrong"), 1.0)
    assert the_refusal(told(holding, claim("wrong", digest=b"?" * 16), 2.0)).reason == "digest"
    assert holding.num_open_claims == 0
    actions = told(holding, release("wrong", outcome="failed", reason="digest"), 3.0)
    assert freed(actions) == []
    assert answers(actions) == [Released(claim_id="wrong", seq=9)]
    (answer,) = answers(told(holding, renew("wrong"), 4.0))
    assert not answer.entries[0].held
    assert answer.entries[0].reason.startswith("digest: ")
    assert the_refusal(told(holding, claim("wrong", seq=2), 4.0)).reason == "digest"
    assert holding.num_open_claims == 0
    assert isinstance(answers(told(holding, claim("right"), 5.0))[0], Grant)
    assert freed(told(holding, release("right"), 6.0)) == [("x", "released")]


def test_a_hold_whose_only_claim_is_disowned_is_unclaimed_again(holding):
    told(holding, renew("wrong"), 50.0)
    told(holding, claim("wrong", digest=b"?" * 16), 51.0)
    assert freed(holding.handle(Tick(), 59.9)) == []
    assert freed(holding.handle(Tick(), 60.0)) == [("x", "expired")]


def test_a_disowned_claim_leaves_the_end_to_the_others(holding):
    told(holding, renew("wrong", "right"), 1.0)
    assert freed(told(holding, release("right"), 2.0)) == []
    assert freed(told(holding, claim("wrong", digest=b"?" * 16), 3.0)) == [("x", "released")]


@pytest.mark.parametrize("event", [Void("reset"), Closing("SIGTERM"), Tick()])
def test_what_a_rank_of_a_disowned_claim_was_granted_still_counts(holding, event):
    told(holding, claim("c", rank=0, num_ranks=2), 45.0)
    told(holding, claim("c", rank=1, num_ranks=2, topology_digest=b"?"), 46.0)
    assert freed(holding.handle(event, 74.9)) == []
    assert freed(holding.handle(Tick(), 75.0)) != []


def test_disowned_claims_are_remembered_up_to_a_bound(holding):
    for number in range(MAX_DISOWNED + 1):
        told(holding, claim(f"{number}", digest=b"?" * 16), 1.0)
    (answer,) = answers(told(holding, renew("0", "1", f"{MAX_DISOWNED}"), 2.0))
    assert [entry.held for entry in answer.entries] == [True, False, False]


def test_closing_drops_a_hold_whose_only_claim_is_disowned(holding):
    told(holding, renew("wrong"), 1.0)
    assert freed(holding.handle(Closing("SIGTERM"), 2.0)) == []
    assert freed(told(holding, claim("wrong", digest=b"?" * 16), 3.0)) == [("x", "voided")]


def test_an_id_used_again_is_another_transfer():
    machine = producer()
    first, second = ref(generation=1), ref(generation=2)
    machine.handle(held(first), 0.0)
    machine.handle(held(second), 1.0)
    told(machine, claim("a", ref=first), 2.0)
    told(machine, claim("b", ref=second), 2.0)
    actions = told(machine, release("a", ref=first), 3.0)
    assert [action.ref for action in of_kind(actions, FreeHold)] == [first]
    actions = told(machine, release("b", ref=second), 3.0)
    assert [action.ref for action in of_kind(actions, FreeHold)] == [second]


@pytest.mark.parametrize(
    "message",
    [
        claim(rank=2, num_ranks=2),
        claim(rank=-1),
        claim(num_ranks=1 << 30),
        release(ranks=(1,)),
        release(ranks=(-1,)),
        release(num_ranks=0),
        renew("c", num_ranks=0),
    ],
)
def test_ranks_that_make_no_sense_are_dropped(holding, message):
    actions = told(holding, message, 1.0)
    assert notes(actions) == ["bad_message"]
    assert answers(actions) == []
    assert holding.num_open_claims == 0


def test_a_claim_has_as_many_ranks_as_it_was_opened_with(holding):
    told(holding, renew("c", num_ranks=2), 1.0)
    assert the_refusal(told(holding, claim(num_ranks=1), 1.0)).reason == "topology"
    assert notes(told(holding, release(ranks=None, num_ranks=1), 1.0)) == ["bad_message"]
    assert holding.num_open_claims == 1


@pytest.mark.parametrize("message", [grant(), Hello(1, "P", "d1", 1), Renewed(1, ()), Released("c", 1)])
def test_what_is_not_for_a_producer_is_noted(holding, message):
    assert notes(told(holding, message, 1.0)) == ["unexpected_message"]


def test_claims_of_one_hold_are_bounded():
    machine = producer(Leases(max_claims=2))
    machine.handle(held(), 0.0)
    told(machine, renew("a", "b"), 1.0)
    assert the_refusal(told(machine, claim("c"), 1.0)).reason == "busy"
    assert notes(told(machine, release("c"), 1.0)) == ["unknown_release"]
    assert machine.num_open_claims == 2


def test_memory_of_ended_holds_is_bounded():
    machine = producer(Leases(max_remembered=1))
    for name in ("x", "y"):
        machine.handle(held(ref(name)), 0.0)
        told(machine, release(ref=ref(name)), 1.0)
    assert the_refusal(told(machine, claim(ref=ref("y")), 2.0)).reason == "released"
    assert told(machine, claim(ref=ref("x")), 2.0) == []  # parked, like any unknown one
    assert the_refusal(machine.handle(Tick(), 7.0)).reason == "unknown"


# Parking


def test_a_claim_that_comes_first_waits_for_its_transfer():
    machine = producer()
    assert told(machine, claim(), 0.0, route="r") == []
    assert machine.num_parked == 1
    assert machine.handle(held(), 4.0) == [Send("r", grant())]
    assert machine.num_parked == 0


def test_a_claim_for_nothing_is_unknown_after_a_while():
    machine = producer()
    told(machine, claim(), 0.0)
    told(machine, renew("c"), 1.0)
    told(machine, release("c"), 2.0)
    assert machine.next_deadline() == 5.0
    actions = machine.handle(Tick(), 5.0)
    refused, renewed, released = answers(actions)
    assert refused.reason == "unknown"
    assert not renewed.entries[0].held
    assert released == Released(claim_id="c", seq=9)
    assert notes(actions) == ["claim_refused", "renewal_refused", "unknown_release"]
    assert machine.next_deadline() is None


def test_a_newer_generation_may_still_be_coming():
    machine = producer()
    machine.handle(held(), 0.0)
    assert told(machine, claim(ref=ref(generation=2)), 1.0) == []
    refusal = the_refusal(machine.handle(Tick(), 6.0))
    assert (refusal.reason, refusal.detail) == ("generation", "claimed 2, held 1")


def test_what_is_parked_keeps_its_order():
    machine = producer()
    told(machine, claim(), 0.0)
    told(machine, release(ranks=(0,)), 0.1)
    actions = machine.handle(held(), 1.0)
    assert [type(answer) for answer in answers(actions)] == [Grant, Released]
    assert freed(actions) == [("x", "released")]


def test_parking_is_bounded():
    machine = producer(Leases(max_parked=2))
    told(machine, renew("a"), 0.0, route="r")
    told(machine, renew("b"), 0.0, route="s")
    actions = told(machine, claim(), 0.0, route="t")
    assert the_refusal(actions).reason == "busy"
    assert "parking_full" in notes(actions)
    assert answers(told(machine, renew("d"), 0.0, route="t")) == []
    assert answers(told(machine, release("d"), 0.0, route="t")) == []
    assert machine.num_parked == 2
    machine.handle(Tick(), 5.0)
    assert told(machine, claim(), 5.0, route="r") == []
    assert machine.num_parked == 1


def test_one_route_parks_no_more_than_a_quarter():
    machine = producer(Leases(max_parked=8))
    actions = told(machine, renew("a", "b", "c", "d"), 0.0, route="greedy")
    assert notes(actions) == ["parking_full"]
    assert actions[0].detail.startswith("2 entries, ")
    assert machine.num_parked == 2
    assert told(machine, claim(ref=ref("early")), 0.0, route="r") == []
    assert isinstance(answers(machine.handle(held(ref("early")), 1.0))[0], Grant)
    machine.handle(Tick(), 5.0)
    assert told(machine, renew("e", "f"), 6.0, route="greedy") == []


def test_a_message_with_many_bad_entries_gets_one_note_of_each_kind(holding):
    old = renew(*"abc", of=ref(incarnation="p0")).entries
    bad = renew(*"de", num_ranks=0).entries
    actions = told(holding, Renew(engine_id="D", incarnation="d1", seq=1, entries=old + bad), 1.0)
    assert notes(actions) == ["bad_message", "renewal_refused"]
    assert [action.detail[:20] for action in of_kind(actions, Note)] == ["2 entries, the first", "3 entries, the first"]
    assert len(answers(actions)[0].entries) == 3


# The engine's own events


def test_void_drops_what_nobody_claimed():
    machine = producer()
    for name in ("claimed", "unclaimed"):
        machine.handle(held(ref(name)), 0.0)
    told(machine, renew("c", of=ref("claimed")), 1.0)
    assert freed(machine.handle(Void("reset"), 2.0)) == [("unclaimed", "voided")]
    refusal = the_refusal(told(machine, claim(ref=ref("unclaimed")), 3.0))
    assert refusal.reason == "ended"
    assert "reset" in refusal.detail
    machine.handle(held(ref("next")), 4.0)
    assert machine.num_holds == 2


def test_closing_lets_open_claims_end_and_takes_no_new_ones():
    machine = producer()
    for name in ("claimed", "unclaimed"):
        machine.handle(held(ref(name)), 0.0)
    claimed = {"ref": ref("claimed")}
    told(machine, claim(rank=0, num_ranks=2, **claimed), 1.0)
    told(machine, claim("early", ref=ref("not yet")), 1.0)
    actions = machine.handle(Closing("SIGTERM"), 2.0)
    assert freed(actions) == [("unclaimed", "voided")]
    assert the_refusal(actions).reason == "ended"
    assert the_refusal(told(machine, claim("new", **claimed), 3.0)).reason == "ended"
    assert the_refusal(told(machine, claim("new", ref=ref("other")), 3.0)).reason == "ended"
    assert isinstance(answers(told(machine, claim(rank=1, num_ranks=2, **claimed), 3.0))[0], Grant)
    assert answers(told(machine, renew("c", num_ranks=2, of=ref("claimed")), 3.0))[0].entries[0].held
    assert freed(machine.handle(held(ref("just now")), 4.0)) == [("just now", "voided")]
    assert freed(told(machine, release(num_ranks=2, **claimed), 5.0)) == [("claimed", "released")]


@pytest.mark.parametrize("again", [held(), held(ref(incarnation="p0")), held(ref(producer="Q"))])
def test_holding_what_can_not_be_held_raises_and_changes_nothing(holding, again):
    told(holding, claim(), 1.0)
    with pytest.raises(IllegalTransition):
        holding.handle(again, 100.0)
    assert freed(holding.handle(Tick(), 100.0)) == [("x", "lapsed")]


def test_a_generation_is_held_once_in_a_life(holding):
    told(holding, release(), 1.0)
    with pytest.raises(IllegalTransition, match="held before"):
        holding.handle(held(), 2.0)


def test_figures(holding):
    holding.handle(held(ref("y")), 10.0)
    told(holding, renew("a", "b"), 11.0)
    assert (holding.num_holds, holding.num_open_claims) == (2, 2)
    assert holding.oldest_hold_age_s(12.0) == 12.0
    assert producer().oldest_hold_age_s(12.0) == 0.0
