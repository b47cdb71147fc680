"""The linear algebra extension of the standard."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import numpy as np

import strata.tensor as tensors
from strata.core import c64, here, i64, promote
from strata.errors import DTypeError, ShapeError
from strata.tensor.creation import asarray
from strata.tensor.tensor import Tensor
from strata.tensor.xp.reductions import _sum_dtype

_ops: Any = tensors


class EigResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class EighResult(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    Q: Tensor
    R: Tensor


class SlogdetResult(NamedTuple):
    sign: Tensor
    logabsdet: Tensor


class SVDResult(NamedTuple):
    U: Tensor
    S: Tensor
    Vh: Tensor


def matmul(x1: Any, x2: Any, /) -> Tensor:
    made: Tensor = _ops.matmul(x1, x2)
    return made


def matrix_transpose(x: Tensor, /) -> Tensor:
    return x.mT


def tensordot(x1: Tensor, x2: Tensor, /, *, axes: Any = 2) -> Tensor:
    made: Tensor = _ops.tensordot(x1, x2, axes)
    return made


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    if x1.shape[axis] != x2.shape[axis]:
        raise ShapeError(f"vecdot: the sizes of axis {axis} differ, {x1.type} and {x2.type}", code="S102", place=here())
    made: Tensor = _ops.vecdot(x1, x2, axis)
    return made.cast(promote(x1.dtype, x2.dtype))


def cholesky(x: Tensor, /, *, upper: bool = False) -> Tensor:
    made: Tensor = _ops.cholesky(x, upper=upper)
    return made


def cross(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    made: Tensor = _ops.cross(x1, x2, axis)
    return made


def det(x: Tensor, /) -> Tensor:
    made: Tensor = _ops.det(x)
    return made


def diagonal(x: Tensor, /, *, offset: int = 0) -> Tensor:
    made: Tensor = _ops.diagonal(x, offset, -2, -1)
    return made


def eig(x: Tensor, /) -> EigResult:
    """Eigenvalues and eigenvectors of any square matrices; complex, computed at once."""
    values, vectors = np.linalg.eig(_square_floats(x, "eig"))
    return EigResult(*(asarray(a.astype(_complex_of(x), copy=False)) for a in (values, vectors)))


def eigvals(x: Tensor, /) -> Tensor:
    return asarray(np.linalg.eigvals(_square_floats(x, "eigvals")).astype(_complex_of(x), copy=False))


def _square_floats(x: Tensor, what: str) -> np.ndarray:
    if not x.dtype.is_inexact:
        raise DTypeError(f"{what}: does not take {x.type}, only floats", code="D104", place=here())
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{what}: needs square matrices, got {x.type}", code="S125", place=here())
    return x.numpy()


def _complex_of(x: Tensor) -> Any:
    return promote(x.dtype, c64).np


def eigh(x: Tensor, /) -> EighResult:
    return EighResult(*_ops.eigh(x))


def eigvalsh(x: Tensor, /) -> Tensor:
    made: Tensor = _ops.eigvalsh(x)
    return made


def inv(x: Tensor, /) -> Tensor:
    made: Tensor = _ops.inv(x)
    return made


def matrix_norm(x: Tensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    made: Tensor = _ops.norm(x, ord, (-2, -1), keepdims)
    return made


def matrix_power(x: Tensor, n: int, /) -> Tensor:
    made: Tensor = _ops.matrix_power(x, n)
    return made


def matrix_rank(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"matrix_rank: needs a matrix, got {x.type}", code="S125", place=here())
    made: Tensor = _ops.matrix_rank(x, float(rtol) if isinstance(rtol, Tensor) and rtol.size == 1 else rtol)
    return made.cast(i64)


def outer(x1: Tensor, x2: Tensor, /) -> Tensor:
    if x1.ndim != 1 or x2.ndim != 1:
        raise ShapeError(f"outer: needs two vectors, got {x1.type} and {x2.type}", code="S125", place=here())
    made: Tensor = _ops.outer(x1, x2)
    return made


def pinv(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    if not isinstance(rtol, Tensor):
        made: Tensor = _ops.pinv(x, rtol)
        return made
    if 0 in x.shape[-2:]:
        return x.mT  # nothing to invert
    u, values, vh = _ops.svd(x, False)
    limit = rtol.cast(values.dtype).reshape((*rtol.shape, 1)) * _ops.max(values, -1, True)
    inverse = _ops.where(values > limit, 1.0 / values, 0.0)
    row = inverse.reshape((*inverse.shape[:-1], 1, inverse.shape[-1])).cast(x.dtype)
    made = (vh.mT.conj() if x.dtype.is_complex else vh.mT) * row
    return made @ (u.mT.conj() if x.dtype.is_complex else u.mT)


def qr(x: Tensor, /, *, mode: str = "reduced") -> QRResult:
    return QRResult(*_ops.qr(x, mode))


def slogdet(x: Tensor, /) -> SlogdetResult:
    return SlogdetResult(*_ops.slogdet(x))


def solve(x1: Tensor, x2: Tensor, /) -> Tensor:
    made: Tensor = _ops.solve(x1, x2)
    return made


def svd(x: Tensor, /, *, full_matrices: bool = True) -> SVDResult:
    return SVDResult(*_ops.svd(x, full_matrices))


def svdvals(x: Tensor, /) -> Tensor:
    made: Tensor = _ops.svdvals(x)
    return made


def trace(x: Tensor, /, *, offset: int = 0, dtype: Any = None) -> Tensor:
    kind = _sum_dtype(x, dtype)
    made: Tensor = _ops.trace(x.cast(kind), offset, -2, -1)
    return made.cast(kind)


def vector_norm(x: Tensor, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Tensor:
    axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    size = _ops.abs(x)
    if ord == inf:
        made: Tensor = _ops.max(size, axes, keepdims)
    elif ord == -inf:
        made = _ops.min(size, axes, keepdims)
    elif ord == 0:
        made = _ops.sum((size != 0).cast(size.dtype), axes, keepdims)
    elif ord == 1:
        made = _ops.sum(size, axes, keepdims)
    elif ord == 2:
        made = _ops.sqrt(_ops.sum(size * size, axes, keepdims))
    else:
        made = _ops.power(_ops.sum(_ops.power(size, float(ord)), axes, keepdims), 1.0 / ord)
    return made
