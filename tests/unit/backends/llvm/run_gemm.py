"""Runs a matmul kernel on NumPy arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from functools import cache

import numpy as np

from strata.backends.llvm.gemm.driver import emit_contraction
from strata.backends.llvm.gemm.epilogue import Epilogue, Site
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS, Panels, emit_pack_b
from strata.backends.llvm.gemm.spec import Contraction
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.jit.jit import MachineCode, compile_and_load
from strata.core import Target, as_dtype

Array = np.ndarray
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@cache
def build(spec: Contraction, epilogue: Epilogue | None) -> MachineCode:
    module = IrModule(spec.target.triple)
    emit_contraction(module, spec, epilogue, "kernel")
    return _compiled(module.text(), spec.target)


@cache
def build_pack(panels: Panels) -> MachineCode:
    module = IrModule(panels.target.triple)
    emit_pack_b(module, panels, "kernel")
    return _compiled(module.text(), panels.target)


@cache  # specifications that differ often have the same text
def _compiled(text: str, target: Target) -> MachineCode:
    return compile_and_load(text, ["kernel"], target)


def call(code: MachineCode, block: Array, ranges: Iterable[tuple[int, int]]) -> None:
    kernel = _KERNEL(code.address("kernel"))
    for begin, end in ranges:
        kernel(block.ctypes.data, begin, end)


def strides(array: Array) -> list[int]:
    return [s // array.itemsize for s in array.strides]


def pack(spec: Contraction, b: Array) -> Array:
    """B [batch…, k, n] as the kernel reads it; batches of stride 0 are packed once."""
    if spec.b_rows:
        return b
    source = as_dtype(b.dtype)
    panels = spec.panels(source)
    k, n = b.shape[-2:]
    flat = b.reshape(-1, k, n) if b.ndim > 2 else b[None]
    packed = np.full(len(flat) * panels.size(n, k) + 16, 99, spec.b.np)
    batch_stride, k_stride, n_stride = strides(flat)
    values = dict(
        source=flat.ctypes.data, packed=packed.ctypes.data, n=n, k=k, k_stride=k_stride, n_stride=n_stride,
        source_batch=batch_stride, packed_batch=panels.size(n, k),
    )  # fmt: skip
    block = np.array([values[name] for name in PACK_SLOTS], np.int64)
    count = panels.chunks(n, len(flat))
    call(build_pack(panels), block, [(i, i + 1) for i in range(count)])
    return packed


def argument_block(spec: Contraction, a: Array, packed: Array, b: Array, out: Array, operands: dict[str, int]) -> Array:
    rank = spec.batch_rank
    assert a.ndim == b.ndim == out.ndim == rank + 2
    (m, k), n = a.shape[-2:], b.shape[-1]
    values = dict(a=a.ctypes.data, b=packed.ctypes.data, out=out.ctypes.data, m=m, n=n, k=k)
    values["a_row"], values["a_k"] = strides(a)[-2:]
    values["out_row"], values["out_column"] = strides(out)[-2:]
    values["b_k"] = strides(b)[-2]
    b_stride = spec.panels().size(n, k)
    for axis in reversed(range(rank)):
        values |= {
            f"batch{axis}_extent": out.shape[axis], f"batch{axis}_out": strides(out)[axis],
            f"batch{axis}_a": strides(a)[axis] if a.shape[axis] > 1 else 0,
            f"batch{axis}_b": 0 if b.shape[axis] == 1 else strides(b)[axis] if spec.b_rows else b_stride,
        }  # fmt: skip
        b_stride *= b.shape[axis]
    if spec.is_open:
        values["chunk_panels"] = int(spec.panels_of_chunk(m, n, k, math.prod(out.shape[:rank])))
    values |= operands
    return np.array([values[name] for name in spec.slots], np.int64)


def run(
    spec: Contraction,
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    epilogue: Epilogue | None = None,
    operands: dict[str, int] | None = None,
    split: int = 1,
) -> Array:
    """out = epilogue(a @ b), in runs of `split` chunks, last run first."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if out is None:
        out = np.full(shape, 77, spec.element(spec.out).np)
    packed = pack(spec, b)
    block = argument_block(spec, a, packed, b, out, operands or {})
    count = int(spec.chunk_count(a.shape[-2], b.shape[-1], math.prod(shape[:-2]), a.shape[-1]))
    ranges = [(i, min(i + split, count)) for i in range(0, count, split)]
    call(build(spec, epilogue), block, reversed(ranges))
    return out


def vector_type(site: Site) -> str:
    return memory_type(site.spec.accumulator, site.lanes)
