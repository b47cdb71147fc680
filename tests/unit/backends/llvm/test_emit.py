"""Generated code against the interpreter and NumPy: shapes, tails, symbolic sizes, instruction sets, thread counts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import CompiledKernel, compile_kernel
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.core import DType, Target, bf16, bool_, c64, c128, f16, f32, f64, i8, i32, i64, sym, u8
from strata.kernel import KernelBuilder, interpret, show_kernel
from tests.counts import calls
from tests.unit.kernel import samples

ROWS, COLUMNS = sym("R", 0), sym("C", 0)
LENGTHS = (0, 1, 3, 7, 8, 17, 1000)
TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
CASES: dict[str, Callable[[Any, Any], samples.Sample]] = {
    "softmax": samples.softmax,
    "layernorm": samples.layernorm,
    "row_sum": lambda r, c: samples.reduction((r, c), (1,)),
    "row_max": lambda r, c: samples.reduction((r, c), (1,), "max"),
    "row_argmax": lambda r, c: samples.reduction((r, c), (1,), "argmax"),
    "row_argmin": lambda r, c: samples.reduction((r, c), (1,), "argmin"),
    "row_prod_f64": lambda r, c: samples.reduction((r, c), (1,), "prod", f64),
    "row_sum_i32": lambda r, c: samples.reduction((r, c), (1,), "sum", i32),
    "row_min_u8": lambda r, c: samples.reduction((r, c), (1,), "min", i8),
    "row_sum_c64": lambda r, c: samples.reduction((r, c), (1,), "sum", c128),
    "column_sum": lambda r, c: samples.reduction((r, c), (0,)),
    "column_max": lambda r, c: samples.reduction((r, c), (0,), "max"),
    "full_sum": lambda r, c: samples.reduction((r, c), (0, 1)),
    "middle_sum": lambda r, c: samples.reduction((3, r, c), (1,)),
    "outer_sum": lambda r, c: samples.reduction((2, r, c), (0, 2)),
    "transpose": lambda r, c: samples.transpose((r, c), (1, 0)),
    "transpose3": lambda r, c: samples.transpose((r, 4, c), (1, 2, 0)),
    "gather": lambda r, c: samples.gather(4, r, c),
    "reshape": lambda r, c: samples.reshape((r, c, 4), (r * c, 4)),
    "merge_heads": lambda r, c: samples.merge_heads(2, 3, r, c),
    "pad": lambda r, c: samples.pad(r, c, 2, 5),
    "matmul": lambda r, c: samples.matmul(r, 9, c),
    "cumsum_rows": lambda r, c: samples.cumulative(r, c, 1),
    "cumsum_columns": lambda r, c: samples.cumulative(r, c, 0),
    "cumsum_reverse": lambda r, c: samples.cumulative(r, c, 1, reverse=True),
    "cumsum_exclusive": lambda r, c: samples.cumulative(r, c, 0, reverse=True, exclusive=True),
    "concatenate": lambda r, c: samples.concatenate(r, r, c),
}


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def check(native: CompiledKernel, sample: samples.Sample, sizes: dict[str, int]) -> None:
    arrays = sample.arrays(sizes)
    if any(b.dtype is i64 and b.name == "ids" for b in sample.kernel.inputs):
        arrays[1] %= 4
    outputs = native(*arrays, sizes=sizes)
    with np.errstate(all="ignore"):
        expected = as_list(sample.reference(*arrays))
        interpreted = interpret(sample.kernel, arrays, sizes)
    for got, wanted, oracle in zip(outputs, expected, interpreted, strict=True):
        tolerance = 1e-10 if got.dtype.itemsize >= 8 and got.dtype.kind in "fc" else 1e-4
        np.testing.assert_allclose(
            oracle.reshape(-1), np.ravel(wanted).astype(oracle.dtype), rtol=tolerance, atol=tolerance
        )
        np.testing.assert_allclose(got, oracle, rtol=tolerance, atol=tolerance)


def has_reference(name: str, rows: int, columns: int) -> bool:
    """NumPy refuses these over nothing."""
    return not ((rows == 0 or columns == 0) and (name.startswith("row_arg") or name in ("layernorm", "row_min_u8")))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_symbolic(name: str, target: str) -> None:
    sample = CASES[name](ROWS, COLUMNS)
    native = compile_kernel(sample.kernel, Target.named(target))
    for columns in LENGTHS:
        for rows in (0, 1, 5):
            if has_reference(name, rows, columns):
                check(native, sample, {"R": rows, "C": columns})


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_static(name: str, columns: int) -> None:
    rows = 6
    if has_reference(name, rows, columns):
        sample = CASES[name](rows, columns)
        check(compile_kernel(sample.kernel), sample, {})


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_accumulates_in_single(dtype: Any) -> None:
    sample = samples.softmax(3, 257, dtype)
    arrays = sample.arrays({})
    (got,) = compile_kernel(sample.kernel)(*arrays)
    exact = sample.reference(*arrays)
    tolerance = {"f16": 2e-3, "bf16": 1e-2}[dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_bits(name: str) -> None:
    sizes = {"R": 700, "C": 130}
    sample = CASES[name](ROWS, COLUMNS)
    native = compile_kernel(sample.kernel)
    arrays = sample.arrays(sizes)
    if name == "gather":
        arrays[1] %= 4
    expected = native(*arrays, sizes=sizes)
    for threads in (1, 2, 7):
        results = native.run(arrays, sizes=sizes, threads=threads, pool=default_pool(), grain=37)
        for got, wanted in zip(results, expected, strict=True):
            assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", [f32, f64, i32, i8, u8, bool_, f16, bf16, c64, c128])
@pytest.mark.parametrize("target", TARGETS)
def test_copy_of_every_type(dtype: Any, target: str) -> None:
    k = KernelBuilder("copy")
    n = sym("n", 0)
    x = k.input("x", dtype[n, 3])
    k.output("y", dtype[3, n], lambda ix: x[ix[1], ix[0]])
    native = compile_kernel(k.build(), Target.named(target))
    for length in LENGTHS:
        array = np.random.default_rng(0).integers(0, 2, (length, 3)).astype(dtype.np)
        (got,) = native(array, sizes={"n": length})
        assert got.tobytes() == np.ascontiguousarray(array.T).tobytes()


def test_nan_wins_and_first_best_counts() -> None:
    nan = float("nan")
    rows = np.array([[1, 3, 3, 2, 0], [1, nan, 5, nan, 2], [-np.inf] * 5, [5, 4, 3, 2, 9]], np.float32)
    for kind in ("argmax", "argmin", "max", "min"):
        sample = samples.reduction((4, 5), (1,), kind)
        (got,) = compile_kernel(sample.kernel)(rows)
        np.testing.assert_array_equal(got, getattr(np, kind)(rows, axis=1))


@pytest.mark.few(8)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f32, f64, f16, i8, u8, i32, i64, bool_])
def test_places_of_the_best(dtype: DType, target: str) -> None:
    """Along rows and columns, tails of vectors, rows of one value, and of the worst that there is."""
    rng = np.random.default_rng(0)
    for rows, columns in ((3, 1), (5, 130), (67, 33)):
        given = rng.integers(0, 2 if dtype is bool_ else 30, (rows, columns)).astype(dtype.np)
        given[0] = given[0, 0]
        if dtype.is_float:
            given[1, columns // 2 :] = np.nan
            given[2] = -np.inf
        elif dtype is not bool_:
            given[1], given[2] = np.iinfo(dtype.np).min, np.iinfo(dtype.np).max
        for kind in ("argmax", "argmin"):
            for axis in (0, 1):
                kernel = samples.reduction((rows, columns), (axis,), kind, dtype).kernel
                (got,) = compile_kernel(kernel, Target.named(target))(given)
                np.testing.assert_array_equal(got, getattr(np, kind)(given, axis=axis))


def test_guarded_loads_stay_inside() -> None:
    """Reads before and after a buffer whose neighbours are unmapped would end the process."""
    import mmap

    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    protect = ctypes.CDLL(None).mprotect
    for at in (0, 2):
        assert protect(ctypes.c_void_p(base + at * page), page, 0) == 0
    x = np.frombuffer(memory, np.float32, page // 4, page).reshape(1, -1)
    sample = samples.pad(1, page // 4, 40, 40)
    for target in TARGETS:
        native = compile_kernel(sample.kernel, Target.named(target))
        (got,) = native(x)
        assert got[0, 0] == 7
        assert got[0, 40] == 0
    for at in (0, 2):
        assert protect(ctypes.c_void_p(base + at * page), page, 3) == 0


def test_long_chains_compile_with_linear_work() -> None:
    """Eight times the length takes about eight times the calls, text and code; what looks at pairs would take 64."""

    def build(length: int) -> tuple[int, int, int]:
        def chain(k: KernelBuilder, x: Any, y: Any) -> Any:
            for _ in range(length):
                x = x * y + y
            return x

        kernel = samples.elementwise((1000,), chain, inputs=2)
        made: list[CompiledKernel] = []
        count = calls(lambda: made.append(compile_kernel(kernel)))
        (native,) = made
        ones = np.full(1000, 0.5, np.float32)
        assert native(ones, ones)[0][0] == pytest.approx(1.0, rel=1e-2)
        return count, len(native.text), len(native.code.object_code)

    build(8)
    short, long = build(64), build(512)
    assert all(b < 9 * a for a, b in zip(short, long, strict=True)), (short, long)


@pytest.mark.parametrize("axis", [0, 1])
def test_long_sums_stay_accurate(axis: int) -> None:
    """Two million terms of 0.1: one running f32 sum would be off by some percent."""
    shape = (2_000_000, 1) if axis == 0 else (1, 2_000_000)
    sample = samples.reduction((ROWS, COLUMNS), (axis,))
    (got,) = compile_kernel(sample.kernel)(np.full(shape, 0.1, np.float32))
    assert got[0] == pytest.approx(2e5, rel=1e-4)


def test_text_decides_the_code() -> None:
    first, second = samples.softmax(ROWS, 64), samples.softmax(ROWS, 64)
    assert show_kernel(first.kernel) == show_kernel(second.kernel)
    assert compile_kernel(first.kernel).text == compile_kernel(second.kernel).text
