"""Models of images and texts: both as vectors of one space, and how alike they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.errors import OptionError, ShapeError
from strata.mir import Value
from strata.models.base import compile_built
from strata.models.encoders.embed import padded
from strata.models.tokenizer import TextModel, Tokenizer
from strata.models.vision.images import ImageSettings
from strata.models.vision.model import Build, ImageModel, is_vectors, unit_rows
from strata.models.weights import WeightBuilder
from strata.runtime import CompiledGraph

TEXTS = 16  # that go through the graph at once


@dataclass(frozen=True)
class TextTower:
    """The compiled side of texts."""

    graph: CompiledGraph
    results: tuple[str, ...]


class ImageTextModel(TextModel, ImageModel):
    """Images and texts as vectors of one space: `embed_image`, `embed`, and `similarity` of both."""

    def __init__(
        self, build: Build, settings: ImageSettings, texts: Callable[[], tuple[WeightBuilder, dict[str, Value]]],
        last: Callable[[np.ndarray], np.ndarray], tokenizer: Callable[[], Tokenizer], *, length: int,
        scale: float = 1.0, shift: float = 0.0, pad: int | None = None, size: tuple[int, int] | None = None,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(build, settings, size=size, vector="image_embeds", device=device)
        self._make_texts, self._last, self._make_tokenizer = texts, last, tokenizer
        self.length, self.scale, self.shift = length, scale, shift
        self.pad = pad  # texts are filled up to the whole length with it, as the model was trained
        self._texts: TextTower | None = None

    @property
    def inputs(self) -> dict[str, str]:
        return {**super().inputs, "input_ids": "i32[B, S]", "attention_mask": "bool[B, S]"}

    def check(self) -> None:
        """Refuse weights that are not those of the configuration."""
        super().check()
        self._make_texts()[0].check()

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on `pixel_values`, on `input_ids` (with or without `attention_mask`), or on both.

        Both give `logits_per_image` f32[images, texts] too, as the model was trained to.
        """
        known = {"pixel_values", "input_ids", "attention_mask"}
        if not arrays or set(arrays) - known or set(arrays) == {"attention_mask"}:
            raise OptionError(
                f"run: takes pixel_values and input_ids, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265"
            )
        pixels, ids = arrays.get("pixel_values"), arrays.get("input_ids")
        seen = {} if pixels is None else super().run(pixel_values=pixels)
        read = {} if ids is None else self._run_texts(ids, arrays.get("attention_mask"))
        if pixels is None or ids is None:
            return seen or read
        image, text = unit_rows(seen["image_embeds"]), unit_rows(read["text_embeds"])
        logits = self.scale * (image @ text.T) + np.float32(self.shift)
        return {
            "logits_per_image": logits, "logits_per_text": logits.T, "image_embeds": image, "text_embeds": text,
        }  # fmt: skip

    def _run_texts(self, given: Any, mask: Any) -> dict[str, np.ndarray]:
        if self._texts is None:
            builder, results = self._make_texts()
            builder.graph.outputs(*results.values())
            self._texts = TextTower(compile_built(builder, self.device), tuple(results))
        ids = np.ascontiguousarray(given, np.int32)
        if ids.ndim != 2 or not 0 < ids.shape[1] <= self.length:
            raise ShapeError(f"run: input_ids are i32[B, S] with S up to {self.length}, got {ids.shape}", code="S600")
        kept = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
        out = self._texts.graph.run(input_ids=ids, attention_mask=kept, last=self._last(ids))
        return dict(zip(self._texts.results, out, strict=True))

    @own_checks()
    def embed(self, texts: str | Sequence[str], *, normalize: bool = True) -> np.ndarray:
        """A vector for each text, f32[texts, features], in the space of the images' vectors."""
        rows = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(t, str) for t in rows):
            raise OptionError("embed: takes a text or a list of texts", code="O606")
        if not rows:
            raise OptionError("embed: there are no texts", code="O266")
        ids = self.tokenizer.encode_batch(rows, self.length)
        found = []
        for part in (ids[i : i + TEXTS] for i in range(0, len(ids), TEXTS)):
            block, mask = padded(part)
            if self.pad is not None:
                full = np.full((len(part), self.length), self.pad, np.int32)
                full[:, : block.shape[1]] = np.where(mask, block, self.pad)
                block, mask = full, np.ones(full.shape, bool)
            found.append(self._run_texts(block, mask)["text_embeds"])
        vectors = np.concatenate(found)
        return unit_rows(vectors) if normalize else vectors

    @own_checks()
    def similarity(self, images: Any, texts: Any, *, scaled: bool = False) -> np.ndarray:
        """Cosines f32[images, texts] of images and texts; `scaled` gives the model's own logits instead.

        Either may be vectors already, f32[n, features].
        """
        read = unit_rows(texts) if is_vectors(texts) else self.embed(texts)
        cosines = self._vectors(images) @ read.T
        return np.float32(self.scale) * cosines + np.float32(self.shift) if scaled else cosines
