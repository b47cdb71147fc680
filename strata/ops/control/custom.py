"""User-defined ops: functions with their own derivatives (CustomFn), and ops that run user code (Custom)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, f64
from strata.errors import MissingRuleError, OptionError, TraceError, UnknownNameError
from strata.kinds import counted
from strata.mir import (
    VALUE_TYPES,
    Graph,
    Input,
    Op,
    Param,
    Sample,
    Value,
    as_tuple,
    batch_values,
    near,
    op,
    placeholder,
    pullback_once,
    pushforward,
    toposort,
)
from strata.ops.base.creation import zeros_like
from strata.ops.base.movement import broadcast_to
from strata.ops.control.scanning import ScanOp
from strata.ops.control.tracing import is_wide, make_graph, narrowed, run_graph

# ------------------------------------------------------------------------------------------------------------ functions


@op("custom_fn")
class CustomFn(Op):
    """A graph with a backward or tangent graph of the user's; a mode that is not given differentiates `forward`.

    `backward` takes the primals, `primal_output` and `d_output`, and gives a cotangent for each float primal.
    `tangent` takes the primals, `tangent_0`, `tangent_1`, … for the float ones and perhaps `primal_output`, and gives
    the tangents of the float outputs. With several outputs the special names end in `_0`, `_1`, …
    """

    forward: Graph
    backward: Graph | None = None
    tangent: Graph | None = None

    multi_output = True
    dtypes = (f64,)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        wanted = [x.type for x in self.forward.inputs]
        self.require(
            list(types) == wanted and not self.forward.params, f"forward takes {wanted}, got {list(types)}", code="S344"
        )
        primals, outs = _floats(self.forward.inputs), _floats(self.forward.results)
        if self.backward is not None:
            required = {**self._special("primal_output"), **self._special("d_output")}
            self._check("backward", self.backward, required, {}, primals)
        if self.tangent is not None:
            seeds = {f"tangent_{i}": x.type for i, x in enumerate(self.forward.inputs) if x.dtype.is_inexact}
            self._check("tangent", self.tangent, seeds, self._special("primal_output"), outs)
        return tuple(x.type for x in self.forward.results)

    def _special(self, name: str) -> dict[str, TensorType]:
        """`primal_output` or `d_output` with the types of the outputs that they stand for."""
        results = self.forward.results
        numbered = {name if len(results) == 1 else f"{name}_{i}": x for i, x in enumerate(results)}
        return {n: x.type for n, x in numbered.items() if name == "primal_output" or x.dtype.is_inexact}

    def _check(
        self,
        what: str,
        graph: Graph,
        required: dict[str, TensorType],
        optional: dict[str, TensorType],
        outs: Sequence[Value],
    ) -> None:
        count = len(self.forward.inputs)
        names, types = graph.input_names, [x.type for x in graph.inputs]
        wanted = [x.type for x in self.forward.inputs]
        self.require(types[:count] == wanted, f"{what} must take {wanted} first, it takes {types[:count]}", code="S350")
        given = dict(zip(names[count:], types[count:], strict=True))
        for name, kind in required.items():
            self.require(
                name in given, f"{what} must declare an input {name!r}: {kind}; it declares {list(names)}", code="S351"
            )
        for name, kind in given.items():
            known = (required | optional).get(name)
            self.require(known is not None, f"{what} has an input {name!r} that has no meaning here", code="S351")
            self.require(known == kind, f"{what}: {name!r} is {kind}, it must be {known}", code="S351")
        results = [x.type for x in graph.results]
        self.require(
            results == [x.type for x in outs],
            f"{what} must give {[x.type for x in outs]}, it gives {results}",
            code="S352",
        )

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        types = [x.type for x in self.forward.inputs]
        wide = is_wide(arrays, types)
        return run_graph(self.forward, narrowed(arrays, types, wide=wide), wide=wide)

    def decompose(self, *inputs: Value) -> tuple[Value, ...]:
        return self.forward.call(*inputs)

    def vjp(self, *inputs: Value, out: Any, ct: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        if self.backward is None:
            return tuple(pullback_once(self.forward.call(*inputs), ct, inputs))
        table = dict(zip(self._special("primal_output"), out, strict=True))
        seeds = [zeros_like(x) if c is None else c for x, c in zip(out, ct, strict=True) if x.dtype.is_inexact]
        table |= dict(zip(self._special("d_output"), seeds, strict=True))
        extra = [table[name] for name in self.backward.input_names[len(inputs) :]]
        grads = iter(self.backward.call(*inputs, *extra))
        return tuple(next(grads) if x.dtype.is_inexact else None for x in inputs)

    def jvp(self, *inputs: Value, out: Any, dx: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        if self.tangent is None:
            return tuple(pushforward(self.forward.call(*inputs), inputs, dx))
        table = dict(zip(self._special("primal_output"), out, strict=True))
        for i, (x, t) in enumerate(zip(inputs, dx, strict=True)):
            table[f"tangent_{i}"] = zeros_like(x) if t is None else t
        extra = [table[name] for name in self.tangent.input_names[len(inputs) :]]
        tangents = iter(self.tangent.call(*inputs, *extra))
        return tuple(next(tangents) if x.dtype.is_inexact else None for x in out)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> tuple[Value, ...]:
        bodies = {
            name: None if graph is None else _batched_graph(graph, size)
            for name, graph in (("forward", self.forward), ("backward", self.backward), ("tangent", self.tangent))
        }
        spread = (x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True))
        return tuple(replace(self, **bodies)(*spread))  # type: ignore[arg-type]

    @classmethod
    def samples(cls) -> list[Sample]:
        forward, backward, tangent = _product(), _product_backward(), _product_tangent()
        return [
            Sample(f64[3], f64[3], forward=forward, backward=backward, tangent=tangent),
            Sample(f64[3], f64[3], forward=forward, backward=backward, tangent=None),
            Sample(f64[3], f64[3], forward=forward, backward=None, tangent=tangent),
        ]  # fmt: skip


def _floats(values: Sequence[Value]) -> list[Value]:
    return [x for x in values if x.dtype.is_inexact]


def _batched_graph(graph: Graph, size: Dim) -> Graph:
    """A graph with a leading axis on every input and result."""
    rows = [placeholder(f"b{i}", x.type.with_shape((size, *x.shape))) for i, x in enumerate(graph.inputs)]
    table = batch_values(graph.results, dict(zip(graph.inputs, rows, strict=True)), size)
    results = [table.get(x, broadcast_to(x, (size, *x.shape))) for x in graph.results]
    return make_graph(graph.name, list(zip(graph.input_names, rows, strict=True)), results)


def _product() -> Graph:
    g = Graph("product")
    x, y = g.input("x", f64[3]), g.input("y", f64[3])
    return g.outputs(x * y)


def _product_backward() -> Graph:
    g = Graph("product_vjp")
    x, y = g.input("x", f64[3]), g.input("y", f64[3])
    _, ct = g.input("primal_output", f64[3]), g.input("d_output", f64[3])
    return g.outputs(ct * y, ct * x)


def _product_tangent() -> Graph:
    g = Graph("product_jvp")
    x, y = g.input("x", f64[3]), g.input("y", f64[3])
    dx, dy = g.input("tangent_0", f64[3]), g.input("tangent_1", f64[3])
    return g.outputs(dx * y + x * dy)


def custom_fn(forward: Graph, backward: Graph | None = None, tangent: Graph | None = None) -> Callable[..., Any]:
    """A function of values from graphs: one value, or a tuple where `forward` has several results."""
    call = CustomFn(forward, backward, tangent)

    def apply(*inputs: Value) -> Any:
        outs = call(*inputs)
        return outs[0] if len(outs) == 1 else outs

    return apply


# ----------------------------------------------------------------------------------------------------------- extensions

Rule = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Extension:
    """An op of a user. `attrs` is whatever static value the call gave.

    infer(*types, attrs)                    the output type, or a tuple of them
    execute(*arrays, attrs)                 the output array, or a tuple of them
    vjp(*inputs, out, ct, attrs)            a cotangent or None for each input; out and ct are tuples if infer gives one
    jvp(*inputs, out, dx, attrs)            the tangent of the output
    vmap(*inputs, batched, size, attrs)     the outputs with the batch axis first; without it, rows run one by one
    """

    name: str
    infer: Rule
    execute: Rule
    vjp: Rule | None = None
    jvp: Rule | None = None
    vmap: Rule | None = None
    num_inputs: int | None = None
    differentiable: bool = True

    def to_text(self) -> str:
        return self.name


class Extensions:
    """The extensions that a context knows, by name."""

    def __init__(self) -> None:
        self._known: dict[str, Extension] = {}

    def register(self, extension: Extension) -> Extension:
        if extension.name in self._known:
            warnings.warn(f"the op {extension.name!r} is registered again and replaces the first", stacklevel=3)
        self._known[extension.name] = extension
        return extension

    def __getitem__(self, name: str) -> Extension:
        if name not in self._known:
            raise UnknownNameError(f"no custom op is named {name!r}{near(name, self._known)}", code="N110")
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    @contextmanager
    def active(self) -> Iterator[Extensions]:
        """Custom ops are looked up here inside the block."""
        token = _extensions.set(self)
        try:
            yield self
        finally:
            _extensions.reset(token)


# Outside every `active` block, one table for the process: what is registered at import is known in every thread.
_extensions: ContextVar[Extensions] = ContextVar("strata_extensions", default=Extensions())  # noqa: B039


def extensions() -> Extensions:
    """The extensions of the current context."""
    return _extensions.get()


VALUE_TYPES["Extension"] = lambda name: extensions()[name]
VALUE_TYPES["bytes"] = bytes.fromhex


@op("custom")
class Custom(Op):
    """An op that runs a user's code, found by name in the extensions of the context."""

    extension: Extension
    attrs: Any = None

    multi_output = True
    dtypes = (f64,)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        wanted = self.extension.num_inputs
        self.require(
            wanted is None or len(types) == wanted,
            f"{self.extension.name} takes {counted(wanted or 0, 'input')}, got {len(types)}",
            code="O265", error=OptionError,
        )  # fmt: skip
        outs = as_tuple(self.extension.infer(*types, attrs=self.attrs))
        for t in outs:
            self.require(
                isinstance(t, TensorType),
                f"infer of {self.extension.name} gave {t!r}, not a tensor type", code="O266", error=OptionError,
            )  # fmt: skip
        return outs

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return as_tuple(self.extension.execute(*map(_readable, arrays), attrs=self.attrs))

    def vjp(self, *inputs: Value, out: Any, ct: Any, **_: Any) -> Any:
        if not self.extension.differentiable:
            return (None,) * len(inputs)
        rule = self._rule("vjp")
        grads = as_tuple(rule(*inputs, out=self._single(out), ct=self._single(ct), attrs=self.attrs))
        if len(grads) != len(inputs):
            raise OptionError(
                f"vjp of {self.extension.name} gave {counted(len(grads), 'cotangent')} for {len(inputs)} inputs",
                code="O267",
            )
        return grads

    def jvp(self, *inputs: Value, out: Any, dx: Any, **_: Any) -> Any:
        if not self.extension.differentiable:
            return (None,) * len(out)
        return as_tuple(self._rule("jvp")(*inputs, out=self._single(out), dx=dx, attrs=self.attrs))

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        if self.extension.vmap is not None:
            return as_tuple(self.extension.vmap(*inputs, batched=batched, size=size, attrs=self.attrs))
        order = [i for i, b in enumerate(batched) if not b] + [i for i, b in enumerate(batched) if b]
        graph = Graph("row")
        formals = [
            graph.input(f"x{i}", x.type.drop(0) if b else x.type)
            for i, (x, b) in enumerate(zip(inputs, batched, strict=True))
        ]
        graph.outputs(*self(*formals))
        row = make_graph("row", [(f"x{i}", formals[i]) for i in order], graph.results)
        shared = len(inputs) - sum(batched)
        return ScanOp(row, size, 0, shared)(*(inputs[i] for i in order))

    def _rule(self, name: str) -> Rule:
        rule: Rule | None = getattr(self.extension, name)
        if rule is None:
            raise MissingRuleError(
                f"the custom op {self.extension.name!r} has no {name} rule", code="R211",
                fix=f"register it with {name}=..., or with differentiable=False",
            )  # fmt: skip
        return rule

    def _single(self, values: Any) -> Any:
        return values[0] if len(values) == 1 else values

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f64[3], f64[2, 3], extension=_sample_extension(), attrs=2.0)]


def _readable(array: np.ndarray) -> np.ndarray:
    """The elements in order, for reading only: they are others' too."""
    view = np.ascontiguousarray(array).reshape(array.shape).view()
    view.flags.writeable = False
    return view


def _sample_extension() -> Extension:
    name = "scaled_product"
    if name in extensions():
        return extensions()[name]
    return extensions().register(
        Extension(
            name,
            infer=lambda x, y, attrs: y,
            execute=lambda x, y, attrs: attrs * x * y,
            vjp=lambda x, y, out, ct, attrs: ((ct * y * attrs).sum(axis=0), ct * x * attrs),
            jvp=lambda x, y, out, dx, attrs: sum(
                [] if dx[0] is None else [dx[0] * y * attrs],
                start=x * (dx[1] if dx[1] is not None else zeros_like(y)) * attrs,
            ),
        )
    )


def custom(name: str, *inputs: Value, attrs: Any = None) -> Any:
    """Apply a registered op by name: one value, or a tuple where it has several outputs."""
    outs = Custom(extensions()[name], attrs)(*inputs)
    return outs[0] if len(outs) == 1 else outs


def require_no_traced_captures(captures: Sequence[Value], what: str) -> None:
    """A function with its own derivative cannot see how it depends on what it closes over."""
    for node in toposort(captures):
        if isinstance(node.op, (Input, Param)):
            raise TraceError(
                f"{what}: the function uses {node.op.name} {node.op.key!r} of the function around it, "
                "whose derivative would be lost",
                code="T204", fix="pass it as an argument",
            )  # fmt: skip
