"""Time estimates in seconds: of an interpreted run and of a compile.

Both are computed from the program, never measured while it runs, so that the same program makes the same choices, and
gives the same bits, in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt

from strata.core import static_prod
from strata.mir import Constant, Graph, Node

# Measured on one core of a server processor (AVX2, 3 GHz), rounded.
CALL = 2e-6  # an op, whatever its size
ELEMENT = 1.2e-9  # an element read or written
COMPOSED = 6.0  # a composition makes several passes over its arrays
FLOP = 2.5e-11  # of a matmul
COMPARED = 4e-9  # an element that is put in order among two
IN_ORDER = ("sort", "argsort", "topk", "searchsorted")  # ops that compare each element with a part of a row
COMPILE = 0.04  # a compile
COMPILE_NODE = 0.004  # and each op of it


def compile_price(nodes: int) -> float:
    """How long a compile of this many ops is expected to take."""
    return COMPILE + COMPILE_NODE * nodes


def run_price(nodes: Sequence[Node]) -> float:
    """How long NumPy is expected to take."""
    return sum(_seconds(n) for n in nodes)


def _seconds(node: Node) -> float:
    if isinstance(node.op, Constant):
        return 0.0
    outs = sum(static_prod(t.shape) or 0 for t in node.types)
    ins = [static_prod(x.shape) or 0 for x in node.inputs]
    if node.op.name in ("matmul", "einsum") and len(ins) == 2:
        return CALL + FLOP * 2 * sqrt(ins[0]) * sqrt(ins[1]) * sqrt(outs)
    if node.op.name == "conv" and len(ins) == 2:  # windows written side by side, and a matmul
        taps = ins[1] / max(static_prod(node.inputs[1].shape[:1]) or 1, 1)
        rows = outs / max(static_prod(node.inputs[1].shape[:1]) or 1, 1)
        return CALL + ELEMENT * (outs + ins[0] + rows * taps) + FLOP * 2 * outs * taps
    inner = [field for field in node.op.static_fields().values() if isinstance(field, Graph)]
    if inner:
        rounds = getattr(node.op, "length", 1)
        return sum(run_price(g.nodes()) for g in inner) * (rounds if isinstance(rounds, int) else 1)
    if node.op.name in IN_ORDER:
        axis = node.op.static_fields().get("axis", -1)
        row = (node.inputs[0].shape or (1,))[axis if isinstance(axis, int) else -1]
        return CALL + COMPARED * max(*ins, outs) * log2(2 + (row if isinstance(row, int) else 0))
    return CALL + ELEMENT * (outs + sum(ins)) * (COMPOSED if node.op.is_composition else 1.0)
