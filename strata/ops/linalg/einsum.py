"""einsum and its relatives, reduced to dot_general, sums and transposes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, i32, normalize_axis
from strata.errors import OptionError, ShapeError
from strata.kinds import counted
from strata.mir import METHODS, Value, function
from strata.ops.base.frontend import Operand, promoted
from strata.ops.base.movement import moveaxis, reshape, transpose
from strata.ops.elementwise.logic import cast
from strata.ops.linalg.matmul import DotGeneral, matmul
from strata.ops.linalg.solve import main_diagonal
from strata.ops.reduce.reduce import ReduceSum

GUESS = 128.0  # what a symbolic size counts as when contraction orders are compared


@dataclass(frozen=True)
class Term:
    """A value whose axes have index names. An ellipsis axis is named `.k`, counted from the right."""

    value: Value
    names: tuple[str, ...]


# ------------------------------------------------------------------------------------------------------------- reading


def _read(text: str, operands: Sequence[Value]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Index names of each operand and of the output."""
    compact = text.replace(" ", "")
    inputs, arrow, output = compact.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(operands):
        raise OptionError(f"einsum: {text!r} names {counted(len(parts), 'operand')}, got {len(operands)}", code="O277")
    names = []
    for i, (part, x) in enumerate(zip(parts, operands, strict=True)):
        letters = _letters(part, text)
        given = len(letters) - ("..." in letters)
        if given > x.ndim or (given < x.ndim and "..." not in letters):
            raise ShapeError(f"einsum: {part!r} names {given} axes, operand {i} is {x.type}", code="S378")
        names.append(_spread(letters, x.ndim - given))
    hidden = sorted({n for term in names for n in term if n[0] == "."}, key=lambda n: -int(n[1:]))
    if arrow:
        letters = _letters(output, text)
        wanted = tuple(n for letter in letters for n in (hidden if letter == "..." else [letter]))
    else:
        every = [n for term in names for n in term if n[0] != "."]
        wanted = (*hidden, *sorted(n for n in set(every) if every.count(n) == 1))
    _check_output(wanted, names, text)
    return names, wanted


def _letters(part: str, text: str) -> list[str]:
    """One entry per index; an ellipsis is one entry."""
    before, dots, after = part.partition("...")
    if not (before + after).isalpha() and before + after:
        bad = next(c for c in before + after if not c.isalpha())
        raise OptionError(f"einsum: {bad!r} in {text!r} is not an index: use letters, ',', '->' and '...'", code="O278")
    return [*before, *(["..."] if dots else []), *after]


def _spread(letters: list[str], count: int) -> tuple[str, ...]:
    hidden = [f".{i}" for i in range(count, 0, -1)]
    return tuple(n for letter in letters for n in (hidden if letter == "..." else [letter]))


def _check_output(wanted: tuple[str, ...], names: list[tuple[str, ...]], text: str) -> None:
    known = {n for term in names for n in term}
    for name in wanted:
        if name not in known:
            raise OptionError(f"einsum: index {name!r} of the output of {text!r} is in no operand", code="O279")
        if wanted.count(name) > 1:
            raise OptionError(f"einsum: index {name!r} is twice in the output of {text!r}", code="O279")
    if any(n[0] == "." for n in known) and not any(n[0] == "." for n in wanted):
        raise OptionError(f"einsum: {text!r} has '...' in an operand, but not in the output", code="O279")


def _sizes(names: list[tuple[str, ...]], operands: Sequence[Value]) -> dict[str, Dim]:
    """The size of each index; 1 meets any size, as in broadcasting."""
    found: dict[str, tuple[Dim, int]] = {}
    for i, (term, x) in enumerate(zip(names, operands, strict=True)):
        for name, size in zip(term, x.shape, strict=True):
            known, where = found.get(name, (1, i))
            if known == 1:
                found[name] = (size, i)
            elif size not in (1, known) and isinstance(size, int) and isinstance(known, int):
                shown = "an axis of '...'" if name[0] == "." else f"index {name!r}"
                raise ShapeError(
                    f"einsum: {shown} has size {known} in operand {where} and {size} in operand {i}", code="S379"
                )
    return {name: size for name, (size, _) in found.items()}


# --------------------------------------------------------------------------------------------------------- contracting


def _simplified(term: Term, sizes: dict[str, Dim], needed: set[str]) -> Term:
    """Diagonals taken, axes of size 1 that broadcast dropped, indices that nobody else needs summed."""
    value, names = term.value, list(term.names)
    keep = [not (d == 1 and sizes[n] != 1) for d, n in zip(value.shape, names, strict=True)]
    value = reshape(value, [d for d, k in zip(value.shape, keep, strict=True) if k])
    names = [n for n, k in zip(names, keep, strict=True) if k]
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            value = main_diagonal(moveaxis(moveaxis(value, second, -1), first, -2))
            names = [n for i, n in enumerate(names) if i not in (first, second)] + [name]
    summed = tuple(i for i, n in enumerate(names) if n not in needed)
    if summed:
        value = ReduceSum(summed)(value)
    return Term(value, tuple(n for n in names if n in needed))


def _pair(a: Term, b: Term, needed: set[str]) -> Term:
    """The product of two terms, summed over the indices that both have and nobody else needs."""
    shared = [n for n in a.names if n in b.names]
    contracted = [n for n in shared if n not in needed]
    if not contracted:
        return _outer(a, b)
    batch = [n for n in shared if n in needed]

    def places(term: Term, names: list[str]) -> tuple[int, ...]:
        return tuple(term.names.index(n) for n in names)

    rule = DotGeneral(places(a, contracted), places(b, contracted), places(a, batch), places(b, batch))
    free = [n for term in (a, b) for n in term.names if n not in shared]
    return Term(rule(a.value, b.value), (*batch, *free))


def _outer(a: Term, b: Term) -> Term:
    """The element-wise product over the union of the indices."""
    names = (*a.names, *(n for n in b.names if n not in a.names))
    return Term(_aligned(a, names) * _aligned(b, names), names)


def _aligned(term: Term, names: tuple[str, ...]) -> Value:
    order = [n for n in names if n in term.names]
    value = transpose(term.value, [term.names.index(n) for n in order])
    sizes = dict(zip(order, value.shape, strict=True))
    return reshape(value, [sizes.get(n, 1) for n in names])


def _best_pair(terms: list[Term], wanted: Sequence[str], sizes: dict[str, Dim]) -> tuple[int, int]:
    """The pair that takes the fewest multiplications; among equals, the one that shrinks most."""

    def extent(names: AbstractSet[str]) -> float:
        return math.prod(GUESS if isinstance(sizes[n], SymExpr) else float(sizes[n]) for n in names)

    places: dict[frozenset[str], list[int]] = {}  # terms of the same indices cost the same: the first of them stand in
    for i, term in enumerate(terms):
        places.setdefault(frozenset(term.names), []).append(i)
    readers = Counter(n for term in terms for n in term.names)
    best = (math.inf, math.inf, 0, 1)
    for (a, at), (b, there) in combinations_with_replacement(places.items(), 2):
        first, second = (at[0], there[0]) if a is not b else (*at, -1)[:2]
        if second < 0:
            continue
        union = a | b
        kept = {n for n in union if n in wanted or readers[n] > (n in a) + (n in b)}
        growth = extent(kept) - extent(a) - extent(b)
        best = min(best, (extent(union), growth, min(first, second), max(first, second)))
    return best[2:]


@function()
def einsum(subscripts: Any, *operands: Any) -> Value:
    """Sum of products over named indices: `einsum("bij,bjk->bik", x, y)`.

    Without `->` the output has the indices that occur once, in alphabetical order. `...` stands for leading axes, which
    broadcast; an index that is twice in one operand takes its diagonal. NumPy's form with lists of numbers works too.
    """
    if isinstance(subscripts, Value) and operands and isinstance(operands[0], str):  # x.einsum("ij->ji")
        subscripts, operands = operands[0], (subscripts, *operands[1:])
    if not isinstance(subscripts, str):
        subscripts, operands = _from_lists((subscripts, *operands))
    if not operands:
        raise OptionError(f"einsum: {subscripts!r} needs operands", code="O277")
    values = promoted(*operands)
    if values[0].dtype.is_bool or (values[0].dtype.is_int and values[0].dtype.bits < 32):
        values = tuple(cast(x, i32) for x in values)
    names, wanted = _read(subscripts, values)
    sizes = _sizes(names, values)
    terms = [Term(x, n) for x, n in zip(values, names, strict=True)]
    for i in range(len(terms)):
        terms[i] = _simplified(terms[i], sizes, _needed(terms, (i,), wanted))
    while len(terms) > 1:
        i, j = _best_pair(terms, wanted, sizes)
        joined = _pair(terms[i], terms[j], _needed(terms, (i, j), wanted))
        terms = [t for k, t in enumerate(terms) if k not in (i, j)] + [joined]
        terms[-1] = _simplified(joined, sizes, _needed(terms, (len(terms) - 1,), wanted))
    (result,) = terms
    return transpose(result.value, [result.names.index(n) for n in wanted]) if wanted else result.value


def _needed(terms: list[Term], besides: tuple[int, ...], wanted: Sequence[str]) -> set[str]:
    return {n for k, t in enumerate(terms) if k not in besides for n in t.names} | set(wanted)


def _from_lists(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """`einsum(x, [0, 1], y, [1, 2], [0, 2])` as text."""

    def letters(indices: Any) -> str:
        try:
            return "".join(
                "..." if i is Ellipsis else chr(ord("a") + i if i < 26 else ord("A") + i - 26) for i in indices
            )
        except TypeError:
            raise OptionError(
                f"einsum: the first argument is text such as 'ij,jk->ik', got {args[0]!r}", code="O278"
            ) from None

    operands, lists = args[0 : len(args) // 2 * 2 : 2], args[1::2]
    text = ",".join(letters(indices) for indices in lists)
    return (f"{text}->{letters(args[-1])}" if len(args) % 2 else text), operands


# ----------------------------------------------------------------------------------------------------------- relatives


@function()
def tensordot(x: Operand, y: Operand, axes: int | Sequence[int | Sequence[int]] = 2) -> Value:
    """Sum over the last axes of x and the first of y, or over pairs of axes."""
    a, b = promoted(x, y)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ShapeError(f"tensordot: {a.type} and {b.type} do not both have {axes} axes", code="S380")
        left, right = range(a.ndim - axes, a.ndim), range(axes)
    else:
        left, right = ([i] if isinstance(i, (int, np.integer)) else list(i) for i in axes)  # type: ignore[assignment]
    places = (
        tuple(normalize_axis(i, a.ndim, "tensordot") for i in left),
        tuple(normalize_axis(i, b.ndim, "tensordot") for i in right),
    )
    if len(places[0]) != len(places[1]):
        raise ShapeError(f"tensordot: axes {list(left)} and {list(right)} do not pair up", code="S380")
    for i, j in zip(*places, strict=True):
        if a.shape[i] != b.shape[j]:
            raise ShapeError(
                f"tensordot: axis {i} of {a.type} and axis {j} of {b.type} differ, {a.shape[i]} and {b.shape[j]}",
                code="S102",
            )
    return METHODS["dot_general"](a, b, places)


@function()
def vecdot(x: Operand, y: Operand, axis: int = -1) -> Value:
    """Σ conj(x)·y along an axis; the others broadcast."""
    a, b = (moveaxis(v, axis, -1) for v in promoted(x, y))
    return einsum("...i,...i->...", METHODS["conj"](a), b)


@function()
def vdot(x: Operand, y: Operand) -> Value:
    """Σ conj(x)·y over all elements."""
    a, b = (reshape(v, (v.type.size,)) for v in promoted(x, y))
    return einsum("i,i->", METHODS["conj"](a), b)


@function()
def inner(x: Operand, y: Operand) -> Value:
    """Sum over the last axes of both; a product with a number."""
    a, b = promoted(x, y)
    return a * b if a.ndim == 0 or b.ndim == 0 else tensordot(a, b, (-1, -1))


@function()
def bilinear(x: Operand, y: Operand, weight: Operand, bias: Operand | None = None) -> Value:
    """x·W_o·y for each output o: x [.., I], y [.., J], weight [O, I, J], bias [O]."""
    a, b, w = promoted(x, y, weight)
    if w.ndim != 3 or a.ndim == 0 or b.ndim == 0 or (a.shape[-1], b.shape[-1]) != w.shape[1:]:
        raise ShapeError(
            f"bilinear: needs [.., I], [.., J] and weights [O, I, J], got {a.type}, {b.type} and {w.type}", code="S381"
        )
    out = einsum("...i,oij,...j->...o", a, w, b)
    return out if bias is None else out + bias


@function()
def multi_dot(operands: Sequence[Operand]) -> Value:
    """The product of a chain of matrices in the cheapest order; the first and the last may be vectors."""
    if isinstance(operands, Value) or len(operands) < 2:
        raise OptionError("multi_dot: needs a sequence of at least two values", code="O277")
    values = promoted(*operands)
    for i, x in enumerate(values):
        ends = (1, 2) if i in (0, len(values) - 1) else (2,)
        if x.ndim not in ends:
            raise ShapeError(f"multi_dot: operand {i} must be a matrix, got {x.type}", code="S382")
    first, *middle, last = values
    rows = (1, first.shape[0]) if first.ndim == 1 else first.shape
    columns = (last.shape[0], 1) if last.ndim == 1 else last.shape
    chain = [reshape(first, rows), *middle, reshape(last, columns)]
    for left, right in pairwise(chain):
        if left.shape[1] != right.shape[0] and isinstance(left.shape[1], int) and isinstance(right.shape[0], int):
            raise ShapeError(f"multi_dot: inner sizes differ, {left.shape[1]} and {right.shape[0]}", code="S102")
    shape = (*(() if first.ndim == 1 else first.shape[:1]), *(() if last.ndim == 1 else last.shape[1:]))
    return reshape(_chain(chain), shape)


def _chain(matrices: list[Value]) -> Value:
    """Matrix-chain order by dynamic programming over the sizes."""
    sizes = np.array(
        [GUESS if isinstance(d, SymExpr) else float(d) for d in (matrices[0].shape[0], *(m.shape[1] for m in matrices))]
    )
    count = len(matrices)
    cost = np.zeros((count, count))
    made: dict[tuple[int, int], Value] = {(i, i): x for i, x in enumerate(matrices)}
    split = np.zeros((count, count), np.int64)
    for length in range(1, count):
        first = np.arange(count - length)
        last, cuts = first + length, first[:, None] + np.arange(length)
        each = cost[first[:, None], cuts] + cost[cuts + 1, last[:, None]]
        each += sizes[first, None] * sizes[cuts + 1] * sizes[last + 1, None]
        split[first, last], cost[first, last] = first + each.argmin(1), each.min(1)
    todo = [(0, count - 1)]
    while todo:
        i, j = todo[-1]
        cut = int(split[i, j])
        parts = [] if (i, j) in made else [(i, cut), (cut + 1, j)]
        missing = [part for part in parts if part not in made]
        todo += missing
        if not missing:
            todo.pop()
            if parts:
                made[i, j] = matmul(made[parts[0]], made[parts[1]])
    return made[0, count - 1]
