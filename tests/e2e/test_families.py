"""One row for each family of models on vLLM's CPU backend: what a pair generates is what the decode server alone does.

Of the hybrids Falcon-H1 is in `make test`: attention beside a mamba2 state. The rest is wide, unequal TP as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import caches
import pytest
from checks import BLOCK, alone, assert_drained, first_leg, generate, prompt_of, salt, second_leg
from harness import PATIENT, PairConfig

from kvferry.cli import api
from kvferry.cli.servers import Cluster, ServerSpec
from kvferry.cli.servers import pair as pair_of

NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)  # vLLM's mamba2 layers on a CPU fail with it
BF16 = ("--dtype", "bfloat16")  # vLLM's GDN layers on a CPU take nothing else
LENGTHS = (24, BLOCK - 1, BLOCK, BLOCK + 1, 191, 983)
"""191: with a window of 64 tokens, what the last token looks at begins where a block begins."""

NEAR_TIE = 0.1
"""Log probabilities of one server in bfloat16 differ by up to 0.043 between its kernels for a prompt and a token."""

wide = pytest.mark.wide


def block_sizes(prefill: int, decode: int, kind: str = "llama") -> PairConfig:
    def specs(model: Path) -> list[ServerSpec]:
        sides = pair_of(model, extra=PATIENT)
        sizes = (prefill, decode)
        return [replace(side, args=("--block-size", str(size))) for side, size in zip(sides, sizes, strict=True)]

    return PairConfig(kind=kind, specs=specs)


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
fp8_kernels = pytest.mark.skipif(not HAS_AVX512, reason="vLLM's fp8 caches on a CPU need AVX-512")

BY_TOKENS = [
    pytest.param(PairConfig(kind="falconh1", args=NO_PREFIX_CACHE), id="falconh1"),
    pytest.param(PairConfig(kind="falconh1", tp_prefill=2, args=NO_PREFIX_CACHE), id="falconh1-2to1", marks=wide),
    pytest.param(
        PairConfig(kind="falconh1", tp_decode=2, transport="nixl", args=NO_PREFIX_CACHE), id="falconh1-1to2", marks=wide
    ),
    pytest.param(PairConfig(kind="granite4", args=NO_PREFIX_CACHE), id="granite4", marks=wide),
    pytest.param(PairConfig(kind="nemotronh", args=NO_PREFIX_CACHE), id="nemotronh", marks=wide),
    pytest.param(PairConfig(kind="qwen3next", args=BF16), id="qwen3next", marks=wide),
    pytest.param(PairConfig(kind="gemma3"), id="gemma3", marks=wide),
    pytest.param(PairConfig(kind="gemma3", tp_decode=2), id="gemma3-1to2", marks=wide),
    pytest.param(block_sizes(32, 64, "gemma3"), id="gemma3-blocks-32to64", marks=wide),
    pytest.param(PairConfig(kind="gptoss"), id="gptoss", marks=wide),
    pytest.param(PairConfig(kind="mistral"), id="mistral", marks=wide),
    pytest.param(PairConfig(args=("--kv-cache-dtype", "fp8")), id="llama-fp8", marks=(wide, fp8_kernels)),
    pytest.param(block_sizes(32, 64), id="llama-blocks-32to64", marks=wide),
    pytest.param(block_sizes(64, 32), id="llama-blocks-64to32", marks=wide),
]


def assert_right(pair: Cluster, prompt: list[int], answer: api.Json, expected: list[int]) -> None:
    """The tokens are those of the decode server alone. In bfloat16 a near tie may fall the other way, since alone the
    last token of a prompt goes through another kernel: then the two tokens are as likely where they first differ."""
    found = api.tokens(answer)
    if found == expected or pair.decode.spec is None or "bfloat16" not in pair.decode.spec.args:
        assert found == expected
        return
    same = next(index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
    fields = {"logprobs": 5, "return_tokens_as_token_ids": True, "max_tokens": 1}
    scored = api.complete(pair.decode.url, [*prompt, *expected[:same]], cache_salt=salt(), **fields)
    top = scored["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top[f"token_id:{expected[same]}"] - top.get(f"token_id:{found[same]}", -100.0) < NEAR_TIE


@pytest.mark.parametrize("pair", BY_TOKENS, indirect=True)
def test_tokens_are_those_of_one_server(pair: Cluster) -> None:
    for num_tokens in LENGTHS:
        prompt = prompt_of(num_tokens, seed=num_tokens)
        expected = alone(pair, prompt)
        assert len(set(expected)) > 3  # a model whose text does not depend on its cache would prove nothing
        answer = second_leg(pair, *first_leg(pair, prompt))
        assert_right(pair, prompt, answer, expected)
        report = api.transfer_report(answer)
        assert (report["path"], report["bytes"] > 0) == ("remote", True)
    assert_drained(pair)


@pytest.mark.parametrize("pair", BY_TOKENS, indirect=True)
def test_what_is_written_while_it_is_computed(pair: Cluster) -> None:
    for num_tokens in (24, 191, 983):
        prompt = prompt_of(num_tokens, seed=num_tokens)
        expected = alone(pair, prompt)
        answer = generate(pair, prompt, "at once")
        assert_right(pair, prompt, answer, expected)
        report = api.transfer_report(answer)
        assert (report["path"], report["bytes"] > 0) == ("remote", True)
    assert_drained(pair)


@pytest.mark.parametrize("pair", BY_TOKENS, indirect=True)
def test_a_shared_prefix_with_a_new_suffix(pair: Cluster) -> None:
    prefix, shared = prompt_of(4 * BLOCK, seed=4), salt()
    second_leg(pair, *first_leg(pair, prefix + prompt_of(40, seed=5), cache_salt=shared))
    longer = prefix + prompt_of(BLOCK + 9, seed=6)
    expected = alone(pair, longer)
    for _ in range(2):
        answer = second_leg(pair, *first_leg(pair, longer, cache_salt=shared))
        assert_right(pair, longer, answer, expected)
        assert api.transfer_report(answer)["path"] in ("remote", "local")
    assert_drained(pair)


@wide
@pytest.mark.parametrize(
    "pair", [PairConfig(kind="deepseekv2"), PairConfig(kind="deepseekv3")], indirect=True, ids=lambda one: one.kind
)
def test_latents_arrive_byte_for_byte(pair: Cluster) -> None:
    """MLA on a CPU is judged by its blocks: vLLM's kernels for a prompt and for its last token alone disagree there."""
    prompt = prompt_of(300, seed=20)
    body, params = first_leg(pair, prompt)
    producer, consumer = caches.record_of(pair.prefill), caches.record_of(pair.decode)
    assert api.transfer_report(second_leg(pair, body, params))["path"] == "remote"
    for layer, other in zip(producer.layouts[0].layers, consumer.layouts[0].layers, strict=True):
        sent, kept = caches.blocks(producer.workers[0], layer), caches.blocks(consumer.workers[0], other)
        full = [sent[block_id] for block_id in params["remote_block_ids"][layer.group][: 300 // layer.block_size]]
        assert len(full) == 300 // layer.block_size
        assert len(set(full)) == len(full)
        assert set(full) <= set(kept), layer.name
    assert_drained(pair)
