"""Reductions, arg-reductions and running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.core import bool_
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.elementwise import accumulate_in
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value


def reduce_axes(n: NodeView) -> tuple[int, ...] | None:
    """The axes to reduce: an attribute, later an input. None is all of them, () is none."""
    axes = n.ints(1) if n.has(1) else n.attr("axes")
    if axes is None or len(axes) == 0:
        return () if n.attr("noop_with_empty_axes", 0) else None
    return tuple(n.place(a) for a in axes)


def _l1(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.sum(ops.abs(x), axis, keepdims, dtype=x.dtype)


def _l2(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.cast(ops.sqrt(ops.cast(_square_sum(x, axis, keepdims), _real(x))), x.dtype)


def _real(x: Value) -> Any:
    return x.dtype if x.dtype.is_float else "f64"


def _square_sum(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.sum(x * x, axis, keepdims, dtype=x.dtype)


def _log_sum(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.cast(ops.log(ops.cast(ops.sum(x, axis, keepdims, dtype=x.dtype), _real(x))), x.dtype)


def _logsumexp(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.cast(ops.logsumexp(ops.cast(x, _real(x)), axis, keepdims), x.dtype)


def _mean(x: Value, axis: Any, keepdims: bool) -> Value:
    return ops.cast(ops.mean(x, axis, keepdims), x.dtype)


def _extreme(which: Callable[..., Value], on_bool: Callable[..., Value]) -> Callable[..., Value]:
    def fn(x: Value, axis: Any, keepdims: bool) -> Value:
        if x.dtype is bool_:
            return on_bool(x, axis, keepdims)
        shape = [x.shape[a] for a in (range(x.ndim) if axis is None else axis)]
        if 0 not in shape:
            return which(x, axis, keepdims)
        return ops.cast(_empty_extreme(x, axis, keepdims, low=which is ops.max), x.dtype)

    return fn


def _empty_extreme(x: Value, axis: Any, keepdims: bool, *, low: bool) -> Value:
    """Of no elements: what loses against everything."""
    axes = tuple(range(x.ndim)) if axis is None else axis
    shape = [1 if i in axes else d for i, d in enumerate(x.shape)] if keepdims else [
        d for i, d in enumerate(x.shape) if i not in axes
    ]  # fmt: skip
    if x.dtype.is_float:
        return ops.full(shape, x.dtype.lowest if low else -x.dtype.lowest, x.dtype)
    bits = x.dtype.bits - (x.dtype.kind == "int")
    extreme = (0 if x.dtype.kind == "uint" else -(1 << bits)) if low else (1 << bits) - 1
    return ops.full(shape, extreme, x.dtype)


REDUCTIONS: dict[str, Callable[..., Value]] = {
    "ReduceSum": lambda x, a, k: ops.sum(x, a, k, dtype=x.dtype),
    "ReduceProd": lambda x, a, k: ops.prod(x, a, k, dtype=x.dtype),
    "ReduceMean": _mean,
    "ReduceMax": _extreme(ops.max, ops.any),
    "ReduceMin": _extreme(ops.min, ops.all),
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceSumSquare": _square_sum,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _logsumexp,
}


def _reduction(fn: Callable[..., Value]) -> Callable[[NodeView], Any]:
    def reader(n: NodeView) -> Any:
        axes = reduce_axes(n)
        if axes == ():
            return _noop(n, fn)
        return fn(n[0], axes, bool(n.attr("keepdims", 1)))

    return reader


def _noop(n: NodeView, fn: Callable[..., Value]) -> Any:
    """No axes: only what is done to each element before and after the sum is left."""
    x = n[0]
    if n.op_type in ("ReduceSum", "ReduceProd", "ReduceMean", "ReduceMax", "ReduceMin"):
        return x
    lifted = ops.insert_axis(x, 0)
    return fn(lifted, (0,), False)


for _name, _fn in REDUCTIONS.items():
    reads(_name)(_reduction(_fn))


@reads("ArgMax")
def argmax(n: NodeView) -> Value:
    return _arg(n, ops.argmax)


@reads("ArgMin")
def argmin(n: NodeView) -> Value:
    return _arg(n, ops.argmin)


def _arg(n: NodeView, fn: Callable[..., Value]) -> Value:
    last = bool(n.attr("select_last_index", 0))
    return ops.cast(fn(n[0], n.axis("axis", 0), bool(n.attr("keepdims", 1)), select_last=last), "i64")


@reads("CumSum")
def cumsum(n: NodeView) -> Value:
    return _running(n, ops.cumsum)


@reads("CumProd")
def cumprod(n: NodeView) -> Value:
    return _running(n, ops.cumprod)


def _running(n: NodeView, fn: Callable[..., Value]) -> Value:
    x = n[0]
    axis = n.place(int(n.scalar(1)))
    options = {"exclusive": bool(n.attr("exclusive", 0)), "reverse": bool(n.attr("reverse", 0))}
    return ops.cast(fn(accumulate_in(x), axis, None, **options), x.dtype)


@reads("Hardmax")
def hardmax(n: NodeView) -> Value:
    """1 at the first maximum of each row (of the flattened trailing axes), 0 elsewhere."""
    return _rows(n, -1, _first_maximum)


@reads("Hardmax", since=13)
def hardmax_axis(n: NodeView) -> Value:
    return _first_maximum(n[0], n.axis("axis", -1))


def _first_maximum(x: Value, axis: int) -> Value:
    return ops.one_hot(ops.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype)


def _rows(n: NodeView, axis: int, fn: Callable[[Value, int], Value]) -> Value:
    """Before opset 13 these ops see a matrix: the axes from `axis` on are one."""
    x = n[0]
    split = n.place(n.attr("axis", 1)) if x.ndim else 0
    if x.ndim == 0:
        return fn(ops.reshape(x, (1,)), 0).reshape(())
    if split == x.ndim - 1:
        return fn(x, split)
    flat = ops.flatten(x, split, -1)
    return ops.reshape(fn(flat, axis % flat.ndim), x.shape)


@reads("Softmax")
def softmax(n: NodeView) -> Value:
    return _rows(n, -1, ops.softmax)


@reads("Softmax", since=13)
def softmax_axis(n: NodeView) -> Value:
    return ops.softmax(n[0], n.axis("axis", -1))


@reads("LogSoftmax")
def log_softmax(n: NodeView) -> Value:
    return _rows(n, -1, ops.log_softmax)


@reads("LogSoftmax", since=13)
def log_softmax_axis(n: NodeView) -> Value:
    return ops.log_softmax(n[0], n.axis("axis", -1))
