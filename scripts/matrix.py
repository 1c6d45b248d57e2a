#!/usr/bin/env python3
"""Runs every combination of the matrix in two processes and writes docs/matrix.md.

scripts/matrix.py
scripts/matrix.py --only "states: "
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "matrix"))

from kvmatrix import document
from kvmatrix.combination import Combination
from kvmatrix.combinations import COMBINATIONS
from kvmatrix.driver import Outcome, Pair


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the matrix and write docs/matrix.md.")
    parser.add_argument("--only", metavar="TEXT", help="run the combinations with this in their name; write nothing")
    options = parser.parse_args()
    if options.only is not None:
        chosen = [one for one in COMBINATIONS if options.only in one.name]
        outcomes = run(chosen, verbose=True)
        return 0 if chosen and not failures(outcomes) else 1
    started = time.monotonic()
    outcomes = run(COMBINATIONS, verbose=False)
    wrong = failures(outcomes)
    print(f"{len(outcomes)} combinations, {len(wrong)} came out wrong, {time.monotonic() - started:.0f} s")
    if wrong:
        return 1
    document.PATH.write_text(document.write(outcomes))
    print(f"wrote {document.PATH}")
    return 0


def run(combinations: Sequence[Combination], verbose: bool) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    with Pair() as pair:
        for index, combination in enumerate(combinations, 1):
            outcome = outcomes[combination.name] = pair.run(combination)
            if outcome.wrong:
                print(f"{combination.name}: WRONG: {outcome.wrong}", flush=True)
            elif verbose:
                print(f"{combination.name}: {document.told(outcome)}", flush=True)
            elif index % 50 == 0:
                print(f"{index} of {len(combinations)}", flush=True)
    return outcomes


def failures(outcomes: dict[str, Outcome]) -> list[str]:
    return [name for name, outcome in outcomes.items() if outcome.wrong]


if __name__ == "__main__":
    sys.exit(main())
