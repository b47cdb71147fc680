"""The NumPy interpreter of kernels: every expression becomes an array over the axes it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import numpy as np

from strata.core import Dim, DType, SymExpr, f8e4m3, substitute
from strata.errors import RunError
from strata.kernel.ir import Axis, Const, Expr, Kernel, Load, Reduce, Scalar, Scan, Size, postorder
from strata.kernel.scalars import SCALARS, bitcast_array, cast_array

Array = Any


def interpret(
    kernel: Kernel,
    inputs: Sequence[Array],
    sizes: Mapping[str, int] | None = None,
    start: Sequence[Array] | None = None,
) -> list[Array]:
    """Runs a kernel on arrays and returns its outputs, which are zeros, or copies of `start`, where nothing is stored.

    Sizes that are not given are read off the inputs."""
    bound = dict(sizes or {})
    for buffer, array in zip(kernel.inputs, inputs, strict=True):
        for extent, actual in zip(buffer.shape, np.shape(array), strict=True):
            if isinstance(extent, SymExpr) and str(extent) not in bound:
                bound[str(extent)] = actual
    known = {b.name: np.asarray(a) for b, a in zip(kernel.inputs, inputs, strict=True)}
    machine = _Machine(known, bound)
    outputs = {b.name: np.zeros([machine.size(d) for d in b.shape], b.dtype.np) for b in kernel.outputs}
    if start is not None:
        outputs = {b.name: np.array(a) for b, a in zip(kernel.outputs, start, strict=True)}
    for store in kernel.stores:
        axes = tuple(sorted(store.axes, key=lambda a: a.name))
        shape = tuple(machine.size(a.extent) for a in axes)
        if 0 in shape:
            continue
        value = np.broadcast_to(machine.over(store.value, axes), shape)
        index = tuple(np.broadcast_to(machine.over(i, axes), shape) for i in store.index)
        machine.require_inside(store.value, index, outputs[store.buffer.name].shape)
        outputs[store.buffer.name][index] = value
    return [outputs[b.name] for b in kernel.outputs]


class _Machine:
    """Values of expressions, each an array with one dimension per free axis, in the order of the axes' names."""

    def __init__(self, buffers: Mapping[str, Array], sizes: Mapping[str, int]) -> None:
        self.buffers = buffers
        self.sizes = sizes
        self.values: dict[Expr, Array] = {}

    def size(self, dim: Dim) -> int:
        value = substitute(dim, self.sizes)
        if not isinstance(value, int):
            raise RunError(f"size {dim} is not known when the kernel runs", code="X110")
        return value

    def over(self, node: Expr, axes: tuple[Axis, ...]) -> Array:
        """The value with one dimension for each of the axes (1 where it does not depend on it)."""
        value = self.value(node)
        free = _ordered(node)
        at = dict(zip(free, value.shape, strict=True))
        turned = value.transpose([free.index(a) for a in axes if a in at])
        return turned.reshape([at.get(a, 1) for a in axes])

    def value(self, root: Expr) -> Array:
        for node in postorder((root,)) if root not in self.values else ():
            if node not in self.values:
                self.values[node] = self._evaluate(node)
        return self.values[root]

    def _evaluate(self, node: Expr) -> Array:
        free = _ordered(node)
        full = tuple(self.size(a.extent) for a in free)
        match node:
            case Const(value, dtype):
                return np.asarray(value).astype(dtype.np)
            case Axis():
                return np.arange(self.size(node.extent), dtype=np.int64)
            case Size(dim):
                return np.asarray(self.size(dim), np.int64)
            case Load():
                return self._load(node, free, full)
            case Scalar(name, args):
                return np.broadcast_to(self._scalar(name, node.dtype, [self.over(a, free) for a in args]), full)
            case Reduce():
                return self._reduce(node, free, full)
            case Scan():
                return self._scan(node, free, full)
            case _:
                assert_never(node)  # type: ignore[arg-type]

    def _load(self, node: Load, free: tuple[Axis, ...], full: tuple[int, ...]) -> Array:
        array = self.buffers[node.buffer.name]
        index = [np.broadcast_to(self.over(i, free), full) for i in node.index]
        if node.where is None:
            self.require_inside(node, index, array.shape)
            return np.asarray(array[tuple(index)]) if index else np.broadcast_to(array, full)
        where = np.broadcast_to(self.over(node.where, free), full)
        inside = tuple(np.where(where, i, 0) for i in index)
        if array.size == 0:
            self.require_inside(node, [i[where] for i in inside], array.shape)
            return np.zeros(full, array.dtype)
        self.require_inside(node, inside, array.shape)
        return np.where(where, array[inside], np.zeros((), array.dtype)).astype(array.dtype)

    def require_inside(self, node: Expr, index: Sequence[Array], shape: Sequence[int]) -> None:
        for i, extent in zip(index, shape, strict=True):
            if i.size and (i.min() < 0 or i.max() >= extent):
                bad = i[(i < 0) | (i >= extent)].flat[0]
                raise RunError(f"{node!r}: index {bad} is outside 0..{extent - 1}", code="X111")

    def _scalar(self, name: str, dtype: DType, args: list[Array]) -> Array:
        match name:
            case "cast":
                return cast_array(args[0], dtype)
            case "bitcast":
                return bitcast_array(args[0], dtype)
            case _:
                return np.asarray(SCALARS[name].numpy(*args)).astype(dtype.np)

    def _reduce(self, node: Reduce, free: tuple[Axis, ...], full: tuple[int, ...]) -> Array:
        axes = (*free, *node.axes)
        shape = (*full, *(self.size(a.extent) for a in node.axes))
        body = np.broadcast_to(self.over(node.body, axes), shape).reshape(*full, -1)
        return reduce_array(node.kind, body, node.dtype)

    def _scan(self, node: Scan, free: tuple[Axis, ...], full: tuple[int, ...]) -> Array:
        outer = tuple(sorted(node.body.free - {node.axis}, key=lambda a: a.name))
        length = self.size(node.axis.extent)
        shape = (*(self.size(a.extent) for a in outer), length)
        body = np.broadcast_to(self.over(node.body, (*outer, node.axis)), shape)
        running = scan_array(node.kind, body, node.exclusive, node.dtype)
        where = {a: np.arange(self.size(a.extent)).reshape([-1 if b is a else 1 for b in free]) for a in outer}
        position = np.broadcast_to(self.over(node.position, free), full)
        self.require_inside(node, [position], [length])
        return np.asarray(running[(*(np.broadcast_to(where[a], full) for a in outer), position)])


def _ordered(node: Expr) -> tuple[Axis, ...]:
    return tuple(sorted(node.free, key=lambda a: a.name))


def identity(kind: str, dtype: DType) -> Any:
    """What a reduction of nothing gives; the most extreme value of the type for max and min."""
    match kind:
        case "sum" | "any" | "argmax" | "argmin":
            return 0
        case "prod" | "all":
            return 1
        case "max" | "min":
            sign = -1 if kind == "max" else 1
            if dtype is f8e4m3:  # which has no infinities
                return sign * 448.0
            if dtype.is_float:
                return sign * np.inf
            if dtype.is_bool:
                return kind == "min"
            if dtype.kind == "uint":
                return 0 if kind == "max" else (1 << dtype.bits) - 1
            return -(1 << (dtype.bits - 1)) if kind == "max" else (1 << (dtype.bits - 1)) - 1
    raise AssertionError(kind)


def reduce_array(kind: str, body: Array, dtype: DType) -> Array:
    """Over the last axis. Floats are summed in f64, so that this is the better answer to compare with."""
    if kind in ("argmax", "argmin"):
        if body.shape[-1] == 0:
            return np.zeros(body.shape[:-1], np.int64)
        return np.asarray(getattr(np, kind)(body.astype(np.float64) if body.dtype.kind == "V" else body, axis=-1))
    start = np.asarray(identity(kind, dtype)).astype(dtype.np)
    if kind in ("max", "min"):
        function = np.maximum if kind == "max" else np.minimum
        return np.asarray(
            function.reduce(np.concatenate([np.broadcast_to(start, (*body.shape[:-1], 1)), body], -1), axis=-1)
        )
    if kind in ("all", "any"):
        return np.asarray(getattr(np, kind)(body, axis=-1)).astype(dtype.np)
    wide = np.complex128 if dtype.is_complex else np.float64 if dtype.is_float else dtype.np
    with np.errstate(all="ignore"):
        return np.asarray(getattr(np, kind)(body.astype(wide), axis=-1, dtype=wide)).astype(dtype.np)


def scan_array(kind: str, body: Array, exclusive: bool, dtype: DType) -> Array:
    """Along the last axis."""
    function = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[kind]
    wide = np.complex128 if dtype.is_complex else np.float64 if dtype.is_float else dtype.np
    with np.errstate(all="ignore"):
        running = function.accumulate(body.astype(wide), axis=-1, dtype=wide)
    if exclusive:
        start = np.broadcast_to(np.asarray(identity(kind, dtype)).astype(wide), (*body.shape[:-1], 1))
        running = np.concatenate([start, running], -1)[..., :-1]
    return running.astype(dtype.np)
