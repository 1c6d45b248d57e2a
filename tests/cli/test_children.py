"""Children are stopped with all that they started, whatever they do, and whatever happens to us. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from waiting import wait_until

from kvferry.cli import proc
from kvferry.cli.children import Child, Children

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
# One grandchild in the child's session, one in a session of its own.
HAS_GRANDCHILDREN = f"""
import subprocess, sys
for alone in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=alone)
{SLEEPS}
"""
# Leaves a segment without a tracker that would unlink it.
HAS_SEGMENT = f"""
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 4096)
mapped = mmap.mmap(descriptor, 4096)
os.close(descriptor)
{SLEEPS}
"""


def start(children: Children, code: str, *arguments: str, name: str = "child", grace_s: float = 5.0) -> Child:
    child = children.start(name, [sys.executable, "-c", code, *arguments], grace_s=grace_s)
    wait_until(lambda: "ready" in child.log_lines(), f"{name} ready")
    return child


def test_stop_ends_a_child_by_sigterm(children: Children) -> None:
    child = start(children, SLEEPS)
    children.stop(child)
    assert child.exit_status() == -signal.SIGTERM
    assert child.pids() == set()


def test_stop_ends_grandchildren_in_and_out_of_the_session(children: Children) -> None:
    child = start(children, HAS_GRANDCHILDREN)
    assert len(child.pids()) == 3
    children.stop(child)
    assert child.pids() == set()


def test_a_child_that_ignores_sigterm_is_killed(children: Children) -> None:
    child = start(children, IGNORES_SIGTERM, grace_s=0.2)
    children.stop(child)
    assert child.exit_status() == -signal.SIGKILL


def test_a_suspended_child_is_stopped_too(children: Children) -> None:
    child = start(children, SLEEPS)
    child.send(signal.SIGSTOP)
    children.stop(child)
    assert child.exit_status() == -signal.SIGTERM


def test_stopping_one_child_leaves_the_other(children: Children) -> None:
    first, second = start(children, SLEEPS, name="first"), start(children, SLEEPS, name="second")
    children.stop(first)
    assert second.exit_status() is None
    children.close()
    assert second.pids() == set()


def test_kill_ends_all_at_once(children: Children) -> None:
    child = start(children, HAS_GRANDCHILDREN)
    children.kill(child)
    assert child.exit_status() == -signal.SIGKILL
    assert child.pids() == set()


def test_close_ends_what_outlived_its_child(children: Children) -> None:
    child = start(children, HAS_GRANDCHILDREN)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.exit_status() is not None, "the child's end")
    assert len(child.pids()) == 2
    children.close()
    assert child.pids() == set()


def test_shared_memory_of_a_killed_child_is_removed_and_that_of_others_is_not(children: Children) -> None:
    theirs, ours = (Path(f"/dev/shm/kvferry-test-{os.getpid()}-{name}") for name in ("theirs", "ours"))
    ours.write_bytes(b"x")
    try:
        child = start(children, HAS_SEGMENT, str(theirs))
        assert theirs.exists()
        children.kill(child)
        assert not theirs.exists()
        assert ours.exists()
    finally:
        ours.unlink()


def test_shared_memory_that_another_process_still_uses_stays_until_that_one_ends(children: Children) -> None:
    segment = Path(f"/dev/shm/kvferry-test-{os.getpid()}-both")
    first, second = (start(children, HAS_SEGMENT, str(segment), name=name) for name in ("first", "second"))
    children.kill(first)
    assert segment.exists()
    children.kill(second)
    assert not segment.exists()


def test_a_log_holds_both_outputs_and_is_appended_to(children: Children) -> None:
    code = "import sys; print(sys.argv[1], flush=True); print('error', file=sys.stderr)"
    for text in ("one", "two"):
        child = children.start("child", [sys.executable, "-c", code, text])
        wait_until(lambda: child.exit_status() is not None, "the child's end")  # noqa: B023
    assert child.log_lines() == ["one", "error", "two", "error"]
    assert child.log_lines(1) == ["error"]


PARENT = """
import sys, time
from pathlib import Path
from kvferry.cli.children import Children
from kvferry.cli.signals import stop_on_signals

with stop_on_signals():
    children = Children(Path(sys.argv[1]))
    try:
        child = children.start("child", [sys.executable, "-c", sys.argv[2]], grace_s=float(sys.argv[3]))
        while "ready" not in child.log_lines():
            time.sleep(0.02)
        print(child.pid, child.label, flush=True)
        time.sleep(600)
    finally:
        children.close()
        print("cleaned", flush=True)
"""


class Parent:
    """A process that has a child, to be treated badly."""

    def __init__(self, directory: Path, code: str, grace_s: float) -> None:
        command = [sys.executable, "-c", textwrap.dedent(PARENT), str(directory), code, str(grace_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        pid, self.label = self.process.stdout.readline().split()
        self.child_pid = int(pid)

    def child_pids(self) -> set[int]:
        return proc.members(self.label, self.child_pid)

    def end(self) -> tuple[int, str]:
        """Its exit status, and what it said last."""
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 129)],
)
def test_a_signal_to_us_stops_the_children(tmp_path: Path, number: int, status: int) -> None:
    parent = Parent(tmp_path, HAS_GRANDCHILDREN, grace_s=5)
    parent.process.send_signal(number)
    assert parent.end() == (status, "cleaned\n")
    assert parent.child_pids() == set()


def test_a_second_signal_does_not_break_into_the_clean_up(tmp_path: Path) -> None:
    parent = Parent(tmp_path, IGNORES_SIGTERM, grace_s=1.5)
    for _ in range(5):
        parent.process.send_signal(signal.SIGTERM)
        parent.process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # spread over the clean-up, which takes the child's 1.5 s
    status, said = parent.end()
    assert status in (128 + signal.SIGTERM, -signal.SIGINT)  # whichever of the first two was handled first
    assert said == "cleaned\n"
    assert parent.child_pids() == set()


def test_the_guardian_cleans_up_when_we_are_killed(tmp_path: Path) -> None:
    segment = Path(f"/dev/shm/kvferry-test-{os.getpid()}-orphan")
    code = HAS_SEGMENT.replace("sys.argv[1]", repr(str(segment)))
    parent = Parent(tmp_path, code, grace_s=5)
    assert segment.exists()
    parent.process.kill()
    assert parent.end() == (-signal.SIGKILL, "")
    wait_until(lambda: parent.child_pids() == set(), "the end of the orphan")
    wait_until(lambda: not segment.exists(), "the removal of its shared memory")


def test_the_guardian_ends_with_us(children: Children) -> None:
    start(children, SLEEPS)
    guardian = children._guardian
    assert guardian is not None
    assert guardian.poll() is None
    children.close()
    assert guardian.poll() == 0
