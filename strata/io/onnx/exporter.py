"""Exporter: one graph as an ONNX model, by writers of ops; `writes` and `spells` enter them in the table.

A writer makes nodes of ONNX. A speller says an op in other ops of ours, which are then written in its place. Writers
make nodes as the default opset has them; `before` enters how older opsets have those. The model is checked against
ONNX's schemas of its opset: what they do not have, or not for its types, is refused with its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

from strata.core import Dim, SymExpr, symbols
from strata.errors import LowerError, UnknownNameError
from strata.io.onnx.dtypes import NUMBER
from strata.io.onnx.writers.widening import types_of, widened
from strata.mir import REGISTRY, Constant, Graph, Leaf, Node, Value, as_tuple, leaf_name, toposort
from strata.tensor import Tensor

Writer = Callable[["Exporter", Node, list[str]], "str | Sequence[str]"]
Speller = Callable[..., Any]
Older = Callable[["Exporter", str, list[str], list[str], dict[str, Any]], None]
WRITERS: dict[str, Writer] = {}
OLDER: dict[str, tuple[int, Older]] = {}
SINCE: dict[str, int] = {}
OPSET = 21  # whose nodes the writers make
CAST: Any = REGISTRY["cast"]
MOST_HELD = 1024  # elements of an initializer that inference of types is given


def writes(*names: str, since: int = 0) -> Callable[[Writer], Writer]:
    """Enter the writer of ops. Opsets before `since` get what the ops are made of."""

    def wrap(fn: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, fn))
        SINCE.update(dict.fromkeys(names, since))
        return fn

    return wrap


def before(opset: int, *names: str) -> Callable[[Older], Older]:
    """Enter how opsets before `opset` have nodes of these names: a function that writes one with its outputs."""

    def wrap(fn: Older) -> Older:
        OLDER.update(dict.fromkeys(names, (opset, fn)))
        return fn

    return wrap


def spells(*names: str) -> Callable[[Speller], Speller]:
    """Enter a function from the op and its input values to values of other ops."""

    def wrap(fn: Speller) -> Speller:
        def writer(e: Exporter, node: Node, xs: list[str]) -> Sequence[str]:
            made = as_tuple(fn(node.op, *node.inputs))
            return e.composed(
                [x if x.dtype is t.dtype else CAST(t.dtype)(x) for x, t in zip(made, node.types, strict=True)]
            )

        WRITERS.update(dict.fromkeys(names, writer))
        return fn

    return wrap


def fields(node: Node) -> dict[str, Any]:
    """The static parameters of a node's op."""
    return node.op.static_fields()


class Exporter:
    """Writes one graph: nodes and initializers as they are needed, a name for every value."""

    def __init__(
        self, graph: Graph, params: Mapping[str, np.ndarray], opset: int, outputs: Sequence[str] | None = None
    ) -> None:
        unknown = set(params) - set(graph.param_names)
        if unknown:
            raise UnknownNameError(f"export: {graph.name!r} has no parameter {min(unknown)!r}", code="N502")
        self.graph = graph
        self.params = params
        self.opset = opset
        self.outputs = list(outputs or (f"output_{i}" for i in range(len(graph.results))))
        self.nodes: list[Any] = []
        self.held: list[Any] = []
        self.names: dict[Value, str] = {}
        self._taken = {*graph.input_names, *graph.param_names, *self.outputs}
        self._sizes: dict[Dim, str] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._count = 0
        self._missing: dict[str, None] = {}

    def model(self) -> Any:
        """The whole model. Raises what ONNX lacks, all in one error."""
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
        for name, result in zip(self.outputs, self.graph.results, strict=True):
            self.nodes.append(helper.make_node("Identity", [self.names[result]], [name]))
            outputs.append(_port(name, result))
        self._require_opset(inputs, outputs)
        return self._model(inputs, outputs, self.held)

    def _model(self, inputs: Sequence[Any], outputs: Sequence[Any], held: Sequence[Any]) -> Any:
        graph = helper.make_graph(self.nodes, self.graph.name, inputs, outputs, held)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def _require_opset(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Refuse nodes that the opset does not have, or not for their types, when casts do not help."""
        later = {node.op_type: least for node in _all_nodes(self.nodes) if (least := _least(node, self.opset))}
        if later:
            raise LowerError(
                f"export: opset {self.opset} of ONNX cannot say {', '.join(sorted(later))}", code="L502",
                fix=f"ask for opset {max(later.values())} or a newer one",
            )  # fmt: skip
        small = [t for t in self.held if math.prod(t.dims) <= MOST_HELD]
        ports = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in self.held if t not in small]
        if not self._wrong_type(self._model([*inputs, *ports], outputs, small)):
            return
        inferred = onnx.shape_inference.infer_shapes(self._model([*inputs, *ports], outputs, small)).graph
        self.nodes = widened(inferred, types_of(inferred, {}), self.opset, self.fresh)
        wrong = self._wrong_type(self._model([*inputs, *ports], outputs, small))
        if wrong:
            raise LowerError(f"export: opset {self.opset} of ONNX cannot say {wrong}", code="L502")

    def _wrong_type(self, model: Any) -> str:
        """What a model's types are not right for; nothing if they are."""
        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            *_, (op, said) = re.findall(r"\(op_type:(\w+)[^)]*\): ([^\n]*)", str(error)) or [("a node", str(error))]
            return f"{op}: {said}"
        return ""

    def write(self, results: Sequence[Value]) -> None:
        """Nodes for everything below `results` that has no name yet."""
        for node in toposort(results, self.names):
            if node.outputs[0] in self.names:
                continue
            writer = WRITERS.get(node.op.name)
            if self.opset < SINCE.get(node.op.name, 0) and node.op.is_composition:
                writer = None
            if isinstance(node.op, Constant):
                self.names[node.outputs[0]] = self.array(node.op.data.array)
            elif isinstance(node.op, Leaf):
                self.names[node.outputs[0]] = self.array(Tensor(node.outputs[0]).numpy())
            elif writer is not None:
                made = writer(self, node, [self.names[x] for x in node.inputs])
                found = [made] if isinstance(made, str) else list(made)
                self.names |= dict(zip(node.outputs, found, strict=False))
            elif node.op.is_composition:
                found = self.composed(as_tuple(node.op.decompose(*node.inputs)))
                self.names |= dict(zip(node.outputs, found, strict=True))
            else:
                self.miss(node)

    def composed(self, values: Sequence[Value]) -> list[str]:
        """Values that an op is made of, written; their names."""
        self.write(values)
        return [self.names[x] for x in values]

    def miss(self, node: Node) -> list[str]:
        """Note an op that ONNX cannot say; the rest is looked at all the same."""
        self._missing[node.op.name] = None
        self.names |= dict.fromkeys(node.outputs, "missing")
        return ["missing"] * len(node.outputs)

    # parts

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        """A node; its output, or a list of them."""
        names = [self.fresh() for _ in range(outputs)]
        kept = {k: v for k, v in attributes.items() if v is not None}
        opset, older = OLDER.get(op, (0, Exporter.node))
        (older if self.opset < opset else Exporter.node)(self, op, list(inputs), names, kept)
        return names[0] if outputs == 1 else names

    def node(self, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
        """A node as it is; attributes that the opset does not have are left out where they say what it does anyway."""
        if self.opset < OPSET and defs.has(op, self.opset):
            there, now = (defs.get_schema(op, version).attributes for version in (self.opset, OPSET))
            newer = {k: now[k].default_value for k in attributes.keys() & now.keys() - there.keys()}
            unsaid = {k: helper.get_attribute_value(x) for k, x in newer.items() if x.type}
            said = {k: v.encode() if isinstance(v, str) else v for k, v in attributes.items()}
            attributes = {k: v for k, v in attributes.items() if k not in unsaid or said[k] != unsaid[k]}
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))

    def known(self, name: str) -> np.ndarray | None:
        """The elements of an initializer that was made here."""
        return self._arrays.get(name)

    def fresh(self) -> str:
        """A name that nothing has."""
        while True:
            self._count += 1
            if (name := f"v{self._count}") not in self._taken:
                return name

    def array(self, data: Any, dtype: Any = None) -> str:
        """An initializer."""
        name = self.fresh()
        self._arrays[name] = np.asarray(data, dtype)
        self.held.append(numpy_helper.from_array(self._arrays[name], name))
        return name

    def inlined(self, graph: Graph, inputs: Sequence[str]) -> list[str]:
        """The results of a nested graph for values of these names; its nodes come here."""
        outer = self.names
        self.names = {**outer, **dict(zip(graph.inputs, inputs, strict=True))}
        try:
            return self.composed(graph.results)
        finally:
            self.names = outer

    def body(self, graph: Any, inputs: Sequence[tuple[str, Value]], make: Callable[[], Sequence[str]]) -> Any:
        """A subgraph whose inputs have these names and types: `make` writes its nodes and tells its results."""
        outer, sizes, self.nodes, self._sizes = self.nodes, self._sizes, [], dict(self._sizes)
        try:
            results = [self.add("Identity", [x]) for x in make()]
            kinds = [_port(name, x) for name, x in inputs]
            ports = [helper.make_empty_tensor_value_info(name) for name in results]
            return helper.make_graph(self.nodes, graph, kinds, ports)
        finally:
            self.nodes, self._sizes = outer, sizes

    # sizes

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

    def _leaf_dims(self) -> list[tuple[str, int, Dim]]:
        leaves = (*self.graph.inputs, *self.graph.params)
        return [(leaf_name(leaf), axis, d) for leaf in leaves for axis, d in enumerate(leaf.shape)]

    def _find(self, dim: SymExpr) -> str | None:
        for name, axis, d in self._leaf_dims():
            if d == dim:
                return str(self.add("Shape", [name], start=axis, end=axis + 1))
        return None

    def _solved(self, atom: Any) -> str | None:
        """A symbol from a size a · s + b of some input."""
        for name, axis, d in self._leaf_dims():
            if not isinstance(d, SymExpr) or any(atoms not in ((), (atom,)) for atoms, _ in d.terms):
                continue
            terms = dict(d.terms)
            if (atom,) in terms:
                size = self.add("Shape", [name], start=axis, end=axis + 1)
                rest = self.add("Sub", [size, self.array([terms.get((), 0)], np.int64)])
                return str(self.add("Div", [rest, self.array([terms[atom,]], np.int64)]))
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
            found = self._find(expression) or self._solved(atom)
            if found is None:
                raise LowerError(f"export: no input has the size {next(iter(symbols(expression)))}", code="L501")
            return found
        op = {"floordiv": "Div", "mod": "Mod", "min": "Min", "max": "Max"}[atom.kind]
        return str(self.add(op, [self.size(atom.a), self.size(atom.b)]))


def _port(name: str, value: Value) -> Any:
    dims = [d if isinstance(d, int) else str(d) for d in value.shape]
    return helper.make_tensor_value_info(name, NUMBER[value.dtype.np], dims)


def _all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Nodes, and those of the graphs inside them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _all_nodes(attribute.g.node)


def _least(node: Any, opset: int) -> int:
    """The opset that a node needs; 0 where this one has it."""
    if _has(node, opset):
        return 0
    return next((version for version in range(opset + 1, OPSET) if _has(node, version)), OPSET)


def _has(node: Any, opset: int) -> bool:
    if not defs.has(node.op_type, opset):
        return False
    schema = defs.get_schema(node.op_type, opset)
    if schema.deprecated or any(a.name not in schema.attributes for a in node.attribute):
        return False
    return bool(schema.min_input <= len(node.input) <= schema.max_input)
