"""Releases of the older wire format, which name no rank: each connection counts once for a transfer."""

import pytest
from builders import claim, held, notes, of_kind, producer, promised, release

from kvferry.protocol.events import FreeHold, Received
from kvferry.protocol.messages import PlainRelease

NAME = "t"


def say(machine, route, size, name=NAME, now=1.0):
    return machine.handle(Received(route, PlainRelease(transfer_id=name, consumer_tp_size=size)), now)


def freed(actions):
    return [action.outcome for action in of_kind(actions, FreeHold)]


def machine_that_holds():
    machine = producer()
    offer = held()
    machine.handle(offer, 0.0)
    return machine, offer.ref.transfer_id


def test_one_release_without_a_size_is_all():
    machine, name = machine_that_holds()
    assert freed(say(machine, "a", 1, name)) == ["released"]
    assert notes(say(machine, "a", 1, name)) == ["unknown_release"]  # it is over, and stays so


def test_fan_in_counts_connections_not_messages():
    machine, name = machine_that_holds()
    assert freed(say(machine, "a", 2, name)) == []
    assert freed(say(machine, "a", 2, name)) == []  # the same rank again
    assert freed(say(machine, "b", 2, name)) == ["released"]


def test_sizes_that_disagree_change_nothing():
    machine, name = machine_that_holds()
    say(machine, "a", 3, name)
    actions = say(machine, "b", 2, name)
    assert (freed(actions), notes(actions)) == ([], ["bad_message"])
    assert freed(say(machine, "b", 3, name)) == []
    assert freed(say(machine, "c", 3, name)) == ["released"]


def test_a_claim_of_ours_still_holds():
    machine, name = machine_that_holds()
    machine.handle(Received("ours", claim()), 0.5)
    assert freed(say(machine, "a", 1, name)) == []
    assert freed(machine.handle(Received("ours", release()), 2.0)) == ["released"]


def test_ranks_that_never_come_lapse():
    machine, name = machine_that_holds()
    say(machine, "a", 2, name)
    from kvferry.protocol.producer import Tick

    at = machine.next_deadline()
    assert freed(machine.handle(Tick(), at)) == ["lapsed"]


def test_a_routers_name_is_known_too():
    machine = producer()
    promise = promised(routers_id="tx-router")
    machine.handle(promise, 0.0)
    assert notes(say(machine, "a", 1, "another")) == ["unknown_release"]
    assert freed(say(machine, "a", 1, "tx-router")) == []  # nothing is held yet
    assert machine.num_open_claims == 0


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_knows_it(size):
    assert notes(say(producer(), "a", size)) == ["unknown_release"]
