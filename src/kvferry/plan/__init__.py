"""From two layouts and a request's blocks to the bytes that move.

`compile` compares two sides at the handshake; `PairPlan.bind` turns a request's block tables into descriptors and
proves them. boxes.py is the algebra, units.py what moves together, request.py block tables and descriptors,
pairs.py the comparison, proof.py why a plan may be trusted.
"""

from kvferry.layout import Refusal
from kvferry.plan.pairs import PairPlan, compile
from kvferry.plan.proof import Unproven, prove_shares
from kvferry.plan.request import BlockTable, PlanBatch, TransferPlan

__all__ = [
    "BlockTable",
    "PairPlan",
    "PlanBatch",
    "Refusal",
    "TransferPlan",
    "Unproven",
    "compile",
    "prove_shares",
]
