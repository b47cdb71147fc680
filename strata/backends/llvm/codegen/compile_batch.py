"""Compiling many kernels at once: those that no cache has are emitted, split into modules and compiled on all cores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from strata.backends.llvm.codegen.compile import Lowered, lower, lower_phases
from strata.backends.llvm.codegen.single_sizes import single_sizes
from strata.backends.llvm.conv.match import (
    ConvPlan,
    emit_convolution_kernel,
    find_convolution,
    plan_convolution_kernel,
    wins_turned,
)
from strata.backends.llvm.conv.match_nchw import PlanesPlan, emit_planes_kernel, find_planes, plan_planes_kernel
from strata.backends.llvm.conv.pool2d import PoolPlan, emit_pool, plan_pool
from strata.backends.llvm.conv.pool3d import Volumes, split_volumes
from strata.backends.llvm.gemm.match import (
    MatrixKernel,
    MatrixPlan,
    along_kernel,
    emit_matrix,
    few_rows_together,
    find_matmul,
    plan_matrix,
    read_along,
    single_terms,
)
from strata.backends.llvm.gemm.tiles import tiles_of, with_tiles
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit import jit
from strata.backends.llvm.jit.calling_convention import LoopUsage, MatmulUsage, Usage, read_usage
from strata.backends.llvm.jit.code_cache import CodeHeader
from strata.backends.llvm.jit.outlined_functions import INNER, Split, split
from strata.backends.llvm.loops.emit import emit_kernel
from strata.config import config
from strata.core import Dim, Table, Target, available_threads
from strata.kernel import Kernel, MatmulTiles, PoolTiles, Template, template_in
from strata.lir import Step

if TYPE_CHECKING:
    from strata.backends.llvm.codegen.kernels import Source


def emitted(
    kernel: Kernel,
    target: Target,
    step: Step | None,
    kept: frozenset[str],
    convolves: bool = False,
    in_loop: bool = False,
) -> tuple[Usage, IrModule]:
    """A kernel as a convolution, a matmul, a pool, or loops; beside it, loops for sizes of 1 that change its order."""
    usage, module = _general(kernel, target, step, kept, convolves, in_loop)
    slides = convolves or (step is not None and step.has_slides)
    for where, single in () if slides else single_sizes(kernel, kept, target):
        usage = _or_single(usage, single, where, target, module)
    return usage, module


def _general(
    kernel: Kernel, target: Target, step: Step | None, kept: frozenset[str], convolves: bool, in_loop: bool
) -> tuple[Usage, IrModule]:
    module = IrModule(target.triple)
    template = template_in(kernel.schedule)
    tiles = template if isinstance(template, MatmulTiles) else None
    if template is not None:
        kernel = replace(kernel, schedule="")
    convolution = convolution_plan(kernel, target, step, tiles) if step is not None else None
    if convolution is not None:
        emit_convolution_kernel(module, convolution)
        return _or_direct(convolution, target, module), module
    planes = planes_plan(kernel, target, step) if step is not None else None
    if planes is not None:
        emit_planes_kernel(module, planes)
        return MatmulUsage.of(planes), module
    found = find_matmul(kernel) if not kernel.schedule else None
    if found is not None and convolves:
        found = replace(found, along=())
    matrix = matrix_plan(found, kernel.name, target, kept, tiles, in_loop=in_loop) if found is not None else None
    along = read_along(found, kept) if found is not None else 0
    if found is not None and matrix is not None:
        emit_matrix(module, matrix)
        usage = replace(MatmulUsage.of(matrix), grains=matrix.grains(), joined=matrix.spec.joined)
        return (_or_along(usage, found, along, target, module) if along != 0 else usage), module
    if found is not None and along == 1:
        kernel = few_rows_together(found, target)
    elif found is not None and found.columns is not None and found.sums.sums_products:
        if along != 0:
            return _loops_or_along(along_kernel(found), along_kernel(found, "products"), along, target, module), module
        kernel = along_kernel(found, "products")
    elif found is None and not convolves and (single := single_terms(kernel, kept)) is not None:
        along, dots, kernel = single
        if along not in (0, 1):
            return _loops_or_along(dots, kernel, along, target, module), module
        kernel = dots if along == 1 else kernel
    chosen = template if isinstance(template, PoolTiles) else None
    pool = plan_pool(kernel, target, chosen) if not kernel.schedule else None
    if pool is not None:
        emit_pool(module, pool)
        return _or_narrow(pool.usage, pool, kernel, target, module), module
    volumes = split_volumes(kernel) if not kernel.schedule else None
    first = plan_pool(volumes.planes, target) if volumes is not None else None
    if volumes is not None and first is not None:
        emit_pool(module, first)
        return _or_narrow(_behind(first, volumes, target, module), first, kernel, target, module), module
    phases, scratch = lower_phases(kernel, target)
    for lowered in phases:
        emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    *before, last = map(_loops_of, phases)
    return replace(last, before=tuple(before), scratch=tuple((b.name, b.type.nbytes) for b in scratch)), module


def _or_direct(plan: ConvPlan, target: Target, module: IrModule) -> MatmulUsage:
    """A convolution, beside the direct one that takes the place of Winograd's where that turns out to be slower: the
    choice is the same, whether the sizes were known or not."""
    usage = MatmulUsage.of(plan)
    wins = wins_turned(plan.matrix) if plan.is_winograd else 1
    if wins == 1:
        return usage
    direct = plan_convolution_kernel(plan.matrix, f"{plan.name}_other", target, winograd=False)
    assert direct is not None
    emit_convolution_kernel(module, direct)
    return replace(usage, taken=wins, other=replace(MatmulUsage.of(direct), taken=1 - wins))


def _or_along(usage: MatmulUsage, matrix: MatrixKernel, few: Dim, target: Target, module: IrModule) -> MatmulUsage:
    """A matmul beside the loops that take its place where its rows turn out to be few: a sum has one order, whether
    the number of rows was known or not."""
    lowered = lower(along_kernel(matrix).renamed("kernel_few"), target)
    emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    loops = _loops_of(lowered)
    return replace(usage, taken=usage.taken * (1 - few), few=replace(loops, points=loops.points * few))


def _or_single(usage: Usage, kernel: Kernel, where: Dim, target: Target, module: IrModule) -> Usage:
    """A kernel, beside the loops that take its place for some sizes."""
    loops = usage if isinstance(usage, LoopUsage) else usage.few
    base = "kernel" if loops is usage else "kernel_few"
    name = base if loops is None else f"{base}_{len(loops.before)}"
    lowered = lower(kernel.renamed(name), target)
    emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    made, rest = _loops_of(lowered), 1 - where
    made = replace(made, points=made.points * where)
    if loops is not None:
        before = [replace(u, points=u.points * rest) for u in loops.before]
        made = replace(loops, points=loops.points * rest, before=(*before, made))
    if isinstance(usage, LoopUsage):
        return made
    # weights are packed when they are bound, where no size is known: a pack runs whatever the sizes are
    return replace(usage, points=usage.points * rest, few=made)


def _loops_or_along(along: Kernel, products: Kernel, few: Dim, target: Target, module: IrModule) -> LoopUsage:
    """A matmul that no template takes as loops, of which there are those for few rows and those for more."""
    made = []
    for kernel in (along.renamed("kernel_0"), products):
        lowered = lower(kernel, target)
        emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
        made.append(_loops_of(lowered))
    dots, loops = made
    return replace(loops, points=loops.points * (1 - few), before=(replace(dots, points=dots.points * few),))


def _or_narrow(usage: LoopUsage, pool: PoolPlan, kernel: Kernel, target: Target, module: IrModule) -> LoopUsage:
    """A pool, with the loops that take its place where its lines turn out to be narrow: a sum has one order, whether
    their length was known or not."""
    narrow = pool.is_narrow
    if pool.kind != "sum" or narrow == 0:
        return usage
    lowered = lower(kernel.renamed(f"kernel_{len(usage.before)}"), target)
    emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    loops, wide = _loops_of(lowered), 1 - narrow
    before = [replace(u, points=u.points * wide) for u in usage.before]
    return replace(usage, points=usage.points * wide, before=(*before, replace(loops, points=loops.points * narrow)))


def _behind(planes: PoolPlan, volumes: Volumes, target: Target, module: IrModule) -> LoopUsage:
    """What a pool over volumes does with its pooled planes."""
    lowered = lower(volumes.rest, target)
    emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    between = volumes.between
    return replace(_loops_of(lowered), before=(planes.usage,), scratch=((between.name, between.type.nbytes),))


def _loops_of(lowered: Lowered) -> LoopUsage:
    kernel = lowered.kernel
    buffers = tuple(b.name for b in kernel.buffers)
    return LoopUsage(buffers, tuple(kernel.symbols().values()), lowered.points, lowered.grain)


def template_of(
    kernel: Kernel, target: Target, step: Step, kept: frozenset[str], convolves: bool
) -> tuple[Template, int] | None:
    """The template that `emitted` takes, and the registers that its tiles may fill; None where it emits other code."""
    convolution = convolution_plan(kernel, target, step)
    if convolution is not None:
        return tiles_of(convolution.spec), 0
    if planes_plan(kernel, target, step) is not None:
        return None
    found = find_matmul(kernel)
    if found is not None:
        found = replace(found, along=()) if convolves else found
        matrix = plan_matrix(found, kernel.name, target, kept)
        return None if matrix is None else (tiles_of(matrix.spec), target.vector_registers)
    pool = plan_pool(kernel, target) if single_terms(kernel, kept) is None else None
    return None if pool is None else (PoolTiles(pool.planes, pool.lines), 0)


def matrix_plan(
    found: MatrixKernel,
    name: str,
    target: Target,
    kept: frozenset[str],
    tiles: MatmulTiles | None,
    *,
    in_loop: bool = False,
) -> MatrixPlan | None:
    """A matmul, with tiles that were searched for or by a heuristic."""
    plan = plan_matrix(found, name, target, kept, in_loop=in_loop)
    if plan is None or tiles is None:
        return plan
    return replace(plan, spec=with_tiles(plan.spec, tiles, found.extent(found.rows), found.extent(found.columns)))


def convolution_plan(kernel: Kernel, target: Target, step: Step, tiles: MatmulTiles | None = None) -> ConvPlan | None:
    """The kernel as a convolution, unless it is a plain matmul."""
    found = find_convolution(kernel, step)
    matrix = find_matmul(kernel) if found is not None else None
    if found is None or (matrix is not None and not matrix.batch):
        return None
    plan = plan_convolution_kernel(found, kernel.name, target)
    if plan is None or tiles is None:
        return plan
    product = with_tiles(plan.spec, tiles, None, None)
    return replace(plan, convolution=replace(plan.convolution, product=product))


def planes_plan(kernel: Kernel, target: Target, step: Step) -> PlanesPlan | None:
    """The kernel as a convolution with channels first."""
    found = find_planes(kernel, step)
    return None if found is None else plan_planes_kernel(found, kernel.name, target)


class CompileBatch:
    """Code that is made at the same time. Sources that come to the same text are compiled once, and so are parts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.parts: dict[str, bytes] = {}  # entries by key
        self._objects: Table[str, bytes] = Table("batch")  # and entries of parts, by key

    def run(self, wanted: Sequence[tuple[str, Source]]) -> list[bytes]:
        threads = available_threads(config().num_threads)
        if threads == 1 or len(wanted) < 2:
            return [self._made(key, source) for key, source in wanted]
        # one thread more than cores: while one waits for its turn of Python, another is inside LLVM
        with ThreadPoolExecutor(min(threads + 1, len(wanted)), "strata-compile") as pool:
            jobs = [pool.submit(copy_context().run, self._made, key, source) for key, source in wanted]
            try:
                return [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _made(self, key: str, source: Source) -> bytes:
        """An entry, made or waited for, and then its parts: no lock is taken while another is held."""
        known: list[Split] = []

        def make() -> bytes:
            head, divided = self._divided(source)
            known.append(divided)
            return head.to_line() + self._object(divided.text)

        payload = jit.made(key, make, self._about("kernel", source.about))
        for name, part in CodeHeader.of(payload).parts.items():
            self.parts[part] = self._objects.get_or_make(part, partial(self._part, name, part, source, known))
        return payload

    def _divided(self, source: Source) -> tuple[CodeHeader, Split]:
        usage, module = source.make()
        functions = source.functions or read_usage(usage).functions
        divided = split(module, self._target, functions[1:])
        own = tuple(name for name in functions if name not in divided.parts)
        exports = tuple(name for name in functions if name in divided.parts)
        return CodeHeader(usage, own, divided.keys, exports), divided

    def _part(self, name: str, key: str, source: Source, known: list[Split]) -> bytes:
        found = jit.stored(key)
        if found is not None:
            return found
        if not known:  # another process made the entry, and not yet its parts
            known.append(self._divided(source)[1])
        part, keys = known[0].parts[name], known[0].keys
        head = CodeHeader("", (name,), {called: keys[called] for called in part.calls}, ()).to_line()
        return jit.made(key, lambda: head + self._object(part.text, INNER), self._about("part", name))

    def _object(self, text: str, level: int = 2) -> bytes:
        return self._objects.get_or_make(text, lambda: jit.compile_text(text, self._target, level=level))

    def _about(self, kind: str, text: str) -> dict[str, str]:
        return {"kind": kind, "text": text[:4000], "target": self._target.key, "made by": jit.VERSION}
