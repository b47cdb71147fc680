"""Reductions, cumulative sums, sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strata import ops
from strata.core import TensorType, bool_, i64
from strata.mir import METHODS, Value, constant
from strata.torch.aten.promotion import as_truth, value
from strata.torch.table import Unsupported, aten, enter

Axes = int | Sequence[int] | None


def _axes(x: Value, dims: Axes) -> tuple[int, ...]:
    """Axes as torch names them: none, or an empty list, are all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(x.ndim))
    given = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted(d % max(x.ndim, 1) for d in given)) if x.ndim else ()


def _folded(x: Value, dims: Axes, keepdim: bool, name: str) -> Value:
    axes = _axes(x, dims)
    return METHODS[name](x, axis=axes, keepdims=keepdim) if axes else x


@aten("sum", "sum.dim_IntList")
def sum_(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _folded(value(x, out.dtype), dim, keepdim, "sum")


@aten("mean", "mean.dim")
def mean(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _folded(value(x, out.dtype), dim, keepdim, "mean")


@aten("prod", "prod.dim_int")
def prod(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _folded(value(x, out.dtype), dim, keepdim, "prod")


@aten("amax", "max")
def amax(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _folded(x, dim, keepdim, "max")


@aten("amin", "min")
def amin(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _folded(x, dim, keepdim, "min")


@aten("any", "any.dim", "any.dims")
def any_(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _truth(x, dim, keepdim, "any")


@aten("all", "all.dim", "all.dims")
def all_(out: TensorType, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
    return _truth(x, dim, keepdim, "all")


def _truth(x: Value, dim: Axes, keepdim: bool, name: str) -> Value:
    if dim is not None and not isinstance(dim, int) and not len(dim):
        return as_truth(x)  # of these alone, no axes are no axes
    return _folded(as_truth(x), dim, keepdim, name)


def _arg(x: Value, dim: int | None, keepdim: bool, name: str) -> Value:
    if not x.ndim:
        return constant(0, i64)
    if dim is not None:
        return METHODS[name](x, axis=dim % x.ndim, keepdims=keepdim)
    flat = METHODS[name](ops.reshape(x, (-1,)), axis=0)
    return ops.reshape(flat, (1,) * x.ndim) if keepdim else flat


@aten("argmax")
def argmax(out: TensorType, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(_counted(x), dim, keepdim, "argmax")


@aten("argmin")
def argmin(out: TensorType, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(_counted(x), dim, keepdim, "argmin")


def _counted(x: Value) -> Value:
    return METHODS["cast"](x, "u8") if x.dtype is bool_ else x


@aten("max.dim")
def max_dim(out: Any, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _folded(x, dim, keepdim, "max"), _arg(_counted(x), dim, keepdim, "argmax")


@aten("min.dim")
def min_dim(out: Any, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _folded(x, dim, keepdim, "min"), _arg(_counted(x), dim, keepdim, "argmin")


def _variance(x: Value, dim: Axes, correction: Any, keepdim: bool, name: str) -> Value:
    axes = _axes(x, dim)
    if x.dtype.is_complex:
        raise Unsupported("variance of complex numbers")
    if not axes:
        x, axes = ops.reshape(x, (1,)), (0,)
        return METHODS[name](x, axis=axes, keepdims=False, correction=1.0 if correction is None else float(correction))
    return METHODS[name](x, axis=axes, keepdims=keepdim, correction=1.0 if correction is None else float(correction))


@aten("var.correction")
def var(out: TensorType, x: Value, dim: Axes = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _variance(x, dim, correction, keepdim, "var")


@aten("std.correction")
def std(out: TensorType, x: Value, dim: Axes = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _variance(x, dim, correction, keepdim, "std")


@aten("var.dim")
def var_dim(out: TensorType, x: Value, dim: Axes = None, unbiased: bool = True, keepdim: bool = False) -> Value:
    return _variance(x, dim, int(unbiased), keepdim, "var")


@aten("var_mean.correction")
def var_mean(out: Any, x: Value, dim: Axes = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _variance(x, dim, correction, keepdim, "var"), _folded(x, dim, keepdim, "mean")


@aten("logsumexp")
def logsumexp(out: TensorType, x: Value, dim: Axes, keepdim: bool = False) -> Value:
    x = value(x, out.dtype)
    axes = _axes(x, dim)
    return ops.logsumexp(x, axis=axes, keepdims=keepdim) if axes else x


@aten("linalg_vector_norm")
def vector_norm(
    out: TensorType, x: Value, ord: Any = 2, dim: Axes = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    if x.dtype.is_complex:
        x = ops.abs(x)
    x = ops.abs(value(x, out.dtype))
    zero = value(0, out.dtype)
    if ord == math.inf:
        return _folded(x, dim, keepdim, "max")
    if ord == -math.inf:
        return _folded(x, dim, keepdim, "min")
    if ord == 0:
        return _folded(value(ops.not_equal(x, zero), out.dtype), dim, keepdim, "sum")
    if ord == 1:
        return _folded(x, dim, keepdim, "sum")
    if ord == 2:
        return ops.sqrt(_folded(x * x, dim, keepdim, "sum"))
    powers = _folded(ops.power(x, value(float(ord), out.dtype)), dim, keepdim, "sum")
    return ops.power(powers, value(1 / ord, out.dtype))


def _cumulative(name: str) -> Any:
    def rule(out: TensorType, x: Value, dim: int, *, dtype: Any = None) -> Value:
        x = value(x, out.dtype)
        return METHODS[name](x, axis=dim % x.ndim) if x.ndim else x

    rule.__module__ = __name__
    return rule


for _name in ("cumsum", "cumprod"):
    enter((_name,), _cumulative(_name), "reduce")


def _running(name: str) -> Any:
    def rule(out: Any, x: Value, dim: int) -> Any:
        """The id is that of the last element that is as great."""
        if not x.ndim:
            return x, constant(0, i64)
        axis, counted = dim % x.ndim, _counted(x)
        values, _ = METHODS[name](counted, axis=axis)
        reached = ops.equal(counted, values)
        if x.dtype.is_float:
            reached = ops.logical_or(reached, ops.isnan(x))
        ids, _ = ops.cummax(ops.where(reached, ops.iota(x.shape, axis, i64), value(0, i64)), axis=axis)
        return (as_truth(values) if x.dtype is bool_ else values), ids

    rule.__module__ = __name__
    return rule


for _name in ("cummax", "cummin"):
    enter((_name,), _running(_name), "reduce")


@aten("sort", "sort.stable")
def sort(out: Any, x: Value, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Ids are those of a stable sort, which `sort` may give as well."""
    if args and isinstance(args[0], bool | None) and len(args) == 3:
        args = args[1:]
    dim = args[0] if args else dim
    descending = args[1] if len(args) > 1 else descending
    if not x.ndim:
        return x, constant(0, i64)
    order = ops.argsort(_counted(x), axis=dim % x.ndim, descending=descending, stable=True)
    return ops.gather_elements(x, order, axis=dim % x.ndim), order


@aten("topk")
def topk(out: Any, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return x, constant(0, i64)
    return ops.topk(x, k, axis=dim % x.ndim, largest=largest)


@aten("searchsorted.Tensor")
def searchsorted(
    out: TensorType,
    numbers: Value,
    x: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Value:
    if sorter is not None or numbers.ndim != 1:
        raise Unsupported("searchsorted of many rows, or with a sorter")
    return ops.searchsorted(numbers, x, side=side or ("right" if right else "left"))


@aten("bucketize.Tensor")
def bucketize(out: TensorType, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return ops.searchsorted(boundaries, x, side="right" if right else "left")
