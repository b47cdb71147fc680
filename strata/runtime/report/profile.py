"""Profiles: the time of every step, beside the processor's roofline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.arguments import public
from strata.core import Dim, dim_prod, folded, substitute
from strata.kernel import Kernel, Reduce, Scalar, Scan, postorder
from strata.lir import Lir, Step
from strata.runtime.report.observe import OBSERVERS

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


@dataclass(frozen=True, slots=True)
class Row:
    """One step: best time in seconds, work, and the share of the roofline that it reaches."""

    step: str
    label: str
    seconds: float
    shapes: str
    bytes: int
    flops: int
    roofline: float  # least time that the machine needs for these bytes and operations, over the time taken


@public
@dataclass(frozen=True, slots=True)
class Profile:
    """Rows in the order of the schedule."""

    name: str
    rows: tuple[Row, ...]

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def _repr_html_(self) -> str:
        return folded(f"profile of {self.name}: {self.seconds * 1e6:,.1f} µs", str(self))

    def __str__(self) -> str:
        head = f"{'step':<16} {'time':>10} {'share':>6} {'GB/s':>8} {'GFLOP/s':>9} {'roofline':>8}  what"
        lines = [f"{self.name}: {len(self.rows)} steps, {self.seconds * 1e6:,.1f} µs", head]
        total = self.seconds or 1.0
        for row in self.rows:
            t = row.seconds or 1e-12
            lines.append(
                f"{row.step[:16]:<16} {row.seconds * 1e6:>7,.1f} µs {row.seconds / total:>6.1%} "
                f"{row.bytes / t / 1e9:>8.2f} "
                f"{row.flops / t / 1e9:>9.2f} {row.roofline:>8.1%}  {row.label}  {row.shapes}"
            )
        return "\n".join(lines)


def profile(compiled: CompiledGraph, feeds: Mapping[str, Any], repeats: int) -> Profile:
    """Run several times, step by step; the least time of each step counts."""
    values = {**random_feeds(compiled, feeds), **feeds}
    twin = compiled.clone()  # its state is its own: looking at a graph does not change it
    watch = Stopwatch(twin)
    OBSERVERS.append(watch)
    try:
        for _ in range(max(1, repeats)):
            twin.run(values)
    finally:
        OBSERVERS.remove(watch)
    machine = measured_machine()
    rows = [
        row_of(compiled._lir, at, seconds, watch.binding, machine) for at, seconds in sorted(watch.best.items())
    ] or [Row("run", "the whole graph", watch.whole, "", 0, 0, 0.0)]
    return Profile(compiled.name, tuple(rows))


class Stopwatch:
    """The times of one graph; others may run beside it."""

    def __init__(self, of: CompiledGraph) -> None:
        self._of, self._thread = of, threading.get_ident()
        self.best: dict[int, float] = {}
        self.whole = float("inf")
        self.binding: Mapping[str, int] = {}

    def begin(self, compiled: CompiledGraph, binding: Mapping[str, int], arrays: Sequence[Any]) -> None:
        if compiled is self._of:
            self.binding = dict(binding)

    def step(self, compiled: CompiledGraph, at: int, begin: int, end: int, spans: Sequence[Any], read: Any) -> None:
        if compiled is self._of:
            self.best[at] = min(self.best.get(at, float("inf")), (end - begin) / 1e9)

    def end(self, compiled: CompiledGraph, begin: int, end: int) -> None:
        if threading.get_ident() == self._thread:  # also of a program that runs in its stead
            self.whole = min(self.whole, (end - begin) / 1e9)


def random_feeds(compiled: CompiledGraph, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays for inputs that are not given, symbolic sizes at their lower bound or 16."""
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    kept = compiled._state.values if compiled._state is not None else {}
    sizes = {s.name: min(max(s.lo, 16), s.hi or 16) for s in compiled._lir.symbols.values()}
    for name, kind in compiled._inputs:
        if name not in given and name not in kept:
            bound = kind.bind(sizes)
            values = rng.standard_normal(bound.static_shape)
            made[name] = (np.abs(values) if not kind.dtype.is_inexact else values).astype(kind.dtype.np)
    return made


def row_of(lir: Lir, at: int, seconds: float, binding: Mapping[str, int], machine: MeasuredMachine) -> Row:
    step = lir.schedule[at]
    moved, work = bytes_of(lir, step, binding), flops_of(step, binding)
    least = max(moved / machine.bytes_per_second, work / machine.flops_per_second)
    return Row(
        step.name,
        step.label,
        seconds,
        shapes_of(lir, step, binding),
        moved,
        work,
        min(1.0, least / seconds) if seconds else 0.0,
    )


def shapes_of(lir: Lir, step: Step, binding: Mapping[str, int]) -> str:
    """`f32[2, 3], f32[3] -> f32[2, 3]`"""
    show: Callable[[Sequence[str]], str] = lambda names: ", ".join(str(lir.buffer(n).type.bind(binding)) for n in names)
    return f"{show(step.inputs)} -> {show(step.outputs)}"


def bytes_of(lir: Lir, step: Step, binding: Mapping[str, int]) -> int:
    """Bytes of the buffers that a step reads and writes, each once."""
    names = dict.fromkeys((*step.inputs, *step.outputs))
    return sum(_number(lir.buffer(n).type.nbytes, binding) for n in names)


def flops_of(step: Step, binding: Mapping[str, int]) -> int:
    """Arithmetic of a step: every scalar function counts one for each element that it is computed for."""
    if step.kernel is not None:
        return kernel_flops(step.kernel, binding)
    if step.nodes and step.nodes[0].op.name == "attention":
        node = step.nodes[0]
        op: Any = node.op
        s = op.sizes(*(x.type for x in node.inputs[:3]))
        return 4 * _number(dim_prod((s.batch, op.num_heads, s.queries, s.keys, op.head_dim)), binding)
    return 0


def kernel_flops(kernel: Kernel, binding: Mapping[str, int]) -> int:
    total = 0
    for node in postorder(kernel.roots):
        if isinstance(node, (Scalar, Reduce, Scan)) and node.dtype.is_inexact:
            over = set(node.free)
            if isinstance(node, Reduce):
                over |= set(node.axes)
            elif isinstance(node, Scan):
                over.add(node.axis)
            total += _number(dim_prod([a.extent for a in over]), binding)
    return total


def _number(dim: Dim, binding: Mapping[str, int]) -> int:
    value = substitute(dim, binding) if binding else dim
    return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """What this processor reaches on simple loops: the two sides of the roofline."""

    bytes_per_second: float
    flops_per_second: float


@cache
def measured_machine() -> MeasuredMachine:
    """Measured once in about 30 ms: a copy larger than the caches, and a matmul whose matrices fit in them."""
    source = np.ones(4 << 20, np.float64)
    target = np.empty_like(source)
    a = np.ones((512, 512), np.float32)
    out = np.empty_like(a)
    copying = _best(lambda: np.copyto(target, source), 3)
    product = _best(lambda: np.matmul(a, a, out=out), 5)
    return MeasuredMachine(2 * source.nbytes / copying, 2 * 512**3 / product)


def _best(call: Callable[[], Any], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
