"""Floats that are rounded to codes: what is found, and generated code against the interpreter, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import DType, Target, f32, i8, i16, i32, u8, u16
from strata.kernel import Const, Expr, Kernel, KernelBuilder, QuantCode, apply, code_of, interpret

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
DTYPES = (i8, u8, i16, u16)
SHIFTS = (0, 128, 127, -3, 40000)  # the last is beyond a zero point: plain casts


def _code(x: Expr, dtype: DType, shift: float) -> Expr:
    return apply("cast", apply("add", apply("round", x), Const(shift, f32)), dtype=dtype)


def _back(code: Expr, zero: int) -> Expr:
    less = apply("sub", apply("cast", code, dtype=i32), Const(zero, i32))
    return apply("cast", less, dtype=f32)


def _relu(x: Expr) -> Expr:
    return apply("select", apply("lt", x, Const(0.0, f32)), Const(0.0, f32), x)


def _kernel(length: int, dtype: DType, shift: int) -> Kernel:
    """Codes of x, of what is positive in it, and what both mean."""
    k = KernelBuilder("codes")
    x = k.input("x", f32[length,])

    def values(i: Expr) -> tuple[Expr, ...]:
        plain, positive = _code(x[i], dtype, shift), _code(_relu(x[i]), dtype, 0)
        return plain, positive, _back(plain, shift), _back(plain, 7), apply("cast", positive, dtype=f32)

    for n, result in enumerate((dtype, dtype, f32, f32, f32)):
        k.output(f"y{n}", result[length,], lambda ix, n=n: values(ix[0])[n])
    return k.build()


def _numbers() -> Any:
    rng = np.random.default_rng(5)
    halves = np.arange(-70000, 70000, 0.5)  # every tie, and both sides of it
    near = np.concatenate([np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf)])
    edges = [0.0, -0.0, -0.5, 0.5, np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 2.0**31, -(2.0**31), 2.0**32]
    return np.concatenate([halves, near, rng.normal(size=1003) * 200, edges]).astype(np.float32)


@pytest.mark.few(15)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_interpreter(dtype: DType, shift: int, target: str) -> None:
    x = _numbers()
    kernel = _kernel(len(x), dtype, shift)
    with np.errstate(all="ignore"):
        expected = interpret(kernel, [x])
    for got, wanted in zip(compile_kernel(kernel, Target.named(target))(x), expected, strict=True):
        bits = f"u{got.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(bits), wanted.view(bits))


def _x() -> Expr:
    k = KernelBuilder("x")
    x = k.input("x", f32[8,])
    return x[k.axes((8,))[0]]


def test_what_is_a_code() -> None:
    x = _x()
    assert code_of(_code(x, u8, 128)) == QuantCode(x, 128, u8)
    assert code_of(_back(_code(x, i8, 3), 3)) == QuantCode(x, 3, i8, 3)
    assert code_of(apply("cast", apply("round", x), dtype=u8)) == QuantCode(x, 0, u8)


def test_what_is_below_zero_anyway() -> None:
    x = _x()
    assert code_of(_code(_relu(x), u8, 0)) == QuantCode(x, 0, u8)
    kept = _relu(x)
    assert code_of(_code(kept, u8, 128)) == QuantCode(kept, 128, u8)
    assert code_of(_code(kept, i8, 0)) == QuantCode(kept, 0, i8)


def test_what_is_no_code() -> None:
    x = _x()
    assert code_of(_code(x, u8, 0.5)) is None
    assert code_of(_code(x, u8, np.inf)) is None
    assert code_of(_code(x, i32, 0)) is None
    assert code_of(apply("cast", x, dtype=u8)) is None
