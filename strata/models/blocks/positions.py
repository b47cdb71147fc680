"""Places in an image as numbers: sines and cosines of rows and columns, boxes that queries begin with."""

from __future__ import annotations

import numpy as np

from strata.mir import Value
from strata.models.weights import ops

SIDE, EDGE = 0.05, 0.01  # of the boxes that queries begin with, and how near the border they may be


def sine_places(high: int, wide: int, half: int) -> np.ndarray:
    """Sines and cosines of the place of each pixel of an image as a part of its size, f32[H · W, 2 · half]."""
    rates = 10000.0 ** (2 * (np.arange(half) // 2) / half)
    parts = []
    for count in (high, wide):
        angles = (np.arange(1, count + 1) / (count + 1e-6) * 2 * np.pi)[:, None] / rates
        parts.append(np.where(np.arange(half) % 2 == 0, np.sin(angles), np.cos(angles)))
    down, across = np.repeat(parts[0], wide, 0), np.tile(parts[1], (high, 1))
    return np.concatenate([down, across], -1).astype(np.float32)


def grid_places(high: int, wide: int, width: int, heat: int) -> np.ndarray:
    """Sines and cosines of the row and the column of each pixel, f32[H · W, width]."""
    rates = 1.0 / heat ** (np.arange(width // 4) / (width // 4))
    down, across = (x.reshape(-1)[:, None] * rates for x in np.mgrid[:high, :wide])
    return np.concatenate([np.sin(down), np.cos(down), np.sin(across), np.cos(across)], 1).astype(np.float32)


def first_boxes(sizes: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """A box at each pixel before the sigmoid, f32[1, pixels, 4], and whether it is inside of the image."""
    found = []
    for level, (high, wide) in enumerate(sizes):
        rows, columns = np.mgrid[:high, :wide].astype(np.float32)
        side = np.full((high, wide), SIDE * 2.0**level, np.float32)
        found.append(np.stack([(columns + 0.5) / wide, (rows + 0.5) / high, side, side], -1).reshape(-1, 4))
    boxes = np.concatenate(found)[None]
    inside = np.all((boxes > EDGE) & (boxes < 1 - EDGE), -1)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        raw = np.log(boxes / (1 - boxes))
    return np.where(inside, raw, np.finfo(np.float32).max).astype(np.float32), inside


def sampled(images: list[Value], points: Value, share: Value) -> Value:
    """Deformable attention: what each query reads, [B, Q, H], at points [B, Q, heads, P, 2] of images [B, H, .., ..].

    The points, from 0 to 1, are dealt out to the images in order; `share` [B, Q, heads, P] is the weight of each.
    """
    batch, queries, heads, count = share.shape
    width, each = images[0].shape[1].__index__(), count.__index__() // len(images)
    lead = batch * heads
    grid = ops.reshape(ops.transpose(points * 2.0 - 1.0, (0, 2, 1, 3, 4)), (lead, queries, count, 2))
    values = []
    for i, image in enumerate(images):
        split = ops.reshape(image, (lead, width // heads.__index__(), *image.shape[2:]))
        values.append(ops.grid_sample(split, ops.narrow(grid, 2, i * each, each)))
    share = ops.reshape(ops.transpose(share, (0, 2, 1, 3)), (lead, 1, queries, count))
    read = ops.reshape(ops.sum(ops.concat(values, -1) * share, -1), (batch, width, queries))
    return ops.transpose(read, (0, 2, 1))
