"""Reductions in parts: the phases together compute what the kernel does, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strata.core import DType, bool_, f32, f64, i8, i16, i32, sym, u8
from strata.kernel import Kernel, KernelBuilder, Machine, Phases, interpret, normalize, show_kernel, split_reductions
from strata.kernel.passes.split import SplitLimits
from tests.unit.kernel import samples

SMALL = SplitLimits(terms=200, lines=4, columns=64, part_bytes=256, short_part_bytes=64, parts=4, open_parts=2)


def run(phases: Phases, arrays: list[Any], sizes: dict[str, int]) -> list[Any]:
    """The phases in order, on flat arrays."""
    known = {b.name: a.reshape(-1) for b, a in zip(phases.kernels[-1].inputs, arrays, strict=False)}
    results: list[Any] = []
    for kernel in phases.kernels:
        results = interpret(kernel, [known[b.name] for b in kernel.inputs], sizes)
        known |= {b.name: r for b, r in zip(kernel.outputs, results, strict=True)}
    return results


def check(kernel: Kernel, arrays: list[Any], sizes: dict[str, int], count: int) -> None:
    phases = split_reductions(normalize(kernel), SMALL)
    assert len(phases.kernels) == count
    with np.errstate(all="ignore"):
        wanted = interpret(kernel, arrays, sizes)
        got = run(phases, arrays, sizes)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, np.ravel(w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", [f32, f64, i32])
@pytest.mark.parametrize("length", [300, 1000, 1024, 1007])
def test_all_terms(length: int, dtype: DType, kind: str) -> None:
    sample = samples.reduction((length,), (0,), kind, dtype)
    array = (1 + np.random.default_rng(0).normal(size=length) / 50).astype(dtype.np)
    check(sample.kernel, [array], {}, 2)


def test_nan_and_infinity_get_through() -> None:
    sample = samples.reduction((1000,), (0,), "max")
    for at in (0, 500, 999):  # in the first part, in a later one, in the rest
        array = np.zeros(1000, np.float32)
        array[at] = np.nan
        (got,) = run(split_reductions(normalize(sample.kernel), SMALL), [array], {})
        assert np.isnan(got).all()


@pytest.mark.parametrize("columns", [1, 3, 70, 130])
@pytest.mark.parametrize("rows", [100, 101, 333])
def test_columns(rows: int, columns: int) -> None:
    sample = samples.reduction((rows, columns), (0,))
    check(sample.kernel, sample.arrays({}), {}, 1 if rows * columns <= SMALL.terms else 2)


@pytest.mark.parametrize(("rows", "columns", "count"), [(40, 300, 2), (37, 999, 2), (10, 999, 1), (40, 1600, 1)])
def test_many_columns_of_a_large_matrix(rows: int, columns: int, count: int) -> None:
    """In parts of many whole rows; what a cache holds, few rows and very many columns are handed out by columns."""
    sample = samples.reduction((rows, columns), (0,))
    limits = replace(SMALL, far=4096, far_columns=400, far_rows=8)
    phases = split_reductions(normalize(sample.kernel), limits)
    assert len(phases.kernels) == count
    near = split_reductions(normalize(sample.kernel), replace(limits, far=1 << 20))
    assert len(near.kernels) == 1
    (array,) = sample.arrays({})
    (got,) = run(phases, [array], {})
    np.testing.assert_allclose(got, array.sum(0, dtype=np.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(32, 3, 1000), (2, 3, 5000), (256, 2, 300)])
def test_sums_of_a_few_sums(shape: tuple[int, ...]) -> None:
    """Rounded terms in their order: each inner sum is a part, joined to the others one after the other."""
    sample = samples.reduction(shape, (0, 2))
    phases = split_reductions(normalize(sample.kernel), replace(SMALL, terms=1000), machine=Machine(64, 32))
    assert [b.shape for b in phases.scratch] == [(shape[0] * shape[1],)]
    (array,) = sample.arrays({})
    (got,) = run(phases, [array], {})
    np.testing.assert_allclose(got, array.sum((0, 2), dtype=np.float64), rtol=1e-4, atol=1e-3)


def test_columns_of_rows_with_a_factor_each() -> None:
    """A factor that all columns share lies along the terms; their own elements do not."""
    k = KernelBuilder("scaled")
    x, y = k.input("x", f32[300, 60]), k.input("y", f32[300])
    k.output("z", f32[60], lambda at: k.reduce("sum", (300,), lambda row: x[row, at[0]] * y[row]))
    rng = np.random.default_rng(0)
    check(k.build(), [rng.standard_normal((300, 60), np.float32), rng.standard_normal(300, np.float32)], {}, 2)


def test_rows_that_are_enough_for_threads_stay_whole() -> None:
    sample = samples.reduction((8, 1000), (1,))
    check(sample.kernel, sample.arrays({}), {}, 1)


def test_one_after_the_other() -> None:
    """The variance of all elements needs their mean first."""
    k = KernelBuilder("variance")
    x = k.input("x", f32[997])
    mean = k.reduce("sum", (997,), lambda i: x[i]) / 997.0
    square = k.reduce("sum", (997,), lambda i: (x[i] - mean) * (x[i] - mean)) / 997.0
    k.output("y", f32[997], lambda ix: (x[ix] - mean) / k.sqrt(square))
    check(k.build(), [np.random.default_rng(0).normal(size=997).astype(np.float32)], {}, 3)


def test_two_at_once() -> None:
    k = KernelBuilder("both")
    x = k.input("x", f32[997])
    k.output("y", f32[()], lambda ix: k.reduce("sum", (997,), lambda i: x[i]))
    k.output("z", f32[()], lambda ix: k.reduce("max", (997,), lambda i: x[i]))
    check(k.build(), [np.random.default_rng(0).normal(size=997).astype(np.float32)], {}, 2)


def test_conditions() -> None:
    k = KernelBuilder("all")
    x = k.input("x", bool_[900])
    k.output("y", bool_[()], lambda ix: k.reduce("all", (900,), lambda i: x[i]))
    for at in (None, 0, 450, 899):
        array = np.ones(900, bool)
        if at is not None:
            array[at] = False
        check(k.build(), [array], {}, 2)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1000])
def test_open_sizes(length: int) -> None:
    sample = samples.reduction((sym("n", 0),), (0,))
    check(sample.kernel, sample.arrays({"n": length}), {"n": length}, 2)


def test_a_scan_and_a_place_in_an_open_number_stay_whole() -> None:
    check(samples.cumulative(1, 1000, 1).kernel, samples.cumulative(1, 1000, 1).arrays({}), {}, 1)
    sample = samples.reduction((sym("n", 0),), (0,), "argmax")
    check(sample.kernel, sample.arrays({"n": 1000}), {"n": 1000}, 1)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", [f32, i32, i8, u8, i16])
@pytest.mark.parametrize("length", [300, 1000, 1024, 1007])
def test_places(length: int, dtype: DType, kind: str) -> None:
    """The first of the best, in any part or behind them; NaN is best."""
    kernel = samples.reduction((length,), (0,), kind, dtype).kernel
    rng = np.random.default_rng(0)
    array = rng.integers(10, 20, length).astype(dtype.np)
    best = dtype.np.type(99 if kind == "argmax" else 0)
    check(kernel, [array], {}, 2)
    check(kernel, [np.full(length, 3, dtype.np)], {}, 2)
    for places in ([0], [length - 1], [length // 2, length - 1], [17, length // 2]):
        marked = array.copy()
        marked[places] = best
        check(kernel, [marked], {}, 2)
        if dtype is f32:
            marked[places] = np.nan
            check(kernel, [marked], {}, 2)
            check(kernel, [np.full(length, -np.inf if kind == "argmax" else np.inf, np.float32)], {}, 2)


def test_places_of_columns() -> None:
    sample = samples.reduction((333, 3), (0,), "argmax")
    check(sample.kernel, sample.arrays({}), {}, 2)


def test_text() -> None:
    """The number of terms decides the parts."""
    first, last = split_reductions(normalize(samples.reduction((1_000_003,), (0,)).kernel)).kernels
    assert "axis i0 in" not in show_kernel(first)
    assert [b.shape for b in first.outputs] == [(30,)]
    assert last.inputs[-1] == first.outputs[0]
