"""Models made by the real tools, and the way out when SmolLM2 can't be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import models


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def state(self, name: str, text: str, done: bool = False) -> None: ...

    def show(self, view: object) -> None: ...


@pytest.mark.parametrize(
    ("kind", "architecture", "layers"), [("llama", "LlamaForCausalLM", 4), ("gemma3", "Gemma3ForCausalLM", 6)]
)
def test_a_tiny_model_has_a_byte_tokenizer_and_few_layers(kind: str, architecture: str, layers: int) -> None:
    from transformers import AutoTokenizer

    directory = models.tiny(kind)
    config = json.loads((directory / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == ([architecture], layers)
    assert config["vocab_size"] == 258
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "a ferry, ein Fährschiff"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_seed_gives_the_same_weights_and_another_gives_others(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from kvferry.cli.model_build import build_tiny

    weights = []
    for index, seed in enumerate((5, 5, 6)):
        directory = tmp_path / str(index)
        directory.mkdir()
        build_tiny("llama", seed, directory)
        weights.append(load_file(directory / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_unknown_kind_is_a_problem_that_names_the_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.cli.errors import Problem

    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    with pytest.raises(Problem, match="kind: 'bert' is not one of llama, llama-deep, gemma2, gemma3, mistral"):
        models.tiny("bert")


def test_without_a_package_index_a_tiny_model_takes_its_place(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / tiny_llama.name).symlink_to(tiny_llama)  # already made: only the download is under test
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    said = Said()
    assert models.default_model(said) == tmp_path / tiny_llama.name
    assert "can't be downloaded" in said.lines[-1]
    assert "a tiny random model takes its place" in said.lines[-1]


def test_a_split_that_smollm2_does_not_allow_takes_the_tiny_model(tiny_llama: Path) -> None:
    said = Said()
    assert models.default_model(said, (1, 2)) == tiny_llama
    assert said.lines[0].startswith("SmolLM2's 9 heads can't be split among 2 workers; a tiny random model takes its")
