"""Products whose elements are moved: with them where whole runs stay together, behind them where not."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends.llvm.gemm.match import find_matmul
from strata.mir import Graph


@pytest.mark.parametrize("shape", [(64, 32, 48), (3, 64, 20, 48)])
def test_pixels_that_are_shuffled_leave_a_product_whole(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Columns that lie far from each other afterwards would make it many products of two."""
    *lead, rows, inner, columns = shape
    g = Graph("shuffled")
    x, w = g.input("x", (*lead, inner, columns)), g.input("w", (rows, inner))
    apart = (w @ x).reshape((*lead, rows // 4, 2, 2, 4, columns // 4))
    n = len(lead)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    g.outputs(apart.transpose(order).reshape((*lead, rows // 4, 8, columns // 2)) + 1.0)
    compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=1))
    (product, *_) = compiled.lir.kernels.values()
    assert find_matmul(product) is not None
    assert compiled.explain().kernel_count == 2
    arrays = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in (("x", x), ("w", w))}
    (wanted,) = st.evaluate(g, arrays)
    np.testing.assert_allclose(compiled.run(arrays)[0], wanted, rtol=1e-4, atol=1e-4)


def test_heads_that_are_put_together_stay_with_their_product() -> None:
    g = Graph("heads")
    p, v = g.input("p", (2, 4, 16, 24)), g.input("v", (2, 4, 24, 8))
    g.outputs((p @ v).transpose((0, 2, 1, 3)).reshape((2, 16, 32)))
    assert st.Session("cpu").compile(g).explain().kernel_count == 1


def test_what_waits_for_a_step_behind_a_product_is_no_epilogue_of_it(rng: np.random.Generator) -> None:
    """Its squares are summed up in the kernel that computes them, and are not stored."""
    g = Graph("behind")
    x, w = g.input("x", (6, 8)), g.param("w", (8, 16))
    product = x @ w
    total = product + ops.sort(product)
    g.outputs(total, ops.sum(total * total, axis=-1))
    compiled = st.Session("cpu").compile(g)
    assert [b.type.shape for b in compiled.lir.buffers if b.role == "scratch"] == [(6, 16)] * 2  # product, sorted
    arrays = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in (("x", x), ("w", w))}
    compiled.set_param("w", arrays["w"])
    for got, wanted in zip(compiled.run(x=arrays["x"]), st.evaluate(g, arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_terms_that_a_reshape_puts_together_are_those_of_one_matmul(rng: np.random.Generator) -> None:
    """Looked-up rows side by side, and a layer behind them: a matmul by the template, with the bits of one without."""
    x, w = rng.normal(size=(20, 6, 32)).astype(np.float32), rng.normal(size=(48, 192)).astype(np.float32)
    results = []
    for shape in ((20, 6, 32), (20, 192)):
        g = Graph("reshaped")
        rows = g.input("x", shape).reshape((20, 192))
        g.outputs(rows @ g.param("w", (48, 192)).transpose((1, 0)))
        compiled = st.Session("cpu").compile(g)
        assert all(find_matmul(k) is not None for k in compiled.lir.kernels.values())
        compiled.set_param("w", w)
        results.append(compiled.run(x=x.reshape(shape))[0])
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[0], x.reshape(20, 192) @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", ["rows", "reshaped"])
def test_what_matmuls_read_in_place_does_not_depend_on_their_order(first: str, rng: np.random.Generator) -> None:
    """One could read the argument itself, the other only what it was turned to: that is stored, for both."""
    g = Graph("turned")
    x, a, b = g.input("x", (96, 80)), g.input("a", (96, 32)), g.input("b", (192, 32))
    turned = x.transpose((1, 0))[0:64]
    results = [turned @ a, turned.reshape((32, 192)) @ b]
    g.outputs(*(results if first == "rows" else results[::-1]))
    compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=1))
    assert sum(find_matmul(k) is not None for k in compiled.lir.kernels.values()) == 2
    assert [b.type.shape for b in compiled.lir.buffers if b.role == "scratch"] == [(80, 96)]
    arrays = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in (("x", x), ("a", a), ("b", b))}
    for made, wanted in zip(compiled.run(arrays), st.evaluate(g, arrays), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", ["matmul", "sort"])
def test_what_another_reader_needs_stored_is_no_view_of_anything(first: str) -> None:
    """Its matmul reads it where it is stored, so what it is made from is not stored, too."""
    g = Graph("stored")
    x, a = g.input("x", (64, 128)), g.input("a", (64, 32))
    turned = ops.relu(x).transpose((1, 0))
    results = [turned @ a, ops.sort(turned)]
    g.outputs(*(results if first == "matmul" else results[::-1]))
    compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=1))
    assert [b.type.shape for b in compiled.lir.buffers if b.role == "scratch"] == [(128, 64)]
