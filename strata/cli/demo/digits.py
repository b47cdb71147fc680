"""A synthetic digit data set, so that training can be shown without a download."""

from __future__ import annotations

import numpy as np

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
SIDE = 16


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images f32[count, 256] between about 0 and 1, and labels i32[count]."""
    rng = np.random.default_rng(seed)
    glyphs = np.array([[[int(dot) for dot in row] for row in glyph.split()] for glyph in GLYPHS], np.float32)
    labels = rng.integers(0, 10, count).astype(np.int32)
    centre = (SIDE - 1) / 2 + rng.uniform(-1.5, 1.5, (2, count, 1, 1))
    size = rng.uniform(1.1, 1.9, (2, count, 1, 1))  # pixels a dot
    shear = rng.uniform(-0.25, 0.25, (count, 1, 1))
    y, x = np.mgrid[0:SIDE, 0:SIDE][:, None] - centre
    x = x - shear * y
    row, column = y / size[0] + 3, x / size[1] + 2  # where each pixel lies on the glyph's grid of dots
    images = _sample(glyphs[labels], row, column)
    images = np.clip(
        images * rng.uniform(0.8, 1.3, (count, 1, 1)) + 0.12 * rng.standard_normal(images.shape), -0.3, 1.3
    )
    return images.reshape(count, SIDE * SIDE).astype(np.float32), labels


def _sample(glyphs: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Bilinear samples of f32[count, 7, 5] at fractional places; 0 outside."""
    padded = np.pad(glyphs, ((0, 0), (1, 1), (1, 1)))
    row, column = np.clip(row + 1, 0, 7.999), np.clip(column + 1, 0, 5.999)
    top, left = row.astype(int), column.astype(int)
    fy, fx = row - top, column - left
    which = np.arange(len(glyphs))[:, None, None]

    def at(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        found: np.ndarray = padded[which, i, j]
        return found

    upper = at(top, left) * (1 - fx) + at(top, left + 1) * fx
    lower = at(top + 1, left) * (1 - fx) + at(top + 1, left + 1) * fx
    sampled: np.ndarray = upper * (1 - fy) + lower * fy
    return sampled


def sketch(image: np.ndarray) -> list[str]:
    """An image as lines of characters."""
    shades = " .:-=+*#%@"
    return ["".join(shades[int(np.clip(v, 0, 0.999) * 10)] * 2 for v in row) for row in image.reshape(SIDE, SIDE)[::2]]
