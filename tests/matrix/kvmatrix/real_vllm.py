"""Which sections are also run with real vLLM servers, and by which tests."""

from __future__ import annotations

from typing import NamedTuple


class RealVllm(NamedTuple):
    """test: a file and the names in it, then the id of its parameters. tp: the producer's and the consumer's.

    headings: in docs/matrix.md, beside splits and layouts, for which it stands. model: and its cache.
    """

    test: str
    tp: tuple[int, int]
    heads: int
    layout: str
    transport: str
    model: str
    headings: tuple[str, ...] = ()


_SPLIT = "tests/e2e/test_read.py::TestEverySplit"
_LLAMA = "Llama, float32, blocks of 128"
_REQUESTS = ("Requests",)

REAL_VLLM: tuple[RealVllm, ...] = (
    RealVllm(f"{_SPLIT}[1to1]", (1, 1), 4, "cpu", "local", _LLAMA, _REQUESTS),
    RealVllm(f"{_SPLIT}[1to2]", (1, 2), 4, "cpu", "nixl", _LLAMA, _REQUESTS),
    RealVllm(f"{_SPLIT}[2to1]", (2, 1), 4, "cpu", "local", _LLAMA, _REQUESTS),
)
