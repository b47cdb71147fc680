"""ConvNeXt and ConvNeXt V2: wide depthwise convolutions, then a feed-forward at each pixel."""

from __future__ import annotations

from functools import partial
from typing import Any

from strata.core import Dim
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.convolution import ConvolutionBuilder, sizes_of, stages_of
from strata.models.config_values import real, whole
from strata.models.vision.model import ImageModel, image_model
from strata.models.weights import Weights, check_layers, ops, without_prefix

EPS = 1e-6


class ConvNextGraph(ConvolutionBuilder):
    """Builds the graph of a ConvNeXt."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(str(found["model_type"]), weights, batch, size)
        self.widths = sizes_of(found, "hidden_sizes", [96, 192, 384, 768])
        self.depths = sizes_of(found, "depths", [3, 3, 9, 3])
        self.patch = whole(found, "patch_size", 4)
        self.activation, self.eps = activation_of(found), real(found, "layer_norm_eps", 1e-12)

    def block(self, x: Value, at: str, width: int) -> Value:
        y = self.conv(x, f"{at}dwconv", width, 7, padding=3, groups=width)
        y = self.layer_norm(ops.transpose(y, (0, 2, 3, 1)), f"{at}layernorm", width, EPS)
        y = activated(self.linear(y, f"{at}pwconv1", 4 * width, width), self.activation)
        if self.has(f"{at}grn.weight"):
            y = self.evened(y, f"{at}grn", 4 * width)
        y = self.linear(y, f"{at}pwconv2", width, 4 * width)
        if self.has(f"{at}layer_scale_parameter"):
            y = y * self.param(f"{at}layer_scale_parameter", (width,))
        return x + ops.transpose(y, (0, 3, 1, 2))

    def evened(self, x: Value, name: str, width: int) -> Value:
        """Channels that are larger than the others over the image count more (global response norm)."""
        size = ops.sqrt(ops.sum(x * x, (1, 2), keepdims=True))
        share = size / (ops.mean(size, -1, keepdims=True) + EPS)
        scale, shift = (self.param(f"{name}.{part}", (1, 1, 1, width)) for part in ("weight", "bias"))
        return scale * (x * share) + shift + x

    def build(self) -> dict[str, Value]:
        x = self.conv(self.pixels, "embeddings.patch_embeddings", self.widths[0], self.patch, stride=self.patch)
        x = self.channel_norm(x, "embeddings.layernorm", EPS)
        for i, (width, depth) in enumerate(stages_of(hidden_sizes=self.widths, depths=self.depths)):
            at = f"encoder.stages.{i}."
            if i:
                x = self.channel_norm(x, f"{at}downsampling_layer.0", EPS)
                x = self.conv(x, f"{at}downsampling_layer.1", width, 2, stride=2)
            for j in range(depth):
                x = self.block(x, f"{at}layers.{j}.", width)
        pooled = self.layer_norm(ops.mean(x, (2, 3)), "layernorm", self.widths[-1], self.eps)
        return {"last_hidden_state": x, "pooler_output": pooled, **self.classified(pooled)}


def load(folder: Folder) -> ImageModel:
    """A model from a folder."""
    weights = without_prefix(folder.weights, ("convnext.", "convnextv2."))
    check_layers("convnext", len(sizes_of(folder.settings, "depths", [3, 3, 9, 3])), weights, "encoder.stages.{}.")
    return image_model(folder, partial(ConvNextGraph, folder.settings, weights), "ConvNext")
