"""Integer arithmetic of quantised models: quantize, dequantize, and matmuls with requantised results.

Rounding is half away from zero and results saturate. Integers have no derivatives; `quantize_dequantize` is the pair
with a straight-through derivative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, TensorType, f16, f32, i8, i32, normalize_axis
from strata.errors import OptionError
from strata.mir import Op, Sample, UnaryOp, Value, constant, function, op
from strata.ops.base.frontend import Operand, as_value, to_inexact
from strata.ops.base.movement import reshape
from strata.ops.conv.conv import Conv
from strata.ops.conv.windows import Pairs, Sizes, padding_pairs, per_axis
from strata.ops.elementwise.logic import cast, where
from strata.ops.elementwise.numeric import clip
from strata.ops.elementwise.rounding import abs_, sign, trunc
from strata.ops.linalg.matmul import MatMul
from strata.ops.reduce.reduce import reduce_sum


def round_half_away(x: Value) -> Value:
    """The nearest integer, halves away from zero; exact where x + 0.5 would round."""
    whole = trunc(x)
    return where(abs_(x - whole) >= 0.5, whole + sign(x), whole)


def rounded(x: np.ndarray) -> np.ndarray:
    """The same on arrays."""
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)


def saturated(x: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(x, nan=0.0), -128, 127).astype(np.int8)


class PerChannel(UnaryOp):
    """Scales and zero points for a whole tensor, or one for each index along an axis."""

    axis: int | None
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]

    def check(self, x: TensorType) -> None:
        count: Dim = 1
        if self.axis is not None:
            self.require(0 <= self.axis < x.ndim, f"axis {self.axis} is not an axis of {x}", code="S103")
            count = x.shape[self.axis]
        for name, values in (("scales", self.scales), ("zero points", self.zero_points)):
            ok = len(values) == 1 or len(values) == count
            self.require(ok, f"{len(values)} {name} for {count} channels of {x}", code="S283")
        self.require(
            all(s > 0 for s in self.scales),
            f"scales must be positive, got {min(self.scales)}",
            code="O239",
            error=OptionError,
        )

    def along(self, values: tuple[Any, ...], ndim: int) -> np.ndarray:
        """The values as an array that broadcasts against x."""
        shape = [1] * ndim
        if self.axis is not None and len(values) > 1:
            shape[self.axis] = len(values)
        return np.array(values, np.float32).reshape(shape)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return type(self)(None if self.axis is None else self.axis + 1, self.scales, self.zero_points)(x)


@op("quantize")
class Quantize(PerChannel):
    """i8 codes: saturate(round(x / scale) + zero point)."""

    differentiable = False

    def infer(self, x: TensorType) -> TensorType:
        self.check(x)
        self.require_dtype(x.dtype.is_float, f"needs a float input, got {x}", code="D104")
        return x.with_dtype(i8)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        steps = x.astype(np.float32) / self.along(self.scales, x.ndim)
        return saturated(rounded(steps) + self.along(self.zero_points, x.ndim))

    def decompose(self, x: Value) -> Value:
        steps = round_half_away(cast(x, f32) / constant(self.along(self.scales, x.ndim)))
        return cast(steps + constant(self.along(self.zero_points, x.ndim)), i8)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], axis=None, scales=(0.05,), zero_points=(3,)),
            Sample(f32[2, 3], axis=1, scales=(0.1, 0.2, 0.01), zero_points=(0, -5, 7)),
            Sample(f32[0, 2], axis=0, scales=(1.0,), zero_points=(0,)),
            Sample(f32[()], axis=None, scales=(0.5,), zero_points=(0,)),
            Sample(f16[3], axis=None, scales=(0.5,), zero_points=(1,)),
            Sample(
                np.array([0.5, -0.5, 1.5, 2.5, 999, -999, np.nan], np.float32),
                axis=None, scales=(1.0,), zero_points=(0,),
            ),
        ]  # fmt: skip


@op("dequantize")
class Dequantize(PerChannel):
    """(code - zero point) · scale in f32."""

    differentiable = False
    dtypes = (i8,)

    def infer(self, x: TensorType) -> TensorType:
        self.check(x)
        self.require_dtype(x.dtype.is_int, f"needs integer codes, got {x}", code="D227")
        return x.with_dtype(f32)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32) - self.along(self.zero_points, x.ndim)) * self.along(self.scales, x.ndim)

    def decompose(self, x: Value) -> Value:
        numbers = cast(x, f32) - constant(self.along(self.zero_points, x.ndim))
        return numbers * constant(self.along(self.scales, x.ndim))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(i8[3, 4], axis=None, scales=(0.05,), zero_points=(3,)),
            Sample(i8[2, 3], axis=1, scales=(0.1, 0.2, 0.01), zero_points=(0, -5, 7)),
            Sample(i8[0], axis=0, scales=(1.0,), zero_points=(0,)),
            Sample(i8[()], axis=None, scales=(2.0,), zero_points=(1,)),
        ]  # fmt: skip


@op("quantize_dequantize")
class QuantizeDequantize(PerChannel):
    """x rounded to the grid of i8 codes; the derivative is that of the identity (straight-through)."""

    def infer(self, x: TensorType) -> TensorType:
        self.check(x)
        self.require_dtype(x.dtype.is_float, f"needs a float input, got {x}", code="D104")
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        scale, zero = self.along(self.scales, x.ndim), self.along(self.zero_points, x.ndim)
        return (np.clip(rounded(x / scale) + zero, -128, 127) - zero) * scale

    def decompose(self, x: Value) -> Value:
        wide = x.dtype.accumulator
        scale, zero = (constant(self.along(v, x.ndim), wide) for v in (self.scales, self.zero_points))
        return cast((clip(round_half_away(cast(x, wide) / scale) + zero, -128.0, 127.0) - zero) * scale, x.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return dx

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return ct

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], axis=None, scales=(0.0371,), zero_points=(3,), grad=False),
            Sample(f32[2, 3], axis=1, scales=(0.1, 0.2, 0.01), zero_points=(0, -5, 7), grad=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- products


class Requantized(Op):
    """An i32 sum brought back to i8: saturate(round(sum · mult) + out_zp), multiplied in f32."""

    x_zp: int = 0
    w_zp: int = 0
    out_zp: int = 0
    mult: tuple[float, ...] = (1.0,)

    differentiable = False
    dtypes = (i8,)

    def check_codes(self, x: TensorType, w: TensorType, bias: TensorType, columns: Dim) -> None:
        for name, t, wanted in (("x", x, i8), ("w", w, i8), ("bias", bias, i32)):
            self.require_dtype(t.dtype is wanted, f"{name} must be {wanted}, got {t}", code="D228")
        ok = bias.ndim == 1 and (bias.shape[0] == columns or not isinstance(columns, int))
        self.require(ok, f"the bias {bias} does not have {columns} numbers", code="S284")
        ok = len(self.mult) == 1 or len(self.mult) == columns
        self.require(ok, f"{len(self.mult)} multipliers for {columns} channels", code="S283")

    def finish(self, total: Value, shape: tuple[int, ...]) -> Value:
        factor = constant(np.array(self.mult, np.float32).reshape(shape if len(self.mult) > 1 else ()))
        return cast(round_half_away(cast(total, f32) * factor) + float(self.out_zp), i8)

    def numpy_finish(self, total: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        factor = np.array(self.mult, np.float32).reshape(shape if len(self.mult) > 1 else ())
        return saturated(rounded(total.astype(np.int32).astype(np.float32) * factor) + self.out_zp)


@op("qmatmul")
class QMatMul(Requantized):
    """i8 matmul: x [.., M, K], w [K, N], bias i32 [N]; sum = bias + Σ (x - x_zp)·(w - w_zp)."""

    def infer(self, x: TensorType, w: TensorType, bias: TensorType) -> TensorType:
        self.require(x.ndim >= 1 and w.ndim == 2, f"x [.., K] and w [K, N] are {x} and {w}", code="S125")
        k, other = x.shape[-1], w.shape[0]
        self.require(
            k == other or not (isinstance(k, int) and isinstance(other, int)),
            f"inner sizes differ, {k} and {other}",
            code="S102",
        )
        self.check_codes(x, w, bias, w.shape[1])
        return x.with_shape((*x.shape[:-1], w.shape[1]))

    def numpy(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        total = (x.astype(np.int64) - self.x_zp) @ (w.astype(np.int64) - self.w_zp) + bias
        return self.numpy_finish(total, (-1,))

    def decompose(self, x: Value, w: Value, bias: Value) -> Value:
        rows = x if x.ndim > 1 else reshape(x, (1, x.shape[0]))
        total = MatMul()(rows, w) + bias  # zero points are taken out of the i8 matmul afterwards
        if self.w_zp:
            total = total - reshape(reduce_sum(cast(rows, i32), (-1,)), (*rows.shape[:-1], 1)) * self.w_zp
        if self.x_zp:
            total = total - reduce_sum(cast(w, i32) - self.w_zp, (0,)) * self.x_zp
        return reshape(self.finish(total, (-1,)), (*x.shape[:-1], w.shape[1]))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(i8[3, 8], i8[8, 5], i32[5], mult=(0.02,)),
            Sample(i8[2, 3, 4], i8[4, 2], i32[2], x_zp=3, w_zp=-2, out_zp=1, mult=(0.1, 0.3)),
            Sample(i8[0, 3], i8[3, 2], i32[2]), Sample(i8[4], i8[4, 1], i32[1], w_zp=5, mult=(7.5,)),
        ]  # fmt: skip


@op("qconv2d")
class QConv2d(Requantized):
    """i8 convolution of [N, C, H, W] by [O, C/groups, kH, kW] with a bias i32 [O]; padding counts as x_zp."""

    stride: Sizes = (1, 1)
    padding: Pairs = ((0, 0), (0, 0))
    dilation: Sizes = (1, 1)
    groups: int = 1

    def conv(self) -> Conv:
        return Conv(self.stride, self.padding, self.dilation, self.groups, (1, 1))

    def infer(self, x: TensorType, w: TensorType, bias: TensorType) -> TensorType:
        self.require(x.ndim == 4 and w.ndim == 4, f"x [N, C, H, W] and w [O, C, kH, kW] are {x} and {w}", code="S285")
        self.check_codes(x, w, bias, w.shape[0])
        return self.conv().infer(x, w).with_dtype(i8)

    def numpy(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        batch, channels = x.shape[:2]
        outputs, per_group, kh, kw = w.shape
        widths: Any = ((0, 0), (0, 0), *self.padding)
        grid = np.pad(x.astype(np.int64) - self.x_zp, widths)
        weights = w.astype(np.int64) - self.w_zp
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, (kh, kw), strict=True)]
        sizes = [(n - e) // s + 1 for n, e, s in zip(grid.shape[2:], spans, self.stride, strict=True)]
        total = np.zeros((batch, outputs, *sizes), np.int64) + bias.reshape(1, -1, 1, 1)
        for o, c, i, j in np.ndindex(outputs, per_group, kh, kw):
            source = o // (outputs // self.groups) * (channels // self.groups) + c
            top, left = i * self.dilation[0], j * self.dilation[1]
            seen = grid[:, source, top:, left:][:, :: self.stride[0], :: self.stride[1]][:, : sizes[0], : sizes[1]]
            total[:, o] += seen * weights[o, c, i, j]
        return self.numpy_finish(total, (1, -1, 1, 1))

    def decompose(self, x: Value, w: Value, bias: Value) -> Value:
        plain = self.x_zp == 0 and self.w_zp == 0
        operands = (x, w) if plain else (cast(x, i32) - self.x_zp, cast(w, i32) - self.w_zp)
        total = self.conv()(*operands) + reshape(bias, (1, bias.shape[0], 1, 1))
        return self.finish(total, (1, -1, 1, 1))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(i8[1, 2, 5, 5], i8[3, 2, 3, 3], i32[3], padding=((1, 1), (1, 1)), mult=(0.05,)),
            Sample(i8[2, 4, 4, 3], i8[2, 2, 2, 2], i32[2], stride=(2, 1), padding=((0, 1), (1, 0)), groups=2, x_zp=4,
                   w_zp=1, out_zp=-3, mult=(0.1, 0.02)),
            Sample(i8[1, 1, 5, 5], i8[1, 1, 2, 2], i32[1], dilation=(2, 3), x_zp=-1, mult=(0.5,)),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


def _channels(
    x: Value, scale: Any, zero_point: Any, axis: int | None, what: str
) -> tuple[int | None, tuple[float, ...], tuple[int, ...]]:
    scales = tuple(float(s) for s in np.asarray(scale, np.float64).reshape(-1))
    zeros = tuple(int(z) for z in np.asarray(zero_point).reshape(-1))
    return None if axis is None else normalize_axis(axis, x.ndim, what), scales, zeros


@function()
def quantize(x: Operand, scale: Any, zero_point: Any = 0, axis: int | None = None) -> Value:
    """i8 codes of x: round(x / scale) + zero_point, saturated. Scales are numbers, one for each index along `axis`."""
    value = to_inexact(as_value(x))
    return Quantize(*_channels(value, scale, zero_point, axis, "quantize"))(value)


@function()
def dequantize(x: Operand, scale: Any, zero_point: Any = 0, axis: int | None = None) -> Value:
    """(x - zero_point) · scale in f32."""
    value = as_value(x)
    return Dequantize(*_channels(value, scale, zero_point, axis, "dequantize"))(value)


@function()
def quantize_dequantize(x: Operand, scale: Any, zero_point: Any = 0, axis: int | None = None) -> Value:
    """x on the grid of i8 codes, with the derivative of the identity."""
    value = to_inexact(as_value(x))
    return QuantizeDequantize(*_channels(value, scale, zero_point, axis, "quantize_dequantize"))(value)


def _mult(mult: Any) -> tuple[float, ...]:
    return tuple(float(np.float32(m)) for m in np.asarray(mult, np.float64).reshape(-1))


def _bias(bias: Operand | None, columns: Dim) -> Value:
    return constant(np.zeros(columns.__index__(), np.int32)) if bias is None else cast(as_value(bias), i32)


@function()
def qmatmul(
    x: Operand,
    w: Operand,
    bias: Operand | None = None,
    *,
    x_zp: int = 0,
    w_zp: int = 0,
    out_zp: int = 0,
    mult: Any = 1.0,
) -> Value:
    """The i8 matmul of i8 operands; `mult` is scale_x · scale_w / scale_out, one number or one a column."""
    a, b = as_value(x), as_value(w)
    return QMatMul(x_zp, w_zp, out_zp, _mult(mult))(a, b, _bias(bias, b.shape[-1] if b.ndim else 0))


@function()
def qconv2d(
    x: Operand, w: Operand, bias: Operand | None = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
    x_zp: int = 0, w_zp: int = 0, out_zp: int = 0, mult: Any = 1.0,
) -> Value:  # fmt: skip
    """The i8 convolution of i8 operands [N, C, H, W] and [O, C/groups, kH, kW]."""
    a, b = as_value(x), as_value(w)
    strides, dilations = per_axis(stride, 2, "qconv2d: stride"), per_axis(dilation, 2, "qconv2d: dilation")
    sides = padding_pairs(padding, 2, "qconv2d: padding")
    chosen = QConv2d(x_zp, w_zp, out_zp, _mult(mult), strides, sides, dilations, groups)
    return chosen(a, b, _bias(bias, b.shape[0] if b.ndim else 0))
