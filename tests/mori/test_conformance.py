"""The conformance suite (tests/transport) on the real MoRI-IO, one test here for each case and backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from inside_run import ROOT, cases, check, results

SUITE = ROOT / "tests" / "transport" / "test_conformance.py"

# The first that runs fetches and builds what is missing, and waits for the whole suite.
pytestmark = pytest.mark.timeout(1200)


def _test_of(case: str) -> Callable[..., None]:
    @pytest.mark.parametrize("label", ["mori-xgmi", "mori-rdma"])
    def test(label: str, scratch: Path, record_property: Callable[[str, object], None]) -> None:
        record_property("transport", label)
        check(case, results(SUITE, label, scratch))

    test.__name__ = case
    return test


for _case in cases(SUITE):
    globals()[_case] = _test_of(_case)
