"""Recurrent sequence models: the selective scan of state-space models, and the gated delta rule.

Both are loops over time with a small carried state. They decompose onto `scan`, whose derivatives are sweeps in the
opposite direction, so the state of every step is neither unrolled into the graph nor approximated.
"""

from __future__ import annotations

import math

import numpy as np

from strata.core import Dim, TensorType, f16, f32
from strata.mir import Op, Sample, Value, draw, function, op, placeholder
from strata.ops.base.creation import zeros
from strata.ops.base.frontend import Operand, promoted, same_shape
from strata.ops.base.movement import broadcast_to, insert_axis, moveaxis, reshape
from strata.ops.control.scanning import ScanOp
from strata.ops.control.tracing import make_graph
from strata.ops.elementwise.logic import cast
from strata.ops.elementwise.math import exp
from strata.ops.reduce.reduce import sum_


class Recurrent(Op):
    """What both ops share: checks, and a vmap rule that folds into the batch axis."""

    def check(self, first: TensorType, wanted: dict[str, tuple[TensorType, tuple[Dim, ...]]]) -> None:
        for name, (given, shape) in wanted.items():
            self.require_dtype(
                given.dtype is first.dtype and given.dtype.is_float,
                f"{name} is {given}, not {first.dtype}",
                code="D103",
            )
            self.require(
                same_shape(given.shape, shape), f"{name} is {given}, expected {first.with_shape(shape)}", code="S270"
            )


def fold(x: Value, is_batched: bool, size: Dim) -> Value:
    """The vmap axis folded into the batch axis that follows it."""
    spread = x if is_batched else broadcast_to(x, (size, *x.shape))
    return reshape(spread, (size * spread.shape[1], *spread.shape[2:]))


@op("selective_scan")
class SelectiveScan(Recurrent):
    """s ← exp(Δ·A)·s + Δ·B·x;  y = Σ C·s over the state, from s = 0 for each batch row.

    x, delta: [B, S, h];  a: [h, n];  b, c: [B, S, n]. The state is kept in f32 for half precision.
    """

    state_size: int

    def infer(self, x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType) -> TensorType:
        self.require(x.ndim == 3, f"x must be [B, S, h], got {x}", code="S270")
        batch, length, channels = x.shape
        state = (batch, length, self.state_size)
        self.check(
            x,
            {
                "x": (x, x.shape),
                "delta": (delta, x.shape),
                "a": (a, (channels, self.state_size)),
                "b": (b, state),
                "c": (c, state),
            },
        )
        return x

    def numpy(self, x: np.ndarray, delta: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for row in range(x.shape[0]):
            state = np.zeros((x.shape[2], self.state_size), x.dtype)
            for t in range(x.shape[1]):
                step = delta[row, t][:, None]
                state = np.exp(step * a) * state + step * b[row, t] * x[row, t][:, None]
                out[row, t] = state @ c[row, t]
        return out

    def decompose(self, x: Value, delta: Value, a: Value, b: Value, c: Value) -> Value:
        wide = x.dtype.accumulator
        batch, length, channels = x.shape
        rows = [moveaxis(cast(v, wide), 1, 0) for v in (x, delta, b, c)]
        factors = cast(a, wide)
        state = placeholder("s", TensorType(wide, (batch, channels, self.state_size)))
        rates = placeholder("a", factors.type)
        names = [
            placeholder(n, v.type.with_shape(v.shape[1:])) for n, v in zip(("x", "delta", "b", "c"), rows, strict=True)
        ]
        xt, dt, bt, ct = names
        step = insert_axis(dt, -1)
        moved = exp(step * rates) * state + insert_axis(dt * xt, -1) * insert_axis(bt, 1)
        y = sum_(moved * insert_axis(ct, 1), -1)
        formals = [("s", state), ("a", rates), *zip(("x", "delta", "b", "c"), names, strict=True)]
        body = make_graph("selective_step", formals, [moved, y])
        outs = ScanOp(body, length, num_carry=1, num_consts=1)(zeros(state.shape, wide), factors, *rows)
        return cast(moveaxis(outs[1], 0, 1), x.dtype)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if batched[2]:
            return super().vmap(*inputs, batched=batched, size=size)
        folded = [x if i == 2 else fold(x, b, size) for i, (x, b) in enumerate(zip(inputs, batched, strict=True))]
        out = self(*folded)
        return reshape(out, (size, *(inputs[0].shape[1:] if batched[0] else inputs[0].shape)))

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(batch: int, length: int, channels: int, n: int) -> Sample:
            rows = f32[batch, length, channels]
            states = f32[batch, length, n]
            return Sample(rows, draw(rows, 0.01, 0.5), draw(f32[channels, n], -1.0, -0.1), states, states, state_size=n)

        half = f16[1, 2, 2]
        return [
            case(1, 4, 3, 2), case(2, 3, 2, 3), case(2, 0, 2, 1), case(0, 2, 1, 1), case(1, 1, 1, 1),
            Sample(half, draw(half, 0.1, 0.5), draw(f16[2, 2], -1.0, -0.1), half, half, state_size=2, grad=False),
        ]  # fmt: skip


@op("gated_delta_net")
class GatedDeltaNet(Recurrent):
    """The gated delta rule, per token and head: S ← e^g·S; d = β·(v - Sᵀk); S ← S + k⊗d; o = Sᵀq / √n.

    q, k: [B, S, H, n];  v: [B, S, H, m];  g, beta: [B, S, H];  state: [B, H, n, m] when `carry_state`, else zeros.
    Gives the outputs [B, S, H, m] and the last state.
    """

    state_size: int
    carry_state: bool = False

    multi_output = True

    def infer(
        self, q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, *state: TensorType
    ) -> tuple[TensorType, ...]:
        self.require(q.ndim == 4 and v.ndim == 4, f"q and v must be [B, S, H, n], got {q} and {v}", code="S270")
        self.require(
            len(state) == self.carry_state, f"takes {5 + self.carry_state} inputs, got {5 + len(state)}", code="S271"
        )
        batch, length, heads, _ = q.shape
        n, m = self.state_size, v.shape[3]
        carried = (batch, heads, n, m)
        wanted = {
            "q": (q, (batch, length, heads, n)), "k": (k, (batch, length, heads, n)), "v": (v, (batch, length, heads,
            m)),
            "g": (g, (batch, length, heads)), "beta": (beta, (batch, length, heads)),
        }  # fmt: skip
        if state:
            wanted["state"] = (state[0], carried)
        self.check(q, wanted)
        return v.with_shape((batch, length, heads, m)), q.with_shape(carried)

    def numpy(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, *state: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        batch, length, heads, n = q.shape
        out, last = np.zeros_like(v), np.zeros((batch, heads, n, v.shape[3]), q.dtype)
        for b, h in np.ndindex(batch, heads):
            s = state[0][b, h].copy() if state else last[b, h].copy()
            for t in range(length):
                s *= np.exp(g[b, t, h])
                error = beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h])
                s += np.outer(k[b, t, h], error)
                out[b, t, h] = s.T @ q[b, t, h] / math.sqrt(n)
            last[b, h] = s
        return out, last

    def decompose(self, *inputs: Value) -> tuple[Value, Value]:
        q, v = inputs[0], inputs[2]
        wide = q.dtype.accumulator
        batch, length, heads, n = q.shape
        rows = [moveaxis(cast(x, wide), 1, 0) for x in inputs[:5]]
        first = cast(inputs[5], wide) if self.carry_state else zeros((batch, heads, n, v.shape[3]), wide)
        state = placeholder("s", first.type)
        names = [placeholder(name, x.type.with_shape(x.shape[1:])) for name, x in zip("qkvgb", rows, strict=True)]
        qt, kt, vt, gt, bt = names
        decayed = state * reshape(exp(gt), (batch, heads, 1, 1))
        column = insert_axis(kt, -1)
        error = insert_axis(bt, -1) * (vt - sum_(decayed * column, -2))
        moved = decayed + column * insert_axis(error, -2)
        y = sum_(moved * insert_axis(qt, -1), -2) * (1 / math.sqrt(self.state_size))
        body = make_graph("delta_step", [("s", state), *zip("qkvgb", names, strict=True)], [moved, y])
        last, ys = ScanOp(body, length, num_carry=1, num_consts=0)(first, *rows)
        return cast(moveaxis(ys, 0, 1), q.dtype), cast(last, q.dtype)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> tuple[Value, ...]:
        outs = self(*(fold(x, b, size) for x, b in zip(inputs, batched, strict=True)))
        batch = inputs[0].shape[1 if batched[0] else 0]
        return tuple(reshape(x, (size, batch, *x.shape[1:])) for x in outs)

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(batch: int, length: int, heads: int, n: int, m: int, *, carry: bool) -> Sample:
            keys, gates = f32[batch, length, heads, n], f32[batch, length, heads]
            state = (f32[batch, heads, n, m],) if carry else ()
            return Sample(
                keys, draw(keys, -0.6, 0.6), f32[batch, length, heads, m], draw(gates, -1.0, 0.0), draw(gates, 0.1,
                0.9), *state,
                state_size=n, carry_state=carry,
            )  # fmt: skip

        return [
            case(2, 3, 2, 2, 2, carry=False), case(1, 4, 2, 3, 2, carry=True), case(1, 0, 1, 2, 2, carry=True),
            case(0, 2, 1, 1, 1, carry=False), case(1, 1, 1, 1, 1, carry=True),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def selective_scan(x: Operand, delta: Operand, a: Operand, b: Operand, c: Operand) -> Value:
    """The state-space recurrence s ← exp(Δ·A)·s + Δ·B·x, y = Σ C·s; without skip term and gate."""
    values = promoted(x, delta, a, b, c)
    size = values[2].shape[-1].__index__() if values[2].ndim else 0
    return SelectiveScan(size)(*values)


@function()
def gated_delta_net(
    q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand | None = None
) -> tuple[Value, Value]:
    """The gated delta rule over a sequence: (outputs, last state). q and k are normalised by the caller."""
    values = promoted(q, k, v, g, beta, *(() if state is None else (state,)))
    size = values[0].shape[-1].__index__() if values[0].ndim else 0
    return GatedDeltaNet(size, state is not None)(*values)
