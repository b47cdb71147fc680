"""Swin and Swin V2: attention inside windows of an image, every other layer with the windows shifted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from strata.core import Dim
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.base import Folder
from strata.models.blocks.activations import activation_of
from strata.models.blocks.convolution import sizes_of
from strata.models.blocks.patches import PatchBuilder
from strata.models.blocks.transformer import LayerNames, LayerSizes, pair
from strata.models.blocks.windows import WindowCut, log_distances, padded, relative_places, unit
from strata.models.config_values import real, whole, wholes
from strata.models.vision.images import MOST_SIDE
from strata.models.vision.model import ImageModel, image_model
from strata.models.weights import Weights, check_layers, ops, without_prefix

NAMES = LayerNames(at="", up="intermediate.dense", down="output.dense")
FAR = -100.0  # added to scores of pixels that only the shift has brought together
CLOSE = float(np.log(100.0))  # the most that Swin V2's scale of cosines is, as a logarithm
WIDE = 512  # features of Swin V2's network of distances


class SwinGraph(PatchBuilder):
    """Builds the graph of a Swin; images that patches or windows do not divide are padded with zeros."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(str(found["model_type"]), weights, batch, size, pair(found, "patch_size", 4))
        self.is_second = found["model_type"] == "swinv2"
        self.width, self.depths = whole(found, "embed_dim", 96), sizes_of(found, "depths", [2, 2, 6, 2])
        self.heads = sizes_of(found, "num_heads", [3, 6, 12, 24])
        self.trained = wholes(found, "pretrained_window_sizes") or (0,) * len(self.depths)
        counts = len(self.depths), len(self.heads), len(self.trained)
        if counts[0] != counts[1] or counts[0] > counts[2]:
            raise FileError(f"the configuration has {counts} depths, heads and pretrained windows", code="F140")
        self.window, ratio = whole(found, "window_size", 7), real(found, "mlp_ratio", 4.0)
        self.sizes = [
            LayerSizes(
                hidden=(width := self.width << i), layers=depth, heads=heads, inner=int(ratio * width),
                eps=real(found, "layer_norm_eps", 1e-5), activation=activation_of(found),
            )
            for i, (depth, heads) in enumerate(zip(self.depths, self.heads, strict=True))
        ]  # fmt: skip
        self.usual = tuple(
            n // p for n, p in zip(pair(found, "image_size", 224, most=MOST_SIDE), self.patch, strict=True)
        )
        more = [-n % p for n, p in zip(size, self.patch, strict=True)]
        self.grid = (size[0] + more[0]) // self.patch[0], (size[1] + more[1]) // self.patch[1]
        self.pixels = padded(self.pixels, (2, 3), more)

    def window_of(self, stage: int, high: int, wide: int) -> tuple[int, bool]:
        """The side of the windows of a stage, and whether they can be shifted."""
        side, least = self.window, min(high, wide)
        if self.is_second:  # by the images that the model is made for
            least = self.usual[0] >> stage
            side = min(least, side)
        if least < max(side, 1):
            told = f"images of {self.size} are smaller than windows of {self.window} in stage {stage}"
            raise FileError(told, code="F140")
        return side, least > self.window

    def distances(self, at: str, side: int, heads: int, trained: int) -> Value:
        """What is added to scores for the place of a key beside a query, [heads, side², side²]."""
        if self.is_second:
            both = constant(log_distances(side, trained or side))
            inner = ops.relu(self.linear(both, f"{at}continuous_position_bias_mlp.0", WIDE, 2))
            table = ops.sigmoid(self.linear(inner, f"{at}continuous_position_bias_mlp.2", heads, WIDE)) * 16.0
        else:
            table = self.param(f"{at}relative_position_bias_table", ((2 * side - 1) ** 2, heads))
        square = ops.reshape(
            ops.take(table, constant(relative_places(side)), axis=0), (side * side, side * side, heads)
        )
        return ops.transpose(square, (2, 0, 1))

    def attention(self, x: Value, at: str, stage: int, shifted: bool) -> Value:
        """Attention inside windows of x [B, H, W, C]."""
        width, heads = self.width << stage, self.heads[stage]
        side, can_shift = self.window_of(stage, x.shape[1].__index__(), x.shape[2].__index__())
        shift = side // 2 if shifted and can_shift else 0
        windows = WindowCut(x, side, shift)
        rows, count = windows.cut(x), windows.count
        q, k, v = (
            ops.reshape(self.linear(rows, f"{at}self.{name}", width, width), (*rows.shape[:3], heads, width // heads))
            for name in ("query", "key", "value")
        )
        scale = None
        if self.is_second:
            factor = ops.exp(ops.minimum(self.param(f"{at}self.logit_scale", (heads, 1, 1)), CLOSE))
            q, k, scale = unit(q) * ops.reshape(factor, (heads, 1)), unit(k), 1.0
        # with a bias for each window, windows are heads, so that all images share it
        lead = (self.batch, count * heads) if shift else (self.batch * count, heads)
        parts = [
            ops.reshape(ops.transpose(p, (0, 1, 3, 2, 4)), (*lead, side * side, width // heads)) for p in (q, k, v)
        ]
        bias = ops.insert_axis(self.distances(f"{at}self.", side, heads, self.trained[stage]), 0)
        if shift:
            apart = constant(windows.apart()[:, None] * (FAR * 2 if self.is_second else FAR))
            bias = ops.reshape(bias + apart, (1, count * heads, side * side, side * side))
        mixed = ops.attention(*parts, bias, mask_kind="bias", layout="bhsd", scale=scale)
        mixed = ops.reshape(mixed, (self.batch, count, heads, side * side, width // heads))
        mixed = ops.reshape(ops.transpose(mixed, (0, 1, 3, 2, 4)), rows.shape)
        return windows.joined(self.linear(mixed, f"{at}output.dense", width, width))

    def block(self, x: Value, at: str, stage: int, shifted: bool) -> Value:
        sizes = self.sizes[stage]

        def norm(y: Value, name: str) -> Value:
            return self.layer_norm(y, f"{at}{name}", sizes.hidden, sizes.eps)

        if self.is_second:  # norms come after
            x = x + norm(self.attention(x, f"{at}attention.", stage, shifted), "layernorm_before")
            return x + norm(self.feed_forward(x, at, NAMES, sizes), "layernorm_after")
        x = x + self.attention(norm(x, "layernorm_before"), f"{at}attention.", stage, shifted)
        return x + self.feed_forward(norm(x, "layernorm_after"), at, NAMES, sizes)

    def merged(self, x: Value, at: str, width: int) -> Value:
        """Four neighbours as one."""
        x = padded(x, (1, 2), [x.shape[1].__index__() % 2, x.shape[2].__index__() % 2])
        x = ops.concat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        if self.is_second:
            x = self.linear(x, f"{at}reduction", 2 * width, 4 * width)
            return self.layer_norm(x, f"{at}norm", 2 * width, 1e-5)
        return self.linear(self.layer_norm(x, f"{at}norm", 4 * width, 1e-5), f"{at}reduction", 2 * width, 4 * width)

    def build(self) -> dict[str, Value]:
        c = self.width
        x = self.layer_norm(self.patches("embeddings.patch_embeddings.projection", c), "embeddings.norm", c, 1e-5)
        if self.has("embeddings.position_embeddings"):
            table = self.param("embeddings.position_embeddings", (1, self.usual[0] * self.usual[1], c))
            x = x + self.positions(ops.reshape(table, (-1, c)), 0)
        x = ops.reshape(x, (self.batch, *self.grid, c))
        for i, depth in enumerate(self.depths):
            for j in range(depth):
                x = self.block(x, f"encoder.layers.{i}.blocks.{j}.", i, j % 2 == 1)
            if i + 1 < len(self.depths):
                x = self.merged(x, f"encoder.layers.{i}.downsample.", c << i)
        width = c << (len(self.depths) - 1)
        x = self.layer_norm(ops.reshape(x, (self.batch, -1, width)), "layernorm", width, self.sizes[-1].eps)
        pooled = ops.mean(x, 1)
        return {"last_hidden_state": x, "pooler_output": pooled, **self.classified(pooled)}


def load(folder: Folder) -> ImageModel:
    """A model from a folder."""
    weights = without_prefix(folder.weights, ("swin.", "swinv2."))
    kind, depths = str(folder.settings["model_type"]), sizes_of(folder.settings, "depths", [2, 2, 6, 2])
    check_layers(kind, len(depths), weights, "encoder.layers.{}.")
    size = pair(folder.settings, "image_size", 224, most=MOST_SIDE)
    return image_model(folder, partial(SwinGraph, folder.settings, weights), "ViT", size=size)
