"""What docs/matrix.md says around its tables."""

INTRO = """\
# The matrix

Which caches can be moved between which engines, and how that is known. `make matrix` runs all of it and writes this
file; `make test` runs a chosen few, `make test-all` all, and both compare the answers with what is written here.

Each of the {count} combinations is one transfer from a producer to a consumer in *another process*: real agents,
sockets and transports, with caches made up for the purpose. The producer writes into each byte of the prompt's blocks
a value that depends on layer, field, KV head, token and position. The consumer fills its cache with other bytes,
loads, and then looks at every byte that it has: what was asked for must have its coordinate's value, and everything
else must be what it was (behind the last token, in the same block, it may also be right already). Where the bytes of a
layout lie is worked out with plain numpy, not with what kvferry itself believes.

Small caches tell the same as large ones, so most have two or three layers, a prompt of 10 tokens of which 9 move, and
blocks of 4. "Tokens a to b" are counted from 0, both included. A result is two numbers, **bytes / descriptors**,
summed over the ranks of the consumer. P is the producer, D the consumer.

Bytes may be more than the tokens that were asked for have. Where tokens are not outermost in a block, a part of it lies
in many pieces, and the whole block in one: so the last block moves up to a place where cutting it takes no more
descriptors than moving it whole ([docs/layouts.md](layouts.md#from-two-layouts-to-descriptors)). Such surplus lies in
the request's own blocks on both sides. Where cutting it costs nothing, as with tokens outermost or sides that differ so
that there are many pieces anyway, exactly the tokens move. In the first table below 9 tokens of a head are 144 bytes in
LBNHC and in 2BNHD, and 192 in "cpu", whose blocks of 4 move whole: 480 for all three.

## What is tested how

{tested}
*Oracle*: `tests/plan/test_bulk.py` draws engines and requests (4,000 plans in `make test`, a million in
`make test-all`, which print what they have covered), applies the plans with plain copies and looks at every byte;
`tests/plan/test_oracle.py` does so by hypothesis, with another oracle. *Two processes*: the number of combinations
below.
*Real vLLM*: servers on a CPU whose tokens must be those of a single server; the tests are named at the end.
"""

WAYS = ("oracle", "two processes", "real vLLM")

ORACLE = {
    "Splits": "all legal of TP 1, 2, 3, 4, 6, 8, 12, 16 with 1, 2, 3, 4, 6, 8, 12 heads, drawn",
    "Splits without heads": "drawn",
    "Layouts": "drawn, several in one model",
    "Block sizes": "drawn",
    "Context parallel": "drawn, also of KV heads that are held by several ranks",
    "Requests": "drawn",
    "Kernel blocks": "drawn",
    "Padded pages": "drawn",
    "Dtypes": "drawn: item sizes, K and V of different sizes",
    "Opaque tiles": "drawn",
    "Quantised": "drawn: scales inside each (token, head)",
    "Mixed layouts": "drawn",
    "MiniMax-M3": "drawn: K and V beside layers without heads",
    "Pipelines": "drawn, up to 3 stages",
    "Sliding windows": "drawn: holes in the block tables, windows that begin inside blocks",
    "Overlaid groups": "drawn, up to 3 groups",
    "States": "drawn",
    "Refused": "`tests/plan/test_pairs.py`",
}
"""Heading -> what is also done about it without processes."""

SPLITS = """
## Splits

TP size of the producer down, of the consumer across; a pair is missing where an engine can't have it, since of KV
heads and TP size one must divide the other. Each cell is a model of three layers: vLLM's fused cache (LBNHC), vLLM's
CPU attention (keys transposed), and separate K and V (2BNHD). Heads have 4 bfloat16, so K and V of a token are 16
bytes for each head and layer. Blocks of 4, tokens 0 to 8. Bold: also with real vLLM, whose caches are larger and all of
one layout.
"""

LATENT_SPLITS = """
### No heads

MLA's latents or an indexer's keys, the same on every rank: two layers of 8 and of 6 bfloat16 for each token, of which
each rank of the consumer reads both from one rank of the producer. Blocks of 4, tokens 0 to 8.

"""

LAYOUTS = """
## Layouts

Layout of the producer down, of the consumer across; 4 heads of 4 bfloat16, TP 2 to TP 1, two layers, blocks of 4,
tokens 2 to 8: 896 bytes, and 1280 where the last block, of which only token 8 was asked for, moves whole. Letters are
axes, outermost first: L layers, B blocks, N tokens, H heads, D head size, C content (K and V side by side), 2 the
planes of K and V. "cpu" is vLLM's CPU attention: in each (block, head), keys as [D][N], then values as [N][D].

"""

BLOCK_SIZES = """
## Block sizes

Tokens in a block of the producer down, of the consumer across. Tokens 5 to 28 move, so that most first blocks are hit
in part and most last blocks are filled in part; four layers: LBNHC, cpu and B2HND with 2 heads of 4 bfloat16, and one
of 8 bfloat16 without heads. TP 1 to TP 1. The tokens asked for have 2688 bytes.

"""

CONTEXT = """
## Context parallel

Ranks of the producer (TP = DCP) down, of the consumer across: two layers without heads, of 8 and of 6 bfloat16, whose
tokens are dealt over all ranks one at a time, 4 of each block to each rank. Tokens 3 to 38.

"""

SPECIAL = """
## Special cases

Above each table is its model: layers by name, with the KV heads of the whole model and sizes in elements. Block ids
are scattered unless said otherwise. "Tokens" are those that are asked for; of a group with a window only those that
it still looks at move.
"Overlaid" are layers of several groups that begin at the same address, as in vLLM's hybrid models. Of a state, the
window of its convolution is [channels, steps] (DS) or [steps, channels] (SD).
"""

NOTES = {
    "MiniMax-M3": """
Of the rows with its own sizes the first asks for 172 tokens, and moves K and V of 256: their heads are outermost in
blocks of 128, so the last block, of which 44 tokens were asked for, moves whole (1,048,576 bytes in all). The indexer's
keys have tokens outermost, and exactly 172 of them move to each of two ranks (176,128 bytes).
""",
}
"""Heading -> what is to be known above its tables."""

NIXL = """
## Over NIXL

Everything above uses the transport `local`. These were run over `nixl` (UCX) as well.

"""

REFUSED = """
## Refused

What does not fit is refused at the handshake, before a byte moves: the consumer's cache is untouched and the producer
gets its blocks back. The text names the field and both values.

"""

REAL = """
## Real vLLM

The tokens are those of the decode server alone, for prompts from 1 to 1187 tokens.

"""
