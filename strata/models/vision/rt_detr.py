"""RT-DETR: a ResNet, three sizes of features that are mixed, and queries that look at points around their boxes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from strata.core import Dim
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.convolution import sizes_of
from strata.models.blocks.positions import first_boxes, grid_places, sampled
from strata.models.blocks.transformer import LayerSizes
from strata.models.config_values import mapping, real, refuse, whole, wholes
from strata.models.vision.detection import OWN, DetectionModel, DetectorGraph
from strata.models.vision.images import ImageSettings
from strata.models.vision.model import labels_of
from strata.models.weights import Weights, check_layers, ops, without_prefix

BLOCKS = 3  # of a mix of two features


class RtDetrGraph(DetectorGraph):
    """Builds the graph of an RT-DETR."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(found, weights, batch, size)
        self.wide, self.hidden = whole(found, "encoder_hidden_dim", 256), whole(found, "d_model", 256)
        eps, heads = real(found, "layer_norm_eps", 1e-5), whole(found, "decoder_attention_heads", 8)
        self.encoder = LayerSizes(
            hidden=self.wide, layers=whole(found, "encoder_layers", 1, least=0),
            heads=whole(found, "encoder_attention_heads", 8), inner=whole(found, "encoder_ffn_dim", 1024), eps=eps,
            activation=activation_of(found, "encoder_activation_function"),
        )  # fmt: skip
        self.decoder = LayerSizes(
            hidden=self.hidden, layers=whole(found, "decoder_layers", 6), heads=heads, eps=eps,
            inner=whole(found, "decoder_ffn_dim", 1024),
            activation=activation_of(found, "decoder_activation_function", "relu"),
        )  # fmt: skip
        self.queries, self.points = whole(found, "num_queries", 300), whole(found, "decoder_n_points", 4)
        self.mixed = activation_of(found, "activation_function", "silu")
        self.inner = int(self.wide * real(found, "hidden_expansion", 1.0))
        self.attended_levels = wholes(found, "encode_proj_layers") or (2,)
        if max(self.attended_levels) >= len(self.taken):
            raise FileError(f"the configuration has {len(self.taken)} features, encode_proj_layers = "
                            f"{list(self.attended_levels)}", code="F140")  # fmt: skip
        self.levels, self.norm_eps = whole(found, "num_feature_levels", 3), real(found, "batch_norm_eps", 1e-5)
        self.heat = whole(found, "positional_encoding_temperature", 10000)
        self.labels = int(weights["enc_score_head.weight"].shape[0]) if "enc_score_head.weight" in weights else 1

    def stem(self, at: str) -> Value:
        x = self.pixels
        for i, width in enumerate((self.first // 2, self.first // 2, self.first)):
            x = self.step(x, f"{at}embedder.embedder.{i}", width, 3, 1 if i else 2)
        return x

    def shortcut(self, x: Value, at: str, channels: int, stride: int) -> Value:
        if stride == 2 if self.is_narrow else x.shape[1] != channels:  # its pixels are averaged first
            return self.step(ops.avg_pool(x, 2, 2, 0, ceil_mode=True), f"{at}.shortcut.1", channels, 1, active=False)
        is_first = at.endswith("layers.0")
        return super().shortcut(x, at, channels, stride) if self.is_narrow or not is_first else self.step(
            x, f"{at}.shortcut", channels, 1, stride, active=False)  # fmt: skip

    def normed(self, x: Value, at: str, channels: int, kernel: int, stride: int = 1, *, active: bool = True) -> Value:
        """A convolution with a norm, of the part that mixes features."""
        y = self.conv(x, f"{at}.conv", channels, kernel, stride=stride, padding=(kernel - 1) // 2)
        y = self.batch_norm(y, f"{at}.norm", self.norm_eps)
        return activated(y, self.mixed) if active else y

    def joined(self, a: Value, b: Value, at: str) -> Value:
        """Two features as one."""
        both = ops.concat([a, b], 1)
        x = self.normed(both, f"{at}.conv1", self.inner, 1)
        for i in range(BLOCKS):
            kernels = ((f"{at}.bottlenecks.{i}.conv1", 3), (f"{at}.bottlenecks.{i}.conv2", 1))
            parts = [self.normed(x, name, self.inner, kernel, active=False) for name, kernel in kernels]
            x = activated(parts[0] + parts[1], self.mixed)
        x = x + self.normed(both, f"{at}.conv2", self.inner, 1)
        return self.normed(x, f"{at}.conv3", self.wide, 1) if self.inner != self.wide else x

    def features(self) -> list[Value]:
        """The features of three sizes or more, finest first."""
        stages, found = self.stages("backbone.model."), []
        for i, stage in enumerate(self.taken):
            x = self.conv(stages[stage], f"encoder_input_proj.{i}.0", self.wide, 1)
            found.append(self.batch_norm(x, f"encoder_input_proj.{i}.1"))
        self.check()  # places are made for so many features
        for i, level in enumerate(self.attended_levels if self.encoder.layers else ()):
            high, wide = (d.__index__() for d in found[level].shape[2:])
            x, place = self.rows(found[level]), constant(grid_places(high, wide, self.wide, self.heat)[None])
            for j in range(self.encoder.layers):
                x = self.encoded(x, f"encoder.encoder.{i}.layers.{j}.", self.encoder, place)
            found[level] = self.image(x, high, wide)
        down = [found[-1]]
        for i, fine in enumerate(found[-2::-1]):
            down[-1] = self.normed(down[-1], f"encoder.lateral_convs.{i}", self.wide, 1)
            sizes = [2 * d.__index__() for d in down[-1].shape[2:]]
            larger = ops.resize(down[-1], sizes=sizes, axes=(2, 3), coordinate_transformation_mode="asymmetric",
                                nearest_mode="floor")  # fmt: skip
            down.append(self.joined(larger, fine, f"encoder.fpn_blocks.{i}"))
        up = [down[-1]]
        for i, coarse in enumerate(down[-2::-1]):
            smaller = self.normed(up[-1], f"encoder.downsample_convs.{i}", self.wide, 3, 2)
            up.append(self.joined(smaller, coarse, f"encoder.pan_blocks.{i}"))
        return [self.projected(up[min(i, len(up) - 1)], i, is_more=i >= len(up)) for i in range(self.levels)]

    def projected(self, x: Value, level: int, *, is_more: bool) -> Value:
        at, more = f"decoder_input_proj.{level}", {"stride": 2, "padding": 1} if is_more else {}
        return self.batch_norm(self.conv(x, f"{at}.0", self.hidden, 3 if is_more else 1, **more), f"{at}.1",
                               self.norm_eps)  # fmt: skip

    def looked(self, x: Value, at: str, memory: list[Value], boxes: Value) -> Value:
        """What queries [B, Q, H] read at a few points around their boxes [B, Q, 4], of the features of each size."""
        s, count = self.decoder, self.levels * self.points
        shape = (self.batch, self.queries, s.heads, count)
        offsets = ops.reshape(self.linear(x, f"{at}sampling_offsets", s.heads * count * 2, s.hidden), (*shape, 2))
        share = ops.reshape(self.linear(x, f"{at}attention_weights", s.heads * count, s.hidden), shape)
        around = ops.reshape(boxes, (self.batch, self.queries, 1, 1, 4))
        centre, size = ops.narrow(around, -1, 0, 2), ops.narrow(around, -1, 2, 2)
        values = [
            self.image(self.linear(self.rows(level), f"{at}value_proj", s.hidden, s.hidden), *level.shape[2:])
            for level in memory
        ]
        read = sampled(values, centre + offsets / float(self.points) * size * 0.5, ops.softmax(share, -1))
        return self.linear(read, f"{at}output_proj", s.hidden, s.hidden)

    def build(self) -> dict[str, Value]:
        s, h, memory = self.decoder, self.hidden, self.features()
        anchors, is_inside = first_boxes([tuple(d.__index__() for d in m.shape[2:]) for m in memory])
        rows = ops.concat([self.rows(m) for m in memory], 1) * constant(is_inside.astype(np.float32))
        rows = self.layer_norm(self.linear(rows, "enc_output.0", h, h), "enc_output.1", h, s.eps)
        scores = ops.reduce_max(self.linear(rows, "enc_score_head", self.labels, h), axis=-1)
        boxes = self.network(rows, "enc_bbox_head", (h, h, h, 4)) + constant(anchors)
        best = ops.insert_axis(ops.top_k(scores, self.queries)[1], -1)

        def chosen(x: Value) -> Value:
            width = x.shape[-1]
            return ops.take_along_axis(x, ops.broadcast_to(best, (self.batch, self.queries, width)), axis=1)

        boxes = ops.sigmoid(chosen(boxes))
        x = self.rows_of_queries() if self.has("weight_embedding.weight") else chosen(rows)
        for i in range(s.layers):
            at, place = f"decoder.layers.{i}.", self.network(boxes, "decoder.query_pos_head", (4, 2 * h, h))
            x = self.normed_sum(x, self.placed(x, at, OWN, s, place=place), at + OWN.norm1, s)
            read = self.looked(x + place, f"{at}encoder_attn.", memory, boxes)
            x = self.normed_sum(x, read, f"{at}encoder_attn_layer_norm", s)
            x = self.normed_sum(x, self.feed_forward(x, at, OWN, s), at + OWN.norm2, s)
            change = self.network(x, f"decoder.bbox_embed.{i}", (h, h, h, 4))
            boxes = ops.sigmoid(change + ops.log(ops.clip(boxes, 1e-5, 1.0) / ops.clip(1.0 - boxes, 1e-5, 1.0)))
        logits = self.linear(x, f"decoder.class_embed.{s.layers - 1}", self.labels, h)
        return {"logits": logits, "pred_boxes": boxes, "last_hidden_state": x}

    def rows_of_queries(self) -> Value:
        table = self.param("weight_embedding.weight", (self.queries, self.hidden))
        return ops.broadcast_to(ops.insert_axis(table, 0), (self.batch, self.queries, self.hidden))


def load(folder: Folder) -> DetectionModel:
    """A model from a folder."""
    weights, found = without_prefix(folder.weights, ("model.",)), folder.settings
    for key, usual, at in (
        ("decoder_layers", 6, "decoder.layers.{}."), ("encoder_layers", 1, "encoder.encoder.0.layers.{}."),
        ("num_feature_levels", 3, "decoder_input_proj.{}."),
    ):  # fmt: skip
        check_layers("rt_detr", whole(found, key, usual, least=0), weights, at)
    sizes_of(mapping(found, "backbone_config"), "depths", [3, 4, 6, 3])

    refuse(found, "normalize_before", "eval_size")
    settings = ImageSettings.from_folder(folder.path, "RTDetr")
    made = DetectionModel(partial(RtDetrGraph, found, weights), settings, labels=labels_of(found), device=folder.device)
    made.is_focal = bool(found.get("use_focal_loss", True))
    return made
