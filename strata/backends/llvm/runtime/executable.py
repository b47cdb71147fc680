"""The CPU executable: a plan's native kernels and the program that runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Self

import numpy as np

from strata.backends.base import Arrays, Executable, Tell
from strata.backends.llvm.codegen.kernels import (
    COPY_BYTES,
    as_kernel,
    copy_code,
    native_pieces,
    op_source,
    plan_sources,
)
from strata.backends.llvm.executor.arena import Arena, ArenaPool, address_of
from strata.backends.llvm.executor.python_objects import IS_DIRECT
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.backends.llvm.ir.status import WORDS, check
from strata.backends.llvm.jit.calling_convention import MatmulUsage
from strata.backends.llvm.runtime.bound import BoundPlan, PlanSegment
from strata.backends.llvm.runtime.calls import ProgramCall
from strata.backends.llvm.runtime.fast_call import NativeFastCall
from strata.backends.llvm.runtime.kernel_steps import bytes_read, loop_steps, product_arguments, unpacked_reads
from strata.backends.llvm.runtime.observed import run_observed
from strata.backends.llvm.runtime.packed_weights import PackedWeights
from strata.backends.llvm.runtime.program import Argument, BoundProgram, NativeProgram, ProgramStep
from strata.backends.llvm.runtime.symbolic_program import FIXED_ARENA, OpenProgram
from strata.config import config
from strata.core import Dim, Table, Target, available_threads, dim_max, forget_pages, here, new_lock, substitute
from strata.errors import MemoryLimitError, SymbolError
from strata.lir import KEPT, Lir, Placement, SizeClasses, Step

KEPT_CALLS = 4  # for as many callers at once as are likely


class CpuExecutable(Executable):
    """A plan on the CPU. Regions: the arena, buffers outside it, packed weights, then pool, threads and status."""

    observes_steps = True

    def __init__(self, lir: Lir, target: Target, *, in_loop: bool = False) -> None:
        super().__init__(lir)
        self.target = target
        sources, ops = plan_sources(lir, target, in_loop=in_loop)
        pieces = native_pieces([*sources.values(), *(op_source(op, target) for op in ops.values())], target)
        self.kernels = {name: as_kernel(p) for name, p in zip(lir.kernels, pieces, strict=False)}
        # hand-written, by step
        self.native = {at: (op, p.code) for (at, op), p in zip(ops.items(), pieces[len(sources) :], strict=True)}
        self._holdings = {at: op.holding for at, op in ops.items() if op.holding is not None}
        self._outside = [b for b in lir.buffers if b.role != "scratch"]
        self._region = {b.name: i + 1 for i, b in enumerate(self._outside)}
        self._packed = PackedWeights()
        self._functions: dict[str, int] = {}
        self.segments = self._split()
        self._bound: Table[tuple[tuple[str, int], ...], BoundPlan] = Table("argument blocks")
        self.arenas = ArenaPool(alignment=lir.memory.alignment)
        self._is_dynamic = lir.has_dynamic_dims
        self._fixed: Placement | None = None  # for all sizes
        self._classes = SizeClasses(lir, FIXED_ARENA)
        self._is_placed = False
        self._open: OpenProgram | None = None
        self.only: BoundPlan | None = None  # the program of a plan without symbols
        self._fast_call = NativeFastCall()
        self.pool = default_pool()
        self.threads = available_threads(config().num_threads)
        self.input_regions = tuple(self._region[buffer] for _, buffer in lir.io.inputs)
        firsts = [
            name not in lir.io.outputs[:i] and lir.buffer(name).role == "result"
            for i, name in enumerate(lir.io.outputs)
        ]
        self.output_regions = tuple(
            self._region[n] if own else 0 for n, own in zip(lir.io.outputs, firsts, strict=True)
        )
        self.has_leaf_results = not all(firsts)
        held = {at: holding.held for at, holding in self._holdings.items()}
        self._unpacked = unpacked_reads(lir, self._packed_product, held)
        if target.triple == Target.host().triple:  # else its code is only kept, and cannot pack anything here
            for name, array in list(self.values.items()):
                self.hold(name, array)

    # building the program

    def _split(self) -> list[PlanSegment]:
        """Runs of kernels between host steps."""
        segments: list[PlanSegment] = []
        for at, step in enumerate(self.lir.schedule):
            if step.phase == "prologue":
                continue
            if self.is_host_step(at, step):
                segments.append(PlanSegment((at,), step))
            elif segments and segments[-1].host is None:
                segments[-1] = PlanSegment((*segments[-1].steps, at), None)
            else:
                segments.append(PlanSegment((at,), None))
        for step in self.lir.schedule:
            native = self.kernels.get(step.name) if step.kernel is not None else None
            if native is not None and native.product is not None:
                for _, product in native.product.ways:
                    self._note_weight(step, product)
        return segments

    def _note_weight(self, step: Step, product: MatmulUsage) -> None:
        source = step.inputs[_input_index(step, product.factor)]
        if product.is_packed and self.lir.buffer(source).role in KEPT:
            self._packed.note(source, product)

    def _weight_region(self, source: str, product: MatmulUsage) -> int | None:
        at = self._packed.place(source, product)
        return None if at is None else 1 + len(self._outside) + at

    def packed_region(self, step: Step, product: MatmulUsage) -> int | None:
        """Where the packed form of a matmul's second factor is; None where each run packs it."""
        return self._weight_region(step.inputs[_input_index(step, product.factor)], product)

    def _packed_product(self, step: Step) -> MatmulUsage | None:
        """How a step is called that reads a factor in its packed form."""
        product = self.kernels[step.name].product if step.kernel is not None else None
        return product if product is not None and self.packed_region(step, product) is not None else None

    def _steps_of(self, step: Step, place: Callable[[str], Argument], workspace: Argument | None) -> list[ProgramStep]:
        native = self.kernels[step.name]
        buffers = dict(zip(step.kernel.input_names, step.inputs, strict=True))  # type: ignore[union-attr]
        buffers |= dict(zip(step.kernel.output_names, step.outputs, strict=True))  # type: ignore[union-attr]
        reads = bytes_read(self.lir, step, native.product)
        places = {name: place(buffer) for name, buffer in buffers.items()}
        if native.product is None:
            assert native.loops is not None
            steps = loop_steps(step.name, native.loops, places, workspace, reads)
            self._functions |= {s.kernel: native.address(f) for s, f in zip(steps, native.loops.functions, strict=True)}
            return steps
        self._functions |= {step.name + f.removeprefix("kernel"): native.address(f) for f in native.product.functions}
        steps = []
        for function, product in native.product.ways:
            name = step.name + function.removeprefix("kernel")
            region = self._weight_region(buffers[product.factor], product)
            packed = Argument(region, 0) if region is not None else workspace or Argument(0, 0)
            if region is None and product.is_packed:
                slots = product_arguments(product.pack_arguments, place, buffers, packed, product)
                points = product.pack_points * product.taken
                steps.append(ProgramStep(f"{name}_pack", slots, points, product.grains[0]))
            slots = product_arguments(product.arguments, place, buffers, packed, product)
            points = product.points * product.taken
            steps.append(ProgramStep(name, slots, points, product.grain(self.threads), reads))
            if product.few is not None:
                steps += loop_steps(f"{name}_few", product.few, places, None, reads)
        return steps

    def workspace_of(self, step: Step) -> Dim:
        """Bytes that the steps of a kernel need beside their buffers."""
        native = self.kernels[step.name]
        if native.loops is not None:
            return native.loops.scratch_bytes
        assert native.product is not None
        needs: list[Dim] = [p.packed_bytes for _, p in native.product.ways if self.packed_region(step, p) is None]
        return reduce(dim_max, needs) if needs else 0

    @property
    def workspace_bytes(self) -> int | None:
        most = {name: symbol.hi for name, symbol in self.lir.symbols.items()}
        sizes = {name: high for name, high in most.items() if high is not None}
        if len(sizes) < len(most):
            return None
        needs = (self._workspace_at(at, step, sizes) for at, step in enumerate(self.lir.schedule)
                 if not self.is_host_step(at, step))  # fmt: skip
        return max(needs, default=0)

    def _workspace_at(self, at: int, step: Step, sizes: Mapping[str, int]) -> int:
        if at in self.native:
            return self.native[at][0].plan(sizes).workspace
        size = substitute(self.workspace_of(step), sizes)
        assert isinstance(size, int)
        return size

    def limit_scratch(self, limit: int) -> None:
        workspace = self.workspace_bytes
        if workspace is None or self.lir.arena_size + workspace <= limit:
            return
        raise MemoryLimitError(
            f"{self.lir.name!r} needs {self.lir.arena_size:,} bytes of scratch memory and {workspace:,} of workspace "
            f"for kernels, the limit is {limit:,}", code="C200", place=here(),
        )  # fmt: skip

    @property
    def packed_bytes(self) -> int:
        """Of weights in the order that kernels read them."""
        return self._packed.held_bytes + sum(holding.packed_bytes() for holding in self._holdings.values())

    def is_host_step(self, at: int, step: Step) -> bool:
        return step.kernel is None and at not in self.native

    @property
    def _context(self) -> int:
        """The first of three regions, for native ops: the pool, the number of threads and the status words."""
        return 1 + len(self._outside) + len(self._packed)

    def _native_steps(
        self, at: int, place: Callable[[str], Argument], top: Argument, sizes: Mapping[str, int], keep: list[Any]
    ) -> tuple[list[ProgramStep], int]:
        """The steps of a hand-written op, and the bytes of workspace that they need after `top`."""
        step, (op, code) = self.lir.schedule[at], self.native[at]
        context = ("pool", "threads", "status")

        def argument(kind: str, value: Any) -> Argument:
            match kind:
                case "input":
                    return place(step.inputs[value])
                case "input_at":
                    which, start = value
                    base = place(step.inputs[which])
                    return Argument(base.region, base.offset + start)
                case "output":
                    return place(step.outputs[value])
                case "output_at":
                    which, start = value
                    base = place(step.outputs[which])
                    return Argument(base.region, base.offset + start)
                case "workspace":
                    return Argument(top.region, top.offset + value)
                case "table":
                    keep.append(value)
                    return Argument(None, address_of(value))
                case "pool" | "threads" | "status":
                    return Argument(self._context + context.index(kind), 0)
                case _:
                    return Argument(None, value)

        planned = op.plan(sizes)
        keep.append(planned.keep)
        steps = []
        for call in planned.calls:
            self._functions[name := f"step{at}_{call.function}"] = code.address(call.function)
            steps.append(ProgramStep(name, tuple(argument(*slot) for slot in call.slots), call.points, call.grain))
        return steps, planned.workspace

    def _steps_at(
        self, at: int, place: Callable[[str], Argument], top: Argument, sizes: Mapping[str, int], keep: list[Any]
    ) -> tuple[list[ProgramStep], int]:
        """The steps of one entry of the schedule, and the workspace that they need."""
        if at in self.native:
            return self._native_steps(at, place, top, sizes, keep)
        step = self.lir.schedule[at]
        steps = [*self._copy_steps(step, place, sizes), *self._steps_of(step, place, top)]
        return steps, self._workspace_at(at, step, sizes)

    def _placed(self, offsets: Mapping[str, int]) -> Callable[[str], Argument]:
        def place(name: str) -> Argument:
            return Argument(self._region[name], 0) if name in self._region else Argument(0, offsets[name])

        return place

    def _copy_steps(self, step: Step, place: Callable[[str], Argument], sizes: Mapping[str, int]) -> list[ProgramStep]:
        """What updates change, brought to where they change it; nothing to do where both are one array."""
        steps = []
        for made, source in step.updates:
            if place(source) == place(made):
                continue
            self._functions["copy"] = copy_code(self.target).address("copy")
            count = substitute(self.lir.buffer(source).type.nbytes, sizes)
            arguments = (place(source), place(made), Argument(None, count))
            steps.append(ProgramStep("copy", arguments, (count + COPY_BYTES - 1) // COPY_BYTES, 1, count))
        return steps

    def _bind(self, binding: Mapping[str, int]) -> BoundPlan:
        placement = self._placement(binding)
        top, need = placement.arena_size, 0
        place = self._placed(placement.offsets)
        programs: list[BoundProgram | None] = []
        regions = self._context + 3
        keep: list[Any] = []
        ranges: dict[int, tuple[int, int]] = {}
        if self._is_dynamic and len(self.segments) == 1 and self.segments[0].host is None:
            if self._open is None:
                self._open = OpenProgram(self)
            program, need = self._open.bind(binding, placement, keep, ranges)
            return self._finished([program], placement, top + need, keep, ranges)
        for segment in self.segments:
            if segment.host is not None:
                programs.append(None)
                continue
            steps: list[ProgramStep] = []
            for at in segment.steps:
                made, size = self._steps_at(at, place, Argument(0, top), binding, keep)
                need = max(need, size + 64)
                ranges[at] = len(steps), len(steps) + len(made)
                steps += made
            programs.append(NativeProgram(tuple(steps), regions).bind(self._functions, binding))
        return self._finished(programs, placement, top + need, keep, ranges)

    def _placement(self, binding: Mapping[str, int]) -> Placement:
        """Offsets of scratch buffers; small plans have the same for many sizes, or for all where those are bounded."""
        if self._is_dynamic and not self._is_placed:
            self._is_placed = True
            try:
                most = self.lir.placement()
            except SymbolError:  # a size without an upper bound
                most = None
            self._fixed = most if most is not None and most.arena_size <= FIXED_ARENA else None
        if self._fixed is not None:
            return self._fixed
        return self._classes.placement(binding) if self._is_dynamic else self.lir.placement(binding)

    def _finished(
        self,
        programs: list[BoundProgram | None],
        placement: Placement,
        arena: int,
        keep: list[Any],
        ranges: dict[int, tuple[int, int]],
    ) -> BoundPlan:
        """Programs with the addresses that stay the same between runs."""
        addresses = [0] * (self._context + 3)
        for buffer in self._outside:
            if buffer.name in self.values:
                addresses[self._region[buffer.name]] = address_of(self.values[buffer.name])
        for i, weight in enumerate(self._packed):
            if weight.memory is not None:
                addresses[1 + len(self._outside) + i] = weight.memory.address
        single = programs[0] if len(programs) == 1 else None
        keep += [*self.values.values(), *(w.memory for w in self._packed)]  # a run may outlive the next set_param
        is_direct = single is not None and IS_DIRECT
        return BoundPlan(programs, single, dict(placement.offsets), arena, addresses, [], keep, ranges, is_direct)

    # weights

    def forget(self) -> None:
        super().forget()
        self._bound.clear()  # they hold the addresses of weights
        self.only = None
        self._fast_call.forget()

    def part(self, other: Self) -> None:
        super().part(other)
        self._functions, self._packed = dict(other._functions), other._packed.copy()
        self.native = {at: (op.again() if op.again else op, code) for at, (op, code) in other.native.items()}
        self._holdings = {at: op.holding for at, (op, _) in self.native.items() if op.holding is not None}
        self._bound, self.only, self._open = Table("argument blocks"), None, None
        self.arenas = ArenaPool(alignment=self.lir.memory.alignment)
        self._fast_call, self.lock = NativeFastCall(), new_lock()

    @property
    def fast_call(self) -> NativeFastCall:
        return self._fast_call

    def hold(self, name: str, array: np.ndarray) -> None:
        """Keep the value of a parameter, a constant or what was computed from them, packed where kernels want it so."""
        self._pack_for(name, array)
        for at, holding in self._holdings.items():
            for i, source in enumerate(self.lir.schedule[at].inputs):
                if source == name:
                    holding.hold(i, array)
        if name in self._unpacked:
            self.values[name] = array
        else:
            forget_pages(array)

    def _prepare(self) -> None:
        """Compute what depends on parameters only, and pack it where kernels want it packed."""
        with self.lock:
            if self.is_prepared:
                return
            for at, step in self.prologue:
                self._compute_once(at, step)
            self._bound.clear()
            self.is_prepared = True

    def _compute_once(self, at: int, step: Step) -> None:
        """Run a step of the prologue, and keep its results."""
        arrays = [self.values[name] for name in step.inputs]
        kinds = [self.lir.buffer(name).type for name in step.outputs]
        if self.is_host_step(at, step):
            results = list(self.run_host(step, arrays, {}))
        else:
            results = [np.empty(t.static_shape, t.dtype.np) for t in kinds]
            self._run_alone(at, arrays, results)
        for name, result in zip(step.outputs, results, strict=True):
            self.hold(name, np.ascontiguousarray(result))
        for array in arrays:
            forget_pages(array)

    def _run_alone(self, at: int, inputs: Arrays, outputs: Arrays) -> None:
        """One step on arrays, outside the program."""
        step = self.lir.schedule[at]
        arrays = {source: self.values[source] for _, source in step.updates}
        arrays |= zip((*step.inputs, *step.outputs), (*inputs, *outputs), strict=True)
        keep: list[Any] = []
        weights, self._packed = self._packed, PackedWeights()
        try:
            regions = self._context + 3
            steps, size = self._steps_at(at, self._placed({}), Argument(0, 0), {}, keep)
        finally:
            self._packed = weights
        memory = Arena(size + 64)
        addresses = [0] * regions
        for name, array in arrays.items():
            addresses[self._region[name]] = address_of(array)
        table = (ctypes.c_int64 * (regions + WORDS))(memory.address, *addresses[1:])
        self._set_context(table, regions, self.threads)
        NativeProgram(tuple(steps), regions).bind(self._functions).run(table)
        check(table, regions)

    def _set_context(self, table: Any, regions: int, threads: int) -> None:
        """What native ops may ask for: the pool, how many threads to use, and words to report a failure in."""
        pool = default_pool()
        table[regions - 3], table[regions - 2] = pool.address, pool.ensure(threads)
        table[regions - 1] = ctypes.addressof(table) + 8 * regions

    def _pack_for(self, name: str, array: np.ndarray) -> None:
        for weight in self._packed:
            if weight.source == name:
                self._packed.pack(weight, array, self._packer(weight.layout))

    def _packer(self, layout: str) -> int:
        """The function that packs weights in a layout."""
        return next(at for k in self.kernels.values() if (at := k.packer(layout)) is not None)

    # running

    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        bound = self.only or self.bound_for(binding)
        try:
            call = bound.free.pop()  # a list: popping is atomic, so callers never share a call
        except IndexError:
            call = ProgramCall(bound.single, bound.addresses, self.input_regions, self.output_regions, self.pool)
        arena = call.arena
        if arena is None:
            arena = self.arenas.take(bound.arena)
            call.set_arena(arena)
        count = threads or self.threads
        if count != call.threads:
            call.set_threads(count)
        if count > 1 and self.pool.workers < count - 1:
            self.pool.ensure(count)
        if bound.is_direct:
            call.run(
                inputs if type(inputs) is list else list(inputs), outputs if type(outputs) is list else list(outputs)
            )
        else:
            call.place(self.input_regions, inputs)
            call.place(self.output_regions, outputs)
            self._run_segments(call.table, bound, arena, inputs, outputs, binding, count)
        if self.native:
            check(call.table, call.regions)
        if self.has_leaf_results:
            self.finish(inputs, outputs)
        if self._is_dynamic:
            call.arena = None
            self.arenas.give(arena)
        if len(bound.free) < KEPT_CALLS:
            bound.free.append(call)

    def _run_segments(
        self,
        table: Any,
        bound: BoundPlan,
        arena: Arena,
        inputs: Arrays,
        outputs: Arrays,
        binding: Mapping[str, int],
        threads: int,
    ) -> None:
        values = self.named_arrays(inputs, outputs)
        for segment, program in zip(self.segments, bound.programs, strict=True):
            if program is not None:
                program.run(table, threads=threads)
            else:
                assert segment.host is not None
                self.run_step(segment.host, values, bound, arena, binding)

    def named_arrays(self, inputs: Arrays, outputs: Arrays) -> dict[str, np.ndarray]:
        values = dict(self.values)
        values |= {buffer: a for (_, buffer), a in zip(self.lir.io.inputs, inputs, strict=True)}
        for name, array in zip(self.lir.io.outputs, outputs, strict=True):
            if self.lir.buffer(name).role == "result":
                values.setdefault(name, array)
        return values

    def run_step(
        self, step: Step, values: dict[str, np.ndarray], bound: BoundPlan, arena: Arena, binding: Mapping[str, int]
    ) -> None:
        """A step on the host, on arrays where the program has them."""
        arrays = [self.array(name, values, bound, arena, binding) for name in step.inputs]
        for name, result in zip(step.outputs, self.run_host(step, arrays, binding), strict=True):
            self.array(name, values, bound, arena, binding)[...] = result

    def array(
        self, name: str, values: dict[str, np.ndarray], bound: BoundPlan, arena: Arena, binding: Mapping[str, int]
    ) -> np.ndarray:
        buffer = self.lir.buffer(name)
        if buffer.role != "scratch":
            return values[name]
        return arena.view(bound.offsets[name], buffer, binding)

    def run_observed(
        self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None, tell: Tell
    ) -> None:
        run_observed(self, inputs, outputs, binding, threads, tell)

    def finish(self, inputs: Arrays, outputs: Arrays) -> None:
        """Results that are inputs, parameters or constants, and results given twice."""
        if not self.has_leaf_results:
            return
        values = self.named_arrays(inputs, outputs)
        for name, array in zip(self.lir.io.outputs, outputs, strict=True):
            if values[name] is not array:
                array[...] = values[name]

    def bound_for(self, binding: Mapping[str, int]) -> BoundPlan:
        """The program for given sizes, with all that depends on parameters computed."""
        if not self.is_prepared:
            self._prepare()
        key = tuple(sorted(binding.items())) if binding else ()
        found = self._bound.peek(key)
        if found is not None:
            return found
        with self.lock:
            found = self._bound.get_or_make(key, lambda: self._bind(binding))
            if not self._is_dynamic and self.is_prepared:
                self.only = found
            return found


def _input_index(step: Step, kernel_buffer: str) -> int:
    assert step.kernel is not None
    return step.kernel.input_names.index(kernel_buffer)
