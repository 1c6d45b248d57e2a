"""A slice of the simulator's schedules, and the proof that it finds what it is there to find."""

import re
from typing import get_args

import pytest
from kvsim.planted import READS, any_rank_frees
from kvsim.planted_writes import CROWDED, WRITES
from kvsim.scenario import draw
from kvsim.simulate import Result, run, run_seed, shrink

from kvferry.protocol.events import FreeOutcome
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
    assert set(total.outcomes) == set(get_args(FreeOutcome))
    assert set(total.refusals) == set(get_args(RefusedReason)) - {"version"}  # which only a handshake is refused for
    assert total.ends["read accepted"] > SCHEDULES / 3
    assert total.ends["written accepted"] > SCHEDULES / 3
    assert total.num_stuck < SCHEDULES / 20


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        *((plant, "") for plant in READS),
        *((plant, "race") for plant in WRITES),
        *((plant, "crowd") for plant in CROWDED),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_is_found(plant, kind):
    with plant():
        violations = (run(draw(seed, kind)).violation for seed in range(PLANTED_SCHEDULES))
        found = next((violation for violation in violations if violation), "")
    assert found, f"no schedule below {PLANTED_SCHEDULES} notices it: {plant.__doc__}"
    assert not re.search("TypeError|AttributeError", found), f"the bug itself is broken: {found}"


def test_a_seed_replays():
    first, second = run_seed(0, trace=True), run_seed(0, trace=True)
    assert first.trace == second.trace
    assert len(first.trace) > 50


def test_a_failing_schedule_is_made_smaller():
    with any_rank_frees():
        seed = next(seed for seed in range(100) if _size(draw(seed)) > 5 and run_seed(seed).violation)
        small = shrink(draw(seed))
        assert run(small).violation
    assert _size(small) < _size(draw(seed))
    assert run(small).violation == ""


def _size(scenario):
    return len(scenario.faults) + sum(1 + len(transfer.seconds) for transfer in scenario.transfers)
