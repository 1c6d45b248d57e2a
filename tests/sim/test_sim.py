"""A slice of the simulator's schedules, and the proof that it finds what it is there to find."""

from typing import get_args

import pytest
from kvsim.planted import PLANTED
from kvsim.scenario import draw
from kvsim.simulate import Result, run, run_seed, shrink

from kvferry.protocol.messages import RefusedReason

SCHEDULES = 2500
PLANTED_SCHEDULES = 1500


def test_every_rule_holds_in_every_schedule(capsys):
    total = Result(-1)
    broken = []
    for seed in range(SCHEDULES):
        result = run_seed(seed)
        total.add(result)
        if result.violation:
            broken.append(f"seed {seed}: {result.violation}")
    with capsys.disabled():
        print(f"\n{SCHEDULES} schedules, {total.num_events} events, requests: {dict(total.ends)}")
    assert not broken, "\n".join([*broken[:10], "replay: scripts/sim.py --seed N --trace"])
    # Every end of a hold and every refusal that the protocol knows has happened, and not only refusals.
    assert set(total.outcomes) == {"released", "lapsed", "expired", "voided"}
    assert set(total.refusals) == set(get_args(RefusedReason)) - {"version"}  # which only a handshake is refused for
    assert total.ends["accepted"] > SCHEDULES / 2


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant):
    with plant():
        found = next((seed for seed in range(PLANTED_SCHEDULES) if run_seed(seed).violation), None)
    assert found is not None, f"no schedule below {PLANTED_SCHEDULES} notices it: {plant.__doc__}"


def test_a_seed_replays():
    first, second = run_seed(0, trace=True), run_seed(0, trace=True)
    assert first.trace == second.trace
    assert len(first.trace) > 50


def test_a_failing_schedule_is_made_smaller():
    any_rank_frees = PLANTED[0]
    with any_rank_frees():
        seed = next(seed for seed in range(100) if _size(draw(seed)) > 5 and run_seed(seed).violation)
        small = shrink(draw(seed))
        assert run(small).violation
    assert _size(small) < _size(draw(seed))
    assert run(small).violation == ""


def _size(scenario):
    return len(scenario.faults) + sum(1 + len(transfer.seconds) for transfer in scenario.transfers)
