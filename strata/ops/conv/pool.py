"""Pooling over windows of the trailing axes: sum, product, max, min, and what is built from them.

The first extreme of a window in row-major order takes the whole derivative; windows may overlap. Padding takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import Dim, DType, TensorType, as_dtype, f16, f32, f64, i8, i32, i64
from strata.mir import METHODS, Sample, Value, draw, op
from strata.ops.base.movement import broadcast_to
from strata.ops.conv.windows import Geometry, Windowed, Windows, covering_window, empty_window, window_count

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class LinearPool(Windowed):
    """A pool that is a reduction of the windows with padding filled by its identity."""

    fill: ClassVar[float]

    dtypes = "numeric"

    def infer(self, x: TensorType) -> TensorType:
        self.require_dtype(not x.dtype.is_bool, f"does not take {x}", code="D104")
        return x.with_shape([*x.shape[: x.ndim - self.rank], *self.counts(x)])

    def windows(self, x: Value) -> tuple[Value, tuple[int, ...]]:
        """The windows of x and the axes of their elements."""
        seen = Windows(self.kernel, self.stride, self.padding, self.dilation, self.fill)(x)
        return seen, tuple(range(x.ndim, seen.ndim))

    @classmethod
    def samples(cls) -> list[Sample]:
        line: dict[str, Any] = {"kernel": (3,), "stride": (2,), "padding": ((1, 1),), "dilation": (1,)}
        plane: dict[str, Any] = {"kernel": (2, 3), "stride": (1, 2), "padding": ((0, 1), (1, 1)), "dilation": (2, 1)}
        return [
            Sample(f32[2, 3, 7], **line), Sample(f32[2, 1, 5, 6], **plane), Sample(f32[0, 5], **line),
            Sample(np.array([[0, 2, 3, 0, 0]], np.float32), **line), Sample(i32[1, 2, 4, 5], **plane, grad=False),
            Sample(f64[2, 1, 1], kernel=(1,), stride=(1,), padding=((0, 0),), dilation=(1,)),
            Sample(f32[1, 2, 3, 4, 3], kernel=(2, 2, 2), stride=(1, 2, 1), padding=((0, 0),) * 3, dilation=(1, 1, 1)),
        ]  # fmt: skip


@op("pool_sum")
class PoolSum(LinearPool):
    """The sum of each window."""

    fill = 0.0

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return self.view(x, 0).sum(tuple(range(x.ndim, x.ndim + self.rank)), dtype=x.dtype)

    def decompose(self, x: Value) -> Value:
        return METHODS["reduce_sum"](*self.windows(x))


@op("pool_prod")
class PoolProd(LinearPool):
    """The product of each window."""

    fill = 1.0

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return self.view(x, 1).prod(tuple(range(x.ndim, x.ndim + self.rank)), dtype=x.dtype)

    def decompose(self, x: Value) -> Value:
        seen, axes = self.windows(x)
        return METHODS["prod"](seen, axes, dtype=x.dtype)


# ------------------------------------------------------------------------------------------------- maximum and minimum


class Extreme(Geometry):
    """What the maximum and minimum pools, their indices and their gradients share: the first extreme of a window."""

    dtypes = "real"

    def extreme_kind(self) -> str:
        """max or min."""
        raise NotImplementedError

    def pooled(self, x: TensorType) -> TensorType:
        """The type of the result; every window must hold an element."""
        self.require_dtype(not x.dtype.is_complex and not x.dtype.is_bool, f"does not take {x}", code="D104")
        counts = self.counts(x)
        for axis, (size, count) in enumerate(zip(self.sizes(x), counts, strict=True)):
            if isinstance(size, int) and isinstance(count, int):
                window = self.kernel[axis], self.stride[axis], self.padding[axis][0], self.dilation[axis]
                empty = empty_window(size, count, *map(index, window))
                self.require(
                    empty is None,
                    f"window [{empty}] on axis {x.ndim - self.rank + axis} of {x} lies in the padding "
                    f"{self.padding[axis]} altogether, so it has no {self.extreme_kind()}",
                    code="S309",
                )
        return x.with_shape([*x.shape[: x.ndim - self.rank], *counts])

    def first_taps(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The extreme of each window, and which tap holds it first; NaN wins."""
        kind, counts, taps = self.extreme_kind(), self._counts(x), int(np.prod(self.kernel))
        flat = self.view(x, worst(kind, as_dtype(x.dtype))).reshape(*counts, taps)
        inside = self.view(np.ones(self.sizes(x), bool), value=False).reshape(*counts[x.ndim - self.rank :], taps)
        best = flat.max(-1) if kind == "max" else flat.min(-1)
        nans = np.isnan(flat) & np.isnan(best)[..., None] if x.dtype.kind == "f" else np.zeros(flat.shape, bool)
        return best, np.argmax(inside & ((flat == best[..., None]) | nans), -1)

    def _counts(self, x: np.ndarray) -> tuple[int, ...]:
        counts = (window_count(n, *w) for n, *w in zip(self.sizes(x), *self._windows(), strict=True))
        return (*x.shape[: x.ndim - self.rank], *counts)

    def first_places(self, x: np.ndarray) -> np.ndarray:
        """The position of the first extreme of each window, row-major over the sizes that windows slide over."""
        _, tap = self.first_taps(x)
        taps = np.unravel_index(tap, self.kernel)
        starts = np.indices(tap.shape)[x.ndim - self.rank :]
        places = [
            start * stride + j * dilation - low
            for start, j, stride, dilation, (low, _) in zip(
                starts, taps, self.stride, self.dilation, self.padding, strict=True
            )
        ]
        return np.ravel_multi_index(places, self.sizes(x)) if tap.size else np.zeros(tap.shape, np.int64)

    def kernel_best(self, k: KernelBuilder, x: View, lead: Sequence[Expr], at: Sequence[Expr]) -> tuple[Expr, Expr]:
        """The extreme of the window at `at`, and the row-major number of the tap that holds it first."""
        kind = self.extreme_kind()
        sizes = x.shape[len(lead) :]

        def cell(*tap: Expr) -> tuple[Expr, Expr]:
            inside, place = self.source(k, at, tap, sizes)
            return inside, k.guard(inside, lambda: x[(*lead, *place)], k.const(worst(kind, x.dtype), x.dtype))

        best = k.reduce(kind, self.kernel, lambda *tap: cell(*tap)[1])

        def hit(*tap: Expr) -> Expr:
            inside, value = cell(*tap)
            same = k.eq(value, best)
            if x.dtype.is_float:
                same = k.or_(same, k.and_(k.isnan(value), k.isnan(best)))
            return k.cast(k.and_(inside, same), i32)

        return best, k.reduce("argmax", self.kernel, hit)

    def kernel_place(self, k: KernelBuilder, x: View, lead: Sequence[Expr], at: Sequence[Expr]) -> list[Expr]:
        """Where the first extreme of a window is."""
        _, tap = self.kernel_best(k, x, lead, at)
        return self.source(k, at, k.unflatten(tap, self.kernel), x.shape[len(lead) :])[1]


def worst(kind: str, dtype: DType) -> Any:
    """The value that loses against every other."""
    from strata.kernel import identity

    return identity(kind, dtype)


class ExtremePool(Extreme, Windowed):
    """The extreme of each window."""

    kind: ClassVar[str]

    def extreme_kind(self) -> str:
        return self.kind

    def infer(self, x: TensorType) -> TensorType:
        return self.pooled(x)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return self.first_taps(x)[0]

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return PoolSelect(self.kernel, self.stride, self.padding, self.dilation, self.kind)(x, dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return PoolBackward(self.kernel, self.stride, self.padding, self.dilation, self.kind)(x, ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        lead = len(index) - self.rank
        sizes = x.shape[lead:]
        empty = k.const(worst(self.kind, x.dtype), x.dtype)

        def cell(*tap: Expr) -> Expr:
            inside, place = self.source(k, index[lead:], tap, sizes)
            return k.guard(inside, lambda: x[(*index[:lead], *place)], empty)

        return k.reduce(self.kind, self.kernel, cell)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[2, 3, 7], distinct=True), **LINE), Sample(draw(f32[2, 1, 5, 6], distinct=True), **PLANE),
            Sample(f32[0, 5], **LINE), Sample(i8[1, 2, 4, 5], **PLANE, grad=False), Sample(TIES, **LINE, grad=False),
            Sample(draw(f64[1, 2, 3, 4, 3], distinct=True), kernel=(2, 2, 2), stride=(1, 2, 1), padding=((0, 0),) * 3,
                   dilation=(1, 1, 1)),
            Sample(f16[2, 1], kernel=(1,), stride=(1,), padding=((0, 0),), dilation=(1,), grad=False),
        ]  # fmt: skip


LINE: dict[str, Any] = {"kernel": (3,), "stride": (2,), "padding": ((1, 1),), "dilation": (1,)}
PLANE: dict[str, Any] = {"kernel": (2, 3), "stride": (1, 2), "padding": ((0, 1), (1, 1)), "dilation": (2, 1)}
TIES = np.array([[1, 1, 0, 2, 2], [-np.inf] * 5, [0, np.nan, 1, 1, np.inf]], np.float32)


@op("pool_max")
class PoolMax(ExtremePool):
    """The maximum of each window."""

    kind = "max"


@op("pool_min")
class PoolMin(ExtremePool):
    """The minimum of each window."""

    kind = "min"


class ExtremeOf(Extreme):
    """An op beside a maximum or minimum pool, by `kind`."""

    kind: str

    def extreme_kind(self) -> str:
        return self.kind


@op("pool_index")
class PoolIndex(ExtremeOf):
    """Where the first extreme of each window is, as an i64 position that counts row-major over the pooled axes."""

    differentiable = False

    def infer(self, x: TensorType) -> TensorType:
        return self.pooled(x).with_dtype(i64)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return self.first_places(x)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        lead = len(index) - self.rank
        return k.flatten(self.kernel_place(k, x, index[:lead], index[lead:]), x.shape[lead:])

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[2, 3, 7], **LINE, kind="max"), Sample(i32[2, 1, 5, 6], **PLANE, kind="min"),
            Sample(f32[0, 5], **LINE, kind="max"), Sample(TIES, **LINE, kind="max"), Sample(TIES, **LINE, kind="min"),
        ]  # fmt: skip


def _spread(x: Value, batched: bool, size: Dim) -> Value:
    return x if batched else broadcast_to(x, (size, *x.shape))


@op("pool_select")
class PoolSelect(ExtremeOf):
    """For each window, the element of y where x has its first extreme: the tangent of a maximum or minimum pool."""

    def infer(self, x: TensorType, y: TensorType) -> TensorType:
        self.require(x.shape == y.shape, f"needs two equal shapes, got {x} and {y}", code="S310")
        return self.pooled(x).with_dtype(y.dtype)

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        places = self.first_places(x)
        lead = x.ndim - self.rank
        flat = y.reshape(*y.shape[:lead], int(np.prod(y.shape[lead:])))
        rows = places.reshape(*places.shape[:lead], int(np.prod(places.shape[lead:])))
        return np.take_along_axis(flat, rows, -1).reshape(places.shape)

    def jvp(self, x: Value, y: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[1] is None else self(x, dx[1])

    def vjp(self, x: Value, y: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return None, PoolBackward(self.kernel, self.stride, self.padding, self.dilation, self.kind)(x, ct)

    def vmap(self, x: Value, y: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(_spread(x, batched[0], size), _spread(y, batched[1], size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, y = inputs
        lead = len(index) - self.rank
        return y[(*index[:lead], *self.kernel_place(k, x, index[:lead], index[lead:]))]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[2, 7], distinct=True), f32[2, 7], **LINE, kind="max"),
            Sample(draw(f32[1, 5, 6], distinct=True), f32[1, 5, 6], **PLANE, kind="min"),
            Sample(TIES, f32[3, 5], **LINE, kind="max", grad=False), Sample(f32[0, 5], f32[0, 5], **LINE, kind="max"),
        ]  # fmt: skip


@op("pool_backward")
class PoolBackward(ExtremeOf):
    """Each element of dy added to where its window of x has its first extreme; the spec's MaxPool2dBackward."""

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        pooled = self.pooled(x)
        self.require(pooled.shape == dy.shape, f"the pool of {x} is {pooled}, got {dy}", code="S310")
        return x.with_dtype(dy.dtype)

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        lead = x.shape[: x.ndim - self.rank]
        rows, places = int(np.prod(lead)), self.first_places(x)
        total = np.zeros((rows, int(np.prod(x.shape[x.ndim - self.rank :]))), dy.dtype)
        if rows:
            np.add.at(total, (np.arange(rows)[:, None], places.reshape(rows, -1)), dy.reshape(rows, -1))
        return total.reshape(x.shape)

    def jvp(self, x: Value, dy: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        return None if dx[1] is None else self(x, dx[1])

    def vjp(self, x: Value, dy: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return None, PoolSelect(self.kernel, self.stride, self.padding, self.dilation, self.kind)(x, ct)

    def vmap(self, x: Value, dy: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(_spread(x, batched[0], size), _spread(dy, batched[1], size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, dy = inputs
        lead = len(index) - self.rank
        zero = k.const(0, dy.dtype.accumulator)

        def term(*tap: Expr) -> Expr:
            inside, window = covering_window(self, k, index[lead:], tap, dy.shape[lead:])

            def share() -> Expr:
                _, first = self.kernel_best(k, x, index[:lead], window)
                mine = k.eq(first, k.flatten(tap, self.kernel))
                return k.select(mine, k.accumulate(dy[(*index[:lead], *window)]), zero)

            return k.guard(inside, share, zero)

        return k.cast(k.reduce("sum", self.kernel, term), dy.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[2, 7], distinct=True), f32[2, 4], **LINE, kind="max"),
            Sample(draw(f32[1, 5, 6], distinct=True), f32[1, 4, 3], **PLANE, kind="min"),
            Sample(TIES, f32[3, 3], **LINE, kind="max", grad=False), Sample(f32[0, 5], f32[0, 3], **LINE, kind="max"),
        ]  # fmt: skip
