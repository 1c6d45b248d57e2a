"""The demo's prompts: of exact lengths in tokens, so that they fall where a KV cache's blocks and chunks begin."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHORT_TEXT = "The capital of France is"
_QUAYS = ("North Quay", "Mill Landing", "the Old Pier", "Lighthouse Point", "Market Steps")
_BOATS = ("Heron", "Kestrel", "Otter", "Marigold", "Saint Anne", "Northern Star", "Plover")


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, with its text to show. Prompts of one cache_salt may share cached blocks."""

    kind: str
    token_ids: tuple[int, ...]
    text: str
    cache_salt: str
    is_repeat: bool = False


def timetable(lines: int) -> str:
    """A plain text that can be made as long as needed."""
    text = ["The harbour office keeps a list of the day's ferries.\n"]
    for index in range(lines):
        minutes = 6 * 60 + 11 * index
        text.append(
            f"At {minutes // 60 % 24:02d}:{minutes % 60:02d} the {_BOATS[index % len(_BOATS)]} leaves "
            f"{_QUAYS[index % len(_QUAYS)]} with {3 + index * 7 % 20} cars and {20 + index * 13 % 90} people.\n"
        )
    return "".join(text)


def demo_prompts(
    tokenize: Callable[[str], list[int]],
    detokenize: Callable[[Sequence[int]], str],
    block_size: int,
    chunk_tokens: int,
) -> list[Prompt]:
    """A short prompt, one over two blocks, one over two prefill chunks, and the second one again.

    The second has one token more than two blocks: when it comes again, all its whole blocks are still in the decode
    server's prefix cache, and the last token is computed in any case; so nothing has to move.
    """
    two_blocks = 2 * block_size + 1
    two_chunks = 2 * chunk_tokens + block_size // 2
    stock = _stock(tokenize, two_blocks + two_chunks)
    over_blocks, over_chunks = stock[:two_blocks], stock[two_blocks : two_blocks + two_chunks]
    again_salt = secrets.token_hex(8)
    chosen = [
        ("short", tokenize(SHORT_TEXT), secrets.token_hex(8), False),
        ("over two blocks", over_blocks, again_salt, False),
        ("over two prefill chunks", over_chunks, secrets.token_hex(8), False),
        ("two blocks again", over_blocks, again_salt, True),
    ]
    return [Prompt(kind, tuple(ids), detokenize(ids), salt, repeat) for kind, ids, salt, repeat in chosen]


def _stock(tokenize: Callable[[str], list[int]], at_least: int) -> list[int]:
    """Token ids of a timetable that has at least so many."""
    lines = 16
    while len(ids := tokenize(timetable(lines))) < at_least:
        lines *= 2
    return ids
