"""What identifies a request's KV, taken from vLLM's request."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kvferry.protocol.digest import prompt_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_source"}
"""Keys of a Hugging Face configuration that say where or how it was loaded, not what it is."""


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
    """Names the model by the contents of its configuration, so that paths may differ between hosts."""
    config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    encoded = json.dumps(kept, sort_keys=True, default=str).encode()
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
