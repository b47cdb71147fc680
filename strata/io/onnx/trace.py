"""Tracer: walks the nodes of an ONNX graph and builds a tensor graph from them.

Whatever can be known is known at once: arithmetic on shapes gives symbolic sizes, nodes on fixed tensors are evaluated.
Where a reader needs data that only a run can give (the result of NonZero, the condition of a loop), the values found so
far are compiled and run, and reading goes on with arrays: a *segment* ends there. A tracer without `execute` cannot do
that, and raises NeedsData.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from strata.core import Dim, Place, SymExpr, TensorType, as_dtype, require, substitute
from strata.errors import DTypeError, FileError, OptionError, ShapeError, StrataError, SymbolError
from strata.io.onnx.comparisons import equal_sizes
from strata.io.onnx.dtypes import NUMBER, STRING, in_graphs
from strata.io.onnx.frames import Frame, Guard, Path, Prefix, copied, has_run_data, put, values_in
from strata.io.onnx.items import NOTHING, Host, Item, Labels, Maps, Nothing, Sizes
from strata.io.onnx.limits import OnnxLimits
from strata.io.onnx.node import NodeView
from strata.io.onnx.program import OnnxProgram, expand_standard, inputs_of, opset_table, tensor_type
from strata.io.onnx.registry import NEVER_FOLDED
from strata.io.onnx.sizes import SIZE_RULES
from strata.kinds import counted
from strata.mir import (
    Constant,
    Graph,
    Input,
    Param,
    Value,
    constant,
    evaluate_values,
    fresh_scope,
    leaf_name,
    origin,
    placeholder,
    toposort,
)
from strata.ops import dim_size, narrow, reshape, stack

SMALL = 64  # elements of a tensor that is a constant of the graph; larger ones are its parameters
FOLD_LIMIT = 1 << 20  # elements that a folded node may give, or a few times as many as it takes
MOST_AXES = 32
MOST_SIZES = 1 << 10  # elements of shapes that are computed with symbolically
HOST_LIMIT = 1 << 12  # elements of run-time data that are computed with on the host
Execute = Callable[[Graph, Mapping[str, np.ndarray], Mapping[str, np.ndarray]], Sequence[np.ndarray]]


def _is_kept(node: Any, items: Sequence[Item | None]) -> bool:
    """Whether a node stays one of the graph though its inputs are known: also weights that are codes stay codes."""
    if node.op_type == "DequantizeLinear":
        codes = items[0] if items else None
        return isinstance(codes, Host) and codes.array.dtype in (np.int8, np.uint8) and codes.array.ndim > 1
    return node.op_type in NEVER_FOLDED


class NeedsData(Exception):  # noqa: N818
    """A reader needs the elements of a value that depends on the data of a run."""


class OnnxTracer:
    """Reads one program. `leaf` declares run-time data; `results` come as items."""

    def __init__(
        self,
        program: OnnxProgram,
        execute: Execute | None = None,
        hints: Mapping[str, int] | None = None,
        samples: Mapping[str, np.ndarray] | None = None,
        learned: frozenset[str] = frozenset(),
    ) -> None:
        self.program = program
        self.learned = learned  # initializers that stay parameters of the graph, whatever their size
        self.execute = execute
        self.hints = hints
        self.samples = samples or {}
        self.guards: list[Guard] = []
        self.assumed: dict[str, np.ndarray] = {}  # inputs whose elements decided something
        self.scope = fresh_scope()
        self.frame = Frame()
        self.feeds: dict[str, np.ndarray] = {}
        self.params: dict[str, np.ndarray] = {}
        self._opsets = program.opsets
        self._leaves: dict[int, tuple[Any, Value]] = {}  # by id of the Host, which is kept alive here
        self._folding: dict[Value, np.ndarray] | None = None
        self._open: list[Value] = []  # leaves whose data come later
        self.has_run_data = False  # whether the graph reads what was computed while it was made
        self._closed = 0
        self._depth = 0
        self._attributes: Mapping[str, Any] = {}
        self._callers: list[Frame] = []
        self.limits = OnnxLimits(program.elements, program.size)
        self._index = 0  # of the node of the outermost graph that is being read
        self.segments = 0
        self.prefix: Prefix | None = None

    # ------------------------------------------------------------------------------------------------ items to values

    def value(self, item: Item) -> Value:
        """An item as a value of the graph."""
        if isinstance(item, Value):
            return item
        if isinstance(item, Sizes):
            flat = [dim_size(d) if isinstance(d, SymExpr) else constant(np.int64(d)) for d in item.flat]
            return reshape(stack(flat, 0), item.array.shape)
        if isinstance(item, Host):
            return self._host_value(item)
        if isinstance(item, Labels):
            raise DTypeError("texts can only be compared and looked up", code="D500")
        kind = "sequence" if isinstance(item, (list, Maps)) else "optional without an element"
        raise OptionError(f"a {kind} was given where a tensor is needed", code="O501")

    def _host_value(self, item: Host) -> Value:
        array = item.array
        if not in_graphs(array.dtype):
            raise DTypeError(f"{array.dtype} tensors can only be converted", code="D500")
        known = self._leaves.get(id(item))
        if self._folding is not None:
            leaf = placeholder("h", TensorType(as_dtype(array.dtype), array.shape))
            self._folding[leaf] = array
            return leaf
        if known is not None:
            return known[1]
        kind = TensorType(as_dtype(array.dtype), array.shape)
        if item.fixed and array.size <= SMALL:
            made = constant(array)
        elif item.fixed:
            name = self._fresh(item.name or "w", self.params)
            self.params[name] = array
            made = Param(name, kind, self.scope)()
        elif self.execute is None:
            raise NeedsData("what was computed from the inputs")
        else:
            made = self.leaf(f"d{len(self.feeds)}", array)
            self.has_run_data = True
        self._leaves[id(item)] = (item, made)
        return made

    def _fresh(self, name: str, taken: Mapping[str, Any]) -> str:
        while name in taken:
            name += "_"
        return name

    def leaf(self, name: str, data: np.ndarray | TensorType) -> Value:
        """An input of the graph: run-time data, or a type when data come later."""
        if isinstance(data, TensorType):
            self.limits.give(data, self.hints)
            made = Input(name, data, self.scope)()
            self._open.append(made)
            return made
        name = self._fresh(name, self.feeds)
        self.feeds[name] = data
        kind = TensorType(as_dtype(data.dtype), data.shape)
        self.limits.give(kind)
        return Input(name, kind, self.scope)()

    def array(self, item: Item) -> np.ndarray:
        """An item as an array: the data are computed now if need be."""
        if isinstance(item, Host):
            return item.array
        if isinstance(item, Sizes):
            raise NeedsData(f"the sizes {item.flat}")
        if isinstance(item, Value):
            return self._compute(item)
        if isinstance(item, Labels):
            return item.finished(self._compute(item.value))
        self.value(item)
        raise AssertionError

    def _compute(self, value: Value) -> np.ndarray:
        if isinstance(value.node.op, Constant):
            return value.node.op.data.array
        if self._folding is not None:
            self._require_room(value)
            return evaluate_values([value], self._folding, {})[0]
        if not any(isinstance(node.op, (Input, Param)) for node in toposort([value])):
            self._require_room(value)
            return evaluate_values([value], {}, {})[0]
        if self.execute is None:
            return self._from_samples(value)
        if self._closed:
            raise NeedsData(f"the elements of {value.type}")
        return self._flush(value)

    def _require_room(self, value: Value) -> None:
        """Refuse to evaluate while reading what has no room."""
        most = max((_bytes(t) for node in toposort([value]) for t in node.types), default=0)
        self.limits.require_room(most, str(value.type))

    @property
    def reads_data(self) -> bool:
        """Whether there is a run at hand, so that a reader may ask for elements rather than make many ops."""
        return self.hints is not None or (self.execute is not None and not self._closed)

    def _from_samples(self, value: Value) -> np.ndarray:
        """A value that depends on small integer inputs only (a rate, a number of steps): the ones at hand decide."""
        leaves = [node.outputs[0] for node in toposort([value]) if isinstance(node.op, (Input, Param))]
        known: dict[Value, np.ndarray] = {}
        for leaf in leaves:
            array = (self.params if isinstance(leaf.node.op, Param) else self.samples).get(leaf_name(leaf))
            if array is None or self.hints is None:
                raise NeedsData(f"the elements of {value.type}")
            known[leaf] = array
        found = evaluate_values([value], known, dict(self.hints or {}))[0]
        self.assumed |= {leaf_name(x): known[x] for x in leaves if isinstance(x.node.op, Input)}
        return found

    def _flush(self, value: Value) -> np.ndarray:
        """Compute a value, and with it every other one that is still needed: the next segment starts from arrays."""
        frames = list({id(f): f for top in (self.frame, *self._callers) for f in top.chain()}.values())
        live: dict[Value, list[tuple[Frame, Path]]] = {value: []}
        for frame in frames:
            for path, x in values_in(frame.items):
                if not isinstance(x.node.op, (Input, Param, Constant)):
                    live.setdefault(x, []).append((frame, path))
        graph = self.graph(list(live))
        if not self.segments and self._depth == 1 and not has_run_data(self.frame.items):
            self._keep_prefix(graph, [[path for _, path in places] for places in live.values()])
        arrays = self._run(graph)
        for places, array in zip(live.values(), arrays, strict=True):
            host = Host(array, fixed=False)
            for frame, path in places:
                put(frame.items, path, host)
        return arrays[0]

    def _keep_prefix(self, graph: Graph, places: list[list[Path]]) -> None:
        items = {name: copied(x) for name, x in self.frame.items.items() if not name.startswith("\0")}
        own = [[path for path in paths if path[0] in items] for paths in places]
        uses, params = dict(self.frame.uses), dict(self.params)
        self.prefix = Prefix(self._index, graph, own, items, uses, self.scope, params, dict(self._leaves))

    def resume(self, prefix: Prefix, feeds: Mapping[str, np.ndarray]) -> list[Item]:
        """Read the rest of a model whose first segment is known; the outputs as items."""
        self.scope, self.params, self._leaves = prefix.scope, dict(prefix.params), dict(prefix.leaves)
        self.feeds = dict(feeds)
        for x in feeds.values():
            self.limits.give(TensorType(as_dtype(x.dtype), x.shape))
        frame = self.frame = Frame()
        frame.items = {name: copied(x) for name, x in prefix.items.items()}
        frame.uses = dict(prefix.uses)
        self._depth = 1
        for paths, array in zip(prefix.places, self._run(prefix.graph), strict=True):
            host = Host(array, fixed=False)
            for path in paths:
                put(frame.items, path, host)
        graph = self.program.graph
        self._read_nodes(graph.node, frame, prefix.index)
        return [frame.find(x.name) for x in graph.output]

    def run_segment(self, values: Sequence[Value]) -> list[np.ndarray]:
        """Arrays of values, compiled and run as one graph."""
        return self._run(self.graph(values))

    def _run(self, graph: Graph) -> list[np.ndarray]:
        assert self.execute is not None
        self.segments += 1
        feeds = {name: self.feeds[name] for name in graph.input_names}
        params = {name: self.params[name] for name in graph.param_names}
        found = list(self.execute(graph, feeds, params))
        self.limits.start()
        return found

    def graph(self, results: Sequence[Value], inputs: Sequence[Value] | None = None, name: str = "main") -> Graph:
        """A graph of results over the leaves that they use or whose sizes they need, or over the given inputs."""
        leaves = [node.outputs[0] for node in toposort(results) if isinstance(node.op, (Input, Param))]
        graph = Graph(name)
        graph.scope = self.scope
        graph.inputs = tuple(inputs if inputs is not None else (x for x in leaves if isinstance(x.node.op, Input)))
        graph.params = tuple(x for x in leaves if isinstance(x.node.op, Param))
        graph.outputs(*results)
        if inputs is None:
            carried = {name for x in graph.inputs for name in x.type.symbols()}
            for x in self._open:
                if (x.type.symbols().keys() & graph.symbols().keys()) - carried:
                    graph.inputs = (*graph.inputs, x)
                    carried |= x.type.symbols().keys()
        return graph

    def decide(self, test: Callable[[Any, Any], bool], a: Dim, b: Dim) -> bool:
        """A comparison of sizes: known, or decided by the sizes at hand and kept as a guard."""
        try:
            return bool(test(a, b))
        except SymbolError:
            if self.hints is None:
                raise
        truth = bool(test(substitute(a, self.hints), substitute(b, self.hints)))
        self.guards.append(Guard(test, a, b, truth))
        return truth

    def agree(self, *values: Value) -> tuple[Value, ...]:
        """Operands that are broadcast: sizes that only a run can compare are taken as they are now, and guarded.

        A symbol that is 1 now beside another size becomes the number 1, since only that is broadcast.
        """
        found = list(values)
        if self.hints is None or not found:
            return values
        for axis in range(1, max(x.ndim for x in found) + 1):
            first, *rest = [i for i, x in enumerate(found) if x.ndim >= axis and x.shape[-axis] != 1] or [0]
            same = [first]  # operands of one size, the greatest so far
            for i in rest:
                size, d = found[same[0]].shape[-axis], found[i].shape[-axis]
                if (isinstance(d, int) and isinstance(size, int)) or self.decide(equal_sizes, size, d):
                    same.append(i)
                elif self.decide(equal_sizes, size, 1):
                    for j in same:
                        found[j] = narrow(found[j], -axis, 0, 1)
                    same = [i]
                elif self.decide(equal_sizes, d, 1):
                    found[i] = narrow(found[i], -axis, 0, 1)
                else:
                    raise ShapeError(f"sizes {size} and {d} differ", code="S500")
        return tuple(found)

    def match(self, a: Dim, b: Dim) -> None:
        """Sizes that must be equal: known to be, or equal now and guarded."""
        if self.hints is None or (isinstance(a, int) and isinstance(b, int)):
            return
        if not self.decide(equal_sizes, a, b):
            raise ShapeError(f"sizes {a} and {b} differ", code="S500")

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, data cannot be computed: what is read becomes the body of a control-flow op."""
        self._closed += 1
        guards = len(self.guards)
        try:
            yield
        except BaseException:
            del self.guards[guards:]  # nothing of what was read is kept
            raise
        finally:
            self._closed -= 1

    # ----------------------------------------------------------------------------------------------------- attributes

    def has_attribute(self, proto: Any) -> bool:
        """Whether an attribute has a value: one that stands for a function's has none if the call leaves that out."""
        return not proto.ref_attr_name or proto.ref_attr_name in self._attributes

    def attribute(self, proto: Any) -> Any:
        """An attribute as Python's value."""
        if proto.ref_attr_name:
            return self._attributes[proto.ref_attr_name]
        kinds = onnx.AttributeProto
        match proto.type:
            case kinds.FLOAT:
                return float(proto.f)
            case kinds.INT:
                return int(proto.i)
            case kinds.STRING:
                return proto.s.decode("utf-8", "replace")
            case kinds.TENSOR:
                return self.program.tensor(proto.t)
            case kinds.SPARSE_TENSOR:
                return self.program.sparse(proto.sparse_tensor)
            case kinds.GRAPH:
                return proto.g
            case kinds.FLOATS:
                return tuple(float(v) for v in proto.floats)
            case kinds.INTS:
                return tuple(int(v) for v in proto.ints)
            case kinds.STRINGS:
                return tuple(s.decode("utf-8", "replace") for s in proto.strings)
            case kinds.TENSORS:
                return tuple(self.program.tensor(t) for t in proto.tensors)
            case kinds.GRAPHS:
                return tuple(proto.graphs)
            case kinds.TYPE_PROTO:
                return proto.tp
        raise FileError(f"attribute {proto.name!r} has kind {proto.type}, which is not known", code="F500")

    # ---------------------------------------------------------------------------------------------------------- graphs

    def run_graph(self, graph: Any, inputs: Sequence[Item], *, top: bool = False) -> list[Item]:
        """Read a graph with the given items as inputs; its outputs as items. Subgraphs see the names around them."""
        self._enter()
        frame = Frame(None if top else self.frame)
        outer, self.frame = self.frame, frame
        try:
            self._load_initializers(graph, frame)
            for proto, item in zip(graph.input, inputs, strict=False):
                frame.items[proto.name] = item
            self._run_nodes(graph.node, frame, [x.name for x in graph.output])
            return [frame.find(x.name) for x in graph.output]
        finally:
            self.frame = outer
            self._depth -= 1

    def _enter(self) -> None:
        require("max_depth", self._depth + 1, f"subgraphs and functions are nested {self._depth + 1} deep")
        self._depth += 1

    def _load_initializers(self, graph: Any, frame: Frame) -> None:
        frame.items.update(self.initializers(graph))
        for proto in graph.sparse_initializer:
            frame.items[proto.values.name] = Host(self.program.sparse(proto), name=proto.values.name)

    def initializers(self, graph: Any) -> dict[str, Item]:
        """The tensors that a graph holds."""
        return {proto.name: self._initializer(proto) for proto in graph.initializer}

    def _initializer(self, proto: Any) -> Item:
        array = self.program.tensor(proto)
        if proto.name not in self.learned:
            return Host(array, name=proto.name)
        self.params[proto.name] = array
        return Param(proto.name, TensorType(as_dtype(array.dtype), array.shape), self.scope)()

    def _run_nodes(self, nodes: Sequence[Any], frame: Frame, outputs: Sequence[str]) -> None:
        for names in [*(inputs_of(node) for node in nodes), list(outputs)]:
            for name in names:
                frame.uses[name] = frame.uses.get(name, 0) + 1
        self._read_nodes(nodes, frame, 0)

    def _read_nodes(self, nodes: Sequence[Any], frame: Frame, start: int) -> None:
        for index in range(start, len(nodes)):
            node = nodes[index]
            if self._depth == 1:
                self._index = index
            self.run_node(node)
            for name in inputs_of(node):
                frame.uses[name] -= 1
                if not frame.uses[name]:
                    frame.items.pop(name, None)
            for name in node.output:
                if name and name not in frame.uses:
                    frame.items.pop(name, None)

    def run_node(self, node: Any) -> None:
        """Read one node: its outputs become items of the frame."""
        self.limits.nodes()
        items = [self.frame.find(name) if name else None for name in node.input]
        while items and items[-1] is None:
            items.pop()
        with origin(Place(self.program.file, 0, f"node {_label(node)}"), node.name or node.op_type):
            try:
                outputs = self._read(node, items)
            except StrataError as error:
                if error.place is not None and error.place.part:
                    error.place = None  # the message names the node; the place is the user's
                if not error.summary.startswith("node "):
                    error.summary = f"node {_label(node)}: {error.summary}"
                    error.args = (error.summary,)
                raise
            except _MALFORMED as error:
                raise FileError(
                    f"node {_label(node)}: cannot be read: {type(error).__name__}: {error}", code="F504"
                ) from error
        if len(outputs) < len([o for o in node.output if o]):
            raise FileError(
                f"{node.op_type} gives {counted(len(outputs), 'output')}, {len(node.output)} are named", code="F500"
            )
        for name, item in zip(node.output, outputs, strict=False):
            if isinstance(item, Value):
                self._require_possible(node, item)
            elif isinstance(item, Host) and item.name is None and not any(item is x for x in items):
                self.limits.keep(item.array, f"node {_label(node)}")
            if name:
                self.frame.items[name] = item

    def _require_possible(self, node: Any, x: Value) -> None:
        if x.ndim > MOST_AXES:
            raise FileError(f"node {_label(node)} would give {x.ndim} axes, {MOST_AXES} are the most", code="F504")
        self.limits.require_possible(f"node {_label(node)}", x.type, self.hints)

    def _read(self, node: Any, items: Sequence[Item | None]) -> list[Any]:
        handler = self.program.reader(node, self._opsets)
        if handler is None:
            return self._call_function(node, items)
        domain = "" if node.domain == "ai.onnx" else node.domain
        view = NodeView(self, node, items, self._opsets.get(domain, self.program.opsets.get(domain, 1)))
        if node.op_type in SIZE_RULES and any(isinstance(x, Sizes) for x in items) and _are_few(items):
            found = SIZE_RULES[node.op_type](view)
            if found is not None:
                return _as_items(found, fixed=True)
        hosts = [x for x in items if x is not None]
        if self._folding is None and not _is_kept(node, items) and all(isinstance(x, Host) for x in hosts):
            folded = self._fold(handler, view, hosts)
            if folded is not None:
                return folded
        result = handler(view)
        if result is NotImplemented:  # the reader leaves this kind to the standard's own definition
            return self._call_function(node, items)
        return _as_items(result, all(isinstance(x, Sizes) or (isinstance(x, Host) and x.fixed) for x in hosts))

    def _fold(self, handler: Callable[[NodeView], Any], view: NodeView, hosts: Sequence[Any]) -> list[Any] | None:
        """A node on known arrays, evaluated now; None where its results are left to the graph."""
        fixed = all(x.fixed for x in hosts)
        if not fixed and sum(x.array.size for x in hosts) > HOST_LIMIT:
            return None
        self._folding = {}
        try:
            result = handler(view)
            if result is NotImplemented:
                return None
            items = {str(i): x for i, x in enumerate(_as_items(result, fixed))}
            found = list(values_in(items))
            values = [value for _, value in found]
            given = sum(x.array.size for x in hosts)
            if not self._is_small(values, max(FOLD_LIMIT, 4 * given) if fixed else HOST_LIMIT):
                return None
            arrays = evaluate_values(values, self._folding, {})
        finally:
            self._folding = None
        for (place, _), array in zip(found, arrays, strict=True):
            put(items, place, Host(array, fixed))
        return list(items.values())

    def evaluated(self, read: Callable[[NodeView], Any], view: NodeView) -> list[np.ndarray]:
        """What a reader makes of a node on arrays of the host, evaluated now."""
        outer, self._folding = self._folding, {}
        try:
            result = read(view)
            made = result if isinstance(result, tuple) else (result,)
            return [self.array(x) for x in made]
        finally:
            self._folding = outer

    def _is_small(self, values: Sequence[Value], most: int) -> bool:
        """Whether values can be evaluated now: few elements, and room for all that is computed on the way."""
        counts = [x.type.size for x in values]
        if not all(isinstance(c, int) for c in counts) or sum(counts) > most:
            return False
        made = [t for node in toposort(values) if not isinstance(node.op, (Input, Constant)) for t in node.types]
        return all(self.limits.has_room(_bytes(t)) for t in made)

    # ------------------------------------------------------------------------------------------------------- functions

    def _call_function(self, node: Any, items: Sequence[Item | None]) -> list[Item]:
        function = self.program.function(node)
        if function is None:
            schema = self.program.standard_function(node, self._opsets)
            assert schema is not None
            types = [self._type_proto(x) for x in items]
            function = expand_standard(schema, node, types, self._opsets.get("", 1))
        attributes = {a.name: self.attribute(a) for a in function.attribute_proto}
        attributes |= {a.name: self.attribute(a) for a in node.attribute if self.has_attribute(a)}
        self._enter()
        saved = self.frame, self._opsets, self._attributes
        self._callers.append(self.frame)
        self.frame = Frame()
        self._opsets = {**self.program.opsets, **opset_table(function)}
        self._attributes = attributes
        try:
            for name, item in zip(function.input, items, strict=False):
                if item is not None:
                    self.frame.items[name] = item
            for name in function.input[len(items) :]:
                self.frame.items.setdefault(name, None)  # type: ignore[arg-type]
            self._run_nodes(function.node, self.frame, list(function.output))
            return [self.frame.items.get(name, NOTHING) for name in function.output]
        finally:
            self.frame, self._opsets, self._attributes = saved
            self._callers.pop()
            self._depth -= 1

    def _type_proto(self, item: Item | None) -> Any:
        if item is None or isinstance(item, (list, Nothing, Maps)):
            return None
        if isinstance(item, Labels):
            return tensor_type(STRING, item.value.shape)
        if isinstance(item, Host):
            return tensor_type(NUMBER[item.array.dtype], item.array.shape)
        if isinstance(item, Sizes):
            return tensor_type(7, item.array.shape)
        return tensor_type(NUMBER[item.dtype.np], item.shape)


# What NumPy and Python raise over attributes that are absent, of another kind, or make no sense together.
_MALFORMED = (
    TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError, MemoryError,
    RecursionError,
)  # fmt: skip


def _label(node: Any) -> str:
    return f"{node.name or (node.output[0] if node.output else '')!r} ({node.op_type})"


def _are_few(items: Sequence[Item | None]) -> bool:
    return sum(x.array.size for x in items if isinstance(x, (Host, Sizes))) <= MOST_SIZES


def _bytes(x: TensorType) -> int:
    return x.size * x.dtype.itemsize if isinstance(x.size, int) else 0


def _as_items(result: Any, fixed: bool) -> list[Any]:
    """What a reader gave, as items; arrays are fixed where all that they were made from is."""
    items = list(result) if isinstance(result, tuple) else [result]
    return [Host(np.asarray(x), fixed) if isinstance(x, (np.ndarray, np.generic)) else x for x in items]
