"""CLIP and SigLIP: images and texts as vectors of one space."""

from __future__ import annotations

from functools import partial

import numpy as np

from strata.core import Dim
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.patches import PatchBuilder
from strata.models.blocks.transformer import LayerNames
from strata.models.config_values import mapping, whole
from strata.models.tokenizer import folder_tokenizer
from strata.models.vision.clip_text import NAMES, TEXT, TextTowerGraph, TowerConfig
from strata.models.vision.images import ImageSettings
from strata.models.vision.model import ImageModel
from strata.models.vision.towers import ImageTextModel
from strata.models.weights import Weights, check_layers, ops

VISION = LayerNames(at="vision_model.encoder.layers.{}.", **NAMES)


class ImageTower(PatchBuilder):
    """Builds the graph of the side of images."""

    def __init__(self, config: TowerConfig, weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        super().__init__("siglip" if config.is_siglip else "clip", weights, batch, size, config.patch)
        self.config = config

    def build(self) -> dict[str, Value]:
        c, h, at = self.config, self.config.sizes.hidden, "vision_model."
        high, wide = c.image[0] // c.patch[0], c.image[1] // c.patch[1]
        first = 0 if c.is_siglip else 1
        x = self.patches(f"{at}embeddings.patch_embedding", h)
        if first:
            token = ops.reshape(self.param(f"{at}embeddings.class_embedding", (h,)), (1, 1, h))
            x = ops.concat([ops.broadcast_to(token, (self.batch, 1, h)), x], 1)
        x = x + self.positions(self.param(f"{at}embeddings.position_embedding.weight", (high * wide + first, h)), first)
        if first:
            x = self.layer_norm(x, f"{at}pre_layrnorm", h, c.sizes.eps)
        x = self.stack(x, VISION, c.sizes)
        if not c.is_siglip:
            pooled = self.layer_norm(self.row(x, 0), f"{at}post_layernorm", h, c.sizes.eps)
            results = {"last_hidden_state": x, "pooler_output": pooled}
            if self.has("visual_projection.weight"):
                results["image_embeds"] = self.linear(pooled, "visual_projection", c.projection, h)
            return results
        x = self.layer_norm(x, f"{at}post_layernorm", h, c.sizes.eps)
        results = {"last_hidden_state": x}
        if self.has(f"{at}head.probe"):
            results["pooler_output"] = results["image_embeds"] = self._asked(x, f"{at}head.")
        return results

    def _asked(self, x: Value, at: str) -> Value:
        """What one learned query reads from the patches."""
        s, h = self.config.sizes, self.config.sizes.hidden
        weight = self.param(f"{at}attention.in_proj_weight", (3 * h, h))
        bias = self.param(f"{at}attention.in_proj_bias", (3 * h,))
        parts = []
        for i, source in enumerate((self.rows(f"{at}probe", 1, h), x, x)):
            w = ops.transpose(ops.narrow(weight, 0, i * h, h), (1, 0))
            parts.append(ops.matmul(source, w) + ops.narrow(bias, 0, i * h, h))
        read = ops.attention(*parts, num_heads=s.heads, kv_heads=s.heads, layout="bsd")
        read = self.linear(read, f"{at}attention.out_proj", h, h)
        more = self.feed_forward(self.layer_norm(read, f"{at}layernorm", h, s.eps), at, VISION, s)
        return self.row(read + more, 0)


def load(folder: Folder) -> ImageModel:
    """A model of both sides, or of images alone, from a folder."""
    found, kind = folder.settings, str(folder.settings["model_type"])
    is_siglip, is_alone = kind.startswith("siglip"), kind.endswith("vision_model")
    projection = 0 if is_siglip else whole(found, "projection_dim", 512)
    image = TowerConfig.from_json(
        found if is_alone else mapping(found, "vision_config"),
        is_siglip=is_siglip,
        is_text=False,
        projection=projection,
    )
    weights = folder.weights
    if not any(name.startswith("vision_model.") for name in weights):  # a side alone may be saved without its name
        weights = {name if name.startswith("visual_") else f"vision_model.{name}": w for name, w in weights.items()}
    check_layers(kind, image.sizes.layers, weights, VISION.at)

    build = partial(ImageTower, image, weights)
    settings = ImageSettings.from_folder(folder.path, "Siglip" if is_siglip else "CLIP")
    vector = "image_embeds" if is_siglip or "visual_projection.weight" in weights else "pooler_output"
    if is_alone:
        return ImageModel(build, settings, size=image.image, vector=vector, device=folder.device)
    inner = mapping(found, "text_config")
    text = TowerConfig.from_json(inner, is_siglip=is_siglip, is_text=True, projection=projection)
    check_layers(kind, text.sizes.layers, weights, TEXT.at)
    ends = whole(inner, "eos_token_id", 1 if is_siglip else 49407, least=0)

    def side() -> tuple[TextTowerGraph, dict[str, Value]]:
        graph = TextTowerGraph(text, weights)
        return graph, graph.build()

    def last(ids: np.ndarray) -> np.ndarray:
        if is_siglip:
            return np.full(len(ids), ids.shape[1] - 1, np.int32)
        # old configurations have a wrong end of text, 2; it is the largest id of a row
        return (ids if ends == 2 else ids == ends).argmax(1).astype(np.int32)

    scale, shift = (_number(weights, name) for name in ("logit_scale", "logit_bias"))
    return ImageTextModel(
        build, settings, side, last, lambda: folder_tokenizer(folder.path), size=image.image, device=folder.device,
        scale=float(np.exp(scale)), shift=shift,
        length=text.positions, pad=whole(inner, "pad_token_id", 1, least=0) if is_siglip else None,
    )  # fmt: skip


def _number(weights: Weights, name: str) -> float:
    """A weight that is one number; 0 where there is none."""
    found = weights.get(name)
    return 0.0 if found is None else float(np.asarray(found).astype(np.float32).reshape(-1)[0])
