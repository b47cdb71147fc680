"""3D pooling: 2D pooling of each plane, then pooling along the third axis.

    t[*, z, y, x] = sum over v, u of in[*, z, s·y + d·v - low, s·x + d·u - low]
    out[*, z, y, x] = epilogue(sum over w of t[*, s·z + d·w - low, y, x])

Every plane is pooled once for all the windows that it is in; nine and three taps take the place of 27."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from strata.backends.llvm.conv.pool2d import is_at, slide_along, windowed
from strata.core import f32
from strata.kernel import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Store,
    apply,
    identity,
    postorder,
    replaced,
)

MANY_TAPS = 16  # of a window, from which a second pass costs less than the taps that it saves


@dataclass(frozen=True, slots=True)
class Volumes:
    """A kernel in two: the first leaves in `between` what the second reads."""

    planes: Kernel
    rest: Kernel
    between: Buffer


def split_volumes(kernel: Kernel) -> Volumes | None:
    """A pool over the last three axes of an f32 array as two kernels, or None."""
    if len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
    if store.buffer.dtype is not f32 or len(store.axes) < 3 or tuple(store.index) != tuple(store.axes):
        return None
    (pooled, *others) = [e for e in postorder([store.value]) if isinstance(e, (Reduce, Scan))] or (None,)
    if others or not isinstance(pooled, Reduce) or 0 in store.buffer.shape:
        return None
    load = windowed(pooled)
    if load is None or len(load.index) != len(store.axes) or not _is_wide(pooled, load):
        return None
    *lead, depth, _, _ = load.index
    if any(not is_at(i, a) for i, a in zip(lead, store.axes, strict=False)):
        return None
    along = [a for a in pooled.axes if a in depth.free]
    across = tuple(a for a in pooled.axes if a not in depth.free)
    slide = slide_along(depth, store.axes[-3], along)
    if slide is None or len(along) != 1 or not across or slide.stride > slide.taps or slide.dilation > 1:
        return None
    if any(along[0] in i.free for i in (*lead, *load.index[-2:])):
        return None
    return _split(kernel, store, pooled, load, along[0], across)


def _is_wide(pooled: Reduce, load: Load) -> bool:
    taps = [a.extent for a in pooled.axes]
    return load.where is not None or prod(n if isinstance(n, int) else MANY_TAPS for n in taps) >= MANY_TAPS


def _split(
    kernel: Kernel, store: Store, pooled: Reduce, load: Load, along: Axis, across: tuple[Axis, ...]
) -> Volumes | None:
    *lead, depth, _, _ = load.index
    *front, _, row, column = store.axes
    plane = Axis(f"{store.axes[-3].name}_in", load.buffer.shape[-3])
    between = Buffer("planes", f32, (*store.buffer.shape[:-3], plane.extent, *store.buffer.shape[-2:]))
    axes = (*front, plane, row, column)
    seen = _read(pooled.kind, load.buffer, (*lead, plane, *load.index[-2:]), _only(load.where, depth, about=False))
    first = Store(between, axes, axes, Reduce(pooled.kind, across, seen))
    planes = Kernel(f"{kernel.name}_0", (load.buffer,), (between,), (first,))
    left = _read(pooled.kind, between, (*front, depth, row, column), _only(load.where, depth, about=True))
    value = replaced((store.value,), {pooled: Reduce(pooled.kind, (along,), left)})[store.value]
    used = {e.buffer.name for e in postorder([value]) if isinstance(e, Load)}
    if between.name in {b.name for b in kernel.buffers}:
        return None
    inputs = (*(b for b in kernel.inputs if b.name in used), between)
    return Volumes(planes, replace(kernel, inputs=inputs, stores=(replace(store, value=value),)), between)


def _read(kind: str, buffer: Buffer, index: tuple[Expr, ...], where: Expr | None) -> Expr:
    """An element, and outside of the array what changes nothing."""
    if where is None:
        return Load(buffer, index)
    return apply("select", where, Load(buffer, index, where), Const(identity(kind, f32), f32))


def _only(where: Expr | None, place: Expr, *, about: bool) -> Expr | None:
    """The conditions on an index, or all others."""
    if not isinstance(where, Scalar):
        return None
    if where.name == "and":
        parts = [p for x in where.args if (p := _only(x, place, about=about)) is not None]
        return None if not parts else parts[0] if len(parts) == 1 else apply("and", *parts)
    return where if (where.args[0] is place) == about else None
