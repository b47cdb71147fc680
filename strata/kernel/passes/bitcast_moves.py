"""Kernels that only move, select or negate elements, as integer kernels of the same width: no conversions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from strata.core import DType, bf16, f16, u8, u16, u64
from strata.kernel.ir import Buffer, Const, Expr, Kernel, Load, Scalar, Store, apply, postorder
from strata.kernel.rewrite import load

_SIGNED = (f16, bf16)  # types of which -x is x with another sign bit, whatever x is


def as_bits(kernel: Kernel) -> Kernel:
    """The kernel with integers in place of the types that have another form in registers than in memory."""
    moved: dict[Buffer, Buffer] = {}
    for store in kernel.stores:
        kind = _bits(store.buffer.dtype)
        if kind is not None and _is_moved(store.value, store.buffer.dtype):
            buffers = {n.buffer for n in _elements(store.value) if isinstance(n, Load)} | {store.buffer}
            moved |= {b: replace(b, dtype=kind) for b in buffers}
    for store in kernel.stores:
        plain = store.buffer in moved and _is_moved(store.value, store.buffer.dtype)
        others = _others(store.value) if plain else (store.value,)
        read = {n.buffer for n in postorder((*store.index, *others)) if isinstance(n, Load)}
        if (read & moved.keys()) or (store.buffer in moved and not plain):
            return kernel  # an element is computed with somewhere
    if not moved:
        return kernel
    return replace(
        kernel,
        inputs=tuple(moved.get(b, b) for b in kernel.inputs),
        outputs=tuple(moved.get(b, b) for b in kernel.outputs),
        stores=tuple(_moved(s, moved) for s in kernel.stores),
    )


def _moved(store: Store, moved: dict[Buffer, Buffer]) -> Store:
    if store.buffer not in moved:
        return store
    return replace(store, buffer=moved[store.buffer], value=_integer(store.value, moved))


def _is_moved(value: Expr, dtype: DType) -> bool:
    """Whether a value is an element of memory, one of several, or one with another sign."""
    if value.dtype is not dtype:
        return False
    match value:
        case Load():
            return True
        case Const():
            return dtype in _SIGNED
        case Scalar("select", (_, a, b)):
            return dtype in _SIGNED and _is_moved(a, dtype) and _is_moved(b, dtype)
        case Scalar("neg" | "abs" | "copysign", args):
            return dtype in _SIGNED and all(_is_moved(a, dtype) for a in args)
    return False


def _elements(value: Expr) -> Iterator[Expr]:
    """Loads and numbers that a moved value may be."""
    match value:
        case Scalar("select", (_, a, b)):
            yield from _elements(a)
            yield from _elements(b)
        case Scalar(_, args):
            for a in args:
                yield from _elements(a)
        case _:
            yield value


def _others(value: Expr) -> Iterator[Expr]:
    """What decides which element a moved value is: indices and conditions."""
    match value:
        case Scalar("select", (condition, a, b)):
            yield condition
            yield from _others(a)
            yield from _others(b)
        case Scalar(_, args):
            for a in args:
                yield from _others(a)
        case _:
            yield from value.inputs


def _integer(value: Expr, moved: dict[Buffer, Buffer]) -> Expr:
    """The bits of a moved value."""
    match value:
        case Load(buffer, index, where):
            return load(moved[buffer], index, where)
        case Const(number, dtype):
            return Const(int(np.asarray(number).astype(dtype.np).view(np.uint16)), u16)
        case Scalar("select", (condition, a, b)):
            return apply("select", condition, _integer(a, moved), _integer(b, moved))
    assert isinstance(value, Scalar)
    a, *more = (_integer(x, moved) for x in value.args)
    sign, rest = Const(1 << 15, u16), Const((1 << 15) - 1, u16)
    if value.name == "neg":
        return apply("xor", a, sign)
    size = apply("and", a, rest)
    return apply("or", size, apply("and", more[0], sign)) if more else size


def _bits(dtype: DType) -> DType | None:
    if dtype.is_bool:
        return u8
    if dtype.is_complex:
        return u64 if dtype.itemsize == 8 else None
    return {1: u8, 2: u16}.get(dtype.itemsize) if dtype.is_float else None
