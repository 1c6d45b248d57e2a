"""A request's KV is identified by all that it depends on, and by nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.vllm.digests import model_identity, request_digest, undigestible


def request(**changes) -> SimpleNamespace:
    fields = {
        "all_token_ids": list(range(40)),
        "prompt_token_ids": list(range(40)),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**fields, **changes})


def image(identifier: str, offset: int = 4) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=8))


def digest(one: SimpleNamespace, num_tokens: int = 32, model: str = "m", epoch: str = "") -> bytes:
    return request_digest(one, num_tokens, model=model, weights_epoch=epoch)


def test_equal_requests_have_equal_digests() -> None:
    assert digest(request()) == digest(request())
    assert len(digest(request())) == 16


def test_tokens_beyond_those_offered_do_not_count() -> None:
    longer = request(all_token_ids=[*range(32), 7, 7, 7])
    assert digest(request()) == digest(longer)
    assert digest(request(), 32) != digest(request(), 31)


@pytest.mark.parametrize(
    "other",
    [
        request(all_token_ids=[1, *range(1, 40)]),
        request(lora_request=SimpleNamespace(lora_name="adapter")),
        request(cache_salt="salt"),
        request(mm_features=[image("picture")]),
    ],
    ids=["token", "lora", "salt", "image"],
)
def test_each_part_counts(other: SimpleNamespace) -> None:
    assert digest(other) != digest(request())


def test_model_and_weights_count() -> None:
    assert len({digest(request()), digest(request(), model="n"), digest(request(), epoch="2")}) == 3


def test_images_count_by_content_and_place() -> None:
    one, other, moved = (request(mm_features=[image(*args)]) for args in (("a", 4), ("b", 4), ("a", 5)))
    assert len({digest(one), digest(other), digest(moved)}) == 3
    behind = request(mm_features=[image("a", offset=32)])
    assert digest(behind) == digest(request())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_embeds": torch.zeros(4, 8), "prompt_token_ids": None}, "prompt_embeds"),
        ({"prompt_is_token_ids": [True, False]}, "prompt_embeds"),
        ({"prompt_token_ids": None}, "token ids"),
        ({"resumable": True}, "streaming"),
    ],
)
def test_what_cannot_be_identified_is_named(changes: dict, named: str) -> None:
    assert named in undigestible(request(**changes))
    assert undigestible(request()) == ""


def config_of(model: str = "", **fields) -> SimpleNamespace:
    hf_config = SimpleNamespace(to_dict=lambda: fields)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config, model=model, revision=None))


def test_a_model_is_its_configuration_not_its_path() -> None:
    here, there = (config_of(path, _name_or_path=path, hidden_size=64) for path in ("/a", "/b"))
    assert model_identity(here) == model_identity(there)
    assert model_identity(here) != model_identity(config_of("/a", hidden_size=128))


@pytest.mark.parametrize("place", [0, 150_000, 299_999], ids=["begin", "middle", "end"])
def test_equal_configurations_with_other_weights_are_other_models(tmp_path: Path, place: int) -> None:
    weights = bytearray(300_000)
    identities = []
    for name in ("base", "copy", "tuned"):
        if name == "tuned":
            weights[place] = 1
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        identities.append(model_identity(config_of(str(tmp_path / name), hidden_size=64)))
    base, copy, tuned = identities
    assert base == copy
    assert base != tuned
