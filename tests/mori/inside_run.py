"""Runs pytest in MoRI's environment, in a process of its own, and hands the results of its tests on.

The libraries that stand in for the hardware must be found before an interpreter starts, so such tests can't run in the
process that was started for all. A run is made once for all processes of a distributed run, and then read by each.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from mori_env import environment

ROOT = Path(__file__).parents[2]
KITS_VARIABLE = "KVFERRY_TEST_KITS"
TAIL_CHARACTERS = 6000


class Result(NamedTuple):
    """One test of the inner run: its name with its parameters, and why it failed, or nothing."""

    name: str
    failure: str


def cases(path: Path) -> list[str]:
    """The names of a module's test functions, without importing it."""
    functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


def results(path: Path, label: str, scratch: Path) -> dict[str, list[Result]]:
    """All results of a module in MoRI's environment, by function. label: of the kit, or a name for the run.

    scratch: a directory that is the run's alone, and the same in all its processes.
    """
    kept = scratch / f"mori-{path.stem}-{label}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_file():
            kept.write_text(json.dumps(_run(path, label, kept.with_suffix(".xml"))))
    found: dict[str, list[Result]] = {}
    for name, failure in json.loads(kept.read_text()):
        found.setdefault(name.partition("[")[0], []).append(Result(name, failure))
    return found


def check(case: str, found: dict[str, list[Result]]) -> None:
    """Fails with the texts of what has failed there."""
    assert case in found, f"{case} was not run"
    failures = [f"{result.name}\n{result.failure}" for result in found[case] if result.failure]
    assert not failures, "\n\n".join(failures)


def _run(path: Path, label: str, report: Path) -> list[Result]:
    command = [sys.executable, "-m", "pytest", str(path.relative_to(ROOT)), "-p", "no:xdist", f"--junitxml={report}"]
    command += ["-o", "junit_logging=all", "-o", f"cache_dir={report.with_suffix('.cache')}"]
    variables = {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**variables, KITS_VARIABLE: label}, capture_output=True, text=True, errors="replace"
    )
    read = _read(report) if report.is_file() else []
    if done.returncode not in (0, 1) or not read:
        # It crashed, or could not begin: then no case has passed.
        text = f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-TAIL_CHARACTERS:]}"
        return [Result(case, text) for case in cases(path)]
    return read


def _read(report: Path) -> list[Result]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        text = "\n".join(f"{child.tag}: {child.get('message')}\n{child.text or ''}" for child in bad)
        if text:
            text += "".join(f"\n{child.tag}:\n{child.text}" for child in case if child.tag in ("system-err",))
        found.append(Result(case.get("name", ""), text))
    return found


def scratch_of(base: Path) -> Path:
    """From pytest's directory for this process: the parent is shared by the processes of a distributed run."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
