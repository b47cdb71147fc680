"""Sizes that grow when they are multiplied out or are nested without end: refused with a budget or a typed error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.core import Dim, floordiv, mod, parse_dim, substitute, sym
from strata.errors import BudgetError, ParseError, StrataError, SymbolError

PRODUCT = "*".join(f"(A{i} + B{i})" for i in range(24))


@pytest.mark.parametrize(
    "text",
    [
        PRODUCT, "*".join(["A"] * 20_000), "*".join(f"A{i}" for i in range(3_000)), "(A + B + C)*(D + E)*" + PRODUCT,
        "min(A, " + PRODUCT + ")", "(" + PRODUCT + ") // 2", "*".join(["(A + B + C + D + E + F + G + H)"] * 30),
    ],
)  # fmt: skip
def test_products_have_a_budget(text: str) -> None:
    with pytest.raises(BudgetError, match="max_terms, which is 4,096") as caught:
        parse_dim(text)
    assert caught.value.setting == "max_terms"


def test_the_budget_is_a_setting() -> None:
    text = "*".join(f"(A{i} + B{i})" for i in range(8))
    assert len(parse_dim(text).terms) == 256  # type: ignore[union-attr]
    with using(max_terms=100), pytest.raises(BudgetError, match="max_terms, which is 100"):
        parse_dim(f"({text}) + 0")


def test_products_that_fall_together_are_not_long() -> None:
    power = parse_dim("*".join(["(A + 1)"] * 60))
    assert len(power.terms) == 61  # type: ignore[union-attr]
    assert substitute(power, {"A": 1}) == 2**60


def test_a_long_sum_is_read_and_bound() -> None:
    text = " + ".join(f"A{i}" for i in range(3_000))
    total = parse_dim(text)
    assert substitute(total, {f"A{i}": i + 1 for i in range(3_000)}) == 3_000 * 3_001 // 2


@pytest.mark.parametrize(
    "text",
    ["(" * 5_000 + "A" + ")" * 5_000, "9" * 5_000, "min(A, " * 5_000 + "B" + ")" * 5_000, "(" * 500 + "A", "(" * 300],
)  # fmt: skip
def test_what_is_too_deep_or_long_cannot_be_read(text: str) -> None:
    with pytest.raises(ParseError):
        parse_dim(text)


@pytest.mark.parametrize("text", ["//".join(["A"] * 5_000), " % ".join(["A", *["(B + C)"] * 5_000])])
def test_divisions_inside_each_other_have_an_end(text: str) -> None:
    with pytest.raises(SymbolError, match="inside each other"):
        parse_dim(text)


def _below(frames: int, call: Callable[[], object]) -> object:
    return call() if frames == 0 else _below(frames - 1, call)


@pytest.mark.parametrize("sign", ["//", " % "])
def test_equal_deep_sizes_are_equal_however_much_stack_is_left(sign: str) -> None:
    """A size of which an equal one is known already is not compared part by part."""

    def deep() -> Dim:
        value: Dim = sym("A")
        for i in range(128):
            value = floordiv(value, sym(f"B{i}")) if sign == "//" else mod(sym(f"B{i}"), value + 1)
        return value

    first = deep()
    assert _below(400, lambda: deep() == first and hash(deep()) == hash(first)) is True


def test_many_signs() -> None:
    assert parse_dim("-" * 10_000 + "A") == sym("A")
    assert parse_dim("-" * 10_001 + "A") == -sym("A")


@pytest.mark.parametrize("size", [PRODUCT, "(" * 5_000 + "A" + ")" * 5_000, "9" * 5_000, "//".join(["A"] * 5_000)])
@pytest.mark.parametrize("kind", ["mir", "hir", "kernel"])
def test_texts_with_such_sizes_are_refused(size: str, kind: str) -> None:
    texts = {
        "mir": f"mir @m(x: f32[{size}]) -> f32[3] {{\n  return x\n}}",
        "hir": f"hir @m(x: f32[{size}]) -> f32[3] fusion direct {{\n  return x\n}}",
        "kernel": f"kernel @k(x: f32[{size}]) -> y: f32[3] {{\n}}",
    }
    with pytest.raises(StrataError):
        st.parse(texts[kind])


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_sizes_that_no_input_tells_and_that_do_not_fit(device: str) -> None:
    """The maximum of two unknown sizes cannot be computed from a shape: the op says that the arrays do not fit."""
    g = st.parse(
        "mir @m(x: f32[3, 4], y: f32[max(A, B), 5]) -> f32[3, 5] {\n  %0 = matmul(x, y) : f32[3, 5]\n  return %0\n}"
    )
    with pytest.raises(StrataError):
        st.Session(device).compile(g).run(x=np.ones((3, 4), np.float32), y=np.ones((1, 5), np.float32))
