"""SmolVLM and Idefics 3: images are cut into squares, each seen by a ViT; neighbours are joined into one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from strata.core import Dim
from strata.errors import FileError, ShapeError
from strata.mir import Value
from strata.models.base import Folder
from strata.models.blocks.patches import PatchBuilder
from strata.models.blocks.transformer import LayerNames
from strata.models.config_values import mapping, whole
from strata.models.decoder_config import FAMILIES, from_json
from strata.models.tokenizer import folder_tokenizer
from strata.models.vision.clip_text import NAMES, TowerConfig
from strata.models.vision.images import ImageSettings, in_squares, resize, with_longest
from strata.models.vision.language import ImageDecoder, ImageDecoderGraph, ImageTokens
from strata.models.vision.model import ImageModel
from strata.models.vision.processors import HALF, processor_settings
from strata.models.weights import Weights, check_layers, ops, without_prefix

VISION = LayerNames(at="vision_model.encoder.layers.{}.", **NAMES)
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"  # the names of tokens around the squares of an image


class SquareGraph(PatchBuilder):
    """Builds the graph from squares to vectors of the decoder."""

    def __init__(
        self, config: TowerConfig, factor: int, hidden: int, weights: Weights, batch: Dim, size: tuple[int, int]
    ) -> None:
        super().__init__("smolvlm", weights, batch, size, config.patch)
        self.config, self.factor, self.hidden = config, factor, hidden

    def build(self) -> dict[str, Value]:
        c, h, at, f = self.config, self.config.sizes.hidden, "vision_model.", self.factor
        side = c.image[0] // c.patch[0]
        table = self.param(f"{at}embeddings.position_embedding.weight", (side * side, h))
        x = self.patches(f"{at}embeddings.patch_embedding", h) + ops.take(table, _places(self.grid, side), axis=0)
        x = self.layer_norm(self.stack(x, VISION, c.sizes), f"{at}post_layernorm", h, c.sizes.eps)
        high, wide = self.grid[0] // f, self.grid[1] // f
        cut = ops.transpose(ops.reshape(x, (self.batch, high, f, wide, f, h)), (0, 1, 3, 2, 4, 5))
        flat = ops.reshape(cut, (self.batch, high * wide, f * f * h))
        return {"image_rows": self.linear(flat, "connector.modality_projection.proj", self.hidden, f * f * h)}


def _places(grid: tuple[int, int], side: int) -> np.ndarray:
    """Which of the learned positions each patch has, by where it is in the image, i32[patches]."""
    edges = np.arange(1 / side, 1.0, 1 / side, dtype=np.float32)
    parts = [
        np.searchsorted(edges, np.minimum(np.arange(n, dtype=np.float32) * np.float32(1 / n), 1 - 1e-6), side="right")
        for n in grid
    ]
    return (parts[0][:, None] * side + parts[1]).reshape(-1).astype(np.int32)


class SquareEncoder:
    """The image encoder of SmolVLM."""

    def __init__(self, folder: Folder, weights: Weights, hidden: int) -> None:
        found = folder.settings
        config = TowerConfig.from_json(
            {"hidden_act": "gelu_pytorch_tanh", **mapping(found, "vision_config")}, is_siglip=True, is_text=False,
            projection=0,
        )  # fmt: skip
        self.token, factor = whole(found, "image_token_id", least=0), whole(found, "scale_factor", 2)
        if config.image[0] // config.patch[0] % factor or config.image[0] != config.image[1]:
            raise FileError(f"smolvlm: images of {config.image} in patches of {config.patch} are not divided by "
                            f"{factor}", code="F140")  # fmt: skip
        check_layers("smolvlm", config.sizes.layers, weights, VISION.at)
        settings = {"resample": 1, **HALF, **processor_settings(folder.path)}
        self.side = whole(mapping(settings, "max_image_size"), "longest_edge", config.image[0])
        self.edge = whole(mapping(settings, "size"), "longest_edge", 4 * self.side)
        self.splits, self.resizes = (settings.get(k, True) for k in ("do_image_splitting", "do_resize"))
        if self.side != config.image[0]:
            raise FileError(f"smolvlm: squares of {self.side} pixels for a model of {config.image[0]}", code="F140")
        plain = ImageSettings.from_json({**settings, "do_resize": False, "do_center_crop": False})

        build = partial(SquareGraph, config, factor, hidden, weights)
        self.model = ImageModel(build, plain, size=config.image, vector="image_rows", device=folder.device)
        self.count = (config.image[0] // config.patch[0] // factor) ** 2

    def check(self) -> None:
        self.model.check()

    def encode(self, image: np.ndarray, name: str) -> ImageTokens:
        squares, rows, columns = self.squares(image)
        vectors = self.model._results(squares, "image_rows")
        text = "".join(
            "".join(f"{FAKE}<row_{r + 1}_col_{c + 1}>{name * self.count}" for c in range(columns)) + "\n"
            for r in range(rows)
        )
        text += ("\n" if rows else "") + f"{FAKE}{GLOBAL}{name * self.count}{FAKE}"
        return ImageTokens(vectors.reshape(-1, vectors.shape[-1]), text)

    def squares(self, image: np.ndarray) -> tuple[list[np.ndarray], int, int]:
        """The squares of an image and then the whole of it, with the numbers of rows and columns."""
        method, side = self.model.settings.resample, self.side
        if self.resizes:
            image = resize(image, *with_longest(image.shape, self.edge), method)
        if self.splits:
            image = resize(image, *in_squares(image.shape, side), method)
        rows, columns = image.shape[0] // side, image.shape[1] // side
        if not self.splits or (rows, columns) == (1, 1):
            return [resize(image, side, side, method)], 0, 0
        cut = [image[r * side : (r + 1) * side, c * side : (c + 1) * side] for r in range(rows) for c in range(columns)]
        return [*cut, resize(image, side, side, method)], rows, columns

    def rows(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        pixels = np.asarray(arrays.get("pixel_values"), np.float32)
        if set(arrays) != {"pixel_values"} or pixels.ndim != 5 or pixels.shape[2:] != (3, self.side, self.side):
            raise ShapeError(f"run: pixel_values are f32[1, squares, 3, {self.side}, {self.side}], got {pixels.shape}",
                             code="S600")  # fmt: skip
        vectors = self.model.run(pixel_values=pixels.reshape(-1, *pixels.shape[2:]))["image_rows"]
        return vectors.reshape(-1, vectors.shape[-1]), []

    def positions(self, ids: np.ndarray, grids: Sequence[tuple[int, int]]) -> None:
        """Tokens of images count as any other."""


def load(folder: Folder) -> ImageDecoder:
    """A model from a folder."""
    inner = mapping(folder.settings, "text_config")
    if inner.get("model_type", "llama") not in FAMILIES:
        raise FileError(f"smolvlm: a decoder of the kind {inner.get('model_type')!r} is not known here", code="F144")
    tied = folder.settings.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))
    config = replace(from_json({"model_type": "llama", **inner}), is_tied=bool(tied))
    weights = without_prefix(folder.weights, ("model.text_model.", "model."))
    config.check(weights)

    encoder = SquareEncoder(folder, weights, config.hidden)
    build, tokenizer = partial(ImageDecoderGraph, config, weights), partial(folder_tokenizer, folder.path)
    return ImageDecoder(config, build, tokenizer, encoder, device=folder.device, context=folder.context)
