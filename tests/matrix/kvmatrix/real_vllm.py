"""Which sections are also run with real vLLM servers, and by which tests."""

from __future__ import annotations

from typing import NamedTuple


class RealVllm(NamedTuple):
    """test: a file and the names in it, then the id of its parameters. tp: the producer's and the consumer's. heads: of
    the model's KV; 0 where a latent has none.

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
_FAMILY = "tests/e2e/test_families.py::test_tokens_are_those_of_one_server"
_LATENT = "tests/e2e/test_families.py::test_latents_arrive_byte_for_byte"
_FALCON = "Falcon-H1, attention beside mamba2"
_REQUESTS = ("Requests",)
_STATES = ("States",)
_WINDOWS = ("Sliding windows", "Overlaid groups")
_BLOCKS = ("Block sizes",)
_NO_HEADS = ("Splits without heads",)

REAL_VLLM: tuple[RealVllm, ...] = (
    RealVllm(f"{_SPLIT}[1to1]", (1, 1), 4, "cpu", "local", _LLAMA, _REQUESTS),
    RealVllm(f"{_SPLIT}[1to2]", (1, 2), 4, "cpu", "nixl", _LLAMA, _REQUESTS),
    RealVllm(f"{_SPLIT}[2to1]", (2, 1), 4, "cpu", "local", _LLAMA, _REQUESTS),
    RealVllm(f"{_FAMILY}[falconh1]", (1, 1), 4, "cpu", "local", _FALCON, _STATES),
    RealVllm(f"{_FAMILY}[falconh1-1to2]", (1, 2), 4, "cpu", "nixl", _FALCON, _STATES),
    RealVllm(f"{_FAMILY}[falconh1-2to1]", (2, 1), 4, "cpu", "local", _FALCON, _STATES),
    RealVllm(f"{_FAMILY}[granite4]", (1, 1), 4, "cpu", "local", "Granite 4, attention beside mamba2", _STATES),
    RealVllm(f"{_FAMILY}[nemotronh]", (1, 1), 4, "cpu", "local", "Nemotron-H, attention beside mamba2", _STATES),
    RealVllm(f"{_FAMILY}[qwen3next]", (1, 1), 2, "cpu", "local", "Qwen3-Next, bfloat16, beside GDN", _STATES),
    RealVllm(f"{_FAMILY}[gemma3]", (1, 1), 4, "cpu", "local", "Gemma 3, three groups", _WINDOWS),
    RealVllm(f"{_FAMILY}[gemma3-1to2]", (1, 2), 4, "cpu", "local", "Gemma 3, three groups", _WINDOWS),
    RealVllm(f"{_FAMILY}[gemma3-blocks-32to64]", (1, 1), 4, "cpu", "local", "Gemma 3, 32 to 64", (*_WINDOWS, *_BLOCKS)),
    RealVllm(f"{_FAMILY}[gptoss]", (1, 1), 4, "cpu", "local", "gpt-oss, two groups", _WINDOWS),
    RealVllm(f"{_FAMILY}[mistral]", (1, 1), 4, "cpu", "local", "Mistral, one group with null blocks", _WINDOWS),
    RealVllm(f"{_FAMILY}[llama-blocks-32to64]", (1, 1), 4, "cpu", "local", "Llama, 32 to 64", _BLOCKS),
    RealVllm(f"{_FAMILY}[llama-blocks-64to32]", (1, 1), 4, "cpu", "local", "Llama, 64 to 32", _BLOCKS),
    RealVllm(f"{_LATENT}[deepseekv2]", (1, 1), 0, "key_only", "local", "DeepSeek V2, by bytes", _NO_HEADS),
    RealVllm(f"{_LATENT}[deepseekv3]", (1, 1), 0, "key_only", "local", "DeepSeek V3, by bytes", _NO_HEADS),
)
