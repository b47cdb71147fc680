"""OnnxModel: an ONNX file that can be run on arrays of any size it allows.

The whole model is compiled once with symbolic sizes where that is possible. Otherwise it is compiled for the sizes that come,
and models whose shapes depend on data run as several compiled segments with the host in between.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, TensorType, as_dtype, here, sym
from strata.errors import DTypeError, FileError, LowerError, OptionError, ShapeError, StrataError, UnknownNameError
from strata.io.onnx import handlers as _handlers  # noqa: F401 - registers the readers
from strata.io.onnx.dtypes import in_graphs, numpy_dtype
from strata.io.onnx.items import NOTHING, Host, Item, Nothing, Sizes
from strata.io.onnx.program import Program, read_program
from strata.io.onnx.trace import NeedsData, Tracer
from strata.mir import Graph, Value, near
from strata.runtime import CompiledGraph, Session

KEPT = 64  # compiled graphs, least recently used dropped first


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output: its name and what the file says about it; `shape` None is any rank."""

    name: str
    kind: str  # tensor, sequence or optional
    dtype: np.dtype[Any] | None
    shape: tuple[Dim, ...] | None

    def __str__(self) -> str:
        dims = "[...]" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.name}: {self.kind if self.dtype is None else self.dtype}{dims}"


@dataclass(frozen=True)
class Plan:
    """A model as one compiled graph: outputs are its results by number, arrays, or lists of these."""

    compiled: CompiledGraph | None
    outputs: list[Any]

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        results: Sequence[np.ndarray] = ()
        if self.compiled is not None:
            results = self.compiled.run({name: feeds[name] for name in self.compiled.lir.graph.input_names})
        return [_filled(x, results) for x in self.outputs]


def _filled(template: Any, results: Sequence[np.ndarray]) -> Any:
    if isinstance(template, list):
        return [_filled(x, results) for x in template]
    if isinstance(template, int):
        return results[template]
    return None if isinstance(template, Nothing) else template


class OnnxModel:
    """`m.run(x=array)` gives a tuple of arrays, one for each output. Safe to call from many threads."""

    def __init__(
        self,
        source: Any,
        *,
        device: str | None = None,
        custom_ops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.program: Program = read_program(source, custom_ops)
        self.session = Session(device)
        graph = self.program.graph
        fixed = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        names = [x.name for x in graph.input]
        if len(set(names)) != len(names):
            raise FileError("two inputs of the model have the same name", code="F314")
        self._symbols: dict[str, SymExpr] = {}
        self.inputs = tuple(self._port(x) for x in graph.input if x.name not in fixed)
        self.optional_inputs = tuple(self._port(x) for x in graph.input if x.name in fixed)
        self.outputs = tuple(self._port(x) for x in graph.output)
        self._lock = threading.RLock()
        self._whole: Plan | None = None
        self._why_not: str | None = None
        self._plans: OrderedDict[Any, Plan | None] = OrderedDict()
        self._compiled: OrderedDict[str, CompiledGraph] = OrderedDict()

    def _port(self, proto: Any) -> Port:
        kind, tensor = proto.type.WhichOneof("value"), proto.type.tensor_type
        if kind != "tensor_type":
            return Port(proto.name, "sequence" if kind == "sequence_type" else "optional", None, None)
        dtype = numpy_dtype(tensor.elem_type) if tensor.elem_type else None
        if not tensor.HasField("shape"):
            return Port(proto.name, "tensor", dtype, None)
        dims = tuple(self._dim(d, f"{proto.name}_{i}") for i, d in enumerate(tensor.shape.dim))
        return Port(proto.name, "tensor", dtype, dims)

    def _dim(self, proto: Any, fallback: str) -> Dim:
        if proto.HasField("dim_value") and proto.dim_value >= 0:
            return int(proto.dim_value)
        name = re.sub(r"\W", "_", proto.dim_param or fallback) or "dim"
        if not re.match(r"[A-Za-z_]", name) or name in ("min", "max"):
            name = f"n_{name}"
        return self._symbols.setdefault(name, sym(name))

    def __repr__(self) -> str:
        return f"<OnnxModel ({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}>"

    # running

    def run(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[Any, ...]:
        """Run on arrays by input name: a tuple of arrays, one for each output (lists for sequences)."""
        arrays = self._checked({**(feeds or {}), **named})
        plan = self._whole_plan()
        if plan is not None and all(name in arrays for name in (p.name for p in self.inputs)) and not self._overridden(arrays):
            try:
                return tuple(plan.run(arrays))
            except ShapeError:  # a size outside the bounds of its symbol: 0, or a broadcast of 1
                pass
        return tuple(self._run_sized(arrays))

    __call__ = run

    def _overridden(self, arrays: Mapping[str, Any]) -> bool:
        return any(p.name in arrays for p in self.optional_inputs)

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        ports = {p.name: p for p in (*self.inputs, *self.optional_inputs)}
        for name in given:
            if name not in ports:
                raise UnknownNameError(
                    f"the model has no input {name!r}{near(name, ports)}; it has {', '.join(ports)}", code="N311", place=here()
                )
        for port in self.inputs:
            if port.name not in given and port.kind != "optional":
                raise UnknownNameError(f"input {port} is missing", code="N312", place=here())
        return {name: self._as_input(ports[name], value) for name, value in given.items()}

    def _as_input(self, port: Port, value: Any) -> Any:
        if value is None or isinstance(value, (list, tuple)) and port.kind != "tensor":
            return value if value is None else [np.asarray(x) if x is not None else None for x in value]
        array = np.asarray(value)
        if array.dtype.kind in "US":
            array = array.astype(object)
        if port.kind != "tensor":
            return array
        if port.dtype is not None and array.dtype != port.dtype:
            if not isinstance(value, (bool, int, float, list, tuple)):
                raise DTypeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="D312", place=here())
            array = array.astype(port.dtype)
        if port.shape is not None and array.ndim != len(port.shape):
            raise ShapeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="S312", place=here())
        return array

    # the whole model with symbolic sizes

    @property
    def is_symbolic(self) -> bool:
        """Whether one compiled graph serves all sizes."""
        return self._whole_plan() is not None

    @property
    def why_not_symbolic(self) -> str | None:
        """What keeps the model from being one compiled graph for all sizes."""
        self._whole_plan()
        return self._why_not

    def graph(self) -> Graph:
        """The model as one graph with symbolic sizes."""
        tracer = Tracer(self.program)
        items = self._trace(tracer, {p.name: tracer.leaf(p.name, self._type(p)) for p in self.inputs})
        return tracer.graph([tracer.value(x) for x in items], name=self.program.graph.name or "main")

    def _type(self, port: Port) -> TensorType:
        if port.kind != "tensor" or port.dtype is None or port.shape is None or not in_graphs(port.dtype):
            raise NeedsData(f"input {port} has no fixed rank and element type")
        return TensorType(as_dtype(port.dtype), port.shape)

    def _whole_plan(self) -> Plan | None:
        with self._lock:
            if self._whole is None and self._why_not is None:
                try:
                    tracer = Tracer(self.program)
                    items = self._trace(tracer, {p.name: tracer.leaf(p.name, self._type(p)) for p in self.inputs})
                    self._whole = self._plan(tracer, items)
                except NeedsData as reason:
                    self._why_not = f"a shape or a branch depends on data: {reason}"
                except (ShapeError, OptionError, LowerError, DTypeError, NotImplementedError) as error:
                    self._why_not = str(error)
            return self._whole

    def _trace(self, tracer: Tracer, inputs: Mapping[str, Item]) -> list[Item]:
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

    def _plan(self, tracer: Tracer, items: Sequence[Item]) -> Plan:
        values: list[Value] = []

        def template(item: Item) -> Any:
            if isinstance(item, list):
                return [template(x) for x in item]
            if isinstance(item, Host):
                return item.array
            if isinstance(item, Nothing):
                return item
            values.append(tracer.value(item))
            return len(values) - 1

        outputs = [template(x) for x in items]
        if not values:
            return Plan(None, outputs)
        graph = tracer.graph(values, name=re.sub(r"\W", "_", self.program.graph.name) or "main")
        compiled = self.session.compile(graph)
        compiled.set_params({name: tracer.params[name] for name in graph.param_names})
        return Plan(compiled, outputs)

    # for the sizes at hand

    def _run_sized(self, arrays: Mapping[str, Any]) -> list[Any]:
        key = _signature(arrays)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
        if plan is not None:
            return plan.run(arrays)
        segments = 0

        def execute(graph: Graph, feeds: Mapping[str, Any], params: Mapping[str, Any]) -> Sequence[np.ndarray]:
            nonlocal segments
            segments += 1
            return self._segment(graph, params).run(dict(feeds))

        tracer = Tracer(self.program, execute)
        inputs = {name: self._input_item(tracer, name, x) for name, x in arrays.items()}
        items = self._trace(tracer, inputs)
        if not segments and not _has_run_data(items) and all(in_graphs_item(x) for x in inputs.values()):
            plan = self._plan(tracer, items)
            with self._lock:
                self._plans[key] = plan
                if len(self._plans) > KEPT:
                    self._plans.popitem(last=False)
            return plan.run(arrays)
        return self._finish(tracer, items)

    def _input_item(self, tracer: Tracer, name: str, x: Any) -> Item:
        if x is None:
            return NOTHING
        if isinstance(x, list):
            return [self._input_item(tracer, f"{name}_{i}", y) for i, y in enumerate(x)]
        if not in_graphs(x.dtype):
            return Host(x, fixed=False)
        return tracer.leaf(name, x)

    def _finish(self, tracer: Tracer, items: Sequence[Item]) -> list[Any]:
        values: list[Value] = []

        def collect(item: Any) -> None:
            if isinstance(item, list):
                for x in item:
                    collect(x)
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
            return None if isinstance(item, Nothing) else found[tracer.value(item)]

        return [result(x) for x in items]

    def _segment(self, graph: Graph, params: Mapping[str, np.ndarray]) -> CompiledGraph:
        key = str(graph)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        made = self.session.compile(graph)
        made.set_params(params)
        with self._lock:
            self._compiled[key] = made
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made


def _signature(x: Any) -> Any:
    if isinstance(x, Mapping):
        return tuple((name, _signature(v)) for name, v in sorted(x.items()))
    if isinstance(x, list):
        return tuple(_signature(v) for v in x)
    return None if x is None else (x.dtype, x.shape)


def _has_run_data(items: Sequence[Item]) -> bool:
    return any(
        _has_run_data(x) if isinstance(x, list) else isinstance(x, Host) and not x.fixed for x in items
    )


def in_graphs_item(x: Item) -> bool:
    return all(in_graphs_item(y) for y in x) if isinstance(x, list) else isinstance(x, Value)


def load_onnx(source: Any, *, device: str | None = None, custom_ops: Mapping[str, Callable[..., Any]] | None = None) -> OnnxModel:
    """An ONNX model from a path, bytes or a ModelProto. `custom_ops` maps op names to functions of a node."""
    try:
        return OnnxModel(source, device=device, custom_ops=custom_ops)
    except StrataError as error:
        if error.place is None:
            error.place = here()
        raise
