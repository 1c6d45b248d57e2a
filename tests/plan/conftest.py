from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# No timed assertions: examples here are whole engines, and the machine may be busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What bulk.py has looked at; the tests leave it with their reports, which also come from other processes."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in report.user_properties:
                if name == "bulk":
                    terminalreporter.section(f"coordinate oracle: {report.nodeid.partition('::')[2]}")
                    terminalreporter.write_line(str(text))
