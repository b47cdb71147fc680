"""Shape arithmetic: handlers for integer nodes whose values are symbolic sizes.

A rule gives None where it cannot answer; the numbers are then computed in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata.core import Dim, dim_max, dim_min, floordiv, mod
from strata.errors import SymbolError
from strata.io.onnx.comparisons import equal_sizes, greater, greater_or_equal, less, less_or_equal
from strata.io.onnx.items import Host, Sizes, settled
from strata.io.onnx.node import NodeView

Rule = Callable[[NodeView], Any]


def _arrays(n: NodeView) -> list[np.ndarray] | None:
    """The inputs as arrays of dims; None when one of them is data."""
    found = []
    for item in n.items:
        if isinstance(item, Sizes):
            found.append(item.array)
        elif isinstance(item, Host) and item.array.dtype.kind in "iub":
            found.append(item.array.astype(object))
        else:
            return None
    return found


def _elementwise(fn: Callable[..., Dim | None]) -> Rule:
    def rule(n: NodeView) -> Any:
        arrays = _arrays(n)
        if arrays is None:
            return None
        spread = np.broadcast_arrays(*arrays)
        result = np.empty(spread[0].shape, object)
        for at in np.ndindex(*result.shape):
            value = fn(*(a[at] for a in spread))
            if value is None:
                return None
            result[at] = value
        return settled(result)

    return rule


def _divide(a: Dim, b: Dim) -> Dim | None:
    """Sizes are not negative, so that rounding down and towards zero agree."""
    if isinstance(b, int) and b == 0:
        return None
    return floordiv(a, b)


def _compared(fn: Callable[[Any, Any], bool]) -> Rule:
    def rule(n: NodeView) -> Any:
        arrays = _arrays(n)
        if arrays is None:
            return None
        spread = np.broadcast_arrays(*arrays)
        try:
            pairs = zip(spread[0].reshape(-1), spread[1].reshape(-1), strict=True)
            result = [n.tracer.decide(fn, a, b) for a, b in pairs]
        except SymbolError:
            return None
        return np.array(result, bool).reshape(spread[0].shape)

    return rule


def _moved(fn: Callable[[NodeView, np.ndarray], np.ndarray]) -> Rule:
    """An op that only moves the elements of its first input."""

    def rule(n: NodeView) -> Any:
        item = n.item(0)
        if not isinstance(item, Sizes) or any(isinstance(x, Sizes) for x in n.items[1:]):
            return None
        return settled(fn(n, item.array))

    return rule


def _cast(n: NodeView) -> Any:
    target = n.dtype_attr("to")
    if target is None or target.kind not in "iu":
        return None
    return n.item(0)


def _gather(n: NodeView, x: np.ndarray) -> np.ndarray:
    return np.take(x, n.array(1), axis=n.attr("axis", 0))


def _slice(n: NodeView, x: np.ndarray) -> np.ndarray:
    if n.version < 10:
        starts, ends = n.attr("starts"), n.attr("ends")
        axes, steps = n.attr("axes", tuple(range(len(starts)))), (1,) * len(starts)
    else:
        starts, ends = n.ints(1), n.ints(2)
        axes = n.ints(3) if n.has(3) else tuple(range(len(starts)))
        steps = n.ints(4) if n.has(4) else (1,) * len(starts)
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, None if step < 0 and end < -x.shape[axis] else end, step)
    return x[tuple(index)]


def _axes(n: NodeView) -> tuple[int, ...] | None:
    return n.ints(1) if n.has(1) else n.attr("axes")


def _unsqueeze(n: NodeView, x: np.ndarray) -> np.ndarray:
    axes = _axes(n) or ()
    rank = x.ndim + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = np.expand_dims(x, axis)
    return x


def _squeeze(n: NodeView, x: np.ndarray) -> np.ndarray:
    axes = _axes(n)
    return np.squeeze(x, None if axes is None else axes)


def _reshape(n: NodeView, x: np.ndarray) -> np.ndarray:
    return x.reshape(n.ints(1) if n.has(1) else n.attr("shape"))


def _concat(n: NodeView) -> Any:
    arrays = _arrays(n)
    return None if arrays is None else settled(np.concatenate(arrays, n.attr("axis", 0)))


def _reduced(fn: Callable[[Dim, Dim], Dim], start: Dim | None) -> Rule:
    def rule(n: NodeView) -> Any:
        item = n.item(0)
        if not isinstance(item, Sizes):
            return None
        axes = _axes(n) or tuple(range(item.array.ndim))
        if sorted(a % item.array.ndim for a in axes) != list(range(item.array.ndim)):
            return None
        total: Dim | None = start
        for d in item.flat:
            total = d if total is None else fn(total, d)
        result = np.empty((1,) * item.array.ndim if n.attr("keepdims", 1) else (), object)
        result[...] = total
        return settled(result)

    return rule


def _where(n: NodeView) -> Any:
    arrays = _arrays(n)
    if arrays is None or isinstance(n.item(0), Sizes):
        return None
    return settled(np.where(arrays[0].astype(bool), arrays[1], arrays[2]))


def _split(n: NodeView) -> Any:
    item = n.item(0)
    if not isinstance(item, Sizes):
        return None
    axis = n.attr("axis", 0)
    parts = n.ints(1) if n.has(1) else n.attr("split")
    if parts is None:
        count = n.num_outputs
        size = -(-item.array.shape[axis] // count)
        at = [size * i for i in range(1, count)]
    else:
        at = list(np.cumsum(parts)[:-1])
    return tuple(settled(a) for a in np.split(item.array, at, axis))


def _negated(a: Dim) -> Dim:
    return a * -1


SIZE_RULES: dict[str, Rule] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_divide),
    "Mod": _elementwise(lambda a, b: None if isinstance(b, int) and b == 0 else mod(a, b)),
    "Neg": _elementwise(_negated),
    "Max": _elementwise(dim_max),
    "Min": _elementwise(dim_min),
    "Equal": _compared(equal_sizes),
    "Less": _compared(less),
    "LessOrEqual": _compared(less_or_equal),
    "Greater": _compared(greater),
    "GreaterOrEqual": _compared(greater_or_equal),
    "Cast": _cast,
    "Identity": lambda n: n.item(0),
    "Gather": _moved(_gather),
    "Slice": _moved(_slice),
    "Unsqueeze": _moved(_unsqueeze),
    "Squeeze": _moved(_squeeze),
    "Reshape": _moved(_reshape),
    "Flatten": _moved(lambda n, x: x.reshape(1, -1)),
    "Concat": _concat,
    "Where": _where,
    "Split": _split,
    "ReduceProd": _reduced(lambda a, b: a * b, 1),
    "ReduceSum": _reduced(lambda a, b: a + b, 0),
    "ReduceMax": _reduced(dim_max, None),
    "ReduceMin": _reduced(dim_min, None),
}
