"""Cases from public reports of what went wrong in connectors, each with its right value."""

import itertools

import pytest
from builders import answers, claim, held, notes, of_kind, producer, ref, release, renew, told
from pair import Pair

from kvferry.protocol.loader import ReadsDone, Report
from kvferry.protocol.messages import Claim, Grant, Refused, Release, Released, Renew, Renewed
from kvferry.protocol.producer import FreeHold, Tick, Void


def outcomes(pair):
    return [freed.outcome for freed in pair.freed]


def finish(pair, load_id="c"):
    for loader in pair.loaders:
        pair.feed(loader, ReadsDone(load_id))


def test_c1_the_transfers_name_frees_and_the_consumers_own_name_does_not():
    machine = producer()
    machine.handle(held(ref("X")), 0.0)
    told(machine, release(ref=ref("cmpl-U-0-bbbb")), 1.0)
    actions = machine.handle(Tick(), 6.0)
    assert notes(actions) == ["unknown_release"]
    assert of_kind(actions, FreeHold) == []
    assert [freed.ref for freed in of_kind(told(machine, release(ref=ref("X")), 7.0), FreeHold)] == [ref("X")]


@pytest.mark.parametrize("copies", [3, 8])
def test_c2_several_users_of_one_transfer_free_it_after_the_last(copies):
    pair = Pair(num_ranks=2)
    pair.hold()
    names = [f"c{copy}" for copy in range(copies)]
    for name in names:
        pair.arrive(name)
    for name in names:
        assert pair.freed == []
        pair.start(name)
        finish(pair, name)
        pair.over(name)
    assert outcomes(pair) == ["released"]
    assert [report.ok for report in pair.reports] == [True] * copies * 2
    assert pair.lost == []


def test_c3_a_duplicate_release_never_stands_for_another_rank():
    machine = producer()
    machine.handle(held(), 0.0)
    told(machine, claim(rank=0, num_ranks=2), 1.0)
    for ranks, freed in (((0,), 0), ((0,), 0), ((1,), 1), ((1,), 0)):
        actions = told(machine, release(ranks=ranks, num_ranks=2), 2.0)
        assert len(of_kind(actions, FreeHold)) == freed
        assert answers(actions) == [Released(claim_id="c", seq=9)]


def _c5_orders():
    """Every order in which what two ranks, their engine and the ledger send can come, with one message twice.

    630 orders (7! over the three pairs that keep their order), each with 24 places of the repeated message.
    """
    ledger = [held()]
    engine = [renew("c", num_ranks=2), release(num_ranks=2)]
    ranks = [[claim(rank=rank, num_ranks=2), release(ranks=(rank,), num_ranks=2)] for rank in range(2)]
    lines = [ledger, engine, *ranks]
    sources = [index for index, line in enumerate(lines) for _ in line]
    for order in sorted(set(itertools.permutations(sources))):
        waiting = [list(line) for line in lines]
        events = [waiting[index].pop(0) for index in order]
        for first, event in enumerate(events):
            if event is ledger[0]:
                continue
            for second in range(first + 1, len(events) + 1):
                yield [*events[:second], event, *events[second:]]


def test_c5_every_order_with_one_duplicate_frees_once():
    num_orders = 0
    for order in _c5_orders():
        machine, freed = producer(), []
        for step, event in enumerate(order):
            now = step * 0.01
            actions = machine.handle(event, now) if event == held() else told(machine, event, now)
            freed += of_kind(actions, FreeHold)
        assert [each.outcome for each in freed] == ["released"], order
        assert (machine.num_holds, machine.num_parked, machine.num_open_claims) == (0, 0, 0), order
        num_orders += 1
    assert num_orders == 630 * 24


def test_c8_a_transfer_of_nothing_still_releases():
    pair = Pair(num_ranks=2)
    pair.hold()
    pair.arrive()
    pair.over(outcome="unused", reason="all blocks are here already")
    assert outcomes(pair) == ["released"]
    assert [type(message) for message in pair.sent] == [Renew, Renewed, Release, Released]


def test_c8_aborted_before_its_renewal_came():
    pair = Pair()
    pair.hold()
    pair.keeps = lambda message: not isinstance(message, Renew)
    pair.arrive()
    pair.over(outcome="unused", reason="aborted")
    assert outcomes(pair) == ["released"]


def test_c8_an_empty_share_of_one_rank():
    pair = Pair(num_ranks=2)
    pair.hold()
    pair.arrive()
    pair.start()
    pair.feed(pair.loaders[1], ReadsDone("c"))  # nothing to read: done as soon as posted
    assert pair.freed == []
    pair.feed(pair.loaders[0], ReadsDone("c"))
    assert outcomes(pair) == ["released"]
    assert [message.ranks for message in pair.sent if isinstance(message, Release)] == [(1,), (0,)]


def test_c11_a_request_that_waits_longer_than_a_lease_is_still_good():
    pair = Pair()
    pair.hold()
    pair.arrive()
    pair.until(45.0)
    pair.start()
    finish(pair)
    assert [report.ok for report in pair.reports] == [True]


def test_c11_without_renewals_the_hold_lapses():
    pair = Pair()
    pair.hold()
    pair.arrive()
    pair.until(10.0)
    pair.keeps = lambda message: not isinstance(message, Renew)
    pair.until(39.9)
    assert pair.freed == []
    pair.until(40.0)
    assert outcomes(pair) == ["lapsed"]


def test_c11_a_read_that_ends_after_the_hold_lapsed_is_rejected():
    pair = Pair()
    pair.hold()
    pair.arrive()
    pair.keeps = lambda message: not isinstance(message, Renew)
    pair.until(5.0)
    pair.start()  # granted until 35
    pair.until(36.0)
    assert outcomes(pair) == ["lapsed"]
    assert pair.reports == []
    finish(pair)
    (report,) = pair.reports
    assert (report.ok, report.quiet) == (False, True)
    assert report.reason.startswith("lapsed: ")


def test_c11_a_long_read_under_renewal_is_good():
    pair = Pair()
    pair.hold()
    pair.arrive()
    pair.start()
    pair.until(50.0)
    finish(pair)
    assert [report.ok for report in pair.reports] == [True]


@pytest.mark.parametrize("lost", [Renew, Renewed, Claim, Grant, Release, Released])
@pytest.mark.parametrize("which", [1, 2])
def test_f5_one_lost_message_of_each_kind_is_made_up_for(lost, which):
    pair, seen = Pair(num_ranks=2), []

    def keeps(message):
        seen.extend([message] if isinstance(message, lost) else [])
        return not isinstance(message, lost) or len(seen) != which

    pair.keeps = keeps
    pair.hold()
    pair.arrive()
    pair.start()
    finish(pair)
    pair.until(10.0)
    pair.over()
    pair.until(20.0)
    assert [report.ok for report in pair.reports] == [True, True]
    assert outcomes(pair) == ["released"]
    assert (pair.engine.num_claims, [loader.num_loads for loader in pair.loaders]) == (0, [0, 0])


def test_f5_a_producer_that_answers_nothing_ends_the_load_in_time():
    pair = Pair()
    pair.hold()
    pair.keeps = lambda message: not isinstance(message, Grant | Renewed | Released)
    pair.arrive()
    pair.start()
    finish(pair)
    pair.until(60.0)
    assert pair.reports == [Report("c", False, "deadline: proving after 60.0 s", quiet=True)]
    pair.over(outcome="failed", reason="deadline")
    pair.until(100.0)
    assert pair.engine.num_claims == 0


def _read_with(pair, of):
    pair.arrive("late", of)
    pair.start("late", of)
    finish(pair, "late")
    return pair.reports[-1]


def test_f11_a_consumed_reference_is_refused():
    pair = Pair()
    pair.hold()
    pair.arrive()
    pair.over(outcome="unused")
    report = _read_with(pair, ref())
    assert not report.ok
    assert report.reason.startswith("released: ")
    assert [lost.claim_id for lost in pair.lost] == ["late"]


def test_f11_a_stale_reference_never_gets_another_prompts_bytes():
    pair = Pair()
    pair.hold(ref(generation=1))
    pair.arrive()
    pair.over(outcome="unused")
    pair.hold(ref(generation=2))
    assert not _read_with(pair, ref(generation=1)).ok
    assert not pair.freed[1:]


def test_f11_an_older_generation_that_is_forgotten_is_still_another_one():
    pair = Pair()
    pair.hold(ref(generation=7))
    report = _read_with(pair, ref(generation=6))
    assert report.reason == "generation: claimed 6, held 7"


def test_f11_an_unknown_transfer_is_refused_after_parking():
    pair = Pair()
    assert pair.reports == []
    pair.arrive()
    pair.start()
    finish(pair)
    pair.until(4.9)
    assert pair.reports == []
    pair.until(5.0)
    (report,) = pair.reports
    assert (report.ok, report.reason.split(":")[0]) == (False, "unknown")


def test_f13_a_hold_that_ended_is_told_with_the_next_renewal():
    pair = Pair()
    pair.keeps = lambda message: not isinstance(message, Renew)
    pair.hold()
    pair.arrive()
    pair.feed(pair.producer, Void("the prefix cache is reset"))
    assert outcomes(pair) == ["voided"]
    pair.keeps = lambda message: True
    pair.until(5.0)
    (lost,) = pair.lost
    assert "the prefix cache is reset" in lost.reason


def test_a_refused_claim_fails_the_rank_and_the_others_release():
    pair = Pair(num_ranks=2)
    pair.hold()
    pair.arrive()
    pair.keeps = lambda message: not (isinstance(message, Grant) and message.rank == 1)
    pair.start()
    pair.feed(pair.loaders[0], ReadsDone("c"))
    wrong = Refused(claim_id="c", rank=1, seq=1, reason="digest", detail="")
    told(pair.loaders[1], wrong, 1.0)
    pair.over(outcome="failed", reason="rank 1: digest")
    assert outcomes(pair) == ["released"]
    assert "consumer_failed" in pair.notes
