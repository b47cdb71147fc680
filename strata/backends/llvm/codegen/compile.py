"""The kernel pipeline: normalize, nest, schedule, emit LLVM IR, compile, load."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from strata.backends.llvm.executor.thread_pool import ThreadPool, default_pool
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit import jit
from strata.backends.llvm.loops.emit import emit_kernel, points
from strata.core import Dim, SymExpr, Target, substitute
from strata.errors import RunError
from strata.kernel import (
    Buffer,
    Kernel,
    LoopBlock,
    Machine,
    Schedule,
    check_schedule,
    choose_schedule,
    loops_of,
    normalize,
    parse_schedule,
    processor_phases,
)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel ready to be emitted: normal form, nest and schedule, and the size of its parallel space."""

    kernel: Kernel
    nest: LoopBlock
    schedule: Schedule
    points: Dim

    @property
    def grain(self) -> int:
        return self.schedule.parallel.grain


def lower_phases(kernel: Kernel, target: Target) -> tuple[list[Lowered], tuple[Buffer, ...]]:
    """Kernels to be run one after the other, and the memory between them; one kernel where a schedule is given."""
    if kernel.schedule:
        return [lower(kernel, target)], ()
    phases = processor_phases(kernel, machine_of(target))
    return [_lowered(k, target) for k in phases.kernels], phases.scratch


def lower(kernel: Kernel, target: Target, schedule: Schedule | None = None) -> Lowered:
    """Normal form, nest and schedule of a kernel."""
    return _lowered(
        normalize(kernel), target, schedule or (parse_schedule(kernel.schedule) if kernel.schedule else None)
    )


def _lowered(normal: Kernel, target: Target, schedule: Schedule | None = None) -> Lowered:
    machine = machine_of(target)
    normal, nest = loops_of(normal, machine)
    if schedule is not None:
        check_schedule(schedule, normal, nest)
    chosen = schedule or choose_schedule(normal, nest, machine)
    return Lowered(normal, nest, chosen, points(nest, chosen))


def machine_of(target: Target) -> Machine:
    """What schedules depend on."""
    registers, caches = (target.vector_bytes, target.vector_registers), (target.l2_bytes, target.l3_bytes)
    return Machine(*registers, *caches, target.has_fma)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledKernel:
    """A kernel loaded into this process."""

    original: Kernel
    lowered: Lowered
    code: jit.MachineCode
    address: int
    text: str

    def _check_count(self, inputs: Sequence[Any]) -> None:
        kernel = self.original
        ranks = [len(b.shape) for b in kernel.inputs]
        if ranks != [np.ndim(a) for a in inputs]:
            given = ", ".join(f"{np.asarray(a).dtype}{list(np.shape(a))}" for a in inputs) or "nothing"
            raise RunError(
                f"kernel {kernel.name}: takes {', '.join(map(str, kernel.inputs))}, got {given}", code="X112"
            )

    def arguments(self, arrays: Sequence[Any], sizes: Mapping[str, int]) -> Any:
        """The argument block: pointers, then sizes."""
        values = [a.ctypes.data for a in arrays] + [sizes[name] for name in self.lowered.kernel.symbols()]
        return (ctypes.c_int64 * max(1, len(values)))(*values)

    def __call__(self, *inputs: Any, sizes: Mapping[str, int] | None = None) -> list[Any]:
        """Runs on NumPy arrays on the calling thread."""
        return self.run(inputs, sizes=sizes, threads=1)

    def run(
        self,
        inputs: Sequence[Any],
        *,
        sizes: Mapping[str, int] | None = None,
        threads: int | None = None,
        pool: ThreadPool | None = None,
        grain: int | None = None,
    ) -> list[Any]:
        """Runs on NumPy arrays, chunks handed out by the pool."""
        self._check_count(inputs)
        known = bind_sizes(self.original, inputs, sizes)
        arrays = [np.ascontiguousarray(a) for a in inputs]
        for buffer, array in zip(self.original.inputs, arrays, strict=True):
            shape = tuple(_number(d, known) for d in buffer.shape)
            if array.dtype != buffer.dtype.np or (array.shape != shape and array.size != prod(shape)):
                raise RunError(
                    f"kernel {self.original.name}: {buffer} is given {array.dtype}{list(array.shape)}", code="X112"
                )
        outputs = [np.empty([_number(d, known) for d in b.shape], b.dtype.np) for b in self.original.outputs]
        block = self.arguments([*arrays, *outputs], known)
        total = _number(self.lowered.points, known)
        if total > 0:
            chosen = pool or default_pool()
            chosen.parallel(self.address, ctypes.addressof(block), total, grain or self.lowered.grain, threads)
        return outputs


def _number(dim: Dim, sizes: Mapping[str, int]) -> int:
    return int(substitute(dim, sizes))


def bind_sizes(kernel: Kernel, inputs: Sequence[Any], sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Values of the symbolic sizes: those given, and those that are an extent of an input."""
    known = dict(sizes or {})
    for buffer, array in zip(kernel.inputs, inputs, strict=True):
        for extent, actual in zip(buffer.shape, np.shape(array), strict=True):
            if isinstance(extent, SymExpr):
                known.setdefault(str(extent), int(actual))
    return known


def emit_text(lowered: Sequence[Lowered], target: Target) -> str:
    """LLVM IR of several kernels as one module; their names must differ."""
    module = IrModule(target.triple)
    for item in lowered:
        emit_kernel(module, item.kernel, item.nest, item.schedule, target)
    return module.text()


def compile_kernel(kernel: Kernel, target: Target | None = None, schedule: Schedule | None = None) -> CompiledKernel:
    """One kernel as one module."""
    host = target or Target.host()
    lowered = lower(kernel, host, schedule)
    text = emit_text([lowered], host)
    code = jit.compile_and_load(text, [kernel.name], host)
    return CompiledKernel(kernel, lowered, code, code.address(kernel.name), text)
