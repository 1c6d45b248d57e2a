"""docs/plan.md shows what the commands in it print."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.plan.models import FAMILIES, MULTIMODAL
from kvferry.cli.plan.sides import LAYOUTS, parse

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "plan.md").read_text()
COMMANDS = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", DOC)


@pytest.fixture(autouse=True)
def _in_a_directory_like_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-8b.json").write_text(re.findall(r"```json\n((?:.*\n)*?)```", DOC)[0])
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_outputs(command: str, expected: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "kvferry"
    output = CliRunner().invoke(app, arguments).output
    assert [line.rstrip() for line in output.rstrip().splitlines()] == expected.rstrip().splitlines()


def test_the_picture() -> None:
    command = next(command for command, _ in COMMANDS if "--svg" in command)
    CliRunner().invoke(app, shlex.split(command)[1:])
    assert Path("plan.svg").read_text() == (ROOT / "docs" / "plan.svg").read_text()


def test_everything_is_named() -> None:
    for name in (*FAMILIES, *MULTIMODAL, *(layout for layout in LAYOUTS if "-hnd" not in layout)):
        assert f"`{name}`" in DOC, name
    for key in parse("--consumer", "", None)._fields:
        assert f"`{key}`" in DOC, key
    assert json.loads(Path("llama-8b.json").read_text())["model_type"] == "llama"
