"""Samples: example inputs of an op, from which its tests are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import TensorType


@dataclass(frozen=True)
class Draw:
    """Random numbers of a type in [low, high), or a standard normal when no range is given."""

    type: TensorType
    low: float | None = None
    high: float | None = None
    distinct: bool = False  # well separated values: no ties, no kinks nearby

    def array(self, rng: np.random.Generator) -> np.ndarray:
        shape, dtype = self.type.static_shape, self.type.dtype
        if self.distinct:
            count = int(np.prod(shape))
            values = (rng.permutation(count) - count / 2 + 0.3) * 0.37
            return values.reshape(shape).astype(dtype.np)
        if dtype.is_bool:
            return rng.random(shape) < 0.5
        if dtype.is_int:
            low = -4 if self.low is None and dtype.is_signed else int(self.low or 0)
            high = 5 if self.high is None else int(self.high)
            return rng.integers(low, high, shape).astype(dtype.np)
        if self.low is None or self.high is None:
            values = rng.standard_normal(shape)
            if dtype.is_complex:
                values = values + 1j * rng.standard_normal(shape)
        else:
            values = rng.uniform(self.low, self.high, shape)
        return values.astype(dtype.np)


def draw(type: TensorType, low: float | None = None, high: float | None = None, *, distinct: bool = False) -> Draw:
    return Draw(type, low, high, distinct)


class Sample:
    """Inputs and fields for one application of an op.

    Inputs are tensor types (random normal), draws, or arrays. `grad=False` leaves a sample out of derivative tests (a
    kink, a tie, an integer input); `rtol` loosens the comparison with finite differences where the op is badly
    conditioned there.
    """

    def __init__(self, *inputs: Any, grad: Any = True, rtol: Any = 1e-6, **fields: Any) -> None:
        self.inputs = tuple(Draw(x) if isinstance(x, TensorType) else x for x in inputs)
        self.grad = grad
        self.rtol = rtol
        self.fields = fields

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """The inputs, the same for the same seed."""
        rng = np.random.default_rng(seed)
        return [x.array(rng) if isinstance(x, Draw) else np.asarray(x) for x in self.inputs]

    def __repr__(self) -> str:
        shown = [str(x.type) if isinstance(x, Draw) else f"{x.dtype}{list(x.shape)}" for x in self.inputs]
        shown += [f"{k}={_short(v)}" for k, v in self.fields.items()]
        return f"Sample({', '.join(shown)})"


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) < 40 else text[:37] + "..."
