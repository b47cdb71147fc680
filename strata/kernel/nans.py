"""Facts about values: where a NaN propagates anyway, and what is never positive."""

from __future__ import annotations

from strata.kernel.ir import Expr, Kernel, Reduce, Scalar, postorder

# functions that give NaN where any of their arguments is NaN
_KEEPS = frozenset(("add", "sub", "mul", "div", "neg", "max", "min", "exp", "exp2", "log", "log2", "sqrt", "rsqrt"))


def need_no_nan(kernel: Kernel) -> frozenset[Reduce]:
    """Maxima and minima that may leave NaN out: a sum over the same values brings it to all results of their row.

    In a softmax, one NaN in a row makes the sum of its exponentials NaN, whatever they were compared with."""
    nodes = postorder(kernel.roots)
    extremes = [n for n in nodes if isinstance(n, Reduce) and n.kind in ("max", "min") and n.dtype.is_float]
    if not extremes:
        return frozenset()
    sums = [n for n in nodes if isinstance(n, Reduce) and n.kind == "sum"]
    found: list[Reduce] = []
    for extreme in extremes:
        over = [s for s in sums if s.axes == extreme.axes and s.body in _reached(nodes, {extreme.body})]
        reached = _reached(nodes, set(over), through=frozenset(("sum",)))
        if over and all(s.value in reached for s in kernel.stores):
            found.append(extreme)
    return frozenset(found)


def _reached(nodes: list[Expr], sources: set[Expr], through: frozenset[str] = frozenset()) -> set[Expr]:
    """What is NaN where a source is, by arithmetic and by reductions of some kinds; nodes come after their inputs."""
    reached = set(sources)
    for node in nodes:
        arithmetic = isinstance(node, Scalar) and node.name in _KEEPS
        reduction = isinstance(node, Reduce) and node.kind in through
        if (arithmetic or reduction) and any(x in reached for x in node.inputs):
            reached.add(node)
    return reached


def is_below(node: Expr) -> bool:
    """Whether a value is the distance to the largest of its row, which is never above 0."""
    match node:
        case Scalar("sub", (value, Reduce("max", axes, body))):
            return value is body and not value.free.isdisjoint(axes)
    return False
