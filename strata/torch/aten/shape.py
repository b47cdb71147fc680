"""Shapes, copies, pieces and new tensors. What only changes how a tensor lies in memory is the tensor itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata import ops
from strata.core import Dim, SymExpr, TensorType, i64
from strata.mir import Value
from strata.torch.aten.promotion import number, value
from strata.torch.table import Unsupported, aten


@aten(
    "view",
    "_unsafe_view",
    "reshape",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
    "unsqueeze",
    "_reshape_alias",
    "flatten.using_ints",
)
def reshape(out: TensorType, x: Value, *args: Any, **options: Any) -> Value:
    """The elements in the same order; torch has worked out the shape."""
    return ops.reshape(x, out.shape)


@aten(
    "alias",
    "clone",
    "detach",
    "contiguous",
    "lift_fresh_copy",
    "lift_fresh",
    "_to_copy",
    "to.dtype",
    "resolve_conj",
    "resolve_neg",
)
def copied(out: TensorType, x: Value, *args: Any, **options: Any) -> Value:
    """The same numbers; a new type where the result has one."""
    return x


@aten("copy")
def copy(out: TensorType, x: Value, source: Value, non_blocking: bool = False) -> Value:
    """The numbers of another tensor in the shape of this one."""
    return ops.broadcast_to(source, out.shape)


@aten("expand")
def expand(out: TensorType, x: Value, *args: Any, **options: Any) -> Value:
    return ops.broadcast_to(x, out.shape)


@aten("permute")
def permute(out: TensorType, x: Value, dims: Sequence[int]) -> Value:
    return ops.transpose(x, tuple(d % x.ndim for d in dims)) if x.ndim else x


@aten("transpose.int")
def transpose(out: TensorType, x: Value, first: int, second: int) -> Value:
    return ops.swapaxes(x, first % x.ndim, second % x.ndim) if x.ndim else x


@aten("t")
def matrix_transpose(out: TensorType, x: Value) -> Value:
    return ops.swapaxes(x, 0, 1) if x.ndim == 2 else x


@aten("select.int")
def select(out: TensorType, x: Value, dim: int, index: Any) -> Value:
    axis = dim % x.ndim
    return ops.reshape(ops.narrow(x, axis, _from_front(index, x.shape[axis]), 1), out.shape)


def _from_front(index: Any, size: Dim) -> Dim:
    if isinstance(index, Value):
        raise Unsupported("an index that depends on data")
    if isinstance(index, SymExpr):
        return index
    return index + size if index < 0 else index


@aten("slice.Tensor")
def slice_(out: TensorType, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    """`end` is not needed: the result says how many elements there are."""
    axis = dim % x.ndim
    count, size = out.shape[axis], x.shape[axis]
    if step == 1 and count == size:
        return x
    first = _start(start, size)
    if not isinstance(step, int):
        raise Unsupported("a step that is a symbol")
    if step == 1:
        return ops.narrow(x, axis, first, count)
    if count == 0:
        return ops.narrow(x, axis, 0, 0)
    whole = ops.narrow(x, axis, first, (count - 1) * step + 1)
    return whole[(*(slice(None),) * axis, slice(None, None, step))]


def _start(start: Any, size: Dim) -> Dim:
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size if start < 0 else start, 0), size)
    return start + size if isinstance(start, int) and start < 0 else start


@aten("slice_scatter")
def slice_scatter(
    out: TensorType, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    axis = dim % x.ndim
    count, size = source.shape[axis], x.shape[axis]
    if step == 1 and count == size:
        return value(source, x.dtype)
    first = _start(start, size)
    if isinstance(count, int) and not count:
        return x
    index = (*(slice(None),) * axis, slice(first, first + (count - 1) * step + 1, step))
    return ops.setitem(x, index, value(source, x.dtype))


@aten("select_scatter")
def select_scatter(out: TensorType, x: Value, source: Value, dim: int, index: Any) -> Value:
    axis = dim % x.ndim
    return ops.setitem(x, (*(slice(None),) * axis, _from_front(index, x.shape[axis])), value(source, x.dtype))


@aten("diagonal_scatter")
def diagonal_scatter(out: TensorType, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = dim1 % x.ndim, dim2 % x.ndim
    at = ops.iota((source.shape[-1],), 0, i64)
    moved = ops.transpose(x, (a, b, *(i for i in range(x.ndim) if i not in (a, b))))
    put = ops.setitem(
        moved, (at + value(max(-offset, 0)), at + value(max(offset, 0))), ops.moveaxis(value(source, x.dtype), -1, 0)
    )
    order = (a, b, *(i for i in range(x.ndim) if i not in (a, b)))
    return ops.transpose(put, tuple(order.index(i) for i in range(x.ndim)))


@aten("cat")
def cat(out: TensorType, xs: Sequence[Value], dim: int = 0) -> Value:
    """Empty tensors of one axis take no part, as torch has it."""
    parts = [value(x, out.dtype) for x in xs if not (x.ndim == 1 and x.shape[0] == 0 and len(out.shape) != 1)]
    return ops.concat(parts, dim % len(out.shape)) if len(parts) > 1 else parts[0]


@aten("stack")
def stack(out: TensorType, xs: Sequence[Value], dim: int = 0) -> Value:
    return ops.stack([value(x, out.dtype) for x in xs], dim % len(out.shape))


@aten("split_with_sizes", "split_with_sizes_copy", "split.Tensor", "unbind.int")
def split(out: Sequence[TensorType], x: Value, sizes: Any = 0, dim: Any = None) -> tuple[Value, ...]:
    axis_given = sizes if len(out) and len(out[0].shape) < x.ndim else (0 if dim is None else dim)
    axis = axis_given % x.ndim
    parts: list[Value] = []
    first: Dim = 0
    for kind in out:
        if len(kind.shape) < x.ndim:
            parts.append(ops.reshape(ops.narrow(x, axis, first, 1), kind.shape))
            first = first + 1
        else:
            parts.append(ops.narrow(x, axis, first, kind.shape[axis]))
            first = first + kind.shape[axis]
    return tuple(parts)


@aten("flip")
def flip(out: TensorType, x: Value, dims: Sequence[int]) -> Value:
    return ops.flip(x, tuple(d % x.ndim for d in dims)) if x.ndim and len(dims) else x


@aten("roll")
def roll(out: TensorType, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not x.ndim:
        return x
    if not len(dims):
        return ops.reshape(ops.roll(ops.reshape(x, (-1,)), shifts[0], 0), x.shape)
    return ops.roll(x, tuple(shifts), tuple(d % x.ndim for d in dims))


@aten("repeat")
def repeat(out: TensorType, x: Value, repeats: Sequence[Any]) -> Value:
    """Each axis beside a new one of its count, then both together: counts may be symbols."""
    x = ops.reshape(x, (*(1,) * (len(repeats) - x.ndim), *x.shape))
    if all(n == 1 for n in repeats):
        return x
    apart = tuple(n for size in x.shape for n in (1, size))
    wide = tuple(n for pair in zip(repeats, x.shape, strict=True) for n in pair)
    return ops.reshape(ops.broadcast_to(ops.reshape(x, apart), wide), out.shape)


@aten("constant_pad_nd")
def constant_pad(out: TensorType, x: Value, pad: Sequence[Any], fill: Any = 0) -> Value:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    for axis, (before, after) in enumerate(widths):  # negative widths cut
        cut = [-w if isinstance(w, int) and w < 0 else 0 for w in (before, after)]
        if any(cut):
            x = ops.narrow(x, axis, cut[0], x.shape[axis] - cut[0] - cut[1])
    widths = [tuple(0 if isinstance(w, int) and w < 0 else w for w in pair) for pair in widths]
    if all(w == (0, 0) for w in widths):
        return x
    return ops.pad_constant(x, widths, number(fill, x.dtype))


def _padded(mode: str) -> Any:
    def rule(out: TensorType, x: Value, pad: Sequence[int]) -> Value:
        pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
        if any(not isinstance(w, int) or w < 0 for pair in pairs for w in pair):
            raise Unsupported(f"padding {pad}")
        return ops.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1], mode=mode)

    rule.__module__ = __name__
    return rule


aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")(_padded("reflect"))
aten("replication_pad1d", "replication_pad2d", "replication_pad3d")(_padded("edge"))


@aten("diagonal")
def diagonal(out: TensorType, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return ops.diagonal(x, offset, dim1 % x.ndim, dim2 % x.ndim)


@aten("tril")
def tril(out: TensorType, x: Value, diagonal: int = 0) -> Value:
    return ops.tril(x, diagonal)


@aten("triu")
def triu(out: TensorType, x: Value, diagonal: int = 0) -> Value:
    return ops.triu(x, diagonal)


@aten("unfold")
def unfold(out: TensorType, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows along an axis, on a new last axis."""
    if not x.ndim:
        return ops.reshape(x, out.shape)
    axis = dim % x.ndim
    count = out.shape[axis]
    at = ops.reshape(ops.iota((count,), 0, i64) * value(step), (count, 1)) + ops.iota((size,), 0, i64)
    return ops.moveaxis(ops.gather(x, at, axis), axis + 1, -1)


@aten("as_strided")
def as_strided(out: TensorType, x: Value, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Value:
    """Elements by their place in memory; the converter has seen to it that the tensor lies in order there."""
    at: Value = value(offset or 0)
    for axis, step in enumerate(stride):
        line = ops.iota((out.shape[axis],), 0, i64) * value(step, i64)
        at = at + ops.reshape(line, (out.shape[axis], *(1,) * (len(size) - axis - 1)))
    return ops.gather(ops.reshape(x, (-1,)), ops.broadcast_to(at, out.shape), 0)


# --------------------------------------------------------------------------------------------------------------- new


@aten("full", "full_like", "new_full")
def full(out: TensorType, shape: Any, *args: Any, **options: Any) -> Value:
    fill = options["fill_value"] if "fill_value" in options else args[-1]
    return _filled(out, fill)


@aten("fill.Scalar", "fill.Tensor")
def fill(out: TensorType, x: Value, filling: Any) -> Value:
    return _filled(out, filling)


def _filled(out: TensorType, fill: Any) -> Value:
    if isinstance(fill, (Value, SymExpr)):
        return ops.broadcast_to(value(fill, out.dtype), out.shape)
    return ops.full(out.shape, number(fill, out.dtype), out.dtype)


@aten(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty.memory_format",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
)
def zeros(out: TensorType, *args: Any, **options: Any) -> Value:
    """What torch leaves open is zero here."""
    return ops.full(out.shape, 0, out.dtype)


@aten("ones", "ones_like", "new_ones")
def ones(out: TensorType, *args: Any, **options: Any) -> Value:
    return ops.full(out.shape, 1, out.dtype)


@aten("scalar_tensor")
def scalar_tensor(out: TensorType, x: Any, **options: Any) -> Value:
    return value(x, out.dtype)


@aten("arange", "arange.start", "arange.start_step")
def arange(out: TensorType, *args: Any, **options: Any) -> Value:
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    if out.dtype.is_int and all(isinstance(n, (int, SymExpr)) for n in (start, step)):
        line = ops.iota(out.shape, 0, i64)
        line = line if step == 1 else line * value(step, i64)
        return line if start == 0 else line + value(start, i64)
    line = value(ops.iota(out.shape, 0, i64), out.dtype)
    return line * value(step, out.dtype) + value(start, out.dtype)


@aten("linspace")
def linspace(out: TensorType, start: Any, end: Any, steps: int, **options: Any) -> Value:
    """From both ends to the middle, as torch counts."""
    if isinstance(start, Value) or isinstance(end, Value) or not out.dtype.is_float or not isinstance(steps, int):
        raise Unsupported("linspace between tensors, or of whole numbers")
    if steps == 1:
        return ops.full(out.shape, number(start, out.dtype), out.dtype)
    step = (end - start) / max(steps - 1, 1)
    at = value(ops.iota(out.shape, 0, i64), out.dtype)
    up = at * value(step, out.dtype) + value(start, out.dtype)
    down = value(end, out.dtype) - (value(steps - 1, out.dtype) - at) * value(step, out.dtype)
    return ops.where(ops.less(at, value(steps // 2, out.dtype)), up, down)


@aten("eye", "eye.m")
def eye(out: TensorType, *args: Any, **options: Any) -> Value:
    return value(ops.equal(ops.iota(out.shape, 0, i64), ops.iota(out.shape, 1, i64)), out.dtype)


@aten("sym_size.int", "sym_numel", "sym_stride.int", "sym_storage_offset")
def size_of(out: Any, *args: Any) -> Any:
    """TorchSizes are read from the shapes that torch has worked out: the converter never gets here."""
    raise Unsupported("a size of a tensor whose shape is not known")
