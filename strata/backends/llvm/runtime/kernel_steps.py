"""The steps of a program that run a kernel, from its calling convention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from strata.backends.llvm.jit.calling_convention import LoopUsage, MatmulUsage
from strata.backends.llvm.runtime.program import Argument, ProgramStep, held_in_part
from strata.core import Dim, SymExpr, bounds
from strata.lir import Lir, Step


def bytes_read(lir: Lir, step: Step, product: MatmulUsage | None) -> Dim:
    """How many bytes a kernel reads, a packed factor as it lies packed; 0 where they are few for all sizes."""
    assert step.kernel is not None
    packed = product.factor if product is not None and product.is_packed else None
    names = {b for name, b in zip(step.kernel.input_names, step.inputs, strict=True) if name != packed}
    total: Dim = product.packed_bytes if product is not None else 0
    for name in sorted(names):
        total = total + lir.buffer(name).type.nbytes
    most = bounds(total)[1]
    return total if most is None or most > held_in_part() else 0


def loop_steps(
    name: str, loops: LoopUsage, places: Mapping[str, Argument], workspace: Argument | None, reads: Dim
) -> list[ProgramStep]:
    """Generated loops, and before them those that fill their scratch memory; in the order of `loops.functions`."""
    known = dict(places)
    for number, (piece, _) in enumerate(loops.scratch):
        assert workspace is not None
        known[piece] = Argument(workspace.region, workspace.offset + loops.scratch_offset(number))
    steps = []
    for function, part in zip(loops.functions, (*loops.before, loops), strict=True):
        arguments = [known[b] for b in part.buffers] + [Argument(None, _symbol(s)) for s in part.symbols]
        steps.append(
            ProgramStep(name + function.removeprefix("kernel"), tuple(arguments), part.points, part.grain, reads)
        )
    return steps


def product_arguments(
    slots: Sequence[tuple[str, Any]],
    place: Callable[[str], Argument],
    buffers: Mapping[str, str],
    packed: Argument,
    product: MatmulUsage,
) -> tuple[Argument, ...]:
    """The slots of a matmul as arguments."""
    symbols = {s.name: s for s in product.symbols}
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


def unpacked_reads(
    lir: Lir, packed_product: Callable[[Step], MatmulUsage | None], held: Mapping[int, Collection[int]]
) -> set[str]:
    """Buffers that are read as they are; of weights that are only read packed, no other form has to be kept.

    `held` has the numbers of the inputs that a step of one op keeps in its own form, by the number of the step.
    """
    names = {b.name for b in lir.buffers if b.role == "constant"} | set(lir.io.outputs)
    for at, step in enumerate(lir.schedule):
        names.update(source for _, source in step.updates)
        product = packed_product(step) if step.phase != "prologue" else None
        if product is None or step.kernel is None:
            own = held.get(at, ()) if step.phase != "prologue" else ()
            names.update(name for i, name in enumerate(step.inputs) if i not in own)
            continue
        buffers = dict(zip(step.kernel.input_names, step.inputs, strict=True))
        names.update(buffer for name, buffer in buffers.items() if name != product.factor or product.reads_factor)
    return names


def _symbol(symbol: Any) -> Dim:
    return SymExpr((((symbol,), 1),))
