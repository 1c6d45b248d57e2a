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
blocks of 4. A result is two numbers, **bytes / descriptors**, summed over the ranks of the consumer. P is the
producer, D the consumer.

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
CPU attention (keys transposed), and separate K and V (2BNHD). Bold: also with real vLLM.
"""

LATENT_SPLITS = """
### No heads

MLA's latents or an indexer's keys, the same on every rank: two layers, of which each rank of the consumer reads both
from one rank of the producer.

"""

LAYOUTS = """
## Layouts

Layout of the producer down, of the consumer across; 4 heads, TP 2 to TP 1, two layers, tokens 2 to 8. Letters are
axes, outermost first: L layers, B blocks, N tokens, H heads, D head size, C content (K and V side by side), 2 the
planes of K and V. "cpu" is vLLM's CPU attention: in each (block, head), keys as [D][N], then values as [N][D].

"""

BLOCK_SIZES = """
## Block sizes

Tokens in a block of the producer down, of the consumer across. Tokens 5 to 28 move, so that most first blocks are hit
in part and most last blocks are filled in part; four layers: LBNHC, cpu, B2HND and one without heads.

"""

CONTEXT = """
## Context parallel

Ranks of the producer (TP = DCP) down, of the consumer across: without heads, the tokens are dealt over all ranks one
at a time, 4 of each block to each rank. Tokens 3 to 38.

"""

SPECIAL = """
## Special cases

Above each table is its model: layers by name, with the KV heads of the whole model and sizes in elements. Block ids
are scattered unless said otherwise. "Tokens" are those that are asked for: from the first to before the second number.
"Overlaid" are layers of several groups that begin at the same address, as in vLLM's hybrid models. Of a state, the
window of its convolution is [channels, steps] (DS) or [steps, channels] (SD).
"""

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
