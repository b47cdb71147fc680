"""A model of images: `run` on pixels, `embed_image`, `classify`, `similarity`; a graph for each size of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.core import Dim, Table, sym
from strata.errors import OptionError, ShapeError, UnknownNameError
from strata.mir import Value
from strata.models.base import Folder, Model, compile_built
from strata.models.vision.images import ImageSettings, as_image, as_images
from strata.models.weights import WeightBuilder
from strata.runtime import CompiledGraph

IMAGES = 8  # that go through a graph at once

Build = Callable[[Dim, tuple[int, int]], Any]  # a WeightBuilder for images of a size; its `build` gives results


@dataclass(frozen=True, slots=True)
class Label:
    """What an image shows: the label's name and number, and how sure that is (0 to 1)."""

    name: str
    number: int
    score: float


class ImageModel(Model):
    """A model of images. `build(batch, size)` gives a graph under construction, whose `build` gives results by name."""

    def __init__(
        self, build: Build, settings: ImageSettings, *, labels: Mapping[int, str] | None = None,
        size: tuple[int, int] | None = None, vector: str = "pooler_output", device: str = "cpu",
    ) -> None:  # fmt: skip
        self._build, self.settings, self.device = build, settings, device
        self.labels = dict(labels or {})
        self.size = size  # of the images that the model was trained for, if it has one
        self.vector = vector  # the result that `embed_image` gives
        self._graphs: Table[tuple[int, int], tuple[CompiledGraph, tuple[str, ...]]] = Table("image sizes")
        self._checked: tuple[tuple[int, int], WeightBuilder, dict[str, Value]] | None = None

    def graph_for(self, height: int, width: int) -> tuple[CompiledGraph, tuple[str, ...]]:
        """The compiled graph for images of a size, and the names of its results."""

        def make() -> tuple[CompiledGraph, tuple[str, ...]]:
            built, self._checked = self._checked, None
            same = built is not None and built[0] == (height, width)
            builder, results = built[1:] if built and same else self._built((height, width))
            builder.graph.outputs(*results.values())
            return compile_built(builder, self.device), tuple(results)

        return self._graphs.get_or_make((height, width), make)

    def _built(self, size: tuple[int, int]) -> tuple[WeightBuilder, dict[str, Value]]:
        builder = self._build(sym("B", 1), size)
        return builder, builder.build()

    def check(self) -> None:
        """Refuse weights that are not those of the configuration, by building the graph of the usual images."""
        size = self._usual()
        self._checked = (size, *self._built(size))
        self._checked[1].check()

    @property
    def graph(self) -> CompiledGraph:  # type: ignore[override]
        return self.graph_for(*self._usual())[0]

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.graph_for(*self._usual())[1]

    @property
    def inputs(self) -> dict[str, str]:
        size = "H, W" if self.size is None else f"{self.size[0]}, {self.size[1]}"
        return {"pixel_values": f"f32[B, 3, {size}]"}

    def _usual(self) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        size = self.settings.crop or (224, 224)
        asked = self.settings.size or {}
        return (asked["height"], asked["width"]) if "height" in asked and self.settings.crop is None else size

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run on `pixel_values`, f32[B, 3, H, W], as preprocessing gives them; gives arrays by output name."""
        if set(arrays) != {"pixel_values"}:
            raise OptionError(f"run: takes pixel_values, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265")
        pixels = _pixels(arrays["pixel_values"])
        graph, names = self.graph_for(*pixels.shape[2:])
        return dict(zip(names, graph.run(pixel_values=pixels), strict=True))

    @own_checks()
    def preprocess(self, images: Any) -> np.ndarray:
        """Images as the model takes them, f32[B, 3, H, W]; all end up with one size."""
        found = [self.settings.pixels(image) for image in as_images(images)]
        if not found:
            raise OptionError("there are no images", code="O266")
        shapes = sorted({x.shape[1:] for x in found})
        if len(shapes) > 1:
            raise ShapeError(
                f"images of one batch have one size, got {shapes[0]} and {shapes[1]} after preprocessing", code="S600"
            )
        return np.stack(found)

    def _results(self, images: Any, name: str) -> np.ndarray:
        """One result for any number of images, a few at a time."""
        pixels = [self.settings.pixels(image) for image in as_images(images)]
        if not pixels:
            raise OptionError("there are no images", code="O266")
        found: list[np.ndarray] = [np.empty(0)] * len(pixels)
        for shape in {x.shape for x in pixels}:
            rows = [i for i, x in enumerate(pixels) if x.shape == shape]
            for part in (rows[i : i + IMAGES] for i in range(0, len(rows), IMAGES)):
                results = self.run(pixel_values=np.stack([pixels[i] for i in part]))
                if name not in results:
                    raise UnknownNameError(f"the model has no {name}; it gives {', '.join(results)}", code="N600")
                for i, row in zip(part, results[name], strict=True):
                    found[i] = row
        return np.stack(found)

    @own_checks()
    def embed_image(self, images: Any, *, normalize: bool = True) -> np.ndarray:
        """A vector for each image, f32[images, features]: files, Pillow images, or arrays u8[H, W, 3]."""
        vectors = self._results(images, self.vector)
        return unit_rows(vectors) if normalize else vectors

    @own_checks()
    def similarity(self, images: Any, others: Any) -> np.ndarray:
        """Cosines f32[images, others] of vectors of images; either may be vectors already, f32[n, features]."""
        return self._vectors(images) @ self._vectors(others).T

    def _vectors(self, images: Any) -> np.ndarray:
        return unit_rows(images) if is_vectors(images) else self.embed_image(images)

    @own_checks()
    def classify(self, images: Any, *, top: int = 5) -> list[list[Label]]:
        """The likeliest labels of each image, best first."""
        logits = self._results(images, "logits").astype(np.float64)
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :top]
        return [
            [Label(self.labels.get(int(i), f"LABEL_{i}"), int(i), float(row[i])) for i in best]
            for row, best in zip(scores, order, strict=True)
        ]

    @own_checks()
    def segment(self, images: Any) -> list[np.ndarray]:
        """The label of every pixel of each image, i32[H, W] of the image's own size."""
        found = []
        for image in as_images(images):
            pixels = as_image(image)
            results = self.run(pixel_values=self.settings.pixels(pixels)[None])
            if results.get("logits", np.empty(0)).ndim != 4:
                raise UnknownNameError(f"the model labels no pixels; it gives {', '.join(results)}", code="N600")
            found.append(_stretched(results["logits"][0], pixels.shape[:2]).argmax(0).astype(np.int32))
        return found


def _stretched(x: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """[C, h, w] as [C, H, W], linear between the centres of pixels."""
    for axis, wanted in ((1, size[0]), (2, size[1])):
        have = x.shape[axis]
        at = np.clip((np.arange(wanted) + 0.5) * have / wanted - 0.5, 0, have - 1)
        low = np.floor(at).astype(int)
        part = (at - low).astype(np.float32).reshape(-1, *(1,) * (2 - axis))
        x = np.take(x, low, axis) * (1 - part) + np.take(x, np.minimum(low + 1, have - 1), axis) * part
    return x


def _pixels(given: Any) -> np.ndarray:
    pixels = np.ascontiguousarray(given, np.float32)
    if pixels.ndim != 4 or pixels.shape[1] != 3 or not pixels.size:
        raise ShapeError(f"run: pixel_values are f32[B, 3, H, W], got {pixels.shape}", code="S600")
    return pixels


def is_vectors(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind == "f"


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Rows of length 1."""
    size = np.linalg.norm(x, axis=-1, keepdims=True)
    return (x / np.maximum(size, 1e-12)).astype(np.float32)


def image_model(folder: Folder, build: Build, kind: str, **more: Any) -> ImageModel:
    """The model of a folder; `kind` is the image processor of the family, where the folder names none."""
    settings = ImageSettings.from_folder(folder.path, kind)
    return ImageModel(build, settings, labels=labels_of(folder.settings), device=folder.device, **more)


def labels_of(found: Mapping[str, Any]) -> dict[int, str]:
    """The names of labels in config.json, by number."""
    names = found.get("id2label")
    if not isinstance(names, dict):
        return {}
    numbers = {k: str(k) for k in names}
    return {int(n): str(names[k]) for k, n in numbers.items() if n.isascii() and n.isdigit() and len(n) <= 10}
