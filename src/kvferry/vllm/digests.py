"""What identifies a request's KV, taken from vLLM's request."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.protocol.digest import prompt_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_source"}
"""Keys of a Hugging Face configuration that say where or how it was loaded, not what it is."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE_BYTES = 64 << 10


def undigestible(request: Request) -> str:
    """Why this request's KV cannot be identified by a digest; empty if it can."""
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "prompt_embeds: embeddings have no identity that two engines could compare"
    if request.prompt_token_ids is None:
        return "the prompt has no token ids"
    if request.resumable:
        return "a streaming-input session has no final prompt"
    return ""


def request_digest(request: Request, num_tokens: int, *, model: str, weights_epoch: str) -> bytes:
    """16 bytes over the first num_tokens tokens and all else that their KV depends on."""
    lora = request.lora_request
    return prompt_digest(
        request.all_token_ids[:num_tokens],
        model=model,
        lora=lora.lora_name if lora is not None else "",
        cache_salt=request.cache_salt or "",
        mm_hashes=[
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
            if feature.mm_position.offset < num_tokens
        ],
        weights_epoch=weights_epoch,
    )


def model_identity(vllm_config: VllmConfig) -> str:
    """Names the model by its configuration and by samples of its weights, so that paths may differ between hosts.

    Weights that can't be found as files (loaded from elsewhere, or made up) count by the configuration alone.
    """
    model = vllm_config.model_config
    config: dict[str, Any] = model.hf_config.to_dict()
    kept = {key: value for key, value in config.items() if key not in NOT_THE_MODEL}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=12)
    for file in _weight_files(model.model, model.revision):
        digest.update(_sample(file))
    return digest.hexdigest()


def _weight_files(model: str, revision: str | None) -> list[Path]:
    """The files with the weights of a local path, or of a model in Hugging Face's cache; empty if there are none."""
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception:
            # Not in the cache, or not a name of a hub at all.
            return []
    for pattern in _WEIGHTS:
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _sample(file: Path) -> bytes:
    """Name, size and three pieces of a weights' file: enough to tell a model from its fine-tuned kin, at once."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        pieces = [file.name.encode(), size.to_bytes(8, "little")]
        for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
            opened.seek(start)
            pieces.append(opened.read(_SAMPLE_BYTES))
    return b"".join(pieces)
