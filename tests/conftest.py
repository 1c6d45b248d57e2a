"""What a run ends with: the table of transports, and the counts of the coordinate oracle.

Here rather than beside the tests, since of a run over several processes the first one loads this file only. Tests leave
what is to be shown with their reports (`record_property`), which come from all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    _show_transports(terminalreporter)
    for _, report, text in _properties(terminalreporter, "bulk"):
        terminalreporter.section(f"coordinate oracle: {report.nodeid.partition('::')[2]}")
        terminalreporter.write_line(text)


def _show_transports(terminalreporter: Any) -> None:
    """Conformance case by transport; a case of several tests is as good as its worst."""
    cells: dict[str, dict[str, str]] = {}
    labels: dict[str, None] = {}
    for outcome, report, label in _properties(terminalreporter, "transport"):
        case = report.nodeid.partition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        row = cells.setdefault(case, {})
        labels[label] = None
        if row.get(label) in (None, "passed"):
            row[label] = outcome
    if not cells:
        return
    terminalreporter.section("transport conformance")
    width = max(map(len, cells))
    terminalreporter.write_line(" " * width + "".join(f"  {label:>9}" for label in labels))
    for case, row in cells.items():
        terminalreporter.write_line(f"{case:<{width}}" + "".join(f"  {row.get(label, '-'):>9}" for label in labels))


def _properties(terminalreporter: Any, wanted: str) -> Iterator[tuple[str, Any, str]]:
    """(outcome, report, text) for each property of this name that a test has left."""
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            for name, text in getattr(report, "user_properties", ()):  # a module that does not import has none
                if name == wanted:
                    yield outcome, report, str(text)
