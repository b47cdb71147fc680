"""Shapes and selections of the standard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import strata.tensor as tensors
from strata.core import promote_all
from strata.tensor.tensor import Tensor

_ops: Any = tensors


def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    return list(_ops.broadcast_arrays(*arrays))


def broadcast_to(x: Tensor, /, shape: tuple[int, ...]) -> Tensor:
    made: Tensor = _ops.broadcast_to(x, tuple(shape))
    return made


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    given = [a.reshape((-1,)) for a in arrays] if axis is None else list(arrays)
    kind = promote_all([a.dtype for a in given])
    made: Tensor = _ops.concat([a.cast(kind) for a in given], axis=axis or 0)
    return made


def expand_dims(x: Tensor, /, axis: int) -> Tensor:
    if not -x.ndim - 1 <= axis <= x.ndim:
        raise IndexError(f"expand_dims: axis {axis} does not exist in {x.ndim + 1} dimensions")
    made: Tensor = _ops.expand_dims(x, axis)
    return made


def flip(x: Tensor, /, *, axis: Any = None) -> Tensor:
    made: Tensor = _ops.flip(x, axis)
    return made


def moveaxis(x: Tensor, source: Any, destination: Any, /) -> Tensor:
    sources = (source,) if isinstance(source, int) else tuple(source)
    places = (destination,) if isinstance(destination, int) else tuple(destination)
    rank = x.ndim
    order = [i for i in range(rank) if i not in {s % rank for s in sources}]
    for place, axis in sorted((d % rank, s % rank) for s, d in zip(sources, places, strict=True)):
        order.insert(place, axis)
    return permute_dims(x, tuple(order))


def permute_dims(x: Tensor, /, axes: tuple[int, ...]) -> Tensor:
    made: Tensor = _ops.permute_dims(x, tuple(axes))
    return made


def repeat(x: Tensor, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    counts = np.asarray(repeats.numpy()) if isinstance(repeats, Tensor) else repeats
    if isinstance(counts, np.ndarray) and counts.ndim == 0:
        counts = int(counts)
    if isinstance(counts, np.ndarray) and counts.size == 1:
        counts = int(counts.reshape(()))
    made: Tensor = _ops.repeat(x, counts, axis)
    return made


def reshape(x: Tensor, /, shape: tuple[int, ...], *, copy: bool | None = None) -> Tensor:
    made: Tensor = _ops.reshape(x, tuple(shape))
    return made


def roll(x: Tensor, /, shift: Any, *, axis: Any = None) -> Tensor:
    made: Tensor = _ops.roll(x, shift, axis)
    return made


def squeeze(x: Tensor, /, axis: Any) -> Tensor:
    made: Tensor = _ops.squeeze(x, axis)
    return made


def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
    kind = promote_all([a.dtype for a in arrays])
    made: Tensor = _ops.stack([a.cast(kind) for a in arrays], axis=axis)
    return made


def tile(x: Tensor, repetitions: tuple[int, ...], /) -> Tensor:
    made: Tensor = _ops.tile(x, tuple(repetitions))
    return made


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    return tuple(_ops.unstack(x, axis))


def take(x: Tensor, indices: Tensor, /, *, axis: int | None = None) -> Tensor:
    made: Tensor = _ops.take(x, indices, 0 if axis is None else axis)
    return made


def take_along_axis(x: Tensor, indices: Tensor, /, *, axis: int = -1) -> Tensor:
    made: Tensor = _ops.take_along_axis(x, indices, axis)
    return made
