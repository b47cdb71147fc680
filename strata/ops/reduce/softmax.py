"""softmax, log_softmax, logsumexp: reductions through exp that must not overflow."""

from __future__ import annotations

import numpy as np

from strata.core import TensorType, f16, f32, f64, normalize_axes, normalize_axis
from strata.mir import Sample, Value, constant, draw, function, op
from strata.ops.base.along_axis import AlongAxis
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import insert_axis
from strata.ops.elementwise.logic import cast, isfinite, stop_gradient, where
from strata.ops.elementwise.math import exp, log
from strata.ops.reduce.reduce import max_, sum_


def widened(x: Value) -> Value:
    """Half precision as f32: what sums and exponentials are computed in."""
    return cast(x, x.dtype.accumulator)


class FloatRows(AlongAxis):
    """A function of rows of floats."""

    allowed = "float"
    dtypes = "float"

    def total(self, x: Value) -> Value:
        return sum_(x, self.axis, keepdims=True)

    def shifted(self, x: Value) -> Value:
        """x minus the maximum of its row, which cancels in the result and therefore has no derivative."""
        wide = widened(x)
        return wide - stop_gradient(max_(wide, self.axis, keepdims=True))

    @classmethod
    def samples(cls) -> list[Sample]:
        rows = np.array([[-np.inf, 0, 1], [-np.inf, -np.inf, 2], [1e4, 1e4, -1e4], [-np.inf] * 3], np.float32)
        return [
            Sample(f32[3, 4], axis=1),
            Sample(f64[3, 4], axis=0),
            Sample(draw(f32[2, 3, 4], -9.0, 9.0), axis=1),
            Sample(f32[5], axis=0),
            Sample(f32[3, 1], axis=1),
            Sample(f32[0, 3], axis=1),
            Sample(f16[2, 3], axis=1, grad=False),
            Sample(f32[3, 0], axis=1, grad=False),
            Sample(rows, axis=1, grad=False),
        ]


@op("softmax")
class Softmax(FloatRows):
    """e ** x along an axis, divided by its sum; a row of -inf gives NaN."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        if not x.shape[self.axis]:
            return x
        powers = np.exp(x - x.max(self.axis, keepdims=True))
        return powers / powers.sum(self.axis, keepdims=True)

    def decompose(self, x: Value) -> Value:
        if x.shape[self.axis] == 0:
            return x
        powers = exp(self.shifted(x))
        # the sum is at least 1, so that its reciprocal is safe: one division a row, not one an element
        return cast(powers * (1 / self.total(powers)), x.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self.vjp(x, out=out, ct=dx)  # the Jacobian is symmetric

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        y, g = widened(out), widened(ct)
        return cast(y * (g - self.total(y * g)), x.dtype)


@op("log_softmax")
class LogSoftmax(FloatRows):
    """x minus the logarithm of the sum of e ** x along an axis: log(softmax(x)) without underflow."""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        if not x.shape[self.axis]:
            return x
        shifted = x - x.max(self.axis, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(self.axis, keepdims=True))

    def decompose(self, x: Value) -> Value:
        if x.shape[self.axis] == 0:
            return x
        shifted = self.shifted(x)
        return cast(shifted - log(self.total(exp(shifted))), x.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        t = widened(dx)
        return cast(t - self.total(exp(widened(out)) * t), x.dtype)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        g = widened(ct)
        return cast(g - exp(widened(out)) * self.total(g), x.dtype)


@op("logsumexp")
class LogSumExp(FloatRows):
    """log(sum(e ** x)) along an axis, finite wherever the true answer is; a row of -inf, or of nothing, gives -inf."""

    def infer(self, x: TensorType) -> TensorType:
        return super().infer(x).drop(self.axis)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        high = x.max(self.axis, keepdims=True, initial=-np.inf)
        high = np.where(np.isfinite(high), high, 0)
        return np.log(np.exp(x - high).sum(self.axis)) + high.squeeze(self.axis)

    def decompose(self, x: Value) -> Value:
        wide = widened(x)
        if x.shape[self.axis] == 0:
            return cast(log(sum_(wide, self.axis)), x.dtype)
        high = stop_gradient(max_(wide, self.axis))
        high = where(isfinite(high), high, 0.0)
        return cast(log(sum_(exp(wide - insert_axis(high, self.axis)), self.axis)) + high, x.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return cast(sum_(self._weights(x, out) * widened(dx), self.axis), x.dtype)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return cast(insert_axis(widened(ct), self.axis) * self._weights(x, out), x.dtype)

    def _weights(self, x: Value, out: Value) -> Value:
        """softmax(x), and 0 in a row of -inf."""
        wide = widened(out)
        nothing = constant(-np.inf, wide.dtype)
        return exp(widened(x) - insert_axis(where(wide > nothing, wide, 0.0), self.axis))


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def softmax(x: Operand, axis: int = -1) -> Value:
    """e ** x divided by its sum along an axis."""
    value = to_inexact(as_value(x))
    return Softmax(normalize_axis(axis, value.ndim, "softmax"))(value)


@function()
def log_softmax(x: Operand, axis: int = -1) -> Value:
    """The logarithm of softmax."""
    value = to_inexact(as_value(x))
    return LogSoftmax(normalize_axis(axis, value.ndim, "log_softmax"))(value)


@function()
def softmin(x: Operand, axis: int = -1) -> Value:
    """softmax of -x."""
    return softmax(-as_value(x), axis)


@function()
def logsumexp(x: Operand, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Value:
    """log(sum(e ** x)) over axes; all of them by default."""
    value = to_inexact(as_value(x))
    result = value
    axes = normalize_axes(axis, value.ndim, "logsumexp")
    for a in reversed(axes):  # the sum of sums: exact, and one axis at a time
        result = LogSumExp(a)(result)
    if keepdims:
        for a in axes:
            result = insert_axis(result, a)
    return result
