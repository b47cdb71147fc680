"""A small picture of an image for the terminal, in Braille characters of 2 x 4 dots."""

from __future__ import annotations

import numpy as np

# the bit of each dot in a character, by row and column
BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def dots(image: np.ndarray, columns: int = 72, dark: float = 0.75) -> list[str]:
    """Lines of text that look like a grey image; a dot where it is darker than a part of white."""
    height, width = image.shape
    rows = max(1, round(height * columns * 2 / width / 4))
    ys, xs = (np.arange(n + 1) * size // n for n, size in ((rows * 4, height), (columns * 2, width)))
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), ys[:-1], 0), xs[:-1], 1)
    mean = sums / np.maximum(np.outer(np.diff(ys), np.diff(xs)), 1)
    marked = (mean < 255 * dark).reshape(rows, 4, columns, 2)
    codes = np.einsum("aibj,ij->ab", marked, BITS)
    return ["".join(chr(0x2800 + int(code)) for code in line) for line in codes]
