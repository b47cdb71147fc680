"""strata/core/dims.py: canonical forms, bounds, substitution and text, against plain integer arithmetic."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata.core import (
    Dim,
    SymExpr,
    bounds,
    common_divisor,
    dim_max,
    dim_min,
    dim_prod,
    divide_exactly,
    floordiv,
    known_le,
    known_positive,
    mod,
    parse_dim,
    solve_for,
    static_prod,
    substitute,
    sym,
    symbols,
)
from strata.errors import OptionError, ParseError, ShapeError, SymbolError

MANY = max(500, settings().max_examples)  # a sign or a bracket lost in the text shows in few expressions
LIMITS = {"S": (1, 5), "T": (2, 4), "U": (1, 3)}
S, T, U = (sym(name, lo, hi) for name, (lo, hi) in LIMITS.items())
KNOWN = symbols(S * T * U)
BINDINGS = [
    dict(zip(LIMITS, values, strict=True)) for values in product(*(range(a, b + 1) for a, b in LIMITS.values()))
]


@dataclass(frozen=True)
class Tree:
    """A size and, beside it, how to compute it with Python's own integers."""

    dim: Dim
    value: Callable[[dict[str, int]], int]


BINARY: dict[str, tuple[Callable[[Dim, Dim], Dim], Callable[[int, int], int]]] = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "min": (dim_min, min),
    "max": (dim_max, max),
}
DIVIDE: dict[str, tuple[Callable[[Dim, Dim], Dim], Callable[[int, int], int]]] = {
    "//": (floordiv, lambda a, b: a // b),
    "%": (mod, lambda a, b: a % b),
}


def _leaf(name: str) -> Tree:
    return Tree({"S": S, "T": T, "U": U}[name], lambda env: env[name])


def _number(n: int) -> Tree:
    return Tree(n, lambda env: n)


def _binary(op: str, a: Tree, b: Tree) -> Tree:
    make, compute = BINARY[op]
    return Tree(make(a.dim, b.dim), lambda env: compute(a.value(env), b.value(env)))


def _divide(op: str, a: Tree, b: Tree) -> Tree:
    make, compute = DIVIDE[op]
    return Tree(make(a.dim, b.dim), lambda env: compute(a.value(env), b.value(env)))


divisors = st.one_of(st.integers(1, 6).map(_number), st.sampled_from("STU").map(_leaf))
trees = st.recursive(
    st.one_of(st.sampled_from("STU").map(_leaf), st.integers(-6, 9).map(_number)),
    lambda inner: st.one_of(
        st.builds(_binary, st.sampled_from(sorted(BINARY)), inner, inner),
        st.builds(_divide, st.sampled_from(sorted(DIVIDE)), inner, divisors),
    ),
    max_leaves=6,
)


# ---- against brute force


@given(trees)
@settings(max_examples=MANY)
def test_substitution_gives_what_integers_give(tree: Tree) -> None:
    for env in BINDINGS:
        assert substitute(tree.dim, env) == tree.value(env)


@given(trees, st.sampled_from("STU"))
def test_substitution_one_symbol_at_a_time(tree: Tree, first: str) -> None:
    for env in BINDINGS[:: len(BINDINGS) // 8]:
        partly = substitute(tree.dim, {first: env[first]})
        assert first not in symbols(partly)
        assert substitute(partly, env) == tree.value(env)


@given(trees)
@settings(max_examples=MANY)
def test_bounds_hold_everywhere(tree: Tree) -> None:
    values = [tree.value(env) for env in BINDINGS]
    lo, hi = bounds(tree.dim)
    assert hi is None or max(values) <= hi
    if min(values) >= 0:  # what is not provably a size counts as one, so only sizes have a lower bound to keep
        assert lo <= min(values)


@given(trees, trees)
def test_what_is_known_is_true(a: Tree, b: Tree) -> None:
    if known_le(a.dim, b.dim):
        assert all(a.value(env) <= b.value(env) for env in BINDINGS)
    if known_positive(a.dim):
        assert all(a.value(env) >= 1 for env in BINDINGS)


@given(trees, divisors)
def test_exact_division_is_exact(a: Tree, b: Tree) -> None:
    quotient = divide_exactly(a.dim, b.dim)
    if quotient is not None:
        assert all(substitute(quotient, env) * b.value(env) == a.value(env) for env in BINDINGS)


@given(trees)
def test_common_divisor_divides(tree: Tree) -> None:
    n = common_divisor(tree.dim)
    for env in BINDINGS:
        assert tree.value(env) % n == 0 if n else tree.value(env) == 0


@given(trees)
@settings(max_examples=MANY)
def test_text_round_trip(tree: Tree) -> None:
    assert parse_dim(str(tree.dim), KNOWN) == tree.dim


@given(trees)
@settings(max_examples=MANY)
def test_text_means_what_python_means(tree: Tree) -> None:
    for env in BINDINGS[:: len(BINDINGS) // 8]:
        assert eval(str(tree.dim), {}, {**env, "min": min, "max": max}) == tree.value(env)  # noqa: S307


# ---- canonical forms


@given(trees, trees, trees)
def test_ring_laws(a: Tree, b: Tree, c: Tree) -> None:
    x, y, z = a.dim, b.dim, c.dim
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) + z == x + (y + z)
    assert (x * y) * z == x * (y * z)
    assert x * (y + z) == x * y + x * z
    assert x - x == 0
    assert hash(x + y) == hash(y + x)
    assert dim_min(x, y) == dim_min(y, x)
    assert dim_max(x, y) == dim_max(y, x)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (S + 1, "S + 1"),
        (1 + S, "S + 1"),
        (S - 1, "S - 1"),
        (3 - S, "-S + 3"),
        (S * T, "S*T"),
        (T * S * 2, "2*S*T"),
        (S * S, "S*S"),
        ((S + 1) * (S - 1), "S*S - 1"),
        ((2 * S) // 2, "S"),
        ((2 * S + 1) // 2, "S"),
        ((S * T) // T, "S"),
        ((S + 4) // 2, "S // 2 + 2"),
        ((S + 1) // 2, "(S + 1) // 2"),
        (T - S // 2, "-(S // 2) + T"),
        (S % 2, "S % 2"),
        ((2 * S + 1) % 2, "1"),
        ((4 * S + T) % 4, "T % 4"),
        ((4 * S) % 2, "0"),
        (S // 6, "0"),
        (S % 6, "S"),
        (dim_min(S, 3), "min(3, S)"),
        (dim_max(S, T), "max(S, T)"),
        (dim_min(S, 5), "S"),
        (dim_max(S, 5), "5"),
        (dim_min(S, S + 1), "S"),
        (dim_prod([2, S, T, 3]), "6*S*T"),
        (dim_prod([]), "1"),
    ],
)
def test_canonical_text(size: Dim, text: str) -> None:
    assert str(size) == text


def test_constant_results_are_ints() -> None:
    for value in (S - S, S + 2 - S, S * 0, (S * 2) // S, S // S, S % S, (S + T) // (S + T)):
        assert type(value) is int


def test_ties_go_the_same_way_in_either_order() -> None:
    n = sym("N", 3, 3)
    assert dim_min(n, 3) == dim_min(3, n)
    assert dim_max(n, 3) == dim_max(3, n)
    always_zero = (S // 3) // T
    assert dim_min(always_zero, 0) == dim_min(0, always_zero)


def test_never_equals_an_int() -> None:
    assert S != 1
    assert sym("N", 3, 3) != 3


# ---- bounds


def test_bounds_of_common_forms() -> None:
    n = sym("N")
    assert bounds(7) == (7, 7)
    assert bounds(n) == (1, None)
    assert bounds(n + 1) == (2, None)
    assert bounds(S * T) == (2, 20)
    assert bounds(S // 2) == (0, 2)
    assert bounds(n % 8) == (0, 7)
    assert bounds(dim_min(n, 128)) == (1, 128)
    assert bounds(dim_max(n, 128)) == (128, None)
    assert bounds(10 - S) == (5, 9)


def test_known_facts() -> None:
    n = sym("N")
    assert known_le(n, n + 1)
    assert known_le(n // 2, n // 2)
    assert known_le(-1, (n // 4 - 1) // 2)  # a quotient may be negative
    assert known_le(0, (n // 4 - 1) // 2 + 1)
    assert not known_le(0, (n // 4 - 1) // 2)
    assert not known_le(n, 5)
    assert known_positive(n)
    assert not known_positive(n - 1)
    assert known_positive(n + 1)


# ---- substitution and solving


def test_unknown_symbols_stay() -> None:
    assert substitute(S * T + 1, {"S": 3}) == 3 * T + 1
    assert substitute(S + T, {"S": T}) == 2 * T
    assert substitute(5, {"S": 3}) == 5


@pytest.mark.parametrize("value", [0, 6, -1])
def test_a_value_outside_its_bounds_is_named(value: int) -> None:
    with pytest.raises(SymbolError) as caught:
        substitute(S + 1, {"S": value})
    assert (caught.value.summary, caught.value.code) == (f"size S = {value} is outside its bounds 1..5", "S153")


def test_numpy_integers_are_sizes() -> None:
    three: Any = np.int64(3)
    assert S + three == three + S == S + 3
    assert S * three == three * S == 3 * S
    assert S - three == S - 3
    assert three - S == 3 - S
    assert S // three == S // 3
    assert S % three == S % 3
    result = substitute(S + 1, {"S": three})
    assert result == 4
    assert type(result) is int


@pytest.mark.parametrize("other", [1.5, 0.0, "2", None, [1]])
def test_other_kinds_are_refused(other: Any) -> None:
    for f in (operator.add, operator.sub, operator.mul, operator.floordiv):
        for a, b in ((S, other), (other, S)):
            with pytest.raises((TypeError, SymbolError)):  # Python asks a list or string times S for an index
                f(a, b)


@given(st.integers(1, 9), st.integers(-9, 9), st.integers(1, 5))
def test_solving_inverts_substitution(c: int, d: int, value: int) -> None:
    pattern = c * S + d
    assert solve_for(pattern, c * value + d) == ("S", value)


def test_solving_declines() -> None:
    assert solve_for(2 * S, 5) is None
    assert solve_for(S * T, 4) is None
    assert solve_for(S + T, 4) is None
    assert solve_for(S // 2, 1) is None
    assert solve_for(4, 4) is None


def test_static_product() -> None:
    assert static_prod([2, 3, 4]) == 24
    assert static_prod([]) == 1
    assert static_prod([2, S]) is None


# ---- mistakes


def test_has_no_truth_value_and_no_index() -> None:
    with pytest.raises(SymbolError, match="has no truth value"):
        bool(S)
    with pytest.raises(SymbolError, match="is symbolic; a number is needed here"):
        range(S)
    assert issubclass(SymbolError, ShapeError)


@pytest.mark.parametrize("name", ["", "2x", "a b", "min", "max", "a-b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(OptionError, match="cannot name a size"):
        sym(name)


@pytest.mark.parametrize(("lo", "hi"), [(-1, None), (5, 4)])
def test_bad_bounds(lo: int, hi: int | None) -> None:
    with pytest.raises(OptionError, match="not an interval"):
        sym("N", lo, hi)


@pytest.mark.parametrize("text", ["", "S +", "S S", "S + $", "(S", "min(S)", "min(S, 2", "S)", "2S", "* S", "1.5"])
def test_unreadable_text(text: str) -> None:
    with pytest.raises(ParseError):
        parse_dim(text)


@pytest.mark.parametrize("size", [S, S + T, 4])
def test_division_by_zero_is_a_strata_error(size: Dim) -> None:
    for divide in (floordiv, mod):
        with pytest.raises(OptionError, match="division by zero"):
            divide(size, 0)
    with pytest.raises(OptionError, match="division by zero"):
        parse_dim("S // 0")


def test_copies_are_equal() -> None:
    for size in (sym("A"), sym("A") // 2, dim_min(sym("A") % 3, sym("B") + 1)):
        made = copy.deepcopy(size)
        assert made == size
        assert hash(made) == hash(size)


def test_parsed_symbols_take_known_bounds() -> None:
    assert parse_dim("S + 1", KNOWN) == S + 1
    assert parse_dim("S + 1") == sym("S") + 1
    assert parse_dim("S + 1") != S + 1  # other bounds, another symbol


@given(trees)
def test_sizes_are_ints_or_expressions(tree: Tree) -> None:
    assume(not isinstance(tree.dim, int))
    assert isinstance(tree.dim, SymExpr)
    assert symbols(tree.dim)
