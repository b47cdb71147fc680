"""A kernel as Triton programs: text, arguments, grids. Needs neither a GPU nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata.backends.triton.codegen.elements import is_small, pointer
from strata.backends.triton.codegen.emit import TritonEmitter, across, argument_names, place_points, reads_along
from strata.backends.triton.codegen.pairs import without_complex
from strata.backends.triton.codegen.prelude import prelude
from strata.backends.triton.codegen.product import by_rows, emit_contraction, find_product, values_in_order
from strata.backends.triton.codegen.scatter import emit_scatter, find_scatter
from strata.backends.triton.schedules.schedule import (
    WHOLE_ROW,
    GpuSchedule,
    Lanes,
    TritonRows,
    choose_lanes,
    choose_rows,
    choose_squares,
    known,
)
from strata.backends.triton.target import Gpu
from strata.core import Dim, bool_, dim_prod, f32
from strata.kernel import (
    Axis,
    Buffer,
    Compute,
    Expr,
    Kernel,
    Load,
    LoopBlock,
    MapLoop,
    Phases,
    Reduce,
    ReduceLoop,
    SplitLimits,
    Store,
    StoreStep,
    device_form,
    make_nest,
    parallel_chain,
    postorder,
    rewritten,
    split_reductions,
    split_terms,
    walk_loops,
)

# a GPU has many more places to work at than a processor
LIMITS = SplitLimits(
    terms=1 << 14, lines=64, parts=256, column_parts=64, part_bytes=16 << 10, short_part_bytes=4 << 10
)  # fmt: skip
_GUARD = Buffer("flag", bool_, (1,))
_HEAD = "import triton\nimport triton.language as tl\n\n\n"
# Triton's interpreter makes a Python number of a tensor of one element, which NumPy 2.5 refuses
_INTERPRETED_HEAD = """import builtins


def range(*bounds, **_):
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
    is_guarded: bool = False  # its first argument is a flag; where that is not set, it does nothing
    gluon: str = ""  # what comes before the function, where it is written in Gluon and not in Triton

    def guarded(self) -> TritonProgram:
        """The program behind a flag."""
        kernel = replace(self.kernel, inputs=(_GUARD, *self.kernel.inputs))
        flag = argument_names(kernel.buffers)[_GUARD.name]
        body = f"    if tl.load({flag}) == 0:\n        return\n{self.body}"
        return replace(self, kernel=kernel, body=body, buffers=(_GUARD, *self.buffers), is_guarded=True)

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments, by name."""
        names = argument_names(self.kernel.buffers)
        kinds = {names[b.name]: pointer(b.dtype) for b in self.buffers}
        return kinds | {f"n{i}": "i64" for i in range(len(self.sizes))}

    def text(self, *, interpreted: bool = False) -> str:
        """A whole module; what Triton's interpreter gets differs in the head and in prelude functions only."""
        if self.gluon:
            assert not interpreted, "Gluon has no interpreter"
            return f"{self.gluon}\n\n{self.function}"
        head = _HEAD + _INTERPRETED_HEAD if interpreted else _HEAD
        function = self.function.replace("tl.range(", "range(") if interpreted else self.function
        return head + prelude(set(self.helpers), interpreted=interpreted) + function

    @property
    def function(self) -> str:
        return f"@{'gluon' if self.gluon else 'triton'}.jit\ndef {self.name}({', '.join(self.signature)}):\n{self.body}"

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
    rows: Dim = 0
    by_rows: tuple[tuple[int, tuple[TritonProgram, ...]], ...] = ()  # what runs instead for no more rows than a number

    @property
    def all_programs(self) -> tuple[TritonProgram, ...]:
        found = (*self.programs, *(program for _, programs in self.by_rows for program in programs))
        return tuple({program.name: program for program in found}.values())

    def programs_for(self, rows: int) -> tuple[TritonProgram, ...]:
        """Those that run for so many rows."""
        return next((programs for most, programs in self.by_rows if rows <= most), self.programs)

    def guarded(self) -> Rendered:
        """The same programs behind a flag, which comes before the other inputs."""
        few = tuple((most, tuple(p.guarded() for p in programs)) for most, programs in self.by_rows)
        kernel = replace(self.kernel, inputs=(_GUARD, *self.kernel.inputs))
        return replace(self, kernel=kernel, programs=tuple(p.guarded() for p in self.programs), by_rows=few)

    def __str__(self) -> str:
        """For people and golden tests: functions, with their schedules and grids."""
        parts = []
        always = {program.name for program in self.programs}
        limits = {p.name: most for most, programs in self.by_rows for p in programs if p.name not in always}
        for program in self.all_programs:
            grid = ", ".join(map(str, program.grid))
            head = f"# up to {limits[program.name]} rows\n" if program.name in limits else ""
            head += f"# {program.schedule}\n# grid ({grid})\n"
            parts.append(head + "".join(f"# n{i} = {dim}\n" for i, dim in enumerate(program.sizes)) + program.function)
        return "\n\n".join(parts)


HOPPER = Gpu("cuda", 90, 32)


def normal_form(kernel: Kernel) -> Kernel:
    """What programs are made of; the schedule is kept."""
    return replace(without_complex(device_form(kernel)), schedule=kernel.schedule)


def render(kernel: Kernel, gpu: Gpu = HOPPER, *, first: int = 0) -> Rendered:
    """The programs of a kernel, whose scratch is numbered from `first`."""
    normal = normal_form(kernel)
    product = find_product(normal, gpu)
    if product is not None and product.tiles.parts > 1:
        phases = split_terms(product.form, product.tiles.parts, first=first)
        undivided = replace(product.tiles, parts=1)
        summed = find_product(replace(phases.kernels[0], schedule=str(undivided)), gpu)
        assert summed is not None, "parts of a matmul are matmuls"
        emitter, grid = emit_contraction(summed)
        return Rendered(
            kernel,
            (_program(emitter, kernel.name, grid), _loops(phases.kernels[1], f"{kernel.name}_1")),
            phases.scratch,
        )
    if product is not None:
        few = []
        for most, other in by_rows(product, gpu):
            emitter, grid = emit_contraction(other)
            few.append((most, (_program(emitter, f"{kernel.name}_{most}", grid),)))
        emitter, grid = emit_contraction(product)
        whole = _program(emitter, kernel.name, grid)
        return Rendered(kernel, (whole,), (), product.form.extents[1], tuple(few))
    scattered = find_scatter(_with_wide_sums(normal))
    if scattered is not None:
        emitter, grid = emit_scatter(scattered)
        return Rendered(kernel, (_program(emitter, kernel.name, grid),), ())
    phases = split_reductions(_with_wide_sums(normal), LIMITS, first=first)
    programs: list[TritonProgram] = []
    for phase in phases.kernels:
        for part in _parts(phase) if phase.stores else ():
            programs.append(_loops(part, f"{kernel.name}_{len(programs)}" if programs else kernel.name))
    return Rendered(kernel, tuple(programs), phases.scratch)


def render_phases(name: str, phases: Phases, gpu: Gpu = HOPPER) -> Rendered:
    """The programs of kernels that run one after the other, and a kernel with the buffers that go in and come out."""
    inside = {b.name for b in phases.scratch}
    scratch = list(phases.scratch)
    programs: list[TritonProgram] = []
    read: dict[str, Buffer] = {}
    written: dict[str, Buffer] = {}
    for number, kernel in enumerate(phases.kernels):
        rendered = render(kernel.renamed(f"{name}_{number}"), gpu, first=len(scratch) - len(phases.scratch))
        assert inside.isdisjoint(b.name for b in rendered.scratch), "scratch of kernels is numbered on"
        inside |= {b.name for b in rendered.scratch}
        scratch += rendered.scratch
        programs += rendered.programs
        written |= {b.name: b for b in kernel.outputs if b.name not in inside}
        read |= {b.name: b for b in kernel.inputs if b.name not in inside and b.name not in written}
    whole = Kernel(name, tuple(read.values()), tuple(written.values()), ())
    return Rendered(whole, tuple(programs), tuple(scratch))


def _with_wide_sums(kernel: Kernel) -> Kernel:
    """Floats of less than 32 bits are added up in f32 and rounded at the end, so that the sums can be split."""

    def widened(node: Expr) -> Expr:
        if isinstance(node, Reduce) and node.is_rounded and is_small(node.dtype):
            return node.over(node.axes, node.body.cast(f32)).cast(node.dtype)
        return node

    return rewritten(kernel, widened)


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
    is_row = bool(chain) and known(dim_prod([c.axis.extent for c in chain])) <= WHOLE_ROW
    if is_row and any(isinstance(s, ReduceLoop) for s in nest.steps if s is not chain[0]):
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
        schedule = choose_lanes(total, max(b.dtype.itemsize for b in kernel.buffers))
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
    widest = max(b.dtype.itemsize for b in kernel.buffers)
    schedule = choose_squares(axis.extent, points[-1].extent, widest)
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
    return finished(emitter, name, kernel, buffers, grid)


def finished(
    e: TritonEmitter, name: str, kernel: Kernel, buffers: tuple[Buffer, ...], grid: Sequence[Dim]
) -> TritonProgram:
    """The program that an emitter has written, with arguments in the given order."""
    lines = [f"    {text} = {text}.to(tl.int64)" for text in e.sizes.values()] + e.lines
    body = "\n".join(lines) + "\n"
    return TritonProgram(name, kernel, body, frozenset(e.helpers), buffers, tuple(e.sizes), tuple(grid), e.schedule)
