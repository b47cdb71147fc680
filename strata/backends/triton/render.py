"""A kernel as Triton programs: text, arguments, grids. Needs neither a GPU nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata.backends.triton.elements import pointer
from strata.backends.triton.emit import TritonEmitter, across, argument_names, place_points, reads_along
from strata.backends.triton.pairs import without_complex
from strata.backends.triton.prelude import prelude
from strata.backends.triton.product import emit_contraction, find_contraction, values_in_order
from strata.backends.triton.schedule import (
    WHOLE_ROW,
    GpuSchedule,
    Lanes,
    TritonRows,
    choose_lanes,
    choose_rows,
    choose_squares,
    known,
)
from strata.core import Dim, dim_prod
from strata.kernel import (
    Axis,
    Buffer,
    Compute,
    Kernel,
    Load,
    LoopBlock,
    MapLoop,
    ReduceLoop,
    SplitLimits,
    Store,
    StoreStep,
    as_bits,
    make_nest,
    normalize,
    parallel_chain,
    postorder,
    split_reductions,
    walk_loops,
)

# a GPU has many more places to work at than a processor
LIMITS = SplitLimits(terms=1 << 14, lines=64, parts=256, part_bytes=16 << 10, short_part_bytes=4 << 10)
_HEAD = "import triton\nimport triton.language as tl\n\n\n"
# Triton's interpreter makes a Python number of a tensor of one element, which NumPy 2.5 refuses
_INTERPRETED_HEAD = """import builtins


def range(*bounds):
    return builtins.range(*(int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds))


"""


@dataclass(frozen=True, slots=True)
class TritonProgram:
    """One Triton function and how it is launched. `grid` and `sizes` are worked out when sizes are known."""

    name: str
    kernel: Kernel  # normalized: what the function computes
    body: str
    helpers: frozenset[str]
    buffers: tuple[Buffer, ...]  # arguments in order: buffers, then sizes
    sizes: tuple[Dim, ...]
    grid: tuple[Dim, ...]
    schedule: GpuSchedule

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments, by name."""
        names = argument_names(self.kernel.buffers)
        kinds = {names[b.name]: pointer(b.dtype) for b in self.buffers}
        return kinds | {f"n{i}": "i64" for i in range(len(self.sizes))}

    def text(self, *, interpreted: bool = False) -> str:
        """A whole module; what Triton's interpreter gets differs in the head and in prelude functions only."""
        head = _HEAD + _INTERPRETED_HEAD if interpreted else _HEAD
        return head + prelude(set(self.helpers), interpreted=interpreted) + self.function

    @property
    def function(self) -> str:
        return f"@triton.jit\ndef {self.name}({', '.join(self.signature)}):\n{self.body}"

    @property
    def warps(self) -> int:
        return self.schedule.warps

    @property
    def stages(self) -> int:
        return getattr(self.schedule, "stages", 2)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The programs of a kernel, run one after the other, and the buffers that they hand on."""

    kernel: Kernel
    programs: tuple[TritonProgram, ...]
    scratch: tuple[Buffer, ...]

    def __str__(self) -> str:
        """For people and golden tests: functions, with their schedules and grids."""
        parts = []
        for program in self.programs:
            grid = ", ".join(map(str, program.grid))
            head = f"# {program.schedule}\n# grid ({grid})\n"
            parts.append(head + "".join(f"# n{i} = {dim}\n" for i, dim in enumerate(program.sizes)) + program.function)
        return "\n\n".join(parts)


def render(kernel: Kernel) -> Rendered:
    """The programs of a kernel."""
    normal = without_complex(as_bits(normalize(kernel)))
    form = find_contraction(normal)
    if form is not None:
        emitter, grid = emit_contraction(form)
        return Rendered(kernel, (_program(emitter, kernel.name, grid),), ())
    phases = split_reductions(normal, LIMITS)
    programs: list[TritonProgram] = []
    for phase in phases.kernels:
        for part in _parts(phase) if phase.stores else ():
            programs.append(_loops(part, f"{kernel.name}_{len(programs)}" if programs else kernel.name))
    return Rendered(kernel, tuple(programs), phases.scratch)


def _parts(kernel: Kernel) -> list[Kernel]:
    """Stores that share no outer loop become kernels of their own, so that each is spread over programs."""
    if len(kernel.stores) < 2 or parallel_chain(make_nest(kernel)):
        return [kernel]
    groups: dict[tuple[object, ...], list[Store]] = {}
    for store in kernel.stores:
        groups.setdefault(store.axes, []).append(store)
    if len(groups) == 1:
        return [kernel]
    return [part for stores in groups.values() for part in _parts(replace(kernel, stores=tuple(stores)))]


def _loops(kernel: Kernel, name: str) -> TritonProgram:
    """A kernel whose outer loops are points of programs."""
    nest = make_nest(kernel)
    chain = parallel_chain(nest)
    if chain and known(dim_prod([c.axis.extent for c in chain])) <= WHOLE_ROW and chain[0] is not nest.steps[0]:
        chain = []  # one row: what is reduced before its points stays where it is
    body: LoopBlock = chain[-1].body if chain else nest
    before = [s for s in nest.steps if s is not chain[0]] if chain else []
    order = [a for s in kernel.stores for a in s.axes]
    points = sorted((loop.axis for loop in chain), key=order.index)
    inner = [loop for steps in (LoopBlock(tuple(before)), body) for loop in walk_loops(steps)]
    blocked = [loop for loop in inner if not any(isinstance(s, (MapLoop, ReduceLoop)) for s in loop.body.steps)]
    total = dim_prod([a.extent for a in points])
    schedule: Lanes | TritonRows
    if blocked:
        terms = max((loop.axis.extent for loop in blocked), key=known)
        along = bool(points) and reads_along(kernel, points, [loop.axis for loop in blocked])
        schedule = choose_rows(total, terms, along_points=along)
        shape: tuple[int, ...] = (schedule.points, schedule.terms)
    else:
        turned = _squares(kernel, name, body, points) if len(points) > 1 and not before else None
        if turned is not None:
            return turned
        schedule = choose_lanes(total)
        shape = (schedule.points,)
    emitter = TritonEmitter(kernel, schedule, shape)
    if points:
        place_points(emitter, points, "tl.program_id(0)", schedule.points, 0, "x")
    elif isinstance(schedule, TritonRows):
        emitter.shape = (1, schedule.terms)
    else:
        emitter.shape = (1,)
    emitter.block(LoopBlock(tuple(before)))
    emitter.forget(points)
    for loop in chain[:-1]:
        emitter.block(LoopBlock(tuple(s for s in loop.body.steps if not isinstance(s, MapLoop))))
    emitter.block(body)
    grid = ((total + schedule.points - 1) // schedule.points,) if points else (1,)
    return _program(emitter, name, grid)


def _squares(kernel: Kernel, name: str, body: LoopBlock, points: Sequence[Axis]) -> TritonProgram | None:
    """Points along two axes, where something is read across the last one."""
    axis = across(kernel, points)
    if axis is None or any(not isinstance(s, (Compute, StoreStep)) for s in body.steps):
        return None
    rows = [*(a for a in points[:-1] if a is not axis), axis]
    schedule = choose_squares(axis.extent, points[-1].extent)
    if schedule is None:
        return None
    emitter = TritonEmitter(kernel, schedule, (schedule.rows, schedule.columns))
    counts = [(dim_prod([a.extent for a in axes]) + n - 1) // n
              for axes, n in ((rows, schedule.rows), (points[-1:], schedule.columns))]  # fmt: skip
    emitter.write("tile = tl.program_id(0)")
    place_points(emitter, rows, f"(tile // {emitter.size(counts[1])})", schedule.rows, 0, "row")
    place_points(emitter, points[-1:], f"(tile % {emitter.size(counts[1])})", schedule.columns, 1, "column")
    for store in kernel.stores:
        values_in_order(emitter, store.value)
        emitter.store(store)
    return _program(emitter, name, (counts[0] * counts[1],))


def _program(emitter: TritonEmitter, name: str, grid: Sequence[Dim]) -> TritonProgram:
    kernel = emitter.kernel
    read = {n.buffer.name for n in postorder(kernel.roots) if isinstance(n, Load)}
    written = {s.buffer.name for s in kernel.stores}
    buffers = tuple(b for b in kernel.buffers if b.name in read or b.name in written)
    lines = [f"    {text} = {text}.to(tl.int64)" for text in emitter.sizes.values()] + emitter.lines
    return TritonProgram(
        name, kernel, "\n".join(lines) + "\n", frozenset(emitter.helpers), buffers, tuple(emitter.sizes), tuple(grid),
        emitter.schedule,
    )  # fmt: skip
