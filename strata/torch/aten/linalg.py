"""Factorisations, solves, determinants, bags of embeddings, medians.

Torch gives some of them as an op that also tells how it went (`info`), and a check of that. Ours raises instead, so its
word is that all went well; where a program reads it for itself, the op stays in torch.
"""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.core import TensorType, i64
from strata.mir import Value
from strata.torch.aten.promotion import value
from strata.torch.table import Later, Unsupported, aten

CHECKS = ("aten::_linalg_check_errors.default",)


def _went_well(kind: TensorType) -> Later:
    return Later(lambda: ops.zeros(kind.shape, kind.dtype), CHECKS)


def _unknown(what: str) -> Later:
    def refuse() -> Any:
        raise Unsupported(what)

    return Later(refuse)


def _from_triangle(a: Value, *, lower: bool) -> Value:
    """A Hermitian matrix from one of its triangles: the other one is not read."""
    half, rest = (ops.tril(a), ops.tril(a, -1)) if lower else (ops.triu(a), ops.triu(a, 1))
    return half + _turned(rest)


def _turned(a: Value) -> Value:
    return ops.conj(ops.swapaxes(a, -1, -2)) if a.dtype.is_complex else ops.swapaxes(a, -1, -2)


def _of_vectors(a: Value, b: Value) -> bool:
    """Whether torch takes b as vectors."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and tuple(b.shape) == tuple(a.shape[:-1]))


@aten("_linalg_solve_ex")
def solve(out: Any, a: Value, b: Value, *, left: bool = True, check_errors: bool = False) -> Any:
    if _of_vectors(a, b):
        made = ops.solve(a, ops.expand_dims(b, -1))
        made = ops.reshape(made, made.shape[:-1])
    elif left:
        made = ops.solve(a, b)
    else:
        made = ops.swapaxes(ops.solve(ops.swapaxes(a, -1, -2), ops.swapaxes(b, -1, -2)), -1, -2)
    return [made, _unknown("its factors"), _unknown("its pivots"), _went_well(out[3])]


@aten("linalg_inv_ex")
def inv(out: Any, a: Value, *, check_errors: bool = False) -> Any:
    return [ops.inv(a), _went_well(out[1])]


@aten("linalg_cholesky_ex")
def cholesky(out: Any, a: Value, *, upper: bool = False, check_errors: bool = False) -> Any:
    return [ops.cholesky(_from_triangle(a, lower=not upper), upper=upper), _went_well(out[1])]


@aten("linalg_qr")
def qr(out: Any, a: Value, mode: str = "reduced") -> Any:
    if mode == "r":
        return [ops.zeros(out[0].shape, out[0].dtype), ops.qr(a, mode)]
    return list(ops.qr(a, mode))


@aten("_linalg_eigh")
def eigh(out: Any, a: Value, uplo: str = "L", compute_v: bool = True) -> Any:
    whole = _from_triangle(a, lower=uplo.upper() == "L")
    if not compute_v:
        return [ops.eigvalsh(whole), _unknown("vectors that nobody asked for")]
    return list(ops.eigh(whole))


@aten("_linalg_svd")
def svd(out: Any, a: Value, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if not compute_uv:
        return [_unknown("vectors that nobody asked for"), ops.svdvals(a), _unknown("vectors that nobody asked for")]
    return list(ops.svd(a, full_matrices))


@aten("_linalg_det")
def det(out: Any, a: Value) -> Any:
    return [ops.det(a), _unknown("its factors"), _unknown("its pivots")]


@aten("_linalg_slogdet")
def slogdet(out: Any, a: Value) -> Any:
    return [*ops.slogdet(a), _unknown("its factors"), _unknown("its pivots")]


@aten("linalg_lu")
def lu(out: Any, a: Value, *, pivot: bool = True) -> Any:
    if not pivot:
        raise Unsupported("a factorisation without pivots")
    return list(ops.lu(a))


@aten("linalg_solve_triangular")
def solve_triangular(
    out: TensorType, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Value:
    if left:
        return ops.solve_triangular(a, b, lower=not upper, unit_diagonal=unitriangular)
    turned = ops.swapaxes(b, -1, -2)  # x·a = b is aᵀ·xᵀ = bᵀ
    made = ops.solve_triangular(a, turned, lower=not upper, transpose=True, unit_diagonal=unitriangular)
    return ops.swapaxes(made, -1, -2)


@aten("cholesky_solve")
def cholesky_solve(out: TensorType, b: Value, factor: Value, upper: bool = False) -> Value:
    lower = _turned(factor) if upper else factor
    return ops.solve_triangular(_turned(lower), ops.solve_triangular(lower, b, lower=True), lower=False)


@aten("cholesky_inverse")
def cholesky_inverse(out: TensorType, factor: Value, upper: bool = False) -> Value:
    n = factor.shape[-1]
    return cholesky_solve(out, ops.broadcast_to(ops.eye(n, n, dtype=factor.dtype), factor.shape), factor, upper)


@aten("linalg_pinv.atol_rtol_tensor")
def pinv(
    out: TensorType, a: Value, *, atol: Value | None = None, rtol: Value | None = None, hermitian: bool = False
) -> Value:
    if atol is not None or rtol is not None or hermitian:
        raise Unsupported("an inverse with a tolerance that is a tensor")
    return ops.pinv(a)


@aten("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    out: Any, weight: Value, ids: Value, offsets: Value, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Value | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Sums, means or maxima of rows in bags; a bag begins at each of the offsets."""
    ids, offsets = value(ids, i64), value(offsets, i64)
    bags = out[0].shape[0]
    bag = ops.searchsorted(offsets, ops.iota((ids.shape[0],), 0, i64), side="right") - value(1, i64)
    bag = value(bag, i64)
    rows = ops.gather(weight, ids, axis=0)
    counted = ops.ones((ids.shape[0],), weight.dtype)
    if padding_idx >= 0:
        counted = value(ops.not_equal(ids, value(padding_idx, i64)), weight.dtype)
    if per_sample_weights is not None:
        rows = rows * ops.expand_dims(value(per_sample_weights, weight.dtype), -1)
    sizes = ops.scatter_add(counted, bag, bags)
    if mode == 2:
        if padding_idx >= 0:
            raise Unsupported("the greatest of rows without those of a padding")
        at = ops.broadcast_to(ops.expand_dims(bag, -1), rows.shape)
        start = ops.full((bags, rows.shape[1]), float("-inf"), weight.dtype)
        made = ops.scatter_elements(start, at, rows, axis=0, reduction="max")
        made = ops.where(ops.expand_dims(ops.greater(sizes, value(0, weight.dtype)), -1), made, value(0, weight.dtype))
    else:
        made = ops.scatter_add(rows * ops.expand_dims(counted, -1), bag, bags)
    if mode == 1:
        made = made / ops.expand_dims(ops.maximum(sizes, value(1, weight.dtype)), -1)
    return [made, Later(lambda: bag), Later(lambda: value(sizes, out[2].dtype)), _unknown("which rows are greatest")]


@aten("kthvalue")
def kthvalue(out: Any, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return [x, ops.zeros((), i64)]
    axis = dim % x.ndim
    order = ops.argsort(x, axis=axis, stable=True)
    at = value(ops.narrow(order, axis, k - 1, 1), i64)
    found = [ops.gather_elements(x, at, axis=axis), at]
    return found if keepdim else [_without(part, axis) for part in found]


@aten("median.dim")
def median(out: Any, x: Value, dim: int, keepdim: bool = False) -> Any:
    """The lower one of two in the middle; where there is a NaN, it is the first of those."""
    if not x.ndim:
        return [x, ops.zeros((), i64)]
    axis = dim % x.ndim
    half, at = kthvalue(out, x, (x.shape[axis] - 1) // 2 + 1, axis, True)
    if x.dtype.is_float:
        unknown = ops.isnan(x)
        first = value(ops.argmax(value(unknown, i64), axis=axis, keepdims=True), i64)
        at = ops.where(ops.any(unknown, axis=axis, keepdims=True), first, at)
        half = ops.gather_elements(x, at, axis=axis)
    return [half, at] if keepdim else [_without(half, axis), _without(at, axis)]


def _without(x: Value, axis: int) -> Value:
    return ops.reshape(x, (*x.shape[:axis], *x.shape[axis + 1 :]))
