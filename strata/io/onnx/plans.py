"""Plans: a model compiled as one graph, and the inputs it is valid for.

A plan keeps sizes symbolic. Where reading the model needs to know more about them (a branch on a shape, a comparison),
the sizes at hand decide, and what was assumed becomes a guard: a run whose sizes break it takes or makes another plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.config import config
from strata.core import Dim, SymExpr, TensorType, as_dtype, sym, symbols
from strata.errors import ShapeError
from strata.io.onnx.dtypes import in_graphs
from strata.io.onnx.frames import Guard
from strata.io.onnx.items import Labels, Maps, Nothing
from strata.mir import infer_binding, placeholder
from strata.runtime import CompiledGraph

Shapes = Mapping[str, tuple[Dim, ...]]
SAMPLE = 4  # elements of an input that may decide something
STEP = 32  # images go through nets that halve them five times: sizes that are multiples of this stay whole


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output: its name and what the file says about it; `shape` None is any rank."""

    name: str
    kind: str  # tensor, sequence, map or optional
    dtype: np.dtype[Any] | None  # of the tensor, or of the tensors in what is none
    shape: tuple[Dim, ...] | None
    type_name: str = ""  # in ONNX's words: tensor(float), seq(map(int64,tensor(float)))
    dims: tuple[int | str | None, ...] = ()  # sizes as the file names them; None has no name

    def __str__(self) -> str:
        dims = "[...]" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        kind = self.kind if self.kind != "tensor" or self.dtype is None else self.dtype
        return f"{self.name}: {kind}{dims}"


@dataclass(frozen=True, slots=True)
class OnnxAbout:
    """Who made a model, and what its file says about it; `properties` are its `metadata_props`."""

    producer: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int | None = None  # None: the file does not say
    properties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """What a model's file says of its inputs and outputs, and of itself."""

    name: str
    inputs: tuple[Port, ...]
    optional_inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    about: OnnxAbout = OnnxAbout()


@dataclass(frozen=True, slots=True)
class Finish:
    """An output that is made from a result by its number: texts, or maps."""

    at: int
    item: Labels | Maps


@dataclass(frozen=True)
class OnnxPlan:
    """A model as one compiled graph, for inputs of some shapes; `assumed` are inputs whose elements it depends on.

    Outputs are its results by number, arrays, or lists of these.
    """

    compiled: CompiledGraph | None
    outputs: list[Any]
    shapes: Shapes = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    assumed: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: tuple[Any, ...] = field(default_factory=lambda: config().code_settings)  # that it was made under

    def fits(self, arrays: Mapping[str, Any]) -> bool:
        """Whether inputs of these shapes, under these settings, are what the plan was made for."""
        if set(arrays) != set(self.shapes) or self.settings != config().code_settings:
            return False
        if not all(np.array_equal(arrays[name], x) for name, x in self.assumed.items()):
            return False
        try:
            binding = bind_shapes(self.shapes, arrays)
            return all(guard.holds(binding) for guard in self.guards)
        except ShapeError:
            return False

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        results: Sequence[np.ndarray] = ()
        if self.compiled is not None:
            flat = dict(_flat(feeds))
            results = self.compiled.run({name: flat[name] for name in self.compiled.inputs})
        return [_filled(x, results) for x in self.outputs]


def samples(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Inputs that may decide something by their elements: a few integers or flags."""
    return {name: x for name, x in arrays.items() if x.dtype.kind in "iub" and x.size <= SAMPLE}


def bind_shapes(shapes: Shapes, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The symbols of declared shapes from real ones; an error where they do not fit."""
    leaves = {}
    for name, shape in shapes.items():
        if len(shape) != arrays[name].ndim:
            raise ShapeError(f"input {name!r} has {arrays[name].ndim} axes, not {len(shape)}", code="S501")
        leaves[placeholder(name, TensorType(as_dtype(np.dtype(np.float32)), shape))] = arrays[name].shape
        for declared, actual in zip(shape, arrays[name].shape, strict=True):
            if isinstance(declared, int) and declared != actual:
                raise ShapeError(f"input {name!r} has size {actual} where {declared} is declared", code="S501")
    binding = infer_binding(leaves)
    for shape in shapes.values():
        for d in shape:
            if isinstance(d, SymExpr) and not set(symbols(d)) <= set(binding):
                raise ShapeError(f"no whole number makes {d} the size that was given", code="S501")
    return binding


def forms(ports: Sequence[Port], arrays: Mapping[str, Any]) -> Iterator[dict[str, tuple[Dim, ...]]]:
    """Shapes to compile for, the most general first; all of them cover the arrays at hand."""
    if not all(p.kind == "tensor" and p.dtype is not None and in_graphs(p.dtype) and p.name in arrays for p in ports):
        return
    if len(arrays) != len(ports):
        return
    declared = {p.name: arrays[p.name].shape if p.shape is None else p.shape for p in ports}
    makers: list[Callable[[int, int, Dim, int], Dim]] = [
        lambda axis, rank, d, actual: d,
        lambda axis, rank, d, actual: _multiple(d) if rank > 3 and axis > 1 and actual % STEP == 0 else d,
        lambda axis, rank, d, actual: d if axis in (0, rank - 1) else actual,
        lambda axis, rank, d, actual: d if axis == 0 else actual,
    ]
    unified = _unified(declared, arrays)
    any_size, multiples, *others = makers
    order = [(make, shapes) for shapes in (declared, unified) for make in (any_size, multiples)]
    order += [(make, shapes) for make in others for shapes in (declared, unified)]
    seen: list[dict[str, tuple[Dim, ...]]] = []
    for make, shapes in order:
        found = {
            name: tuple(
                make(axis, len(shape), d, actual) if isinstance(d, SymExpr) else d
                for axis, (d, actual) in enumerate(zip(shape, arrays[name].shape, strict=True))
            )
            for name, shape in shapes.items()
        }
        if found not in seen and any(isinstance(d, SymExpr) for shape in found.values() for d in shape):
            seen.append(found)
            yield found


def _unified(shapes: Shapes, arrays: Mapping[str, Any]) -> dict[str, tuple[Dim, ...]]:
    """Sizes that are equal now as one symbol: a batch axis that the file names twice, or not at all."""
    first: dict[int, Dim] = {}
    return {
        name: tuple(
            first.setdefault(actual, d) if isinstance(d, SymExpr) else d
            for d, actual in zip(shape, arrays[name].shape, strict=True)
        )
        for name, shape in shapes.items()
    }


def _multiple(d: Dim) -> Dim:
    """STEP times a new symbol."""
    return sym(f"{re.sub(r'[^A-Za-z0-9_]', '_', str(d))}_by{STEP}") * STEP


def _flat(feeds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arrays by the names of their leaves: elements of sequences are numbered."""
    for name, x in feeds.items():
        if isinstance(x, list):
            yield from _flat({f"{name}_{i}": y for i, y in enumerate(x)})
        else:
            yield name, x


def _filled(template: Any, results: Sequence[np.ndarray]) -> Any:
    if isinstance(template, list):
        return [_filled(x, results) for x in template]
    if isinstance(template, int):
        return results[template]
    if isinstance(template, Finish):
        return template.item.finished(results[template.at])
    return None if isinstance(template, Nothing) else template
