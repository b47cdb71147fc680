"""Pixels as the image processors of transformers give them, from settings that leave things open.

`python -m tests.unit.models.image_vectors` writes image_vectors.json, where transformers is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")
KEPT = 12  # numbers of an image
PHOTO = np.random.default_rng(5).integers(0, 256, (44, 57, 3), dtype=np.uint8)
SMALL = {"size": {"height": 20, "width": 24}}
CROP = {"do_center_crop": True, "crop_size": {"height": 12, "width": 14}}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, settings) for kind in ("Bit", "CLIP") for settings in ({"size": 20, "crop_size": 16}, {"crop_size": 18})),
    *(("ConvNext", s) for s in ({"size": 20}, {"size": {"shortest_edge": 20}, "crop_pct": 0.5}, {"size": 20, **CROP})),
    *(("ConvNext", s) for s in ({}, {"size": 20, "image_std": [0.2, 0.3, 0.4]}, {"size": 20, "resample": 2})),
    *(("DeiT", s) for s in ({"size": 20, "crop_size": 16}, {**SMALL, "do_center_crop": False}, {**SMALL, **CROP})),
    *(("Detr", s) for s in ({"size": 20}, {"size": 20, "max_size": 22}, {**SMALL, **CROP}, {"size": {
        "shortest_edge": 20, "longest_edge": 24}})),
    *(("RTDetr", s) for s in (SMALL, {**SMALL, **CROP}, {**SMALL, "do_normalize": True})),
    *(("Segformer", s) for s in ({"size": 20}, {**SMALL, **CROP}, {**SMALL, "default_to_square": False})),
    *(("Siglip", s) for s in ({"size": 20}, SMALL, {**SMALL, **CROP}, {"size": 20, "default_to_square": True})),
    *(("ViT", s) for s in ({"size": 20}, SMALL, {**SMALL, **CROP}, {"size": 20, "crop_pct": 0.5})),
]  # fmt: skip


def sampled(pixels: np.ndarray) -> list[float]:
    flat = pixels.reshape(-1)
    return [round(float(x), 5) for x in flat[np.linspace(0, flat.size - 1, KEPT).astype(int)]]


def main() -> None:
    """Write what transformers computes."""
    from tests.families.oracle import transformers

    package, found = transformers(), []
    for kind, settings in CASES:
        made = getattr(package, f"{kind}ImageProcessorPil")(**settings)(PHOTO, return_tensors="np")
        pixels = np.asarray(made["pixel_values"])[0]
        found.append({"shape": list(pixels.shape), "pixels": sampled(pixels)})
    FILE.write_text("[\n" + ",\n".join(f" {json.dumps(x)}" for x in found) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
