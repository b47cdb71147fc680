"""Reductions of short rows written out: the same numbers as NumPy, NaN and ties included, and when they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import DType, Target, bool_, f16, f32, f64, i8, i32, i64, sym
from strata.kernel import KernelBuilder, Reduce, normalize, postorder
from strata.kernel.passes.short_sums import unroll_short_reductions

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
KINDS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "argmax": np.argmax, "argmin": np.argmin}


def rows(kind: str, dtype: DType, width: int) -> Any:
    k = KernelBuilder("k")
    x = k.input("x", dtype[sym("n"), width])
    result = i64 if kind.startswith("arg") else dtype
    k.output("y", result[sym("n")], lambda ix: k.reduce(kind, (width,), lambda j: x[ix[0], j]))
    return k.build()


@pytest.mark.few(90)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [f32, f64, i8, i32, i64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results(kind: str, dtype: DType, width: int, target: str) -> None:
    rng = np.random.default_rng(width)
    compiled = compile_kernel(rows(kind, dtype, width), Target.named(target))
    for n in (1, 7, 64, 203):
        x = rng.integers(-4, 4, (n, width)).astype(dtype.np)
        if dtype.is_float and kind not in ("sum", "prod"):
            x[rng.random(x.shape) < 0.1] = np.nan
        (got,) = compiled(x)
        wanted = KINDS[kind](x, axis=1) if kind not in ("sum", "prod") else KINDS[kind](x, axis=1, dtype=dtype.np)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", ["all", "any"])
def test_booleans(kind: str) -> None:
    x = np.random.default_rng(0).random((130, 4)) < 0.6
    (got,) = compile_kernel(rows(kind, bool_, 4))(x)
    np.testing.assert_array_equal(got, getattr(np, kind)(x, axis=1))


@pytest.mark.parametrize(
    ("dtype", "width", "is_written_out"), [(f32, 8, True), (f32, 9, False), (f16, 4, False), (i32, 2, True)], ids=str
)
def test_which_are_written_out(dtype: DType, width: int, is_written_out: bool) -> None:
    """Long rows keep their loop, and so do types that would be rounded at every step."""
    made = unroll_short_reductions(normalize(rows("sum", dtype, width)))
    assert is_written_out is not any(isinstance(n, Reduce) for n in postorder(made.roots))


def test_rows_side_by_side_keep_their_loop() -> None:
    k = KernelBuilder("k")
    x = k.input("x", f32[4, sym("n")])
    k.output("y", f32[sym("n")], lambda ix: k.reduce("sum", (4,), lambda j: x[j, ix[0]]))
    normal = normalize(k.build())
    assert unroll_short_reductions(normal) is normal
