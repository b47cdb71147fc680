"""Arrays of any dtype: small numbers, or those at which arithmetic wraps, overflows, underflows or is not a number."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from strata.core import DType

STYLES = ("plain", "extreme", "finite")


def draw_array(rng: np.random.Generator, shape: Sequence[int], dtype: DType, style: str) -> np.ndarray:
    """`plain`: small numbers. `finite`: also the largest and smallest. `extreme`: also infinities and NaN.

    `ids`: whole numbers below 4. `positive`: numbers from 1 on that overflow nothing.
    """
    if style == "ids":
        return rng.integers(0, 4, shape).astype(dtype.np)
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_int:
        return _whole(rng, shape, dtype, style)
    if dtype.is_complex:
        parts = [_real(rng, shape, dtype.real, style, huge=False).astype(dtype.real.np) for _ in range(2)]
        made = np.empty(shape, dtype.np)
        made.real, made.imag = parts
        return made
    return _real(rng, shape, dtype, style).astype(dtype.np)


def _whole(rng: np.random.Generator, shape: Sequence[int], dtype: DType, style: str) -> np.ndarray:
    info = ml_dtypes.iinfo(dtype.np)
    low, high = int(info.min), int(info.max)
    if style == "positive":
        return rng.integers(1, min(high, 9), shape, endpoint=True).astype(dtype.np)
    small = rng.integers(max(low, -9), min(high, 9), shape, endpoint=True)
    if style == "plain":
        return small.astype(dtype.np)
    wide = rng.integers(low, high, shape, endpoint=True, dtype=np.int64 if low < 0 else np.uint64)
    edges = [low, low + 1, high, high - 1, 0, 1, 2, *([-1, -2] if low < 0 else [])]
    at_edges = np.array([int(e) for e in edges], dtype=object)[rng.integers(0, len(edges), shape)]
    kind = rng.integers(0, 3, shape)
    mixed = np.where(kind == 0, small, np.where(kind == 1, wide.astype(object), at_edges))
    return np.asarray(mixed, dtype=object).astype(np.int64 if low < 0 else np.uint64).astype(dtype.np)


def _real(rng: np.random.Generator, shape: Sequence[int], dtype: DType, style: str, *, huge: bool = True) -> np.ndarray:
    if style == "positive":
        return np.asarray(rng.uniform(0.5, 2.0, shape))
    values = np.asarray(rng.standard_normal(shape))
    if style == "plain":
        return values
    info = ml_dtypes.finfo(dtype.np)
    tiny, least = float(info.smallest_normal), float(info.smallest_subnormal)
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 3.0, tiny, -tiny, least, -least]
    edges += [float(info.eps), 1.0 + float(info.eps), 1e4, -1e4]
    if huge:
        edges += [float(info.max), float(info.min)]
    if style == "extreme":
        edges += [np.nan, np.inf, -np.inf] * 2
    chosen = np.array(edges)[rng.integers(0, len(edges), shape)]
    return np.where(rng.integers(0, 2, shape) == 0, values, chosen)
