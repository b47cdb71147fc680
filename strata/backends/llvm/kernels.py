"""Machine code of kernels: from the process, from the disk store, or made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from strata.backends.llvm import jit
from strata.backends.llvm.builder import Module
from strata.backends.llvm.compile import Lowered, lower
from strata.backends.llvm.emit import emit_kernel
from strata.backends.llvm.matrix import MatrixPlan, emit_matrix, find_contraction, plan_matrix
from strata.backends.llvm.overrides import NativeOp
from strata.cache import default_store, digest
from strata.config import config
from strata.core import Target
from strata.kernel import Kernel, show_kernel

CODE_LIMIT = 1024  # kernels kept loaded in the process, least recently used dropped first
COPY_BYTES = 256 << 10  # of one chunk


@dataclass(frozen=True, eq=False)
class NativeKernel:
    """Machine code of one kernel, with what a program needs to call it."""

    code: jit.Code
    lowered: Lowered | None
    matrix: MatrixPlan | None

    def address(self, name: str) -> int:
        return self.code.address(name)


_loaded: OrderedDict[tuple[Kernel, str], NativeKernel] = OrderedDict()
_loaded_lock = threading.Lock()


def native_kernel(kernel: Kernel, target: Target) -> NativeKernel:
    """The machine code of a kernel; equal kernels are compiled once per process."""
    anonymous = replace(kernel, name="kernel")
    key = (anonymous, target.key)
    with _loaded_lock:
        found = _loaded.get(key)
        if found is not None:
            _loaded.move_to_end(key)
            return found
        made = _compile(anonymous, target)
        _loaded[key] = made
        if len(_loaded) > CODE_LIMIT:
            _loaded.popitem(last=False)
        return made


def _compile(kernel: Kernel, target: Target) -> NativeKernel:
    found = find_contraction(kernel)
    matrix = plan_matrix(found, kernel.name, target) if found is not None else None
    text = show_kernel(kernel)
    if matrix is not None:
        code = stored_code(text, [matrix.name, matrix.pack_name], lambda module: emit_matrix(module, matrix), target)
        return NativeKernel(code, None, matrix)
    lowered = lower(kernel, target)

    def emit(module: Module) -> None:
        emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)

    return NativeKernel(stored_code(text, [kernel.name], emit, target), lowered, None)


def stored_code(text: str, names: list[str], emit: Callable[[Module], object], target: Target) -> jit.Code:
    """Machine code from the disk store, or made and stored. `text` decides the code, with the target and our own version."""
    store = default_store()
    key = digest(text, " ".join(names), target.key, jit.VERSION, generator_version(), config().key_fields())
    data = store.get(key)
    if data is None:
        with store.making(key):
            data = store.get(key)
            if data is None:
                module = Module(target.triple)
                emit(module)
                data = jit.compile_text(module.text(), target)
                store.put(key, data, {"kind": "kernel", "text": text[:4000], "target": target.key, "made by": jit.VERSION})
    return jit.load(data, names)


@cache
def copy_code(target: Target) -> jit.Code:
    """void copy(source, destination, bytes), a block of COPY_BYTES a point; returns at once where both are the same."""
    text = f"""
define void @copy(ptr %arguments, i64 %begin, i64 %end) nounwind {{
entry:
  %source = load ptr, ptr %arguments, align 8
  %p1 = getelementptr i64, ptr %arguments, i64 1
  %destination = load ptr, ptr %p1, align 8
  %p2 = getelementptr i64, ptr %arguments, i64 2
  %bytes = load i64, ptr %p2, align 8
  %same = icmp eq ptr %source, %destination
  br i1 %same, label %done, label %move
move:
  %first = mul i64 %begin, {COPY_BYTES}
  %stop = mul i64 %end, {COPY_BYTES}
  %last = call i64 @llvm.umin.i64(i64 %stop, i64 %bytes)
  %count = sub i64 %last, %first
  %from = getelementptr i8, ptr %source, i64 %first
  %to = getelementptr i8, ptr %destination, i64 %first
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %count, i1 false)
  br label %done
done:
  ret void
}}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
"""
    return jit.compile_and_load(text, ["copy"], target)


@cache
def generator_version() -> str:
    """A digest of the code that generates code: an entry of the store is never used by another version of it."""
    package = Path(__file__).parents[2]
    files = sorted([*(package / "kernel").glob("*.py"), *(package / "backends" / "llvm").glob("*.py"), *(package / "core").glob("*.py")])
    return digest(*(f.read_bytes() for f in files))


_native_loaded: OrderedDict[tuple[str, str], jit.Code] = OrderedDict()


def native_code_of(op: NativeOp, target: Target) -> jit.Code:
    """The machine code of a hand-written op; equal keys share it."""
    key = (op.key, target.key)
    with _loaded_lock:
        if key not in _native_loaded:
            _native_loaded[key] = stored_code(op.key, op.functions, op.emit, target)
            if len(_native_loaded) > CODE_LIMIT:
                _native_loaded.popitem(last=False)
        _native_loaded.move_to_end(key)
        return _native_loaded[key]
