"""Image preprocessing as preprocessor_config.json asks for it, by Pillow and NumPy: resize, crop, normalise."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileError, OptionError, ShapeError
from strata.io import decode_image, load_image
from strata.models.config_values import mapping, real, whole
from strata.models.vision.processors import complete_settings, processor_settings

LARGEST = 1 << 14  # pixels of an edge that an image is made to have
MOST_PIXELS = 1 << 27  # of an image that is resized
MOST_SIDE = 4096  # pixels of a side of an image that is resized to a longest edge
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, where a processor has no others


@dataclass(frozen=True)
class ImageSettings:
    """What happens to an image before a model sees it."""

    size: Mapping[str, int] | None  # height and width, or shortest_edge with or without longest_edge
    resample: int = 2  # Pillow's number: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = MEAN
    deviation: tuple[float, ...] | None = DEVIATION
    crop_part: float | None = None  # ConvNeXt's: below 384 pixels, an image is resized to more and the middle is kept
    multiple: int = 1  # batches are padded to sizes that this divides

    @classmethod
    def from_folder(cls, folder: Path, kind: str) -> ImageSettings:
        """From the folder's own file; where it is silent, as the kind of processor that it names has it, or `kind`."""
        return cls.from_json(complete_settings(processor_settings(folder), kind))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ImageSettings:
        """From the keys that image processors share."""

        def on(key: str, default: bool) -> bool:
            return bool(found.get(key, default))

        mean, deviation = (_channels(found, key, default) for key, default in
                           (("image_mean", MEAN), ("image_std", DEVIATION)))  # fmt: skip
        if any(d == 0 for d in deviation):
            raise FileError(f"the configuration has image_std = {list(deviation)}, which divides by 0", code="F140")
        if on("do_pad", False) and mapping(found, "pad_size"):
            raise FileError(
                f"the configuration has pad_size = {found['pad_size']}; images are not padded to a fixed size",
                code="F140",
            )
        crop = _sizes(found, "crop_size") if on("do_center_crop", False) else None
        return cls(
            _sizes(found, "size") if on("do_resize", True) else None,
            whole(found, "resample", 2, least=0),
            None if crop is None else _both(crop),
            real(found, "rescale_factor", 1 / 255) if on("do_rescale", True) else None,
            mean if on("do_normalize", True) else None,
            deviation if on("do_normalize", True) else None,
            real(found, "crop_pct") if found.get("crop_pct") is not None else None,
            whole(found, "size_divisor", 1),
        )

    def pixels(self, image: Any) -> np.ndarray:
        """An image as the model takes it, f32[3, H, W]."""
        found = as_image(image)
        if self.size is not None:
            found = self._resized(found)
        if self.crop is not None:
            found = centre(found, *self.crop)
        out: np.ndarray = found.astype(np.float32)
        if self.scale is not None:
            out *= np.float32(self.scale)
        if self.mean is not None and self.deviation is not None:
            out = (out - np.asarray(self.mean, np.float32)) / np.asarray(self.deviation, np.float32)
        return np.ascontiguousarray(out.transpose(2, 0, 1))

    def _resized(self, image: np.ndarray) -> np.ndarray:
        assert self.size is not None
        if self.crop_part is not None and "shortest_edge" in self.size:
            edge = self.size["shortest_edge"]
            if edge >= 384:
                return resize(image, edge, edge, self.resample)
            wide = {"shortest_edge": int(edge / self.crop_part)}
            return centre(resize(image, *target(image.shape, wide), self.resample), edge, edge)
        return resize(image, *target(image.shape, self.size), self.resample)


def target(shape: Sequence[int], size: Mapping[str, int]) -> tuple[int, int]:
    """The height and width that an image of this shape is resized to."""
    if "height" in size:
        return size["height"], size["width"]
    height, width = shape[:2]
    short, long = min(height, width), max(height, width)
    edge = size["shortest_edge"]
    most = size.get("longest_edge")
    if most is None:
        other = int(edge * long / short)
        return (other, edge) if width <= height else (edge, other)
    raw = None
    if long / short * edge > most:  # DETR's: the longer side has a bound, too
        raw = most * short / long
        edge = round(raw)
    if short == edge:
        return height, width
    other = int((edge if raw is None else raw) * long / short)
    return (other, edge) if width < height else (edge, other)


def with_longest(shape: Sequence[int], edge: int) -> tuple[int, int]:
    """The height and width with this longer side; the shorter one is even, and neither is beyond the bound."""
    high, wide = shape[:2]
    part = wide / high
    size = (int(edge / part), edge) if wide >= high else (edge, int(edge * part))
    high, wide = max(size[0] + size[0] % 2 * (wide >= high), 1), max(size[1] + size[1] % 2 * (wide < high), 1)
    if max(high, wide) > MOST_SIDE:
        part = wide / high
        high, wide = (int(MOST_SIDE / part), MOST_SIDE) if wide >= high else (MOST_SIDE, int(MOST_SIDE * part))
    return max(high, 1), max(wide, 1)


def in_squares(shape: Sequence[int], side: int) -> tuple[int, int]:
    """The height and width that squares divide; the longer side decides."""
    high, wide = shape[:2]
    if wide >= high:
        longer = math.ceil(wide / side) * side
        return math.ceil(int(longer / (wide / high)) / side) * side, longer
    longer = math.ceil(high / side) * side
    return longer, math.ceil(int(longer * (wide / high)) / side) * side


def resize(image: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """u8[height, width, 3] by Pillow's filters."""
    if image.shape[:2] == (height, width):
        return image
    if not 0 < height * width <= MOST_PIXELS:
        raise FileError(f"the configuration asks for images of {height} x {width} pixels", code="F140")
    try:
        from PIL import Image
    except ImportError:
        raise OptionError("resizing images needs the package pillow", code="O263", fix="pip install pillow") from None
    if resample not in range(6):
        raise FileError(f"the configuration has resample = {resample}, Pillow's filters are 0 to 5", code="F140")
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling(resample)))


def centre(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of an image; what it lacks is black."""
    have_h, have_w = image.shape[:2]
    top, left = (have_h - height) // 2, (have_w - width) // 2
    if top >= 0 and left >= 0:
        return image[top : top + height, left : left + width]
    full_h, full_w = max(height, have_h), max(width, have_w)
    padded = np.zeros((full_h, full_w, image.shape[2]), image.dtype)
    above, before = -(-(full_h - have_h) // 2), -(-(full_w - have_w) // 2)
    padded[above : above + have_h, before : before + have_w] = image
    top, left = max(top + above, 0), max(left + before, 0)
    return padded[top : top + height, left : left + width]


def as_image(image: Any) -> np.ndarray:
    """An image as u8[H, W, 3]: a file, its bytes, of Pillow, or an array of u8 with one, three or four channels."""
    if isinstance(image, (str, os.PathLike)):
        return load_image(image)
    if isinstance(image, bytes):
        return decode_image(image)
    if hasattr(image, "convert"):  # of Pillow
        return np.asarray(image.convert("RGB"))
    found = np.asarray(image)
    if found.dtype != np.uint8:
        raise OptionError(
            f"an image is a file, a Pillow image, or an array of u8, got {type(image).__name__} of {found.dtype}",
            code="O606", fix="for pixels as the model takes them: run(pixel_values=…)",
        )  # fmt: skip
    if found.ndim == 2:
        found = found[:, :, None]
    if found.ndim != 3 or found.shape[2] not in (1, 3, 4) or not found.size:
        raise ShapeError(f"an image is u8 of (height, width, 3), got {found.shape}", code="S600")
    if found.shape[2] == 4:
        return np.ascontiguousarray(found[:, :, :3])
    return np.repeat(found, 3, 2) if found.shape[2] == 1 else found


def as_images(images: Any) -> list[Any]:
    """One image, or several, as a list."""
    if isinstance(images, (list, tuple)):
        return list(images)
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return list(images)
    return [images]


def _sizes(found: Mapping[str, Any], key: str) -> dict[str, int]:
    value = found.get(key)
    if isinstance(value, dict):
        kept = {k: whole(value, k) for k in ("height", "width", "shortest_edge", "longest_edge") if value.get(k)}
        if "shortest_edge" not in kept and not {"height", "width"} <= set(kept):
            raise FileError(f"the configuration has {key} = {value}, which is not a size", code="F140")
    else:
        kept = dict.fromkeys(("height", "width"), whole(found, key))
    if any(kept.get(k, 1) > LARGEST for k in ("height", "width", "shortest_edge")):
        raise FileError(
            f"the configuration has {key} = {value!r:.80}, an image has {LARGEST} rows at most", code="F140"
        )
    return kept


def _both(size: Mapping[str, int]) -> tuple[int, int]:
    return (size["height"], size["width"]) if "height" in size else (size["shortest_edge"],) * 2


def _channels(found: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = found.get(key)
    if value is None:
        return default
    value = [value] if isinstance(value, (int, float)) else value
    if not isinstance(value, list) or len(value) not in (1, 3):
        raise FileError(
            f"the configuration has {key} = {value!r}, a number for each of 3 channels is needed", code="F140"
        )
    return tuple(real({key: x}, key, positive=False) for x in value)
