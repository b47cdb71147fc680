"""Where NaN gets to anyway: maxima may then leave it out, and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import Target, f32, f64
from strata.kernel import Kernel, KernelBuilder, Scalar, interpret, is_below, need_no_nan, normalize, postorder

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
ROWS = 9


def made(columns: int, value: Callable[..., Any], dtype: Any = f32) -> Kernel:
    k = KernelBuilder("rows")
    x = k.input("x", dtype[ROWS, columns])
    k.output("y", dtype[ROWS, columns], lambda ix: value(k, columns, lambda j: x[ix[0], j], ix[1]))
    return k.build()


def softmax(k: Any, size: int, row: Any, j: Any) -> Any:
    high = k.reduce("max", size, row)
    return k.exp(row(j) - high) / k.reduce("sum", size, lambda i: k.exp(row(i) - high))


def log_softmax(k: Any, size: int, row: Any, j: Any) -> Any:
    high = k.reduce("max", size, row)
    return row(j) - high - k.log(k.reduce("sum", size, lambda i: k.exp(row(i) - high)))


def from_least(k: Any, size: int, row: Any, j: Any) -> Any:
    low = k.reduce("min", size, row)
    return (row(j) - low) / k.reduce("sum", size, lambda i: row(i) - low)


def no_sum(k: Any, size: int, row: Any, j: Any) -> Any:
    return k.exp(row(j) - k.reduce("max", size, row))


def a_choice(k: Any, size: int, row: Any, j: Any) -> Any:
    """The sum is NaN, and not used where it is not above 1."""
    high = k.reduce("max", size, row)
    total = k.reduce("sum", size, lambda i: k.exp(row(i) - high))
    return k.select(total > k.const(1.0, total.dtype), total, high + row(j) * k.const(0.0, total.dtype))


def other_terms(k: Any, size: int, row: Any, j: Any) -> Any:
    """The sum is of signs, which NaN has too."""
    high = k.reduce("max", size, row)
    one = k.const(1.0, high.dtype)
    return row(j) * high / (one + k.reduce("sum", size, lambda i: k.copysign(one, row(i))))


FREE = {"softmax": softmax, "log_softmax": log_softmax, "from_least": from_least}
BOUND = {"no_sum": no_sum, "a_choice": a_choice, "other_terms": other_terms}


@pytest.mark.parametrize("name", FREE)
def test_a_sum_brings_nan_to_every_result(name: str) -> None:
    assert len(need_no_nan(normalize(made(40, FREE[name])))) == 1


@pytest.mark.parametrize("name", BOUND)
def test_nothing_else_brings_it(name: str) -> None:
    assert not need_no_nan(normalize(made(40, BOUND[name])))


def test_distances_to_the_largest_are_not_above_zero() -> None:
    exponents = [
        {
            is_below(n.args[0])
            for n in postorder(normalize(made(40, form)).roots)
            if isinstance(n, Scalar) and n.name == "exp"
        }
        for form in (softmax, no_sum, from_least)
    ]
    assert exponents == [{True}, {True}, set()]


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [1, 5, 16, 64, 100, 333])
def test_rows_with_nan_and_infinities(columns: int, target: str, dtype: Any) -> None:
    rng = np.random.default_rng(columns)
    x = (rng.standard_normal((ROWS, columns)) * 30).astype(dtype.np)
    for row, value in enumerate((np.nan, np.inf, -np.inf, -200.0, 1e30, -np.nan)):
        x[row, rng.integers(columns)] = value
    x[6] = -np.inf
    x[7] = np.nan
    for name, form in (FREE | BOUND).items():
        kernel = made(columns, form, dtype)
        with np.errstate(all="ignore"):
            (wanted,) = interpret(kernel, [x], {})
        (got,) = compile_kernel(kernel, Target.named(target))(x)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
