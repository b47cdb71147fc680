"""The `cpu` backend: a plan as native kernels and one program that walks them."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from strata.backends.llvm import jit
from strata.backends.llvm.arena import Arena, address_of
from strata.backends.llvm.builder import Module
from strata.backends.llvm.compile import Lowered, lower
from strata.backends.llvm.emit import emit_kernel
from strata.backends.llvm.matrix import MatrixPlan, emit_matrix, find_contraction, plan_matrix
from strata.backends.llvm.overrides import NativeOp, native_op, reads_views, runs_whole, takes_composition
from strata.backends.llvm.pool import default_pool
from strata.backends.llvm.program import Argument, BoundProgram, Program, region_table
from strata.backends.llvm.program import Step as ProgramStep
from strata.backends.llvm.status import WORDS, failure
from strata.backends.llvm.threads import available_threads
from strata.cache import default_store, digest
from strata.config import config
from strata.core import Dim, SymExpr, Target, TensorType, substitute
from strata.kernel import Kernel, show_kernel
from strata.lir import Lir, Step
from strata.mir import Node, Op, run_op

CODE_LIMIT = 1024  # kernels kept loaded in the process, least recently used dropped first
BOUND_LIMIT = 64  # sets of sizes that a program keeps its argument blocks for
COPY_BYTES = 256 << 10  # of one chunk
KEPT_ARENAS = 4  # for as many callers at once as are likely


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


class CpuBackend:
    """Generated machine code on the processor of this process."""

    name = "cpu"

    def __init__(self, target: Target | None = None) -> None:
        self._target = target

    @property
    def target(self) -> Target:
        return self._target or Target.host()

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return takes_composition(op, types, self.target) or (type(op).lower is not Op.lower and op.has_rule("lower"))

    def reads_views(self, node: Node) -> bool:
        return reads_views(node)

    def runs_whole(self, node: Node) -> bool:
        return runs_whole(node, self.target)

    def compile(self, lir: Lir) -> CpuExecutable:
        return CpuExecutable(lir, self.target)


class CpuExecutable:
    """A plan on the CPU: regions are the arena, every buffer outside it, packed weights, then pool, threads and status."""

    def __init__(self, lir: Lir, target: Target) -> None:
        self.lir, self.target = lir, target
        self.kernels = {name: native_kernel(k, target) for name, k in lir.kernels.items()}
        self.native: dict[int, tuple[NativeOp, jit.Code]] = {}  # hand-written ops, by step
        for at, step in enumerate(lir.schedule):
            made = native_op(step.nodes[0], target, step.views) if step.kernel is None else None
            if made is not None:
                self.native[at] = (made, native_code_of(made, target))
        self._outside = [b for b in lir.buffers if b.role != "scratch"]
        self._region = {b.name: i + 1 for i, b in enumerate(self._outside)}
        self._values: dict[str, np.ndarray] = {b.name: lir.constants[b.key] for b in self._outside if b.role == "constant"}  # type: ignore[index]
        self._packed: list[_PackedWeight] = []
        self._functions: dict[str, int] = {}
        self._workspace: dict[int, MatrixPlan] = {}
        self._segments = self._split()
        self._bound: OrderedDict[tuple[tuple[str, int], ...], _Bound] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = available_threads(config().num_threads)
        self._input_regions = tuple(self._region[buffer] for _, buffer in lir.io.inputs)
        firsts = [name not in lir.io.outputs[:i] and lir.buffer(name).role == "result" for i, name in enumerate(lir.io.outputs)]
        self._output_regions = tuple(self._region[n] if own else 0 for n, own in zip(lir.io.outputs, firsts, strict=True))
        self._has_leaf_results = not all(firsts)
        for name, array in list(self._values.items()):
            self._pack_for(name, array)
        self._prologue = [(at, s) for at, s in enumerate(lir.schedule) if s.phase == "prologue"]
        self._is_prepared = not self._prologue

    # building the program

    def _split(self) -> list[_Segment]:
        """Runs of kernels between host steps."""
        segments: list[_Segment] = []
        for at, step in enumerate(self.lir.schedule):
            if step.phase == "prologue":
                continue
            if step.kernel is None and at not in self.native:
                segments.append(_Segment((at,), step))
            elif segments and segments[-1].host is None:
                segments[-1] = _Segment((*segments[-1].steps, at), None)
            else:
                segments.append(_Segment((at,), None))
        for step in self.lir.schedule:
            native = self.kernels.get(step.name) if step.kernel is not None else None
            if native is not None and native.matrix is not None:
                self._note_weight(step, native.matrix)
        return segments

    def _note_weight(self, step: Step, matrix: MatrixPlan) -> None:
        source = step.inputs[_input_index(step, matrix.matrix.b.buffer)]
        if self.lir.buffer(source).role in ("param", "constant", "weight") and isinstance(matrix.packed_elements(), int):
            if not any(w.source == source and w.layout == _layout(matrix) for w in self._packed):
                self._packed.append(_PackedWeight(source, matrix, _layout(matrix)))

    def _weight_region(self, source: str, matrix: MatrixPlan) -> int | None:
        for i, weight in enumerate(self._packed):
            if weight.source == source and weight.layout == _layout(matrix):
                return 1 + len(self._outside) + i
        return None

    def _steps_of(self, step: Step, place: Callable[[str], Argument], workspace: Argument | None) -> list[ProgramStep]:
        native = self.kernels[step.name]
        buffers = dict(zip((b.name for b in step.kernel.inputs), step.inputs, strict=True))  # type: ignore[union-attr]
        buffers |= dict(zip((b.name for b in step.kernel.outputs), step.outputs, strict=True))  # type: ignore[union-attr]
        if native.matrix is None:
            assert native.lowered is not None
            kernel = native.lowered.kernel
            arguments = [place(buffers[b.name]) for b in kernel.buffers]
            arguments += [Argument(None, _symbol(s)) for s in kernel.symbols().values()]
            self._functions[step.name] = native.address("kernel")
            return [ProgramStep(step.name, tuple(arguments), native.lowered.points, native.lowered.grain)]
        matrix = native.matrix
        region = self._weight_region(buffers[matrix.matrix.b.buffer], matrix)
        packed = Argument(region, 0) if region is not None else workspace
        assert packed is not None
        self._functions[step.name] = native.address("kernel")
        self._functions[f"{step.name}_pack"] = native.address("kernel_pack")
        steps = []
        if region is None:
            arguments = _arguments(matrix.pack_arguments(), place, buffers, packed, matrix)
            steps.append(ProgramStep(f"{step.name}_pack", arguments, matrix.pack_points(), 1))
        arguments = _arguments(matrix.arguments(), place, buffers, packed, matrix)
        steps.append(ProgramStep(step.name, arguments, matrix.points(), 1))
        return steps

    @property
    def host_steps(self) -> list[str]:
        """Ops that run in Python, on NumPy: no native form of them is known."""
        return [s.name for at, s in enumerate(self.lir.schedule) if s.kernel is None and at not in self.native]

    @property
    def _context(self) -> int:
        """The first of the three regions that native ops find the pool, the number of threads and the status words in."""
        return 1 + len(self._outside) + len(self._packed)

    def _native_steps(
        self, at: int, place: Callable[[str], Argument], top: Argument, sizes: Mapping[str, int], keep: list[Any]
    ) -> tuple[list[ProgramStep], int]:
        """The steps of a hand-written op, and the bytes of workspace that they need behind `top`."""
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
            name = f"step{at}_{call.function}"
            self._functions[name] = code.address(call.function)
            steps.append(ProgramStep(name, tuple(argument(*slot) for slot in call.slots), call.points, call.grain))
        return steps, planned.workspace

    def _steps_at(
        self, at: int, place: Callable[[str], Argument], top: Argument, sizes: Mapping[str, int], keep: list[Any]
    ) -> tuple[list[ProgramStep], int]:
        """The steps of one entry of the schedule, and the workspace that they need."""
        if at in self.native:
            return self._native_steps(at, place, top, sizes, keep)
        step = self.lir.schedule[at]
        if step.updates is not None:
            moves = place(step.updates) != place(step.outputs[0])
            before = [self._copy_step(step, place, sizes)] if moves else []
            return [*before, *self._steps_of(step, place, None)], 0
        matrix = self.kernels[step.name].matrix
        if matrix is None or self._weight_region(step.inputs[_input_index(step, matrix.matrix.b.buffer)], matrix) is not None:
            return self._steps_of(step, place, None), 0
        size = substitute(matrix.packed_elements(), sizes)
        assert isinstance(size, int)
        return self._steps_of(step, place, top), size * matrix.spec.b.itemsize + 256

    def _placed(self, offsets: Mapping[str, int]) -> Callable[[str], Argument]:
        def place(name: str) -> Argument:
            return Argument(self._region[name], 0) if name in self._region else Argument(0, offsets[name])

        return place

    def _copy_step(self, step: Step, place: Callable[[str], Argument], sizes: Mapping[str, int]) -> ProgramStep:
        """What an update changes, brought to where it changes it; nothing to do when the caller gave one array for both."""
        assert step.updates is not None
        self._functions["copy"] = copy_code(self.target).address("copy")
        count = substitute(self.lir.buffer(step.updates).type.nbytes, sizes)
        arguments = (place(step.updates), place(step.outputs[0]), Argument(None, count))
        return ProgramStep("copy", arguments, -(-int(count) // COPY_BYTES), 1)  # type: ignore[call-overload]

    def _bind(self, binding: Mapping[str, int]) -> _Bound:
        placement = self.lir.placement(binding)
        top, need = placement.arena_size, 0
        place = self._placed(placement.offsets)
        programs: list[BoundProgram | None] = []
        regions = self._context + 3
        keep: list[Any] = []
        for segment in self._segments:
            if segment.host is not None:
                programs.append(None)
                continue
            steps: list[ProgramStep] = []
            for at in segment.steps:
                made, size = self._steps_at(at, place, Argument(0, top), binding, keep)
                need = max(need, size + 64)
                steps += made
            programs.append(Program(tuple(steps), regions).bind(self._functions, binding))
        addresses = [0] * regions
        for buffer in self._outside:
            if buffer.name in self._values:
                addresses[self._region[buffer.name]] = address_of(self._values[buffer.name])
        for i, weight in enumerate(self._packed):
            if weight.memory is not None:
                addresses[1 + len(self._outside) + i] = weight.memory.address
        single = programs[0] if len(programs) == 1 else None
        table = ctypes.c_int64 * (regions + WORDS)
        return _Bound(programs, single, dict(placement.offsets), top + need, addresses, table, [], keep)

    # weights

    def set_param(self, name: str, array: np.ndarray) -> None:
        with self._lock:
            self._values[name] = array
            self._pack_for(name, array)
            self._bound.clear()  # they hold the addresses of weights
            self._is_prepared = not self._prologue

    def _prepare(self) -> None:
        """Compute what depends on parameters only, and pack it where kernels want it packed."""
        with self._lock:
            if self._is_prepared:
                return
            for at, step in self._prologue:
                arrays = [self._values[name] for name in step.inputs]
                kinds = [self.lir.buffer(name).type for name in step.outputs]
                if step.kernel is None and at not in self.native:
                    results = list(run_op(step.nodes[0].op, arrays, kinds))
                else:
                    results = [np.empty(t.static_shape, t.dtype.np) for t in kinds]
                    self._run_alone(at, arrays, results)
                for name, result in zip(step.outputs, results, strict=True):
                    self._values[name] = np.ascontiguousarray(result)
                    self._pack_for(name, self._values[name])
            self._is_prepared = True

    def _run_alone(self, at: int, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """One step on arrays, outside the program."""
        step = self.lir.schedule[at]
        arrays = dict(zip((*step.inputs, *step.outputs), (*inputs, *outputs), strict=True))
        keep: list[Any] = []
        weights, self._packed = self._packed, []
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
        self._set_context(table, regions, self._threads)
        Program(tuple(steps), regions).bind(self._functions).run(table)
        _check(table, regions)

    def _set_context(self, table: Any, regions: int, threads: int) -> None:
        """What native ops may ask for: the pool, how many threads to use, and words to report a failure in."""
        pool = default_pool()
        table[regions - 3], table[regions - 2] = pool.address, pool.ensure(threads)
        table[regions - 1] = ctypes.addressof(table) + 8 * regions

    def _pack_for(self, name: str, array: np.ndarray) -> None:
        for weight in self._packed:
            if weight.source != name:
                continue
            matrix = weight.matrix
            size = matrix.packed_elements()
            assert isinstance(size, int)
            store = Arena(size * matrix.spec.b.itemsize + 256)
            native = next(k for k in self.kernels.values() if k.matrix is not None and _layout(k.matrix) == weight.layout)
            arguments = _arguments(matrix.pack_arguments(), lambda _: Argument(0, 0), {matrix.matrix.b.buffer: name}, Argument(1, 0), matrix)
            step = ProgramStep("pack", arguments, matrix.pack_points(), 1)
            program = Program((step,), 2).bind({"pack": native.address("kernel_pack")})
            program.run(region_table([address_of(array), store.address]))
            weight.memory = store

    # running

    def run(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], binding: Mapping[str, int], threads: int | None = None
    ) -> None:
        if not self._is_prepared:
            self._prepare()
        bound = self._bound_for(binding)
        try:
            arena = bound.free.pop()  # a list: popping is atomic, so callers never share an arena
        except IndexError:
            arena = Arena(bound.arena)
        table = bound.table(*bound.addresses)
        table[0] = arena.address
        for region, array in zip(self._input_regions, inputs, strict=True):
            table[region] = address_of(array)
        for region, array in zip(self._output_regions, outputs, strict=True):
            if region:
                table[region] = address_of(array)
        count = threads or self._threads
        if self.native:
            self._set_context(table, len(bound.addresses), count)
        if bound.single is not None:
            bound.single.run(table, threads=count)
        else:
            self._run_segments(table, bound, arena, inputs, outputs, binding, count)
        if self.native:
            _check(table, len(bound.addresses))
        if self._has_leaf_results:
            self._copy_leaf_results(inputs, outputs)
        if len(bound.free) < KEPT_ARENAS:
            bound.free.append(arena)

    def _run_segments(
        self,
        table: Any,
        bound: _Bound,
        arena: Arena,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        binding: Mapping[str, int],
        threads: int,
    ) -> None:
        values = self._named_arrays(inputs, outputs)
        for segment, program in zip(self._segments, bound.programs, strict=True):
            if program is not None:
                program.run(table, threads=threads)
            else:
                assert segment.host is not None
                self._host(segment.host, values, bound, arena, binding)

    def _named_arrays(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        values = dict(self._values)
        values |= {buffer: a for (_, buffer), a in zip(self.lir.io.inputs, inputs, strict=True)}
        for name, array in zip(self.lir.io.outputs, outputs, strict=True):
            if self.lir.buffer(name).role == "result":
                values.setdefault(name, array)
        return values

    def _host(self, step: Step, values: dict[str, np.ndarray], bound: _Bound, arena: Arena, binding: Mapping[str, int]) -> None:
        (node,) = step.nodes
        arrays = [self._array(name, values, bound, arena, binding) for name in step.inputs]
        types = [t.bind(binding) for t in node.types]
        for name, result in zip(step.outputs, run_op(node.op.bind(binding), arrays, types), strict=True):
            self._array(name, values, bound, arena, binding)[...] = result

    def _array(
        self, name: str, values: dict[str, np.ndarray], bound: _Bound, arena: Arena, binding: Mapping[str, int]
    ) -> np.ndarray:
        buffer = self.lir.buffer(name)
        if buffer.role != "scratch":
            return values[name]
        return arena.view(bound.offsets[name], buffer, binding)

    def _copy_leaf_results(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Results that are inputs, parameters or constants, and results given twice."""
        values = self._named_arrays(inputs, outputs)
        for name, array in zip(self.lir.io.outputs, outputs, strict=True):
            if values[name] is not array:
                array[...] = values[name]

    def _bound_for(self, binding: Mapping[str, int]) -> _Bound:
        key = tuple(sorted(binding.items())) if binding else ()
        found = self._bound.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._bound:
                self._bound[key] = self._bind(binding)
                if len(self._bound) > BOUND_LIMIT:
                    self._bound.popitem(last=False)
            return self._bound[key]


@dataclass(frozen=True)
class _Segment:
    steps: tuple[int, ...]
    host: Step | None


@dataclass
class _PackedWeight:
    source: str
    matrix: MatrixPlan
    layout: str
    memory: Arena | None = None


@dataclass(frozen=True)
class _Bound:
    """A program for one set of sizes, the addresses that stay the same between runs, and arenas that are free."""

    programs: list[BoundProgram | None]
    single: BoundProgram | None  # the program, when no host step splits it
    offsets: dict[str, int]
    arena: int
    addresses: list[int]
    table: Any
    free: list[Arena]
    keep: list[Any]  # tables that native ops read


def _check(table: Any, regions: int) -> None:
    if table[regions]:
        raise failure(table[regions : regions + WORDS])


def _symbol(symbol: Any) -> Dim:
    return SymExpr((((symbol,), 1),))


def _input_index(step: Step, kernel_buffer: str) -> int:
    assert step.kernel is not None
    return [b.name for b in step.kernel.inputs].index(kernel_buffer)


def _layout(matrix: MatrixPlan) -> str:
    """Weights packed alike share one packed copy."""
    return f"{matrix.spec.panels(matrix.matrix.b.dtype).name} {matrix.pack_arguments()}"


def _arguments(
    slots: list[tuple[str, Any]],
    place: Callable[[str], Argument],
    buffers: Mapping[str, str],
    packed: Argument,
    matrix: MatrixPlan,
) -> tuple[Argument, ...]:
    symbols = matrix.matrix.kernel.symbols()
    arguments = []
    for kind, value in slots:
        match kind:
            case "packed":
                arguments.append(packed)
            case "buffer":
                name, start = value
                at = place(buffers[name])
                arguments.append(Argument(at.region, at.offset + start))
            case "symbol":
                arguments.append(Argument(None, _symbol(symbols[value])))
            case _:
                arguments.append(Argument(None, value))
    return tuple(arguments)
