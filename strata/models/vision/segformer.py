"""SegFormer: four stages of attention to a coarser image, and a label for every pixel."""

from __future__ import annotations

from functools import partial
from typing import Any

from strata.core import Dim
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.convolution import ConvolutionBuilder, sizes_of, stages_of
from strata.models.config_values import whole
from strata.models.vision.model import ImageModel, image_model
from strata.models.weights import Weights, check_layers, ops, without_prefix

EPS = 1e-5


class SegformerGraph(ConvolutionBuilder):
    """Builds the graph of a SegFormer."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__("segformer", weights, batch, size)
        usual = {
            "hidden_sizes": [32, 64, 160, 256], "depths": [2, 2, 2, 2], "sr_ratios": [8, 4, 2, 1],
            "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2], "num_attention_heads": [1, 2, 5, 8],
            "mlp_ratios": [4, 4, 4, 4],
        }  # fmt: skip
        self.stages = stages_of(**{key: sizes_of(found, key, default) for key, default in usual.items()})
        self.activation, self.width = activation_of(found), whole(found, "decoder_hidden_size", 256)

    def attention(self, x: Value, at: str, width: int, heads: int, ratio: int, size: tuple[Dim, Dim]) -> Value:
        """Attention of all pixels to those of a coarser image."""
        inner, source = width // heads * heads, x
        if ratio > 1:
            coarse = self.conv(self.image(x, *size), f"{at}self.sr", width, ratio, stride=ratio)
            source = self.layer_norm(self.rows(coarse), f"{at}self.layer_norm", width, EPS)
        q = self.linear(x, f"{at}self.query", inner, width)
        k, v = (self.linear(source, f"{at}self.{name}", inner, width) for name in ("key", "value"))
        mixed = ops.attention(q, k, v, num_heads=heads, kv_heads=heads, layout="bsd")
        return self.linear(mixed, f"{at}output.dense", width, inner)

    def feed_forward_of(self, x: Value, at: str, width: int, inner: int, size: tuple[Dim, Dim]) -> Value:
        y = self.linear(x, f"{at}dense1", inner, width)
        y = self.conv(self.image(y, *size), f"{at}dwconv.dwconv", inner, 3, padding=1, groups=inner)
        return self.linear(activated(self.rows(y), self.activation), f"{at}dense2", width, inner)

    def build(self) -> dict[str, Value]:
        x, found = self.pixels, []
        for i, (width, depth, ratio, patch, stride, heads, wider) in enumerate(self.stages):
            x = self.conv(x, f"encoder.patch_embeddings.{i}.proj", width, patch, stride=stride, padding=patch // 2)
            size = (x.shape[2], x.shape[3])
            y = self.layer_norm(self.rows(x), f"encoder.patch_embeddings.{i}.layer_norm", width, EPS)
            for j in range(depth):
                at = f"encoder.block.{i}.{j}."
                y = y + self.attention(
                    self.layer_norm(y, f"{at}layer_norm_1", width, EPS), f"{at}attention.", width, heads, ratio, size
                )
                y = y + self.feed_forward_of(
                    self.layer_norm(y, f"{at}layer_norm_2", width, EPS), f"{at}mlp.", width, wider * width, size
                )
            x = self.image(self.layer_norm(y, f"encoder.layer_norm.{i}", width, EPS), *size)
            found.append(x)
        pooled = ops.mean(self.rows(x), 1)
        results = {"last_hidden_state": x, "pooler_output": pooled, **self.classified(pooled)}
        return results | (self.segmented(found) if self.has("decode_head.linear_fuse.weight") else {})

    def segmented(self, stages: list[Value]) -> dict[str, Value]:
        """Logits of labels for each pixel of the first stage."""
        at, size, parts = "decode_head.", stages[0].shape[2:], []
        for i, x in enumerate(stages):
            y = self.linear(self.rows(x), f"{at}linear_c.{i}.proj", self.width, x.shape[1].__index__())
            sizes = [d.__index__() for d in size]
            parts.append(ops.resize(self.image(y, *x.shape[2:]), sizes=sizes, axes=(2, 3), mode="linear"))
        y = self.conv(ops.concat(parts[::-1], 1), f"{at}linear_fuse", self.width, 1)
        y = ops.relu(self.batch_norm(y, f"{at}batch_norm"))
        return {"logits": self.conv(y, f"{at}classifier", int(self.weights[f"{at}classifier.weight"].shape[0]), 1)}


def load(folder: Folder) -> ImageModel:
    """A model from a folder."""
    weights = without_prefix(folder.weights, ("segformer.",))
    check_layers("segformer", len(sizes_of(folder.settings, "depths", [2] * 4)), weights, "encoder.block.{}.")
    return image_model(folder, partial(SegformerGraph, folder.settings, weights), "Segformer")
