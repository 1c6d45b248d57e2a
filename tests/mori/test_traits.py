"""What only MoRI-IO has, for each backend: the tests in inside/, one here for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from inside_run import cases, check, results

HERE = Path(__file__).parent / "inside"
MODULES = {"rdma": HERE / "rdma_traits.py", "xgmi": HERE / "xgmi_traits.py"}

pytestmark = pytest.mark.timeout(1200)


def _test_of(case: str, backends: list[str]) -> Callable[..., None]:
    @pytest.mark.parametrize("backend", backends)
    def test(backend: str, scratch: Path) -> None:
        check(case, results(MODULES[backend], "traits", scratch))

    test.__name__ = case
    return test


_cases = {backend: cases(path) for backend, path in MODULES.items()}
for _case in dict.fromkeys(case for found in _cases.values() for case in found):
    globals()[_case] = _test_of(_case, [backend for backend, found in _cases.items() if _case in found])
