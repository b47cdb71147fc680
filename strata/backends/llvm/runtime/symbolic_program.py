"""Programs of plans with symbolic sizes: what does not depend on the sizes is prepared once.

A step's arguments are region + offset, where offsets, points and counts are expressions of the sizes. The expressions
of a whole plan become one Python function; binding sizes then is one call of it and a few operations on arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends.llvm.executor.dispatch_loop import STEP_WORDS
from strata.backends.llvm.runtime.program import Argument, BoundProgram, ProgramStep, held_in_part
from strata.core import Atom, Dim, Symbol, SymExpr, symbols
from strata.errors import SymbolError
from strata.lir import Placement

if TYPE_CHECKING:
    from strata.backends.llvm.runtime.executable import CpuExecutable

FIXED_ARENA = 64 << 20  # a plan that needs no more at the upper bounds of its sizes is placed once for all sizes


class Numbers:
    """Expressions by number; `values(sizes)` computes them all."""

    def __init__(self) -> None:
        self._known: dict[Dim, int] = {}
        self._compute: Callable[..., tuple[int, ...]] | None = None
        self._names: list[str] = []

    def add(self, dim: Dim) -> int:
        return self._known.setdefault(dim, len(self._known))

    def values(self, sizes: Mapping[str, int]) -> np.ndarray:
        if self._compute is None:
            found: dict[str, Any] = {}
            for dim in self._known:
                found |= symbols(dim) if isinstance(dim, SymExpr) else {}
            self._names = sorted(found)
            writer = _Python({name: f"s{i}" for i, name in enumerate(self._names)})
            self._compute = writer.function(list(self._known))
        unknown = next((name for name in self._names if name not in sizes), None)
        if unknown is not None:
            raise SymbolError(f"the size {unknown} is not known: no input has a shape that determines it", code="S160")
        return np.array(self._compute(*(sizes[name] for name in self._names)), np.int64)


class _Python:
    """Sizes as Python: a function of the symbols, in which each part that is not a sum of products has a name."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._symbols = names
        self._names: dict[Atom, str] = {}
        self._lines: list[str] = []

    def function(self, dims: Sequence[Dim]) -> Callable[..., tuple[int, ...]]:
        values = "".join(f"{self._sum(dim)}, " for dim in dims)
        text = "\n ".join([f"def compute({', '.join(self._symbols.values())}):", *self._lines, f"return ({values})"])
        found: dict[str, Any] = {"min": min, "max": max}
        exec(text, found)  # noqa: S102 - made of numbers, operators and the names s0, c0, …
        return found["compute"]

    def _sum(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return str(dim)
        terms = []
        for monomial, factor in dim.terms:
            parts = [str(factor)] if factor != 1 or not monomial else []
            terms.append("*".join([*parts, *map(self._atom, monomial)]))
        return "+".join(terms) or "0"

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Symbol):
            return self._symbols[atom.name]
        if atom not in self._names:
            a, b = self._sum(atom.a), self._sum(atom.b)
            made = {"floordiv": f"({a})//({b})", "mod": f"({a})%({b})"}.get(atom.kind, f"{atom.kind}({a},{b})")
            name = self._names[atom] = f"c{len(self._names)}"
            self._lines.append(f"{name}={made}")
        return self._names[atom]


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """Steps in a row, with numbers of expressions for values. Base 0 adds nothing, others a scratch offset."""

    functions: np.ndarray  # addresses
    points: np.ndarray
    grains: np.ndarray
    reads: np.ndarray
    counts: np.ndarray  # of arguments
    regions: np.ndarray  # of all arguments
    offsets: np.ndarray
    bases: np.ndarray


def open_steps(
    steps: Sequence[ProgramStep], functions: Mapping[str, int], numbers: Numbers, scratch: Mapping[int, int]
) -> OpenSteps:
    """Steps whose scratch buffers are given as negative regions; `scratch` has the number of the base of each."""
    arguments: list[Argument] = [a for s in steps for a in s.arguments]

    def column(values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int64)

    is_scratch = [a.region is not None and a.region < 0 for a in arguments]
    return OpenSteps(
        column([functions[s.kernel] for s in steps]),
        column([numbers.add(s.points) for s in steps]),
        column([s.grain for s in steps]),
        column([numbers.add(s.reads) for s in steps]),
        column([len(s.arguments) for s in steps]),
        column(
            [-1 if a.region is None else 0 if low else a.region for a, low in zip(arguments, is_scratch, strict=True)]
        ),
        column([numbers.add(a.offset) for a in arguments]),
        column([scratch[a.region] if low else 0 for a, low in zip(arguments, is_scratch, strict=True)]),  # type: ignore[index]
    )


def closed(parts: Sequence[OpenSteps], values: np.ndarray, bases: np.ndarray) -> BoundProgram:
    """The program for the values of its numbers and the offsets of its scratch buffers."""
    functions, points, grains, reads, counts, regions, offsets, base = (
        np.concatenate([getattr(p, name) for p in parts])
        for name in ("functions", "points", "grains", "reads", "counts", "regions", "offsets", "bases")
    )
    rows = len(functions)
    first = 2 + STEP_WORDS * rows
    words = np.empty(first + 2 * len(regions), np.int64)
    words[0], words[1] = rows, max(1, int(counts.max(initial=1)))
    table = words[2:first].reshape(rows, STEP_WORDS)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = functions, np.maximum(values[points], 0), grains, counts
    table[:, 4], table[:, 5] = first + 2 * (np.cumsum(counts) - counts), values[reads] > held_in_part()
    pairs = words[first:].reshape(-1, 2)
    pairs[:, 0], pairs[:, 1] = regions, values[offsets] + bases[base]
    memory = (ctypes.c_int64 * len(words)).from_buffer_copy(words.data)
    return BoundProgram(None, memory, tuple(range(rows + 1)))


class OpenProgram:
    """The program of a plan whose steps all run natively, with symbolic sizes."""

    def __init__(self, executable: CpuExecutable) -> None:
        self._executable = executable
        (segment,) = executable.segments
        self._steps = segment.steps
        self._numbers = Numbers()
        self._names = [b.name for b in executable.lir.buffers if b.role == "scratch"]
        self._needs: list[int] = []  # numbers of the bytes of workspace that steps need
        codes = {name: -2 - i for i, name in enumerate(self._names)}
        top = -2 - len(codes)
        scratch = {code: i + 1 for i, code in enumerate([*codes.values(), top])}
        self._parts = {at: self._opened(at, codes, top, scratch) for at in self._steps if at not in executable.native}

    def _opened(self, at: int, codes: Mapping[str, int], top: int, scratch: Mapping[int, int]) -> OpenSteps:
        executable = self._executable
        lir, step = executable.lir, executable.lir.schedule[at]

        def place(name: str) -> Argument:
            if name in executable._region:
                return Argument(executable._region[name], 0)
            return Argument(codes[lir.buffer(name).alias or name], 0)

        before = executable._copy_steps(step, place, {})
        self._needs.append(self._numbers.add(executable.workspace_of(step)))
        made = [*before, *executable._steps_of(step, place, Argument(top, 0))]
        return open_steps(made, executable._functions, self._numbers, scratch)

    def bind(
        self, sizes: Mapping[str, int], placement: Placement, keep: list[Any], ranges: dict[int, tuple[int, int]]
    ) -> tuple[BoundProgram, int]:
        """The program for sizes and the workspace that it needs; `ranges` learns which of its steps an entry became."""
        executable = self._executable
        values = self._numbers.values(sizes)
        need = max([64, *(int(values[n]) + 64 for n in self._needs)])
        extra = Numbers()  # of native ops, which plan for given sizes
        place = executable._placed(placement.offsets)
        parts: list[OpenSteps] = []
        rows = 0
        for at in self._steps:
            part = self._parts.get(at)
            if part is None:
                steps, size = executable._native_steps(at, place, Argument(0, placement.arena_size), sizes, keep)
                need = max(need, size + 64)
                native = open_steps(steps, executable._functions, extra, {})
                behind = {name: getattr(native, name) + len(values) for name in ("points", "reads", "offsets")}
                part = replace(native, **behind)
            ranges[at] = rows, rows + len(part.functions)
            rows += len(part.functions)
            parts.append(part)
        bases = np.array([0, *(placement.offsets[n] for n in self._names), placement.arena_size], np.int64)
        return closed(parts, np.concatenate([values, extra.values({})]), bases), need
