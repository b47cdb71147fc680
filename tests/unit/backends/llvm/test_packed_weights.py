"""Packed weights: side by side when they are first set, and by themselves when they are set again."""

import itertools

import numpy as np
import pytest

from strata.core import f32, f64, sym
from strata.mir import Graph
from strata.runtime import Session

WIDTHS = (48, 130, 7, 300)


def _chain():
    g = Graph("chain")
    x = g.input("x", f32[5, WIDTHS[0]])
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        x = x @ g.param(f"w{i}", f32[a, b])
    g.outputs(x)
    return Session("cpu").compile(g)


def test_weights_are_side_by_side_and_may_be_set_again(rng: np.random.Generator) -> None:
    c = _chain()
    shapes = list(itertools.pairwise(WIDTHS))
    weights = [rng.standard_normal(s).astype("f") for s in shapes]
    x = rng.standard_normal((5, WIDTHS[0])).astype("f")

    def check() -> None:
        want = x.astype("f8")
        for w in weights:
            want = want @ w
        np.testing.assert_allclose(c.run(x=x)[0], want, rtol=1e-3, atol=1e-3)

    for i, w in enumerate(weights):
        c.set_param(f"w{i}", w)
    check()
    packed = list(c._executable._packed)  # type: ignore[attr-defined]
    assert len(packed) == 3
    places = sorted((w.memory.address, w.size) for w in packed)
    for (at, size), (following, _) in itertools.pairwise(places):
        assert at % 64 == 0
        assert size <= following - at < size + 64
    held = c.memory.packed
    for i in (1, 0, 2, 1):
        weights[i] = rng.standard_normal(shapes[i]).astype("f")
        c.set_param(f"w{i}", weights[i])
        check()
    assert c.memory.packed == held


def test_a_product_that_reads_its_factor_where_it_lies_does_not_pack_for_others(rng: np.random.Generator) -> None:
    """Both factors are 8×8 matrices of one layout, but only the weight is packed."""
    g = Graph("beside")
    x, w = g.input("x", f64[8, 8]), g.param("w", f64[8, 8])
    g.outputs((x.transpose((1, 0)) @ x) @ w)
    c = Session("cpu").compile(g)
    a, b = rng.standard_normal((2, 8, 8))
    c.set_param("w", b)
    np.testing.assert_allclose(c.run(x=a)[0], a.T @ a @ b, rtol=1e-12, atol=1e-12)


def test_a_matrix_that_is_no_weight_is_not_packed_for_one_vector(rng: np.random.Generator) -> None:
    for given in ("input", "param"):
        g = Graph("vector")
        a, v = getattr(g, given)("a", f32[37, 130]), g.input("v", f32[130])
        g.outputs((a @ v) * 0.5 + 1.0)
        c = Session("cpu").compile(g)
        x, y = rng.standard_normal((37, 130)).astype("f"), rng.standard_normal(130).astype("f")
        feeds = {"v": y}
        if given == "input":
            feeds["a"] = x
        else:
            c.set_param("a", x)
        np.testing.assert_allclose(c.run(feeds)[0], x @ y * 0.5 + 1, rtol=1e-5, atol=1e-5)
        kernels = c._executable.kernels.values()  # type: ignore[attr-defined]
        assert any(k.product is not None and k.product.is_packed for k in kernels) == (given == "param")


def test_a_vector_that_stays_is_no_matrix_to_pack_for(rng: np.random.Generator) -> None:
    """A point-wise convolution to one output reads its image where it lies; images of a batch get the same bits."""
    w, images = rng.standard_normal((1, 70, 1, 1)).astype("f"), rng.standard_normal((5, 70, 8, 18)).astype("f")
    found = []
    for count in (1, 5):
        g = Graph("conv")
        g.outputs(g.input("x", (count, 70, 8, 18)).conv2d(g.param("w", w.shape)).relu())
        c = Session("cpu").compile(g)
        c.set_param("w", w)
        (y,) = c.run(x=images[:count])
        expected = np.maximum(np.einsum("nkhw,k->nhw", images[:count], w.reshape(70)), 0)
        np.testing.assert_allclose(y[:, 0], expected, rtol=1e-4, atol=1e-4)
        kernels = c._executable.kernels.values()  # type: ignore[attr-defined]
        assert not any(k.product is not None and k.product.is_packed for k in kernels)
        found.append(y[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("outputs", [1, 3, 40])
def test_images_are_read_in_place_with_the_bits_of_any_batch_and_size(
    rng: np.random.Generator, outputs: int, taps: int
) -> None:
    w, images = rng.standard_normal((outputs, 70, taps, taps)), rng.standard_normal((5, 70, 8, 18))
    found = []
    for shape in (images.shape, (sym("N"), 70, 8, 18), (5, 70, sym("H"), sym("W"))):
        g = Graph("conv")
        g.outputs(g.input("x", shape).conv2d(g.param("w", w.shape)))
        c = Session("cpu").compile(g)
        c.set_param("w", w.astype("f"))
        found.append(c.run(x=images.astype("f"))[0])
        if taps == 1 and isinstance(shape[-1], int):
            kernels = c._executable.kernels.values()  # type: ignore[attr-defined]
            assert not any(k.product.is_packed for k in kernels if k.product is not None)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
