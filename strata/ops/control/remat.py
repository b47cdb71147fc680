"""checkpoint: a closed graph that the backward pass recomputes instead of keeping its intermediate values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, f64, flatten, located, unflatten
from strata.errors import OptionError
from strata.kernel import Expr, KernelBuilder, View
from strata.mir import Graph, Op, Sample, UnaryOp, Value, op, pullback_once
from strata.ops.base.frontend import as_value
from strata.ops.base.movement import broadcast_to
from strata.ops.control.tracing import is_wide, make_graph, narrowed, numbered, run_graph, trace_body


@op("barrier")
class Barrier(Op):
    """Its inputs, none of which is ready before all are; what is computed from them is not shared with what is not."""

    multi_output = True
    dtypes = "any"

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        return types

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return arrays

    def jvp(self, *inputs: Value, out: Any, dx: Any, **_: Any) -> Any:
        return dx

    def vjp(self, *inputs: Value, out: Any, ct: Any, **_: Any) -> Any:
        return ct

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        return self(*(x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True)))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f64[3], f64[2, 2]), Sample(f64[()])]


@op("fence")
class Fence(UnaryOp):
    """x; what is computed from it is computed again, not shared with what is computed from x itself."""

    dtypes = "any"

    def infer(self, x: TensorType) -> TensorType:
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x

    def jvp(self, x: Value, *, out: Any, dx: Any, **_: Any) -> Any:
        return dx

    def vjp(self, x: Value, *, out: Any, ct: Any, **_: Any) -> Any:
        return ct

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][index]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f64[3, 2]), Sample(f64[()])]


@op("checkpoint")
class CheckpointOp(Op):
    """A graph as one op. Its backward pass starts from the inputs, behind a barrier, and keeps nothing else."""

    body: Graph

    multi_output = True
    dtypes = (f64,)

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        wanted = [x.type for x in self.body.inputs]
        self.require(list(types) == wanted and not self.body.params, f"takes {wanted}, got {list(types)}", code="S344")
        return tuple(x.type for x in self.body.results)

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        types = [x.type for x in self.body.inputs]
        wide = is_wide(arrays, types)
        return run_graph(self.body, narrowed(arrays, types, wide=wide), wide=wide)

    def decompose(self, *inputs: Value) -> tuple[Value, ...]:
        return self.body.call(*inputs)

    def vjp(self, *inputs: Value, out: Any, ct: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        given = [c for c in ct if c is not None]
        behind = Barrier()(*inputs, *given)
        fresh = behind[: len(inputs)]
        rest = iter(behind[len(inputs) :])
        cotangents = [None if c is None else next(rest) for c in ct]
        return tuple(pullback_once(self.body.call(*fresh), cotangents, fresh))

    @classmethod
    def samples(cls) -> list[Sample]:
        g = Graph("body")
        x, y = g.input("x", f64[3]), g.input("y", f64[3])
        return [Sample(f64[3], f64[3], body=g.outputs((x * y).tanh() * x, y.exp()))]


@located
def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with a backward pass that computes its intermediate values again."""
    if not callable(fn):
        raise OptionError(f"checkpoint: takes a function, got {type(fn).__name__}", code="O258")

    def checkpointed(*args: Any) -> Any:
        leaves, structure = flatten(list(args))
        values = [as_value(x) for x in leaves]
        traced = trace_body(fn, unflatten(structure, values), "checkpoint", hoist=False)
        if not traced.results:
            return traced.restore(())
        graph = make_graph("body", [*numbered("a", traced.inputs), *numbered("k", traced.captures)], traced.results)
        return traced.restore(CheckpointOp(graph)(*values, *traced.captures))

    return checkpointed
