"""Kernels that only move elements do so as integers of their size: nothing is decoded, rounded or encoded."""

from __future__ import annotations

from dataclasses import replace

from strata.core import DType, u8, u16, u64
from strata.kernel.ir import Buffer, Expr, Kernel, Load, Store, load, postorder


def as_bits(kernel: Kernel) -> Kernel:
    """The kernel with integers in place of the types that have another form in registers than in memory."""
    moved: dict[Buffer, Buffer] = {}
    for store in kernel.stores:
        value, kind = store.value, _bits(store.buffer.dtype)
        if kind is not None and isinstance(value, Load) and value.dtype is store.buffer.dtype:
            moved |= {b: replace(b, dtype=kind) for b in (value.buffer, store.buffer)}
    for store in kernel.stores:
        plain = isinstance(store.value, Load)
        roots: tuple[Expr, ...] = (*store.index, *(store.value.inputs if plain else (store.value,)))
        read = {n.buffer for n in postorder(roots) if isinstance(n, Load)}
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
    value = store.value
    assert isinstance(value, Load)
    return replace(store, buffer=moved[store.buffer], value=load(moved[value.buffer], value.index, value.where))


def _bits(dtype: DType) -> DType | None:
    if dtype.is_bool:
        return u8
    if dtype.is_complex:
        return u64 if dtype.itemsize == 8 else None
    return {1: u8, 2: u16}.get(dtype.itemsize) if dtype.is_float else None
