"""Quantisation-aware training: fake quantisation with straight-through derivatives, and learned step sizes.

Numbers are rounded to the symmetric grid -qmax..qmax times a scale, with qmax = 2 ** (bits - 1) - 1. The scale belongs
to the whole tensor, [1], or to each index along an axis, [C].
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from strata.core import Dim, DType, TensorType, f16, f32, f64, normalize_axis
from strata.errors import OptionError
from strata.kinds import counted
from strata.mir import Op, Sample, Value, constant, draw, function, op
from strata.ops.base.creation import zeros_like
from strata.ops.base.elementwise import maximum
from strata.ops.base.frontend import Operand, as_value, promoted, same_shape, to_inexact
from strata.ops.base.movement import broadcast_to, reshape
from strata.ops.elementwise.logic import cast, where
from strata.ops.elementwise.math import sqrt, tanh
from strata.ops.elementwise.numeric import clip
from strata.ops.elementwise.rounding import abs_, sign
from strata.ops.quant.quantize import round_half_away, rounded
from strata.ops.reduce.reduce import count_of, max_, reduce_sum

SMALLEST = 1e-12
STE = ("identity", "clipped", "tanh", "hardtanh")
MODES = ("per_batch", "ema", "fixed")


class Faking(Op):
    """What these ops share: the grid, and scales along one axis."""

    bits: int
    axis: int | None

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def channels(self, x: TensorType) -> Dim:
        ok = 2 <= self.bits <= 8
        self.require(ok, f"{self.bits} bits are not 2 to 8", code="O239", error=OptionError)
        self.require_dtype(x.dtype.is_float, f"needs a float input, got {x}", code="D104")
        if self.axis is None:
            return 1
        self.require(0 <= self.axis < x.ndim, f"axis {self.axis} is not an axis of {x}", code="S103")
        return x.shape[self.axis]

    def check_scale(self, x: TensorType, scale: TensorType) -> None:
        wanted = x.with_shape((self.channels(x),))
        ok = scale.dtype is x.dtype and same_shape(scale.shape, wanted.shape)
        self.require(ok, f"scales of {x} are {wanted}, got {scale}", code="S286")

    def others(self, ndim: int) -> tuple[int, ...]:
        """The axes that share a scale."""
        return tuple(a for a in range(ndim) if a != self.axis)

    def along(self, scale: Value, ndim: int) -> Value:
        """Scales as a value that broadcasts against x."""
        return reshape(scale, tuple(scale.shape[0] if a == self.axis else 1 for a in range(ndim)))

    def numpy_along(self, scale: np.ndarray, ndim: int) -> np.ndarray:
        return scale.reshape([-1 if a == self.axis else 1 for a in range(ndim)])

    def snap(self, x: Value, scale: Value) -> Value:
        """x on the grid of scales that broadcast against it."""
        top = float(self.qmax)
        return clip(round_half_away(x / scale), -top, top) * scale

    def numpy_snap(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return np.clip(rounded(x / scale), -self.qmax, self.qmax) * scale


@op("fake_quantize")
class FakeQuantize(Faking):
    """x on the grid, and the scale that was used: (y, scale). The derivative in x follows `ste`; the scale has none.

    per_batch: scale = max|x| / qmax. ema: decay·state + (1 - decay)·that, or that alone while state ≤ 0. fixed: the
    state. ste: identity; clipped, 0 beyond the grid; tanh, 1 - tanh²(x / scale); hardtanh, falling linearly to 0 at the
    end of the grid.
    """

    ste: str = "identity"
    scale_mode: str = "per_batch"
    decay: float = 0.99

    multi_output = True

    def infer(self, x: TensorType, *state: TensorType) -> tuple[TensorType, ...]:
        channels = self.channels(x)
        self.require(
            self.ste in STE, f"ste {self.ste!r} is not one of {', '.join(STE)}", code="O239", error=OptionError
        )
        self.require(
            self.scale_mode in MODES,
            f"scale_mode {self.scale_mode!r} is not one of {', '.join(MODES)}",
            code="O239",
            error=OptionError,
        )
        self.require(0 <= self.decay <= 1, f"decay is {self.decay!r}, not from 0 to 1", code="O239", error=OptionError)
        self.require(
            len(state) == (self.scale_mode != "per_batch"),
            f"{self.scale_mode} takes {counted(int(self.scale_mode != 'per_batch'), 'state')}",
            code="S287",
        )
        for s in state:
            self.check_scale(x, s)
        if self.scale_mode != "fixed":
            empty = next((d for a, d in enumerate(x.shape) if d == 0 and a != self.axis), None)
            self.require(empty is None, f"{x} has no largest element", code="S124")
        return x, x.with_shape((channels,))

    def numpy(self, x: np.ndarray, *state: np.ndarray) -> tuple[np.ndarray, ...]:
        if self.scale_mode == "fixed":
            scale = np.maximum(state[0], SMALLEST)
        else:
            scale = np.maximum(np.abs(x).max(self.others(x.ndim)).reshape(-1) / self.qmax, SMALLEST)
        if self.scale_mode == "ema":
            scale = np.where(state[0] <= 0, scale, self.decay * state[0] + (1 - self.decay) * scale)
        return self.numpy_snap(x, self.numpy_along(scale, x.ndim)), scale

    def decompose(self, x: Value, *state: Value) -> tuple[Value, Value]:
        wide = x.dtype.accumulator
        value = cast(x, wide)
        if self.scale_mode == "fixed":
            scale = maximum(cast(state[0], wide), constant(SMALLEST, wide))
        else:
            peak = reshape(max_(abs_(value), self.others(x.ndim)), (self.channels(x.type),))
            scale = maximum(peak / float(self.qmax), constant(SMALLEST, wide))
        if self.scale_mode == "ema":
            old = cast(state[0], wide)
            scale = where(old <= 0.0, scale, old * self.decay + scale * (1 - self.decay))
        y = self.snap(value, self.along(scale, x.ndim))
        return cast(y, x.dtype), cast(scale, x.dtype)

    def jvp(
        self, x: Value, *state: Value, out: tuple[Value, ...], dx: tuple[Value | None, ...]
    ) -> tuple[Value | None, ...]:
        slope = FakeQuantizeBackward(self.bits, self.axis, self.ste, x.dtype)
        return (None if dx[0] is None else slope(x, out[1], dx[0])), None

    def vjp(
        self, x: Value, *state: Value, out: tuple[Value, ...], ct: tuple[Value | None, ...]
    ) -> tuple[Value | None, ...]:
        slope = FakeQuantizeBackward(self.bits, self.axis, self.ste, x.dtype)
        to_x = None if ct[0] is None else slope(x, out[1], ct[0])
        return (to_x, *(None for _ in state))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], bits=8, axis=None, grad=False),
            Sample(f32[3, 4], bits=4, axis=1, ste="clipped", grad=False),
            Sample(f32[3, 2], np.array([0.1, 0.0], np.float32), bits=8, axis=1, ste="tanh", scale_mode="ema", decay=0.9,
                   grad=False),
            Sample(f32[2, 2, 2], np.array([0.2, 0.4], np.float32), bits=3, axis=0, ste="hardtanh", scale_mode="fixed",
                   grad=False),
            Sample(np.zeros((2, 2), np.float32), bits=2, axis=None, grad=False),
            Sample(f32[()], bits=8, axis=None, grad=False),
            Sample(f16[2, 3], bits=4, axis=None, grad=False),
        ]  # fmt: skip


@op("fake_quantize_backward")
class FakeQuantizeBackward(Faking):
    """The straight-through cotangent of x, from the scale that the forward pass used, rounded to `scale_dtype`."""

    ste: str = "identity"
    scale_dtype: DType = f32

    def infer(self, x: TensorType, scale: TensorType, dy: TensorType) -> TensorType:
        self.check_scale(x, scale)
        self.require(
            self.ste in STE, f"ste {self.ste!r} is not one of {', '.join(STE)}", code="O239", error=OptionError
        )
        self.require(dy.dtype is x.dtype and same_shape(dy.shape, x.shape), f"dy is {dy}, x is {x}", code="S287")
        return x

    def numpy(self, x: np.ndarray, scale: np.ndarray, dy: np.ndarray) -> np.ndarray:
        if self.ste == "identity":
            return dy
        scales = self.numpy_along(np.maximum(scale, SMALLEST), x.ndim)
        if self.ste == "clipped":
            factor, more = self.end_of_grid()
            return np.where(np.abs(x) <= scales * factor + more, dy, 0)
        if self.ste == "tanh":
            return dy * (1 - np.tanh(x / scales) ** 2)
        return dy * np.maximum(0, 1 - np.abs(x / scales) / self.qmax)

    def decompose(self, x: Value, scale: Value, dy: Value) -> Value:
        if self.ste == "identity":
            return dy
        wide = x.dtype.accumulator
        value = cast(x, wide)
        scales = self.along(maximum(cast(scale, wide), constant(SMALLEST, wide)), x.ndim)
        if self.ste == "clipped":
            factor, more = self.end_of_grid()
            return where(abs_(value) <= scales * factor + more, dy, zeros_like(dy))
        steps = value / scales
        if self.ste == "tanh":
            turned = tanh(steps)
            slope = 1.0 - turned * turned
        else:
            slope = maximum(1.0 - abs_(steps) / float(self.qmax), 0.0)
        return cast(cast(dy, wide) * slope, x.dtype)

    def end_of_grid(self) -> tuple[float, float]:
        """The largest number that is not clipped, as a factor of the scale and what is added.

        It is qmax scales, and what rounding may have taken from a scale that is the largest number over qmax.
        """
        kind = ml_dtypes.finfo(self.scale_dtype.np)  # type: ignore[no-untyped-call]
        smallest = float(kind.smallest_subnormal)
        return self.qmax * (1 + 2 * float(kind.eps)), self.qmax * smallest if smallest > SMALLEST else 0.0

    @classmethod
    def samples(cls) -> list[Sample]:
        scale = draw(f32[4], 0.1, 0.5)
        return [
            *(Sample(f32[3, 4], scale, f32[3, 4], bits=3, axis=1, ste=s) for s in STE),
            Sample(f64[2], draw(f64[1], 0.2, 0.4), f64[2], bits=2, axis=None, ste="hardtanh"),
        ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- learned step size


class LearnedStep(Faking):
    """Fake quantisation with a scale that is trained. `gradient_factor` scales its cotangent by 1 / √(n·qmax)."""

    gradient_factor: bool = False

    def factor(self, x: Value) -> Value:
        count = count_of(x, self.others(x.ndim), x.dtype.accumulator)
        return 1.0 / sqrt(count * float(self.qmax))

    def steps(self, x: Value, scale: Value) -> Value:
        """How many scales x is; which is the nearest grid point is seen in f32, of half precision too."""
        wide = x.dtype.accumulator
        return cast(x, wide) / self.along(maximum(cast(scale, wide), constant(SMALLEST, wide)), x.ndim)


@op("fake_quantize_lsq")
class FakeQuantizeLSQ(LearnedStep):
    """x on the grid of learned scales; both have straight-through derivatives."""

    def infer(self, x: TensorType, scale: TensorType) -> TensorType:
        self.check_scale(x, scale)
        return x

    def numpy(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return self.numpy_snap(x, self.numpy_along(np.maximum(scale, SMALLEST), x.ndim))

    def decompose(self, x: Value, scale: Value) -> Value:
        wide = x.dtype.accumulator
        steps = maximum(cast(scale, wide), constant(SMALLEST, wide))
        return cast(self.snap(cast(x, wide), self.along(steps, x.ndim)), x.dtype)

    def jvp(self, x: Value, scale: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        first = None if dx[0] is None else LSQBackwardX(self.bits, self.axis, self.gradient_factor)(x, scale, dx[0])
        if dx[1] is None:
            return first
        steps = self.steps(x, scale)
        slope = broadcast_to(self.along(cast(dx[1], steps.dtype), x.ndim), x.shape) * scale_slope(steps, self.qmax)
        second = cast(slope * self.factor(x) if self.gradient_factor else slope, x.dtype)
        return second if first is None else first + second

    def vjp(self, x: Value, scale: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        fields = (self.bits, self.axis, self.gradient_factor)
        return LSQBackwardX(*fields)(x, scale, ct), LSQBackwardScale(*fields)(x, scale, ct)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], draw(f32[4], 0.1, 0.5), bits=3, axis=1, grad=False),
            Sample(f32[2, 3], np.array([0.3], np.float32), bits=8, axis=None, grad=False),
            Sample(f32[0, 2], np.array([0.3, -1.0], np.float32), bits=4, axis=1, gradient_factor=True, grad=False),
        ]  # fmt: skip


def scale_slope(steps: Value, qmax: int) -> Value:
    """ψ(z) = round(z) - z inside the grid, ± qmax outside."""
    inside = abs_(steps) <= float(qmax)
    return where(inside, round_half_away(steps) - steps, sign(steps) * float(qmax))


class LSQBackward(LearnedStep):
    """A cotangent of fake_quantize_lsq from (x, scale, dy)."""

    def check_all(self, x: TensorType, scale: TensorType, dy: TensorType) -> None:
        self.check_scale(x, scale)
        self.require(dy.dtype is x.dtype and same_shape(dy.shape, x.shape), f"dy is {dy}, x is {x}", code="S287")

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], draw(f32[4], 0.1, 0.5), f32[3, 4], bits=3, axis=1),
            Sample(f64[2, 3], draw(f64[1], 0.2, 0.4), f64[2, 3], bits=4, axis=None, gradient_factor=True),
        ]  # fmt: skip


@op("fake_quantize_lsq_backward_x")
class LSQBackwardX(LSQBackward):
    """dy inside the grid, 0 outside."""

    def infer(self, x: TensorType, scale: TensorType, dy: TensorType) -> TensorType:
        self.check_all(x, scale, dy)
        return x

    def numpy(self, x: np.ndarray, scale: np.ndarray, dy: np.ndarray) -> np.ndarray:
        steps = x / self.numpy_along(np.maximum(scale, SMALLEST), x.ndim)
        return np.where(np.abs(steps) <= self.qmax, dy, 0)

    def decompose(self, x: Value, scale: Value, dy: Value) -> Value:
        return where(abs_(self.steps(x, scale)) <= float(self.qmax), dy, zeros_like(dy))


@op("fake_quantize_lsq_backward_scale")
class LSQBackwardScale(LSQBackward):
    """Σ ψ(x / scale)·dy over the elements that share a scale."""

    def infer(self, x: TensorType, scale: TensorType, dy: TensorType) -> TensorType:
        self.check_all(x, scale, dy)
        return scale

    def numpy(self, x: np.ndarray, scale: np.ndarray, dy: np.ndarray) -> np.ndarray:
        z = x / self.numpy_along(np.maximum(scale, SMALLEST), x.ndim)
        psi = np.where(np.abs(z) <= self.qmax, rounded(z) - z, np.sign(z) * self.qmax)
        axes = self.others(x.ndim)
        total = (psi * dy).sum(axes).reshape(scale.shape)
        count = np.prod([x.shape[a] for a in axes])
        return total / np.sqrt(count * self.qmax) if self.gradient_factor else total

    def decompose(self, x: Value, scale: Value, dy: Value) -> Value:
        steps = self.steps(x, scale)
        terms = scale_slope(steps, self.qmax) * cast(dy, steps.dtype)
        total = reshape(reduce_sum(terms, self.others(x.ndim)), scale.shape)
        return cast(total * self.factor(x) if self.gradient_factor else total, scale.dtype)


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def fake_quantize(
    x: Operand, state: Operand | None = None, *, bits: int = 8, axis: int | None = None, ste: str = "identity",
    scale_mode: str = "per_batch", decay: float = 0.99,
) -> tuple[Value, Value]:  # fmt: skip
    """x rounded to a symmetric grid, and the scale used, which is the next state in ema mode."""
    value = to_inexact(as_value(x))
    at = None if axis is None else normalize_axis(axis, value.ndim, "fake_quantize")
    chosen = FakeQuantize(bits, at, ste, scale_mode, float(decay))
    return chosen(value, *(() if state is None else (cast(as_value(state), value.dtype),)))


@function()
def fake_quantize_backward(
    x: Operand, scale: Operand, dy: Operand, *, bits: int = 8, axis: int | None = None, ste: str = "identity"
) -> Value:
    """The straight-through cotangent of x in `fake_quantize`."""
    a, s, g = promoted(x, scale, dy)
    at = None if axis is None else normalize_axis(axis, a.ndim, "fake_quantize_backward")
    return FakeQuantizeBackward(bits, at, ste, a.dtype)(a, s, g)


@function()
def fake_quantize_lsq(
    x: Operand, scale: Operand, *, bits: int = 8, axis: int | None = None, gradient_factor: bool = False
) -> Value:
    """x rounded to the grid of a learned scale [1] or [C]."""
    a, s = (to_inexact(v) for v in promoted(x, scale))
    at = None if axis is None else normalize_axis(axis, a.ndim, "fake_quantize_lsq")
    return FakeQuantizeLSQ(bits, at, gradient_factor)(a, s)
