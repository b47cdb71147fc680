"""Qwen2-VL and Qwen2.5-VL: images of any size in patches with rows and columns, four neighbours to a vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from strata.errors import FileError, OptionError, ShapeError
from strata.models.base import Folder, compile_built
from strata.models.config_values import mapping, whole, wholes
from strata.models.decoder_config import from_json
from strata.models.tokenizer import folder_tokenizer
from strata.models.vision.images import ImageSettings, resize
from strata.models.vision.language import ImageDecoder, ImageTokens, MropeConfig, MropeGraph
from strata.models.vision.processors import BICUBIC, OPENAI, processor_settings
from strata.models.vision.qwen_tower import PatchGraph, PatchSizes
from strata.models.weights import Weights, check_layers, without_prefix
from strata.runtime import CompiledGraph

LEAST, MOST = 56 * 56, 28 * 28 * 1280  # pixels of an image, where a folder says nothing
LONGEST = 200  # times its width that an image may be high


class PatchEncoder:
    """The image encoder of Qwen2-VL."""

    def __init__(self, folder: Folder, weights: Weights, sizes: PatchSizes) -> None:
        self.token, self.sizes, self.device = whole(folder.settings, "image_token_id", 151655), sizes, folder.device
        check_layers("qwen2_vl", sizes.layers, weights, "blocks.{}.")
        found = {**OPENAI, **BICUBIC, **processor_settings(folder.path)}
        bounds = mapping(found, "size")
        self.least = whole(found, "min_pixels", whole(bounds, "shortest_edge", LEAST))
        self.most = whole(found, "max_pixels", whole(bounds, "longest_edge", MOST))
        self.settings = ImageSettings.from_json({**found, "do_resize": False, "do_center_crop": False})
        self._weights = weights
        self._graph: CompiledGraph | None = None

    def check(self) -> None:
        made = PatchGraph(self.sizes, self._weights)
        made.build()
        made.check()

    def encode(self, image: np.ndarray, name: str) -> ImageTokens:
        s, (height, width) = self.sizes, image.shape[:2]
        high, wide = self.fitted(height, width)
        pixels = self.settings.pixels(resize(image, high, wide, self.settings.resample))
        high, wide, m, p = high // s.patch, wide // s.patch, s.merge, s.patch
        cut = pixels.reshape(3, high // m, m, p, wide // m, m, p).transpose(1, 4, 2, 5, 0, 3, 6)
        twice = np.repeat(cut[:, :, :, :, :, None], s.times, 5).reshape(high * wide, -1)  # an image stands still
        rows = self.vectors(np.ascontiguousarray(twice), high, wide)
        return ImageTokens(rows, name * len(rows), (high // m, wide // m))

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The size near this one that patches divide, with no more and no fewer pixels than are allowed."""
        unit = self.sizes.patch * self.sizes.merge
        if max(height, width) > LONGEST * min(height, width):
            raise OptionError(f"an image of {height} x {width} is longer than {LONGEST} times its width", code="O606")
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.most:
            by = math.sqrt(height * width / self.most)
            return tuple(max(unit, math.floor(n / by / unit) * unit) for n in (height, width))  # type: ignore[return-value]
        if high * wide < self.least:
            by = math.sqrt(self.least / (height * width))
            return tuple(math.ceil(n * by / unit) * unit for n in (height, width))  # type: ignore[return-value]
        return high, wide

    def vectors(self, patches: np.ndarray, high: int, wide: int) -> np.ndarray:
        """The vectors of the patches of one image, a grid of so many rows and columns."""
        s = self.sizes
        rows, columns = np.mgrid[:high, :wide]

        def merged(x: np.ndarray) -> np.ndarray:  # neighbours that become one vector stand together
            return x.reshape(high // s.merge, s.merge, wide // s.merge, s.merge).transpose(0, 2, 1, 3).reshape(-1)

        quarter = s.width // s.heads // 4
        rates = 1.0 / s.theta ** (np.arange(quarter) / quarter)
        angles = np.concatenate([np.outer(merged(rows), rates), np.outer(merged(columns), rates)], 1)
        feeds = {"patches": patches, "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        if s.window:
            side = s.window // s.patch // s.merge * s.merge
            across = -(-wide // side)
            feeds["window"] = merged(rows // side * across + columns // side).astype(np.int32)
        if self._graph is None:
            made = PatchGraph(s, self._weights)
            made.graph.outputs(*made.build().values())
            self._graph = compile_built(made, self.device)
        return np.asarray(self._graph.run(feeds)[0])

    def rows(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        s, m = self.sizes, self.sizes.merge
        patches = np.ascontiguousarray(arrays.get("pixel_values", ()), np.float32)
        grids = np.asarray(arrays.get("image_grid_thw", ()), np.int64).reshape(-1, 3)
        counts = grids.prod(1)
        flat = 3 * s.times * s.patch**2
        if patches.shape != (counts.sum(), flat) or (grids[:, 0] != 1).any() or (grids[:, 1:] % m).any():
            raise ShapeError(f"run: pixel_values are f32[patches, {flat}] of grids [1, rows, columns] of {m}s, "
                             f"got {patches.shape} and {grids.tolist()}", code="S600")  # fmt: skip
        ends = np.cumsum(counts)
        made = [self.vectors(patches[e - n : e], int(g[1]), int(g[2]))
                for e, n, g in zip(ends, counts, grids, strict=True)]  # fmt: skip
        return np.concatenate(made), [(int(g[1]) // m, int(g[2]) // m) for g in grids]

    def positions(self, ids: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
        """A text counts on; an image has one time, and its rows and columns begin where the text was."""
        found, at, place = np.zeros((3, len(ids)), np.int64), 0, 0
        starts = np.flatnonzero(ids == self.token)
        for high, wide in grids:
            start = int(starts[starts >= at][0]) if high * wide else at
            found[:, at:start] = np.arange(place, place + start - at)
            place += start - at
            found[:, start : start + high * wide] = place + np.stack(
                [np.zeros(high * wide, np.int64), *(x.reshape(-1) for x in np.mgrid[:high, :wide])]
            )
            at, place = start + high * wide, place + max(high, wide)
        found[:, at:] = np.arange(place, place + len(ids) - at)
        return found


def load(folder: Folder) -> ImageDecoder:
    """A model from a folder."""
    found, is_later = folder.settings, folder.settings["model_type"] == "qwen2_5_vl"
    inner = mapping(found, "text_config") or found
    made = from_json({**inner, "model_type": "qwen2", "tie_word_embeddings": found.get(
        "tie_word_embeddings", inner.get("tie_word_embeddings", False))})  # fmt: skip
    rope = {**mapping(inner, "rope_scaling"), **mapping(inner, "rope_parameters")}
    sections = wholes(rope, "mrope_section") or (16, 24, 24)
    if sum(sections) * 2 != made.head_dim or len(sections) != 3:
        raise FileError(f"the configuration has mrope_section = {list(sections)} for heads of {made.head_dim}",
                        code="F140")  # fmt: skip
    config = MropeConfig(**{**vars(made), "sections": sections})
    weights = without_prefix(
        folder.weights, ("model.language_model.", "model.visual.", "language_model.model.", "model.", "visual.")
    )
    config.check(weights)
    sizes = PatchSizes.from_json(mapping(found, "vision_config"), config.hidden, is_later=is_later)

    encoder = PatchEncoder(folder, weights, sizes)
    build, tokenizer = partial(MropeGraph, config, weights), partial(folder_tokenizer, folder.path)
    return ImageDecoder(config, build, tokenizer, encoder, device=folder.device, context=folder.context)
