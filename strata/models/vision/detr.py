"""DETR: a ResNet, a transformer over its last stage, and queries that each find an object or none."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from strata.core import Dim
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.base import Folder
from strata.models.blocks.positions import sine_places
from strata.models.blocks.transformer import LayerNames, half_sizes
from strata.models.config_values import mapping, text, whole
from strata.models.vision.detection import OWN, DetectionModel, DetectorGraph
from strata.models.vision.images import ImageSettings
from strata.models.vision.model import labels_of
from strata.models.weights import Weights, check_layers, ops, without_prefix

BACKBONE = "backbone.conv_encoder.model."
CROSS = LayerNames(at="", q="encoder_attn.q_proj", k="encoder_attn.k_proj", v="encoder_attn.v_proj",
                   o="encoder_attn.out_proj")  # fmt: skip
TIMM = (  # how timm calls the weights of a ResNet, and how Hugging Face does
    (r"conv1\.", r"embedder.embedder.convolution."), (r"bn1\.", r"embedder.embedder.normalization."),
    (r"layer(\d+)\.(\d+)\.conv(\d+)\.", r"encoder.stages.{0}.layers.{1}.layer.{2}.convolution."),
    (r"layer(\d+)\.(\d+)\.bn(\d+)\.", r"encoder.stages.{0}.layers.{1}.layer.{2}.normalization."),
    (r"layer(\d+)\.(\d+)\.downsample\.0\.", r"encoder.stages.{0}.layers.{1}.shortcut.convolution."),
    (r"layer(\d+)\.(\d+)\.downsample\.1\.", r"encoder.stages.{0}.layers.{1}.shortcut.normalization."),
)  # fmt: skip


class DetrGraph(DetectorGraph):
    """Builds the graph of a DETR."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__(found, weights, batch, size)
        self.queries = whole(found, "num_queries", 100)
        self.encoder, self.decoder = half_sizes(found, layers=6, heads=8, inner=2048, hidden=256, activation="relu")
        self.norms_each = bool(found.get("auxiliary_loss"))  # the last norm of the decoder follows each of its layers
        self.is_learned = text(found, "position_embedding_type", "sine") == "learned"

    def places(self, high: int, wide: int) -> Value:
        """The places of pixels, [1, H · W, features]."""
        half = self.encoder.hidden // 2
        if not self.is_learned:
            return constant(sine_places(high, wide, half)[None])
        at = next((n for n in ("position_embedding.", "backbone.position_embedding.") if self.has(
            f"{n}row_embeddings.weight")), "position_embedding.")  # fmt: skip
        rows, columns = (self.param(f"{at}{n}_embeddings.weight", (50, half)) for n in ("row", "column"))
        if max(high, wide) > 50:
            raise FileError(
                f"detr: images of {self.pixels.shape[2:]} have more than the 50 learned places a side", code="F140"
            )
        across = ops.broadcast_to(ops.reshape(ops.narrow(columns, 0, 0, wide), (1, wide, half)), (high, wide, half))
        down = ops.broadcast_to(ops.reshape(ops.narrow(rows, 0, 0, high), (high, 1, half)), (high, wide, half))
        return ops.reshape(ops.concat([across, down], -1), (1, high * wide, 2 * half))

    def build(self) -> dict[str, Value]:
        sizes, h = self.encoder, self.encoder.hidden
        seen = self.conv(self.stages(BACKBONE)[self.taken[-1]], "input_projection", h, 1)
        self.check()  # places are made for so many features
        place = self.places(*(d.__index__() for d in seen.shape[2:]))
        x = self.rows(seen)
        for i in range(sizes.layers):
            x = self.encoded(x, f"encoder.layers.{i}.", sizes, place)
        memory, sizes = x, self.decoder
        asked = ops.reshape(self.param("query_position_embeddings.weight", (self.queries, h)), (1, self.queries, h))
        x = ops.broadcast_to(asked * 0.0, (self.batch, self.queries, h))
        for i in range(sizes.layers):
            at = f"decoder.layers.{i}."
            x = self.normed_sum(x, self.placed(x, at, OWN, sizes, place=asked), at + OWN.norm1, sizes)
            read = self.placed(x, at, CROSS, sizes, place=asked, memory=memory, memory_place=place)
            x = self.normed_sum(x, read, f"{at}encoder_attn_layer_norm", sizes)
            x = self.normed_sum(x, self.feed_forward(x, at, OWN, sizes), at + OWN.norm2, sizes)
            x = self.layer_norm(x, "decoder.layernorm", h, sizes.eps) if self.norms_each else x
        x = self.layer_norm(x, "decoder.layernorm", h, sizes.eps)
        results = {"last_hidden_state": x, **self.classified(x, "class_labels_classifier")}
        if self.has("bbox_predictor.layers.0.weight"):
            results["pred_boxes"] = ops.sigmoid(self.network(x, "bbox_predictor", (h, h, h, 4)))
        return results


def hugging_names(weights: Weights) -> dict[str, Any]:
    """The weights of a ResNet by timm under Hugging Face's names."""
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        inner = name.removeprefix(BACKBONE)
        for pattern, new in TIMM if inner != name else ():
            if match := re.match(pattern, inner):
                stage, block, number = (int(n) for n in (*match.groups(), 0, 0, 0)[:3])
                name = BACKBONE + new.format(stage - 1, block, number - 1) + inner[match.end() :]  # noqa: PLW2901
                break
        found[name] = tensor
    return found


def resnet_settings(weights: Weights) -> dict[str, Any]:
    """The sizes of a ResNet by its weights, where the configuration has no more than its name."""
    at = re.compile(re.escape(BACKBONE) + r"encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.convolution\.weight")
    blocks = {tuple(map(int, m.groups())): w.shape[0] for n, w in weights.items() if (m := at.fullmatch(n))}
    first = weights.get(f"{BACKBONE}embedder.embedder.convolution.weight")
    if first is None or not blocks:
        raise FileError("detr: the weights have no ResNet at 'backbone.conv_encoder.model'", code="F142")
    count, deep = 1 + max(i for i, _, _ in blocks), max(k for *_, k in blocks)
    return {
        "embedding_size": int(first.shape[0]), "layer_type": "bottleneck" if deep == 2 else "basic",
        "depths": [len({j for i, j, _ in blocks if i == stage}) for stage in range(count)],
        "hidden_sizes": [int(blocks.get((stage, 0, deep), 0)) for stage in range(count)],
    }  # fmt: skip


def load(folder: Folder) -> DetectionModel:
    """A model from a folder."""
    weights, found = hugging_names(without_prefix(folder.weights, ("model.",))), dict(folder.settings)
    if found.get("dilation"):
        raise FileError("detr: a dilated backbone (dilation = true) is not read", code="F140")
    if mapping(found, "backbone_config").get("model_type") != "resnet":
        found["backbone_config"] = resnet_settings(weights)
    for half in ("encoder", "decoder"):
        check_layers("detr", whole(found, f"{half}_layers", 6), weights, f"{half}.layers.{{}}.")

    settings = ImageSettings.from_folder(folder.path, "Detr")
    return DetectionModel(partial(DetrGraph, found, weights), settings, labels=labels_of(found), device=folder.device)
