"""strata/core/dtypes.py: names, NumPy forms and promotion."""

from __future__ import annotations

import copy
import itertools

import ml_dtypes
import numpy as np
import pytest

from strata.core import (
    ALL_DTYPES,
    DType,
    as_dtype,
    bf16,
    bool_,
    c64,
    c128,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i4,
    i8,
    i16,
    i32,
    i64,
    promote,
    promote_all,
    u4,
    u8,
    u16,
    u32,
    u64,
)
from strata.errors import DTypeError

PAIRS = list(itertools.product(ALL_DTYPES, repeat=2))


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        (i8, i16, i16),
        (i32, i64, i64),
        (i32, f32, f32),
        (i64, f32, f64),
        (i8, f16, f32),
        (i8, bf16, f32),
        (f16, bf16, f32),
        (f16, f32, f32),
        (bf16, f32, f32),
        (f32, f64, f64),
        (i8, f64, f64),
        (i64, f16, f64),
        (bool_, i8, i8),
        (bool_, f16, f16),
        (u8, i8, i16),
        (u16, i16, i32),
        (u32, i32, i64),
        (u8, i32, i32),
        (u8, u32, u32),
        (u64, i64, f64),
        (i4, u4, i8),
        (i4, i8, i8),
        (f8e4m3, f16, f16),
        (f8e4m3, f8e5m2, f32),
        (f32, c64, c64),
        (f64, c64, c128),
        (i64, c64, c128),
        (c64, c128, c128),
    ],
)
def test_promotion_table(a: DType, b: DType, result: DType) -> None:
    assert promote(a, b) is result


@pytest.mark.parametrize("a", ALL_DTYPES, ids=str)
def test_promotion_laws(a: DType) -> None:
    assert promote(a, a) is a
    for b in ALL_DTYPES:
        both = promote(a, b)
        assert both is promote(b, a)
        assert promote(a, both) is both  # the common type takes each operand in


@pytest.mark.parametrize(("a", "b"), [p for p in PAIRS if all(t.is_int and t.bits >= 8 for t in p)], ids=str)
def test_integers_promote_as_numpy_does(a: DType, b: DType) -> None:
    assert promote(a, b).np == np.promote_types(a.np, b.np)


def test_promote_all() -> None:
    assert promote_all([i8]) is i8
    assert promote_all([bool_, i8, i16, f32]) is f32


@pytest.mark.parametrize("t", ALL_DTYPES, ids=str)
def test_every_spelling_is_the_same_object(t: DType) -> None:
    assert as_dtype(t) is t
    assert as_dtype(t.name) is t
    assert as_dtype(t.long_name) is t
    assert as_dtype(t.np) is t
    assert as_dtype(t.np.type) is t
    assert as_dtype(np.zeros(1, t.np).dtype) is t


@pytest.mark.parametrize(
    ("like", "t"),
    [
        (bool, bool_),
        (int, i64),
        (float, f32),
        (complex, c64),
        (np.float32, f32),
        (">f4", f32),
        ("<i8", i64),
        (ml_dtypes.bfloat16, bf16),
    ],
)
def test_spellings_from_elsewhere(like: object, t: DType) -> None:
    assert as_dtype(like) is t


@pytest.mark.parametrize("like", ["float33", "", None, object, [1], {"f32"}, "U5", "datetime64[s]", 3])
def test_not_a_dtype(like: object) -> None:
    with pytest.raises(DTypeError, match="is not an element type; known: bool, "):
        as_dtype(like)


@pytest.mark.parametrize("t", ALL_DTYPES, ids=str)
def test_classes_are_disjoint(t: DType) -> None:
    assert [t.is_bool, t.is_int, t.is_float, t.is_complex].count(True) == 1
    assert t.is_inexact == (t.is_float or t.is_complex)
    assert t.itemsize == max(1, t.bits // 8)
    assert t.real.is_complex is False


def test_accumulators() -> None:
    assert [t.accumulator for t in (f8e4m3, f16, bf16, f32, f64)] == [f32, f32, f32, f32, f64]
    assert [t.accumulator for t in (i8, i16, i32, i64)] == [i32, i32, i32, i64]
    assert c64.accumulator is c64
    for t in ALL_DTYPES:
        assert promote(t, t.accumulator) is t.accumulator  # holds every value of t


def test_copies_are_the_same_object() -> None:
    assert copy.deepcopy({"t": f32})["t"] is f32
    assert copy.copy(f32) is f32


def test_unsigned_types_are_not_signed() -> None:
    assert not any(t.is_signed for t in (bool_, u4, u8, u16, u32, u64))
    assert all(t.is_signed for t in (i4, i8, i64, f32, c128))
