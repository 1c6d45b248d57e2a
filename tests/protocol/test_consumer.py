import pytest
from builders import ADDRESS, answers, grant, notes, of_kind, ref, told

from kvferry.protocol.consumer import Arrived, ClaimLost, ConsumerEngine, Over, PeerLost, Send, Tick
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import CLAIM_OVER, Release, Released, Renew, Renewed, RenewedEntry
from kvferry.protocol.transitions import IllegalTransition


@pytest.fixture
def engine():
    return ConsumerEngine("D", "d1", Leases())


def arrive(engine, claim_id="c", at=0.0, address=ADDRESS):
    return engine.handle(Arrived(claim_id, ref(), address, 2), at)


def renewed(claim_id="c", held=False, reason="lapsed: why"):
    return Renewed(seq=1, entries=(RenewedEntry(claim_id, held, reason, 0.0),))


def renewals(actions):
    return [
        (action.to, [entry.claim_id for entry in action.message.entries])
        for action in of_kind(actions, Send)
        if isinstance(action.message, Renew)
    ]


def releases(actions):
    return [message for message in answers(actions) if isinstance(message, Release)]


def test_a_claim_is_opened_when_its_request_arrives(engine):
    (action,) = arrive(engine)
    assert action.to == ADDRESS
    assert (action.message.engine_id, action.message.incarnation) == ("D", "d1")
    (entry,) = action.message.entries
    assert (entry.ref, entry.claim_id, entry.num_ranks) == (ref(), "c", 2)


def test_many_claims_are_renewed_in_several_messages(engine):
    names = [f"{number}" for number in range(1025)]
    for name in names:
        arrive(engine, name)
    assert renewals(engine.handle(Tick(), 5.0)) == [(ADDRESS, names[:1024]), (ADDRESS, names[1024:])]


def test_one_renewal_per_peer(engine):
    arrive(engine, "a", 0.0)
    arrive(engine, "b", 1.0)
    arrive(engine, "other", 1.0, "tcp://other:1")
    assert engine.next_deadline() == 5.0
    assert engine.handle(Tick(), 4.9) == []
    assert renewals(engine.handle(Tick(), 5.0)) == [(ADDRESS, ["a", "b"])]
    assert renewals(engine.handle(Tick(), 6.0)) == [("tcp://other:1", ["other"])]
    assert renewals(engine.handle(Tick(), 60.0)) == [(ADDRESS, ["a", "b"]), ("tcp://other:1", ["other"])]


def test_over_releases_for_the_whole_engine_until_answered(engine):
    arrive(engine)
    (first,) = releases(engine.handle(Over("c", "failed", "a read failed"), 3.0))
    assert (first.ref, first.claim_id, first.ranks, first.num_ranks) == (ref(), "c", None, 2)
    assert (first.outcome, first.reason) == ("failed", "a read failed")
    assert engine.num_open == 0
    (second,) = releases(engine.handle(Tick(), 5.0))
    assert second.seq > first.seq
    assert told(engine, Released("c", second.seq), 5.1) == []
    assert engine.num_claims == 0
    engine.handle(Tick(), 7.0)
    assert engine.next_deadline() is None


def test_a_release_that_nobody_answers_ends(engine):
    arrive(engine)
    sent = len(releases(engine.handle(Over("c", "done", ""), 0.0)))
    while (at := engine.next_deadline()) is not None:
        actions = engine.handle(Tick(), at)
        sent += len(releases(actions))
    assert sent == 5
    assert notes(actions) == ["release_unanswered"]
    assert engine.num_claims == 0


def test_a_claim_is_lost_once(engine):
    arrive(engine)
    assert told(engine, renewed(), 1.0) == [ClaimLost("c", "lapsed: why")]
    assert told(engine, renewed(), 2.0) == []
    assert renewals(engine.handle(Tick(), 5.0)) == []
    assert len(releases(engine.handle(Over("c", "failed", "lost"), 6.0))) == 1


@pytest.mark.parametrize("answer", [renewed(held=True, reason=""), renewed(reason=CLAIM_OVER), renewed("stranger")])
def test_what_is_no_loss(engine, answer):
    arrive(engine)
    assert told(engine, answer, 1.0) == []
    assert renewals(engine.handle(Tick(), 5.0)) == [(ADDRESS, ["c"])]


def test_a_claim_being_released_is_not_lost(engine):
    arrive(engine)
    engine.handle(Over("c", "done", ""), 1.0)
    assert told(engine, renewed(), 2.0) == []


def test_a_lost_peer_loses_its_claims_and_no_others(engine):
    arrive(engine, "a")
    arrive(engine, "b")
    arrive(engine, "other", address="tcp://other:1")
    actions = engine.handle(PeerLost(ADDRESS, "gone"), 1.0)
    assert actions == [ClaimLost("a", "gone"), ClaimLost("b", "gone")]
    assert engine.handle(PeerLost(ADDRESS, "gone"), 1.0) == []
    assert renewals(engine.handle(Tick(), 5.0)) == [("tcp://other:1", ["other"])]


def test_what_is_not_for_an_engine_is_noted(engine):
    assert notes(told(engine, grant(), 1.0)) == ["unexpected_message"]


def test_a_release_that_was_not_asked_for_changes_nothing(engine):
    arrive(engine)
    told(engine, Released("c", 1), 1.0)
    told(engine, Released("stranger", 1), 1.0)
    assert renewals(engine.handle(Tick(), 5.0)) == [(ADDRESS, ["c"])]


def test_the_own_engines_mistakes_raise_and_change_nothing(engine):
    arrive(engine)
    with pytest.raises(IllegalTransition, match="arrives twice"):
        arrive(engine)
    with pytest.raises(IllegalTransition, match="never arrived"):
        engine.handle(Over("stranger", "done", ""), 1.0)
    engine.handle(Over("c", "done", ""), 1.0)
    with pytest.raises(IllegalTransition, match="'over' while 'releasing'"):
        engine.handle(Over("c", "failed", ""), 1.0)
    (again,) = releases(engine.handle(Tick(), 3.0))
    assert again.outcome == "done"
