"""Convolution in the layout that the layout pass chose, for backends that claim these ops.

Programs are written with `conv`. `conv_last` has channels last, so that its inner loops run along channels:
x[N, *sizes, C] with w[*kernel, C / groups, O] gives [N, *counts, O]. `conv_first` is `conv` itself, to stay as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import DType, TensorType, divide_exactly, f16, f32, f64, i8, u8
from strata.mir import Op, Sample, Value, op
from strata.ops.base.movement import transpose
from strata.ops.conv.conv import Conv, ConvBackwardWeight, conv_sample
from strata.ops.conv.windows import Pairs, Sizes
from strata.ops.linalg.matmul import sums_type

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


def to_first(rank: int) -> tuple[int, ...]:
    """The order of axes that brings [N, *sizes, C] to [N, C, *sizes]."""
    return (0, rank + 1, *range(1, rank + 1))


def to_last(rank: int) -> tuple[int, ...]:
    """The order of axes that brings [N, C, *sizes] to [N, *sizes, C]."""
    return (0, *range(2, rank + 2), 1)


def weight_to_last(rank: int) -> tuple[int, ...]:
    """The order of axes that brings [O, C, *kernel] to [*kernel, C, O]."""
    return (*range(2, rank + 2), 1, 0)


def weight_to_first(rank: int) -> tuple[int, ...]:
    """The order of axes that brings [*kernel, C, O] to [O, C, *kernel]."""
    return (rank + 1, rank, *range(rank))


@op("conv_last")
class ConvLast(Op):
    """y[n, t, o] = Σ x[n, t · stride + k · dilation − low, group(o) + c] · w[k, c, o]."""

    stride: Sizes
    padding: Pairs
    dilation: Sizes
    groups: int
    input_dilation: Sizes

    dtypes: ClassVar[str | tuple[DType, ...]] = "numeric"
    slides: ClassVar[bool] = True  # a contraction over windows: its first input is read in runs along the last axis

    @property
    def plain(self) -> Conv:
        """The same convolution with channels first."""
        return Conv(self.stride, self.padding, self.dilation, self.groups, self.input_dilation)

    def outside(self) -> int:
        """What x is in the padding."""
        return 0

    def infer(self, x: TensorType, w: TensorType) -> TensorType:
        rank = x.ndim - 2
        self.require(
            rank >= 1 and w.ndim == x.ndim,
            f"needs [N, *sizes, C] and [*kernel, C / groups, O], got {x} and {w}",
            code="S304",
        )
        first = x.with_shape([x.shape[p] for p in to_first(rank)])
        weights = w.with_shape([w.shape[p] for p in weight_to_first(rank)])
        made = self.plain.infer(first, weights)
        return made.with_shape([made.shape[p] for p in to_last(rank)])

    def numpy(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        rank = x.ndim - 2
        made = self.plain.numpy(x.transpose(to_first(rank)), w.transpose(weight_to_first(rank)))
        return made.transpose(to_last(rank))

    def decompose(self, x: Value, w: Value) -> Value:
        rank = x.ndim - 2
        made = self.plain(transpose(x, to_first(rank)), transpose(w, weight_to_first(rank)))
        return transpose(made, to_last(rank))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, w = inputs
        n, *at, o = index
        result = sums_type(x.dtype, w.dtype) or x.dtype
        wide = result.accumulator
        group_inputs, group_outputs = w.shape[-2], divide_exactly(w.shape[-1], self.groups)

        def term(*inner: Expr) -> Expr:
            *taps, c = inner
            inside, place = self.plain.places(k, at, taps, x.shape[1:-1])
            first = c if self.groups == 1 else k.floordiv(o, k.index(group_outputs)) * k.index(group_inputs) + c
            value = k.guard(inside, lambda: k.cast(x[(n, *place, first)], wide), k.const(self.outside(), wide))
            return value * k.cast(w[(*taps, c, o)], wide)

        if all(d == 1 for d in w.shape[:-2]):  # a matmul
            return k.cast(k.reduce("sum", w.shape[-2:-1], lambda c: term(*(k.index(0) for _ in at), c)), result)
        return k.cast(k.reduce("sum", tuple(w.shape[:-1]), term), result)

    @classmethod
    def samples(cls) -> list[Sample]:
        case = conv_sample
        pads = ((1, 0), (2, 1))
        return [
            case(f32[2, 5, 6, 4], f32[3, 2, 2, 6], stride=(2, 1), padding=pads, dilation=(1, 2), groups=2),
            case(f32[1, 6, 2], f32[3, 2, 3]), case(f32[2, 4, 4, 3], f32[1, 1, 3, 2]),
            case(f32[1, 5, 5, 8], f32[3, 3, 1, 8], padding=((1, 1), (1, 1)), groups=8),
            case(f32[1, 3, 4, 3, 2], f32[2, 2, 2, 2, 2], padding=((1, 1), (0, 1), (0, 0)), stride=(1, 2, 1)),
            case(f32[2, 4, 2], f32[3, 1, 4], padding=((3, -1),), input_dilation=(2,), stride=(3,), groups=2),
            case(f32[0, 5, 2], f32[2, 2, 3]), case(f32[1, 1, 1], f32[1, 1, 1]),
            case(f64[1, 7, 3], f64[2, 1, 3], groups=3, stride=(3,)), case(f16[1, 5, 2], f16[2, 2, 3], grad=False),
            case(i8[1, 5, 4], i8[3, 4, 2], padding=((1, 1),), grad=False),
            case(u8[1, 5, 5, 8], i8[3, 3, 4, 6], padding=pads, stride=(2, 1), groups=2, grad=False),
        ]  # fmt: skip


@op("conv_first")
class ConvFirst(Conv):
    """conv, where nothing around it has channels last: its inner loops run along the pixels of a line."""

    dtypes = "float"
    slides: ClassVar[bool] = True

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(x: TensorType, w: TensorType, **fields: Any) -> Sample:
            plain = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
            return Sample(x, w, **(plain | {"input_dilation": (1, 1)} | fields))

        same = ((1, 1), (1, 1))
        return [
            case(f32[2, 3, 5, 6], f32[4, 3, 3, 2], stride=(2, 1), padding=((1, 0), (2, 1)), dilation=(1, 2)),
            case(f32[1, 5, 4, 9], f32[5, 1, 3, 3], padding=same, groups=5),
            case(f32[2, 4, 7, 7], f32[4, 1, 3, 3], padding=same, groups=4, stride=(2, 2)),
            case(f32[1, 1, 4, 4], f32[9, 1, 3, 3], padding=same, stride=(1, 2)),
            case(f64[1, 2, 4, 3], f64[3, 2, 2, 2]), case(f32[0, 1, 5, 5], f32[2, 1, 2, 2]),
        ]  # fmt: skip


@op("conv_last_backward_weight")
class ConvLastBackwardWeight(Op):
    """w[k, c, o] = Σ x[n, t · stride + k · dilation − low, group(o) + c] · dy[n, t, o]: conv_last's gradient in w."""

    stride: Sizes
    padding: Pairs
    dilation: Sizes
    groups: int
    kernel: Sizes

    dtypes = "float"

    def _plain(self, x: TensorType | Value | np.ndarray, dy: TensorType | Value | np.ndarray) -> ConvBackwardWeight:
        """The same gradient with channels first."""
        inputs = divide_exactly(x.shape[-1], self.groups)
        self.require(inputs is not None, f"{x.shape[-1]} channels do not divide into {self.groups} groups", code="S306")
        assert inputs is not None
        fields = (self.stride, self.padding, self.dilation, self.groups)
        return ConvBackwardWeight(*fields, (dy.shape[-1], inputs, *self.kernel))

    def infer(self, x: TensorType, dy: TensorType) -> TensorType:
        rank = len(self.kernel)
        self.require(
            rank >= 1 and x.ndim == dy.ndim == rank + 2,
            f"needs [N, *sizes, C] and [N, *counts, O] of {rank + 2} axes, got {x} and {dy}",
            code="S304",
        )
        first = [t.with_shape([t.shape[p] for p in to_first(rank)]) for t in (x, dy)]
        made = self._plain(x, dy).infer(*first)
        return made.with_shape([made.shape[p] for p in weight_to_last(rank)])

    def numpy(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        order = to_first(x.ndim - 2)
        made = self._plain(x, dy).numpy(x.transpose(order), dy.transpose(order))
        return made.transpose(weight_to_last(x.ndim - 2))

    def decompose(self, x: Value, dy: Value) -> Value:
        order = to_first(x.ndim - 2)
        made = self._plain(x, dy)(transpose(x, order), transpose(dy, order))
        return transpose(made, weight_to_last(x.ndim - 2))

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(x: TensorType, dy: TensorType, *kernel: int, grad: bool = True, **fields: Any) -> Sample:
            rank = x.ndim - 2
            plain = {"stride": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1}
            return Sample(x, dy, grad=grad, **(plain | {"kernel": kernel} | fields))

        same = ((1, 1), (1, 1))
        return [
            case(f32[2, 5, 6, 4], f32[2, 3, 8, 6], 2, 2, stride=(2, 1), padding=((1, 0), (2, 1)), groups=2),
            case(f32[2, 4, 4, 1], f32[2, 4, 4, 5], 3, 3, padding=same),
            case(f32[1, 5, 5, 18], f32[1, 5, 5, 35], 3, 3, padding=same, grad=False),
            case(f32[2, 5, 4, 19], f32[2, 5, 4, 19], 3, 3, padding=same, groups=19, grad=False),
            case(f32[2, 7, 2], f32[2, 3, 4], 2, stride=(2,), padding=((0, 1),), dilation=(2,)),
            case(f32[1, 3, 4, 3, 2], f32[1, 4, 2, 2, 3], 2, 2, 2, padding=((1, 1), (0, 1), (0, 0)), stride=(1, 2, 1)),
            case(f32[1, 6, 2], f32[1, 3, 3], 2, padding=((-1, -1),)), case(f32[1, 1, 1], f32[1, 1, 1], 1),
            case(f32[0, 5, 2], f32[0, 4, 3], 2), case(f64[1, 7, 3], f64[1, 2, 3], 2, groups=3, stride=(4,)),
            case(f16[1, 5, 2], f16[1, 4, 3], 2, grad=False),
        ]  # fmt: skip
