"""Convolutions of image models: with a batch norm, with a layer norm over channels, pooled to one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.core import Dim, f32
from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.transformer import TransformerBuilder
from strata.models.weights import Weights, ops


def sizes_of(found: Mapping[str, Any], key: str, default: list[int]) -> tuple[int, ...]:
    """A list of sizes, one for each stage."""
    value = found.get(key) or default
    if not isinstance(value, list) or not all(type(n) is int and 0 < n < 1 << 24 for n in value):
        raise FileError(f"the configuration has {key} = {value!r}, a list of sizes is needed", code="F140")
    return tuple(value)


def stages_of(**lists: Sequence[int]) -> list[tuple[int, ...]]:
    """Lists with an entry for each stage, as a tuple of entries for each; refuses lists of several lengths."""
    if len({len(found) for found in lists.values()}) > 1:
        told = ", ".join(f"{len(found)} {name}" for name, found in lists.items())
        raise FileError(f"the configuration has {told} for its stages", code="F140")
    return list(zip(*lists.values(), strict=True))


class ConvolutionBuilder(TransformerBuilder):
    """A graph of convolutions over images [B, C, H, W]."""

    def __init__(self, name: str, weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(name, weights)
        self.batch = batch
        self.pixels = self.graph.input("pixel_values", (batch, 3, *size), f32)

    def conv(
        self, x: Value, name: str, channels: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
    ) -> Value:
        """A convolution, with a bias where there is one."""
        inner = x.shape[1].__index__() // groups
        weight = self.param(f"{name}.weight", (channels, inner, kernel, kernel))
        bias = self.param(f"{name}.bias", (channels,)) if self.has(f"{name}.bias") else None
        return ops.conv2d(x, weight, bias, stride=stride, padding=padding, groups=groups)

    def batch_norm(self, x: Value, name: str, eps: float = 1e-5) -> Value:
        """By the statistics of training."""
        width = (x.shape[1].__index__(),)
        parts = [self.param(f"{name}.{part}", width) for part in ("weight", "bias", "running_mean", "running_var")]
        return ops.batch_norm_inference(x, *parts, axis=1, eps=eps)

    def channel_norm(self, x: Value, name: str, eps: float) -> Value:
        """A layer norm over the channels of each pixel."""
        width = (x.shape[1].__index__(),)
        return ops.layer_norm_2d(x, self.param(f"{name}.weight", width), self.param(f"{name}.bias", width), eps=eps)

    def rows(self, x: Value) -> Value:
        """[B, C, H, W] as tokens [B, H · W, C]."""
        return ops.transpose(ops.reshape(x, (*x.shape[:2], -1)), (0, 2, 1))

    def image(self, x: Value, height: Dim, width: Dim) -> Value:
        """Tokens [B, H · W, C] as [B, C, H, W]."""
        return ops.reshape(ops.transpose(x, (0, 2, 1)), (self.batch, x.shape[2], height, width))
