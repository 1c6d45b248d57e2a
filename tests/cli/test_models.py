"""The cache of prepared models; what builds a real one is tested with vLLM's packages (tests/e2e/test_models.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli import models


class Builder:
    """Builds a small directory, and counts how often."""

    def __init__(self) -> None:
        self.built = 0

    def __call__(self, target: Path) -> None:
        self.built += 1
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(bytes(100))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_is_built_once(cache: Path) -> None:
    build = Builder()
    first = models.prepared("m", build)
    assert models.prepared("m", build) == first == cache / "m"
    assert build.built == 1
    assert models.is_intact(first)


def _flip(path: Path) -> None:
    path.write_bytes(b"\1" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: _flip(directory / "model.safetensors"),
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "kvferry-model.json").write_text("{"),
        lambda directory: (directory / "more.bin").write_bytes(b"x"),
    ],
    ids=["a byte changed", "a file gone", "no record", "a file too many"],
)
def test_a_damaged_model_is_built_again(cache: Path, damage: Callable[[Path], object]) -> None:
    build = Builder()
    directory = models.prepared("m", build)
    damage(directory)
    assert not models.is_intact(directory)
    models.prepared("m", build)
    assert build.built == 2
    assert models.is_intact(directory)
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "kvferry-model.json",
        "model.safetensors",
    ]


def test_a_build_that_fails_leaves_nothing(cache: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models.prepared("m", fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", "/a")
    assert models.cache_dir() == Path("/a")
    monkeypatch.delenv("KVFERRY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert models.cache_dir() == Path("/b/kvferry")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert models.cache_dir() == Path("/c/.cache/kvferry")
