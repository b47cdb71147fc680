"""Convolutions of one to three axes, and pooling layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, ClassVar

import strata.tensor as tensors
from strata.core import here
from strata.errors import OptionError
from strata.nn import initial
from strata.nn.module import Module
from strata.tensor import Tensor, random

ops: Any = tensors
Sizes = int | Sequence[int]


def _sizes(x: Sizes, rank: int) -> tuple[int, ...]:
    return (x,) * rank if isinstance(x, int) else tuple(x)


class _Conv(Module):
    rank: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        key: Any = None,
        dtype: Any = "f32",
    ) -> None:
        if in_channels % groups or out_channels % groups:
            raise OptionError(
                f"Conv: {in_channels} and {out_channels} channels do not split into {groups} groups",
                code="O281",
                place=here(),
            )
        shape = (out_channels, in_channels // groups, *_sizes(kernel_size, self.rank))
        first, second = random.split(initial.key_or_next(key))
        self.weight = initial.kaiming_uniform(first, shape, dtype)
        bound = 1 / sqrt(max(1, initial.fan_in(shape)))
        self.bias = initial.uniform(second, (out_channels,), bound, dtype) if bias else None
        self.stride = _sizes(stride, self.rank)
        self.padding = padding if isinstance(padding, str) else _sizes(padding, self.rank)
        self.dilation, self.groups = _sizes(dilation, self.rank), groups

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = getattr(ops, f"conv{self.rank}d")(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )
        return y


class Conv1d(_Conv):
    """Convolution of [N, C, L]."""

    rank = 1


class Conv2d(_Conv):
    """Convolution of [N, C, H, W]."""

    rank = 2


class Conv3d(_Conv):
    """Convolution of [N, C, D, H, W]."""

    rank = 3


class MaxPool2d(Module):
    """The largest element of each window."""

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> None:
        self.kernel_size = _sizes(kernel_size, 2)
        self.stride = self.kernel_size if stride is None else _sizes(stride, 2)
        self.padding = _sizes(padding, 2)

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = ops.max_pool2d(x, self.kernel_size, stride=self.stride, padding=self.padding)
        return y


class AvgPool2d(MaxPool2d):
    """The mean of each window."""

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = ops.avg_pool2d(x, self.kernel_size, stride=self.stride, padding=self.padding)
        return y
