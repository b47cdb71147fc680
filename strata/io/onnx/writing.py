"""ONNX export: a model from a graph, a module or a function of tensors.

Ops with a counterpart in ONNX are written by a table. Ops that are compositions are written as what they are made of.
The rest is refused, all in one error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from strata.core import Dim, SymExpr, flatten, here, located, symbols
from strata.errors import LowerError, OptionError, UnknownNameError, file_error
from strata.io.onnx.dtypes import NUMBER
from strata.mir import Constant, Graph, Leaf, Node, Value, as_tuple, fresh_scope, leaf_name, placeholder, toposort
from strata.tensor import Tensor, asarray

OPSET = 21
MOST_OPSETS = 1000  # far beyond every version there will be

Writer = Callable[["Exporter", Node, list[str]], "str | Sequence[str]"]


@located
def export(
    program: Any,
    path: str | os.PathLike[str] | None = None,
    *examples: Any,
    params: Mapping[str, Any] | None = None,
    opset: int = OPSET,
) -> Any:
    """Write a graph, a module, or a function (with example arguments) as an ONNX model, which is also returned.

    `params` gives the values of parameters; those without one are inputs of the model. Symbolic sizes keep their names.
    """
    if not 1 <= opset <= MOST_OPSETS:
        raise OptionError(f"export: opset is a version from 1 to {MOST_OPSETS}, got {opset}", code="O503")
    graph = _as_graph(program, examples)
    model = Exporter(graph, {name: np.asarray(x) for name, x in (params or {}).items()}, opset).model()
    if path is not None:
        try:
            Path(path).write_bytes(model.SerializeToString())
        except OSError as error:
            raise file_error(path, error, code="F500", what="cannot be written", place=here()) from None
    return model


def _as_graph(program: Any, examples: Sequence[Any]) -> Graph:
    if isinstance(program, Graph):
        return program
    if hasattr(program, "lower") and not isinstance(program, (str, bytes)):
        lowered: Graph = program.lower()
        return lowered
    if not callable(program):
        raise OptionError(f"export: {type(program).__name__} is not a graph, module or function", code="O503")
    try:
        inspect.signature(program).bind(*examples)
    except (TypeError, ValueError) as error:
        name = getattr(program, "__name__", type(program).__name__)
        raise OptionError(
            f"export: {name} and {len(examples)} example arguments: {error}", code="O503",
            fix='one array for each argument behind the path: export(f, "f.onnx", x, y)',
        ) from None  # fmt: skip
    scope = fresh_scope()
    names = [placeholder(f"x{i}", asarray(x).type, scope) for i, x in enumerate(examples)]
    results, _ = flatten(program(*(Tensor(x) for x in names)))
    graph = Graph(getattr(program, "__name__", "main"))
    graph.scope, graph.inputs = scope, tuple(names)
    graph.results = tuple(asarray(r).value for r in results)
    return graph


class Exporter:
    """Writes one graph: nodes and initializers as they are needed, a name for every value."""

    def __init__(self, graph: Graph, params: Mapping[str, np.ndarray], opset: int) -> None:
        unknown = set(params) - set(graph.param_names)
        if unknown:
            raise UnknownNameError(f"export: {graph.name!r} has no parameter {min(unknown)!r}", code="N502")
        self.graph = graph
        self.params = params
        self.opset = opset
        self.nodes: list[Any] = []
        self.held: list[Any] = []
        self.names: dict[Value, str] = {}
        self._sizes: dict[Dim, str] = {}
        self._count = 0
        self._missing: dict[str, None] = {}

    def model(self) -> Any:
        inputs = []
        for leaf in (*self.graph.inputs, *self.graph.params):
            name = self.names[leaf] = leaf_name(leaf)
            if name in self.params:
                self.held.append(numpy_helper.from_array(self.params[name].astype(leaf.dtype.np), name))
            else:
                inputs.append(_port(name, leaf))
        self.write(self.graph.results)
        if self._missing:
            raise LowerError(f"export: ONNX has no counterpart of {', '.join(self._missing)}", code="L501")
        outputs = []
        for i, result in enumerate(self.graph.results):
            self.nodes.append(helper.make_node("Identity", [self.names[result]], [f"output_{i}"]))
            outputs.append(_port(f"output_{i}", result))
        graph = helper.make_graph(self.nodes, self.graph.name, inputs, outputs, self.held)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def write(self, results: Sequence[Value]) -> None:
        """Nodes for everything below `results` that has no name yet."""
        for node in toposort(results, self.names):
            if node.outputs[0] in self.names:
                continue
            writer = WRITERS.get(node.op.name)
            if isinstance(node.op, Constant):
                self.names[node.outputs[0]] = self.array(node.op.data.array)
            elif isinstance(node.op, Leaf):
                self.names[node.outputs[0]] = self.array(Tensor(node.outputs[0]).numpy())
            elif writer is not None:
                made = writer(self, node, [self.names[x] for x in node.inputs])
                found = [made] if isinstance(made, str) else list(made)
                self.names |= dict(zip(node.outputs, found, strict=False))
            elif node.op.is_composition:
                parts = as_tuple(node.op.decompose(*node.inputs))
                self.write(parts)
                self.names |= {x: self.names[y] for x, y in zip(node.outputs, parts, strict=True)}
            else:
                self._missing[node.op.name] = None
                self.names |= dict.fromkeys(node.outputs, "missing")

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        """A node; its output, or a list of them."""
        names = [self.fresh() for _ in range(outputs)]
        kept = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(helper.make_node(op, list(inputs), names, **kept))
        return names[0] if outputs == 1 else names

    def fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def array(self, data: Any, dtype: Any = None) -> str:
        """An initializer."""
        name = self.fresh()
        self.held.append(numpy_helper.from_array(np.asarray(data, dtype), name))
        return name

    def dims(self, shape: Sequence[Dim]) -> str:
        """A shape as a tensor: an initializer, or arithmetic on the shapes of inputs."""
        if all(isinstance(d, int) for d in shape):
            return self.array(shape, np.int64)
        parts = [self.array([d], np.int64) if isinstance(d, int) else self.size(d) for d in shape]
        return str(self.add("Concat", parts, axis=0))

    def size(self, dim: Dim) -> str:
        """A size as a tensor of one element."""
        if not isinstance(dim, SymExpr):
            return self.array([dim], np.int64)
        if dim not in self._sizes:
            self._sizes[dim] = self._find(dim) or self._polynomial(dim)
        return self._sizes[dim]

    def _find(self, dim: SymExpr) -> str | None:
        for leaf in (*self.graph.inputs, *self.graph.params):
            for axis, d in enumerate(leaf.shape):
                if d == dim:
                    return str(self.add("Shape", [leaf_name(leaf)], start=axis, end=axis + 1))
        return None

    def _polynomial(self, dim: SymExpr) -> str:
        total: str | None = None
        for atoms, factor in dim.terms:
            term = self.array([factor], np.int64)
            for atom in atoms:
                term = self.add("Mul", [term, self._atom(atom)])
            total = term if total is None else self.add("Add", [total, term])
        assert total is not None
        return total

    def _atom(self, atom: Any) -> str:
        expression = SymExpr((((atom,), 1),))
        if not hasattr(atom, "kind"):
            found = self._find(expression)
            if found is None:
                raise LowerError(f"export: no input has the size {next(iter(symbols(expression)))}", code="L501")
            return found
        op = {"floordiv": "Div", "mod": "Mod", "min": "Min", "max": "Max"}[atom.kind]
        return str(self.add(op, [self.size(atom.a), self.size(atom.b)]))


def _port(name: str, value: Value) -> Any:
    dims = [d if isinstance(d, int) else str(d) for d in value.shape]
    return helper.make_tensor_value_info(name, NUMBER[value.dtype.np], dims)


# ------------------------------------------------------------------------------------------------------------- writers

DIRECT = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "add": "Add", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "bitwise_not": "BitwiseNot", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "divide": "Div",
    "equal": "Equal", "erf": "Erf", "exp": "Exp", "floor": "Floor", "gelu": "Gelu", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "isinf": "IsInf", "isnan": "IsNaN", "less": "Less", "less_equal": "LessOrEqual",
    "log": "Log", "matmul": "MatMul", "maximum": "Max", "minimum": "Min", "multiply": "Mul", "negative": "Neg",
    "power": "Pow", "relu": "Relu", "round": "Round", "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin",
    "sinh": "Sinh", "softplus": "Softplus", "sqrt": "Sqrt", "stop_gradient": "Identity", "subtract": "Sub",
    "tan": "Tan", "tanh": "Tanh", "where": "Where",
}  # fmt: skip
WRITERS: dict[str, Writer] = {}


def _direct(op: str) -> Writer:
    return lambda e, node, xs: e.add(op, xs)


WRITERS |= {name: _direct(op) for name, op in DIRECT.items()}


def writes(*names: str) -> Callable[[Writer], Writer]:
    def wrap(fn: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, fn))
        return fn

    return wrap


@writes("gelu_tanh")
def _gelu_tanh(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Gelu", xs, approximate="tanh"))


@writes("rsqrt")
def _rsqrt(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Reciprocal", [e.add("Sqrt", xs)]))


@writes("not_equal")
def _not_equal(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Not", [e.add("Equal", xs)]))


@writes("bitwise_and", "bitwise_or", "bitwise_xor")
def _bitwise(e: Exporter, node: Node, xs: list[str]) -> str:
    name = node.op.name.removeprefix("bitwise_").capitalize()
    return str(e.add(name if node.inputs[0].dtype.is_bool else f"Bitwise{name}", xs))


@writes("remainder", "fmod")
def _mod(e: Exporter, node: Node, xs: list[str]) -> str:
    if node.op.name == "remainder" and node.inputs[0].dtype.is_float:
        floor = e.add("Floor", [e.add("Div", xs)])
        return str(e.add("Sub", [xs[0], e.add("Mul", [floor, xs[1]])]))
    return str(e.add("Mod", xs, fmod=int(node.op.name == "fmod")))


@writes("cast")
def _cast(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Cast", xs, to=NUMBER[node.types[0].dtype.np]))


@writes("reshape")
def _reshape(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Reshape", [xs[0], e.dims(node.types[0].shape)], allowzero=1))


@writes("broadcast_to")
def _broadcast(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Expand", [xs[0], e.dims(node.types[0].shape)]))


@writes("transpose")
def _transpose(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Transpose", xs, perm=list(_fields(node)["perm"])))


@writes("concat")
def _concat(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Concat", xs, axis=_fields(node)["axis"]))


@writes("slice")
def _slice(e: Exporter, node: Node, xs: list[str]) -> str:
    fields = _fields(node)
    axes = e.array(range(node.inputs[0].ndim), np.int64)
    return str(e.add("Slice", [xs[0], e.dims(fields["start"]), e.dims(fields["stop"]), axes, e.dims(fields["step"])]))


@writes("flip")
def _flip(e: Exporter, node: Node, xs: list[str]) -> str:
    axes = _fields(node)["axes"]
    ends = [[-1] * len(axes), [np.iinfo(np.int64).min] * len(axes), axes, [-1] * len(axes)]
    return str(e.add("Slice", [xs[0], *(e.array(x, np.int64) for x in ends)]))


@writes("pad")
def _pad(e: Exporter, node: Node, xs: list[str]) -> str | Any:
    fields = _fields(node)
    if any(fields["interior"]):
        raise LowerError("export: ONNX has no padding between elements", code="L501")
    fill = e.array(fields["value"], node.inputs[0].dtype.np)
    return str(e.add("Pad", [xs[0], e.dims((*fields["low"], *fields["high"])), fill]))


@writes("iota")
def _iota(e: Exporter, node: Node, xs: list[str]) -> str:
    kind, axis = node.types[0], _fields(node)["axis"]
    one = [e.add("Squeeze", [x]) for x in (e.array([0], np.int64), e.size(kind.shape[axis]), e.array([1], np.int64))]
    counted = e.add("Cast", [e.add("Range", one)], to=NUMBER[kind.dtype.np])
    placed = [-1 if i == axis else 1 for i in range(kind.ndim)]
    return str(e.add("Expand", [e.add("Reshape", [counted, e.array(placed, np.int64)]), e.dims(kind.shape)]))


@writes("dim_size")
def _dim_size(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Squeeze", [e.size(_fields(node)["dim"])]))


@writes("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
def _reduce(e: Exporter, node: Node, xs: list[str]) -> str:
    op = f"Reduce{node.op.name.removeprefix('reduce_').capitalize()}"
    return str(e.add(op, [xs[0], e.array(_fields(node)["axes"], np.int64)], keepdims=0, noop_with_empty_axes=1))


@writes("reduce_all", "reduce_any")
def _reduce_bool(e: Exporter, node: Node, xs: list[str]) -> str:
    op = "ReduceMin" if node.op.name == "reduce_all" else "ReduceMax"
    axes = e.array(_fields(node)["axes"], np.int64)
    flags = e.add("Cast", [xs[0]], to=NUMBER[np.dtype(np.uint8)])
    return str(e.add("Cast", [e.add(op, [flags, axes], keepdims=0, noop_with_empty_axes=1)], to=NUMBER[np.dtype(bool)]))


@writes("softmax", "log_softmax")
def _softmax(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Softmax" if node.op.name == "softmax" else "LogSoftmax", xs, axis=_fields(node)["axis"]))


@writes("layer_norm")
def _layer_norm(e: Exporter, node: Node, xs: list[str]) -> str | Any:
    axes, rank = _fields(node)["axes"], node.inputs[0].ndim
    if tuple(axes) != tuple(range(rank - len(axes), rank)) or len(xs) < 2:
        parts = as_tuple(node.op.decompose(*node.inputs))
        e.write(parts)
        return [e.names[p] for p in parts]
    return str(e.add("LayerNormalization", xs, axis=-len(axes), epsilon=_fields(node)["eps"]))


@writes("conv")
def _conv(e: Exporter, node: Node, xs: list[str]) -> str:
    f = _fields(node)
    if any(d != 1 for d in f["input_dilation"]):
        raise LowerError("export: a convolution with a spread input is not written yet", code="L501")
    lows, highs = zip(*f["padding"], strict=True)
    return str(
        e.add(
            "Conv",
            xs,
            strides=list(f["stride"]),
            pads=[*lows, *highs],
            dilations=list(f["dilation"]),
            group=f["groups"],
        )
    )


@writes("pool_max")
def _pool_max(e: Exporter, node: Node, xs: list[str]) -> str:
    f = _fields(node)
    lows, highs = zip(*f["padding"], strict=True)
    return str(e.add("MaxPool", xs, kernel_shape=list(f["kernel"]), strides=list(f["stride"]), pads=[*lows, *highs],
                     dilations=list(f["dilation"])))  # fmt: skip


@writes("gather", "gather_elements")
def _gather(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Gather" if node.op.name == "gather" else "GatherElements", xs, axis=_fields(node)["axis"]))


@writes("scatter_elements")
def _scatter_elements(e: Exporter, node: Node, xs: list[str]) -> str:
    f = _fields(node)
    return str(e.add("ScatterElements", xs, axis=f["axis"], reduction=f["reduction"]))


@writes("argmax", "argmin")
def _arg(e: Exporter, node: Node, xs: list[str]) -> str:
    f = _fields(node)
    op = "ArgMax" if node.op.name == "argmax" else "ArgMin"
    found = e.add(op, xs, axis=f["axis"], keepdims=0, select_last_index=int(f["select_last"]))
    return str(e.add("Cast", [found], to=NUMBER[node.types[0].dtype.np]))


@writes("topk")
def _topk(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
    f = _fields(node)
    values, ids = e.add("TopK", [xs[0], e.array([f["k"]], np.int64)], 2, axis=f["axis"], largest=int(f["largest"]))
    return [values, str(e.add("Cast", [ids], to=NUMBER[node.types[1].dtype.np]))]


@writes("cumsum")
def _cumsum(e: Exporter, node: Node, xs: list[str]) -> str:
    f = _fields(node)
    axis = e.array(f["axis"], np.int64)
    return str(e.add("CumSum", [xs[0], axis], exclusive=int(f["exclusive"]), reverse=int(f["reverse"])))


def _fields(node: Node) -> dict[str, Any]:
    return node.op.static_fields()
