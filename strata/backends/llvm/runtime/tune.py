"""Beam search over schedules by measuring them: `tune="beam"`.

Each kernel of a plan is searched for once on this processor, and what was found is kept in the store. A candidate has
to give the results of the heuristic's schedule before it is timed: of loops up to the order of sums, of matmuls,
convolutions and pools, whose templates have tiles to choose, in all bits. Ops written by hand keep their parameters."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from strata.backends.llvm.codegen.compile import CompiledKernel, compile_kernel, lower, machine_of
from strata.backends.llvm.codegen.compile_batch import template_of
from strata.backends.llvm.codegen.kernels import code_key
from strata.backends.llvm.conv.pool2d import plan_pool
from strata.backends.llvm.executor.thread_pool import ThreadPool, default_pool
from strata.backends.llvm.gemm.match import find_matmul
from strata.backends.llvm.gemm.tiles import near_tiles
from strata.backends.llvm.jit import jit
from strata.backends.llvm.runtime.executable import CpuExecutable
from strata.config import config, logger
from strata.core import Symbol, Target, available_threads, substitute
from strata.errors import StrataError
from strata.kernel import (
    Buffer,
    Changes,
    Kernel,
    Load,
    MatmulTiles,
    PoolTiles,
    Schedule,
    SearchLimits,
    Template,
    normalize,
    postorder,
    processor_phases,
    search,
    show_kernel,
)
from strata.lir import KEPT, Io, Lir, LirBuffer, Step
from strata.mir import Graph

MOST_BYTES = 1 << 30  # of the arrays that one kernel is tried on; larger kernels keep the heuristic's schedule
USUAL_SIZE = 1024  # of a symbolic axis
ROUNDS = 3
ROUND_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: the schedule, its time and that of the heuristic's schedule, in seconds."""

    schedule: str
    seconds: float
    before: float
    trials: int


def tuned(
    lir: Lir, target: Target, progress: Callable[[int, int], None] | None = None, *, in_loop: bool = False
) -> Lir:
    """The plan with a schedule for every kernel that the search applies to; `progress(done, all)` is told."""
    steps = {s.name: s for s in reversed(lir.schedule)}
    made: dict[str, Kernel] = {}
    for at, (name, kernel) in enumerate(lir.kernels.items()):
        if progress is not None:
            progress(at, len(lir.kernels))
        if can_tune(kernel, steps[name], target):
            found = best_schedule(kernel, target)
        else:
            found = None if in_loop else best_template(lir, steps[name], kernel, target)
        if found is not None and found.schedule:
            made[name] = replace(kernel, schedule=found.schedule)
    schedule = tuple(
        replace(
            s, kernel=made.get(s.name, s.kernel), bodies=tuple(tuned(body, target, in_loop=True) for body in s.bodies)
        )
        for s in lir.schedule
    )
    return replace(lir, schedule=schedule)


def can_tune(kernel: Kernel, step: Step, target: Target) -> bool:
    """Whether a kernel is generated loops over its own arrays, of a size that can be tried."""
    if kernel.schedule or step.updates or step.slides is not None or find_matmul(kernel):
        return False
    if plan_pool(kernel, target) is not None:
        return False
    if len(list(postorder(kernel.roots))) > config().beam_max_ops:
        return False
    if processor_phases(kernel, machine_of(target)).kernels != (normalize(kernel),):
        return False  # several loops or kernels
    sizes = _usual_sizes(kernel)
    return 0 < sum(_bytes(b, sizes) for b in kernel.buffers) <= MOST_BYTES and all(
        _bytes(b, sizes) for b in kernel.buffers
    )


def best_schedule(kernel: Kernel, target: Target) -> Found | None:
    """From the store, or searched for. None where nothing could be measured."""
    anonymous = replace(kernel, name="kernel")
    text = show_kernel(anonymous)
    settings = config()
    threads = available_threads(settings.num_threads)
    key = code_key(f"schedule for {threads} threads, beam of {settings.beam_width}", text, target)

    def make() -> bytes:
        found = _search(anonymous, target, threads)
        if settings.beam_log and found is not None:
            logger.info(
                "beam search of %d wide: %s in %.1f µs, %.1f µs before; %d tried", settings.beam_width,
                found.schedule or "the heuristic's schedule", 1e6 * found.seconds, 1e6 * found.before, found.trials,
            )  # fmt: skip
        return json.dumps([found.schedule, found.seconds, found.before, found.trials] if found else None).encode()

    about = {"kind": "schedule", "text": text[:4000], "target": target.key, "made by": jit.VERSION}
    read = json.loads(jit.stored(key) or jit.made(key, make, about))
    return Found(*read) if read else None


def _search(kernel: Kernel, target: Target, threads: int) -> Found | None:
    first = lower(kernel, target)
    bench = _Bench(kernel, target, threads)
    limits = SearchLimits(width=config().beam_width)
    trials = search(first.schedule, Changes(first.kernel, first.nest, machine_of(target)), bench.measure, limits)
    if not trials:
        return None
    best, before = bench.compare(trials[0].schedule, first.schedule)
    is_better = best < before * (1 - limits.gain)
    schedule = trials[0].schedule if is_better else first.schedule
    return Found(str(schedule), min(best, before), before, len(trials))


# ---------------------------------------------------------------------------------------- matmuls, convolutions, pools


def best_template(lir: Lir, step: Step, kernel: Kernel, target: Target) -> Found | None:
    """The tiles of a kernel that a template takes, from the store or searched for; None where none does."""
    sizes = _usual_sizes(kernel)
    count = sum(_bytes(b, sizes) for b in kernel.buffers)
    if (
        kernel.schedule
        or step.updates
        or not 0 < count <= MOST_BYTES
        or not all(_bytes(b, sizes) for b in kernel.buffers)
    ):
        return None
    alone = step_alone(lir, step)
    kept = frozenset(b for b, x in zip(kernel.input_names, step.inputs, strict=True) if lir.buffer(x).role in KEPT)
    anonymous = replace(kernel, name="kernel")
    first = template_of(anonymous, target, step, kept, step.convolves)
    if first is None or any(_kept(lir, s) != _kept(lir, step) for s in lir.schedule if s.name == step.name):
        return None
    threads = available_threads(config().num_threads)
    kind = f"template for {threads} threads, kept {sorted(kept)}, {step.slides}, {step.convolves}"
    text = show_kernel(anonymous)
    key = code_key(kind, text, target)

    def make() -> bytes:
        found = _search_template(alone, first[0], first[1], target, threads)
        return json.dumps([found.schedule, found.seconds, found.before, found.trials] if found else None).encode()

    about = {"kind": "schedule", "text": text[:4000], "target": target.key, "made by": jit.VERSION}
    read = json.loads(jit.stored(key) or jit.made(key, make, about))
    return Found(*read) if read else None


def _kept(lir: Lir, step: Step) -> list[bool]:
    return [lir.buffer(x).role in KEPT for x in step.inputs]


def step_alone(lir: Lir, step: Step) -> Lir:
    """A plan of one step: what stays from run to run is a parameter."""
    graph = Graph("step")
    buffers: dict[str, LirBuffer] = {}
    for name in dict.fromkeys(step.inputs):
        buffer = lir.buffer(name)
        role = "param" if buffer.role in KEPT else "input"
        (graph.param if role == "param" else graph.input)(name, buffer.type)
        buffers[name] = LirBuffer(name, buffer.type, role, name)
    for at, name in enumerate(step.outputs):
        buffers[name] = LirBuffer(name, lir.buffer(name).type, "result", at)
    bound = {role: tuple((b.name, b.name) for b in buffers.values() if b.role == role) for role in ("input", "param")}
    io = Io(bound["input"], bound["param"], step.outputs)
    return Lir(graph, lir.target, tuple(buffers.values()), (replace(step, phase="steady"),), io)


def _search_template(lir: Lir, first: Template, registers: int, target: Target, threads: int) -> Found | None:
    bench = _StepBench(lir, target, threads)

    def changes(schedule: Schedule) -> Iterator[Schedule]:
        (template,) = schedule.actions
        if isinstance(template, MatmulTiles):
            yield from (Schedule((near,)) for near in near_tiles(template, registers))
        elif isinstance(template, PoolTiles):
            for planes, lines in ((2, 1), (0.5, 1), (1, 2), (1, 0.5)):
                near = PoolTiles(max(1, int(template.planes * planes)), max(1, int(template.lines * lines)))
                yield Schedule((near,))

    limits = SearchLimits(width=config().beam_width)
    start = Schedule((first,))
    trials = search(start, changes, bench.measure, limits)
    if not trials:
        return None
    best, before = bench.compare(trials[0].schedule, start)
    is_better = best < before * (1 - limits.gain)
    return Found(str(trials[0].schedule) if is_better else "", min(best, before), before, len(trials))


class _Bench:
    """One kernel on its own arrays: candidates are compiled, checked against the first one and timed."""

    def __init__(self, kernel: Kernel, target: Target, threads: int) -> None:
        self.kernel, self.target, self.threads = kernel, target, threads
        self.pool: ThreadPool = default_pool()
        self.sizes = _usual_sizes(kernel)
        random = np.random.default_rng(0)
        places = _index_buffers(kernel)
        self.inputs = [_values(b, self.sizes, random, b.name in places) for b in kernel.inputs]
        self.outputs = [np.zeros(_shape(b, self.sizes), b.dtype.np) for b in kernel.outputs]
        self.expected: list[np.ndarray] | None = None
        self.best = float("inf")
        self.stop = perf_counter() + config().beam_seconds

    def measure(self, schedules: Sequence[Schedule]) -> list[float | None]:
        ready: dict[int, Callable[[], float]] = {}
        for at, schedule in enumerate(schedules):
            if self.expected is not None and perf_counter() > self.stop:
                break
            run = self._ready(schedule)
            if run is not None:
                ready[at] = run
        times = self._times(ready)
        self.best = min([self.best, *times.values()])
        return [times.get(at) for at in range(len(schedules))]

    def compare(self, one: Schedule, other: Schedule) -> tuple[float, float]:
        """Both again, in turn."""
        runs = {at: run for at, s in enumerate((one, other)) if (run := self._ready(s)) is not None}
        times = self._times(runs, rounds=2 * ROUNDS)
        return times.get(0, float("inf")), times.get(1, float("inf"))

    def _agree(self) -> bool:
        assert self.expected is not None
        return all(map(_agree, self.outputs, self.expected))

    def _ready(self, schedule: Schedule) -> Callable[[], float] | None:
        """A function that runs a candidate and gives its time; None where it fails or its results differ."""
        try:
            run = self._made(schedule)
        except (StrataError, AssertionError):  # templates assert what their parameters must be
            return None
        for out in self.outputs:
            out.fill(0)
        run()
        if self.expected is None:
            self.expected = [out.copy() for out in self.outputs]
        return run if self._agree() else None

    def _made(self, schedule: Schedule) -> Callable[[], float]:
        native: CompiledKernel = compile_kernel(self.kernel, self.target, schedule)
        block = native.arguments([*self.inputs, *self.outputs], self.sizes)
        points = int(substitute(native.lowered.points, self.sizes))
        grain, address, pool, threads = native.lowered.grain, native.address, self.pool, self.threads

        def run() -> float:
            begin = perf_counter()
            pool.parallel(address, ctypes.addressof(block), points, grain, threads)
            return perf_counter() - begin

        run.kept = native  # type: ignore[attr-defined]  # its code lives as long as the runner
        return run

    def _times(self, runs: Mapping[int, Callable[[], float]], rounds: int = ROUNDS) -> dict[int, float]:
        """The least time of each, taken in turn; those far behind are dropped."""
        times: dict[int, float] = {}
        for _ in range(rounds):
            for at, run in runs.items():
                so_far = times.get(at, float("inf"))
                if at in times and so_far > 3 * min(self.best, *times.values()):
                    continue
                spent = 0.0
                while spent < ROUND_SECONDS:
                    seconds = run()
                    spent += seconds
                    so_far = min(so_far, seconds)
                times[at] = so_far
        return times


class _StepBench(_Bench):
    """A step of a plan, run as programs run it: weights are packed before."""

    def __init__(self, lir: Lir, target: Target, threads: int) -> None:
        (self.step,) = lir.schedule
        assert self.step.kernel is not None
        super().__init__(self.step.kernel, target, threads)
        self.lir = lir
        by_name = dict(zip(self.step.inputs, self.inputs, strict=True))
        self.params = {name: by_name[name] for name, _ in lir.io.params}
        self.inputs = [by_name[name] for name, _ in lir.io.inputs]

    def _agree(self) -> bool:
        """Templates keep the order of sums: results have the same bits."""
        assert self.expected is not None
        return all(a.tobytes() == b.tobytes() for a, b in zip(self.outputs, self.expected, strict=True))

    def _made(self, schedule: Schedule) -> Callable[[], float]:
        assert self.step.kernel is not None
        step = replace(self.step, kernel=replace(self.step.kernel, schedule=str(schedule)))
        executable = CpuExecutable(replace(self.lir, schedule=(step,)), self.target)
        for name, array in self.params.items():
            executable.set_param(name, array)

        def run() -> float:
            begin = perf_counter()
            executable.run(self.inputs, self.outputs, self.sizes, self.threads)
            return perf_counter() - begin

        return run


def _usual_sizes(kernel: Kernel) -> dict[str, int]:
    return {name: _usual(symbol) for name, symbol in kernel.symbols().items()}


def _usual(symbol: Symbol) -> int:
    return max(symbol.lo, USUAL_SIZE if symbol.hi is None else min(symbol.hi, USUAL_SIZE))


def _shape(buffer: Buffer, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(substitute(d, sizes)) for d in buffer.shape)


def _bytes(buffer: Buffer, sizes: Mapping[str, int]) -> int:
    return int(np.prod(_shape(buffer, sizes), dtype=np.int64)) * buffer.dtype.itemsize


def _index_buffers(kernel: Kernel) -> set[str]:
    """Buffers whose elements decide where other buffers are read or written."""
    indices = [i for s in kernel.stores for i in s.index]
    indices += [i for n in postorder(kernel.roots) if isinstance(n, Load) for i in n.index]
    return {n.buffer.name for n in postorder(indices) if isinstance(n, Load)}


def _values(buffer: Buffer, sizes: Mapping[str, int], random: np.random.Generator, is_index: bool) -> np.ndarray:
    shape, dtype = _shape(buffer, sizes), buffer.dtype
    if is_index:
        return np.zeros(shape, dtype.np)
    if dtype.is_float or dtype.is_complex:
        return np.asarray(random.standard_normal(shape), dtype.np)
    return random.integers(0, 2, shape).astype(dtype.np)


def _agree(made: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for the order of sums."""
    if made.dtype.kind in "biu":
        return bool(np.array_equal(made, expected))
    wide: Any = np.complex128 if made.dtype.kind == "c" else np.float64
    a, b = made.astype(wide), expected.astype(wide)
    scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
    bits = {2: 1e-2, 4: 1e-4, 8: 1e-9 if made.dtype.kind == "f" else 1e-4, 16: 1e-9}.get(made.dtype.itemsize, 0.1)
    return bool(np.allclose(a, b, rtol=bits, atol=bits * scale, equal_nan=True))
