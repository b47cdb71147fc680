"""Generated matrix products against NumPy in f64: sizes, strides, batches, types; equal bits however work is split."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.gemm.epilogue import Site
from strata.backends.llvm.gemm.match import find_matmul
from strata.backends.llvm.gemm.planning import in_rows, plan_contraction, with_ending, with_half_tail
from strata.backends.llvm.gemm.spec import Contraction
from strata.core import DType, Target, bf16, c64, c128, f16, f32, f64, i8, i32, sym, u8
from strata.lir.views import RUN
from strata.mir import Graph
from strata.runtime import CompileOptions, CompilePipeline, Session
from tests.unit.backends.llvm.run_gemm import run, vector_type

ops: Any = functions
SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100)
HOST = Target.host()
TARGETS = [HOST, *(t for t in map(Target.named, ("baseline", "avx2", "avx512", "neon")) if t.runs_on(HOST))]
EPSILON = {"f64": 2e-16, "f32": 1.2e-7, "f16": 1e-3, "bf16": 8e-3, "i32": 0.0}


def draw(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape) if dtype.is_float else rng.integers(-128, 128, shape)
    return values.astype(dtype.np)


def expected(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in f64 and the sum of the products' magnitudes, which bounds what rounding can do."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return x @ y, np.abs(x) @ np.abs(y)


def check(result: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: DType, accumulator: DType) -> None:
    exact, size = expected(a, b)
    steps = max(a.shape[-1], 1)
    bound = EPSILON[accumulator.name] * steps * size + EPSILON[dtype.name] * np.abs(exact)
    assert (np.abs(result.astype(np.float64) - exact) <= bound + 1e-300).all()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_awkward_size(target: Target) -> None:
    spec = replace(plan_contraction(100, 100, 100, target, fewest_rows=1), chunk_rows=24, chunk_panels=2)
    for m, n, k in itertools.product(SIZES, repeat=3):
        a, b = draw((m, k), f32), draw((k, n), f32, 1)
        check(run(spec, a, b), a, b, f32, f32)


def test_code_for_exact_sizes_only() -> None:
    for m, n, k in itertools.product((1, 2, 7, 16, 33, 100, 128), (16, 48, 100, 384), (40,)):
        a, b = draw((m, k), f32), draw((k, n), f32, 1)
        check(run(plan_contraction(m, n, k, HOST, m_exact=True, n_exact=True), a, b), a, b, f32, f32)


@pytest.mark.few(4)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("a_unit_k", [True, False])
def test_b_in_rows_gives_the_same_bits(target: Target, dtype: DType, a_unit_k: bool) -> None:
    """Read where it lies, or packed: the products are summed in the same order."""
    for m, n, k in itertools.product((1, 2, 7, 16, 33, 100), (16, 48, 96, 112, 400), (1, 40, 130)):
        spec = plan_contraction(m, n, k, target, a=dtype, a_unit_k=a_unit_k, fewest_rows=1, n_exact=True)
        spec = replace(spec, chunk_rows=24, chunk_panels=2, streams=())
        placed = in_rows(spec, m, n, k)
        assert placed is not None
        a = draw((m, k), dtype) if a_unit_k else draw((k, m), dtype).T
        wide = draw((k, n + 5), dtype, 1)
        for b in (np.ascontiguousarray(wide[:, :n]), wide[:, 3 : n + 3]):
            result = run(replace(spec, b_rows=True), a, b)
            check(result, a, b, dtype, dtype)
            assert (result == run(spec, a, b)).all()


def test_b_in_rows_of_batches() -> None:
    spec = plan_contraction(20, 64, 33, HOST, batch=6, batch_rank=2, fewest_rows=5, n_exact=True)
    a, b = draw((2, 3, 20, 33), f32), draw((2, 3, 33, 64), f32, 1)
    for factor in (b, b[:1], b[:, :1], b[:, ::-1]):
        result = run(replace(spec, b_rows=True, streams=()), a, factor)
        check(result, a, factor, f32, f32)


@pytest.mark.few(6)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("kind", ["plain", "epilogue", "in place"])
def test_few_rows_with_b_in_rows(kind: str, dtype: DType, target: Target) -> None:
    """Eight rows of B at a time, sums in the output or on the stack, tails that overlap: the bits of a packed B."""

    def double(site: Site, sums: str) -> str:
        return site.f.binary("fadd", vector_type(site), sums, sums)

    epilogue, text = (None, "") if kind == "plain" else (double, "double")
    for m in (1, 2, 3, 5, 8):
        for n, k in itertools.product((16, 48, 67, 100, 192, 401), (0, 1, 8, 23, 64)):
            spec = plan_contraction(
                m, n, k, target, a=dtype, m_exact=True, in_place=kind == "in place", epilogue=text
            )  # fmt: skip
            placed = in_rows(replace(spec, chunk_panels=2), m, n, k)
            assert placed is not None
            a, wide = draw((m, k), dtype), draw((k, n + 5), dtype, 1)
            for b in (np.ascontiguousarray(wide[:, :n]), wide[:, 3 : n + 3]):
                result = run(replace(placed, chunk_panels=3), a, b, epilogue=epilogue)
                assert (result == run(replace(spec, chunk_panels=2), a, b, epilogue=epilogue)).all()
            check(result / (1 if epilogue is None else 2), a, b, dtype, dtype)


def test_few_rows_with_b_in_rows_of_batches() -> None:
    a, b = draw((2, 3, 2, 70), f32), draw((2, 3, 70, 130), f32, 1)
    spec = plan_contraction(2, 130, 70, HOST, batch=6, batch_rank=2, m_exact=True, n_exact=True)
    placed = in_rows(spec, 2, 130, 70, 6)
    assert placed is not None
    for factor in (b, b[:1], b[:, :1], b[:, ::-1]):
        result = run(placed, a, factor)
        check(result, a, factor, f32, f32)
        assert (result == run(spec, a, factor)).all()


@pytest.mark.parametrize("m", [1, 3, 8])
def test_pieces_of_rows_in_place_are_joined(m: int) -> None:
    """Sixteen threads have a piece each; two take several at once, in one pass, and the bits are the same."""
    spec = in_rows(plan_contraction(m, 4096, 4096, HOST, m_exact=True, n_exact=True), m, 4096, 4096)
    assert spec is not None
    assert spec.chunk_count(m, 4096) == 8
    assert spec.joined >= 4
    n, k = 3 * 48 * 7 + 5, 70
    wide = replace(spec, chunk_panels=3)
    a, b = draw((m, k), f32), draw((k, n), f32, 1)
    results = [run(one, a, b, split=split) for one in (wide, replace(wide, joined=2)) for split in (1, 2, 3, 5, 100)]
    check(results[0], a, b, f32, f32)
    assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_half_of_the_last_vector(dtype: DType) -> None:
    """Where half a vector holds the last columns, only that half is computed: packed, in rows, and with an epilogue."""

    def double(site: Site, sums: str) -> str:
        return site.f.binary("fadd", vector_type(site), sums, sums)

    target = replace(HOST, splits_vectors=True)
    lanes = plan_contraction(1, 1, 1, target, a=dtype).lanes
    for m, left, k in itertools.product((1, 3, 8, 20), (1, lanes // 2, lanes + 1, 2 * lanes + 3), (0, 37)):
        for n in (left, 9 * lanes + left):
            plain = plan_contraction(m, n, k, target, a=dtype, m_exact=True, n_exact=True)
            spec = with_half_tail(plain, n)
            assert spec.half_tail or not 0 < n % plain.panel_columns % lanes <= lanes // 2
            a, wide = draw((m, k), dtype), draw((k, n + 5), dtype, 1)
            b = np.ascontiguousarray(wide[:, :n])
            result = run(spec, a, b)
            check(result, a, b, dtype, dtype)
            assert (result == run(plain, a, b)).all()
            placed = in_rows(spec, m, n, k)
            if placed is not None:
                assert (result == run(placed, a, b)).all()
                assert (result == run(placed, a, wide[:, :n])).all()
            twice = with_half_tail(replace(plain, epilogue="double"), n)
            assert (2 * result == run(twice, a, b, epilogue=double)).all()
    assert not with_half_tail(plan_contraction(8, 40, 8, target, a=bf16, n_exact=True), 40).half_tail
    assert not with_half_tail(
        plan_contraction(8, 41, 8, replace(HOST, splits_vectors=False), n_exact=True), 41
    ).half_tail


@pytest.mark.parametrize(
    "shape", [(1, 32, 20), (1, 1000, 90), (4, 333, 70), (10, 512, 128), (128, 48, 10), (37, 100, 8), (5, 16, 0)]
)
@pytest.mark.parametrize("form", ["plain", "transposed", "epilogue", "batches", "shared"])
def test_factors_that_change_and_factors_that_stay(form: str, shape: tuple[int, int, int]) -> None:
    """A second factor that is an input is read in place where it can be, a parameter is packed: equal bits."""
    m, n, k = shape
    results = []
    for kind in ("input", "param"):
        g = Graph("g")
        lead = (3,) if form in ("batches", "shared") else ()
        x = g.input("x", f32[(*lead, *((k, m) if form == "transposed" else (m, k)))])
        make = g.input if kind == "input" else g.param
        w = make("w", f32[(*(lead if form == "batches" else ()), k, n)])
        y = (ops.swapaxes(x, -1, -2) if form == "transposed" else x) @ w
        g.outputs(ops.relu(y + 1.0) * 2.0 if form == "epilogue" else y)
        c = Session("cpu").compile(g)
        given, weight = draw(x.type.static_shape, f32), draw(w.type.static_shape, f32, 1)
        if kind == "param":
            c.set_param("w", weight)
        (found,) = c.run(x=given) if kind == "param" else c.run(x=given, w=weight)
        left = np.swapaxes(given, -1, -2) if form == "transposed" else given
        want = left.astype("f8") @ weight.astype("f8")
        want = np.maximum(want + 1, 0) * 2 if form == "epilogue" else want
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)
        results.append(found)
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("sizes", [(7, 17, 5), (33, 100, 64), (64, 64, 64), (100, 33, 17), (1, 100, 33)])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_transposes(sizes: tuple[int, int, int], a_transposed: bool, b_transposed: bool, dtype: DType) -> None:
    m, n, k = sizes
    a = draw((k, m), dtype).T if a_transposed else draw((m, k), dtype)
    b = draw((n, k), dtype, 1).T if b_transposed else draw((k, n), dtype, 1)
    spec = plan_contraction(100, 100, 64, HOST, a=dtype, a_unit_k=not a_transposed, fewest_rows=1)
    spec = replace(spec, chunk_rows=16, chunk_panels=1)
    check(run(spec, a, b), a, b, dtype, dtype)


@pytest.mark.few(4)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, i8, u8], ids=str)
def test_narrow_types_in_every_layout(dtype: DType, target: Target) -> None:
    """Groups of k's are packed from rows, from columns and element by element; k's and columns past them count as 0."""

    def laid(rows: int, columns: int, how: str, seed: int) -> np.ndarray:
        if how == "apart":
            return draw((2 * rows, 3 * columns + 1), dtype, seed)[::2, 1::3]
        return draw((columns, rows), dtype, seed).T if how == "columns" else draw((rows, columns), dtype, seed)

    for m, n, k in ((1, 5, 1), (3, 48, 2), (9, 130, 35), (33, 97, 66), (17, 16, 64), (8, 1, 7), (4, 20, 0)):
        spec = plan_contraction(max(m, 1), n, k, target, a=dtype, fewest_rows=1)
        packed = plan_contraction(max(m, 1), n, k, target, a=dtype, a_unit_k=False, fewest_rows=1)
        for a_how, b_how in itertools.product(("rows", "columns", "apart"), repeat=2):
            a, b = laid(m, k, a_how, 1), laid(k, n, b_how, 2)
            result = run(spec if a_how == "rows" else packed, a, b)
            check(result, a, b, spec.out, spec.accumulator)
            assert (result == run(spec, np.ascontiguousarray(a), np.ascontiguousarray(b))).all()


@pytest.mark.skipif(not HOST.has("avx512bf16"), reason="the processor does not multiply pairs of bf16")
def test_pairs_of_bf16() -> None:
    """Two k's at a time: infinities and NaNs as one by one, and numbers below the least normal one count as zero."""
    spec = plan_contraction(2, 20, 6, HOST, a=bf16)
    assert spec.arithmetic.group == 2
    assert plan_contraction(2, 20, 1, HOST, a=bf16).arithmetic.group == 1
    a, b = np.ones((2, 6), np.float32), np.ones((6, 20), np.float32)
    a[0, 3], b[2, 4], b[5, 5], a[1, 1], b[0, 7] = np.inf, np.nan, -np.inf, 1e-40, 1e-40
    with np.errstate(invalid="ignore"):
        exact = a @ b
        result = run(spec, a.astype(bf16.np), b.astype(bf16.np))
    assert np.array_equal(result, exact, equal_nan=True)
    small = np.full((2, 6), 1e-39, np.float32).astype(bf16.np)
    assert (run(spec, small, np.ones_like(b, bf16.np)) == 0).all()


@pytest.mark.few(5)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16, i8], ids=str)
def test_a_whose_rows_are_contiguous(dtype: DType, target: Target) -> None:
    """Weight gradients: blocks of all heights, k's that are no multiple of the block, equal bits to a plain A."""
    spec = plan_contraction(130, 100, 70, target, a=dtype, a_unit_k=False, fewest_rows=1)
    plain = plan_contraction(130, 100, 70, target, a=dtype, fewest_rows=1)
    for m, n, k in ((1, 3, 1), (8, 40, 7), (13, 100, 70), (64, 17, 33), (130, 100, 30), (96, 5, 0)):
        a, b = draw((k, m), dtype).T, draw((k, n), dtype, 1)
        for one in (spec, replace(spec, k_block=16, chunk_rows=24)):
            result = run(one, a, b)
            check(result, a, b, spec.out, spec.accumulator)
            assert (result == run(plain, np.ascontiguousarray(a), b)).all()


@pytest.mark.few(4)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64, bf16, i8], ids=str)
def test_chunks_that_are_cut_when_rows_are_known(dtype: DType, target: Target) -> None:
    """One kernel for all numbers of rows: values, and the bits of kernels for each number of them."""
    spec = plan_contraction(1000, 130, 70, target, a=dtype, fewest_rows=1, is_open=True)
    for m in (0, 1, 2, 3, 4, 5, 8, 17, 95, 96, 97, 100, 193, 300, 385, 577, 769):
        a, b = draw((m, 70), dtype), draw((70, 130), dtype, 1)
        result = run(spec, a, b)
        check(result, a, b, spec.out, spec.accumulator)
        assert (result == run(plan_contraction(m, 130, 70, target, a=dtype), a, b)).all()
    batches = plan_contraction(40, 50, 33, target, a=dtype, batch=6, batch_rank=2, fewest_rows=1, is_open=True)
    a, b = draw((2, 3, 9, 33), dtype), draw((2, 1, 33, 50), dtype, 1)
    check(run(batches, a, b), a, b, batches.out, batches.accumulator)


@pytest.mark.few(5)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16, i8], ids=str)
def test_few_rows_have_tiles_of_their_own(dtype: DType, target: Target) -> None:
    """So that B is read once, or by as few tiles as can be: values, and the bits of kernels for any number of rows."""
    n, k = 4 * 48 + 37, 61
    several = plan_contraction(100, n, k, target, a=dtype, fewest_rows=1)
    for m in range(20):
        spec = plan_contraction(m, n, k, target, a=dtype, m_exact=True, n_exact=True)
        tallest = several.heights[0]
        assert m > tallest or spec.heights == (max(m, 1),)
        assert -(-m // spec.heights[0]) <= -(-m // tallest)
        a, b = draw((m, k), dtype), draw((k, n), dtype, 1)
        result = run(spec, a, b)
        check(result, a, b, spec.out, spec.accumulator)
        assert (result == run(several, a, b)).all()


def test_general_strides_and_scattered_output() -> None:
    a, b = draw((50, 160), f32)[::2, ::3], draw((108, 90), f32, 1)[::2, ::2]
    storage = np.full((90, 75), 5, np.float32)
    out = storage[::2, ::3].T
    spec = plan_contraction(25, 45, 54, HOST, a_unit_k=False, unit_columns=False)
    check(run(spec, a, b, out), a, b, f32, f32)
    untouched = np.ones_like(storage, bool)
    untouched[::2, ::3] = False
    assert (storage[untouched] == 5).all()


def test_nothing_outside_the_output_is_written() -> None:
    for n in (1, 15, 16, 17, 47, 48, 49, 100):
        storage = np.full((40, 128), 3, np.float32)
        a, b = draw((33, 20), f32), draw((20, n), f32, 1)
        check(run(plan_contraction(33, n, 20, HOST), a, b, storage[4:37, 8 : 8 + n]), a, b, f32, f32)
        storage[4:37, 8 : 8 + n] = 3
        assert (storage == 3).all()


@pytest.mark.parametrize(("a_shape", "b_shape"), [
    ((3, 17, 20), (3, 20, 33)), ((3, 17, 20), (1, 20, 33)), ((1, 17, 20), (3, 20, 33)),
    ((2, 3, 9, 20), (2, 3, 20, 50)), ((2, 3, 9, 20), (2, 1, 20, 50)), ((2, 1, 1, 20), (1, 3, 20, 50)),
])  # fmt: skip
def test_batches_and_broadcasting(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = draw(a_shape, f32), draw(b_shape, f32, 1)
    spec = plan_contraction(17, 50, 20, HOST, batch=6, batch_rank=a.ndim - 2, fewest_rows=1)
    check(run(spec, a, b), a, b, f32, f32)


@pytest.mark.parametrize("terms", [2, 3, 17])
@pytest.mark.parametrize("is_open", [False, True])
def test_as_many_equal_columns_as_terms(terms: int, is_open: bool) -> None:
    """The gradient of a sum over rows of a product: no factor has the axis of the columns."""
    a, b = draw((terms, 5, 3), f32), draw((3, terms), f32, 1)
    k = sym("k", 1) if is_open else terms
    g = Graph("equal_columns")
    x, y = g.input("a", (k, 5, 3)), g.input("b", (3, k))
    columns = ops.broadcast_to(ops.reshape(y, (3, k, 1)), (3, k, k))
    made = Session("cpu").compile(g.outputs(ops.matmul(ops.transpose(x, (2, 1, 0)), columns)))
    wanted = a.transpose(2, 1, 0) @ np.repeat(b[:, :, None], terms, 2)
    np.testing.assert_allclose(made.run({"a": a, "b": b})[0], wanted, rtol=1e-5, atol=1e-5)


def test_batch_of_interleaved_heads() -> None:
    a = draw((2, 10, 4, 16), f32).transpose(0, 2, 1, 3)
    b = draw((2, 4, 16, 24), f32, 1)
    out = np.zeros((2, 10, 4, 24), np.float32)
    spec = plan_contraction(10, 24, 16, HOST, batch=8, batch_rank=2)
    run(spec, a, b, out.transpose(0, 2, 1, 3))
    check(out.transpose(0, 2, 1, 3), a, b, f32, f32)


@pytest.mark.few(10)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f64, i8, i32], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_element_types(dtype: DType, packed: bool, target: Target) -> None:
    for out in {None, dtype if dtype.is_float else None}:
        spec = plan_contraction(64, 100, 100, target, a=dtype, out=out, a_unit_k=not packed, fewest_rows=1)
        for m, n, k in ((1, 100, 33), (4, 100, 40), (37, 65, 50), (64, 16, 100)):
            a, b = draw((m, k), dtype), draw((k, n), dtype, 1)
            check(run(spec, a, b), a, b, spec.out, spec.accumulator)


@pytest.mark.few(8)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("a_type", "b_type"), [(i8, i8), (u8, i8), (i8, u8), (u8, u8)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_bytes_are_summed_exactly(a_type: DType, b_type: DType, packed: bool, target: Target) -> None:
    rng = np.random.default_rng(0)
    spec = plan_contraction(17, 70, 130, target, a=a_type, b=b_type, out=i32, fewest_rows=1, a_unit_k=not packed)
    for m, n, k in ((1, 70, 3), (9, 50, 1), (5, 65, 33), (17, 49, 64), (3, 40, 130)):
        a, b = (rng.integers(0, 256, s).astype(np.uint8).view(t.np) for s, t in (((m, k), a_type), ((k, n), b_type)))
        a[0], b[:, 0] = np.iinfo(a_type.np).min, np.iinfo(b_type.np).min
        a[-1], b[:, -1] = np.iinfo(a_type.np).max, np.iinfo(b_type.np).max
        for one in (spec, replace(spec, k_block=16)):
            assert (run(one, a, b) == a.astype(np.int64) @ b.astype(np.int64)).all()


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
def test_complex(dtype: DType) -> None:
    for m, n, k in ((1, 40, 5), (7, 9, 17), (33, 20, 12), (4, 3, 0)):
        a, b = (draw(s, f64) + 1j * draw(s, f64, 1) for s in ((m, k), (k, n)))
        exact = a @ b
        a, b = a.astype(dtype.np), b.astype(dtype.np)
        scattered = np.zeros((n, 2 * m), dtype.np)[:, ::2].T
        for x, y in ((a, b), (a, np.asfortranarray(b)), (np.asfortranarray(a), b)):
            spec = plan_contraction(33, 40, 17, HOST, a=dtype, a_unit_k=x.strides[1] == x.itemsize)
            assert np.allclose(run(spec, x, y), exact, atol=1e-4 if dtype is c64 else 1e-12)
        spec = plan_contraction(33, 40, 17, HOST, a=dtype, unit_columns=False)
        assert np.allclose(run(spec, a, b, scattered), exact, atol=1e-4 if dtype is c64 else 1e-12)


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_half_conversions_agree_with_numpy(dtype: DType, target: Target) -> None:
    """Every half as an input, and rounding of singles near halves as an output, bit by bit."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.np)
    one = np.ones((1, 1), dtype.np)
    spec = plan_contraction(1, 1 << 16, 1, target, a=dtype)
    with np.errstate(invalid="ignore"):
        wide = run(spec, one, every[None])[0]
        exact = every.astype(np.float32) + np.float32(0)  # the sum starts at 0, so that -0 becomes 0
    assert (np.isnan(exact) == np.isnan(wide)).all()
    assert (wide == exact)[~np.isnan(exact)].all()
    rng = np.random.default_rng(0)
    singles = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32).view(np.float32)
    singles[:20000] = (rng.standard_normal(20000) * 10.0 ** rng.integers(-9, 6, 20000)).astype(np.float32)
    spec = plan_contraction(1, 1 << 16, 1, target, a=f32, b=f32, out=dtype)
    narrow = run(spec, np.ones((1, 1), np.float32), singles[None])[0]
    with np.errstate(over="ignore", invalid="ignore"):
        reference = (singles + np.float32(0)).astype(dtype.np)
    nan = np.isnan(reference.astype(np.float32))
    assert np.isnan(narrow[nan].astype(np.float32)).all()
    assert (narrow.view(np.uint16)[~nan] == reference.view(np.uint16)[~nan]).all()


def variants(m: int, n: int, k: int, **options: object) -> list[Contraction]:
    """The same product, tiled, blocked and split in different ways; blocks of k are some blocks of sums."""
    spec = plan_contraction(m, n, k, HOST, fewest_rows=1, **options)  # type: ignore[arg-type]
    unit = 8 if spec.blocks is None else spec.blocks.terms
    packed = replace(spec, a_packed=True, k_block=2 * unit, streams=())
    return [
        spec,
        replace(spec, streams=()),
        replace(spec, chunk_rows=8, chunk_panels=1),
        replace(spec, vectors=1, tails=(1,), heights=(5, 2, 1)),
        replace(spec, k_block=3 * unit),
        packed,
        replace(packed, waits_in_output=False, k_block=unit, chunk_panels=2),
    ]


@pytest.mark.parametrize("k", [100, 129, 641])
@pytest.mark.parametrize("dtype", [f32, f64, bf16], ids=str)
def test_bits_do_not_depend_on_tiles_blocks_or_chunks(dtype: DType, k: int) -> None:
    a, b = draw((37, k), dtype), draw((k, 203), dtype, 1)
    specs = variants(37, 203, k, a=dtype)
    results = [run(spec, a, b, split=split) for spec in specs for split in (1, 3, 100)]
    assert all((r == results[0]).all() for r in results)


def test_rows_do_not_depend_on_their_batch() -> None:
    a, b = draw((37, 300), f32), draw((300, 210), f32, 1)
    together = run(plan_contraction(37, 210, 300, HOST), a, b)
    for low, high in ((0, 1), (5, 6), (3, 5), (30, 37), (11, 15), (0, 36)):
        part = run(plan_contraction(high - low, 210, 300, HOST), a[low:high], b)
        assert (part == together[low:high]).all()


def bias_relu_residual(site: Site, sums: str) -> str:
    f = site.f
    type_ = vector_type(site)
    bias = site.load(f32, site.pointer("bias"), site.column)
    offset = f.add(f.mul(site.row, site.number("residual_row")), site.column)
    residual = site.load(f32, site.pointer("residual"), offset)
    total = f.binary("fadd", type_, f.binary("fadd", type_, sums, bias), residual)
    kept = f.select(type_, f.compare("ogt", type_, total, "zeroinitializer"), total, "zeroinitializer")
    return convert(f, kept, site.spec.accumulator, site.spec.out, site.lanes, site.spec.target)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("out", [f32, bf16], ids=str)
def test_epilogue(out: DType, target: Target) -> None:
    spec = plan_contraction(
        64, 256, 50, target, out=out, fewest_rows=1, epilogue="relu(x + bias[n] + residual[m, n])",
        epilogue_pointers=("bias", "residual"), epilogue_numbers=("residual_row",),
    )  # fmt: skip
    for m, n, k in ((1, 100, 33), (3, 256, 8), (37, 65, 50), (64, 100, 0)):
        a, b, bias, residual = draw((m, k), f32), draw((k, n), f32, 1), draw((n,), f32, 2), draw((m, n), f32, 3)
        operands = {"bias": bias.ctypes.data, "residual": residual.ctypes.data, "residual_row": n}
        exact = np.maximum(a.astype(np.float64) @ b + bias + residual, 0)
        ended = with_ending(spec, k)
        assert ended.ends_in_registers
        results = []
        for one in (spec, ended, replace(spec, a_packed=True, k_block=16, streams=(), chunk_rows=8)):
            results.append(run(one, a, b, epilogue=bias_relu_residual, operands=operands).astype(np.float64))
            assert np.allclose(results[-1], exact, rtol=EPSILON[out.name] * 4, atol=1e-4)
        assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("kind", ["bias", "residual", "cast", "scaled rows"])
@pytest.mark.parametrize("shape", [(2, 3, 40, 20, 100), (1, 1, 8, 64, 48), (3, 1, 17, 5, 49)])
def test_short_sums_of_batches_with_epilogues(kind: str, shape: tuple[int, ...]) -> None:
    """From registers through the epilogue: every batch, tails in rows and columns, operands beside the output."""
    n, h, rows, k, columns = shape
    g = Graph(kind)
    shapes = {"a": (n, h, rows, k), "b": (n, h, k, columns), "bias": (columns,), "r": (n, h, rows, columns)}
    shapes |= {"s": (n, h, rows, 1)}
    values = {name: g.input(name, s) for name, s in shapes.items()}
    feeds = {name: draw(s, f32, i) for i, (name, s) in enumerate(shapes.items())}
    y: Any = values["a"] @ values["b"]
    exact = feeds["a"].astype(np.float64) @ feeds["b"]
    match kind:
        case "bias":
            y, exact = (y + values["bias"]).relu(), np.maximum(exact + feeds["bias"], 0)
        case "residual":
            y, exact = y * 2.0 + values["r"], exact * 2 + feeds["r"]
        case "cast":
            y, exact = (y * 4.0).cast("i32"), np.trunc(exact * 4)
        case "scaled rows":
            y, exact = y * values["s"], exact * feeds["s"]
    g.outputs(y)
    made = Session("cpu").compile(g)
    found = [np.empty(exact.shape, np.int32 if kind == "cast" else np.float32) for _ in range(3)]
    for threads, out in zip((1, 2, 7), found, strict=True):
        made._executable.run([feeds[name] for name in g.input_names], [out], {}, threads)
        np.testing.assert_array_equal(out, found[0])
    np.testing.assert_allclose(found[0], exact, rtol=1e-5, atol=1 if kind == "cast" else 1e-4)


def test_epilogue_may_overwrite_its_operand() -> None:
    a, b, bias = draw((37, 600), f32), draw((600, 100), f32, 1), np.zeros(100, np.float32)
    out = draw((37, 100), f32, 3)
    exact = np.maximum(a.astype(np.float64) @ b + out, 0)
    spec = plan_contraction(
        37, 100, 600, HOST, a_unit_k=False, in_place=True, epilogue="relu(x + bias[n] + residual[m, n])",
        epilogue_pointers=("bias", "residual"), epilogue_numbers=("residual_row",),
    )  # fmt: skip
    operands = {"bias": bias.ctypes.data, "residual": out.ctypes.data, "residual_row": 100}
    run(spec, a, b, out, epilogue=bias_relu_residual, operands=operands)
    assert np.allclose(out, exact, atol=1e-4)


def test_not_a_number_and_infinity_pass_through() -> None:
    a, b = draw((9, 20), f32), draw((20, 30), f32, 1)
    a[2, 3], a[4, 5], b[7, 8] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        exact = a.astype(np.float64) @ b
    assert np.allclose(run(plan_contraction(9, 30, 20, HOST), a, b), exact, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "given",
    [
        (1, 40, 24, 3, 8, 15), (2, 7, 9, 3, 2, 5), (3, 5, 6, 1, 4, 3), (1, 20, 64, 3, 2, 50), (2, 7, 9, 3, 2, 8),
        (3, 5, 6, 1, 4, 13),
    ],
)  # fmt: skip
def test_columns_that_the_output_keeps_apart(native: Any, given: tuple[int, ...]) -> None:
    """Queries, keys and values of all heads from one product: blocks of columns are batches of it.

    Blocks of a few columns are moved behind it instead, which is up to three times as fast."""
    images, rows, inner, parts, heads, width = given
    columns = parts * heads * width
    x, w, b = draw((images, rows, inner), f32), draw((inner, columns), f32, 1), draw((columns,), f32, 2)

    def split(x: Any, w: Any, b: Any) -> Any:
        return ops.transpose(ops.reshape(x @ w + b, (images, rows, parts, heads, width)), (2, 0, 3, 1, 4))

    (got,) = native(split, x, w, b)
    want = (x.astype(np.float64) @ w + b).reshape(images, rows, parts, heads, width).transpose(2, 0, 3, 1, 4)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    g = Graph("split")
    g.outputs(split(g.input("x", x.shape), g.input("w", w.shape), g.input("b", b.shape)))
    step, *behind = CompilePipeline("cpu").compile(g).lir.schedule
    assert step.kernel is not None
    assert find_matmul(step.kernel) is not None
    assert len(behind) == (width < RUN)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16], ids=str)
@pytest.mark.parametrize("form", ["plain", "epilogue", "batches", "shared"])
def test_few_rows_times_a_matrix_that_lies_transposed(form: str, dtype: DType) -> None:
    """It is read along its rows, once for all rows of the other: values, equal bits on 1, 2 and 7 threads."""
    lead = (3,) if form in ("batches", "shared") else ()
    shapes = (
        (1, 70, 300),
        (2, 1, 40),
        (3, 130, 257),
        (4, 65, 1),
        (4, 300, 0),
        (5, 40, 100),
        (6, 128, 300),
        (7, 66, 40),
    )
    for m, n, k in (*shapes, (8, 129, 513), (9, 12, 64), (12, 64, 1100), (13, 64, 100)):
        x, w = draw((*lead, m, k), dtype), draw((*(lead if form == "batches" else ()), n, k), dtype, 1)
        results = []
        for threads in (1, 2, 7):
            g = Graph("g")
            y = g.input("x", dtype[x.shape]) @ ops.swapaxes(g.input("w", dtype[w.shape]), -1, -2)
            g.outputs(ops.relu(y + 1.0) if form == "epilogue" else y)
            (found,) = Session("cpu").compile(g, CompileOptions(threads=threads)).run(x=x, w=w)
            results.append(np.asarray(found))
        exact, size = expected(x, np.swapaxes(w, -1, -2))
        bound = EPSILON["f64" if dtype is f64 else "f32"] * max(k, 1) * size
        if form == "epilogue":
            exact = np.maximum(exact + 1, 0)
        bound = bound + 2 * EPSILON[dtype.name] * (np.abs(exact) + 2)
        assert (np.abs(results[0].astype(np.float64) - exact) <= bound).all()
        assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline"])
def test_few_rows_times_a_transposed_matrix_of_open_sizes(device: str) -> None:
    n, k = sym("n"), sym("k")
    g = Graph("g")
    g.outputs(g.input("x", f32[6, k]) @ ops.transpose(g.input("w", f32[n, k])))
    compiled = Session(device).compile(g)
    for columns, inner in ((1, 1), (7, 33), (64, 300), (130, 17)):
        x, w = draw((6, inner), f32), draw((columns, inner), f32, 1)
        check(np.asarray(compiled.run(x=x, w=w)[0]), x, w.T, f32, f32)
    g = Graph("g")
    g.outputs(g.input("x", f32[5, 300]) @ ops.transpose(g.input("w", f32[36, 300])))
    x, w = draw((5, 300), f32), draw((36, 300), f32, 1)
    check(np.asarray(Session(device).compile(g).run(x=x, w=w)[0]), x, w.T, f32, f32)
