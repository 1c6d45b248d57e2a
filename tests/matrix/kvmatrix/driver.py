"""Starts a producer's and a consumer's process and runs combinations through them, one after another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvmatrix.combination import Combination

ROLES = ("producer", "consumer")
PROGRAM = Path(__file__).parent.parent / "process.py"
PATIENCE_S = 120.0
"""Longest wait for one answer: longer than those inside the processes, which say more of what did not come."""


class Ended(RuntimeError):
    """A process did not answer, or is gone; the text has its last lines."""


class Outcome(NamedTuple):
    """What came of a combination. result: "ok", or "refused: " and why. wrong: why that is not what had to come."""

    num_bytes: int
    num_descriptors: int
    result: str
    wrong: str = ""


class Process:
    """One of the two; it ends with this process at the latest. What it prints is kept, to be told when it fails."""

    def __init__(self, role: str, environment: Mapping[str, str] | None = None) -> None:
        self.role = role
        self._log = os.fdopen(os.memfd_create("matrix-log"), "w+b")
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=None if environment is None else {**os.environ, **environment},
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, patience_s: float, **arguments: Any) -> Any:
        """Raises Ended, after which the process is gone, or RuntimeError with the error that it answers."""
        try:
            answer = self._exchange(json.dumps({"do": name, **arguments}).encode() + b"\n", patience_s)
        except BaseException as error:
            last_lines = self.last_lines()
            self.kill()
            if isinstance(error, OSError):
                raise Ended(f"{self.role}: {name}: {error}\n{last_lines}") from None
            raise
        if "error" in answer:
            raise RuntimeError(f"{self.role}: {name}: {answer['error']}")
        return answer["ok"]

    def _exchange(self, line: bytes, patience_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        deadline = time.monotonic() + patience_s
        answers = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer within {patience_s:g} s")
            chunk = os.read(answers, 1 << 16)
            if not chunk:
                raise BrokenPipeError(f"the process ended with {self._process.wait()}")
            self._unread += chunk
        answer, self._unread = self._unread.split(b"\n", 1)
        return json.loads(answer)

    def last_lines(self, count: int = 30) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-count:])

    def close(self) -> None:
        """Lets it end, and kills it if it does not."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process, which starts no others. Idempotent."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


class Pair:
    """The two processes; new ones are started when one has ended. Use it as a context.

    transport: in place of the combinations' own. write: the producer writes. environment: of both, beside this one's.
    """

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        transport: str = "",
        write: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._transport, self._write, self._environment = transport, write, environment
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, combination: Combination, plant: str = "") -> Outcome:
        """Both engines of a combination, and one transfer between them. Never raises for what goes wrong in them."""
        try:
            what = {"combination": combination.name, "plant": plant, "transport": self._transport}
            offer = self._call("producer", "offer", **what)
            told = self._call("consumer", "load", offer=offer, write=self._write, **what)
            told["outcome"] = self._call("producer", "end")
        except Ended as error:
            self.close()
            return Outcome(0, 0, "failed", str(error))
        except RuntimeError as error:
            self._stop_engines()
            return Outcome(0, 0, "failed", str(error))
        return _judged(combination.over(self._transport), told)

    def left(self) -> dict[str, dict[str, int]]:
        """Threads and open files of both processes."""
        return {role: self._call(role, "left") for role in ROLES}

    def pid(self, role: str) -> int:
        return self._process(role).pid

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _stop_engines(self) -> None:
        try:
            for role in ROLES:
                self._call(role, "stop")
        except RuntimeError:
            self.close()

    def _call(self, role: str, name: str, **arguments: Any) -> Any:
        return self._process(role).call(name, self._patience_s, **arguments)

    def _process(self, role: str) -> Process:
        if role not in self._processes:
            self._processes[role] = Process(role, self._environment)
        return self._processes[role]


def _judged(combination: Combination, told: dict[str, Any]) -> Outcome:
    result = f"refused: {_without_address(told['reason'])}" if told["reason"] else "ok"
    return Outcome(told["bytes"], told["descriptors"], result, _what_is_wrong(combination, told))


def _what_is_wrong(combination: Combination, told: dict[str, Any]) -> str:
    if told["wrong"]:
        return str(told["wrong"])
    if told["outcome"] != "released":
        return f"the producer's hold was {told['outcome']}"
    return _wrong_refusal(combination, told) if combination.refused else _wrong_success(combination, told)


def _wrong_refusal(combination: Combination, told: dict[str, Any]) -> str:
    reason = told["reason"]
    missing = [word for word in combination.refused if word not in reason]
    if missing or not told["all_refused"]:
        return f"every rank must refuse it, naming {missing or combination.refused}: {reason or 'it was not refused'}"
    if combination.section == "refused" and not reason.startswith("handshake with "):
        return f"must be refused at the handshake: {reason}"
    return ""


def _wrong_success(combination: Combination, told: dict[str, Any]) -> str:
    if told["reason"]:
        return f"must succeed: {told['reason']}"
    if told["bytes"] < told["required"] or bool(told["bytes"]) != bool(told["required"]):
        return f"{told['bytes']} bytes are said to have moved, {told['required']} were required"
    if told["bytes"] and told["transport"] != combination.consumer.transport:
        return f"moved over {told['transport']}, not {combination.consumer.transport}"
    return ""


def _without_address(reason: str) -> str:
    """A refusal's reason as it is on every machine."""
    return reason.partition("Refusal: ")[2] or reason.partition("Error: ")[2] or reason
