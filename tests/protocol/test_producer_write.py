"""The producer's engine where its ranks write: promises, landings, routers' names."""

import pytest
from builders import (
    TABLES,
    answers,
    by_router,
    claim,
    close_write,
    held,
    landing,
    notes,
    of_kind,
    open_write,
    producer,
    promised,
    ref,
    release,
    renew,
    told,
)

from kvferry.protocol import landings
from kvferry.protocol.events import Dropped
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import (
    CLAIM_OVER,
    Grant,
    Refused,
    Released,
    Renewed,
    StopWrite,
    WriteClosed,
    WriteOpened,
)
from kvferry.protocol.producer import Closing, FreeHold, Send, Tick, Void
from kvferry.protocol.transitions import IllegalTransition


def outcomes(actions):
    return [action.outcome for action in of_kind(actions, FreeHold)]


def stopped(actions):
    return [message.landing for message in answers(actions) if isinstance(message, StopWrite)]


def refusal(actions):
    (refused,) = (message for message in answers(actions) if isinstance(message, Refused))
    return refused


def ticks_until(machine, end):
    """Every action of every tick up to `end`, each asked for once."""
    actions = []
    while (at := machine.next_deadline()) is not None and at <= end:
        actions += machine.handle(Tick(), at)
        again = machine.next_deadline()
        assert again is None or again > at, "it asks for the same tick again"
    return actions


@pytest.fixture
def promising():
    machine = producer()
    assert machine.handle(promised(), 0.0) == []
    return machine


@pytest.fixture
def writing():
    """What is held is being written by route "w"."""
    machine = producer()
    machine.handle(held(), 0.0)
    assert answers(told(machine, open_write(), 0.0, "w"))[0].block_ids == TABLES
    return machine


# Promises


def test_what_is_promised_may_be_written_before_it_is_held(promising):
    (opened,) = told(promising, open_write(seq=7), 1.0, "w")
    assert opened == Send("w", WriteOpened(landing(), 7, "x", ()))
    assert promising.num_open_claims == 1
    assert promising.handle(held(), 5.0) == []
    told(promising, close_write(), 6.0)
    assert outcomes(told(promising, release(), 7.0)) == ["released"]


def test_what_is_promised_can_not_be_read(promising):
    assert refusal(told(promising, claim(), 1.0)).reason == "busy"
    promising.handle(held(), 2.0)
    assert isinstance(answers(told(promising, claim(seq=2), 3.0))[0], Grant)


def test_a_promise_waits_for_its_request_however_long(promising):
    assert promising.next_deadline() is None
    told(promising, renew("c"), 1.0)
    assert outcomes(ticks_until(promising, 10_000.0)) == []
    assert promising.num_holds == 1
    assert outcomes(promising.handle(held(), 10_000.0)) == ["lapsed"]  # its only claim did, long ago


def test_its_times_count_from_when_it_is_held(promising):
    promising.handle(held(), 1000.0)
    assert promising.next_deadline() == 1060.0
    assert outcomes(promising.handle(Tick(), 1060.0)) == ["expired"]


def test_released_before_it_is_computed_it_is_free_as_soon_as_it_is_held(promising):
    told(promising, release(), 1.0)
    assert promising.num_holds == 1
    assert outcomes(promising.handle(held(), 2.0)) == ["released"]


def test_a_reset_leaves_promises_alone(promising):
    assert promising.handle(Void("reset"), 1.0) == []


def test_when_the_engine_stops_a_promise_takes_no_new_claims_and_is_not_held(promising):
    promising.handle(Closing("the engine stops"), 1.0)
    assert refusal(told(promising, open_write(), 2.0)).reason == "ended"
    assert outcomes(promising.handle(held(), 3.0)) == ["voided"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (promised(), promised()),
        (held(), promised()),
        (held(), Dropped(ref(), "aborted")),
        (promised(ref("other"), "R"), promised(routers_id="R")),
        (promised(), held(ref("x", incarnation="p0"))),
    ],
    ids=["promised twice", "held", "drops what is held", "one name twice", "another life"],
)
def test_the_own_engines_mistakes_raise_and_change_nothing(first, second):
    machine = producer()
    machine.handle(first, 0.0)
    with pytest.raises(IllegalTransition):
        machine.handle(second, 1.0)
    assert machine.num_holds == 1


def test_another_prompt_than_was_promised_is_a_mistake(promising):
    with pytest.raises(IllegalTransition, match="another prompt"):
        promising.handle(held().__class__(ref(), 99, b"d" * 16, b"b" * 16, b"t" * 16), 1.0)


# Dropped (F13)


def test_f13_a_dropped_request_is_told_and_freed_when_its_writer_has_closed(promising):
    told(promising, open_write(), 1.0, "w")
    actions = promising.handle(Dropped(ref(), "aborted: too long"), 2.0)
    assert actions == [Send("w", StopWrite(landing(), "aborted: too long"))]
    entry = answers(told(promising, renew("c"), 3.0))[-1].entries[0]
    assert (entry.held, entry.reason) == (False, "failed: aborted: too long")
    done = told(promising, close_write(), 3.5, "w")
    assert answers(done) == [WriteClosed(landing(), 3)]
    (freed,) = of_kind(done, FreeHold)
    assert (freed.outcome, freed.detail) == ("failed", "aborted: too long")


@pytest.mark.parametrize("claims", [[], [renew("c")], [renew("c"), release("c")]], ids=len)
def test_dropped_without_a_writer_it_is_freed_at_once(promising, claims):
    for message in claims:
        told(promising, message, 1.0)
    assert outcomes(promising.handle(Dropped(ref(), "aborted"), 2.0)) == ["failed"]
    refused = refusal(told(promising, open_write(landing("late")), 3.0))
    assert (refused.reason, "aborted" in refused.detail) == ("failed", True)


def test_dropped_twice_is_a_mistake(promising):
    told(promising, open_write(), 1.0)
    promising.handle(Dropped(ref(), "aborted"), 2.0)
    for event in (Dropped(ref(), "again"), held()):
        with pytest.raises(IllegalTransition):
            promising.handle(event, 3.0)


# Landings


def test_a_hold_waits_for_its_writers_when_its_claims_are_over(writing):
    told(writing, open_write(landing(producer_rank=1), seq=2), 0.0, "w1")
    assert outcomes(told(writing, release(), 1.0)) == []
    assert outcomes(told(writing, close_write(landing(producer_rank=1)), 2.0)) == []
    assert outcomes(told(writing, close_write(), 3.0)) == ["released"]
    assert writing.next_deadline() is None or writing.handle(Tick(), writing.next_deadline()) == []


def test_a_lapsed_claims_writer_is_told_to_stop_until_it_has_closed(writing):
    assert stopped(writing.handle(Tick(), 29.9)) == []
    actions = ticks_until(writing, 40.0)
    assert stopped(actions) == [landing()] * 6  # at 30, 32, ... 40
    assert outcomes(actions) == []
    assert outcomes(told(writing, close_write(), 41.0)) == ["lapsed"]
    assert ticks_until(writing, 100.0) == []


def test_it_is_told_where_it_asked_last(writing):
    told(writing, open_write(seq=2), 1.0, "w again")
    (stop,) = of_kind(told(writing, release(outcome="failed", reason="aborted"), 2.0), Send)[:1]
    assert (stop.to, stop.message.reason) == ("w again", "released: aborted")


def test_one_claims_end_stops_its_own_writers_only(writing):
    told(writing, open_write(landing("d")), 1.0, "w")
    assert stopped(told(writing, release("c", outcome="unused"), 2.0)) == [landing("c")]
    told(writing, renew("d"), 20.0)
    assert set(stopped(ticks_until(writing, 29.0))) == {landing("c")}


def test_one_ranks_release_stops_what_is_written_for_that_rank_only():
    machine = producer()
    machine.handle(held(), 0.0)
    for rank in range(2):
        told(machine, open_write(landing(rank=rank), num_ranks=2), 0.0, "w")
    assert stopped(told(machine, release(ranks=(1,), num_ranks=2, outcome="failed"), 1.0)) == [landing(rank=1)]


def test_writers_of_a_load_that_is_done_are_left_to_close_by_themselves():
    machine = producer()
    machine.handle(held(), 0.0)
    told(machine, renew("other"), 0.0)
    told(machine, open_write(), 0.0, "w")
    assert stopped(told(machine, release(), 1.0)) == []
    assert stopped(ticks_until(machine, 3.0)) == [landing()]


@pytest.mark.parametrize("where", ["held", "promised", "not known yet"])
def test_what_was_closed_is_never_opened_again(where):
    machine = producer()
    events = {"held": held(), "promised": promised()}
    if where in events:
        machine.handle(events[where], 0.0)
    told(machine, close_write(), 1.0)  # a cancel that overtook its order
    actions = told(machine, open_write(), 2.0)
    assert refusal(actions).reason == "ended"
    if where == "not known yet":
        machine.handle(held(), 3.0)
    assert refusal(told(machine, open_write(seq=2), 4.0)).reason == "ended"
    assert isinstance(answers(told(machine, open_write(landing(load_id="m")), 5.0))[0], WriteOpened)


def test_a_parked_write_that_was_closed_meanwhile_is_not_opened():
    machine = producer()
    assert told(machine, open_write(), 0.0) == []
    told(machine, close_write(), 1.0)
    assert refusal(machine.handle(held(), 2.0)).reason == "ended"


def test_closing_is_answered_whatever_it_is():
    machine = producer()
    assert answers(told(machine, close_write(seq=9), 0.0)) == [WriteClosed(landing(), 9)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": b"\x01" * 16}, "digest"),
        ({"num_tokens": 99}, "digest"),
        ({"topology_digest": b""}, "topology"),
        ({"ref": ref(incarnation="p0")}, "incarnation"),
        ({"ref": ref(generation=0)}, "generation"),
    ],
)
def test_a_mismatch_is_refused_and_ends_nothing(writing, changes, reason):
    assert refusal(told(writing, open_write(landing("wrong"), **changes), 1.0)).reason == reason
    assert writing.num_open_claims == 1
    assert isinstance(answers(told(writing, open_write(landing("right")), 2.0))[0], WriteOpened)


@pytest.mark.parametrize(("rank", "num_ranks"), [(1, 1), (0, 0), (7, 3), (0, 1 << 20)])
def test_ranks_that_make_no_sense_are_refused_so_that_the_writer_does_not_ask_for_ever(rank, num_ranks):
    machine = producer()
    machine.handle(held(), 0.0)
    actions = told(machine, open_write(landing(rank=rank), num_ranks=num_ranks), 1.0)
    assert refusal(actions).reason == "topology"
    assert machine.num_open_claims == 0


def test_a_disowned_claims_writer_is_stopped_and_waited_for(writing):
    actions = told(writing, claim(digest=b"\x01" * 16), 1.0)
    assert stopped(actions) == [landing()]
    assert writing.num_open_claims == 0
    assert outcomes(ticks_until(writing, 61.0)) == []
    assert outcomes(told(writing, close_write(), 62.0)) == ["expired"]


def test_who_has_released_is_not_written_for(writing):
    told(writing, renew("other"), 0.0)
    told(writing, release(), 1.0)
    assert refusal(told(writing, open_write(landing(load_id="m")), 2.0)).reason == "released"


def test_a_hold_that_only_its_writer_keeps_takes_no_claims_after_its_longest_time():
    machine = producer(Leases(longest_hold_s=70.0))
    machine.handle(held(), 0.0)
    told(machine, open_write(), 0.0)
    for at in (25.0, 50.0):
        told(machine, renew("c"), at)
    assert outcomes(ticks_until(machine, 80.0)) == []
    assert refusal(told(machine, claim("late"), 80.0)).reason == "lapsed"
    assert refusal(told(machine, open_write(landing("late")), 80.0)).reason == "lapsed"
    (renewed,) = [answer for answer in answers(told(machine, renew("late"), 80.0)) if isinstance(answer, Renewed)]
    assert not renewed.entries[0].held
    assert outcomes(told(machine, close_write(), 81.0)) == ["lapsed"]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(landings, "MAX_CLOSED", 2)
    machine = producer()
    machine.handle(promised(), 0.0)
    told(machine, renew("c"), 0.0)
    for number in range(10):
        told(machine, close_write(landing(load_id=f"l{number}")), 1.0)
        told(machine, close_write(landing("foreign", f"l{number}")), 1.0)
    assert len(machine._closed) == 2
    (hold,) = machine._all_holds()
    assert len(hold.landings._closed) == 2
    assert refusal(told(machine, open_write(landing(load_id="l9")), 2.0)).reason == "ended"


def test_what_was_released_before_there_was_room_for_it_is_not_let_in_when_there_is():
    machine = producer(Leases(max_claims=1))
    machine.handle(held(), 0.0)
    told(machine, renew("other"), 0.0)
    assert refusal(told(machine, open_write(), 1.0)).reason == "busy"
    assert notes(told(machine, release(), 2.0)) == ["unknown_release"]
    told(machine, claim("other", digest=b"\x01" * 16), 3.0)  # disowned: there is room again
    assert refusal(told(machine, open_write(), 4.0)).reason == "released"
    assert isinstance(answers(told(machine, open_write(landing("new")), 5.0))[0], WriteOpened)


# Routers' names


def test_by_the_routers_name_it_is_found():
    machine = producer()
    machine.handle(promised(routers_id="R"), 0.0)
    assert machine.knows_routers_id("R")
    (opened,) = answers(told(machine, open_write(ref=by_router()), 1.0))
    assert opened.transfer_id == "x"
    (renewed,) = answers(told(machine, renew("c", of=by_router()), 2.0))
    assert renewed.entries[0].held
    told(machine, close_write(), 3.0)
    machine.handle(held(), 4.0)
    assert outcomes(told(machine, release(ref=by_router()), 5.0)) == ["released"]


def test_what_comes_before_the_promise_waits_for_it_and_is_answered_in_order():
    machine = producer()
    for message in (renew("c", of=by_router()), open_write(ref=by_router()), release("d", ref=by_router())):
        assert told(machine, message, 0.0) == []
    machine.handle(Tick(), 29.0)
    kinds = [type(message) for message in answers(machine.handle(promised(routers_id="R"), 29.5))]
    assert kinds == [Renewed, WriteOpened, Released]
    assert machine.num_parked == 0


def test_a_name_that_nobody_brings_is_unknown_after_a_lease():
    machine = producer()
    told(machine, open_write(ref=by_router()), 0.0)
    assert answers(machine.handle(Tick(), 29.9)) == []
    refused = refusal(machine.handle(Tick(), 30.0))
    assert (refused.reason, "30.0 s" in refused.detail) == ("unknown", True)


def test_a_question_that_is_repeated_is_parked_once():
    machine = producer(Leases(max_parked=8))
    for _ in range(10):
        assert told(machine, open_write(ref=by_router()), 0.0, "w") == []
    assert machine.num_parked == 1
    assert told(machine, open_write(ref=by_router()), 0.0, "another") == []
    assert machine.num_parked == 2


def test_a_name_stays_its_transfers_for_as_long_as_that_is_remembered():
    machine = producer(Leases(max_remembered=1))
    machine.handle(promised(routers_id="R"), 0.0)
    machine.handle(Dropped(ref(), "aborted"), 1.0)
    with pytest.raises(IllegalTransition):
        machine.handle(promised(ref("y"), "R"), 2.0)
    assert refusal(told(machine, open_write(ref=by_router()), 2.0)).reason == "failed"
    machine.handle(promised(ref("y"), "S"), 3.0)
    machine.handle(Dropped(ref("y"), "aborted"), 4.0)
    assert not machine.knows_routers_id("R")  # only one is remembered
    machine.handle(promised(ref("z"), "R"), 5.0)
    assert isinstance(answers(told(machine, open_write(ref=by_router()), 6.0))[0], WriteOpened)


def test_released_by_name_is_over_by_name():
    machine = producer()
    machine.handle(promised(routers_id="R"), 0.0)
    machine.handle(held(), 1.0)
    told(machine, release(ref=by_router()), 2.0)
    (renewed,) = answers(told(machine, renew("c", of=by_router()), 3.0))
    assert renewed.entries[0].reason == CLAIM_OVER
    assert notes(told(machine, release("late", ref=by_router()), 3.0)) == ["stale_release"]
