"""Fine-tuning: the initializers of an ONNX file as parameters of a function of tensors, and back into the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from strata.core import Table, TensorType, as_dtype, here, located
from strata.errors import LowerError, OptionError, ShapeError, UnknownNameError, file_error
from strata.io.onnx.checks import subgraphs, walk
from strata.io.onnx.dtypes import in_graphs
from strata.io.onnx.program import OnnxProgram
from strata.io.onnx.trace import NeedsData, OnnxTracer
from strata.mir import Graph, leaf_name, near
from strata.tensor import Tensor, asarray

if TYPE_CHECKING:
    from strata.io.onnx.model import OnnxModel

Params = Mapping[str, Any]
_STATISTICS = {"BatchNormalization": (3, 4)}  # inputs that are measured, not learned


class TrainableModel:
    """A model from a file as a function of its parameters: `model(params, x)`, `model.loss(measure)`, `model.save(…)`.

    `params` is a dict of arrays by initializer name, a pytree for `grad`, `jit` and optimisers.
    """

    def __init__(self, model: OnnxModel, names: Iterable[str] | None = None) -> None:
        self.program: OnnxProgram = model.program
        self.inputs = tuple(p.name for p in model.inputs)
        self.outputs = tuple(p.name for p in model.outputs)
        known = _learned(self.program)
        chosen = known if names is None else tuple(names)
        for name in chosen:
            if name not in known:
                raise UnknownNameError(
                    f"trainable: the model has no float initializer {name!r}{near(name, known)}", code="N504",
                    place=here(),
                )  # fmt: skip
        if not chosen:
            raise OptionError("trainable: the model has no initializer of floats", code="O504", place=here())
        held = {t.name: t for t in self.program.graph.initializer}
        self.params: dict[str, np.ndarray] = {name: np.array(self.program.tensor(held[name])) for name in chosen}
        self._graphs: Table[Any, Graph] = Table("onnx training")

    def __repr__(self) -> str:
        count = sum(p.size for p in self.params.values())
        return f"<TrainableModel ({', '.join(self.inputs)}) -> {', '.join(self.outputs)}: {count:,} parameters>"

    @located
    def __call__(self, params: Params, *inputs: Any, **named: Any) -> Any:
        """The outputs as tensors: one, or a tuple of them. Inputs come in the order of the file, or by name."""
        if set(params) != set(self.params):
            odd = min(set(params) ^ set(self.params))
            raise UnknownNameError(f"the parameters differ from the model's in {odd!r}", code="N504")
        if len(inputs) > len(self.inputs) or set(named) - set(self.inputs[len(inputs) :]):
            raise UnknownNameError(f"the model takes {', '.join(self.inputs)}", code="N501")
        given = {**dict(zip(self.inputs, inputs, strict=False)), **named}
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise UnknownNameError(f"input {missing[0]!r} is missing", code="N501")
        values = {name: asarray(x).value for name, x in {**given, **params}.items()}
        for name, x in self.params.items():
            if values[name].shape != x.shape:
                raise ShapeError(
                    f"parameter {name!r} is {values[name].type}, the file's is {list(x.shape)}", code="S501"
                )
        graph = self._graph({name: values[name].type for name in self.inputs})
        leaves = [leaf_name(x) for x in (*graph.inputs, *graph.params)]
        found = tuple(Tensor(r) for r in graph.call(*(values[name] for name in leaves)))
        return found[0] if len(found) == 1 else found

    def loss(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """A function `(params, inputs, *targets)` to differentiate: `measure(outputs, *targets)` gives one float.

        `inputs` is an array, a tuple of arrays in the file's order, or a dict of them by name.
        """

        def loss(params: Params, inputs: Any, *targets: Any) -> Any:
            if isinstance(inputs, Mapping):
                outputs = self(params, **inputs)
            else:
                outputs = self(params, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
            return measure(outputs, *targets)

        return loss

    def _graph(self, kinds: Mapping[str, TensorType]) -> Graph:
        return self._graphs.get_or_make(tuple(sorted((n, str(t)) for n, t in kinds.items())), lambda: self._made(kinds))

    def _made(self, kinds: Mapping[str, TensorType]) -> Graph:
        tracer = OnnxTracer(self.program, hints={}, learned=frozenset(self.params))
        graph = self.program.graph
        leaves = {name: tracer.leaf(name, kind) for name, kind in kinds.items()}
        items = [
            leaves[x.name] if x.name in leaves else tracer.initializers(graph)[x.name]
            for x in graph.input
            if x.name in leaves or x.name in {t.name for t in graph.initializer}
        ]
        try:
            found = tracer.run_graph(graph, items, top=True)
            results = [tracer.value(x) for x in found]
        except NeedsData as reason:
            raise LowerError(f"the model cannot be one graph: only a run knows {reason}", code="L503") from None
        whole = tracer.graph(results, list(leaves.values()), name="train")
        fixed = {leaf_name(x): tracer.params[leaf_name(x)] for x in whole.params if leaf_name(x) not in self.params}
        return _with_constants(whole, fixed)

    @located
    def save(self, path: str | os.PathLike[str] | None, params: Params) -> Any:
        """Write the file with these parameters in place of its own; the model is also returned."""
        unknown = set(params) - set(self.params)
        if unknown:
            raise UnknownNameError(f"save: the model has no parameter {min(unknown)!r}", code="N504")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.program.proto)
        for held in proto.graph.initializer:
            array = None
            if held.name in params:
                old, given = self.params[held.name], params[held.name]
                array = np.asarray(given.numpy() if isinstance(given, Tensor) else given)
                if array.shape != old.shape:
                    raise ShapeError(
                        f"save: {held.name!r} has shape {list(array.shape)}, the file's {list(old.shape)}", code="S501"
                    )
                array = array.astype(old.dtype)
            elif held.data_location == onnx.TensorProto.EXTERNAL:
                array = self.program.tensor(held)
            if array is not None:
                held.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), held.name))
        if path is not None:
            try:
                Path(path).write_bytes(proto.SerializeToString())
            except OSError as error:
                raise file_error(path, error, code="F500", what="cannot be written", place=here()) from None
        return proto


def _learned(program: OnnxProgram) -> tuple[str, ...]:
    """Float initializers of more than one element that some node multiplies or adds, rather than measures with."""
    measured: set[str] = set()
    used: set[str] = set()
    for node in walk(program.graph.node):
        places = _STATISTICS.get(node.op_type, ())
        for i, name in enumerate(node.input):
            (measured if i in places else used).add(name)
        for graph in subgraphs(node):
            used |= {x.name for x in graph.output}
    found = []
    for t in program.graph.initializer:
        array_type = onnx.helper.tensor_dtype_to_np_dtype(t.data_type) if t.data_type not in (0, 8) else None
        is_float = array_type is not None and in_graphs(np.dtype(array_type)) and as_dtype(array_type).is_float
        if is_float and int(np.prod(t.dims)) > 1 and t.name in used - measured:
            found.append(t.name)
    return tuple(found)


def _with_constants(graph: Graph, fixed: Mapping[str, np.ndarray]) -> Graph:
    """The graph with parameters that stay as they are in the file as separate tensors."""
    if not fixed:
        return graph
    leaves: Sequence[Any] = (*graph.inputs, *(x for x in graph.params if leaf_name(x) not in fixed))
    made = Graph(graph.name)
    values = [made.input(leaf_name(x), x.type) for x in graph.inputs]
    values += [made.param(leaf_name(x), x.type) for x in leaves[len(graph.inputs) :]]
    known = dict(zip(leaves, values, strict=True))
    known |= {x: asarray(fixed[leaf_name(x)]).value for x in graph.params if leaf_name(x) in fixed}
    results = graph.call(*(known[x] for x in (*graph.inputs, *graph.params)))
    return made.outputs(*results)
