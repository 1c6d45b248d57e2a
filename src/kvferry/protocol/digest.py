"""Digests that two sides compare instead of what they stand for. 16 bytes of BLAKE2b, equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 16


class _Writer:
    """Hashes fields so that no two different lists of fields give the same bytes: each is preceded by its length."""

    def __init__(self, kind: bytes) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind)

    def number(self, value: int) -> None:
        self._hash.update(value.to_bytes(8, "little", signed=True))

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.number(len(data))
        self._hash.update(data)

    def numbers(self, values: Sequence[int]) -> None:
        array = np.asarray(values, dtype="<i8")
        if array.ndim != 1:
            raise ValueError(f"a list of numbers has {array.ndim} dimensions, must have 1")
        self.number(array.size)
        self._hash.update(array.tobytes())

    def digest(self) -> bytes:
        return self._hash.digest()


def prompt_digest(
    token_ids: Sequence[int],
    *,
    model: str,
    lora: str,
    cache_salt: str,
    mm_hashes: Sequence[tuple[str, int, int]],
    weights_epoch: str,
) -> bytes:
    """Of everything that decides what KV the offered tokens have.

    token_ids: exactly the tokens offered. lora, cache_salt: "" for none. mm_hashes: (content hash, first token,
    tokens) of each multimodal item. weights_epoch: changes whenever weights are replaced in place.
    """
    writer = _Writer(b"kvferry-prompt")
    writer.numbers(token_ids)
    for text in (model, lora, cache_salt, weights_epoch):
        writer.text(text)
    writer.number(len(mm_hashes))
    for content_hash, first_token, num_tokens in mm_hashes:
        writer.text(content_hash)
        writer.number(first_token)
        writer.number(num_tokens)
    return writer.digest()


def blocks_digest(block_ids_per_group: Sequence[Sequence[int]]) -> bytes:
    """Of a producer's block ids, by KV cache group, in order."""
    writer = _Writer(b"kvferry-blocks")
    writer.number(len(block_ids_per_group))
    for block_ids in block_ids_per_group:
        writer.numbers(block_ids)
    return writer.digest()
