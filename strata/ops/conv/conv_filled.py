"""Convolution of 8-bit quantised values whose padding is the zero point.

Where codes have a zero point, what lies outside x is that code, not 0. Programs are written with real numbers; the
pass `integer_products` makes the first of these ops, and the layout pass turns it into the second.
"""

from __future__ import annotations

from strata.core import TensorType, i8, u8
from strata.mir import Sample, op
from strata.ops.conv.conv import Conv, conv_sample
from strata.ops.conv.conv_last import ConvLast
from strata.ops.elementwise.logic import int_bounds


@op("conv_filled")
class ConvFilled(Conv):
    """`conv` of u8 or i8 codes with i8 codes, the sums in i32; outside x lies `fill`."""

    fill: int

    differentiable = False
    dtypes = (i8, u8)

    def outside(self) -> int:
        return self.fill

    def infer(self, x: TensorType, w: TensorType) -> TensorType:
        ok = x.dtype in (i8, u8) and w.dtype is i8
        self.require_dtype(ok, f"needs u8 or i8 codes and i8 codes, got {x} and {w}", code="D228")
        low, high = int_bounds(x.dtype)
        self.require_dtype(low <= self.fill <= high, f"{self.fill} is not a code of {x}", code="D228")
        return super().infer(x, w)

    @classmethod
    def samples(cls) -> list[Sample]:
        return _samples(last=False)


@op("conv_last_filled")
class ConvLastFilled(ConvLast):
    """`conv_last` of u8 or i8 codes with i8 codes, the sums in i32; outside x lies `fill`."""

    fill: int

    differentiable = False
    dtypes = (i8, u8)

    @property
    def plain(self) -> Conv:
        return ConvFilled(self.stride, self.padding, self.dilation, self.groups, self.input_dilation, self.fill)

    def outside(self) -> int:
        return self.fill

    @classmethod
    def samples(cls) -> list[Sample]:
        return _samples(last=True)


def _samples(*, last: bool) -> list[Sample]:
    def case(x: TensorType, w: TensorType, fill: int, **fields: object) -> Sample:
        if last:
            x = x.with_shape((x.shape[0], *x.shape[2:], x.shape[1]))
            w = w.with_shape((*w.shape[2:], w.shape[1], w.shape[0]))
        return conv_sample(x, w, grad=False, fill=fill, **fields)

    same = ((1, 1), (1, 1))
    return [
        case(u8[2, 4, 5, 6], i8[6, 4, 3, 3], 113, padding=same),
        case(u8[1, 8, 5, 4], i8[4, 4, 3, 2], 255, padding=((1, 0), (2, 1)), stride=(2, 1), groups=2),
        case(i8[1, 4, 6], i8[3, 4, 2], -7, padding=((0, 3),), dilation=(2,)),
        case(u8[1, 3, 4, 4], i8[2, 3, 2, 2], 5, padding=same, input_dilation=(2, 2)),
        case(u8[1, 2, 5], i8[3, 2, 2], 9, padding=((-1, 2),)), case(i8[0, 4, 5], i8[2, 4, 3], 1, padding=((1, 1),)),
        case(u8[1, 4, 1], i8[1, 4, 1], 3, padding=((0, 0),)),
    ]  # fmt: skip
