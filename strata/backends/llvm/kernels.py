"""Machine code of kernels: from the process, from the disk store, or made."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from strata.backends.llvm import jit
from strata.backends.llvm.builder import Module
from strata.backends.llvm.compile import lower
from strata.backends.llvm.conv_steps import (
    ConvPlan,
    emit_convolution_kernel,
    find_convolution,
    plan_convolution_kernel,
)
from strata.backends.llvm.emit import emit_kernel
from strata.backends.llvm.matrix import MatrixPlan, emit_matrix, find_contraction, plan_matrix
from strata.backends.llvm.overrides import NativeOp
from strata.cache import digest
from strata.config import config
from strata.core import Dim, Symbol, Target, parse_dim
from strata.kernel import Kernel, show_kernel
from strata.lir import Step

CODE_LIMIT = 1024  # kernels kept loaded in the process, least recently used dropped first
COPY_BYTES = 256 << 10  # of one chunk
ProductPlan = MatrixPlan | ConvPlan


@dataclass(frozen=True, slots=True)
class Loops:
    """How a generated kernel is called: buffers and sizes in the order of its arguments, and its parallel space."""

    buffers: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    points: Dim
    grain: int

    def to_text(self) -> str:
        sizes = [[s.name, s.lo, s.hi] for s in self.symbols]
        return json.dumps([self.buffers, sizes, str(self.points), self.grain])

    @staticmethod
    def from_text(text: str) -> Loops:
        buffers, sizes, points, grain = json.loads(text)
        symbols = {name: Symbol(name, lo, hi) for name, lo, hi in sizes}
        return Loops(tuple(buffers), tuple(symbols.values()), parse_dim(points, symbols), grain)


@dataclass(frozen=True, eq=False)
class NativeKernel:
    """Machine code of one kernel, with what a program needs to call it."""

    code: jit.Code
    loops: Loops | None
    matrix: ProductPlan | None

    def address(self, name: str) -> int:
        return self.code.address(name)


_loaded: OrderedDict[tuple[Kernel, str], NativeKernel] = OrderedDict()
_loaded_lock = threading.Lock()


def native_kernel(kernel: Kernel, target: Target, step: Step | None = None) -> NativeKernel:
    """The machine code of the kernel of a step; equal kernels are compiled once per process."""
    anonymous = replace(kernel, name="kernel")
    key = (anonymous, f"{target.key} {'' if step is None or step.slides is None else 'slides'}")
    with _loaded_lock:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = _compile(anonymous, target, step)
            if len(_loaded) > CODE_LIMIT:
                _loaded.popitem(last=False)
        _loaded.move_to_end(key)
    jit.note(found.code, f"{found.loops.to_text()}\n".encode() if found.loops is not None else b"")
    return found


def _compile(kernel: Kernel, target: Target, step: Step | None) -> NativeKernel:
    """Generated loops are kept with the way they are called, so that a warm start needs no nest and no schedule."""
    text = show_kernel(kernel)
    convolution = _convolution(kernel, target, step) if step is not None else None
    if convolution is not None:
        names = [convolution.name, convolution.pack_name]
        code = stored_code(f"conv {text}", names, lambda module: emit_convolution_kernel(module, convolution), target)
        return NativeKernel(code, None, convolution)
    key = code_key("loops", text, target)
    payload = jit.stored(key)
    if payload is None:
        found = find_contraction(kernel) if not kernel.schedule else None
        matrix = plan_matrix(found, kernel.name, target) if found is not None else None
        if matrix is not None:
            code = stored_code(
                text, [matrix.name, matrix.pack_name], lambda module: emit_matrix(module, matrix), target
            )
            return NativeKernel(code, None, matrix)

        def make() -> bytes:
            lowered = lower(kernel, target)
            buffers = tuple(b.name for b in lowered.kernel.buffers)
            loops = Loops(buffers, tuple(lowered.kernel.symbols().values()), lowered.points, lowered.grain)
            module = Module(target.triple)
            emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
            return f"{loops.to_text()}\n".encode() + jit.compile_text(module.text(), target)

        payload = jit.made(
            key, make, {"kind": "kernel", "text": text[:4000], "target": target.key, "made by": jit.VERSION}
        )
    head, _, data = payload.partition(b"\n")
    return NativeKernel(jit.load(data, [kernel.name], key), Loops.from_text(head.decode()), None)


def _convolution(kernel: Kernel, target: Target, step: Step) -> ConvPlan | None:
    """The kernel as a convolution, unless it is a plain product of matrices."""
    found = find_convolution(kernel, step)
    matrix = find_contraction(kernel) if found is not None else None
    if found is None or (matrix is not None and not matrix.batch):
        return None
    return plan_convolution_kernel(found, kernel.name, target)


def stored_code(text: str, names: Sequence[str], emit: Callable[[Module], object], target: Target) -> jit.Code:
    """Machine code from the store, or made and stored; `text`, the target and our version decide it."""
    key = code_key(" ".join(names), text, target)
    data = jit.stored(key)
    if data is None:

        def make() -> bytes:
            module = Module(target.triple)
            emit(module)
            return jit.compile_text(module.text(), target)

        data = jit.made(
            key, make, {"kind": "kernel", "text": text[:4000], "target": target.key, "made by": jit.VERSION}
        )
    return jit.load(data, names, key)


def code_key(kind: str, text: str, target: Target) -> str:
    """The key of machine code in the store."""
    return digest(text, kind, target.key, jit.VERSION, generator_version(), config().key_fields())


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
    return jit.stored_text(text, ["copy"], target)


@cache
def generator_version() -> str:
    """A digest of the code that generates code: an entry of the store is never used by another version of it."""
    package = Path(__file__).parents[2]
    files = sorted(
        [
            *(package / "kernel").glob("*.py"),
            *(package / "backends" / "llvm").glob("*.py"),
            *(package / "core").glob("*.py"),
        ]
    )
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
        code = _native_loaded[key]
    jit.note(code)
    return code
