"""A slice of the mutants of kernel texts and schedules: refused, or equal to the interpreter; and what they found."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata.core import Target, as_dtype
from strata.errors import DTypeError, LowerError, ParseError, StrataError, VerifyError
from strata.kernel import normalize, parse_kernel, parse_schedule, verify_kernel
from strata.ops import kernel_text
from tests.fuzz.mutate.kernels import run, seeds

ROW = "kernel @k(x: {x}) -> y: f32[8] {{\n  axis i in 8\n  axis j in 8\n{lines}\n}}"


@pytest.mark.parametrize("first", [0, 100, 50_000])
def test_mutants_are_refused_or_right(first: int) -> None:
    found = run(100, first)
    assert found["equal"] > 10
    assert found["refused"] > 10


@pytest.mark.parametrize("target", ["avx2", "baseline"])
def test_mutants_on_other_instruction_sets(target: str) -> None:
    if not Target.named(target).runs_on(Target.host()):
        pytest.skip(f"this processor has no {target}")
    assert run(60, 70_000, target=target)["equal"] > 5


@pytest.mark.parametrize("at", range(len(seeds())))
def test_the_texts_that_are_mutated_are_sound(at: int) -> None:
    kernel_text(seeds()[at])


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "\n\n", "}", "{", "kernel", "kernel @k", "kernel @k() -> y: f32[] {",
        "kernel @k() -> y: f32[] {\n}extra",
        "kernel @k(x: f32[3] rubbish) -> y: f32[] {\n}", "kernel @k(x: f32[3], x: f32[3]) -> y: f32[] {\n}",
        "kernel @k(x: f32[N]) -> y: f32[] {\n}", "kernel @k(x: f32[-3]) -> y: f32[] {\n}",
        "kernel @k(x: 032[3]) -> y: f32[] {\n}", "kernel @k(x: f33[3]) -> y: f32[] {\n}",
        "kernel @k(x: f32[1//0]) -> y: f32[] {\n}", f"kernel @k(x: f32[{'9' * 5000}]) -> y: f32[] {{\n}}",
        f"kernel @k(x: f32[{'(' * 4000}3{')' * 4000}]) -> y: f32[] {{\n}}", "kernel @é() -> y: f32[] {\n}",
        "kernel @k() -> y: f32[] {\n  size N in 3..1\n}",
        "kernel @k() -> y: f32[] {\n  size N in 1..\n  size N in 1..\n}",
        "kernel @k() -> y: f32[] {\n  schedule parallel 1\n}", "kernel @k() -> y: f32[] {\n  schedule a; b\n}",
        f"kernel @k() -> y: f32[] {{\n  schedule parallel {'9' * 5000} grain 1\n}}",
        "kernel @k() -> y: f32[] {\n  axis i in 3\n  axis i.2 in 3\n}",
    ],
)  # fmt: skip
def test_what_is_no_kernel_cannot_be_read(text: str) -> None:
    with pytest.raises(ParseError):
        parse_kernel(text)


@pytest.mark.parametrize(
    "lines",
    [
        "%0 = x[i]\n%0 = x[j]", "%0 = 99999999999999999999999999:i64", "store y[i] = 99999999999999999999 over i",
        "store y[i] = abc:f32 over i", "%0 = cast(i)", "%0 = exp.f32(i)", "%0 = add(i)", "%0 = x[i] where",
        "store y[i] = %7 over i", "%0 = sum %1 over i", "%0 = scan sum i over j at i", "store z[i] = 1.0:f32 over i",
    ],
)  # fmt: skip
def test_lines_that_cannot_be_read(lines: str) -> None:
    with pytest.raises(ParseError):
        parse_kernel(ROW.format(x="f32[8]", lines=lines))


@pytest.mark.parametrize(
    ("x", "lines"),
    [
        ("f32[8]", "%0 = x[i]\n%1 = and(%0, %0)\nstore y[i] = %1 over i"),
        ("i32[8]", "%0 = x[i]\n%1 = exp(%0)\n%2 = cast.f32(%1)\nstore y[i] = %2 over i"),
        ("i4[8]", "%0 = x[i]\n%1 = add(%0, %0)\n%2 = cast.f32(%1)\nstore y[i] = %2 over i"),
        ("bool[8]", "%0 = x[i]\n%1 = sum %0 over i\n%2 = cast.f32(%1)\nstore y[j] = %2 over j"),
        ("c64[8]", "%0 = x[i]\n%1 = max %0 over i\n%2 = real(%1)\nstore y[j] = %2 over j"),
        ("f32[8]", "%0 = x[i]\n%1 = any %0 over i\n%2 = cast.f32(%1)\nstore y[j] = %2 over j"),
        ("f64[8]", "%0 = x[i]\n%1 = bitcast.f32(%0)\nstore y[i] = %1 over i"),
        ("f16[8]", "%0 = x[i]\n%1 = complex(%0, %0)\n%2 = real(%1)\nstore y[i] = %2 over i"),
        ("f32[8]", "%0 = x[i]\n%1 = add(%0, i)\nstore y[i] = %1 over i"),
        ("f32[8]", "%0 = x[i, j]\nstore y[i] = %0 over i"),
        ("f32[8]", "%0 = x[i]\nstore y[i] = %0 over j"),
        ("f32[8]", "%0 = x[i]\nstore y[i] = %0 over i, i"),
        ("f32[8]", "%0 = y[i]\nstore y[i] = %0 over i"),
        ("f32[8]", "%0 = x[i]\nstore x[i] = %0 over i"),
        ("f64[8]", "%0 = x[i]\nstore y[i] = %0 over i"),
        ("f32[8]", "%0 = x[i]\n%1 = x[%0]\nstore y[i] = %1 over i"),
        ("f32[99999999999999999]", "%0 = x[i]\nstore y[i] = %0 over i"),
        ("f32[8]", "%0 = x[i]\n%1 = sum %0 over i, i\nstore y[j] = %1 over j"),
    ],
)
def test_kernels_that_break_a_rule(x: str, lines: str) -> None:
    with pytest.raises(VerifyError):
        verify_kernel(parse_kernel(ROW.format(x=x, lines=lines)))


def test_a_running_sum_of_what_depends_on_its_place_is_refused() -> None:
    text = ROW.format(x="f32[8, 8]", lines="%0 = x[i, j]\n%1 = scan sum %0 over j through i\nstore y[i] = %1 over i")
    with pytest.raises(VerifyError, match="depends on the axis along which it is read"):
        st.custom_op(text)
    with pytest.raises(LowerError, match="depends on the axis along which it is read"):
        normalize(parse_kernel(text))


def test_a_remainder_by_zero_is_zero() -> None:
    text = """kernel @k(x: i64[8]) -> y: i64[8] {
  axis i in 8
  %0 = add(i, 5)
  %1 = mod(%0, 0)
  %2 = mul(%1, 3)
  %3 = add(%2, i)
  %4 = lt(%3, %1)
  %5 = x[i]
  %6 = select(%4, %5, %3)
  store y[i] = %6 over i
}"""
    np.testing.assert_array_equal(st.custom_op(text)(np.arange(8)).numpy(), np.arange(8))


def test_an_axis_is_not_split_by_a_negative_number() -> None:
    text = """kernel @k(x: f32[48]) -> y: f32[48] {
  axis i in 48
  %0 = floordiv(i, -2)
  %1 = add(%0, 24)
  %2 = x[%1]
  store y[i] = %2 over i
}"""
    x = np.arange(48, dtype=np.float32)
    np.testing.assert_array_equal(st.custom_op(text)(x).numpy(), x[np.arange(48) // -2 + 24])


def test_a_buffer_that_two_loops_read_at_places_of_their_own() -> None:
    """What is asked for ahead is a place of this loop, not that of the other reduction along the same axis."""
    assert run(1, 300_226)["equal"] == 1


def test_strange_names_of_types_are_refused() -> None:
    for name in ("032", "f4,f4", "3i4", "(2,)f4", "<", ""):
        with pytest.raises(DTypeError):
            as_dtype(name)


@pytest.mark.parametrize(
    "text", ["parallel", "parallel -1 grain 1", "vectorise 0", "x" * 10_000, "stage 1 2", "prefetch"]
)
def test_schedules_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ParseError):
        parse_schedule(text)
    with pytest.raises(StrataError):
        parse_schedule(f"stage {'9' * 5000}")
