"""Pictures for a terminal, in Braille characters of 2 x 4 dots."""

from __future__ import annotations

import numpy as np

# the bit of each dot in a character, by row and column
BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def braille(marked: np.ndarray) -> list[str]:
    """Lines of text for bools of (4 x rows, 2 x columns)."""
    rows, columns = marked.shape[0] // 4, marked.shape[1] // 2
    codes = np.einsum("aibj,ij->ab", marked.reshape(rows, 4, columns, 2), BITS)
    return ["".join(chr(0x2800 + int(code)) for code in line) for line in codes]


def dots(image: np.ndarray, columns: int = 72, dark: float = 0.75) -> list[str]:
    """Lines of text that look like a grey image; a dot where it is darker than a part of white."""
    height, width = image.shape
    columns = max(1, min(columns, width // 2))
    rows = max(1, min(round(height * columns * 2 / width / 4), height // 4))
    ys, xs = (np.arange(n + 1) * size // n for n, size in ((rows * 4, height), (columns * 2, width)))
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), ys[:-1], 0), xs[:-1], 1)
    mean = sums / np.maximum(np.outer(np.diff(ys), np.diff(xs)), 1)
    return braille(mean < 255 * dark)


def strokes(points: list[tuple[np.ndarray, np.ndarray]], rows: int, columns: int, *, joined: bool = True) -> list[str]:
    """Polylines whose x and y lie between 0 and 1, from the left and from the bottom."""
    marked = np.zeros((rows * 4, columns * 2), bool)
    for x, y in points:
        across, down = x * (columns * 2 - 1), (1 - y) * (rows * 4 - 1)
        if joined and len(x) > 1:
            steps = np.maximum(np.abs(np.diff(across)), np.abs(np.diff(down))).astype(int) + 1
            fine = np.concatenate([i + np.arange(n) / n for i, n in enumerate(steps)] + [np.array([len(x) - 1])])
            across, down = (np.interp(fine, np.arange(len(x)), v) for v in (across, down))
        marked[np.rint(down).astype(int), np.rint(across).astype(int)] = True
    return braille(marked)
