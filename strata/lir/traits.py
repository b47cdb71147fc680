"""What fusion needs to know of an op: found by lowering it alone, and cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strata.core import Table, TensorType, f32
from strata.kernel import SCALARS, Expr, KernelBuilder, Load, Reduce, Scalar, Scan, postorder
from strata.mir import Constant, Input, Node, Op, Param, Value, as_tuple


@dataclass(frozen=True, slots=True)
class Traits:
    """What grouping needs to know of an op: found by lowering it alone."""

    lowers: bool
    reduces: bool
    scans: bool
    contracts: bool
    moves: bool  # copies elements: no arithmetic
    cost: int
    updates: bool = False  # changes part of its first input
    sums: bool = False  # adds up floats that are not its own products
    slides: bool = False  # a contraction over windows of its first input, read in runs along the last axis


GENERATORS = ("random_bits", "iota")
_SPREADS = ("broadcast_to", "reshape", "transpose")
_CHOICES = ("select", "and", "or", "not", "lt", "le", "gt", "ge")
SIGNIFICANT = 1 << 13  # a number that a person wrote has zeros in the last bits of its 24, or is used again and again
LEARNED = 8  # numbers of a model that are read from memory, so that kernels that differ in them alone are one
STEP = Traits(False, False, False, False, False, 0)  # of an op that is a separate step
_TRAITS: Table[tuple[Op, tuple[TensorType, ...]], Traits] = Table("op traits")


def traits(node: Node) -> Traits:
    """The traits of a node's op, remembered for equal ops on equal types."""
    key = (node.op, tuple(x.type for x in node.inputs))
    return _TRAITS.peek(key) or _TRAITS.get_or_make(key, lambda: _probe(node))


def _probe(node: Node) -> Traits:
    if not has_kernel(node.op) or node.op.own_kernel(*(x.type for x in node.inputs)) is not None:
        return STEP
    k = KernelBuilder("probe")
    inputs = [k.input(f"in{i}", x.type) for i, x in enumerate(node.inputs)]
    roots = [e for t in node.types for e in as_tuple(node.op.lower(k, k.axes(t.shape), *inputs))]
    exprs = postorder(roots)
    reduces = [e for e in exprs if isinstance(e, Reduce)]
    contracts = len(node.inputs) == 2 and any(e.kind == "sum" and is_product_of_loads(e) for e in reduces)
    sums = any(e.kind == "sum" and e.dtype.is_float for e in reduces)
    values = [e for e in exprs if isinstance(e, Scalar) and e.dtype.name != "i64"]
    chooses = not reduces and all(e.name in _CHOICES for e in values)  # by index: loops are cut where it changes
    cost = 0 if chooses else sum(SCALARS[e.name].cost for e in values)
    return Traits(
        lowers=True, reduces=bool(reduces), scans=any(isinstance(e, Scan) for e in exprs), contracts=contracts,
        moves=not reduces and not values and len(node.inputs) == 1, cost=cost, sums=sums and not contracts,
        updates=type(node.op).lower_into is not Op.lower_into, slides=contracts and getattr(node.op, "slides", False),
    )  # fmt: skip


def has_kernel(op: Op) -> bool:
    return type(op).lower is not Op.lower and op.has_rule("lower")


def is_product_of_loads(reduce: Reduce) -> bool:
    """sum of A * B, with casts and guards in between: the shape of a contraction."""
    body = _strip(reduce.body)
    if not (isinstance(body, Scalar) and body.name == "mul"):
        return False
    left, right = (_strip(a) for a in body.args)
    return isinstance(left, Load) and isinstance(right, Load) and left.buffer != right.buffer


def _strip(e: Expr) -> Expr:
    while isinstance(e, Scalar) and e.name in ("cast", "select"):
        e = e.args[1] if e.name == "select" else e.args[0]
    return e


def is_inline_constant(node: Node) -> bool:
    return isinstance(node.op, Constant) and node.op.data.array.size == 1


def is_leaf(node: Node) -> bool:
    return isinstance(node.op, (Input, Param, Constant))


def is_generated(value: Value) -> bool:
    """Whether a value of random floats, or of positions, has no element of a buffer for each of its own: where it is
    summed, nothing says in which order it lies."""
    stack, found = [value] if value.dtype.is_inexact else [], False
    while stack:
        x = stack.pop()
        if x.node.op.name in GENERATORS:
            found = True
        elif is_leaf(x.node) or not (x.node.op.elementwise or x.node.op.name in _SPREADS):
            return False
        else:
            stack += [y for y in x.node.inputs if y.type.size == x.type.size and not is_inline_constant(y.node)]
    return found


def learned_numbers(users: Mapping[Value, Sequence[Node]]) -> set[Value]:
    """Scalars that training gave their values: odd ones that one op reads, where a graph has several of them."""
    found = {
        x
        for x, nodes in users.items()
        if len(nodes) == 1 and is_inline_constant(x.node) and x.dtype is f32 and nodes[0].op.elementwise and _is_odd(x)
    }
    return found if len(found) >= LEARNED else set()


def _is_odd(x: Value) -> bool:
    assert isinstance(x.node.op, Constant)
    return bool(x.node.op.data.array.reshape(-1).view(np.uint32)[0] % SIGNIFICANT)
