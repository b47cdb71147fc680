"""TensorType: an element type and a shape, and the shape rules that many ops share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from strata.arguments import hot, untouched
from strata.core.dims import Dim, Symbol, SymExpr, dim_max, dim_prod, static_prod, substitute, symbols
from strata.core.dtypes import DType, as_dtype
from strata.errors import OptionError, ShapeError

Shape = tuple[Dim, ...]


@hot
@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a value: `f32[4, S + 1]`."""

    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        if type(self.dtype) is not DType:
            object.__setattr__(self, "dtype", as_dtype(self.dtype))
        if type(self.shape) is not tuple or not all(
            isinstance(d, SymExpr) or (type(d) is int and d >= 0) for d in self.shape
        ):
            object.__setattr__(self, "shape", check_shape(self.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return _product(self.shape)

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape as ints; an error names the first size that is still symbolic."""
        for d in self.shape:
            if isinstance(d, SymExpr):
                d.__index__()
        return self.shape  # type: ignore[return-value]

    @property
    def nbytes(self) -> Dim:
        return self.size * self.dtype.itemsize

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def with_shape(self, shape: Sequence[Dim]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def drop(self, *axes: int) -> TensorType:
        """Without the given axes (non-negative)."""
        return self.with_shape([d for i, d in enumerate(self.shape) if i not in axes])

    def bind(self, binding: Mapping[str, Dim]) -> TensorType:
        return self.with_shape([substitute(d, binding) for d in self.shape])

    @untouched
    def symbols(self) -> dict[str, Symbol]:
        found: dict[str, Symbol] = {}
        for d in self.shape:
            found |= symbols(d)
        return found

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"

    __repr__ = __str__


def check_shape(shape: Iterable[object]) -> Shape:
    """A shape as a tuple of ints and symbolic sizes; anything else is an error."""
    result: list[Dim] = []
    if not isinstance(shape, Iterable):
        raise ShapeError(f"{shape!r} is not a shape: a shape is a tuple of sizes", code="S101")
    for d in shape:
        if isinstance(d, SymExpr):
            result.append(d)
        elif isinstance(d, (int, np.integer)) and not isinstance(d, bool) and d >= 0:
            result.append(int(d))
        else:
            raise ShapeError(f"shape {tuple(shape) if isinstance(shape, (list, tuple)) else shape}: "
                             f"{d!r} is not a size", code="S101")  # fmt: skip
    return tuple(result)


def normalize_axis(axis: int, ndim: int, what: str) -> int:
    """A non-negative axis; counts from the end when negative."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise OptionError(f"{what}: an axis is an int, got {axis!r}", code="O120")
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{what}: axis {axis} does not exist in {ndim} dimensions", code="S103")
    return int(axis) % ndim


def normalize_axes(axes: int | Iterable[int] | None, ndim: int, what: str) -> tuple[int, ...]:
    """Sorted, distinct, non-negative axes; None is all of them."""
    if axes is None:
        return tuple(range(ndim))
    if isinstance(axes, (int, np.integer)):
        axes = (int(axes),)
    return tuple(sorted({normalize_axis(a, ndim, what) for a in axes}))


def broadcast_dims(a: Dim, b: Dim) -> Dim | None:
    """NumPy's rule for one axis; None when the sizes cannot meet.

    A symbol against another size is taken on trust here and checked when the symbol is bound: the known size wins, and
    two different symbols give their maximum (which is right when one of them turns out to be 1, or both are equal).
    """
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        return None
    if isinstance(a, int) or isinstance(b, int):
        return a if isinstance(a, int) else b
    return dim_max(a, b)


def broadcast_shapes(*shapes: Shape, what: str = "broadcast") -> Shape:
    """The common shape of several operands; the error names the two shapes that disagree."""
    result: Shape = ()
    for shape in shapes:
        long, short = (result, shape) if len(result) >= len(shape) else (shape, result)
        joined = list(long)
        for i in range(1, len(short) + 1):
            d = broadcast_dims(result[-i], shape[-i]) if len(result) >= i and len(shape) >= i else long[-i]
            if d is None:
                raise ShapeError(
                    f"{what}: shapes {show_shape(result)} and {show_shape(shape)} do not broadcast: "
                    f"sizes {result[-i]} and {shape[-i]} differ",
                    code="S104",
                )
            joined[-i] = d
        result = tuple(joined)
    return result


def show_shape(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_product = lru_cache(maxsize=4096)(dim_prod)  # of shapes, which a graph has few of


def num_elements(shape: Sequence[Dim]) -> int | None:
    """Element count, or None while a size is symbolic."""
    return static_prod(shape)
