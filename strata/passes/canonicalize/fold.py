"""Constant folding, and removal of ops that do nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strata.core import bool_, i32, i64
from strata.errors import IndexRangeError
from strata.mir import Constant, Graph, Input, Node, Param, Value, constant, field_symbols, run_op
from strata.ops import Indexed
from strata.passes.base import Pass, PassContext, register, rewrite

# ops on floats that give the same bits wherever they are computed: they move, choose, or round once as IEEE 754 says
MOVES = frozenset(
    {
        "broadcast_to", "cast", "complex", "concat", "conj", "dynamic_slice", "dynamic_update_slice", "flip", "gather",
        "gather_elements", "gather_nd", "imag", "negative", "pad", "real", "reshape", "resize_nearest_2x", "slice",
        "stop_gradient", "transpose", "where", "windows",
    }
)  # fmt: skip
ROUNDS_ONCE = frozenset(
    {
        "abs", "add", "ceil", "copysign", "cummax", "cummin", "dequantize", "divide", "floor", "maximum", "minimum",
        "multiply", "quantize", "quantize_dequantize", "reduce_max", "reduce_min", "relu", "round", "sign", "sort",
        "sqrt", "subtract", "topk", "trunc",
    }
)  # fmt: skip


@register
@dataclass(frozen=True)
class Fold(Pass):
    """Replace pure ops on constants by their value, up to a size.

    Whether something is constant may depend on what is known of sizes, so only ops that have the same bits in a kernel
    are folded. Others are computed once, before the first run. Without `sizes`, floats that follow from whole numbers,
    as from a size, are left as well: passes that look for constants then find the same where the size is a symbol.
    """

    limit: int = 4096  # elements: larger values are cheaper to compute than to carry
    sizes: bool = True  # whether a float that is made of whole numbers is folded

    name: ClassVar[str] = "fold"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        failing, readers = _failing(graph), _readers(graph)

        def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            made = self._fold(value, inputs, failing)
            if made is None or all(_takes(r, m) for v, m in zip(value.node.outputs, made) for r in readers.get(v, ())):
                return made
            return None  # ids that are computed are clamped, those that are known are refused

        return rewrite(graph, change, self.name)

    def _fold(self, value: Value, inputs: tuple[Value, ...], failing: set[Value]) -> Sequence[Value] | None:
        node = value.node
        if (
            not isinstance(node.op, (Input, Param, Constant))
            and node.op.pure
            and value not in failing
            and all(t.is_static and t.size == 0 for t in node.types)
        ):
            return [constant(np.empty(t.static_shape, t.dtype.np)) for t in node.types]
        is_known = bool(node.inputs) or node.op.name == "dim_size"  # a size that was bound is a number like any other
        if not is_known or not node.op.pure or not all(isinstance(x.node.op, Constant) for x in inputs):
            return None
        if not _is_exact(node) or (not self.sizes and _is_of_sizes(node)):
            return None
        fields = tuple(node.op.static_fields().values())
        if field_symbols(fields) or any(isinstance(x, Graph) for x in fields):
            return None  # it depends on sizes too, or holds loops that may run for long
        sizes = [t.size for t in node.types]
        if not all(isinstance(s, int) and s <= self.limit for s in sizes):
            return None
        if node.op.name == "random_bits" or (node.op.name == "broadcast_to" and any(s > 1 for s in sizes)):
            return None  # numbers are drawn where they are used, known or not; a spread constant is free there
        arrays = [x.node.op.data.array for x in inputs if isinstance(x.node.op, Constant)]
        return [constant(a) for a in run_op(node.op, arrays, node.types)]


def _is_exact(node: Node) -> bool:
    dtypes = [t.dtype for t in node.types if t.dtype.is_inexact]
    if not dtypes or node.op.name in MOVES:
        return True
    return node.op.name in ROUNDS_ONCE and not any(d.is_complex for d in dtypes)


def _is_of_sizes(node: Node) -> bool:
    """Whether a node makes one float of whole numbers, or of a comparison of some, as what is computed of sizes is."""
    made_of = {x.dtype for x in node.inputs}
    return any(t.dtype.is_float and t.size == 1 for t in node.types) and not made_of.isdisjoint((i32, i64, bool_))


def _failing(graph: Graph) -> set[Value]:
    """What follows from ids into an axis that may be empty: then it is an error, also where results are empty."""
    found: set[Value] = set()
    for node in graph.nodes():
        fails = isinstance(node.op, Indexed) and node.op.may_find_nothing(*(x.type for x in node.inputs))
        if fails or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    """The ops that take a value as ids."""
    found: dict[Value, list[Node]] = defaultdict(list)
    for node in graph.nodes():
        if isinstance(node.op, Indexed):
            found[node.inputs[node.op.ids_at]].append(node)
    return found


def _takes(reader: Node, ids: Value) -> bool:
    inputs = list(reader.inputs)
    assert isinstance(reader.op, Indexed)
    inputs[reader.op.ids_at] = ids
    try:
        reader.op.check_inputs(inputs, [x.type for x in reader.inputs])
    except IndexRangeError:
        return False
    return True
