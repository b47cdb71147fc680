"""The plan (LIR): what runs in which order, on which buffers, at which offsets.

Inputs, parameters, constants and results live outside the arena: results are written where the caller wants them. The
arena holds scratch buffers only, at offsets that the memory planner chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from strata.arguments import public
from strata.core import Dim, Symbol, Target, TensorType, folded, here
from strata.errors import OptionError
from strata.kernel import Kernel, show_kernel
from strata.lir.views import Spacing, read_view
from strata.mir import Graph, Node

if TYPE_CHECKING:
    from strata.lir.manifest import BindingManifest
    from strata.lir.merge import Cut

ALIGNMENT = 64
PLANNERS = ("arena", "remap", "off")
MOST_ALIGNMENT = 4096
KEPT = ("param", "constant", "weight")  # roles of buffers whose values stay from run to run
ROLES = ("input", "param", "constant", "weight", "result", "scratch")


@public
@dataclass(frozen=True, slots=True)
class MemoryPlanOptions:
    """How scratch memory is planned: what may share bytes, and the multiple of bytes that each buffer starts at.

    `arena` packs buffers whose lives do not meet into one block; `remap` lets a buffer take the place of an earlier
    one of its type and size, whole; `off` gives each buffer its own bytes.
    """

    mode: str = "arena"
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.mode not in PLANNERS:
            raise OptionError(
                f"the planner is one of {', '.join(PLANNERS)}, got {self.mode!r}", code="O144", place=here()
            )
        is_count = isinstance(self.alignment, int) and not isinstance(self.alignment, bool)
        if not is_count or self.alignment.bit_count() != 1 or not ALIGNMENT <= self.alignment <= MOST_ALIGNMENT:
            raise OptionError(
                f"the alignment of an arena is a power of two from {ALIGNMENT} to {MOST_ALIGNMENT}, "
                f"got {self.alignment!r}", code="O144", place=here(),
            )  # fmt: skip


PLAIN_MEMORY = MemoryPlanOptions()


@dataclass(frozen=True, slots=True)
class LirBuffer:
    """A named block of memory. `key` is the name of an input or parameter, the index of a result or constant."""

    name: str
    type: TensorType
    role: str  # input, param, constant, weight (computed once from parameters), result, scratch
    key: str | int | None = None
    birth: int = -1  # steps between which a scratch buffer holds its value
    death: int = -1
    alias: str | None = None  # shares the memory of another scratch buffer, whose life covers its own


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel, one op on the host, or a module of many ops for a backend that takes graphs, over buffers."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    label: str
    kernel: Kernel | None  # None: a host step, or a module
    nodes: tuple[Node, ...] = field(repr=False, default=())
    phase: str = "steady"
    updates: tuple[tuple[str, str], ...] = ()  # outputs, and what they start as: copied first, unless one memory
    views: tuple[Spacing, ...] | None = None  # where a step of one op, or a kernel's `slides`, reads its inputs
    is_module: bool = False
    bodies: tuple[Lir, ...] = field(repr=False, default=())  # plans of the graphs inside of an op, where it runs them
    schedule: str = ""  # of a step of one op: what a search found, as a kernel has its own

    @property
    def read_buffers(self) -> tuple[str, ...]:
        """Inputs, and what outputs start as."""
        return (*self.inputs, *(source for _, source in self.updates))

    def operands(self, arrays: Sequence[np.ndarray], binding: Mapping[str, int]) -> list[np.ndarray]:
        """What the op of a host step takes, of its buffers: all of them, or what it reads in place."""
        if self.views is None:
            return list(arrays)
        (node,) = self.nodes
        reads = zip(arrays, self.views, node.inputs, strict=True)
        return [read_view(array, view, x.shape, binding) for array, view, x in reads]

    @property
    def has_slides(self) -> bool:
        return self.slides is not None

    @property
    def convolves(self) -> bool:
        """Whether a convolution is in it, which may be a matmul: its sums have the order of all convolutions."""
        return any(n.op.name.startswith("conv") for n in self.nodes)

    @property
    def generates(self) -> bool:
        """Whether it makes random numbers, or positions: as many as a size says, which may be a symbol elsewhere."""
        from strata.lir.traits import GENERATORS

        return any(n.op.name in GENERATORS for n in self.nodes)

    @property
    def slides(self) -> Node | None:
        """The convolution in a kernel: templates want its window, which loops do not show plainly."""
        return (
            next((n for n in self.nodes if getattr(n.op, "slides", False)), None) if self.kernel is not None else None
        )


@dataclass(frozen=True, slots=True)
class Io:
    """Names and buffers at the boundary."""

    inputs: tuple[tuple[str, str], ...]
    params: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]  # a buffer for each result; a leaf's own buffer when a result is a leaf


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets of scratch buffers for one set of sizes."""

    offsets: Mapping[str, int]
    arena_size: int
    lower_bound: int  # the largest sum of live buffers at any step: no plan can be smaller
    unshared: int = 0  # what the buffers would take side by side

    @property
    def bytes_saved(self) -> int:
        return max(0, self.unshared - self.arena_size)


@dataclass(frozen=True, eq=False)
class Lir:
    """A planned graph. Complete: with a backend, it is all that is needed to run. Plans of one text are equal."""

    graph: Graph
    target: Target
    buffers: tuple[LirBuffer, ...]
    schedule: tuple[Step, ...]
    io: Io
    constants: tuple[np.ndarray, ...] = field(repr=False, default=())
    cuts: tuple[Cut, ...] = field(repr=False, default=())
    made_with: str = ""  # options, settings and version: part of the fingerprint
    memory: MemoryPlanOptions = PLAIN_MEMORY

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def weights(self) -> frozenset[str]:
        """Buffers that stay from run to run, whatever is known of sizes: not what is generated."""
        found = {b.name for b in self.buffers if b.role in KEPT}
        for step in self.schedule:
            if step.phase == "prologue" and (step.generates or not found.issuperset(step.inputs)):
                found.difference_update(step.outputs)
        return frozenset(found)

    def buffer(self, name: str) -> LirBuffer:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, LirBuffer]:
        return {b.name: b for b in self.buffers}

    @cached_property
    def symbols(self) -> dict[str, Symbol]:
        return self.graph.symbols()

    @property
    def has_dynamic_dims(self) -> bool:
        return bool(self.symbols)

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Distinct kernels by name: steps with equal kernels share one."""
        return {s.name: s.kernel for s in self.schedule if s.kernel is not None}

    def walk(self) -> Iterator[tuple[Lir, Step]]:
        """All steps, each with its plan: after a step those of its bodies."""
        for step in self.schedule:
            yield self, step
            for body in step.bodies:
                yield from body.walk()

    @property
    def phases(self) -> dict[str, tuple[str, ...]]:
        """Step labels by phase: prologue (weights only, once), steady, epilogue."""
        found: dict[str, list[str]] = {"prologue": [], "steady": [], "epilogue": []}
        for step in self.schedule:
            found[step.phase].append(step.label)
        return {k: tuple(v) for k, v in found.items()}

    def placement(self, binding: Mapping[str, Dim] | None = None) -> Placement:
        """Offsets for known sizes; without a binding, for static plans or at the upper bounds of the symbols."""
        from strata.lir.memory import place

        return place(self, dict(binding) if binding is not None else None)

    @property
    def arena_size(self) -> int:
        return self.placement().arena_size

    def memory_report(self, binding: Mapping[str, Dim] | None = None) -> str:
        """Peak, lower bound and the lifetime of every scratch buffer, as text; `memory_svg` draws it."""
        from strata.lir.memory import memory_report

        return memory_report(self, binding)

    def memory_svg(self, binding: Mapping[str, Dim] | None = None) -> str:
        from strata.lir.memory import memory_svg

        return memory_svg(self, binding)

    def manifest(self, binding: Mapping[str, Dim] | None = None) -> BindingManifest:
        """What a caller has to bind."""
        from strata.lir.manifest import manifest

        return manifest(self, binding)

    def verify(self) -> None:
        from strata.lir.verify import verify_plan

        verify_plan(self)

    def fingerprint(self) -> str:
        """A hash of all that can change the code: plan, kernels, graph, constants, target, options, version."""
        digest = hashlib.sha256()
        parts = [self.summary(), str(self.graph), self.target.key, self.made_with]
        parts += [f"{s.phase} {s.views} {s.schedule}".rstrip() for s in self.schedule]
        parts += [show_kernel(k) for k in self.kernels.values()]
        parts += [body.fingerprint() for s in self.schedule for body in s.bodies]
        for part in parts:
            digest.update(f"{len(part)}:{part}".encode())
        for array in self.constants:
            digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lir):
            return NotImplemented
        return self is other or (self.target == other.target and str(self) == str(other))

    def __hash__(self) -> int:
        return hash((self.graph.name, len(self.schedule)))

    def summary(self) -> str:
        """Buffers and steps, without the kernels and the graph."""
        from strata.lir.text import show

        return show(self)

    def _repr_html_(self) -> str:
        return folded(f"plan of {self.name}: {len(self.schedule)} steps", self.summary())

    def __str__(self) -> str:
        """All that the plan is, as text that reads back: `strata.parse(str(plan)) == plan`."""
        from strata.lir.text import show_module

        return show_module(self)
