"""Sliding windows over the trailing axes, and their transpose: what pooling, im2col and framing are built on.

A window has a size, a stride, (low, high) padding and a dilation per axis; the axes are the last ones of the input and
whatever comes before them is batch. Padding may be negative, which crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, SymExpr, TensorType, bool_, dim_max, dim_prod, f32, floordiv, i32, known_le, show_shape
from strata.errors import OptionError
from strata.kinds import whole_number
from strata.mir import Op, Sample, UnaryOp, Value, function, op
from strata.ops.base.frontend import Operand, as_value
from strata.ops.base.movement import reshape, transpose

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Pairs = tuple[tuple[Dim, Dim], ...]
Sizes = tuple[int, ...]


def extent_of(size: Dim, dilation: Dim) -> Dim:
    """What `size` elements cover when they lie `dilation` apart."""
    return 0 if size == 0 else (size - 1) * dilation + 1


def ints(values: Sequence[Any]) -> list[Any]:
    """Sizes as numbers: inside NumPy code every symbol is bound."""
    return [v.__index__() if isinstance(v, (int, SymExpr)) else tuple(ints(v)) for v in values]


def window_count(size: Dim, kernel: Dim, stride: Dim, padding: tuple[Dim, Dim], dilation: Dim) -> Dim:
    """The number of windows along an axis; 0 or less when not even one fits."""
    room = size + padding[0] + padding[1] - extent_of(kernel, dilation)
    return floordiv(room, stride) + 1


def empty_window(size: int, count: int, kernel: int, stride: int, before: int, dilation: int) -> int | None:
    """The first of the windows along an axis that lies in the padding altogether; None where each has an element.

    Window k has its taps at k·stride - before + t·dilation. No list of them is made: sizes may come from a file."""
    if (kernel - 1) * dilation < before and count > 0:
        return 0  # it ends before the first element
    behind = max(0, -(-(size + before) // stride))  # the first that begins after the last element
    # a window that begins before the first element meets it, or what is after it, at (k·stride - before) mod dilation
    over = (
        _first_within(stride, dilation, (size + before) % dilation, (before - 1) % dilation)
        if size < dilation
        else None
    )
    if over is not None and over * stride < before:
        behind = min(behind, over)
    return behind if behind < count else None


def _first_within(factor: int, modulus: int, low: int, high: int) -> int | None:
    """The least k ≥ 0 for which factor·k mod modulus lies from low to high, round the end where low is above high."""
    if low == 0 or low > high:
        return 0
    factor %= modulus
    if factor == 0:
        return None
    k = -(-low // factor)
    if k * factor <= high:
        return k
    turns = _first_within(modulus, factor, -high % factor, -low % factor)
    return None if turns is None else -(-(low + modulus * turns) // factor)


class Geometry(Op):
    """An op on windows of the trailing axes of its first input."""

    kernel: Sizes
    stride: Sizes
    padding: Pairs
    dilation: Sizes

    @property
    def rank(self) -> int:
        """The number of axes that windows slide over."""
        return len(self.kernel)

    def counts(self, x: TensorType) -> tuple[Dim, ...]:
        """The number of windows along each trailing axis of x; the checks that all window ops share."""
        rank = self.rank
        fields = (self.stride, self.padding, self.dilation)
        self.require(
            all(len(f) == rank for f in fields), f"stride, padding and dilation must have {rank} entries", code="S300"
        )
        self.require(x.ndim >= rank, f"needs at least {rank} axes to slide over, got {x}", code="S301")
        positive = all(v >= 1 for values in (self.kernel, self.stride, self.dilation) for v in values)
        shown = f"kernel {self.kernel}, stride {self.stride} and dilation {self.dilation}"
        self.require(positive, f"{shown} must be positive", code="O240", error=OptionError)
        counts = []
        for axis, (size, *window) in enumerate(zip(self.sizes(x), *self._windows(), strict=True), x.ndim - rank):
            count = window_count(size, *window)
            kernel, _, padding, dilation = window
            self.require(
                not known_le(count, 0),
                f"a window of {extent_of(kernel, dilation)} does not fit axis {axis} of {x} with padding {padding}",
                code="S302",
            )
            counts.append(count)
        return tuple(counts)

    def sizes(self, x: TensorType | Value | np.ndarray) -> tuple[Dim, ...]:
        """The trailing sizes that windows slide over."""
        return tuple(x.shape[x.ndim - self.rank :])

    def _windows(self) -> tuple[Any, ...]:
        return self.kernel, self.stride, self.padding, self.dilation

    def view(self, x: np.ndarray, value: Any) -> np.ndarray:
        """[*lead, *counts, *kernel] of an array, padding filled with `value`."""
        counts = [window_count(n, *w) for n, *w in zip(self.sizes(x), *self._windows(), strict=True)]
        padded = pad_array(x, self.padding, value)
        extents = ints([extent_of(n, d) for n, d in zip(self.kernel, self.dilation, strict=True)])
        lead = x.ndim - self.rank
        if 0 in x.shape[:lead]:
            return np.full((*x.shape[:lead], *counts, *self.kernel), value, x.dtype)
        seen = np.lib.stride_tricks.sliding_window_view(padded, extents, tuple(range(lead, x.ndim)))
        steps: Any = (*(slice(None, None, s) for s in self.stride), *(slice(None, None, d) for d in self.dilation))
        return np.asarray(seen[(..., *steps)])

    def source(
        self, k: KernelBuilder, at: Sequence[Expr], tap: Sequence[Expr], sizes: Sequence[Dim]
    ) -> tuple[Expr, list[Expr]]:
        """Whether a tap of the window at `at` lies inside the input, and where."""
        inside, place = k.const(True, bool_), []
        for i, j, size, stride, (low, high), dilation in zip(
            at, tap, sizes, self.stride, self.padding, self.dilation, strict=True
        ):
            position = i * stride + j * dilation
            if low != 0:
                position = position - k.index(low)
                inside = k.and_(inside, k.ge(position, k.index(0)))
            if high != 0:
                inside = k.and_(inside, k.lt(position, k.index(size)))
            place.append(position)
        return inside, place


class Windowed(Geometry, UnaryOp):
    """A windowed op with one input."""


def pad_array(x: np.ndarray, padding: Pairs, value: Any) -> np.ndarray:
    """An array with its trailing axes padded, or cropped where padding is negative."""
    lead, pairs = x.ndim - len(padding), ints(padding)
    wide = np.pad(x, [(0, 0)] * lead + [(max(low, 0), max(high, 0)) for low, high in pairs], constant_values=value)
    crop: Any = [
        slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(wide.shape[lead:], pairs, strict=True)
    ]
    return np.asarray(wide[(..., *crop)])


@op("windows")
class Windows(Windowed):
    """x[*lead, *sizes] → [*lead, *counts, *kernel]: every window, padding filled with `value`."""

    value: float

    dtypes = "any"

    def infer(self, x: TensorType) -> TensorType:
        counts = self.counts(x)
        return x.with_shape([*x.shape[: x.ndim - self.rank], *counts, *self.kernel])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return self.view(x, self.value)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return Windows(self.kernel, self.stride, self.padding, self.dilation, 0.0)(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return FoldWindows(self.kernel, self.stride, self.padding, self.dilation, self.sizes(x))(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        lead, rank = len(x.shape) - self.rank, self.rank
        at, tap = index[lead : lead + rank], index[lead + rank :]
        inside, place = self.source(k, at, tap, x.shape[lead:])
        return k.guard(inside, lambda: x[(*index[:lead], *place)], k.const(self.value, x.dtype))

    @classmethod
    def samples(cls) -> list[Sample]:
        line: dict[str, Any] = {"kernel": (3,), "stride": (2,), "padding": ((1, 2),), "dilation": (1,)}
        plane: dict[str, Any] = {"kernel": (2, 3), "stride": (1, 2), "padding": ((0, 1), (-1, 2)), "dilation": (2, 1)}
        return [
            Sample(f32[7], **line, value=0.0), Sample(f32[2, 5, 6], **plane, value=1.5),
            Sample(f32[0, 5], **line, value=0.0), Sample(i32[3, 4, 5], **plane, value=7.0, grad=False),
            Sample(f32[2, 1], kernel=(1,), stride=(1,), padding=((0, 0),), dilation=(1,), value=0.0),
        ]  # fmt: skip


@op("fold_windows")
class FoldWindows(Windowed):
    """[*lead, *counts, *kernel] → [*lead, *size]: every window added back in place; the transpose of windows."""

    size: tuple[Dim, ...]

    dtypes = "numeric"

    def infer(self, x: TensorType) -> TensorType:
        rank = self.rank
        self.require(x.ndim >= 2 * rank, f"needs {2 * rank} trailing axes, counts and kernel, got {x}", code="S301")
        result = x.with_shape([*x.shape[: x.ndim - 2 * rank], *self.size])
        expected = (*self.counts(result), *self.kernel)
        given = x.shape[x.ndim - 2 * rank :]
        self.require(
            given == expected, f"windows of {result} are {show_shape(expected)}, got {show_shape(given)}", code="S303"
        )
        return result

    def numpy(self, x: np.ndarray) -> np.ndarray:
        rank, lead = self.rank, x.ndim - 2 * self.rank
        counts = x.shape[lead : lead + rank]
        reach = [
            extent_of(n, s) + extent_of(k, d) - 1
            for n, s, k, d in zip(counts, self.stride, self.kernel, self.dilation, strict=True)
        ]
        total = np.zeros((*x.shape[:lead], *reach), x.dtype)
        for tap in np.ndindex(*self.kernel):
            spots: Any = tuple(
                slice(j * d, j * d + extent_of(n, s), s)
                for j, d, n, s in zip(tap, self.dilation, counts, self.stride, strict=True)
            )
            total[(..., *spots)] += x[(..., *tap)]
        start = [p[0] for p in self.padding]
        return _cut(total, start, self.size)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return Windows(self.kernel, self.stride, self.padding, self.dilation, 0.0)(ct)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        (x,) = inputs
        rank, lead = self.rank, len(x.shape) - 2 * self.rank
        counts, at = x.shape[lead : lead + rank], index[lead:]

        def term(*tap: Expr) -> Expr:
            inside, window = covering_window(self, k, at, tap, counts)
            return k.guard(
                inside, lambda: k.accumulate(x[(*index[:lead], *window, *tap)]), k.const(0, x.dtype.accumulator)
            )

        return k.cast(k.reduce("sum", self.kernel, term), x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        line: dict[str, Any] = {"kernel": (3,), "stride": (2,), "padding": ((1, 2),), "dilation": (1,), "size": (7,)}
        plane: dict[str, Any] = {
            "kernel": (2, 3),
            "stride": (1, 2),
            "padding": ((0, 1), (-1, 2)),
            "dilation": (2, 1),
            "size": (5, 6),
        }
        return [
            Sample(f32[4, 3], **line), Sample(f32[2, 4, 3, 2, 3], **plane), Sample(f32[0, 4, 3], **line),
            Sample(i32[4, 3, 2, 3], **plane, grad=False),
            Sample(f32[2, 3, 1], kernel=(1,), stride=(2,), padding=((0, 0),), dilation=(1,), size=(6,)),
        ]  # fmt: skip


def covering_window(
    geometry: Geometry, k: KernelBuilder, at: Sequence[Expr], tap: Sequence[Expr], counts: Sequence[Dim]
) -> tuple[Expr, list[Expr]]:
    """Whether a window has this input position under its tap, and which window that is."""
    inside, window = k.const(True, bool_), []
    for i, j, count, stride, (low, _), dilation in zip(
        at, tap, counts, geometry.stride, geometry.padding, geometry.dilation, strict=True
    ):
        start = i + k.index(low) - j * dilation
        inside = k.and_(inside, k.ge(start, k.index(0)))
        if stride != 1:
            inside = k.and_(inside, k.eq(k.mod(start, k.index(stride)), k.index(0)))
            start = k.floordiv(start, k.index(stride))
        inside = k.and_(inside, k.lt(start, k.index(count)))
        window.append(start)
    return inside, window


def _cut(total: np.ndarray, start: Sequence[Dim], size: Sequence[Dim]) -> np.ndarray:
    """`size` elements of the trailing axes from `start`; zeros where that is outside."""
    lead = total.ndim - len(size)
    out = np.zeros((*total.shape[:lead], *ints(size)), total.dtype)
    take: Any = []
    put: Any = []
    for s, n, have in zip(ints(start), ints(size), total.shape[lead:], strict=True):
        first, last = max(s, 0), min(s + n, have)
        take.append(slice(first, max(last, first)))
        put.append(slice(first - s, max(last, first) - s))
    out[(..., *put)] = total[(..., *take)]
    return out


# ------------------------------------------------------------------------------------------------------- im2col, col2im


@op("im2col")
class Im2Col(Windowed):
    """x[N, C, *sizes] → [N · counts, C · kernel]: a row for each window, padding zero."""

    def infer(self, x: TensorType) -> TensorType:
        self.require(x.ndim == self.rank + 2, f"needs [N, C] and {self.rank} sizes, got {x}", code="S301")
        return x.with_shape([x.shape[0] * dim_prod(self.counts(x)), x.shape[1] * dim_prod(self.kernel)])

    def numpy(self, x: np.ndarray) -> np.ndarray:
        counts = ints([window_count(n, *w) for n, *w in zip(self.sizes(x), *self._windows(), strict=True)])
        low, high = [p[0] for p in self.padding], [p[1] for p in self.padding]
        padded = np.pad(x, ints([(0, 0), (0, 0), *zip(low, high, strict=True)]))
        rows = np.zeros((x.shape[0], *counts, x.shape[1], *self.kernel), x.dtype)
        for tap in np.ndindex(*self.kernel):
            spots: Any = tuple(
                slice(j * d, j * d + extent_of(n, s), s)
                for j, d, n, s in zip(tap, self.dilation, counts, self.stride, strict=True)
            )
            rows[(..., *tap)] = np.moveaxis(padded[(..., *spots)], 1, -1)
        return rows.reshape(x.shape[0] * int(np.prod(counts)), x.shape[1] * int(np.prod(self.kernel)))

    def decompose(self, x: Value) -> Value:
        rank = self.rank
        seen = Windows(self.kernel, self.stride, self.padding, self.dilation, 0.0)(x)
        rows = transpose(seen, [0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank)])
        return reshape(rows, self.infer(x.type).shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        plane: dict[str, Any] = {"kernel": (2, 3), "stride": (1, 2), "padding": ((1, 1), (0, 2)), "dilation": (2, 1)}
        return [
            Sample(f32[2, 3, 5, 6], **plane), Sample(f32[0, 1, 5, 4], **plane),
            Sample(f32[1, 2, 5], kernel=(2,), stride=(2,), padding=((0, 0),), dilation=(1,)),
        ]  # fmt: skip


@op("col2im")
class Col2Im(Windowed):
    """[N · counts, C · kernel] → [N, C, *size]: windows added back; the transpose of im2col."""

    size: tuple[Dim, ...]
    channels: Dim

    def infer(self, x: TensorType) -> TensorType:
        self.require(x.ndim == 2, f"needs a matrix of windows, got {x}", code="S301")
        batch = self._batch(x)
        result = x.with_shape([batch, self.channels, *self.size])
        columns = self.channels * dim_prod(self.kernel)
        self.require(x.shape[1] == columns, f"a window has {columns} numbers, got {x}", code="S303")
        return result

    def _batch(self, x: TensorType | Value) -> Dim:
        probe = TensorType(x.dtype, (1, self.channels, *self.size))
        per_image = dim_prod(self.counts(probe))
        batch = floordiv(x.shape[0], per_image)
        self.require(
            batch * per_image == x.shape[0],
            f"{x.shape[0]} windows are not a multiple of {per_image} an image",
            code="S303",
        )
        return batch

    def decompose(self, x: Value) -> Value:
        rank, batch = self.rank, self._batch(x)
        counts = self.counts(TensorType(x.dtype, (1, self.channels, *self.size)))
        seen = reshape(x, (batch, *counts, self.channels, *self.kernel))
        moved = transpose(seen, [0, rank + 1, *range(1, rank + 1), *range(rank + 2, 2 * rank + 2)])
        return FoldWindows(self.kernel, self.stride, self.padding, self.dilation, self.size)(moved)

    @classmethod
    def samples(cls) -> list[Sample]:
        plane: dict[str, Any] = {
            "kernel": (2, 3),
            "stride": (1, 2),
            "padding": ((1, 1), (0, 2)),
            "dilation": (2, 1),
            "size": (5, 6),
        }
        return [
            Sample(f32[30, 18], **plane, channels=3), Sample(f32[0, 6], **plane, channels=1),
            Sample(f32[2, 4], kernel=(2,), stride=(2,), padding=((0, 0),), dilation=(1,), size=(5,), channels=2),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


def per_axis(value: int | Sequence[int] | None, rank: int, what: str, default: int = 1) -> Sizes:
    """One number for all axes, or one for each."""
    if value is None:
        return (default,) * rank
    entries = tuple(value) if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str) else (value,)
    numbers = tuple(n for n in map(whole_number, entries) if n is not None)
    if len(numbers) != len(entries):
        raise OptionError(f"{what}: {value!r} is neither a whole number nor one for each axis", code="O241")
    if len(numbers) == 1:
        return numbers * rank
    if len(numbers) != rank:
        raise OptionError(f"{what}: {len(numbers)} entries for {rank} axes: {numbers}", code="O241")
    return numbers


def padding_pairs(padding: Any, rank: int, what: str) -> Pairs:
    """Padding as pairs: one number, one for each axis, or a (low, high) pair for each axis."""
    if isinstance(padding, (list, tuple)) and any(isinstance(p, (list, tuple)) for p in padding):
        if len(padding) != rank or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in padding):
            raise OptionError(
                f"{what}: padding {padding} is not a (low, high) pair for each of {rank} axes", code="O241"
            )
        return tuple((low, high) for low, high in padding)
    return tuple((p, p) for p in per_axis(padding, rank, f"{what}: padding", 0))


def same_padding(
    sizes: Sequence[Dim], kernel: Sequence[Dim], stride: Sizes, dilation: Sizes, *, upper: bool = True
) -> Pairs:
    """Padding that gives ceil(size / stride) windows; an odd element goes to the end when `upper`."""
    pairs = []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        count = floordiv(size + s - 1, s)
        total = dim_max((count - 1) * s + extent_of(k, d) - size, 0) if s != 1 else extent_of(k, d) - 1
        small = floordiv(total, 2)
        pairs.append((small, total - small) if upper else (total - small, small))
    return tuple(pairs)


@function()
def unfold(x: Operand, kernel_size: int | Sequence[int], dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Value:
    """torch's unfold: [N, C, H, W] → [N, C · kernel, windows]."""
    value = as_value(x)
    rank = value.ndim - 2
    op_ = Windows(
        per_axis(kernel_size, rank, "unfold"), per_axis(stride, rank, "unfold"), padding_pairs(padding, rank, "unfold"),
        per_axis(dilation, rank, "unfold"), 0.0,
    )  # fmt: skip
    seen = op_(value)
    counts = seen.shape[2 : 2 + rank]
    moved = transpose(seen, [0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)])
    return reshape(moved, (value.shape[0], value.shape[1] * dim_prod(op_.kernel), dim_prod(counts)))


@function()
def fold(
    x: Operand, output_size: int | Sequence[int], kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Value:
    """torch's fold: [N, C · kernel, windows] → [N, C, *output_size], windows added up."""
    value = as_value(x)
    sizes = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    rank = len(sizes)
    fields: Any = (
        per_axis(kernel_size, rank, "fold"), per_axis(stride, rank, "fold"), padding_pairs(padding, rank, "fold"),
        per_axis(dilation, rank, "fold"),
    )  # fmt: skip
    counts = tuple(window_count(n, *w) for n, *w in zip(sizes, *fields, strict=True))
    channels = floordiv(value.shape[1], dim_prod(fields[0]))
    seen = reshape(value, (value.shape[0], channels, *fields[0], *counts))
    moved = transpose(seen, [0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)])
    return FoldWindows(fields[0], fields[1], fields[2], fields[3], sizes)(moved)


@function()
def im2col(x: Operand, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Value:
    """[N, C, *sizes] → [N · windows, C · kernel], a row for each window."""
    value = as_value(x)
    rank = value.ndim - 2
    return Im2Col(
        per_axis(kernel, rank, "im2col"), per_axis(stride, rank, "im2col"), padding_pairs(padding, rank, "im2col"),
        per_axis(dilation, rank, "im2col"),
    )(value)  # fmt: skip


@function()
def col2im(
    x: Operand, size: Sequence[Dim], channels: Dim, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Value:
    """[N · windows, C · kernel] → [N, C, *size], windows added up."""
    rank = len(size)
    return Col2Im(
        per_axis(kernel, rank, "col2im"), per_axis(stride, rank, "col2im"), padding_pairs(padding, rank, "col2im"),
        per_axis(dilation, rank, "col2im"), tuple(size), channels,
    )(as_value(x))  # fmt: skip
