"""The plan verifier; a plan that fails it is a bug of the code that made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from strata.core import Dim, TensorType, known_le
from strata.errors import SymbolError, VerifyError
from strata.kinds import counted
from strata.lir.ir import ROLES, Lir, LirBuffer, Step
from strata.lir.memory import byte_size
from strata.lir.views import Spacing
from strata.mir import Graph, Value, leaf_name

PHASES = ("prologue", "steady", "epilogue")
READABLE = ("input", "param", "constant")


def verify_plan(lir: Lir) -> None:
    """Raise VerifyError at the first broken rule: names, order of writes and reads, types, lifetimes, placement."""
    for name, count in Counter(b.name for b in lir.buffers).items():
        if count > 1:
            raise _broken(lir, f"two buffers are called {name}")
    known = {b.name: b for b in lir.buffers}
    _check_aliases(lir, known)
    _check_boundary(lir, known)
    written = {b.name for b in lir.buffers if b.role in READABLE}
    for at, step in enumerate(lir.schedule):
        for name in (*step.read_buffers, *step.outputs):
            if name not in known:
                raise _broken(lir, f"step {at} ({step.name}) uses {name}, which is not a buffer")
        _check_order(lir, at, step, known, written)
        _check_types(lir, at, step, known)
        _check_bodies(lir, at, step)
        written |= set(step.outputs)
    for name in lir.io.outputs:
        if name not in known:
            raise _broken(lir, f"result {name} is not a buffer")
        if name not in written:
            raise _broken(lir, f"result {name} is never written")
    _check_placement(lir)


def _check_bodies(lir: Lir, at: int, step: Step) -> None:
    """Plans inside of a step keep the same rules, and take and give what the graphs of its op do."""
    if not step.bodies:
        return
    nested = step.nodes[0].op.nested() if step.kernel is None and len(step.nodes) == 1 else ()
    if len(nested) != len(step.bodies):
        raise _broken(lir, f"step {at} ({step.name}) has {len(step.bodies)} bodies, its op {len(nested)}")
    for one, body in zip(nested, step.bodies, strict=True):
        wanted = [[(n, x.type) for i, (n, x) in enumerate(_leaves(one.graph)) if (i in one.still) == s] for s in (0, 1)]
        given = [[(leaf_name(x), x.type) for x in leaves] for leaves in (body.graph.inputs, body.graph.params)]
        results = [body.buffer(name).type for name in body.io.outputs]
        if wanted != given or results != [x.type for x in one.graph.results]:
            raise _broken(lir, f"step {at} ({step.name}) has a body {body.name} that is not the graph of its op")
        verify_plan(body)


def _leaves(graph: Graph) -> list[tuple[str, Value]]:
    return list(zip(graph.input_names, graph.inputs, strict=True))


def _check_boundary(lir: Lir, known: dict[str, LirBuffer]) -> None:
    """Whatever lies outside the arena gets its memory from one place: a caller, a parameter, or the prologue."""
    for role, bound in (("input", lir.io.inputs), ("param", lir.io.params)):
        given, declared = [name for _, name in bound], [b.name for b in lir.buffers if b.role == role]
        if sorted(given) != sorted(declared):
            raise _broken(lir, f"its {role}s are bound to {', '.join(given)}, its buffers are {', '.join(declared)}")
    for b in lir.buffers:
        if b.role == "result" and b.name not in lir.io.outputs:
            raise _broken(lir, f"buffer {b.name} is a result that no caller gets")
    for name in lir.io.outputs:
        if name in known and known[name].role == "scratch":
            raise _broken(lir, f"result {name} is a scratch buffer")


def _check_aliases(lir: Lir, known: dict[str, LirBuffer]) -> None:
    for b in lir.buffers:
        if b.role not in ROLES:
            raise _broken(lir, f"buffer {b.name} has the role {b.role!r}")
        if b.alias is None:
            continue
        base = known.get(b.alias)
        if base is None or base.role != "scratch" or b.role != "scratch" or base.alias is not None:
            raise _broken(lir, f"{b.name} shares the memory of {b.alias}, which is not a scratch buffer of its own")
        if base.type.nbytes != b.type.nbytes:
            raise _broken(lir, f"{b.name} : {b.type} shares the memory of {b.alias} : {base.type}")
        if base.birth > b.birth or base.death < b.death:
            raise _broken(
                lir,
                f"{b.name} lives from {b.birth} to {b.death}, its memory {b.alias} from {base.birth} to {base.death}",
            )


def _check_order(lir: Lir, at: int, step: Step, known: dict[str, LirBuffer], written: set[str]) -> None:
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
    if step.phase not in PHASES:
        raise _broken(lir, f"step {at} ({step.name}) runs in the phase {step.phase!r}")
    if any((known[n].role == "weight") != (step.phase == "prologue") for n in step.outputs):
        raise _broken(lir, f"step {at} ({step.name}) of the phase {step.phase} writes {', '.join(step.outputs)}")
    if step.phase == "prologue" and any(known[n].role not in (*READABLE[1:], "weight") for n in reads):
        raise _broken(lir, f"step {at} ({step.name}) runs when parameters are set, and reads {', '.join(reads)}")


def _check_types(lir: Lir, at: int, step: Step, known: dict[str, LirBuffer]) -> None:
    """Kernels see their buffers under the types that the plan gives them."""
    for made, source in step.updates:
        if made not in step.outputs or known[made].type != known[source].type:
            raise _broken(lir, f"step {at} ({step.name}) updates {made} : {known[made].type}, which starts as {source}")
    if step.is_module:
        return
    if step.kernel is None:
        if len(step.nodes) != 1:
            raise _broken(lir, f"step {at} ({step.name}) has {counted(len(step.nodes), 'op')} and no kernel")
        (node,) = step.nodes
        if (len(node.inputs), len(node.types)) != (len(step.inputs), len(step.outputs)):
            raise _broken(
                lir,
                f"step {at} ({step.name}) reads {len(step.inputs)} and writes {len(step.outputs)} buffers, its op "
                f"{len(node.inputs)} and {len(node.types)}",
            )
        pairs = [(name, (t.dtype, t.shape)) for name, t in zip(step.outputs, node.types, strict=True)]
        if step.views is None:
            pairs += [(name, (x.dtype, x.shape)) for name, x in zip(step.inputs, node.inputs, strict=True)]
        else:
            _check_views(lir, at, step, known)
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


def _check_views(lir: Lir, at: int, step: Step, known: dict[str, LirBuffer]) -> None:
    """What an op reads in place lies inside the buffer, as far as the sizes say."""
    assert step.views is not None
    if len(step.views) != len(step.inputs):
        raise _broken(lir, f"step {at} ({step.name}) reads {len(step.inputs)} buffers by {len(step.views)} views")
    for name, view, x in zip(step.inputs, step.views, step.nodes[0].inputs, strict=True):
        kind = known[name].type
        if kind.dtype is not x.dtype or len(view.strides) != x.ndim or stays_inside(view, x.shape, kind) is False:
            raise _broken(lir, f"step {at} ({step.name}) reads {x.type} from {name} : {kind} at {view}")


def stays_inside(view: Spacing, shape: Sequence[Dim], kind: TensorType) -> bool | None:
    """Whether all that a view reads lies inside a buffer; None where the bounds of its sizes do not tell."""
    if any(isinstance(d, int) and d == 0 for d in shape):
        return True
    first = last = view.start
    for size, stride in zip(shape, view.strides, strict=True):
        if known_le(0, stride):
            last = last + (size - 1) * stride
        elif known_le(stride, 0):
            first = first + (size - 1) * stride
        else:
            return None
    if known_le(0, first) and known_le(last + 1, kind.size):
        return True
    return False if known_le(first + 1, 0) or known_le(kind.size, last) else None


def unproven_views(lir: Lir) -> list[str]:
    """Steps of one op that read in place, where the bounds of sizes do not tell that they stay inside their buffers."""
    found = []
    for home, step in lir.walk():
        if step.kernel is None and step.views is not None and len(step.nodes) == 1:
            reads = zip(step.inputs, step.views, step.nodes[0].inputs, strict=True)
            if not all(stays_inside(view, x.shape, home.buffer(name).type) for name, view, x in reads):
                found.append(step.name)
    return found


def _check_placement(lir: Lir) -> None:
    """Buffers alive at the same step do not overlap."""
    try:
        placement = lir.placement()
    except SymbolError:  # sizes without bounds: placed when they are known
        return
    owners = [b for b in lir.buffers if b.role == "scratch" and b.alias is None]
    sized = [(placement.offsets[b.name], byte_size(b, None), b) for b in owners if byte_size(b, None)]
    spans = [(at, at + size, b) for at, size, b in sorted(sized, key=lambda span: span[:2])]
    for i, (start, end, b) in enumerate(spans):
        if start % lir.memory.alignment or end > placement.arena_size:
            raise _broken(lir, f"{b.name} lies at {start}..{end} of {placement.arena_size}")
        for other_start, _, other in spans[i + 1 :]:
            if other_start >= end:
                break
            if b.birth <= other.death and other.birth <= b.death:
                raise _broken(lir, f"{b.name} and {other.name} are alive together and overlap at {other_start}")


def _broken(lir: Lir, reason: str) -> VerifyError:
    return VerifyError(f"plan of {lir.name!r}: {reason}", code="V120")
