"""Sums with at most one non-zero term (one-hot masks), rewritten as a gather of that term.

y[i] = sum j in 1000 : select(j == label[i], x[i, j], 0)        y[i] = x[i, label[i]] where 0 <= label[i] < 1000
"""

from __future__ import annotations

from collections.abc import Iterator

from strata.core import i64, known_le
from strata.kernel.ir import Axis, Const, Expr, Load, Reduce, Scalar, Scan, apply, as_index, postorder, size
from strata.kernel.rewrite import load, rebuild


def picked(axes: tuple[Axis, ...], body: Expr) -> Expr | None:
    """The sum of a body over axes, where the body is 0 but at one place of an axis; None where it is not so."""
    if not isinstance(body, Scalar) or body.name != "select":
        return None
    condition, value, otherwise = body.args
    if not isinstance(otherwise, Const) or otherwise.value != 0:
        return None
    parts = list(_conjuncts(condition))
    for number, part in enumerate(parts):
        for axis in axes:
            place = _place(part, axis)
            if place is None:
                continue
            inside = apply("and", place >= 0, place < size(axis.extent))
            for other in (*parts[:number], *parts[number + 1 :]):
                inside = apply("and", inside, _at(other, axis, place, inside))
            # a sum is never -0
            term = apply("select", inside, apply("add", _at(value, axis, place, inside), otherwise), otherwise)
            rest = tuple(a for a in axes if a is not axis)
            return Reduce("sum", rest, term) if rest else term
    return None


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, Scalar) and condition.name == "and":
        for part in condition.args:
            yield from _conjuncts(part)
    else:
        yield condition


def _place(part: Expr, axis: Axis) -> Expr | None:
    """Where on an axis a condition holds: `axis == place`, for a place that is read or computed at once."""
    if not isinstance(part, Scalar) or part.name != "eq":
        return None
    for one, place in (part.args, part.args[::-1]):
        if axis in place.free or any(isinstance(n, (Reduce, Scan)) for n in postorder((place,))):
            continue
        if one is axis or _is_cast_of(one, axis):
            return place.cast(i64)
    return None


def _is_cast_of(one: Expr, axis: Axis) -> bool:
    """Whether an expression is the axis in an integer type that all of its places have room in."""
    if not isinstance(one, Scalar) or one.name != "cast" or one.args[0] is not axis or not one.dtype.is_int:
        return False
    return known_le(axis.extent, 1 << (one.dtype.bits - 1))


def _at(value: Expr, axis: Axis, place: Expr, inside: Expr) -> Expr:
    """The value at a place of the axis; what it loads there is loaded only where that is inside."""
    done: dict[Expr, Expr] = {}
    for node in postorder((value,)):
        if axis not in node.free:
            done[node] = node
        elif node is axis:
            done[node] = as_index(place)
        elif isinstance(node, Load):
            where = inside if node.where is None else apply("and", done[node.where], inside)
            done[node] = load(node.buffer, tuple(done[i] for i in node.index), where)
        else:
            done[node] = rebuild(node, tuple(done[x] for x in node.inputs))
    return done[value]
