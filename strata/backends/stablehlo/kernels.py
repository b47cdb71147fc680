"""Kernel expressions as StableHLO: any op with a kernel lowering runs without its own rule.

Every expression becomes a value with one dimension for each axis that it depends on, in the order of the axes' names.
A load whose indices are plain axes is a view of its buffer (a slice, a transposition); others are gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, array, value_type
from strata.backends.stablehlo.reductions import arg_reduce, reduce, running
from strata.backends.stablehlo.scalars import scalar
from strata.core import i64
from strata.kernel import Axis, Const, Expr, Kernel, KernelBuilder, Load, Reduce, Scalar, Scan, Size, Store, linear
from strata.mir import Op, as_tuple

Axes = tuple[Axis, ...]


def lowered(b: StableHloBuilder, op: Op, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
    """An op by its kernel."""
    types = [value_type(x) for x in inputs]
    kernel = op.own_kernel(*types)
    if kernel is None:
        k = KernelBuilder(op.name)
        views = [k.input(f"in{i}", t) for i, t in enumerate(types)]
        for i, out in enumerate(as_tuple(op.infer(*types))):
            k.output(f"out{i}", out, lambda index, i=i: as_tuple(op.lower(k, index, *views))[i])  # type: ignore[misc]
        kernel = k.build()
    return run_kernel(b, kernel, inputs)


def run_kernel(b: StableHloBuilder, kernel: Kernel, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
    """A kernel of known sizes on values."""
    writer = _KernelWriter(b, dict(zip(kernel.input_names, inputs, strict=True)))
    made: dict[str, Hlo] = {}
    for store in kernel.stores:
        made[store.buffer.name] = writer.stored(store, made.get(store.buffer.name))
    return tuple(made[x.name] if x.name in made else b.const(0, x.dtype, x.type.static_shape) for x in kernel.outputs)


@dataclass(frozen=True, slots=True)
class _Linear:
    """start + step · axis."""

    axis: Axis | None
    step: int
    start: int


class _KernelWriter:
    def __init__(self, b: StableHloBuilder, buffers: Mapping[str, Hlo]) -> None:
        self.b, self.buffers = b, buffers
        self.values: dict[Expr, Hlo] = {}

    def over(self, node: Expr, axes: Axes) -> Hlo:
        """A value over axes, all of its own among them."""
        shape = _shape(axes)
        if isinstance(node, Const):
            return self.b.const(node.value, node.dtype, shape)
        value, free = self.value(node), _ordered(node)
        places = [axes.index(a) for a in free]
        if places == sorted(places):
            return self.b.spread(value, shape, places)
        order = sorted(range(len(places)), key=places.__getitem__)
        return self.b.spread(self.b.transpose(value, order), shape, sorted(places))

    def value(self, node: Expr) -> Hlo:
        if isinstance(node, Const):
            return self.b.const(node.value, node.dtype)
        if node not in self.values:
            self.values[node] = self._written(node)
        return self.values[node]

    def _written(self, node: Expr) -> Hlo:
        free = _ordered(node)
        match node:
            case Axis():
                return self.b.iota(i64, _shape((node,)), 0)
            case Size(dim):
                return self.b.const(int(dim), i64)
            case Load():
                return self._loaded(node, free)
            case Scalar(name, args):
                return scalar(self.b, name, node.dtype, [self.over(a, free) for a in args])
            case Reduce(kind, axes, body):
                whole = self.over(body, (*free, *axes))
                places = tuple(range(len(free), len(free) + len(axes)))
                if kind in ("argmax", "argmin"):
                    flat = self.b.reshape(whole, (*_shape(free), int(_count(axes))))
                    return arg_reduce(self.b, kind == "argmax", flat, len(free))
                return reduce(self.b, kind, whole, places)
            case Scan():
                return self._scanned(node, free)
            case Const():
                raise AssertionError("constants are written where they are read")
            case _:
                assert_never(node)  # type: ignore[arg-type]

    def _loaded(self, node: Load, free: Axes) -> Hlo:
        b, source = self.b, self.buffers[node.buffer.name]
        shape = _shape(free)
        if 0 in shape or source.size == 0:
            return b.const(0, source.dtype, shape)
        value = self._viewed(source, node.index, free) if node.where is None else None
        if value is None:
            value = self._gathered(source, node.index, free)
        if node.where is None:
            return value
        return b.select(self.over(node.where, free), value, b.const(0, source.dtype, shape))

    def _viewed(self, source: Hlo, index: Sequence[Expr], free: Axes) -> Hlo | None:
        """Loads at evenly spaced places: slices and transpositions. None where they are not."""
        parts = [_linear(i) for i in index]
        axes = [p.axis for p in parts if p is not None and p.axis is not None]
        if any(p is None for p in parts) or len(set(axes)) != len(axes):
            return None
        starts, stops, steps, flipped = [], [], [], []
        for at, (p, size) in enumerate(zip(parts, source.shape, strict=True)):
            assert p is not None
            count = _shape((p.axis,))[0] if p.axis is not None else 1
            first, last = sorted((p.start, p.start + p.step * (count - 1)))
            if first < 0 or last >= size or p.step == 0:
                return None
            starts.append(first)
            stops.append(last + 1)
            steps.append(abs(p.step))
            if p.step < 0 and count > 1:
                flipped.append(at)
        value = self.b.slice(source, starts, stops, steps)
        if flipped:
            value = self.b.reverse(value, flipped)
        kept = [n for p, n in zip(parts, value.shape, strict=True) if p is not None and p.axis is not None]
        order = sorted(range(len(axes)), key=lambda i: free.index(axes[i]))
        return self.b.transpose(self.b.reshape(value, kept), order)

    def _gathered(self, source: Hlo, index: Sequence[Expr], free: Axes) -> Hlo:
        """Loads at computed places. Dimensions that are read whole, each by its own axis, come along."""
        b = self.b
        whole = {
            at: i for at, i in enumerate(index)
            if isinstance(i, Axis) and i.extent == source.shape[at]
            and sum(i in other.free for other in index) == 1
        }  # fmt: skip
        inner = tuple(a for a in free if a not in whole.values())
        computed = [at for at in range(source.ndim) if at not in whole]
        shape = _shape(inner)
        columns = [b.reshape(self.over(index[at], inner), (*shape, 1)) for at in computed]
        starts = b.concat(columns, len(shape)) if columns else b.const(0, i64, (*shape, 0))
        made = gather(b, source, starts, computed)
        axes = (*inner, *whole.values())
        return b.transpose(made, [axes.index(a) for a in free])

    def _scanned(self, node: Scan, free: Axes) -> Hlo:
        b = self.b
        outer = tuple(sorted(node.body.free - {node.axis}, key=lambda a: a.name))
        body = self.over(node.body, (*outer, node.axis))
        whole = running(b, node.kind, body, len(outer), exclusive=node.exclusive)
        if 0 in _shape(free):
            return b.const(0, node.dtype, _shape(free))
        read = self._viewed(whole, (*outer, node.position), free)
        return self._gathered(whole, (*outer, node.position), free) if read is None else read

    def stored(self, store: Store, before: Hlo | None) -> Hlo:
        """A buffer after a store."""
        b, shape = self.b, store.buffer.type.static_shape
        if tuple(store.index) == tuple(store.axes) and _shape(store.axes) == shape:
            return self.over(store.value, store.axes)
        start = before if before is not None else b.const(0, store.buffer.dtype, shape)
        points = _shape(store.axes)
        if 0 in points:
            return start
        columns = [b.reshape(self.over(i, store.axes), (*points, 1)) for i in store.index]
        where = b.concat(columns, len(points)) if columns else b.const(0, i64, (*points, 0))
        return scatter(b, start, where, self.over(store.value, store.axes), lambda _old, new: new)


def gather(b: StableHloBuilder, source: Hlo, starts: Hlo, axes: Sequence[int]) -> Hlo:
    """[*rows, *others]: at places [*rows, n] along n axes, the other axes of the source whole."""
    rows = starts.shape[:-1]
    others = [a for a in range(source.ndim) if a not in axes]
    shape = (*rows, *(source.shape[a] for a in others))
    sizes = [1 if a in axes else n for a, n in enumerate(source.shape)]
    (made,) = b.many(
        "stablehlo.gather", [source, starts],
        f"dimension_numbers = #stablehlo.gather<offset_dims = {list(range(len(rows), len(shape)))}, "
        f"collapsed_slice_dims = {list(axes)}, start_index_map = {list(axes)}, index_vector_dim = {len(rows)}>, "
        f"slice_sizes = {array(sizes)}, indices_are_sorted = false",
        [(source.dtype, shape)],
    )  # fmt: skip
    return made


def scatter(
    b: StableHloBuilder, x: Hlo, places: Hlo, updates: Hlo, combine: Callable[[Hlo, Hlo], Hlo], window: int = 0
) -> Hlo:
    """x with updates combined at places [*rows, n] of its first n axes; the last `window` axes of both are whole."""
    count = places.shape[-1]
    rows = places.ndim - 1
    inserted = list(range(x.ndim - window))
    (made,) = b.many(
        "stablehlo.scatter", [x, places, updates],
        f"scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = {list(range(rows, rows + window))}, "
        f"inserted_window_dims = {inserted}, scatter_dims_to_operand_dims = {list(range(count))}, "
        f"index_vector_dim = {rows}>, indices_are_sorted = false, unique_indices = false",
        [(x.dtype, x.shape)], [([(x.dtype, ()), (x.dtype, ())], lambda old, new: (combine(old, new),))],
    )  # fmt: skip
    return made


def _linear(e: Expr) -> _Linear | None:
    """start + step · axis, where an index is that."""
    form = linear(e)
    atoms = list(form.terms.items())
    if len(atoms) > 1 or not all(isinstance(a, Axis) for a, _ in atoms):
        return None
    (axis, step) = atoms[0] if atoms else (None, 1)
    assert axis is None or isinstance(axis, Axis)
    return _Linear(axis, int(step), int(form.constant))


def _ordered(node: Expr) -> Axes:
    return tuple(sorted(node.free, key=lambda a: a.name))


def _shape(axes: Sequence[Axis | None]) -> tuple[int, ...]:
    return tuple(int(a.extent) for a in axes if a is not None)


def _count(axes: Axes) -> int:
    total = 1
    for n in _shape(axes):
        total *= n
    return total
