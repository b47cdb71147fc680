"""Ops whose code is generated for sizes that may be symbols: that is done when the sizes are known, and cached.

How a convolution is computed, and so the order of its sums, follows from the sizes of its weights; how attention is,
from its heads and their widths. Where these are symbols, a step is the program of the op alone, compiled for the values
that they turn out to have; other sizes stay open in it. So a sum has the bits that it has in a program whose sizes were
known all along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.llvm.backend import CpuBackend
from strata.backends.llvm.control.body import GraphBody
from strata.backends.llvm.control.loops import walked
from strata.backends.llvm.ir.overrides import NativeOp, Planned, Sizes, open_sizes, override
from strata.config import config
from strata.core import Dim, Table, Target, TensorType, substitute
from strata.lir import plan as lay_out
from strata.mir import Graph, Node, Op, as_tuple
from strata.passes import PassChoices, PassContext, default_passes, run_passes


def _of_weights(op: Any, types: Sequence[TensorType]) -> Sequence[Dim]:
    """The sizes of the weights and the number of groups, where sums are rounded."""
    if not types[0].dtype.is_inexact:
        return ()
    return op.groups, *(op.shape if op.name == "conv_backward_weight" else types[1].shape)


def _is_open(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    return bool(open_sizes(op, types))


@override("conv", "conv_first", "conv_last", whole=True, numbers=_of_weights)
@override("conv_backward_weight", instead_of_parts=_is_open, numbers=_of_weights)
def _known_convolution(node: Node, target: Target) -> None:
    """With weights of known sizes, a convolution is not a separate step."""


def open_step(node: Node, target: Target) -> NativeOp:
    """The step of an op with open sizes."""
    types = [x.type for x in node.inputs]
    names = sorted(open_sizes(node.op, types))
    made: Table[tuple[int, ...], GraphBody] = Table("open steps")

    def body_for(sizes: Sizes) -> GraphBody:
        binding = {name: sizes[name] for name in names}

        def make() -> GraphBody:
            graph = Graph(node.op.name)
            inputs = [graph.input(f"x{i}", t.bind(binding)) for i, t in enumerate(types)]
            results = as_tuple(node.op.bind(binding)(*inputs))
            backend = CpuBackend(target)
            context = PassContext(target, backend.takes, backend.capabilities.claims, verify_each=config().verify)
            passes = default_passes(context, PassChoices(check_indices=config().check_indices))
            optimized, _ = run_passes(passes, graph.outputs(*results), context)
            lir = lay_out(optimized, target, whole=backend.runs_whole, views=backend.reads_views, bodies=True)
            return GraphBody(lir, target, in_loop=False)

        return made.get_or_make(tuple(binding.values()), make)

    step = walked(body_for)

    def plan(sizes: Sizes) -> Planned:
        is_empty = all(substitute(t.size, sizes) == 0 for t in node.types)
        return Planned(()) if is_empty else step.plan(sizes)

    return NativeOp(step.key, step.emit, step.functions, plan)
