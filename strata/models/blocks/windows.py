"""Windows of an image: cut, shifted and joined again, and where the pixels of a window are beside each other."""

from __future__ import annotations

import numpy as np

from strata.mir import Value
from strata.models.weights import ops


class WindowCut:
    """How an image [B, H, W, C] is cut into squares, of which none is left over: what they lack is 0."""

    def __init__(self, image: Value, side: int, shift: int) -> None:
        self.size = image.shape[1].__index__(), image.shape[2].__index__()
        self.side, self.shift = side, shift
        self.down, self.right = (-(-n // side) for n in self.size)
        self.count = self.down * self.right

    def cut(self, x: Value) -> Value:
        """The windows as rows, [B, windows, side², C]; with a shift, they begin so many pixels later."""
        x = padded(x, (1, 2), [-n % self.side for n in self.size])
        if self.shift:
            x = ops.roll(x, (-self.shift, -self.shift), (1, 2))
        batch, _, _, width = x.shape
        cut = ops.reshape(x, (batch, self.down, self.side, self.right, self.side, width))
        return ops.reshape(ops.transpose(cut, (0, 1, 3, 2, 4, 5)), (batch, self.count, self.side**2, width))

    def joined(self, rows: Value) -> Value:
        """The image of windows."""
        batch, _, _, width = rows.shape
        cut = ops.reshape(rows, (batch, self.down, self.right, self.side, self.side, width))
        whole = (batch, self.down * self.side, self.right * self.side, width)
        x = ops.reshape(ops.transpose(cut, (0, 1, 3, 2, 4, 5)), whole)
        if self.shift:
            x = ops.roll(x, (self.shift, self.shift), (1, 2))
        return ops.narrow(ops.narrow(x, 1, 0, self.size[0]), 2, 0, self.size[1])

    def apart(self) -> np.ndarray:
        """1 for pixels of a shifted window that come from opposite edges, f32[windows, side², side²]."""
        parts = []
        for count in (self.down, self.right):
            at, size = np.arange(count * self.side), count * self.side
            parts.append((at >= size - self.side).astype(int) + (at >= size - self.shift))
        regions = (3 * parts[0][:, None] + parts[1]).reshape(self.down, self.side, self.right, self.side)
        flat = regions.transpose(0, 2, 1, 3).reshape(self.count, self.side**2)
        return (flat[:, :, None] != flat[:, None]).astype(np.float32)


def relative_places(side: int) -> np.ndarray:
    """The row of a table of (2 · side - 1)² for each pair of pixels of a window, i32[side⁴]."""
    rows, columns = (x.reshape(-1) for x in np.mgrid[:side, :side])
    down, right = (x[:, None] - x[None] + side - 1 for x in (rows, columns))
    return (down * (2 * side - 1) + right).reshape(-1).astype(np.int32)


def log_distances(side: int, trained: int) -> np.ndarray:
    """How far down and right the pixels of a window can be apart, as logarithms, f32[(2 · side - 1)², 2]: 1 is about
    what it was in training, in windows of another side."""
    steps = np.arange(1 - side, side) * 8 / max(trained - 1, 1)
    steps = np.sign(steps) * np.log2(np.abs(steps) + 1) / 3
    return np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2).astype(np.float32)


def padded(x: Value, axes: tuple[int, int], more: list[int]) -> Value:
    """Zeros behind two axes."""
    widths = [(0, more[axes.index(i)] if i in axes else 0) for i in range(x.ndim)]
    return ops.pad(x, widths) if any(more) else x


def unit(x: Value) -> Value:
    """Vectors of length 1."""
    return x / ops.maximum(ops.sqrt(ops.sum(x * x, -1, keepdims=True)), 1e-12)
