"""From a model to graphs: with symbolic sizes where possible, for concrete sizes, or in segments."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from strata.core import SymExpr, Table, TensorType, as_dtype, symbols
from strata.errors import DTypeError, LowerError, OptionError, ShapeError, StrataError
from strata.io.onnx.dtypes import in_graphs
from strata.io.onnx.frames import Prefix
from strata.io.onnx.handlers import register
from strata.io.onnx.items import NOTHING, Host, Item, Labels, Maps, Nothing, Sizes
from strata.io.onnx.plans import Finish, OnnxPlan, Port, Shapes, bind_shapes, forms, samples
from strata.io.onnx.program import OnnxProgram, read_program
from strata.io.onnx.registry import known_ops, reads
from strata.io.onnx.trace import NeedsData, OnnxTracer
from strata.mir import Graph, Op, Value, evaluate
from strata.runtime import CompiledGraph, Session, compile_price, run_price

__all__ = ["Reading", "known_ops", "read_program", "reads"]
register()

AT_ONCE = 0.5  # seconds of compiling that a model's segments may take without having run before
Keep = Callable[[OnnxPlan, Mapping[str, np.ndarray]], OnnxPlan]  # a plan and its parameters, which it does not have yet


class Reading:
    """Makes plans of a program. `keep` sets their parameters."""

    def __init__(self, program: OnnxProgram, session: Session, lock: threading.RLock) -> None:
        self.program, self.session, self.inputs = program, session, program.declared().inputs
        self._lock = lock
        self._prefixes: Table[Any, Prefix] = Table("onnx prefixes")
        self._compiled: Table[str, CompiledGraph] = Table("onnx segments")
        self._spent: Table[str, float] = Table("onnx prices")  # of segments that are not compiled
        self._at_once = AT_ONCE
        self.needs_data = False  # whether some shapes had no symbolic plan because of that

    def graph(self, hints: Mapping[str, int] | None = None) -> Graph:
        """The model as one graph with symbolic sizes; `hints` decide where the graph depends on them."""
        return self._whole(OnnxTracer(self.program, hints=hints), {})

    def whole(self) -> tuple[Graph, dict[str, np.ndarray]]:
        """The model as one graph with symbolic sizes, and its parameters."""
        tracer = OnnxTracer(self.program)
        graph = self._whole(tracer, {})
        return graph, {name: tracer.params[name] for name in graph.param_names}

    def compiled(self, sizes: Mapping[str, int]) -> CompiledGraph:
        """The same, with these sizes fixed, compiled and with its weights."""
        tracer = OnnxTracer(self.program)
        graph = self._whole(tracer, sizes)
        made = self.session.compile(graph)
        made.set_params({name: tracer.params[name] for name in graph.param_names})
        return made

    def _whole(self, tracer: OnnxTracer, sizes: Mapping[str, int]) -> Graph:
        try:
            items = self._trace(tracer, {p.name: tracer.leaf(p.name, _type(p).bind(sizes)) for p in self.inputs})
            return self._graph(tracer, [tracer.value(x) for x in items])
        except NeedsData as reason:
            raise LowerError(f"the model cannot be one graph: only a run knows {reason}", code="L503") from None

    def symbolic_plan(self, arrays: Mapping[str, Any], keep: Keep, why_not: list[str]) -> OnnxPlan | None:
        """The most general graph that serves these arrays, if there is one with a symbolic size."""
        failed: tuple[Shapes, Any] | None = None  # the last form that was tried, and the op that refused its inputs
        for shapes in forms(self.inputs, arrays):
            if failed is not None and _fails_again(*failed, shapes):
                continue
            try:
                tracer = OnnxTracer(self.program, hints=bind_shapes(shapes, arrays), samples=samples(arrays))
                leaves = {
                    name: tracer.leaf(name, TensorType(as_dtype(arrays[name].dtype), s)) for name, s in shapes.items()
                }
                return self._plan(tracer, self._trace(tracer, leaves), keep, shapes)
            except NeedsData as reason:
                why_not.append(f"depends on data: {reason}")
                self.needs_data = True
                return None
            except (ShapeError, OptionError, LowerError, DTypeError) as error:
                why_not.append(str(error))
                failed = shapes, error.applied  # not the error, which holds on to all that was read
        return None

    def graph_again(self, shapes: Shapes, arrays: Mapping[str, Any]) -> Graph:
        """The graph of a plan that was made for arrays of these shapes; where it has none, for exactly these."""
        hints = bind_shapes(shapes, arrays) if shapes else None
        tracer = OnnxTracer(self.program, hints=hints, samples=samples(arrays))
        kinds = {n: TensorType(as_dtype(x.dtype), shapes.get(n, x.shape)) for n, x in arrays.items()}
        items = self._trace(tracer, {name: tracer.leaf(name, kind) for name, kind in kinds.items()})
        values: list[Value] = []
        _template(items, tracer, values)
        return self._graph(tracer, values)

    def _trace(self, tracer: OnnxTracer, inputs: Mapping[str, Item]) -> list[Item]:
        graph = self.program.graph
        fixed = {t.name: t for t in graph.initializer} | {t.values.name: t for t in graph.sparse_initializer}
        items = []
        for proto in graph.input:
            if proto.name in inputs:
                items.append(inputs[proto.name])
            elif proto.name in fixed:
                held = fixed[proto.name]
                array = self.program.sparse(held) if hasattr(held, "values") else self.program.tensor(held)
                items.append(Host(array, name=proto.name))
            else:
                items.append(NOTHING)
        return tracer.run_graph(graph, items, top=True)

    def _graph(self, tracer: OnnxTracer, values: Sequence[Value]) -> Graph:
        return tracer.graph(values, name=re.sub(r"\W", "_", self.program.graph.name) or "main")

    def _plan(self, tracer: OnnxTracer, items: Sequence[Item], keep: Keep, shapes: Shapes | None = None) -> OnnxPlan:
        values: list[Value] = []
        outputs = _template(items, tracer, values)
        compiled, params = None, {}
        if values:
            graph = self._graph(tracer, values)
            compiled = self.session.compile(graph)
            params = {name: tracer.params[name] for name in graph.param_names}
        return keep(OnnxPlan(compiled, outputs, shapes or {}, tuple(tracer.guards), dict(tracer.assumed)), params)

    # for the sizes at hand

    def run_sized(self, key: Any, arrays: Mapping[str, Any], keep: Keep) -> tuple[list[Any], OnnxPlan | None]:
        """The outputs for arrays of these shapes, and the plan that gave them, if the model is one graph."""

        def execute(graph: Graph, feeds: Mapping[str, Any], params: Mapping[str, Any]) -> Sequence[np.ndarray]:
            with tracer.limits.elsewhere():
                segment = self._segment(graph, params)
                return evaluate(graph, {**feeds, **params}) if segment is None else segment.run(dict(feeds))

        tracer = OnnxTracer(self.program, execute)
        try:
            prefix = self._prefixes.get(key)
            if prefix is not None:
                return self._finish(tracer, tracer.resume(prefix, arrays)), None
            inputs = {name: self._input_item(tracer, name, x) for name, x in arrays.items()}
            items = self._trace(tracer, inputs)
        except NeedsData as reason:
            raise LowerError(f"the model cannot be run: it needs {reason} while it is read", code="L500") from None
        plain = all(isinstance(x, Value) for x in inputs.values())
        if (
            not tracer.segments
            and not tracer.has_run_data
            and not _has_run_data(items)
            and (plain or all(in_graphs_item(x) for x in inputs.values()))
        ):
            plan = self._plan(tracer, items, keep)
            return plan.run(arrays), plan
        if plain and tracer.prefix is not None:
            self._prefixes.put(key, tracer.prefix)
        return self._finish(tracer, items), None

    def _input_item(self, tracer: OnnxTracer, name: str, x: Any) -> Item:
        if x is None:
            return NOTHING
        if isinstance(x, list):
            return [self._input_item(tracer, f"{name}_{i}", y) for i, y in enumerate(x)]
        if not in_graphs(x.dtype):
            return Host(x, fixed=False)
        return tracer.leaf(name, x)

    def _finish(self, tracer: OnnxTracer, items: Sequence[Item]) -> list[Any]:
        values: list[Value] = []

        def collect(item: Any) -> None:
            if isinstance(item, list):
                for x in item:
                    collect(x)
            elif isinstance(item, (Labels, Maps)):
                values.append(item.value)
            elif isinstance(item, (Value, Sizes)):
                values.append(tracer.value(item))

        for item in items:
            collect(item)
        found = dict(zip(values, tracer.run_segment(values), strict=True)) if values else {}

        def result(item: Any) -> Any:
            if isinstance(item, list):
                return [result(x) for x in item]
            if isinstance(item, Host):
                return item.array
            if isinstance(item, (Labels, Maps)):
                return item.finished(found[item.value])
            return None if isinstance(item, Nothing) else found[tracer.value(item)]

        return [result(x) for x in items]

    def _segment(self, graph: Graph, params: Mapping[str, np.ndarray]) -> CompiledGraph | None:
        """A segment compiled, or None where NumPy runs it: sizes that depend on data may never come again.

        The rule is that of renting or buying. What NumPy is expected to take for a segment is added up over its runs,
        and it is compiled once that is more than compiling it takes. The first few small ones are compiled at once.
        """
        key = hashlib.sha256(str(graph).encode()).hexdigest()
        with self._lock:
            if key not in self._compiled and not self._is_worth_compiling(key, graph):
                return None

        def make() -> CompiledGraph:
            made = self.session.compile(graph)
            made.set_params(params)
            return made

        return self._compiled.get_or_make(key, make)

    def _is_worth_compiling(self, key: str, graph: Graph) -> bool:
        if not self.session.backend.capabilities.host_arrays:
            return True
        nodes = graph.nodes()
        price = compile_price(len(nodes))
        if price <= self._at_once and key not in self._spent:
            self._at_once -= price
            return True
        spent = (self._spent.peek(key) or 0.0) + run_price(nodes)
        self._spent.put(key, spent)
        return spent > price


def _template(items: Sequence[Item], tracer: OnnxTracer, values: list[Value]) -> list[Any]:
    """Outputs as numbers of values, arrays, or lists of these."""

    def template(item: Item) -> Any:
        if isinstance(item, list):
            return [template(x) for x in item]
        if isinstance(item, Host):
            return item.array
        if isinstance(item, Nothing):
            return item
        values.append(item.value if isinstance(item, (Labels, Maps)) else tracer.value(item))
        at = len(values) - 1
        return Finish(at, item) if isinstance(item, (Labels, Maps)) else at

    return [template(x) for x in items]


def _fails_again(before: Shapes, applied: tuple[Op, Sequence[TensorType]] | None, shapes: Shapes) -> bool:
    """Whether the op that refused its inputs in one form refuses them in another, too: nobody has to read up to it."""
    if applied is None:
        return False
    pairs = [(d, new) for name, dims in before.items() for d, new in zip(dims, shapes[name], strict=True) if d != new]
    changed = {str(d): new for d, new in pairs if isinstance(d, SymExpr) and [str(d)] == [*symbols(d)]}
    if len(changed) != len(dict.fromkeys(d for d, _ in pairs)):
        return False
    op, types = applied
    try:
        op.bind(changed).infer_types([t.bind(changed) for t in types])
    except StrataError:
        return True
    return False


def _type(port: Port) -> TensorType:
    if port.kind != "tensor" or port.dtype is None or port.shape is None or not in_graphs(port.dtype):
        raise NeedsData(f"the rank and element type of input {port}")
    return TensorType(as_dtype(port.dtype), port.shape)


def _has_run_data(items: Sequence[Item]) -> bool:
    return any(_has_run_data(x) if isinstance(x, list) else isinstance(x, Host) and not x.fixed for x in items)


def in_graphs_item(x: Item) -> bool:
    return all(in_graphs_item(y) for y in x) if isinstance(x, list) else isinstance(x, Value)
