"""Convolutions whose weights have symbolic sizes: code is generated when the sizes are known, and cached.

How a convolution is computed, and so the order of its sums, follows from the sizes of its weights. Where they are
symbols, a step is the program of the convolution alone, compiled for the values that they turn out to have; sizes of
images stay open in it. So a sum has the bits that it has in a program whose sizes were known all along.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from strata.backends.llvm.control.body import GraphBody, make_body
from strata.backends.llvm.control.loops import walked
from strata.backends.llvm.ir.overrides import NativeOp, Sizes, override
from strata.core import SymExpr, Target, symbols
from strata.mir import Graph, Node, Op

KEPT = 32  # programs of one step


def open_sizes(op: Any, types: Any) -> frozenset[str]:
    """The symbols in the sizes of the weights, and in the number of groups."""
    dims: list[Any] = [op.groups, *(op.shape if op.name == "conv_backward_weight" else types[1].shape)]
    return frozenset(name for d in dims if isinstance(d, SymExpr) for name in symbols(d))


def is_open(op: Op, types: Any, target: Target) -> bool:
    """Whether a convolution of numbers that are rounded has weights of symbolic sizes."""
    return types[0].dtype.is_inexact and bool(open_sizes(op, types))


@override("conv", "conv_first", "conv_last", whole=True)
@override("conv_backward_weight", instead_of_parts=is_open)
def open_convolution(node: Node, target: Target) -> NativeOp | None:
    """The step of a convolution with weights of symbolic sizes."""
    types = [x.type for x in node.inputs]
    if not is_open(node.op, types, target):
        return None
    names = sorted(open_sizes(node.op, types))
    made: OrderedDict[tuple[int, ...], GraphBody] = OrderedDict()

    def body_for(sizes: Sizes) -> GraphBody:
        key = tuple(sizes[name] for name in names)
        if key not in made:
            binding = dict(zip(names, key, strict=True))
            graph = Graph(node.op.name)
            inputs = [graph.input(f"x{i}", t.bind(binding)) for i, t in enumerate(types)]
            made[key] = make_body(graph.outputs(node.op.bind(binding)(*inputs)), range(0), target, in_loop=False)
        made.move_to_end(key)
        while len(made) > KEPT:
            made.popitem(last=False)
        return made[key]

    return walked(body_for)
