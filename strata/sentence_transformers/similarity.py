"""Similarities of vectors: every row of one matrix with every row of another, or row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _rows(x: Any) -> np.ndarray:
    found = np.asarray(x)
    if found.dtype.kind in "iub":
        found = found.astype(np.float32)
    return found[None] if found.ndim == 1 else found


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def cos_sim(a: Any, b: Any) -> np.ndarray:
    """Cosines of all pairs of rows."""
    return _unit(_rows(a)) @ _unit(_rows(b)).T


def dot_score(a: Any, b: Any) -> np.ndarray:
    """Dot products of all pairs of rows."""
    return _rows(a) @ _rows(b).T


def euclidean_sim(a: Any, b: Any) -> np.ndarray:
    """Negative distances of all pairs of rows."""
    x, y = _rows(a), _rows(b)
    return -np.sqrt(np.maximum(((x[:, None] - y[None]) ** 2).sum(-1), 0))


def manhattan_sim(a: Any, b: Any) -> np.ndarray:
    """Negative sums of absolute differences of all pairs of rows."""
    x, y = _rows(a), _rows(b)
    return -np.abs(x[:, None] - y[None]).sum(-1)


def _paired(score: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Any, Any], np.ndarray]:
    return lambda a, b: score(_rows(a), _rows(b))


SIMILARITIES: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "cosine": cos_sim,
    "dot": dot_score,
    "euclidean": euclidean_sim,
    "manhattan": manhattan_sim,
}
PAIRWISE: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "cosine": _paired(lambda x, y: (_unit(x) * _unit(y)).sum(-1)),
    "dot": _paired(lambda x, y: (x * y).sum(-1)),
    "euclidean": _paired(lambda x, y: -np.sqrt(((x - y) ** 2).sum(-1))),
    "manhattan": _paired(lambda x, y: -np.abs(x - y).sum(-1)),
}
