"""A producer whose held blocks keep promised prompts waiting lets go of one that nobody has asked for."""

from builders import (
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
    renew,
)

from kvferry.protocol.events import FreeHold, Received, Relieve
from kvferry.protocol.messages import Refused

WHY = "its blocks were needed"


def hold(machine, transfer_id, now, routers_id):
    machine.handle(promised(ref(transfer_id), routers_id), now)
    machine.handle(held(ref(transfer_id)), now)
    machine.handle(Received("d", renew(f"claim on {transfer_id}", of=by_router(routers_id))), now)


def freed(actions):
    return [(action.ref.transfer_id, action.outcome) for action in of_kind(actions, FreeHold)]


def test_the_oldest_goes_first_and_one_at_a_time():
    machine = producer()
    hold(machine, "x", 0.0, "R1")
    hold(machine, "y", 1.0, "R2")
    actions = machine.handle(Relieve(WHY), 2.0)
    assert (freed(actions), notes(actions)) == ([("x", "failed")], ["hold_relieved"])
    assert freed(machine.handle(Relieve(WHY), 3.0)) == [("y", "failed")]
    assert machine.handle(Relieve(WHY), 4.0) == []


def test_what_was_asked_for_stays():
    machine = producer()
    hold(machine, "x", 0.0, "R")
    machine.handle(Received("w", open_write(landing(), ref=by_router())), 1.0)
    assert machine.handle(Relieve(WHY), 2.0) == []


def test_what_one_rank_has_come_for_stays_when_that_one_is_done():
    """Another rank of the same consumer may be on its way."""
    machine = producer()
    hold(machine, "x", 0.0, "R")
    first = landing(claim_id="claim on x", rank=0)
    machine.handle(Received("w", open_write(first, num_ranks=1, ref=by_router())), 1.0)
    machine.handle(Received("w", close_write(first)), 2.0)
    assert machine.handle(Relieve(WHY), 3.0) == []


def test_what_a_reader_waits_for_stays():
    """A router names transfers of READ as well, but its consumers take the name that the first leg answered."""
    machine = producer()
    machine.handle(promised(ref("x"), "R"), 0.0)
    machine.handle(held(ref("x")), 0.0)
    machine.handle(Received("d", renew("c", of=ref("x"))), 1.0)
    assert machine.handle(Relieve(WHY), 2.0) == []


def test_what_no_router_named_stays():
    """Its consumer takes blocks only once it can read: it waits for nobody."""
    machine = producer()
    machine.handle(held(), 0.0)
    assert machine.handle(Relieve(WHY), 1.0) == []


def test_what_is_still_computed_stays():
    machine = producer()
    machine.handle(promised(ref("x"), "R"), 0.0)
    assert machine.handle(Relieve(WHY), 1.0) == []


def test_a_consumer_that_only_waits_is_told_why():
    machine = producer()
    hold(machine, "x", 0.0, "R")
    machine.handle(Received("d", renew("c", of=by_router())), 1.0)
    assert freed(machine.handle(Relieve(WHY), 2.0)) == [("x", "failed")]
    (answer,) = (
        action.message
        for action in machine.handle(Received("w", open_write(landing(), ref=by_router())), 3.0)
        if hasattr(action, "message")
    )
    assert isinstance(answer, Refused)
    assert (answer.reason, WHY in answer.detail) == ("failed", True)


def test_what_a_refused_claim_was_granted_before_stays():
    """One rank of a claim reads under a grant, another was refused for what it wants: the grant may be trusted on."""
    machine = producer()
    hold(machine, "x", 0.0, "R")
    machine.handle(Received("w", claim("b", 0, 2, ref=by_router())), 1.0)
    machine.handle(Received("v", claim("b", 1, 2, ref=by_router(), topology_digest=b"other" * 3)), 2.0)
    assert machine.handle(Relieve(WHY), 3.0) == []
