"""The `cpu` backend: a plan as native kernels and one program that walks them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from strata.backends.llvm import jit
from strata.backends.llvm.builder import Module
from strata.backends.llvm.compile import Lowered, lower
from strata.backends.llvm.emit import emit_kernel
from strata.backends.llvm.matrix import MatrixPlan, emit_matrix, find_contraction, plan_matrix
from strata.backends.llvm.overrides import NativeOp, native_op
from strata.backends.llvm.program import Argument, BoundProgram, Program, region_table
from strata.backends.llvm.program import Step as ProgramStep
from strata.backends.llvm.threads import available_threads
from strata.cache import default_store, digest
from strata.config import config
from strata.core import Dim, SymExpr, Target, substitute
from strata.kernel import Kernel, show_kernel
from strata.lir import Buffer, Lir, Step
from strata.mir import Op, run_op

CODE_LIMIT = 1024  # kernels kept loaded in the process, least recently used dropped first
BOUND_LIMIT = 64  # sets of sizes that a program keeps its argument blocks for
HUGE_PAGE = 2 << 20
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
            names = list(dict.fromkeys(call.function for call in op.calls))
            _native_loaded[key] = stored_code(op.key, names, op.emit, target)
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

    def takes(self, op: Op) -> bool:
        return type(op).lower is not Op.lower and op.has_rule("lower")

    def compile(self, lir: Lir) -> CpuExecutable:
        return CpuExecutable(lir, self.target)


class CpuExecutable:
    """A plan on the CPU: regions are the arena, then every buffer outside it, then packed weights."""

    def __init__(self, lir: Lir, target: Target) -> None:
        self.lir, self.target = lir, target
        self.kernels = {name: native_kernel(k, target) for name, k in lir.kernels.items()}
        self.native: dict[int, tuple[NativeOp, jit.Code]] = {}  # hand-written ops, by step
        for at, step in enumerate(lir.schedule):
            made = native_op(step.nodes[0], target) if step.kernel is None else None
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
        self._prologue = [s for s in lir.schedule if s.phase == "prologue"]
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

    def _native_steps(self, at: int, place: Callable[[str], Argument], workspace: Argument) -> list[ProgramStep]:
        step, (op, code) = self.lir.schedule[at], self.native[at]
        symbols = self.lir.symbols

        def argument(kind: str, value: Any) -> Argument:
            match kind:
                case "input":
                    return place(step.inputs[value])
                case "output":
                    return place(step.outputs[value])
                case "workspace":
                    return Argument(workspace.region, workspace.offset + value)
                case "symbol":
                    return Argument(None, _symbol(symbols[value]))
                case "table":
                    return Argument(None, address_of(value))
                case _:
                    return Argument(None, value)

        steps = []
        for call in op.calls:
            name = f"step{at}_{call.function}"
            self._functions[name] = code.address(call.function)
            steps.append(ProgramStep(name, tuple(argument(*slot) for slot in call.slots), call.points, call.grain))
        return steps

    def _bind(self, binding: Mapping[str, int]) -> _Bound:
        placement = self.lir.placement(binding)
        top = placement.arena_size
        need = 0

        def place(name: str) -> Argument:
            if name in self._region:
                return Argument(self._region[name], 0)
            return Argument(0, placement.offsets[name])

        programs: list[BoundProgram | None] = []
        regions = 1 + len(self._outside) + len(self._packed)
        for segment in self._segments:
            if segment.host is not None:
                programs.append(None)
                continue
            steps: list[ProgramStep] = []
            for at in segment.steps:
                step = self.lir.schedule[at]
                if at in self.native:
                    size = substitute(self.native[at][0].workspace, binding)
                    assert isinstance(size, int)
                    need = max(need, size + 64)
                    steps += self._native_steps(at, place, Argument(0, top))
                    continue
                matrix = self.kernels[step.name].matrix
                workspace = None
                if matrix is not None and self._weight_region(step.inputs[_input_index(step, matrix.matrix.b.buffer)], matrix) is None:
                    size = substitute(matrix.packed_elements(), binding)
                    assert isinstance(size, int)
                    need = max(need, size * matrix.spec.b.itemsize + 256)
                    workspace = Argument(0, top)
                steps += self._steps_of(step, place, workspace)
            programs.append(Program(tuple(steps), regions).bind(self._functions, binding))
        addresses = [0] * regions
        for buffer in self._outside:
            if buffer.name in self._values:
                addresses[self._region[buffer.name]] = address_of(self._values[buffer.name])
        for i, weight in enumerate(self._packed):
            if weight.memory is not None:
                addresses[1 + len(self._outside) + i] = weight.memory.address
        single = programs[0] if len(programs) == 1 else None
        return _Bound(programs, single, dict(placement.offsets), top + need, addresses, ctypes.c_int64 * regions, [])

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
            for step in self._prologue:
                arrays = [self._values[name] for name in step.inputs]
                kinds = [self.lir.buffer(name).type for name in step.outputs]
                if step.kernel is None:
                    results = list(run_op(step.nodes[0].op, arrays, kinds))
                else:
                    results = [np.empty(t.static_shape, t.dtype.np) for t in kinds]
                    self._run_alone(step, arrays, results)
                for name, result in zip(step.outputs, results, strict=True):
                    self._values[name] = np.ascontiguousarray(result)
                    self._pack_for(name, self._values[name])
            self._is_prepared = True

    def _run_alone(self, step: Step, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """One kernel on arrays, outside the program."""
        names = (*step.inputs, *step.outputs)
        region = {name: i for i, name in enumerate(dict.fromkeys(names))}
        arrays = dict(zip(names, (*inputs, *outputs), strict=True))
        matrix = self.kernels[step.name].matrix
        memory = Arena(0)
        if matrix is not None:
            size = matrix.packed_elements()
            assert isinstance(size, int)
            memory = Arena(size * matrix.spec.b.itemsize + 256)
        weights, self._packed = self._packed, []
        try:
            steps = self._steps_of(step, lambda name: Argument(region[name], 0), Argument(len(region), 0))
        finally:
            self._packed = weights
        program = Program(tuple(steps), len(region) + 1).bind(self._functions)
        program.run(region_table([*(address_of(arrays[n]) for n in region), memory.address]))

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
        if bound.single is not None:
            bound.single.run(table, threads=count)
        else:
            self._run_segments(table, bound, arena, inputs, outputs, binding, count)
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


class Arena:
    """Page-aligned memory, in huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 64)
        self._map: mmap.mmap | None = None
        if self.size >= HUGE_PAGE:
            self._map = mmap.mmap(-1, self.size + HUGE_PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            raw = np.frombuffer(self._map, np.uint8)
        else:
            raw = np.empty(self.size + 64, np.uint8)
        unit = HUGE_PAGE if self.size >= HUGE_PAGE else 64
        start = -_slow_address(raw) % unit
        self.bytes = raw[start : start + self.size]
        self.address = _slow_address(self.bytes)

    def view(self, offset: int, buffer: Buffer, binding: Mapping[str, Dim]) -> np.ndarray:
        kind = buffer.type.bind(binding)
        count = int(np.prod(kind.static_shape, dtype=np.int64)) * kind.dtype.itemsize
        return self.bytes[offset : offset + count].view(kind.dtype.np).reshape(kind.static_shape)


def _slow_address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _fast_address(array: np.ndarray) -> int:
    return ctypes.c_ssize_t.from_address(id(array) + _DATA_OFFSET).value


_DATA_OFFSET = object.__basicsize__  # NumPy's array object has its data pointer right after the object header
_PROBES = [np.empty(3), np.arange(7)[2:], np.zeros((2, 2), np.int8)]
# reading the field is five times as fast as asking for it; where the layout differs, ask
address_of = _fast_address if all(_fast_address(p) == _slow_address(p) for p in _PROBES) else _slow_address


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
