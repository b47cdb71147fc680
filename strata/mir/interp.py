"""The NumPy interpreter of MIR: the oracle, and the `reference` device.

`wide=True` evaluates every float in f64 (complex in c128), whatever its declared type: the yardstick for kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from strata.core import Dim, DType, SymExpr, TensorType, as_dtype, located, solve_for, substitute
from strata.errors import DTypeError, ShapeError, StrataError, SymbolError, UnknownNameError
from strata.mir.graph import Graph, toposort
from strata.mir.ir import Node, Op, Value, as_tuple, near
from strata.mir.leaves import Input, Param, leaf_name, placeholder


@located
def evaluate(graph: Graph, feeds: Mapping[str, Any], *, wide: bool = False) -> tuple[np.ndarray, ...]:
    """Run a graph on arrays, by name; parameters are fed like inputs."""
    names = {*graph.input_names, *graph.param_names}
    for name in feeds:
        if name not in names:
            raise UnknownNameError(f"graph {graph.name!r} has no input {name!r}{near(name, names)}", code="N112")
    arrays: dict[Value, np.ndarray] = {}
    for leaf in (*graph.inputs, *graph.params):
        if leaf_name(leaf) not in feeds:
            given = f"{leaf.node.op.name} {leaf_name(leaf)!r} : {leaf.type}"
            raise UnknownNameError(f"graph {graph.name!r}: {given} is missing", code="N114")
        arrays[leaf] = as_array(feeds[leaf_name(leaf)], leaf.type, leaf_name(leaf), wide)
    binding = infer_binding({leaf: a.shape for leaf, a in arrays.items()})
    if not binding:
        return evaluate_values(graph.results, arrays, binding, wide=wide)
    try:
        results = evaluate_values(graph.results, arrays, binding, wide=wide)
    except StrataError:
        raise
    except Exception:
        _ask_again(graph, binding)  # says which sizes are to blame
        raise
    _ask_again(graph, binding)
    return results


def _ask_again(graph: Graph, binding: Mapping[str, Dim]) -> None:
    """Rules that let symbols pass look at the numbers that they are: a size means what the same number means."""
    graph.bind({name: size for name, size in binding.items() if name in graph.symbols()})


def as_array(data: Any, kind: TensorType, name: str, wide: bool = False) -> np.ndarray:
    """An array of the declared type; a different dtype class or shape is an error, narrower floats are not."""
    array = np.asarray(data)
    given = as_dtype(array.dtype)
    if (
        given is not kind.dtype
        and not isinstance(data, (int, float, bool, list, tuple))
        and not _fits(given, kind.dtype, wide)
    ):
        raise DTypeError(f"input {name!r} is {kind}, got {given}{list(array.shape)}", code="D102")
    if len(array.shape) != kind.ndim or any(
        isinstance(d, int) and d != n for d, n in zip(kind.shape, array.shape, strict=True)
    ):
        raise ShapeError(f"input {name!r} is {kind}, got {given}{list(array.shape)}", code="S107")
    return array.astype(_wide(kind.dtype) if wide else kind.dtype.np, copy=False)


def _fits(given: DType, wanted: DType, wide: bool) -> bool:
    if wide and given.is_inexact and wanted.is_inexact:
        return given.is_complex == wanted.is_complex
    return False


def infer_binding(shapes: Mapping[Value, Sequence[int]]) -> dict[str, int]:
    """Sizes of symbols from real shapes; the error names the two inputs that disagree."""
    found: dict[str, int] = {}
    source: dict[str, str] = {}
    pending: list[tuple[Dim, int, Value]] = []
    for leaf, shape in shapes.items():
        for declared, actual in zip(leaf.shape, shape, strict=True):
            if isinstance(declared, SymExpr):
                pending.append((declared, int(actual), leaf))
    for _ in range(len(pending) + 1):
        later: list[tuple[Dim, int, Value]] = []
        for declared, actual, leaf in pending:
            value = substitute(declared, found)
            solved = solve_for(value, actual) if isinstance(value, SymExpr) else None
            if isinstance(value, int):
                if value != actual:
                    first = ", ".join(f"{s} = {found[s]} from {source[s]!r}" for s in found if s in str(declared))
                    what = "parameter" if isinstance(leaf.node.op, Param) else "input"
                    raise SymbolError(
                        f"{what} {leaf_name(leaf)!r} has size {actual} where {declared} = {value} ({first})",
                        code="S154",
                    )
            elif solved is not None:
                found[solved[0]] = solved[1]
                source[solved[0]] = leaf_name(leaf)
                substitute(declared, found)
            else:
                later.append((declared, actual, leaf))
        if len(later) == len(pending):
            break
        pending = later
    return found


def evaluate_values(
    roots: Sequence[Value], known: Mapping[Value, np.ndarray], binding: Mapping[str, Dim], *, wide: bool = False
) -> tuple[np.ndarray, ...]:
    """Evaluate values from known ones. Arrays are dropped after their last use."""
    return Evaluation(roots, known).run(known, binding, wide=wide)


class Evaluation:
    """Values that are evaluated from the same known ones, once or many times."""

    def __init__(self, roots: Sequence[Value], known: Collection[Value]) -> None:
        self.roots = tuple(roots)
        kept = {*known, *roots}
        steps = []
        for node in reversed(toposort(roots, known)):
            last = [x for x in dict.fromkeys(node.inputs) if x not in kept]
            kept.update(last)
            steps.append((node, node.inputs, node.outputs, last))
        self._steps = steps[::-1]

    def run(
        self, known: Mapping[Value, np.ndarray], binding: Mapping[str, Dim], *, wide: bool = False
    ) -> tuple[np.ndarray, ...]:
        table = dict(known)
        for node, inputs, outputs, last in self._steps:
            table.update(zip(outputs, run_node(node, [table[x] for x in inputs], binding, wide=wide), strict=True))
            for x in last:
                del table[x]
        return tuple(table[r] for r in self.roots)


def run_node(
    node: Node, arrays: Sequence[np.ndarray], binding: Mapping[str, Dim], *, wide: bool = False
) -> tuple[np.ndarray, ...]:
    """One node on arrays, results in the declared types (or the wide ones)."""
    types = tuple(t.bind(binding) for t in node.types) if binding else node.types
    op = node.op.bind(binding) if binding else node.op
    if isinstance(op, (Input, Param)):
        op.numpy()
    try:
        try:
            return run_op(op, arrays, types, wide=wide)
        except ValueError as error:
            if not isinstance(error, StrataError):  # sizes that were open until now: the op says what is wrong
                op.infer_types([TensorType(x.type.dtype, a.shape) for x, a in zip(node.inputs, arrays, strict=True)])
            raise
    except StrataError as error:
        if error.place is None:
            error.place = node.origin.place
        raise


def run_op(
    op: Op, arrays: Sequence[np.ndarray], types: Sequence[TensorType], *, wide: bool = False
) -> tuple[np.ndarray, ...]:
    """An op's NumPy meaning with half precision computed in f32 and rounded once."""
    wider = [computed_in(op, as_dtype(a.dtype)) for a in arrays]
    computed = [a if t is None else a.astype(t) for a, t in zip(arrays, wider, strict=True)]
    with np.errstate(all="ignore"):
        outs = as_tuple(op.numpy(*computed))
    results = []
    for out, kind in zip(outs, types, strict=True):
        array = np.asarray(out)
        if kind.is_static and array.shape != kind.shape:
            raise ShapeError(f"{op.name}: infer says {kind}, numpy gives {array.dtype}{list(array.shape)}", code="S108")
        results.append(array.astype(_wide(kind.dtype) if wide else kind.dtype.np, copy=False))
    return tuple(results)


def computed_in(op: Op, dtype: DType) -> Any:
    """What NumPy computes an op of a type in, None for the type itself: half precision in f32, rounded once, four bits
    in bytes, wrapped once; a composition does so for each of its ops, which wrap one by one."""
    if dtype.is_float and dtype.bits < 32:
        return np.float32
    if dtype.bits == 4 and type(op).numpy is not Op.numpy:
        return np.int8 if dtype.kind == "int" else np.uint8
    return None


def _wide(dtype: DType) -> np.dtype[Any]:
    if dtype.is_float:
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if dtype.is_complex else dtype.np


def evaluate_decomposition(op: Op, arrays: Sequence[np.ndarray]) -> Any:
    """The meaning of a composition: its decomposition, evaluated on arrays of these types."""
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    outs = as_tuple(op.decompose(*inputs))
    results = evaluate_values(outs, dict(zip(inputs, arrays, strict=True)), {})
    return results if op.multi_output else results[0]
