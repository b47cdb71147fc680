"""Object detection: boxes with labels and scores from queries, and what DETR's families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.core import Dim
from strata.errors import FileError, OptionError
from strata.mir import Value
from strata.models.blocks.transformer import LayerNames, LayerSizes
from strata.models.config_values import mapping, wholes
from strata.models.vision.images import as_image, as_images
from strata.models.vision.model import ImageModel
from strata.models.vision.resnet import ResNetGraph
from strata.models.weights import Weights, ops

OWN = LayerNames(at="")


@dataclass(frozen=True, slots=True)
class Detection:
    """An object in an image: the label's name and number, how sure that is (0 to 1), and where: left, top, right and
    bottom in pixels."""

    name: str
    number: int
    score: float
    box: tuple[float, ...]


class DetectionModel(ImageModel):
    """A model that finds objects in images."""

    is_focal = False  # each label has a probability of its own; otherwise one label, or none, is right

    @own_checks()
    def detect(self, images: Any, *, threshold: float = 0.5) -> list[list[Detection]]:
        """The objects of each image with a score above the threshold, best first."""
        if not 0 <= threshold <= 1:
            raise OptionError(f"detect: a threshold is from 0 to 1, got {threshold!r}", code="O236")
        found = []
        for image in as_images(images):
            pixels = as_image(image)
            results = self.run(pixel_values=self.settings.pixels(pixels)[None])
            logits = results["logits"][0].astype(np.float64)
            centre, size = np.split(results["pred_boxes"][0].astype(np.float64), 2, -1)
            boxes = np.concatenate([centre - size / 2, centre + size / 2], -1) * np.tile(pixels.shape[1::-1], 2)
            if self.is_focal:
                flat = (1 / (1 + np.exp(-logits))).reshape(-1)
                best = np.argsort(-flat, kind="stable")[: len(logits)]
                rows, labels, scores = best // logits.shape[1], best % logits.shape[1], flat[best]
            else:
                parts = np.exp(logits - logits.max(-1, keepdims=True))
                parts = (parts / parts.sum(-1, keepdims=True))[:, :-1]
                rows = np.argsort(-parts.max(-1), kind="stable")
                labels, scores = parts.argmax(-1)[rows], parts.max(-1)[rows]
            found.append([
                Detection(self.labels.get(int(n), f"LABEL_{n}"), int(n), float(s), (*map(float, boxes[row]),))
                for row, n, s in zip(rows, labels, scores, strict=True) if s > threshold
            ])  # fmt: skip
        if not found:
            raise OptionError("there are no images", code="O266")
        return found


class DetectorGraph(ResNetGraph):
    """A ResNet whose stages are read by queries."""

    def __init__(self, found: dict[str, Any], weights: Weights, batch: Dim, size: tuple[int, int]) -> None:
        settings = mapping(found, "backbone_config")
        super().__init__(settings, weights, batch, size, name=str(found["model_type"]))
        stages = len(self.depths)
        self.taken = [i - 1 for i in wholes(settings, "out_indices") or (stages,)]  # 0 is before the first stage
        if not all(0 <= i < stages for i in self.taken):
            raise FileError(f"the backbone has {stages} stages, out_indices are not all of them", code="F140")

    def placed(
        self, x: Value, at: str, names: LayerNames, sizes: LayerSizes, *, place: Value | None,
        memory: Value | None = None, memory_place: Value | None = None,
    ) -> Value:  # fmt: skip
        """Attention whose queries and keys know their places, and whose values do not."""
        h, source, where = sizes.hidden, x if memory is None else memory, place if memory is None else memory_place
        q = self.linear(x if place is None else x + place, at + names.q, h, h)
        k = self.linear(source if where is None else source + where, at + names.k, h, h)
        mixed = ops.attention(
            q, k, self.linear(source, at + names.v, h, h), num_heads=sizes.heads, kv_heads=sizes.heads, layout="bsd"
        )
        return self.linear(mixed, at + names.o, h, h)

    def normed_sum(self, x: Value, more: Value, name: str, sizes: LayerSizes) -> Value:
        return self.layer_norm(x + more, name, sizes.hidden, sizes.eps)

    def encoded(self, x: Value, at: str, sizes: LayerSizes, place: Value) -> Value:
        """A layer of an encoder."""
        x = self.normed_sum(x, self.placed(x, at, OWN, sizes, place=place), at + OWN.norm1, sizes)
        return self.normed_sum(x, self.feed_forward(x, at, OWN, sizes), at + OWN.norm2, sizes)

    def network(self, x: Value, at: str, widths: Sequence[int]) -> Value:
        """Matmuls with a ReLU between them: `widths` are those of what goes in, and of each result."""
        for i, (k, n) in enumerate(pairwise(widths)):
            x = self.linear(ops.relu(x) if i else x, f"{at}.layers.{i}", n, k)
        return x
