"""Bodies of loops and branches, as programs that run in the workspace of the step that contains them.

A body is compiled like any graph. Its parameters are the values that every turn of a loop sees: what depends on them
alone, and their packed forms, are computed by a first program, once for all turns. Where they are weights of the
whole plan, that is done when these are set, and not in every run. Nothing is allocated while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from strata.backends.llvm.executor.arena import address_of
from strata.backends.llvm.ir.native import Workspace
from strata.backends.llvm.ir.overrides import Sizes, Slot
from strata.backends.llvm.runtime.executable import COPY_BYTES, CpuExecutable, copy_code
from strata.backends.llvm.runtime.kernel_steps import product_arguments
from strata.backends.llvm.runtime.program import Argument, BoundProgram, NativeProgram, ProgramStep
from strata.core import Target, substitute
from strata.lir import Lir
from strata.mir import leaf_name

ALIGN = 64
FINER = 5  # chunks of loops in a turn, for one of loops that run alone


@dataclass(frozen=True)
class BoundBody:
    """A body for given sizes. Regions are numbers of its table; `fixed` says what most of them hold."""

    once: BoundProgram
    steady: BoundProgram
    table: int  # bytes from the start of the workspace
    fixed: tuple[tuple[int, Slot], ...]
    inputs: tuple[int, ...]
    params: tuple[int, ...]
    results: tuple[int, ...]
    end: int  # of its part of the workspace
    keep: Any

    def slots(self, extra: Collection[tuple[int, Slot]]) -> list[Slot]:
        """Arguments that start the body: table, programs, and the regions that stay the same."""
        pairs = [*self.fixed, *extra]
        head: list[Slot] = [("workspace", self.table)]
        for program in (self.once, self.steady):
            head += [("pointer", program.address), ("number", program.count)]
        head.append(("number", len(pairs)))
        return head + [slot for region, value in pairs for slot in (("number", region), value)]


class GraphBody(CpuExecutable):
    """A plan compiled to run inside a step, in a loop or in a branch."""

    def __init__(self, lir: Lir, target: Target, *, in_loop: bool) -> None:
        super().__init__(lir, target, in_loop=in_loop)
        self._in_loop = in_loop
        self._known = {b.name for b in self._outside if b.role == "constant"}  # values that stay from run to run
        self._is_ready = False

    def part(self, other: Self) -> None:
        super().part(other)
        self._known = set(other._known)

    @property
    def held_params(self) -> frozenset[int]:
        """The parameters that are read packed only."""
        return frozenset(i for i, x in enumerate(self.lir.graph.params) if leaf_name(x) not in self._unpacked)

    def hold_param(self, number: int, array: np.ndarray) -> None:
        """The value of a parameter, where it stays the same from run to run."""
        name = leaf_name(self.lir.graph.params[number])
        self._known.add(name)
        self.hold(name, array)
        self._is_ready = False

    def _compute_known(self) -> None:
        """What depends on held parameters alone."""
        if self._is_ready:
            return
        for at, step in self.prologue:
            if self._known.issuperset(step.inputs):
                self._compute_once(at, step)
                self._known.update(step.outputs)
        self._is_ready = True

    def bind_body(self, sizes: Sizes, start: int) -> BoundBody:
        """Programs and memory for given sizes, the memory from `start` on in a workspace."""
        self._compute_known()
        placement = self.lir.placement(sizes)
        place = self._placed(placement.offsets)
        keep: list[Any] = []
        copies = [i for i, region in enumerate(self.output_regions) if not region]
        results = list(self.output_regions)
        for number, i in enumerate(copies):
            results[i] = self._context + 3 + number
        regions = self._context + 3 + len(copies)
        once, need = self._once_steps(place, placement.arena_size, sizes, keep)
        steady: list[ProgramStep] = []
        for at, step in enumerate(self.lir.schedule):
            if step.phase != "prologue":
                made, size = self._steps_at(at, place, Argument(0, placement.arena_size), sizes, keep)
                finer = self._in_loop and at not in self.native
                need, steady = max(need, size), steady + (list(map(_finer, made)) if finer else made)
        steady += [self._result_copy(self.lir.io.outputs[i], results[i], place, sizes) for i in copies]
        layout = Workspace(start)
        table = layout.take(8 * regions)
        fixed: list[tuple[int, Slot]] = [(0, layout.area(placement.arena_size + need))]
        for buffer in self._outside:
            if buffer.name in self._known:
                if buffer.name in self.values:
                    fixed.append((self._region[buffer.name], ("pointer", address_of(self.values[buffer.name]))))
            elif buffer.role == "weight":
                count = int(substitute(buffer.type.nbytes, sizes))
                fixed.append((self._region[buffer.name], ("workspace", layout.take(count))))
        for i, weight in enumerate(self._packed):
            region = 1 + len(self._outside) + i
            if weight.memory is not None:
                fixed.append((region, ("pointer", weight.memory.address)))
            else:
                assert isinstance(weight.product.packed_bytes, int)
                fixed.append((region, ("workspace", layout.take(weight.product.packed_bytes))))
        fixed += [(self._context + i, (kind, 0)) for i, kind in enumerate(("pool", "threads", "status"))]
        keep += [self, *self.values.values(), *(w.memory for w in self._packed)]  # a run may outlive the next `hold`
        return BoundBody(
            NativeProgram(tuple(once), regions).bind(self._functions, sizes),
            NativeProgram(tuple(steady), regions).bind(self._functions, sizes),
            table,
            tuple(fixed),
            self.input_regions,
            tuple(self._region[leaf_name(x)] for x in self.lir.graph.params),
            tuple(results),
            layout.size,
            keep,
        )

    def _once_steps(
        self, place: Any, top: int, sizes: Mapping[str, int], keep: list[Any]
    ) -> tuple[list[ProgramStep], int]:
        """What depends on parameters only, and packing it and them."""
        steps: list[ProgramStep] = []
        need = 64
        for name in (leaf_name(x) for x in self.lir.graph.params):
            steps += self._pack_steps(name, place)
        for at, step in self.prologue:
            if self._known.issuperset(step.outputs):
                continue
            made, size = self._steps_at(at, place, Argument(0, top), sizes, keep)
            need, steps = max(need, size + 64), steps + made
            for name in step.outputs:
                steps += self._pack_steps(name, place)
        return steps, need

    def _pack_steps(self, source: str, place: Any) -> list[ProgramStep]:
        steps = []
        for i, weight in enumerate(self._packed):
            if weight.source != source or source in self._known:
                continue
            product = weight.product
            self._functions[f"pack{i}"] = self._packer(weight.layout)
            to = Argument(1 + len(self._outside) + i, 0)
            arguments = product_arguments(product.pack_arguments, place, {product.factor: source}, to, product)
            steps.append(ProgramStep(f"pack{i}", arguments, product.pack_points, 1))
        return steps

    def _result_copy(self, name: str, region: int, place: Any, sizes: Mapping[str, int]) -> ProgramStep:
        """A result that is an input, a constant, or a result given twice."""
        self._functions["copy"] = copy_code(self.target).address("copy")
        count = int(substitute(self.lir.buffer(name).type.nbytes, sizes))
        return ProgramStep(
            "copy", (place(name), Argument(region, 0), Argument(None, count)), -(-count // COPY_BYTES), 1
        )


def _finer(step: ProgramStep) -> ProgramStep:
    """In a loop no thread falls asleep, so that less work is worth handing out: points, or whole vectors of them."""
    fine = max(1, step.grain // FINER)
    return replace(step, grain=fine - fine % ALIGN if fine >= ALIGN else fine)
