"""What every plan must satisfy; a plan that does not is a mistake of the code that made it."""

from __future__ import annotations

from collections import Counter

from strata.errors import SymbolError, VerifyError
from strata.lir.ir import ALIGNMENT, ROLES, Buffer, Lir, Step
from strata.lir.memory import byte_size

READABLE = ("input", "param", "constant")


def verify_plan(lir: Lir) -> None:
    """Raise VerifyError at the first broken rule: names, order of writes and reads, types, lifetimes, placement."""
    for name, count in Counter(b.name for b in lir.buffers).items():
        if count > 1:
            raise _broken(lir, f"two buffers are called {name}")
    known = {b.name: b for b in lir.buffers}
    _check_aliases(lir, known)
    written = {b.name for b in lir.buffers if b.role in READABLE}
    for at, step in enumerate(lir.schedule):
        for name in (*step.read_buffers, *step.outputs):
            if name not in known:
                raise _broken(lir, f"step {at} ({step.name}) uses {name}, which is not a buffer")
        _check_order(lir, at, step, known, written)
        _check_types(lir, at, step, known)
        written |= set(step.outputs)
    for name in lir.io.outputs:
        if name not in known:
            raise _broken(lir, f"result {name} is not a buffer")
        if name not in written:
            raise _broken(lir, f"result {name} is never written")
    _check_placement(lir, known)


def _check_aliases(lir: Lir, known: dict[str, Buffer]) -> None:
    for b in lir.buffers:
        if b.role not in ROLES:
            raise _broken(lir, f"buffer {b.name} has the role {b.role!r}")
        if b.alias is None:
            continue
        base = known.get(b.alias)
        if base is None or base.role != "scratch" or b.role != "scratch" or base.alias is not None:
            raise _broken(lir, f"{b.name} shares the memory of {b.alias}, which is not a scratch buffer of its own")
        if base.birth > b.birth or base.death < b.death:
            raise _broken(
                lir,
                f"{b.name} lives from {b.birth} to {b.death}, its memory {b.alias} from {base.birth} to {base.death}",
            )


def _check_order(lir: Lir, at: int, step: Step, known: dict[str, Buffer], written: set[str]) -> None:
    reads = step.read_buffers
    for name in reads:
        if name not in written:
            raise _broken(lir, f"step {at} ({step.name}) reads {name} before it is written")
    for name in step.outputs:
        if known[name].role in READABLE:
            raise _broken(lir, f"step {at} ({step.name}) writes {name}, which is {known[name].role}")
        if name in written:
            raise _broken(lir, f"step {at} ({step.name}) writes {name} again")
    for name in (*reads, *step.outputs):
        b = known[name]
        if b.role == "scratch" and not b.birth <= at <= b.death:
            raise _broken(lir, f"step {at} ({step.name}) uses {name}, which lives from {b.birth} to {b.death}")
    if step.phase == "prologue" and any(known[n].role not in (*READABLE[1:], "weight") for n in reads):
        raise _broken(lir, f"step {at} ({step.name}) runs when parameters are set, and reads {', '.join(reads)}")


def _check_types(lir: Lir, at: int, step: Step, known: dict[str, Buffer]) -> None:
    """Kernels see their buffers under the types that the plan gives them."""
    if step.kernel is None:
        kinds = [] if step.is_module or len(step.nodes) != 1 else [(t.dtype, t.shape) for t in step.nodes[0].types]
        if kinds and len(kinds) != len(step.outputs):
            raise _broken(lir, f"step {at} ({step.name}) writes {len(step.outputs)} buffers, its op has {len(kinds)}")
        pairs = list(zip(step.outputs, kinds, strict=False))
    else:
        formal = [(b.dtype, b.shape) for b in (*step.kernel.inputs, *step.kernel.outputs)]
        actual = (*step.inputs, *step.outputs)
        if len(formal) != len(actual):
            raise _broken(lir, f"step {at} ({step.name}) gives {len(actual)} buffers to a kernel of {len(formal)}")
        pairs = list(zip(actual, formal, strict=True))
    for name, (dtype, shape) in pairs:
        kind = known[name].type
        if kind.dtype is not dtype or tuple(kind.shape) != tuple(shape):
            raise _broken(
                lir, f"step {at} ({step.name}) takes {name} as {dtype}{list(map(str, shape))}, the plan says {kind}"
            )


def _check_placement(lir: Lir, known: dict[str, Buffer]) -> None:
    """Buffers alive at the same step do not overlap."""
    try:
        placement = lir.placement()
    except SymbolError:  # sizes without bounds: placed when they are known
        return
    owners = [b for b in lir.buffers if b.role == "scratch" and b.alias is None]
    sized = [(placement.offsets[b.name], byte_size(b, None), b) for b in owners if byte_size(b, None)]
    spans = [(at, at + size, b) for at, size, b in sorted(sized, key=lambda span: span[:2])]
    for i, (start, end, b) in enumerate(spans):
        if start % ALIGNMENT or end > placement.arena_size:
            raise _broken(lir, f"{b.name} lies at {start}..{end} of {placement.arena_size}")
        for other_start, _, other in spans[i + 1 :]:
            if other_start >= end:
                break
            if b.birth <= other.death and other.birth <= b.death:
                raise _broken(lir, f"{b.name} and {other.name} are alive together and overlap at {other_start}")


def _broken(lir: Lir, reason: str) -> VerifyError:
    return VerifyError(f"plan of {lir.name!r}: {reason}", code="V120")
