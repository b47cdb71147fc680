"""Simplification of scalar expressions, above all of index arithmetic.

An index is kept as a linear form: a sum of size * atom plus a size, where sizes may be symbolic. Division and
remainder by a positive size take the divisible terms out and vanish when the rest is known to lie below the divisor, so
that movement operations (reshape, transpose, slice, pad, concatenate) leave plain strided addresses behind.

None of this may be done to data, whose sums and products wrap: `linear` opens indices only, so data is an atom of which
no more is known than what is so for every value of its type. Data that is an index (`data(i)`) is computed as an index
where the result is known to fit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from strata.core import Dim, DType, bool_, bounds, dim_max, dim_min, divide_exactly, floordiv, i64, known_le, symbols
from strata.kernel import ir
from strata.kernel.scalars import SCALARS, bitcast_array, cast_array


@dataclass(frozen=True, slots=True)
class LinearIndex:
    """Sum of coefficient * atom, plus a constant; all coefficients are sizes and none is 0."""

    terms: Mapping[ir.Expr, Dim]
    constant: Dim

    @property
    def is_constant(self) -> bool:
        return not self.terms


@lru_cache(maxsize=4096)  # of nodes, which are interned; a rewrite asks for the same ones many times
def linear(node: ir.Expr) -> LinearIndex:
    """The linear form of an index; what cannot be opened, as data can not, is an atom."""
    match node:
        case ir.Scalar() if not node.is_index:
            return LinearIndex({node: 1}, 0)
        case ir.Const(value, _):
            return LinearIndex({}, int(value.real))
        case ir.Size(dim):
            return LinearIndex({}, dim)
        case ir.Scalar("add", (a, b)):
            return _sum(linear(a), linear(b), 1)
        case ir.Scalar("sub", (a, b)):
            return _sum(linear(a), linear(b), -1)
        case ir.Scalar("neg", (a,)):
            return _scale(linear(a), -1)
        case ir.Scalar("mul", (a, b)):
            left, right = linear(a), linear(b)
            if right.is_constant:
                return _scale(left, right.constant)
            if left.is_constant:
                return _scale(right, left.constant)
    return LinearIndex({node: 1}, 0)


def _scale(form: LinearIndex, factor: Dim) -> LinearIndex:
    if factor == 0:
        return LinearIndex({}, 0)
    return LinearIndex({a: c * factor for a, c in form.terms.items()}, form.constant * factor)


def _sum(a: LinearIndex, b: LinearIndex, sign: int) -> LinearIndex:
    terms = dict(a.terms)
    for atom, coefficient in b.terms.items():
        total = terms.get(atom, 0) + coefficient * sign
        if total == 0:
            terms.pop(atom, None)
        else:
            terms[atom] = total
    return _recombine(terms, a.constant + b.constant * sign)


def _recombine(terms: dict[ir.Expr, Dim], constant: Dim) -> LinearIndex:
    """(x // d) * d * m + (x % d) * m becomes x * m; x may bring its own constant."""
    for atom, coefficient in list(terms.items()):
        if not (isinstance(atom, ir.Scalar) and atom.name == "mod" and atom in terms):
            continue
        x, divisor = atom.args
        by = linear(divisor)
        if by.is_constant and not is_divisor(by.constant):
            continue
        quotient = divide(x, by.constant) if by.is_constant else ir.Scalar("floordiv", (x, divisor), i64)
        parts = linear(quotient)
        if parts.constant == 0 and len(parts.terms) == 1:
            (whole, factor), *_ = parts.terms.items()
            if factor == 1 and whole in terms and by.is_constant and terms[whole] == coefficient * by.constant:
                rest = {a: c for a, c in terms.items() if a is not atom and a is not whole}
                return _sum(LinearIndex(rest, constant), _scale(linear(x), coefficient), 1)
    return LinearIndex(terms, constant)


def strided(index: Sequence[ir.Expr], strides: Sequence[Dim]) -> ir.Expr:
    """The sum of index * stride."""
    total = LinearIndex({}, 0)
    for i, stride in zip(index, strides, strict=True):
        total = _sum(total, _scale(linear(i), stride), 1)
    return build(total)


def build(form: LinearIndex) -> ir.Expr:
    """The expression of a linear form, terms in a fixed order: axes by name first, the rest as they came."""
    ordered = sorted(form.terms.items(), key=lambda t: (0, t[0].name) if isinstance(t[0], ir.Axis) else (1, ""))
    result: ir.Expr | None = None
    for atom, coefficient in ordered:
        term = atom if coefficient == 1 else ir.Scalar("mul", (atom, ir.size(coefficient)), i64)
        result = term if result is None else ir.Scalar("add", (result, term), i64)
    if result is None:
        return ir.size(form.constant)
    return result if form.constant == 0 else ir.Scalar("add", (result, ir.size(form.constant)), i64)


def interval(node: ir.Expr) -> tuple[Dim | None, Dim | None]:
    """Inclusive bounds of an i64 expression, as sizes; None where nothing is known."""
    match node:
        case ir.Axis(_, extent):
            return 0, extent - 1
        case ir.Const(value, _):
            return int(value.real), int(value.real)
        case ir.Size(dim):
            return dim, dim
        case ir.Scalar("index" | "data", (a,)):
            return interval(a)
        case ir.Scalar("mod", (a, divisor)):
            by = _divisor(a, divisor)
            return (None, None) if by is None else (0, by - 1)
        case ir.Scalar("floordiv", (a, divisor)):
            by = _divisor(a, divisor)
            low, high = interval(a)
            if by is None:
                return None, None
            return None if low is None else floordiv(low, by), None if high is None else floordiv(high, by)
        case ir.Scalar("min" | "max" as name, (a, b)):
            return _min_max_interval(name, interval(a), interval(b))
        case ir.Scalar("add" | "sub" | "mul" | "neg", _):
            form = linear(node)
            return (None, None) if form.terms.keys() == {node} else linear_interval(form)
    return None, None


def _min_max_interval(
    name: str, a: tuple[Dim | None, Dim | None], b: tuple[Dim | None, Dim | None]
) -> tuple[Dim | None, Dim | None]:
    at = 1 if name == "min" else 0  # min is bounded above by either side, max below
    known = [bound for bound in (a[at], b[at]) if bound is not None]
    tight = known[0] if known else None
    if len(known) == 2 and (known_le(known[1], known[0]) if name == "min" else known_le(known[0], known[1])):
        tight = known[1]
    other = None
    if a[1 - at] is not None and b[1 - at] is not None:
        x, y = a[1 - at], b[1 - at]
        if known_le(x, y):  # type: ignore[arg-type]
            other = x if name == "min" else y
        elif known_le(y, x):  # type: ignore[arg-type]
            other = y if name == "min" else x
    return (other, tight) if name == "min" else (tight, other)


def linear_interval(form: LinearIndex) -> tuple[Dim | None, Dim | None]:
    low: Dim | None = form.constant
    high: Dim | None = form.constant
    for atom, coefficient in form.terms.items():
        bottom, top = interval(atom)
        if known_le(coefficient, 0):
            bottom, top = top, bottom
        elif not known_le(0, coefficient):
            return None, None
        low = None if low is None or bottom is None else low + coefficient * bottom
        high = None if high is None or top is None else high + coefficient * top
    return low, high


def divide(node: ir.Expr, by: Dim) -> ir.Expr:
    """node // by for a positive size, rounding down."""
    whole, rest = _split(linear(node), by)
    if _below(rest, by):
        return build(whole)
    if (parts := _steps(rest, by)) is not None:
        times, step, _ = parts
        return build(_sum(whole, linear(divide(build(times), floordiv(by, step))), 1))
    inner = build(rest)
    match inner:
        case ir.Scalar("floordiv", (x, ir.Const(c, _))) if isinstance(by, int) and 0 < int(c.real) * by < _END:
            inner = divide(x, int(c.real) * by)
        case ir.Scalar("mod", (x, d)) if (q := _exact(linear(d), by)) is not None:
            inner = remainder(divide(x, by), q)
        case _:
            inner = ir.Scalar("floordiv", (inner, ir.size(by)), i64)
    return build(_sum(whole, linear(inner), 1))


def remainder(node: ir.Expr, by: Dim) -> ir.Expr:
    """node % by for a positive size; never negative."""
    _, rest = _split(linear(node), by)
    if _below(rest, by):
        return build(rest)
    if (parts := _steps(rest, by)) is not None:
        times, step, left = parts
        return build(_sum(_scale(linear(remainder(build(times), floordiv(by, step))), step), left, 1))
    inner = build(rest)
    match inner:
        case ir.Scalar("mod", (x, d)) if _exact(linear(d), by) is not None:
            return remainder(x, by)
        case _:
            return ir.Scalar("mod", (inner, ir.size(by)), i64)


def _exact(form: LinearIndex, by: Dim) -> Dim | None:
    return divide_exactly(form.constant, by) if form.is_constant else None


def _split(form: LinearIndex, by: Dim) -> tuple[LinearIndex, LinearIndex]:
    """form = by * whole + rest, with every term of `rest` not divisible by `by`."""
    whole: dict[ir.Expr, Dim] = {}
    rest: dict[ir.Expr, Dim] = {}
    for atom, coefficient in form.terms.items():
        quotient = divide_exactly(coefficient, by)
        if quotient is not None:
            whole[atom] = quotient
        else:
            rest[atom] = coefficient
    quotient = divide_exactly(form.constant, by)
    if quotient is None and isinstance(form.constant, int) and isinstance(by, int):
        return LinearIndex(whole, form.constant // by), LinearIndex(rest, form.constant % by)
    if quotient is None:
        return LinearIndex(whole, 0), LinearIndex(rest, form.constant)
    return LinearIndex(whole, quotient), LinearIndex(rest, 0)


def _steps(rest: LinearIndex, by: Dim) -> tuple[LinearIndex, Dim, LinearIndex] | None:
    """rest = times * step + left, with left below a step of which `by` has several: (4 heads of n rows) // 2n is
    heads // 2."""
    for step in rest.terms.values():
        if step == 1 or not is_divisor(step) or divide_exactly(by, step) is None:
            continue
        times, left = _split(rest, step)
        if _below(left, step):
            return times, step, left
    return None


def _below(rest: LinearIndex, by: Dim) -> bool:
    low, high = linear_interval(rest)
    return low is not None and high is not None and known_le(0, low) and known_le(high, by - 1)


def simplify_scalar(name: str, args: tuple[ir.Expr, ...], dtype: DType) -> ir.Expr | None:
    """A simpler expression of equal value, or None. Floats are only simplified where every bit stays."""
    if all(isinstance(a, ir.Const) for a in args):
        return _fold(name, args, dtype) if _rounds_once(name, args[0].dtype) else None
    if args[0].dtype is i64 or dtype is i64:
        found = _whole(name, args, dtype)
        if found is not None:
            return found
    match name, args:
        case (("cast" | "bitcast"), (x,)) if x.dtype is dtype:
            return x if name == "bitcast" or is_settled(x) else None
        case "cast", (ir.Scalar("cast", (x,)),) if x.dtype is dtype and _lossless(dtype, args[0].dtype):
            return x
        case "select", (ir.Const(value, _), a, b):
            return a if value else b
        case "select", (_, a, b) if a is b:
            return a
        case (("and" | "or"), (a, b)) if dtype is bool_:
            return _logic(name, a, b)
        case "mul", (x, ir.Const(value, _)) if value == 1 and not dtype.is_complex:
            return x
        case "mul", (ir.Const(value, _), x) if value == 1 and not dtype.is_complex:
            return x
        case "div", (x, ir.Const(value, _)) if value == 1 and not dtype.is_complex:
            return x
        case (("add" | "sub"), (x, ir.Const(value, _))) if value == 0 and dtype.is_int:
            return x
        case "neg", (ir.Scalar("neg", (x,)),):
            return x
        case "not", (ir.Scalar("not", (x,)),):
            return x
    return None


_PLAIN: dict[str, Callable[..., int]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


# functions of floats that a kernel computes in several steps: NumPy may round them otherwise
_IN_STEPS = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2",
        "expm1", "floordiv", "fma", "gelu", "lgamma", "log", "log1p", "log2", "mod", "pow", "rem", "rsqrt", "sigmoid",
        "sin", "sinh", "tan", "tanh",
    }
)  # fmt: skip
_OF_PARTS = frozenset({"abs", "div", "mul", "sqrt"})  # such functions of complex numbers


def _rounds_once(name: str, dtype: DType) -> bool:
    """Whether a function has the same bits wherever it is computed; what is constant may depend on the sizes known."""
    return not (dtype.is_inexact and (name in _IN_STEPS or (dtype.is_complex and name in _OF_PARTS)))


def _fold(name: str, args: tuple[ir.Expr, ...], dtype: DType) -> ir.Expr | None:
    if name == "bitcast" and dtype.itemsize != args[0].dtype.itemsize:
        return None
    if name in _PLAIN and dtype is i64 and all(a.dtype is i64 for a in args):
        return ir.Const(_PLAIN[name](*(a.value for a in args if isinstance(a, ir.Const))), i64)  # which wraps
    arrays = [np.asarray(a.value).astype(a.dtype.np) for a in args if isinstance(a, ir.Const)]
    match name:
        case "cast":
            value = cast_array(arrays[0], dtype)
        case "bitcast":
            value = bitcast_array(arrays[0], dtype)
        case _:
            value = SCALARS[name].numpy(*arrays)
    return ir.Const(np.asarray(value).reshape(()), dtype)


def _lossless(narrow: DType, wide: DType) -> bool:
    same_kind = narrow.kind == wide.kind and wide.bits >= narrow.bits
    return same_kind and not (narrow.is_float and narrow.bits == wide.bits and narrow is not wide)


def _whole(name: str, args: tuple[ir.Expr, ...], dtype: DType) -> ir.Expr | None:
    """A function of i64 values, of indices and of data."""
    match name, args:
        case "index", (ir.Scalar("data", (x,)),):
            return x
        case "index", (x,):
            return x if x.is_index else None
        case "data", (ir.Scalar("index", (x,)),):
            return x
        case "data", (x,):
            return None if x.is_index else x
        case ("cast", (ir.Scalar("data", (x,)),)) if dtype is not i64:
            return ir.apply("cast", x, dtype=dtype)
        case (("lt" | "le" | "gt" | "ge" | "eq" | "ne"), _):
            a, b = map(_number, args)
            known = _compare(name, a, b)
            return ir.Scalar(name, (a, b), dtype) if known is None and (a, b) != args else known
        case (("add" | "sub" | "neg" | "mul"), _):
            node = ir.Scalar(name, args, i64)
            form = linear(node)
            return _as_index(name, args) if form.terms.keys() == {node} else build(form)
        case (("floordiv" | "mod"), (a, b)):
            by = _divisor(a, b)
            if by is not None and (found := _as_index(name, args)) is not None:
                return found
            if by is not None:
                return divide(a, by) if name == "floordiv" else remainder(a, by)
        case (("min" | "max"), (a, b)):
            found = _as_index(name, args)
            return _min_max(name, a, b) if found is None else found
    return None


def _divisor(a: ir.Expr, b: ir.Expr) -> Dim | None:
    """The size that divides a, where it is positive; one that may be 0 divides no index, as no loop runs, but data."""
    by = linear(b)
    if not by.is_constant or not is_divisor(by.constant):
        return None
    return by.constant if a.is_index or known_le(1, by.constant) else None


def _number(node: ir.Expr) -> ir.Expr:
    """The index that data is, where it is one."""
    return node.args[0] if isinstance(node, ir.Scalar) and node.name == "data" else node


def _as_index(name: str, args: tuple[ir.Expr, ...]) -> ir.Expr | None:
    """A function of data that are indices, as data that is an index, where the result cannot wrap."""
    numbers = tuple(map(_number, args))
    if numbers == args or not all(n.is_index for n in numbers):
        return None
    made = ir.apply(name, *numbers)
    if name in ("add", "sub", "mul", "neg"):
        reach = _reach(ir.Scalar(name, numbers, i64))
        if reach is None or reach[0] < -_ROOM or reach[1] > _ROOM:
            return None
    return ir.as_data(made)


@lru_cache(maxsize=4096)
def _reach(node: ir.Expr) -> tuple[int, int] | None:
    """Numbers between which an index lies, given that no axis is longer than memory; None where nothing is known."""
    match node:
        case ir.Const(value, _):
            return int(value.real), int(value.real)
        case ir.Size(dim):
            return (0, _most(dim)) if str(dim) in symbols(dim) else None
        case ir.Axis(_, extent):
            return 0, max(_most(extent) - 1, 0)
        case ir.Scalar("neg", (a,)):
            reach = _reach(a)
            return None if reach is None else (-reach[1], -reach[0])
        case ir.Scalar("mod" | "floordiv" as name, (a, ir.Const(c, _))) if c.real > 0:
            reach, by = _reach(a), int(c.real)
            if name == "mod":
                return 0, by - 1
            return None if reach is None else (reach[0] // by, reach[1] // by)
        case ir.Scalar("add" | "sub" | "mul" | "min" | "max" as name, (a, b)):
            left, right = _reach(a), _reach(b)
            if left is None or right is None:
                return None
            corners = [_CORNERS[name](x, y) for x in left for y in right]
            return min(corners), max(corners)
    return None


def _most(extent: Dim) -> int:
    high = bounds(extent)[1]
    return _MEMORY if high is None else min(high, _MEMORY)


_END: Final = 1 << 63  # i64 wraps there
_ROOM: Final = 1 << 56  # where numbers are that no sum of a few of them wraps
_MEMORY: Final = 1 << 47  # elements: what an address can tell apart
_CORNERS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
}  # fmt: skip


def _min_max(name: str, a: ir.Expr, b: ir.Expr) -> ir.Expr | None:
    if a is b:
        return a
    low, high = linear_interval(_sum(linear(a), linear(b), -1))
    if low is not None and known_le(0, low):
        return b if name == "min" else a
    if high is not None and known_le(high, 0):
        return a if name == "min" else b
    first, second = linear(a), linear(b)
    if first.is_constant and second.is_constant:  # a size, as it would be a number
        return ir.size((dim_min if name == "min" else dim_max)(first.constant, second.constant))
    return None


def _compare(name: str, a: ir.Expr, b: ir.Expr) -> ir.Expr | None:
    low, high = linear_interval(_sum(linear(a), linear(b), -1))
    below = high is not None and known_le(high, -1)
    above = low is not None and known_le(1, low)
    not_above = high is not None and known_le(high, 0)
    not_below = low is not None and known_le(0, low)
    known = {
        "lt": (below, not_below),
        "ge": (not_below, below),
        "gt": (above, not_above),
        "le": (not_above, above),
        "ne": (below or above, not_above and not_below),
        "eq": (not_above and not_below, below or above),
    }[name]
    return ir.Const(True, bool_) if known[0] else ir.Const(False, bool_) if known[1] else None


def _logic(name: str, a: ir.Expr, b: ir.Expr) -> ir.Expr | None:
    if a is b:
        return a
    for x, y in ((a, b), (b, a)):
        if isinstance(x, ir.Const):
            keeps = bool(x.value) == (name == "and")
            return y if keeps else x
    return None


_KEEPS: Final = frozenset(
    ("neg", "abs", "min", "max", "select", "floor", "ceil", "trunc", "round", "sign", "copysign", "rem")
)  # what they give of numbers of a type is one of them: nothing is rounded


@lru_cache(maxsize=4096)
def is_settled(node: ir.Expr) -> bool:
    """Whether an expression is what memory would hold: registers have more digits than f16 and less."""
    if not node.dtype.is_float or node.dtype.itemsize >= 4:
        return True
    match node:
        case ir.Scalar("cast" | "bitcast", _):
            return True
        case ir.Scalar(name, args):
            return name in _KEEPS and all(is_settled(a) for a in args if a.dtype is node.dtype)
        case ir.Reduce() | ir.Scan():
            return node.kind in ("max", "min") and is_settled(node.body)
    return True


def is_divisor(dim: Dim) -> bool:
    """Whether a size may be taken as positive: a loop over an axis of size 0 never runs, so 0 does not matter."""
    return dim != 0 and known_le(0, dim)
