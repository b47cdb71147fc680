"""Manipulation functions of the standard: shapes and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import strata.tensor as tensors
from strata import core
from strata.core import Dim, here, promote_all
from strata.errors import IndexRangeError, ShapeError
from strata.tensor.tensor import Tensor

_ops: Any = tensors


def broadcast_arrays(*arrays: Tensor) -> tuple[Tensor, ...]:
    return tuple(_ops.broadcast_arrays(*arrays))


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape that arrays of these shapes are broadcast to."""
    return core.broadcast_shapes(*(core.check_shape(tuple(s)) for s in shapes)) if shapes else ()


def broadcast_to(x: Tensor, /, shape: tuple[int, ...]) -> Tensor:
    made: Tensor = _ops.broadcast_to(x, tuple(shape))
    return made


def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
    given = [a.reshape((-1,)) for a in arrays] if axis is None else list(arrays)
    kind = promote_all([a.dtype for a in given])
    made: Tensor = _ops.concat([a.cast(kind) for a in given], axis=axis or 0)
    return made


def expand_dims(x: Tensor, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """Axes of size one at these places of the result."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    rank = x.ndim + len(axes)
    for a in axes:
        if not -rank <= a < rank:
            raise IndexRangeError(
                f"expand_dims: axis {a} does not exist in {rank} dimensions", code="I380", place=here()
            )
    places = sorted({a % rank for a in axes})
    if len(places) != len(axes):
        raise ShapeError(f"expand_dims: an axis is named twice in {axes}", code="S389", place=here())
    made = x
    for place in places:
        made = _ops.expand_dims(made, place)
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
