"""Which plans are row-wise along an axis, so that its first places can be run alone.

The answer is read off the kernels: an element of an output at place `i` of the axis may load elements of others at the
same place `i` only, may not reduce over the axis, and may not use its size. Attention is the exception that the
contract of active extents names: its queries and keys are both limited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strata.core import Dim, SymExpr, TensorType, substitute, symbols
from strata.errors import StrataError
from strata.kernel import Axis, Expr, Kernel, Load, Reduce, Scan, Size, postorder
from strata.lir import Lir, Step
from strata.mir import Graph, Node, Op, Value, leaf_name, substitute_values

ROWS = "rows"  # what a size that is a number in the graph is called where it is opened


def row_obstacles(lir: Lir, axis: str, *, attention: bool = True) -> list[str]:
    """The steps that mix places along a symbolic size, each with its reason; empty when none does."""
    found = []
    for buffer in lir.buffers:
        reason = _type_obstacle(buffer.type, axis)
        if reason and buffer.role in ("input", "result"):
            found.append(f"{buffer.role} {buffer.key} : {buffer.type}: {reason}")
        if buffer.role == "param" and any(_mentions(d, axis) for d in buffer.type.shape):
            found.append(f"parameter {buffer.key} : {buffer.type}: it is set for all places along {axis}")
    for step in lir.schedule:
        reason = _step_obstacle(step, axis, attention)
        if reason:
            found.append(f"{step.label}: {reason}")
    return found


def places(kind: TensorType, axis: str) -> tuple[int, ...]:
    """The axes of a type whose size is the symbol."""
    return tuple(i for i, d in enumerate(kind.shape) if _is_symbol(d, axis))


def _is_symbol(dim: Dim, axis: str) -> bool:
    return isinstance(dim, SymExpr) and str(dim) == axis


def _mentions(dim: Dim, axis: str) -> bool:
    return isinstance(dim, SymExpr) and axis in symbols(dim)


def _type_obstacle(kind: TensorType, axis: str) -> str | None:
    odd = next((d for d in kind.shape if _mentions(d, axis) and not _is_symbol(d, axis)), None)
    return f"its size {odd} is made from {axis}" if odd is not None else None


def _step_obstacle(step: Step, axis: str, attention: bool) -> str | None:
    if step.kernel is not None:
        return _kernel_obstacle(step.kernel, axis)
    if step.is_module:
        return "a module is compiled for its sizes"
    (node,) = step.nodes
    kinds = [*(x.type for x in node.inputs), *node.types]
    if not any(_mentions(d, axis) for kind in kinds for d in kind.shape):
        return None
    if node.op.name == "attention" and attention:
        return _attention_obstacle(node, axis)
    if node.op.elementwise and all(kind.shape == kinds[-1].shape for kind in kinds):
        return None
    return f"{node.op.name} is not known to keep places along {axis} apart"


def _attention_obstacle(node: Node, axis: str) -> str | None:
    rows = {places(x.type, axis) for x in (*node.inputs[:3], node.outputs[0])}
    odd = next((x.type for x in (*node.inputs, *node.outputs) if _type_obstacle(x.type, axis)), None)
    if odd is not None:
        return f"{odd} has a size made from {axis}"
    return None if len(rows) == 1 and len(next(iter(rows))) == 1 else f"queries and keys differ along {axis}"


def _kernel_obstacle(kernel: Kernel, axis: str) -> str | None:
    for buffer in kernel.buffers:
        reason = _type_obstacle(buffer.type, axis) or (
            f"{buffer.type} has {axis} twice" if len(places(buffer.type, axis)) > 1 else None
        )
        if reason:
            return reason
    for store in kernel.stores:
        at = places(store.buffer.type, axis)
        row = store.index[at[0]] if at else None
        if row is not None and not isinstance(row, Axis):
            return f"it writes at computed places along {axis}"
        reason = _value_obstacle([store.value, *store.index], row, axis)
        if reason:
            return reason
    return None


def _value_obstacle(roots: list[Expr], row: Expr | None, axis: str) -> str | None:
    nodes = list(postorder(roots))
    for node in nodes:
        if isinstance(node, Reduce) and any(_mentions(a.extent, axis) for a in node.axes):
            return f"{node.kind} runs over {axis}"
        if isinstance(node, Scan) and _mentions(node.axis.extent, axis):
            return f"a running {node.kind} goes along {axis}"
    for node in nodes:
        at = places(node.buffer.type, axis) if isinstance(node, Load) else ()
        if at and isinstance(node, Load) and node.index[at[0]] is not row:
            return f"it reads other places along {axis}"
    if any(isinstance(node, Size) and _mentions(node.dim, axis) for node in nodes):
        return f"it uses the size {axis}"
    return None


def with_open_rows(graph: Graph, padded: Mapping[str, int], upper: int, rows: SymExpr) -> Graph:
    """The graph with a symbolic number of rows in place of `upper`, also in ops that name the shape of their result.

    `padded` are the inputs that have rows, with the elements of one where an axis of `upper` times as many holds them
    one after the other. Such rows get their own axis, in results, too.
    """
    for change in (None, lambda op: _leading(op, upper, rows)):
        try:
            return _opened(graph, padded, upper, rows, change)
        except StrataError:
            pass
    return _opened(graph, padded, upper, rows, lambda op: _leading(_behind_ones(op, upper, rows), upper, rows))


def _opened(
    graph: Graph, padded: Mapping[str, int], upper: int, rows: SymExpr, change: Callable[[Op], Op] | None
) -> Graph:
    made = Graph(graph.name)
    known: dict[Value, Value] = {}
    for x in graph.inputs:
        name, kind = leaf_name(x), x.type
        inner = padded.get(name, 0)
        if inner and kind.ndim and kind.shape[0] == upper:
            known[x] = made.input(name, kind.with_shape((rows, *kind.shape[1:])))
        elif inner > 1 and kind.shape == (upper * inner,):
            known[x] = made.input(name, kind.with_shape((rows, inner))).reshape((rows * inner,))
        else:
            known[x] = made.input(name, kind)
    for x in graph.params:
        known[x] = made.param(leaf_name(x), x.type)
    return made.outputs(*(_in_rows(x, rows) for x in substitute_values(graph.results, known, change)))


def _in_rows(x: Value, rows: SymExpr) -> Value:
    """A result whose one axis has rows one after the other, with an axis for the rows."""
    if x.type.ndim != 1:
        return x
    inner = substitute(x.type.shape[0], {str(rows): 1})
    return x.reshape((rows, inner)) if isinstance(inner, int) and x.type.shape[0] == rows * inner != rows else x


def _leading(op: Op, upper: int, rows: SymExpr) -> Op:
    """An op that names a result's shape, with the rows in front symbolic."""
    shape = op.static_fields().get("shape")
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int) and shape[0]:
        if shape[0] == upper:
            return type(op)(**{**op.static_fields(), "shape": (rows, *shape[1:])})
        if len(shape) == 1 and shape[0] % upper == 0:  # rows one after the other
            return type(op)(**{**op.static_fields(), "shape": (rows * (shape[0] // upper),)})
    return op


def _behind_ones(op: Op, upper: int, rows: SymExpr) -> Op:
    """A reshape that puts axes of one place before the rows, with the rows symbolic."""
    shape = op.static_fields().get("shape")
    if op.name != "reshape" or not isinstance(shape, tuple):
        return op
    at = next((i for i, d in enumerate(shape) if d != 1), 0)
    if not at or shape[at] != upper:
        return op
    return type(op)(**{**op.static_fields(), "shape": (*shape[:at], rows, *shape[at + 1 :])})
