"""Distances of tokens in an attention's scores: the buckets that they fall into, and tables by distance."""

from __future__ import annotations

import math

import numpy as np

from strata.core import Dim, f32, i32
from strata.mir import Value, constant
from strata.models.weights import WeightBuilder, ops


def shared_buckets(size: np.ndarray, count: int, farthest: int) -> np.ndarray:
    """T5's buckets of distances in one direction: near ones have their own, far ones share by their logarithm."""
    exact = max(count // 2, 1)
    scale = np.float32(math.log(farthest / exact))
    log = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / scale * np.float32(count - exact)
    found: np.ndarray = np.where(size < exact, size, np.minimum(exact + log.astype(np.int64), count - 1))
    return found


def buckets_of_both(gap: np.ndarray, count: int, farthest: int) -> np.ndarray:
    """T5's buckets of distances i - j: half of them are for keys that are not behind their query."""
    found: np.ndarray = shared_buckets(np.abs(gap), count // 2, farthest) + np.where(gap < 0, count // 2, 0)
    return found


def signed_buckets(gap: np.ndarray, count: int, farthest: int) -> np.ndarray:
    """DeBERTa's buckets, with the sign of the distance; all have their own if `count` is 0."""
    if not count:
        return gap
    middle = count // 2
    size = np.where(np.abs(gap) < middle, middle - 1, np.abs(gap)).astype(np.float64)
    far = np.ceil(np.log(size / middle) / np.log((farthest - 1) / middle) * (middle - 1)) + middle
    return np.where(size <= middle, gap, far * np.sign(gap)).astype(np.int64)


def by_distance(b: WeightBuilder, name: str, table: np.ndarray, length: Dim) -> Value:
    """Numbers of a table by the distance i - j of two tokens, [S, S, ...]: row 0 is that of the most negative one."""
    b.bound[name] = table
    held = b.graph.param(name, table.shape, f32 if table.dtype == np.float32 else i32)
    place = ops.iota((length,), 0, i32)
    gap = ops.reshape(place, (length, 1)) - ops.reshape(place, (1, length))
    return ops.take(held, gap + constant((table.shape[0] - 1) // 2, i32), axis=0)
