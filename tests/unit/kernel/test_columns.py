"""Rows that are read at the places of a table: several rows go by while its columns stay in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
import strata.ops as functions
from strata.backends.llvm.codegen.compile import compile_kernel, lower
from strata.core import Target, sym
from strata.kernel import Kernel, Prefetch, interpret, normalize
from strata.kernel.passes.hoist_gather import columns_first

torch = pytest.importorskip("torch")
ops: Any = functions
TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]


def taken(rows: object, width: int, columns: int, dtype: str = "f32", *, by_row: bool = False) -> Kernel:
    """x[rows, width] at the places of a table of columns, or of a table for each row."""
    g = st.Graph("g")
    x, t = g.input("x", (rows, width), dtype), g.input("t", (rows, columns) if by_row else (columns,), "i64")
    y = ops.take_along_axis(x, t, 1) if by_row else ops.take(x, t, axis=1)
    g.outputs(y + y)
    (kernel,) = st.CompilePipeline("cpu").compile(g).lir.kernels.values()
    return kernel


def extents(kernel: Kernel) -> list[object]:
    return [a.extent for a in columns_first(normalize(kernel)).stores[0].axes]


def test_which_kernels_are_turned() -> None:
    assert extents(taken(1792, 64, 28)) == [112, 28, 16]
    assert extents(taken(30, 64, 28)) == [3, 28, 10]
    assert extents(taken(31, 64, 28)) == [31, 28]  # no number of rows goes by evenly
    assert extents(taken(32, 64, 5)) == [32, 5]  # few columns
    assert extents(taken(32, 5000, 28)) == [32, 28]  # rows that no near cache holds
    assert extents(taken(32, 64, 28, by_row=True))[-1] == 28  # each row has its own places


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i8", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (48, 37), (1792, 28), (20, 130), (80, 16)])
def test_values(rows: int, columns: int, dtype: str, target: str, rng: np.random.Generator) -> None:
    kernel = taken(rows, 64, columns, dtype)
    x = (rng.normal(size=(rows, 64)) * 50).astype(st.core.as_dtype(dtype).np)
    table = rng.integers(0, 64, columns)
    given = [table if b.shape == table.shape else x for b in kernel.inputs]
    (wanted,) = interpret(kernel, given)
    native = compile_kernel(kernel, Target.named(target))
    for threads in (1, 2, 7):
        (got,) = native.run(given, threads=threads)
        np.testing.assert_array_equal(got, wanted)


def test_rows_of_a_size_that_is_not_known(rng: np.random.Generator) -> None:
    g = st.Graph("resize")
    x = g.input("x", (sym("n", 1, 8), 16, 24, 40))
    g.outputs(ops.interpolate(x, size=(11, 17), mode="bilinear"))
    c = st.Session("cpu").compile(g)
    for images in (1, 3):
        data = rng.standard_normal((images, 16, 24, 40)).astype("f")
        expected = torch.nn.functional.interpolate(torch.from_numpy(data).double(), size=(11, 17), mode="bilinear")
        np.testing.assert_allclose(c.run(x=data)[0], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("columns", [100, 256, 511])
def test_rows_of_much_memory_are_asked_for_before_elements_are_picked(by_row: bool, columns: int) -> None:
    g = st.Graph("g")
    rows = 20_000
    x, t = g.input("x", (rows, 256)), g.input("t", (rows, columns) if by_row else (columns,), "i64")
    g.outputs(ops.take_along_axis(x, t, 1) if by_row else ops.take(x, t, axis=1))
    compiled = st.Session("cpu").compile(g)
    (kernel,) = compiled.lir.kernels.values()
    assert extents(kernel) == [rows, columns]
    hints = [a for a in lower(kernel, Target.named("host")).schedule.actions if isinstance(a, Prefetch)]
    picked = [a for a in hints if a.buffer == kernel.input_names[-1]]
    assert [a.ahead % 256 for a in picked] == ([0] if columns >= 128 else [])  # of too few elements, no whole row
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, 256)).astype("f4")
    ids = rng.integers(-256, 256, (rows, columns) if by_row else (columns,))
    want = np.take_along_axis(a, ids, 1) if by_row else a[:, ids]
    for threads in (1, 2, 7):
        with st.config.using(num_threads=threads):
            np.testing.assert_array_equal(compiled.run(x=a, t=ids)[0], want)
