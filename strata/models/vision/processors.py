"""What kinds of image processors do where a folder is silent: sizes, filters, crops, and means of channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from strata.models.config_values import mapping
from strata.models.weights import read_json

FILES = ("preprocessor_config.json", "processor_config.json")
BICUBIC: Final = {"resample": 3}
HALF: Final = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
OPENAI: Final = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
EDGE: Final = {"default_to_square": False}  # a size of one number is that of the shorter edge
CROPPED: Final = {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
PROCESSORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Bit": {**OPENAI, **BICUBIC, **EDGE, **CROPPED},
    "CLIP": {**OPENAI, **BICUBIC, **EDGE, **CROPPED},
    "ConvNext": {**HALF, **BICUBIC, **EDGE, "size": {"shortest_edge": 384}, "crop_pct": 224 / 256},
    "DeiT": {**HALF, **BICUBIC, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Detr": {**EDGE, "size": {"shortest_edge": 800, "longest_edge": 1333}, "max_size": 1333},
    "RTDetr": {**EDGE, "size": {"height": 640, "width": 640}, "do_normalize": False},
    "Segformer": {"size": 512},
    "Siglip": {**HALF, **BICUBIC, **EDGE, "size": {"height": 224, "width": 224}},
    "ViT": {**HALF, "size": 224},
}  # the rest is as `ImageSettings` has it
UNCROPPED = ("Detr", "RTDetr", "Segformer")  # kinds that never crop, whatever they are told
CLASS = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")


def processor_settings(folder: Path) -> dict[str, Any]:
    """What a folder says about images, without what it leaves open."""
    for name in FILES:
        if (folder / name).exists():
            found = read_json(folder / name)
            found = mapping(found, "image_processor") or found
            return {k: v for k, v in found.items() if v is not None}
    return {}


def complete_settings(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """All that is said about images, by a folder and by the kind of processor that it names, or else by `kind`."""
    named = CLASS.fullmatch(str(found.get("image_processor_type") or found.get("feature_extractor_type")))
    kind = named[1] if named and named[1] in PROCESSORS else kind
    usual = PROCESSORS[kind]
    merged = {**usual, **found}
    if not isinstance(merged["size"], dict) and not merged.get("default_to_square", True):
        bound = {"longest_edge": merged["max_size"]} if "max_size" in usual else {}
        merged["size"] = {"shortest_edge": merged["size"], **bound}
    if kind in UNCROPPED:
        merged["do_center_crop"] = False
    if "crop_pct" not in usual:
        merged.pop("crop_pct", None)
    return merged
