"""OCR: find text lines, cut them out straight, recognise each.

Two ONNX models of the PP-OCR kind do the work. The first gives, for each pixel, how sure it is of text; the second
gives, for each column of a line that is 48 pixels high, how sure it is of each character.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import DTypeError, FileError, ShapeError

MULTIPLE = 32  # the first model halves its image five times
HEIGHT = 48  # of a line, for the second model
TEXT = 0.3  # how sure of text a pixel must be, and the pixels of a line on average
LINE = 0.5
GROW = 1.6  # the first model marks the core of a line; its margin is this many areas over perimeters
LEAST = 3  # pixels: lines lower than this are specks
BATCH = 8  # lines that are read at once


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text: what it says, how sure that is (0 to 1), and its corners (x, y) clockwise from its beginning."""

    text: str
    score: float
    corners: np.ndarray


class TextReader:
    """`TextReader(detector, recognizer).read(image)` gives the lines of an image, from top to bottom.

    The arguments are ONNX files. The characters are in the second one, under "character".
    """

    def __init__(
        self,
        detector: str | os.PathLike[str],
        recognizer: str | os.PathLike[str],
        *,
        device: str = "cpu",
        longest: int = 1280,
    ) -> None:
        from strata.io import onnx

        self.detector, self.recognizer = (onnx.load(m, device=device) for m in (detector, recognizer))
        self.longest = longest  # side of the image that the first model sees, at most
        characters = self.recognizer.metadata.get("character")
        if characters is None:
            raise FileError(f"TextReader: {os.fspath(recognizer)} has no list of characters", code="F148")
        self.characters = ("", *characters.splitlines(), " ")  # the first stands for "no character here"

    def read(self, image: np.ndarray) -> list[Line]:
        """The lines of an image, u8 of (height, width) or (height, width, 3)."""
        pixels = _as_colour(image)
        boxes = self.find(pixels)
        strips = [cut(pixels, box) for box in boxes]
        texts: dict[int, tuple[str, float]] = {}
        by_width = sorted(range(len(strips)), key=lambda i: strips[i].shape[1])
        for start in range(0, len(by_width), BATCH):  # lines of about the same width share a batch
            chosen = by_width[start : start + BATCH]
            texts |= dict(zip(chosen, self.recognize([strips[i] for i in chosen]), strict=True))
        return [Line(*texts[i], box) for i, box in enumerate(boxes) if texts[i][0]]

    def find(self, image: np.ndarray) -> list[np.ndarray]:
        """Corners of the lines of an image, from top to bottom."""
        height, width = image.shape[:2]
        scale = min(1.0, self.longest / max(height, width))
        rows, columns = (max(MULTIPLE, round(n * scale / MULTIPLE) * MULTIPLE) for n in (height, width))
        sure = self._run(self.detector, _normal(resize(image, rows, columns))[None])[0, 0]
        stretch = np.array([width / columns, height / rows])
        found = [box * stretch for box in boxes_of(sure)]
        return sorted(found, key=lambda box: (round(box[:, 1].mean() / (HEIGHT / 4)), box[:, 0].min()))

    def recognize(self, strips: list[np.ndarray]) -> list[tuple[str, float]]:
        """Text and score of lines that are HEIGHT pixels high; shorter ones are filled up on the right."""
        widest = max(s.shape[1] for s in strips)
        batch = np.zeros((len(strips), 3, HEIGHT, widest), np.float32)
        for i, strip in enumerate(strips):
            batch[i, :, :, : strip.shape[1]] = _normal(strip)
        return [decode(columns, self.characters) for columns in self._run(self.recognizer, batch)]

    @staticmethod
    def _run(model: Any, batch: np.ndarray) -> np.ndarray:
        result: np.ndarray = model.run({model.inputs[0].name: batch})[0]
        return result


def decode(columns: np.ndarray, characters: tuple[str, ...]) -> tuple[str, float]:
    """The best character of each column, repeats and blanks left out (connectionist temporal classification)."""
    best = columns.argmax(-1)
    kept = (best != 0) & np.append(True, best[1:] != best[:-1])
    kept &= best < len(characters)
    score = float(columns.max(-1)[kept].mean()) if kept.any() else 0.0
    return "".join(characters[i] for i in best[kept]), score


def boxes_of(sure: np.ndarray) -> list[np.ndarray]:
    """Rectangles, at any angle, around the patches of a map of where text is."""
    from scipy import ndimage

    patches, _ = ndimage.label(ndimage.binary_dilation(sure > TEXT))
    found = []
    for index, place in enumerate(ndimage.find_objects(patches), 1):
        inside = patches[place] == index
        if min(inside.shape) < LEAST or sure[place][inside].mean() < LINE:
            continue
        ys, xs = np.nonzero(inside)
        box = smallest_rectangle(np.stack([xs + place[1].start, ys + place[0].start], -1).astype(np.float64))
        width, height = _sides(box)
        if min(width, height) >= LEAST:
            found.append(_grown(box, GROW * width * height / (2 * (width + height))))
    return found


def smallest_rectangle(points: np.ndarray) -> np.ndarray:
    """Corners of the rectangle of least area around points; one of its sides lies along their hull."""
    from scipy.spatial import ConvexHull, QhullError

    try:
        hull = points[ConvexHull(points).vertices]
    except QhullError:  # all on a line
        hull = points
    steps = np.roll(hull, -1, 0) - hull
    steps = steps[np.hypot(*steps.T) > 0]
    angles = np.append(0.0, np.unique(np.arctan2(steps[:, 1], steps[:, 0]) % (np.pi / 2)))
    along = np.stack([np.cos(angles), np.sin(angles)], -1)  # axes to try, and those across them
    across = np.stack([-along[:, 1], along[:, 0]], -1)
    u, v = hull @ along.T, hull @ across.T
    i = int(np.argmin((np.ptp(u, 0) + 1e-9) * (np.ptp(v, 0) + 1e-9)))
    (a, b), (c, d) = (u[:, i].min(), u[:, i].max()), (v[:, i].min(), v[:, i].max())
    corners = np.array([[a, c], [b, c], [b, d], [a, d]]) @ np.stack([along[i], across[i]])
    return _upright(corners)


def _upright(corners: np.ndarray) -> np.ndarray:
    """The same corners, turned so that the text runs to the right as well as it can, or down where it stands."""
    turned = [np.roll(corners, -i, 0) for i in range(4)]
    best = max(turned, key=lambda c: (c[1] - c[0])[0] / (np.hypot(*(c[1] - c[0])) + 1e-9))
    width, height = _sides(best)
    return np.roll(best, -1, 0) if height > 1.5 * width else best


def _sides(box: np.ndarray) -> tuple[float, float]:
    return float(np.hypot(*(box[1] - box[0]))), float(np.hypot(*(box[3] - box[0])))


def _grown(box: np.ndarray, margin: float) -> np.ndarray:
    width, height = _sides(box)
    along, across = (box[1] - box[0]) / width * margin, (box[3] - box[0]) / height * margin
    return box + np.stack([-along - across, along - across, along + across, across - along])


def cut(image: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The part of an image inside a rectangle, straight and HEIGHT pixels high."""
    width, height = _sides(box)
    columns = max(HEIGHT // 2, round(HEIGHT * width / max(height, 1.0)))
    right = (np.arange(columns) + 0.5)[None, :, None] / columns * (box[1] - box[0])
    down = (np.arange(HEIGHT) + 0.5)[:, None, None] / HEIGHT * (box[3] - box[0])
    return _sampled(image, box[0] + right + down - 0.5)


def resize(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The image in another size, by linear interpolation."""
    height, width = image.shape[:2]
    if (height, width) == (rows, columns):
        return image
    y = (np.arange(rows) + 0.5) * height / rows - 0.5
    x = (np.arange(columns) + 0.5) * width / columns - 0.5
    return _sampled(image, np.stack(np.meshgrid(x, y), -1))


def _sampled(image: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Colours at places (x, y); outside, those of the border."""
    from scipy.ndimage import map_coordinates

    at = np.stack([places[..., 1], places[..., 0]])
    channels = [map_coordinates(image[..., c], at, np.float32, order=1, mode="nearest") for c in range(3)]
    return np.stack(channels, -1)


def _normal(image: np.ndarray) -> np.ndarray:
    """Colours from -1 to 1, channels first."""
    scaled = image.astype(np.float32).transpose(2, 0, 1) / np.float32(127.5) - np.float32(1)
    return np.ascontiguousarray(scaled)


def _as_colour(image: np.ndarray) -> np.ndarray:
    image = np.asarray(image)
    if image.dtype != np.uint8:
        raise DTypeError(f"TextReader.read: an image is u8, not {image.dtype}")
    if image.ndim == 2:
        image = np.repeat(image[..., None], 3, -1)
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ShapeError(f"TextReader.read: an image is (height, width) or (height, width, 3), not {image.shape}")
    return image
