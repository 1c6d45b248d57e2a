"""Writes model directories for vLLM. Run in a process of its own, since it imports torch and transformers.

`python -m kvferry.cli.model_build tiny KIND SEED DIR` or `... gguf FILE DIR`.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from kvferry.cli.tiny_models import BYTE_TOKENS, tiny_config

BOS, EOS = "<bos>", "<eos>"

# Random weights give nearly flat attention, and then the text hardly depends on the cache. Larger projections cure it.
QUERY_KEY_SCALE = 8.0
MATRIX_SCALE = 4.0
HEAD_SCALE = 3.0
QUERY_KEY_NAMES = ("q_proj", "k_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
UNSCALED_NAMES = ("embed", "conv", "A_log")


def byte_tokenizer() -> Any:
    """A tokenizer with one token for each byte, plus <bos> and <eos>: 258 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    vocabulary.update({BOS: BYTE_TOKENS, EOS: BYTE_TOKENS + 1})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)


def weight_scale(name: str, dimensions: int) -> float:
    """The factor that makes the output of a random model depend on its KV cache."""
    if dimensions < 2 or any(part in name for part in UNSCALED_NAMES):
        return 1.0
    if "lm_head" in name:
        return HEAD_SCALE
    if any(part in name for part in QUERY_KEY_NAMES):
        return QUERY_KEY_SCALE
    return MATRIX_SCALE


def build_tiny(kind: str, seed: int, target: Path) -> None:
    """Write a tiny random model and its tokenizer into `target`, which exists and is empty."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(weight_scale(name, weight.dim()))
    model.save_pretrained(target)
    byte_tokenizer().save_pretrained(target)


def build_from_gguf(file: Path, target: Path) -> None:
    """Write the dequantised weights of a Llama-like GGUF file, as a plain Llama model, into `target`."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # transformers asks for both again and again, the file three times and the names 400 times; it takes half the time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)  # the saved weights are plain
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(source.state_dict())
    model.to(torch.float16).save_pretrained(target)  # half the disk; both servers read the same rounded weights
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def main(arguments: list[str]) -> int:
    what, *rest = arguments
    if what == "tiny":
        kind, seed, target = rest
        build_tiny(kind, int(seed), Path(target))
    elif what == "gguf":
        build_from_gguf(Path(rest[0]), Path(rest[1]))
    else:
        raise ValueError(f"what: {what!r} is neither 'tiny' nor 'gguf'")
    print(json.dumps({"files": sorted(path.name for path in Path(rest[-1]).iterdir())}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
