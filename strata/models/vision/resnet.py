"""ResNet: stages of convolutions that add to what goes in, narrow in the middle or not."""

from __future__ import annotations

from functools import partial
from typing import Any

from strata.core import Dim
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.convolution import ConvolutionBuilder, sizes_of, stages_of
from strata.models.config_values import text, whole
from strata.models.vision.model import ImageModel, image_model
from strata.models.weights import Weights, check_layers, ops, without_prefix


class ResNetGraph(ConvolutionBuilder):
    """Builds the graph of a ResNet."""

    def __init__(
        self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int], name: str = "resnet"
    ) -> None:
        super().__init__(name, weights, batch, size)
        self.first = whole(found, "embedding_size", 64)
        self.widths = sizes_of(found, "hidden_sizes", [256, 512, 1024, 2048])
        self.depths = sizes_of(found, "depths", [3, 4, 6, 3])
        self.is_narrow = text(found, "layer_type", "bottleneck") == "bottleneck"
        self.is_early, self.halves_first = (bool(found.get(k)) for k in
                                            ("downsample_in_bottleneck", "downsample_in_first_stage"))  # fmt: skip
        self.activation = activation_of(found, default="relu")

    def step(
        self, x: Value, at: str, channels: int, kernel: int, stride: int = 1, *, active: bool = True, kind: str = ""
    ) -> Value:  # fmt: skip
        """A convolution, its norm, and the configuration's activation, or one of another kind."""
        y = self.conv(x, f"{at}.convolution", channels, kernel, stride=stride, padding=kernel // 2)
        y = self.batch_norm(y, f"{at}.normalization")
        return activated(y, kind or self.activation) if active else y

    def block(self, x: Value, at: str, channels: int, stride: int) -> Value:
        """Two or three convolutions, added to x; within a block the activation is always relu."""
        if self.is_narrow:
            strides = (stride, 1) if self.is_early else (1, stride)
            y = self.step(x, f"{at}.layer.0", channels // 4, 1, strides[0], kind="relu")
            y = self.step(y, f"{at}.layer.1", channels // 4, 3, strides[1], kind="relu")
            y = self.step(y, f"{at}.layer.2", channels, 1, active=False)
        else:
            y = self.step(x, f"{at}.layer.0", channels, 3, stride, kind="relu")
            y = self.step(y, f"{at}.layer.1", channels, 3, active=False)
        return activated(y + self.shortcut(x, at, channels, stride), self.activation)

    def shortcut(self, x: Value, at: str, channels: int, stride: int) -> Value:
        """What a block is added to."""
        if stride == 1 and x.shape[1] == channels:
            return x
        return self.step(x, f"{at}.shortcut", channels, 1, stride, active=False)

    def stem(self, at: str) -> Value:
        """What comes before the stages."""
        return self.step(self.pixels, f"{at}embedder.embedder", self.first, 7, 2)

    def stages(self, at: str = "") -> list[Value]:
        """The result of each stage."""
        x = ops.max_pool(self.stem(at), 3, 2, 1)
        found = []
        for i, (width, depth) in enumerate(stages_of(hidden_sizes=self.widths, depths=self.depths)):
            for j in range(depth):
                halves = j == 0 and (i > 0 or self.halves_first)
                x = self.block(x, f"{at}encoder.stages.{i}.layers.{j}", width, 2 if halves else 1)
            found.append(x)
        return found

    def build(self) -> dict[str, Value]:
        x = self.stages()[-1]
        pooled = ops.mean(x, (2, 3))
        whole_image = ops.reshape(pooled, (*pooled.shape, 1, 1))
        return {
            "last_hidden_state": x,
            "pooler_output": whole_image,
            "vector": pooled,
            **self.classified(pooled, "classifier.1"),
        }


def load(folder: Folder) -> ImageModel:
    """A model from a folder."""
    weights = without_prefix(folder.weights, ("resnet.",))
    check_layers("resnet", len(sizes_of(folder.settings, "depths", [3, 4, 6, 3])), weights, "encoder.stages.{}.")
    return image_model(folder, partial(ResNetGraph, folder.settings, weights), "ConvNext", vector="vector")
