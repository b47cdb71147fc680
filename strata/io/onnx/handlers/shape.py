"""Ops that read or change shapes, and ops that make tensors from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, as_dtype, broadcast_shapes, dim_min, dim_prod, floordiv, known_positive
from strata.errors import FileError, ShapeError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.comparisons import equal_sizes
from strata.io.onnx.dtypes import in_graphs
from strata.io.onnx.items import Host, Labels, Sizes, sizes
from strata.io.onnx.node import NodeView
from strata.io.onnx.positions import by_position
from strata.io.onnx.registry import reads
from strata.mir import Value, constant


@reads("Identity")
def identity(n: NodeView) -> Any:
    return n.item(0)


@reads("Constant")
def constant_(n: NodeView) -> Any:
    for name, kind in {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }.items():
        if n.has_attr(name):
            return np.asarray(n.attr(name), kind)
    if n.has_attr("value_string"):
        return np.asarray(n.attr("value_string"), object)
    if n.has_attr("value_strings"):
        return np.asarray(n.attr("value_strings"), object)
    name = "sparse_value" if n.has_attr("sparse_value") else "value"
    label = n.proto.output[0] if n.proto.output else None
    return Host(np.asarray(n.attr(name)), name=label)


@reads("Shape")
def shape(n: NodeView) -> Any:
    dims = n.shape(0)
    return sizes(dims[slice(n.attr("start", 0), n.attr("end"))])


@reads("Size")
def size(n: NodeView) -> Any:
    return sizes([dim_prod(n.shape(0))], ())


def _move_host(n: NodeView) -> bool:
    """Whether the first input is of a type that only the host has: it is moved there."""
    return not in_graphs(n.np_dtype(0))


@reads("Reshape")
def reshape(n: NodeView) -> Any:
    wanted = n.dims(1) if n.has(1) else n.attr("shape")
    given = n.shape(0)
    dims = _reshaped(given, wanted, allow_zero=bool(n.attr("allowzero", 0)))
    item = n.item(0)
    if isinstance(item, Labels):
        return Labels(ops.reshape(item.value, dims), item.table)
    if _move_host(n):
        return n.array(0).reshape(dims)
    return ops.reshape(n[0], dims)


def _reshaped(given: tuple[Dim, ...], wanted: tuple[Dim, ...], *, allow_zero: bool) -> tuple[Dim, ...]:
    dims = list(wanted)
    for i, d in enumerate(dims):
        if d == 0 and not allow_zero:
            if i >= len(given):
                raise ShapeError(f"reshape: size 0 at {i} copies an axis that {list(given)} does not have", code="S500")
            dims[i] = given[i]
    if -1 in dims:
        at = dims.index(-1)
        rest = dim_prod([d for i, d in enumerate(dims) if i != at])
        total = dim_prod(given)
        if isinstance(rest, int) and rest == 0:
            raise ShapeError(f"reshape: {list(given)} to {list(wanted)}: -1 could be any size", code="S500")
        over, under = _cancelled(given, [d for i, d in enumerate(dims) if i != at])
        dims[at] = floordiv(total, rest) if isinstance(total, int) else floordiv(dim_prod(over), dim_prod(under))
    return tuple(dims)


def _cancelled(given: Sequence[Dim], wanted: Sequence[Dim]) -> tuple[list[Dim], list[Dim]]:
    """Sizes without those that both have: what is left is divided, and a quotient of sums is seen through."""
    left, right = list(given), []
    for d in wanted:
        if d in left:
            left.remove(d)
        else:
            right.append(d)
    return left, right


@reads("Flatten")
@by_position
def flatten(n: NodeView) -> Any:
    dims = n.shape(0)
    axis = n.attr("axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return ops.reshape(n[0], (dim_prod(dims[:axis]), dim_prod(dims[axis:])))


def _axes(n: NodeView) -> tuple[int, ...] | None:
    return n.ints(1) if n.has(1) else n.attr("axes")


@reads("Squeeze")
def squeeze(n: NodeView) -> Any:
    axes = _axes(n)
    dims = n.shape(0)
    if axes is None:
        axes = tuple(i for i, d in enumerate(dims) if n.tracer.decide(equal_sizes, d, 1))
    gone = sorted({a % len(dims) for a in axes})
    kept = tuple(d for i, d in enumerate(dims) if i not in gone)
    for i in gone:
        if not n.tracer.decide(equal_sizes, dims[i], 1):
            raise ShapeError(f"squeeze: axis {i} of {list(dims)} is not 1", code="S500")
    if _move_host(n):
        return n.array(0).reshape(kept)
    x = n[0]
    for i in gone:
        x = x if dims[i] == 1 else ops.narrow(x, i, 0, 1)
    return ops.reshape(x, kept)


@reads("Unsqueeze")
def unsqueeze(n: NodeView) -> Any:
    axes = _axes(n) or ()
    rank = n.ndim(0) + len(axes)
    added, rest = {n.place(a, rank) for a in axes}, iter(n.shape(0))
    if len(added) != len(axes):
        raise ShapeError(f"unsqueeze: axes {list(axes)} name one axis twice", code="S500")
    dims = tuple(1 if i in added else next(rest) for i in range(rank))
    return n.array(0).reshape(dims) if _move_host(n) else ops.reshape(n[0], dims)


@reads("Transpose")
def transpose(n: NodeView) -> Any:
    order = n.attr("perm", tuple(reversed(range(n.ndim(0)))))
    return np.transpose(n.array(0), order) if _move_host(n) else ops.transpose(n[0], *order) if order else n[0]


@reads("Concat")
def concat(n: NodeView) -> Any:
    if _move_host(n):
        n.room(sum(n.array(i).size for i in range(len(n))))
        return np.concatenate([n.array(i) for i in range(len(n))], n.attr("axis", 0))
    axis = n.axis("axis", 0)
    values = [x for x in n.values() if x.shape[axis] != 0] or n.values()[:1]
    return ops.concat(values, axis) if len(values) > 1 else values[0]


@reads("Split")
@by_position
def split(n: NodeView) -> Any:
    axis = n.axis("axis", 0)
    total = n.shape(0)[axis]
    parts: Any = n.dims(1) if n.has(1) else n.attr("split")
    if parts is None:
        count = int(n.attr("num_outputs", n.num_outputs))
        if not 0 < count <= max(n.num_outputs, 1):
            raise FileError(f"{n.label}: num_outputs is {count}, {n.num_outputs} are named", code="F504")
        each = -floordiv(-total, count) if isinstance(total, int) else floordiv(total, count)
        parts = [each] * (count - 1) + [total - each * (count - 1)]
    return tuple(ops.split(n[0], list(parts), axis))


@reads("Slice")
def slice_(n: NodeView) -> Any:
    starts, ends = n.attr("starts"), n.attr("ends")
    return _slice(n, starts, ends, n.attr("axes", tuple(range(len(starts)))), (1,) * len(starts))


@reads("Slice", since=10)
def slice_inputs(n: NodeView) -> Any:
    starts, ends = n.dims(1), n.dims(2)
    axes = n.ints(3) if n.has(3) else tuple(range(len(starts)))
    steps = n.ints(4) if n.has(4) else (1,) * len(starts)
    return _slice(n, starts, ends, axes, steps)


FAR = 1 << 28  # a bound past this is "the end", whatever the size


def _slice(n: NodeView, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
    if _move_host(n):
        index: list[Any] = [slice(None)] * n.ndim(0)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            index[n.place(axis)] = slice(start, None if step < 0 and end < -n.array(0).shape[axis] else end, step)
        return n.array(0)[tuple(index)]
    x = n[0]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _slice_axis(x, n.place(axis), start, end, int(step))
    return x


def _slice_axis(x: Value, axis: int, start: Dim, end: Dim, step: int) -> Value:
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        picked = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
        if step == 1:
            return ops.narrow(x, axis, picked.start if len(picked) else 0, len(picked))
        index: list[Any] = [slice(None)] * x.ndim
        if not picked:
            return ops.narrow(x, axis, 0, 0)
        if step > 0:
            index[axis] = slice(picked[0], picked[-1] + 1, step)
            return ops.getitem(x, tuple(index))
        index[axis] = slice(picked[-1], picked[0] + 1, -step)
        return ops.flip(ops.getitem(x, tuple(index)), axis)
    first, last = _bound(start, size), _bound(end, size)
    if step == 1:
        return ops.narrow(x, axis, first, last - first)
    if step == -1 and _is_end(start, size) and isinstance(end, int) and end <= -FAR:
        return ops.flip(x, axis)
    if step > 1:
        index = [slice(None)] * x.ndim
        index[axis] = slice(first, last, step)
        return ops.getitem(x, tuple(index))
    raise ShapeError(f"slice: {start}:{end}:{step} of a symbolic axis of size {size}", code="S500")


def _bound(at: Dim, size: Dim) -> Dim:
    """A bound of a slice with step > 0 as a position in 0..size, taken on trust where sizes are symbolic."""
    if isinstance(at, int):
        if at >= FAR:
            return size
        if at < 0:
            if at <= -FAR:
                return 0
            return size + at if isinstance(size, SymExpr) else max(size + at, 0)
        if isinstance(size, SymExpr) and at > 1:
            return dim_min(at, size)
        return at if isinstance(size, SymExpr) else min(at, size)
    if at == size:
        return size
    if known_positive(at + 1):
        return dim_min(at, size)
    return at


def _is_end(at: Dim, size: Dim) -> bool:
    return at == -1 or at == size or (isinstance(at, int) and at >= FAR)


@reads("Expand")
def expand(n: NodeView) -> Any:
    dims = n.dims(1)
    if _move_host(n):
        shape = broadcast_shapes(n.array(0).shape, dims, what="expand")
        n.room(dim_prod(shape))
        return np.broadcast_to(n.array(0), tuple(int(d) for d in shape)).copy()
    return ops.broadcast_to(n[0], broadcast_shapes(n.shape(0), dims, what="expand"))


@reads("Tile")
@by_position
def tile(n: NodeView) -> Any:
    reps = n.dims(1)
    if all(isinstance(r, int) for r in reps):
        return ops.tile(n[0], reps)
    x = n[0]
    pairs = [d for r, s in zip(reps, x.shape, strict=True) for d in (r, s)]
    spread = ops.reshape(x, [d for s in x.shape for d in (1, s)])
    return ops.reshape(ops.broadcast_to(spread, pairs), [r * s for r, s in zip(reps, x.shape, strict=True)])


@reads("ConstantOfShape")
def constant_of_shape(n: NodeView) -> Any:
    fill = n.attr("value")
    fill = np.zeros(1, np.float32) if fill is None else fill
    dims = n.dims(0)
    if not in_graphs(fill.dtype):
        n.room(dim_prod(dims), fill.dtype.itemsize)
        return np.full(dims, fill.reshape(-1)[0], fill.dtype)
    if fill.dtype == np.int64 and isinstance(n.item(0), Sizes) is False and dim_prod(dims) <= 64:
        return np.full(dims, fill.reshape(-1)[0], fill.dtype)
    return ops.broadcast_to(constant(fill.reshape(())), dims)


@reads("EyeLike")
def eye_like(n: NodeView) -> Value:
    rows, columns = n.shape(0)
    dtype = n.dtype_attr("dtype") or n.np_dtype(0)
    k = n.attr("k", 0)
    at_row = ops.insert_axis(ops.iota(rows), 1)
    at_column = ops.insert_axis(ops.iota(columns), 0)
    return ops.cast(ops.equal(at_column, at_row + k), as_dtype(dtype))


@reads("Range")
def range_(n: NodeView) -> Any:
    if all(not isinstance(x, Value) for x in n.items) and any(isinstance(x, Sizes) for x in n.items):
        start, stop, step = (n.dims(i)[0] for i in range(3))
        if start == 0 and step == 1:
            return ops.iota(stop)
        if isinstance(step, int) and step > 0:
            return ops.iota(floordiv(stop - start + step - 1, step)) * step + n[0].reshape(())
    first, end, by = (n.array(i).reshape(()) for i in range(3))
    count = max(int(np.ceil((float(end) - float(first)) / float(by))), 0)
    dtype = first.dtype
    if count <= 1 << 12:
        if dtype.kind in "iu":
            return (np.arange(count, dtype=np.int64) * int(by) + int(first)).astype(dtype)
        return (np.arange(count, dtype=dtype) * by + first).astype(dtype)
    return ops.cast(ops.iota(count), as_dtype(dtype)) * constant(by) + constant(first)


@reads("Trilu")
@by_position
def trilu(n: NodeView) -> Any:
    k = int(n.scalar(1, 0))
    return ops.triu(n[0], k) if n.attr("upper", 1) else ops.tril(n[0], k)


@reads("DepthToSpace")
@by_position
def depth_to_space(n: NodeView) -> Any:
    return ops.depth_to_space(n[0], n.attr("blocksize"), mode=n.choice("mode", "DCR", ("DCR", "CRD")))


@reads("SpaceToDepth")
@by_position
def space_to_depth(n: NodeView) -> Any:
    return ops.space_to_depth(n[0], n.attr("blocksize"), mode=n.choice("mode", "DCR", ("DCR", "CRD")))


@reads("Pad")
@by_position
def pad(n: NodeView) -> Any:
    return _pad(n, n.attr("pads", n.attr("paddings")), float(n.attr("value", 0.0)), None)


@reads("Pad", since=11)
@by_position
def pad_inputs(n: NodeView) -> Any:
    fill = n.scalar(2, 0)
    return _pad(n, n.dims(1), fill, n.ints(3) if n.has(3) else None)


def _pad(n: NodeView, pads: Any, fill: Any, axes: tuple[int, ...] | None) -> Value:
    x = n[0]
    mode = n.choice("mode", "constant", ("constant", "reflect", "edge", "wrap"))
    axes = tuple(range(x.ndim)) if axes is None else tuple(n.place(a) for a in axes)
    half = len(pads) // 2
    widths: list[tuple[Dim, Dim]] = [(0, 0)] * x.ndim
    for i, axis in enumerate(axes):
        widths[axis] = (pads[i], pads[half + i])
    if any(isinstance(w, int) and w < 0 for pair in widths for w in pair):
        for axis, (before, after) in enumerate(widths):  # negative widths cut
            cut_before, cut_after = max(-before, 0), max(-after, 0)
            if cut_before or cut_after:
                x = ops.narrow(x, axis, cut_before, x.shape[axis] - cut_before - cut_after)
        widths = [(max(b, 0), max(a, 0)) for b, a in widths]
    if mode == "constant":
        return ops.pad_constant(x, widths, fill)
    return ops.pad(x, widths, mode=mode)


@reads("CenterCropPad")
@by_position
def center_crop_pad(n: NodeView) -> Any:
    x = n[0]
    wanted = n.ints(1)
    axes = n.attr("axes", tuple(range(x.ndim)))
    for size, axis in zip(wanted, (n.place(a) for a in axes), strict=True):
        have = x.shape[axis]
        if size < have:
            x = ops.narrow(x, axis, (have - size) // 2, size)
        elif size > have:
            before = (size - have) // 2
            widths = [(before, size - have - before) if i == axis else (0, 0) for i in range(x.ndim)]
            x = ops.pad_constant(x, widths)
    return x
