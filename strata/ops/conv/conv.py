"""Convolution of any rank, one op general enough that its own gradients are convolutions again.

x[N, C, *sizes] is spread by `input_dilation`, padded, and correlated with w[O, C / groups, *kernel], whose taps lie
`dilation` apart, at every `stride`. Transposed convolution is input dilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import (
    Dim,
    DType,
    TensorType,
    bool_,
    c64,
    divide_exactly,
    f16,
    f32,
    f64,
    floordiv,
    i8,
    i32,
    known_le,
    u8,
)
from strata.errors import OptionError, ShapeError
from strata.mir import METHODS, Op, Sample, Value, op
from strata.ops.base.movement import flip, moveaxis, reshape, transpose
from strata.ops.conv.windows import (
    Pairs,
    Sizes,
    extent_of,
    ints,
    pad_array,
    window_count,
)
from strata.ops.linalg.matmul import sums_type

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


class Convolving(Op):
    """The window fields that a convolution and its gradients share."""

    stride: Sizes
    padding: Pairs
    dilation: Sizes
    groups: Dim

    dtypes: ClassVar[str | tuple[DType, ...]] = "numeric"

    def check_fields(self, x: TensorType, w: TensorType) -> int:
        """Checks of ranks, dtypes and options; the number of spatial axes."""
        rank = x.ndim - 2
        self.require(
            rank >= 1 and w.ndim == x.ndim,
            f"needs [N, C, *sizes] and [O, C / groups, *kernel], got {x} and {w}",
            code="S304",
        )
        odd = next((t for t in (x, w) if t.dtype.is_bool), None)
        self.require_dtype(odd is None, f"does not take {odd}, only numeric types", code="D104")
        same = sums_type(x.dtype, w.dtype) is not None
        self.require_dtype(same, f"operands differ in dtype, {x} and {w}", code="D103")
        fields = (self.stride, self.padding, self.dilation)
        self.require(
            all(len(f) == rank for f in fields), f"stride, padding and dilation must have {rank} entries", code="S300"
        )
        positive = all(not known_le(v, 0) for values in (self.stride, self.dilation) for v in values)
        self.require(
            positive and not known_le(self.groups, 0),
            f"stride {self.stride}, dilation {self.dilation} and groups {self.groups} must be positive",
            code="O240", error=OptionError,
        )  # fmt: skip
        return rank


@op("conv")
class Conv(Convolving):
    """y[n, o, t] = Σ x[n, group(o) + c, t · stride + k · dilation − low] · w[o, c, k]; bytes times i8 give i32."""

    input_dilation: Sizes

    def places(
        self, k: KernelBuilder, at: Sequence[Expr], taps: Sequence[Expr], sizes: Sequence[Dim]
    ) -> tuple[Expr, list[Expr]]:
        """Where an output's taps are along the axes of x, and whether that is inside."""
        inside, place = k.const(True, bool_), []
        for axis, (t, j) in enumerate(zip(at, taps, strict=True)):
            low, high = self.padding[axis]
            position = t * k.index(self.stride[axis]) + j * k.index(self.dilation[axis])
            if low != 0:
                position = position - k.index(low)
                inside = k.and_(inside, k.ge(position, k.index(0)))
            spread = self.input_dilation[axis]
            if spread != 1:
                inside = k.and_(inside, k.eq(k.mod(position, k.index(spread)), k.index(0)))
                position = k.floordiv(position, k.index(spread))
            if high != 0 or spread != 1:
                inside = k.and_(inside, k.lt(position, k.index(sizes[axis])))
            place.append(position)
        return inside, place

    def outside(self) -> int:
        """What x is in the padding."""
        return 0

    def infer(self, x: TensorType, w: TensorType) -> TensorType:
        rank = self.check_fields(x, w)
        self.require(len(self.input_dilation) == rank, f"input_dilation must have {rank} entries", code="S300")
        channels, group_inputs = x.shape[1], w.shape[1]
        self.require(
            group_inputs * self.groups == channels,
            f"{x} has {channels} channels, {w} takes {group_inputs} in each of {self.groups} groups", code="S305",
        )  # fmt: skip
        self.require(
            divide_exactly(w.shape[0], self.groups) is not None,
            f"{w.shape[0]} outputs do not divide into {self.groups} groups", code="S306",
        )  # fmt: skip
        sizes = []
        for axis in range(rank):
            size, kernel = x.shape[axis + 2], w.shape[axis + 2]
            spread = extent_of(size, self.input_dilation[axis])
            count = window_count(spread, kernel, self.stride[axis], self.padding[axis], self.dilation[axis])
            self.require(
                size != 0 and kernel != 0 and not known_le(count, 0),
                f"a kernel of {extent_of(kernel, self.dilation[axis])} does not fit axis {axis + 2} of {x} "
                f"with padding {self.padding[axis]}", code="S302",
            )  # fmt: skip
            sizes.append(count)
        return TensorType(sums_type(x.dtype, w.dtype) or x.dtype, (x.shape[0], w.shape[0], *sizes))

    def numpy(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        result = np.int32 if w.dtype == np.int8 else x.dtype
        if x.dtype.kind in "iu":
            x, w = x.astype(np.int64), w.astype(np.int64)
        rank, groups = x.ndim - 2, self.groups.__index__()
        wide = ints([extent_of(n, d) for n, d in zip(x.shape[2:], self.input_dilation, strict=True)])
        spread = np.full((*x.shape[:2], *wide), self.outside(), x.dtype)
        every: Any = [slice(None, None, d) for d in self.input_dilation]
        spread[(..., *every)] = x
        extents = ints([extent_of(n, d) for n, d in zip(w.shape[2:], self.dilation, strict=True)])
        grid = pad_array(spread, self.padding, self.outside())
        if 0 in grid.shape[:2]:
            sizes = [(n - e) // s + 1 for n, e, s in zip(grid.shape[2:], extents, self.stride, strict=True)]
            return np.zeros((x.shape[0], w.shape[0], *sizes), result)
        seen = np.lib.stride_tricks.sliding_window_view(grid, extents, tuple(range(2, rank + 2)))
        steps: Any = [slice(None, None, s) for s in (*self.stride, *self.dilation)]
        seen = seen[(..., *steps)]
        counts = seen.shape[2 : rank + 2]
        taps = int(np.prod(w.shape[1:]))
        cells = seen.reshape(x.shape[0], groups, x.shape[1] // groups, *counts, *w.shape[2:])
        rows = np.moveaxis(cells, 2, rank + 2).swapaxes(0, 1).reshape(groups, -1, taps)
        columns = w.reshape(groups, w.shape[0] // groups, taps).swapaxes(1, 2)
        product = (rows @ columns).reshape(groups, x.shape[0], *counts, w.shape[0] // groups)
        return np.moveaxis(product, (0, -1), (1, 2)).reshape(x.shape[0], w.shape[0], *counts).astype(result)

    def jvp(self, x: Value, w: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        first = self(dx[0], w) if dx[0] is not None else None
        second = self(x, dx[1]) if dx[1] is not None else None
        return first + second if first is not None and second is not None else first if first is not None else second

    def vjp(self, x: Value, w: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        conj: Callable[[Value], Value] = METHODS["conj"]  # a real value stays as it is
        fields = (self.stride, self.padding, self.dilation, self.groups, self.input_dilation)
        return input_gradient(ct, conj(w), x.shape, *fields), weight_gradient(conj(x), ct, w.shape, *fields)

    def vmap(self, x: Value, w: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if not batched[1]:  # more images
            out = self(reshape(x, (size * x.shape[1], *x.shape[2:])), w)
            return reshape(out, (size, x.shape[1], *out.shape[1:]))
        groups, outputs = self.groups, floordiv(w.shape[1], self.groups)
        if not batched[0]:  # more outputs of each group
            parts = moveaxis(reshape(w, (size, groups, outputs, *w.shape[2:])), 0, 1)
            out = self(x, reshape(parts, (groups * size * outputs, *w.shape[2:])))
            apart = moveaxis(reshape(out, (out.shape[0], groups, size, outputs, *out.shape[2:])), 2, 0)
            return reshape(apart, (size, out.shape[0], groups * outputs, *out.shape[2:]))
        images = reshape(moveaxis(x, 0, 1), (x.shape[1], size * x.shape[2], *x.shape[3:]))  # more groups
        weights = reshape(w, (size * w.shape[1], *w.shape[2:]))
        out = replace(self, groups=groups * size)(images, weights)
        return moveaxis(reshape(out, (out.shape[0], size, w.shape[1], *out.shape[2:])), 1, 0)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, w = inputs
        n, o, *at = index
        result = sums_type(x.dtype, w.dtype) or x.dtype
        wide = result.accumulator
        group_outputs = divide_exactly(w.shape[0], self.groups)
        one_group = self.groups == 1

        def term(c: Expr, *taps: Expr) -> Expr:
            inside, place = self.places(k, at, taps, x.shape[2:])
            first = c if one_group else k.floordiv(o, k.index(group_outputs)) * k.index(w.shape[1]) + c
            value = k.guard(inside, lambda: k.cast(x[(n, first, *place)], wide), k.const(self.outside(), wide))
            return value * k.cast(w[(o, c, *taps)], wide)

        if all(d == 1 for d in w.shape[2:]):  # a matmul
            return k.cast(k.reduce("sum", w.shape[1:2], lambda c: term(c, *(k.index(0) for _ in at))), result)
        # a name, so that the order of its sums is the same beside ops that turn its operands around, and by itself
        return k.cast(k.reduce("sum", tuple(w.shape[1:]), term, order="columns"), result)

    @classmethod
    def samples(cls) -> list[Sample]:
        case = conv_sample
        return [
            case(f32[2, 4, 5, 6], f32[6, 2, 3, 2], stride=(2, 1), padding=((1, 0), (2, 1)), dilation=(1, 2), groups=2),
            case(f32[1, 2, 6], f32[3, 2, 3]), case(f32[2, 3, 4, 4], f32[2, 3, 1, 1]),
            case(f32[1, 2, 3, 4, 3], f32[2, 2, 2, 2, 2], padding=((1, 1), (0, 1), (0, 0)), stride=(1, 2, 1)),
            case(f32[2, 2, 4], f32[4, 1, 3], padding=((3, -1),), input_dilation=(2,), stride=(3,), groups=2),
            case(f32[2, 2, 5], f32[1, 2, 2], padding=((-1, -2),), input_dilation=(3,), dilation=(2,)),
            case(f32[2, 1, 1], f32[1, 1, 1], padding=((3, 0),), stride=(7,)),
            case(f32[0, 2, 5], f32[3, 2, 2]), case(f32[2, 0, 5], f32[3, 0, 2]), case(f32[1, 1, 1], f32[1, 1, 1]),
            case(f64[1, 3, 7], f64[3, 1, 2], groups=3, stride=(3,)), case(f16[1, 2, 5], f16[2, 2, 2], grad=False),
            case(i8[1, 2, 5], i8[2, 2, 2], padding=((1, 1),), grad=False),
            case(u8[1, 4, 5], i8[4, 2, 2], padding=((1, 2),), groups=2, grad=False),
            case(i32[1, 2, 5], i32[2, 2, 2], grad=False), case(c64[1, 2, 5], c64[2, 2, 2], padding=((1, 0),)),
        ]  # fmt: skip


def conv_sample(x: TensorType, w: TensorType, grad: bool = True, **fields: Any) -> Sample:
    """A convolution that slides by one over all of x, but for some fields."""
    rank = x.ndim - 2
    plain = {
        "stride": (1,) * rank,
        "padding": ((0, 0),) * rank,
        "dilation": (1,) * rank,
        "groups": 1,
        "input_dilation": (1,) * rank,
    }
    return Sample(x, w, grad=grad, **(plain | fields))


# ------------------------------------------------------------------------------------------------------------ gradients


def swap_channels(w: Value, groups: Dim, *, first: str) -> Value:
    """[O, C / g, *k] ↔ [C, O / g, *k]: inputs and outputs of each group exchanged, taps reversed."""
    outer = divide_exactly(w.shape[0], groups)
    if outer is None:
        raise ShapeError(f"{first}: {w.shape[0]} channels of {w.type} do not divide into {groups} groups", code="S306")
    parts = reshape(w, (groups, outer, *w.shape[1:]))
    swapped = reshape(moveaxis(parts, 1, 2), (groups * w.shape[1], outer, *w.shape[2:]))
    return flip(swapped, tuple(range(2, w.ndim)))


def input_gradient(
    dy: Value,
    w: Value,
    shape: Sequence[Dim],
    stride: Sizes,
    padding: Pairs,
    dilation: Sizes,
    groups: Dim,
    input_dilation: Sizes,
) -> Value:
    """The convolution that takes dy back to the input: strides become input dilation and the other way round."""
    pairs = []
    for axis, (low, _) in enumerate(padding):
        reach = (w.shape[axis + 2] - 1) * dilation[axis]
        spread = (shape[axis + 2] - 1) * input_dilation[axis] - (dy.shape[axis + 2] - 1) * stride[axis]
        pairs.append((reach - low, spread + low))
    kernel = swap_channels(w, groups, first="conv")
    return Conv(input_dilation, tuple(pairs), dilation, groups, stride)(dy, kernel)


def weight_gradient(
    x: Value,
    dy: Value,
    shape: Sequence[Dim],
    stride: Sizes,
    padding: Pairs,
    dilation: Sizes,
    groups: Dim,
    input_dilation: Sizes,
) -> Value:
    """The gradient in w from that of the output."""
    if not x.dtype.is_complex:
        plain = (1,) * len(stride)
        if input_dilation == plain:
            return ConvBackwardWeight(stride, padding, dilation, groups, tuple(shape))(x, dy)
        if stride == plain:
            return _transposed_weight_gradient(x, dy, shape, padding, dilation, groups, input_dilation)
    return weight_gradient_as_conv(x, dy, shape, stride, padding, dilation, groups, input_dilation)


def _transposed_weight_gradient(
    x: Value, dy: Value, shape: Sequence[Dim], padding: Pairs, dilation: Sizes, groups: Dim, spread: Sizes
) -> Value:
    """That of a transposed convolution, which takes dy to x: inputs and outputs change places."""
    pairs = []
    for axis, (low, _) in enumerate(padding):
        reach = (shape[axis + 2] - 1) * dilation[axis]
        needed = (x.shape[axis + 2] - 1) * spread[axis] + reach + 1
        pairs.append((reach - low, needed - dy.shape[axis + 2] - (reach - low)))
    swapped = (x.shape[1], floordiv(dy.shape[1], groups), *shape[2:])
    made = ConvBackwardWeight(spread, tuple(pairs), dilation, groups, swapped)(dy, x)
    return swap_channels(made, groups, first="conv")


def weight_gradient_as_conv(
    x: Value,
    dy: Value,
    shape: Sequence[Dim],
    stride: Sizes,
    padding: Pairs,
    dilation: Sizes,
    groups: Dim,
    input_dilation: Sizes,
) -> Value:
    """The convolution of inputs with dy: images are what is summed over, strides and dilations change places."""
    pairs = []
    for axis, (low, _) in enumerate(padding):
        needed = (shape[axis + 2] - 1) * dilation[axis] + (dy.shape[axis + 2] - 1) * stride[axis] + 1
        pairs.append((low, needed - extent_of(x.shape[axis + 2], input_dilation[axis]) - low))
    images, sizes = x.shape[0], x.shape[2:]
    rows = reshape(x, (images, groups, shape[1], *sizes))
    rows = reshape(transpose(rows, [2, 1, 0, *range(3, x.ndim + 1)]), (shape[1], groups * images, *sizes))
    out = Conv(dilation, tuple(pairs), stride, groups, input_dilation)(rows, moveaxis(dy, 0, 1))
    return moveaxis(out, 0, 1)


class ConvGradient(Convolving):
    """What the gradients of a convolution share; `shape` is that of the operand whose gradient it is."""

    shape: tuple[Dim, ...]

    dtypes = "float"

    def check_forward(self, x: TensorType, w: TensorType, dy: TensorType) -> None:
        """Whether dy is what the convolution gives."""
        forward = Conv(self.stride, self.padding, self.dilation, self.groups, (1,) * len(self.stride)).infer(x, w)
        self.require(forward.shape == dy.shape, f"a convolution of {x} with {w} gives {forward}, got {dy}", code="S307")


@op("conv_backward_input")
class ConvBackwardInput(ConvGradient):
    """The gradient of conv(x, w) in x from that of its output; `shape` is the shape of x."""

    def infer(self, dy: TensorType, w: TensorType) -> TensorType:
        self.check_fields(dy, w)
        x = dy.with_shape(self.shape)
        self.check_forward(x, w, dy)
        return x

    def numpy(self, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
        x = np.zeros(self.shape, dy.dtype)
        for outputs, inputs, tap, place, at in _taps(self, x.shape, dy.shape, w.shape):
            x[(slice(None), inputs, *place)] += dy[(slice(None), outputs, *at)] @ w[(outputs, slice(None), *tap)]
        return x

    def decompose(self, dy: Value, w: Value) -> Value:
        plain = (1,) * len(self.stride)
        made = input_gradient(dy, w, self.shape, self.stride, self.padding, self.dilation, self.groups, plain)
        return METHODS["cast"](made, dy.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        fields: dict[str, Any] = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
        return [
            Sample(f32[1, 3, 4, 4], f32[3, 2, 3, 3], **fields, shape=(1, 2, 4, 4)),
            Sample(
                f32[2, 4, 3], f32[4, 1, 2], stride=(2,), padding=((0, 1),), dilation=(2,), groups=2, shape=(2, 2, 7)
            ),
            Sample(
                f32[0, 2, 3], f32[2, 1, 2], stride=(2,), padding=((0, 1),), dilation=(2,), groups=2, shape=(0, 2, 7)
            ),
        ]


@op("conv_backward_weight")
class ConvBackwardWeight(ConvGradient):
    """The gradient of conv(x, w) in w from that of its output; `shape` is the shape of w."""

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        self.check_fields(x, dy)
        w = x.with_shape(self.shape)
        self.check_forward(x, w, dy)
        return w

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        w = np.zeros(self.shape, x.dtype)
        for outputs, inputs, tap, place, at in _taps(self, x.shape, dy.shape, w.shape):
            w[(outputs, slice(None), *tap)] += dy[(slice(None), outputs, *at)].T @ x[(slice(None), inputs, *place)]
        return w

    def decompose(self, x: Value, dy: Value) -> Value:
        plain = (1,) * len(self.stride)
        made = weight_gradient_as_conv(x, dy, self.shape, self.stride, self.padding, self.dilation, self.groups, plain)
        return METHODS["cast"](made, x.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        fields: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
        return [
            Sample(f32[2, 2, 4, 4], f32[2, 2, 2, 2], **fields, shape=(2, 2, 3, 3)),
            Sample(
                f32[2, 2, 7], f32[2, 4, 3], stride=(2,), padding=((0, 1),), dilation=(2,), groups=2, shape=(4, 1, 2)
            ),
            Sample(
                f32[0, 2, 7], f32[0, 4, 3], stride=(2,), padding=((0, 1),), dilation=(2,), groups=2, shape=(4, 1, 2)
            ),
        ]


def _taps(op_: Convolving, x: Sequence[int], dy: Sequence[int], w: Sequence[int]) -> Any:
    """Every (outputs and inputs of a group, tap, input place, output place) that meet in a convolution."""
    groups = op_.groups.__index__()
    for group in range(groups):
        outputs = slice(group * w[0] // groups, (group + 1) * w[0] // groups)
        inputs = slice(group * w[1], (group + 1) * w[1])
        for tap in np.ndindex(*w[2:]):
            for at in np.ndindex(*dy[2:]):
                place = [
                    t * s + j * d - p[0]
                    for t, s, j, d, p in zip(at, op_.stride, tap, op_.dilation, op_.padding, strict=True)
                ]
                if all(0 <= p < n for p, n in zip(place, x[2:], strict=True)):
                    yield outputs, inputs, tap, place, at
