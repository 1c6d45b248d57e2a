#!/usr/bin/env python3
"""Runs the protocol's simulator over many seeds, or replays one.

scripts/sim.py --schedules 100000 --jobs 2
scripts/sim.py --seed 4711 --trace
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sim"))

from kvsim.scenario import draw
from kvsim.simulate import Result, run, run_seed, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the protocol's simulator.")
    parser.add_argument("--schedules", type=int, default=100_000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to use")
    parser.add_argument("--seed", type=int, help="run only this one, made smaller if it breaks a rule")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event and action")
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed, options.trace)
    return sweep(range(options.first, options.first + options.schedules), options.jobs)


def replay(seed: int, trace: bool) -> int:
    scenario = draw(seed)
    if run(scenario).violation:
        scenario = shrink(scenario)
    print(scenario)
    result = run(scenario, trace)
    for line in result.trace:
        print(line)
    print(result.violation or "every rule held")
    return 1 if result.violation else 0


def sweep(seeds: range, jobs: int) -> int:
    started = time.monotonic()
    total = Result(-1)
    broken: list[Result] = []
    with multiprocessing.Pool(jobs) as pool:
        for result in pool.imap_unordered(run_seed, seeds, chunksize=50):
            total.add(result)
            if result.violation:
                broken.append(result)
                print(f"seed {result.seed}: {result.violation}", flush=True)
    print(f"{len(seeds)} schedules, {total.num_events} events, {time.monotonic() - started:.0f} s")
    for name, counts in (("requests", total.ends), ("holds", total.outcomes), ("refusals", total.refusals)):
        print(f"{name}: {_table(counts)}")
    print(
        f"{len(broken)} broke a rule" + (f"; replay: scripts/sim.py --seed {broken[0].seed} --trace" if broken else "")
    )
    return 1 if broken else 0


def _table(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
