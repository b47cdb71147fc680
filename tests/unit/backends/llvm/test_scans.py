"""Running reductions over the lanes of registers: kinds, types, directions, tails, places inside a line, threads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import CompiledKernel, compile_kernel, lower
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.core import DType, Target, bf16, bool_, c64, f16, f32, f64, i8, i32, sym
from strata.kernel import Expr, Kernel, KernelBuilder, parse_schedule

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
ROWS, COLUMNS = sym("R", 0), sym("C", 0)
LENGTHS = (0, 1, 2, 7, 16, 17, 63, 64, 100, 333)


def running(kind: str, dtype: DType, *, reverse: bool = False, exclusive: bool = False) -> Kernel:
    k = KernelBuilder("running")
    x = k.input("x", dtype[ROWS, COLUMNS])

    def value(index: tuple[Expr, ...]) -> Expr:
        last = k.index(COLUMNS) - 1
        position = last - index[1] if reverse else index[1]
        return k.scan(
            kind, COLUMNS, lambda j: x[index[0], last - j if reverse else j], position, exclusive=exclusive
        )  # fmt: skip

    k.output("y", dtype[ROWS, COLUMNS], value)
    return k.build()


def draw(kind: str, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype.is_float and kind == "prod":
        return (1 + rng.standard_normal(shape) / 64).astype(dtype.np)
    if dtype.is_complex:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype.np)
    return (rng.standard_normal(shape) * (1 if dtype.is_float else 5)).astype(dtype.np)


def expected(kind: str, x: np.ndarray, reverse: bool, exclusive: bool, start: float) -> np.ndarray:
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64 if x.dtype.kind in "fV" else x.dtype)
    wide = np.flip(wide, 1) if reverse else wide
    with np.errstate(all="ignore"):
        found = UFUNCS[kind].accumulate(wide, axis=1, dtype=wide.dtype)
    if exclusive:
        found = np.roll(found, 1, 1)
        found[:, :1] = start
    return np.flip(found, 1) if reverse else found


def check(native: CompiledKernel, kind: str, dtype: DType, *, reverse: bool = False, exclusive: bool = False) -> None:
    start = {"sum": 0, "prod": 1, "max": -np.inf, "min": np.inf}[kind]
    tolerance = {"f16": 2e-2, "bf16": 1e-1, "f64": 1e-11}.get(dtype.name, 1e-4)
    for columns in LENGTHS:
        x = draw(kind, dtype, (5, columns))
        (got,) = native.run([x], sizes={"R": 5, "C": columns}, threads=1)
        wanted = expected(kind, x, reverse, exclusive, start)
        if dtype.is_float or dtype.is_complex:
            kept = np.complex128 if dtype.is_complex else np.float64
            np.testing.assert_allclose(got.astype(kept), wanted, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, wanted)
        for threads in (2, 7):
            (again,) = native.run([x], sizes={"R": 5, "C": columns}, threads=threads)
            assert again.tobytes() == got.tobytes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("sum", f32), ("sum", f64), ("sum", i32), ("sum", i8), ("sum", c64), ("sum", f16), ("sum", bf16),
        ("prod", f32), ("prod", f64), ("prod", i32), ("prod", c64), ("max", f32), ("max", i32),
        ("min", f64), ("min", i8),
    ],
)  # fmt: skip
def test_kinds_and_types(kind: str, dtype: DType, target: str) -> None:
    native = compile_kernel(running(kind, dtype), Target.named(target))
    assert target == "baseline" or native.lowered.schedule.lanes(1) > 1  # two lanes are not worth it
    check(native, kind, dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("sum", f32), ("prod", f64), ("max", f32), ("sum", c64), ("sum", i8)])
def test_directions(kind: str, dtype: DType, exclusive: bool, reverse: bool, target: str) -> None:
    kernel = running(kind, dtype, reverse=reverse, exclusive=exclusive)
    check(compile_kernel(kernel, Target.named(target)), kind, dtype, reverse=reverse, exclusive=exclusive)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["sum", "prod", "max"])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_past_the_caches_at_any_place(shift: int, kind: str, target: str) -> None:
    schedule = parse_schedule("parallel 1 grain 2; vectorise 1 by 32; nontemporal y")
    native = compile_kernel(running(kind, f32), Target.named(target), schedule)
    for columns in LENGTHS:
        x = draw(kind, f32, (5, columns))
        memory = np.zeros(x.size + shift + 64, np.float32)
        out = memory[shift : shift + x.size]
        block = native.arguments([x, out], {"R": 5, "C": columns})
        default_pool().parallel(native.address, ctypes.addressof(block), 5, 2, 2)
        np.testing.assert_allclose(
            out.reshape(5, columns), expected(kind, x, reverse=False, exclusive=False, start=0), rtol=1e-4, atol=1e-4
        )
        assert not memory[:shift].any()
        assert not memory[shift + x.size :].any()


def test_nan_and_infinity_stay_behind_their_place() -> None:
    nan, inf = float("nan"), float("inf")
    row = np.ones((1, 40), np.float32)
    row[0, 20], row[0, 30] = inf, nan
    for kind in ("sum", "prod", "max", "min"):
        (got,) = compile_kernel(running(kind, f32))(row, sizes={"R": 1, "C": 40})
        np.testing.assert_array_equal(got, UFUNCS[kind].accumulate(row, axis=1))


def test_several_at_once_and_what_is_computed_from_them() -> None:
    """Two running reductions and values of their own row, in one loop."""
    k = KernelBuilder("both")
    x, y = k.input("x", f32[ROWS, COLUMNS]), k.input("y", f32[ROWS, COLUMNS])

    def value(index: tuple[Any, ...]) -> Expr:
        total = k.scan("sum", COLUMNS, lambda j: x[index[0], j] * y[index[0], j], index[1])
        top = k.scan("max", COLUMNS, lambda j: x[index[0], j], index[1])
        return total * 2 + top - x[index]

    k.output("z", f32[ROWS, COLUMNS], value)
    native = compile_kernel(k.build())
    a, b = draw("sum", f32, (5, 100)), draw("sum", f32, (5, 100))[::-1].copy()
    (got,) = native(a, b)
    wanted = np.cumsum(a.astype(np.float64) * b, 1) * 2 + np.maximum.accumulate(a, 1) - a
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_not_joined_over_lanes() -> None:
    k = KernelBuilder("any")
    x = k.input("x", bool_[ROWS, COLUMNS])
    k.output("y", bool_[ROWS, COLUMNS], lambda ix: k.scan("any", COLUMNS, lambda j: x[ix[0], j], ix[1]))
    assert lower(k.build(), Target.host()).schedule.lanes(1) == 1
    flags = np.random.default_rng(0).integers(0, 9, (5, 50)) == 0
    (got,) = compile_kernel(k.build())(flags)
    np.testing.assert_array_equal(got, np.logical_or.accumulate(flags, axis=1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_long_running_sums_do_not_drift(target: str, dtype: DType, reverse: bool, exclusive: bool) -> None:
    """Of equal terms each rounds alike: no more than half a unit in the last place for each step of a block."""
    compiled = compile_kernel(running("sum", dtype, reverse=reverse, exclusive=exclusive), Target.named(target))
    for length in (4096, 4097, 300_001):
        x = np.full((1, length), 0.1, dtype.np)
        (got,) = compiled(x)
        count = np.arange(length) + (0 if exclusive else 1)
        want = float(x[0, 0]) * count
        np.testing.assert_allclose(got[0, ::-1] if reverse else got[0], want, rtol=128 * float(np.finfo(dtype.np).eps))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fill", [np.inf, -np.inf, np.nan, 3e38])
def test_long_running_sums_without_end(target: str, fill: float) -> None:
    compiled = compile_kernel(running("sum", f32), Target.named(target))
    for places in ((5,), (4096,), (9000, 20_000), (30_000,)):
        x = np.ones((2, 30_001), np.float32)
        x[0, list(places)] = fill
        (got,) = compiled(x)
        with np.errstate(over="ignore", invalid="ignore"):
            want = np.cumsum(x, axis=1)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 3, 16, 70])
def test_long_columns_do_not_drift(columns: int) -> None:
    k = KernelBuilder("columns")
    x = k.input("x", f32[50_000, columns])
    k.output(
        "y",
        f32[50_000, columns],
        lambda index: k.scan("sum", 50_000, lambda j: x[j, index[1]], index[0]),
    )
    given = np.full((50_000, columns), 0.1, np.float32) * np.arange(1, columns + 1, dtype=np.float32)
    (got,) = compile_kernel(k.build(), Target.host())(given)
    np.testing.assert_allclose(got, given[0].astype(np.float64) * np.arange(1, 50_001)[:, None], rtol=1.6e-5)
