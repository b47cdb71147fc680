"""OnnxModel: an ONNX file that can be run on arrays of any size it allows.

The whole model is compiled once with symbolic sizes where that is possible. Otherwise it is compiled for the sizes that
come, and models whose shapes depend on data run as several compiled segments with the host in between.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from strata.cache import default_store, digest
from strata.core import Dim, SymExpr, TensorType, as_dtype, here, located, sym
from strata.errors import (
    DTypeError,
    FileError,
    LowerError,
    OptionError,
    RunError,
    ShapeError,
    StrataError,
    UnknownNameError,
)
from strata.io.onnx.dtypes import in_graphs, numpy_dtype
from strata.io.onnx.frames import Prefix
from strata.io.onnx.handlers import register
from strata.io.onnx.items import NOTHING, Host, Item, Nothing, Sizes
from strata.io.onnx.plans import Plan, Port, Shapes, bind_shapes, forms
from strata.io.onnx.program import Program, read_program
from strata.io.onnx.trace import NeedsData, Tracer
from strata.mir import Graph, Value, near
from strata.runtime import CompiledGraph, Session, code_version

register()

KEPT = 64  # compiled segments, least recently used dropped first
SIGNATURES = 256  # sets of input shapes whose plan is remembered
SYMBOLIC_PLANS = 16
WORTH_SECONDS = 0.02  # of reading; less is not worth an entry of the store
SAMPLE = 4  # elements of an input that may decide something


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
            raise FileError("two inputs of the model have the same name", code="F500")
        self._symbols: dict[str, SymExpr] = {}
        self.inputs = tuple(self._port(x) for x in graph.input if x.name not in fixed)
        self.optional_inputs = tuple(self._port(x) for x in graph.input if x.name in fixed)
        self.outputs = tuple(self._port(x) for x in graph.output)
        self._lock = threading.RLock()
        self._plans: list[Plan] = []  # with symbolic sizes
        self._by_signature: OrderedDict[Any, Plan | None] = OrderedDict()  # None: run in segments
        self._assumed: set[str] = set()  # inputs whose elements some plan depends on
        self.why_not_symbolic: list[str] = []
        self._prefixes: dict[Any, Prefix] = {}
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
        if not isinstance(proto.dim_param, str):
            raise FileError(f"input {fallback!r}: the name of a size is not text", code="F500")
        name = re.sub(r"\W", "_", proto.dim_param)
        if not name.strip("_"):  # nameless, or "?"
            name = re.sub(r"\W", "_", fallback)
        if not re.match(r"[A-Za-z_]", name) or name in ("min", "max"):
            name = f"n_{name}"
        return self._symbols.setdefault(name, sym(name))

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says about itself: its `metadata_props`."""
        props = self.program.proto.metadata_props
        return {p.key: p.value for p in props if isinstance(p.key, str) and isinstance(p.value, str)}

    def __repr__(self) -> str:
        return f"<OnnxModel ({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}>"

    # running

    @located
    def run(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> tuple[Any, ...]:
        """Run on arrays by input name: a tuple of arrays, one for each output (lists for sequences)."""
        arrays = self._checked({**(feeds or {}), **named})
        key = self._signature(arrays)
        with self._lock:
            plan = self._by_signature.get(key)
            if key not in self._by_signature:
                plan = next((p for p in self._plans if p.fits(arrays)), None) or self._symbolic_plan(arrays)
                if plan is not None:
                    self._remember(self._signature(arrays), plan)
        try:
            return tuple(plan.run(arrays) if plan is not None else self._run_sized(key, arrays))
        except StrataError:
            raise
        except (MemoryError, OSError, OverflowError) as error:
            raise RunError(f"the model needs more memory than there is: {error}", place=here()) from error
        except (ValueError, IndexError) as error:
            raise RunError(f"the model does not fit these inputs: {error}", place=here()) from error

    __call__ = run

    def _remember(self, key: Any, plan: Plan | None) -> None:
        with self._lock:
            self._by_signature[key] = plan
            if len(self._by_signature) > SIGNATURES:
                self._by_signature.popitem(last=False)

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        ports = {p.name: p for p in (*self.inputs, *self.optional_inputs)}
        for name in given:
            if name not in ports:
                raise UnknownNameError(
                    f"the model has no input {name!r}{near(name, ports)}; it has {', '.join(ports)}",
                    code="N501",
                    place=here(),
                )
        for port in self.inputs:
            if port.name not in given and port.kind != "optional":
                raise UnknownNameError(f"input {port} is missing", code="N501", place=here())
        return {name: self._as_input(ports[name], value) for name, value in given.items()}

    def _as_input(self, port: Port, value: Any) -> Any:
        if value is None or (isinstance(value, (list, tuple)) and port.kind != "tensor"):
            return value if value is None else [np.asarray(x) if x is not None else None for x in value]
        array = np.asarray(value)
        if array.dtype.kind in "US":
            array = array.astype(object)
        if port.kind != "tensor":
            return array
        if port.dtype is not None and array.dtype != port.dtype:
            if not isinstance(value, (bool, int, float, list, tuple)):
                raise DTypeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="D501", place=here())
            array = array.astype(port.dtype)
        if port.shape is not None and array.ndim != len(port.shape):
            raise ShapeError(f"input {port}, got {array.dtype}{list(array.shape)}", code="S501", place=here())
        return array

    # the whole model with symbolic sizes

    def graph(self, hints: Mapping[str, int] | None = None) -> Graph:
        """The model as one graph with symbolic sizes; `hints` decide where the graph depends on them."""
        tracer = Tracer(self.program, hints=hints)
        items = self._trace(tracer, {p.name: tracer.leaf(p.name, self._type(p)) for p in self.inputs})
        return tracer.graph([tracer.value(x) for x in items], name=self.program.graph.name or "main")

    def _type(self, port: Port) -> TensorType:
        if port.kind != "tensor" or port.dtype is None or port.shape is None or not in_graphs(port.dtype):
            raise NeedsData(f"input {port} has no fixed rank and element type")
        return TensorType(as_dtype(port.dtype), port.shape)

    @property
    def is_symbolic(self) -> bool:
        """Whether the runs so far were served by graphs with symbolic sizes."""
        return bool(self._plans)

    def _symbolic_plan(self, arrays: Mapping[str, Any]) -> Plan | None:
        """The most general graph that serves these arrays, if there is one with a symbolic size."""
        if len(self._plans) >= SYMBOLIC_PLANS:
            return None
        key = self._forms_key(arrays)
        failed = self._failed_forms(key)
        start = time.perf_counter()
        for number, shapes in enumerate(forms(self.inputs, arrays)):
            if number < len(failed):
                self.why_not_symbolic.append(failed[number])
                continue
            try:
                tracer = Tracer(self.program, hints=bind_shapes(shapes, arrays), samples=_samples(arrays))
                leaves = {
                    name: tracer.leaf(name, TensorType(as_dtype(arrays[name].dtype), s)) for name, s in shapes.items()
                }
                items, reading = self._trace(tracer, leaves), time.perf_counter() - start
                plan = self._plan(tracer, items, shapes)
            except NeedsData as reason:
                self.why_not_symbolic.append(f"depends on data: {reason}")
                return None
            except (ShapeError, OptionError, LowerError, DTypeError) as error:
                self.why_not_symbolic.append(str(error))
                continue
            if key is not None and number > len(failed) and reading > WORTH_SECONDS:
                default_store().put(key, json.dumps(self.why_not_symbolic[-number:]).encode(), {"kind": "onnx forms"})
            self._plans.append(plan)
            self._assumed |= set(plan.assumed)
            return plan
        return None

    def _forms_key(self, arrays: Mapping[str, Any]) -> str | None:
        """Under which the store keeps the forms that do not fit a model at these sizes."""
        version = code_version()
        if self.program.digest is None or version is None:
            return None
        samples = [f"{name} {x.tobytes().hex()}" for name, x in sorted(_samples(arrays).items())]
        return digest(
            "onnx forms", self.program.digest, str(_signature(arrays)), *samples, version, _importer_version()
        )

    def _failed_forms(self, key: str | None) -> list[str]:
        """Why the first forms do not fit, as an earlier process found out."""
        payload = default_store().get(key) if key is not None else None
        try:
            found = json.loads(payload) if payload is not None else []
        except ValueError:
            return []
        return found if isinstance(found, list) and all(isinstance(x, str) for x in found) else []

    def _signature(self, arrays: Mapping[str, Any]) -> Any:
        """What decides the plan of a run: shapes, and the elements of inputs that a plan depends on."""
        elements = tuple(arrays[name].tobytes() for name in sorted(self._assumed) if name in arrays)
        return _signature(arrays), elements

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

    def _plan(self, tracer: Tracer, items: Sequence[Item], shapes: Shapes | None = None) -> Plan:
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
            return Plan(None, outputs, shapes or {}, tuple(tracer.guards), dict(tracer.assumed))
        graph = tracer.graph(values, name=re.sub(r"\W", "_", self.program.graph.name) or "main")
        compiled = self.session.compile(graph)
        compiled.set_params({name: tracer.params[name] for name in graph.param_names})
        return Plan(compiled, outputs, shapes or {}, tuple(tracer.guards), dict(tracer.assumed))

    # for the sizes at hand

    def _run_sized(self, key: Any, arrays: Mapping[str, Any]) -> list[Any]:
        def execute(graph: Graph, feeds: Mapping[str, Any], params: Mapping[str, Any]) -> Sequence[np.ndarray]:
            return self._segment(graph, params).run(dict(feeds))

        tracer = Tracer(self.program, execute)
        try:
            prefix = self._prefixes.get(key)
            if prefix is not None:
                return self._finish(tracer, tracer.resume(prefix, arrays))
            inputs = {name: self._input_item(tracer, name, x) for name, x in arrays.items()}
            items = self._trace(tracer, inputs)
        except NeedsData as reason:
            raise LowerError(f"the model cannot be run: it needs {reason} while it is read", code="L500") from None
        plain = all(isinstance(x, Value) for x in inputs.values())
        if (
            not tracer.segments
            and not _has_run_data(items)
            and (plain or all(in_graphs_item(x) for x in inputs.values()))
        ):
            plan = self._plan(tracer, items)
            self._remember(key, plan)
            return plan.run(arrays)
        self._remember(key, None)
        if plain and tracer.prefix is not None and len(self._prefixes) < KEPT:
            self._prefixes[key] = tracer.prefix
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


@cache
def _importer_version() -> str:
    """A digest of the code that reads models."""
    return digest(*(f.read_bytes() for f in sorted(Path(__file__).parent.rglob("*.py"))))


def _signature(x: Any) -> Any:
    if isinstance(x, Mapping):
        return tuple((name, _signature(v)) for name, v in sorted(x.items()))
    if isinstance(x, list):
        return tuple(_signature(v) for v in x)
    return None if x is None else (x.dtype, x.shape)


def _samples(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Inputs that may decide something by their elements: a few integers or flags."""
    return {name: x for name, x in arrays.items() if x.dtype.kind in "iub" and x.size <= SAMPLE}


def _has_run_data(items: Sequence[Item]) -> bool:
    return any(_has_run_data(x) if isinstance(x, list) else isinstance(x, Host) and not x.fixed for x in items)


def in_graphs_item(x: Item) -> bool:
    return all(in_graphs_item(y) for y in x) if isinstance(x, list) else isinstance(x, Value)


@located
def load_onnx(
    source: Any, *, device: str | None = None, custom_ops: Mapping[str, Callable[..., Any]] | None = None
) -> OnnxModel:
    """An ONNX model from a path, bytes or a ModelProto. `custom_ops` maps op names to functions of a node."""
    return OnnxModel(source, device=device, custom_ops=custom_ops)
