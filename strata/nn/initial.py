"""Initialisers of layers, from explicit keys or from the stream that `manual_seed` restarts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from strata.tensor import Tensor, random


class Keys:
    """A stream of keys: `keys = Keys(0); Linear(4, 2, key=next(keys))`."""

    def __init__(self, seed: int = 0) -> None:
        random.key(seed)  # refuses anything but a seed
        self._seed = seed  # the key is made where it is used: another device may be the default by then
        self._count = 0

    def __iter__(self) -> Keys:
        return self

    def __next__(self) -> Tensor:
        self._count += 1
        made: Tensor = random.fold_in(random.key(self._seed), self._count).realize()
        return made


_stream = Keys(0)


def manual_seed(seed: int) -> None:
    """Start the stream of keys again that layers take theirs from when they are given none."""
    global _stream
    _stream = Keys(seed)


def key_or_next(key: Any) -> Any:
    return next(_stream) if key is None else key


def uniform(key: Any, shape: Sequence[int], bound: float, dtype: Any = "f32") -> Tensor:
    """Uniform in -bound .. bound."""
    made: Tensor = random.uniform(key, tuple(shape), dtype, -bound, bound).realize()
    return made


def normal(key: Any, shape: Sequence[int], std: float = 1.0, dtype: Any = "f32") -> Tensor:
    made: Tensor = (random.normal(key, tuple(shape), dtype) * std).realize()
    return made


def fan_in(shape: Sequence[int]) -> int:
    """Inputs of one output of a weight [out, in, …]."""
    return prod(shape[1:])


def kaiming_uniform(key: Any, shape: Sequence[int], dtype: Any = "f32") -> Tensor:
    """torch's start for linear and convolutional weights: uniform in ±1/√fan_in."""
    return uniform(key, shape, 1 / sqrt(max(1, fan_in(shape))), dtype)


def xavier_uniform(key: Any, shape: Sequence[int], dtype: Any = "f32") -> Tensor:
    """Glorot and Bengio's: uniform in ±√(6 / (fan_in + fan_out))."""
    field = prod(shape[2:])
    return uniform(key, shape, sqrt(6 / (fan_in(shape) + shape[0] * field)), dtype)
