"""From two layouts and a request's blocks to the bytes that move.

`compile` compares two sides at the handshake; `PairPlan.bind` turns a request's block tables into descriptors and
proves them. boxes.py is the algebra, units.py what moves together, request.py block tables and descriptors,
compare.py the comparison, limits.py what it may cost; proof.py and sums.py why a plan may be trusted, shares.py and
destinations.py why all sources together may.
"""

from kvferry.layout import Refusal
from kvferry.plan.destinations import Destinations
from kvferry.plan.limits import MAX_DESCRIPTORS
from kvferry.plan.pairs import PairPlan, compile
from kvferry.plan.proof import Unproven, prove_together
from kvferry.plan.request import BlockTable, PlanBatch, TransferPlan, block_tables
from kvferry.plan.shares import prove_shares

__all__ = [
    "MAX_DESCRIPTORS",
    "BlockTable",
    "Destinations",
    "PairPlan",
    "PlanBatch",
    "Refusal",
    "TransferPlan",
    "Unproven",
    "block_tables",
    "compile",
    "prove_shares",
    "prove_together",
]
