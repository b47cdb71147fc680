"""Rows padded to a bucket and cut off again: which graphs allow it, and which axes it is on."""

from __future__ import annotations

import numpy as np
import pytest

from strata import ops
from strata.errors import OptionError, ShapeError
from strata.mir import Graph
from strata.runtime import (
    BucketedCompileCache,
    pad_rows,
    slice_rows,
)


def test_pad_and_slice_rows() -> None:  # behaviour 94
    np.testing.assert_array_equal(pad_rows([1.0, 2, 3, 4], 2, 3), [1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(pad_rows(np.ones((2, 3), np.int8), None, 3), [[1] * 3, [1] * 3, [0] * 3])
    np.testing.assert_array_equal(slice_rows([1, 2, 3, 4, 5, 6], 2, 2), [1, 2, 3, 4])
    for call in (
        lambda: pad_rows([1, 2, 3], 0, 4),
        lambda: pad_rows([1, 2, 3], 2, 4),
        lambda: pad_rows([1, 2, 3, 4], 2, 1),
        lambda: slice_rows([1, 2, 3], 2, 1),
        lambda: slice_rows([1, 2], 1, 3),
        lambda: slice_rows([1, 2], 1, -1),
    ):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(ShapeError, match="exceed upper"):
        pad_rows([1, 2, 3, 4], 1, 3)


def test_run_padded_takes_rows_of_any_shape_and_dtype() -> None:
    def build(upper: int) -> Graph:
        g = Graph("rows")
        x, w = g.input("x", (upper, 2, 3), "f64"), g.input("w", (3,), "f64")
        return g.outputs(x * w, w.sum())

    cache = BucketedCompileCache("cpu", [range(1, 9)])
    data, w = np.arange(30.0).reshape(5, 2, 3), np.array([1.0, 2, 3])
    found = cache.run_padded(5, 5, build, [("x", data, 6), ("w", w, None)])
    assert found is not None
    np.testing.assert_array_equal(found[1][0], data * w)
    assert float(found[1][1]) == 6
    flat = cache.run_padded(5, 5, build, [("x", data.reshape(-1), 6), ("w", w, None)])
    assert flat is not None
    np.testing.assert_array_equal(flat[1][0], data * w)
    with pytest.raises(ShapeError, match="has 5 rows, 4"):
        cache.run_padded(5, 4, build, [("x", data, 6), ("w", w, None)])


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: ops.softmax(x, axis=0),
        lambda x: x - x.mean(axis=0),
        lambda x: ops.flip(x, axis=0),
        lambda x: x @ x.T @ x,
    ],
)
def test_graphs_that_mix_rows_are_refused(mix) -> None:
    def build(upper: int) -> Graph:
        g = Graph("mix")
        return g.outputs(mix(g.input("x", (upper, 3))))

    cache = BucketedCompileCache("cpu", [range(1, 9)])
    with pytest.raises(OptionError, match="padding would change the results"):
        cache.run_padded(5, 5, build, {"x": np.ones((5, 3), np.float32)})


@pytest.mark.parametrize("kind", ["f32", "bool"])
def test_a_mask_makes_attention_over_padded_rows_right(kind: str, rng) -> None:
    def build(upper: int) -> Graph:
        g = Graph("attend")
        x, m = g.input("x", (upper, 8)), g.input("m", (1, 1, 1, upper), kind)
        q = ops.reshape(x, (1, upper, 8))
        how = "bias" if kind == "f32" else "custom"
        return g.outputs(ops.reshape(ops.attention(q, q, q, m, num_heads=2, layout="bsd", mask_kind=how), (upper, 8)))

    cache = BucketedCompileCache("cpu", [range(1, 9)])
    data = rng.standard_normal((5, 8)).astype(np.float32)
    with pytest.raises(OptionError, match="mask="):
        cache.run_padded(5, 5, build, {"x": data})
    found = cache.run_padded(5, 5, build, {"x": data}, mask="m")
    exact = BucketedCompileCache("cpu", [range(5, 6)]).run_padded(5, 5, build, {"x": data}, mask="m")
    assert found is not None
    assert exact is not None
    np.testing.assert_allclose(found[1][0], exact[1][0], rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="has no axis of 8"):
        cache.run_padded(5, 5, build, {"x": data}, mask="x2")


def mean_of_other(upper: int) -> Graph:
    g = Graph("mean")
    x, y = g.input("x", (upper, 3)), g.input("y", (upper, 3))
    return g.outputs(x + ops.mean(y, 0, keepdims=True))


@pytest.mark.parametrize("whole_first", [True, False])
def test_each_choice_of_padded_inputs_is_checked(whole_first: bool) -> None:
    cache = BucketedCompileCache("cpu", [range(1, 9)])
    x, y = np.ones((5, 3), np.float32), np.ones((8, 3), np.float32)

    def with_y_whole() -> None:
        found = cache.run_padded(5, 5, mean_of_other, [("x", x, 3), ("y", y, None)])
        assert found is not None
        np.testing.assert_array_equal(found[1][0], np.full((5, 3), 2))

    def with_y_padded() -> None:
        with pytest.raises(OptionError, match="padding would change") as error:
            cache.run_padded(5, 5, mean_of_other, [("x", x, 3), ("y", x, 3)])
        assert error.value.code == "O408"

    for call in (with_y_whole, with_y_padded) * 2 if whole_first else (with_y_padded, with_y_whole) * 2:
        call()
    assert cache.compiled_count() == 1


def test_padding_is_cut_from_the_axis_that_it_is_on() -> None:
    def build(upper: int) -> Graph:
        g = Graph("g")
        x, table = g.input("x", (upper, 3)), g.input("table", (8, 2))
        return g.outputs(x * 2.0, x.T + 1.0, table * 3.0)

    cache = BucketedCompileCache("cpu", [range(1, 9)])
    x, table = np.ones((5, 3), np.float32), np.ones((8, 2), np.float32)
    given = [("x", x, 3), ("table", table, None)]
    found = cache.run_padded(5, 5, build, given)
    assert found is not None
    assert [a.shape for a in found[1]] == [(5, 3), (3, 5), (8, 2)]
    found = cache.run_padded(5, 5, build, given, [1, 0, 1])
    assert found is not None
    assert [a.shape for a in found[1]] == [(5, 3), (3, 8), (5, 2)]


def test_rows_of_another_length_are_not_laid_out_anew() -> None:
    def build(upper: int) -> Graph:
        g = Graph("g")
        return g.outputs(g.input("x", (4, upper)) * 2.0)

    with pytest.raises(ShapeError):
        BucketedCompileCache("cpu", [range(1, 9)]).run_padded(5, 5, build, [("x", np.ones((5, 4), np.float32), 4)])


def flat(n: int) -> Graph:
    """Rows of three one after the other, in and out."""
    g = Graph("flat")
    x = g.input("x", (3 * n,))
    soft = ops.softmax(ops.reshape(x, (n, 3)), axis=1)
    return g.outputs(ops.reshape(soft, (3 * n,)), x * 2.0)


def test_rows_in_one_flat_axis(rng: np.random.Generator) -> None:
    cache = BucketedCompileCache("cpu", [range(1, 16)])
    data = rng.standard_normal(30).astype(np.float32)
    for rows in (data, data.reshape(10, 3)):
        upper, (soft, double) = cache.run_padded(10, 10, flat, [("x", rows, 3)], [3, 3])
        assert (upper, soft.shape, double.shape) == (15, (30,), (30,))
        np.testing.assert_allclose(soft.reshape(10, 3).sum(axis=1), 1, rtol=1e-6)
        np.testing.assert_array_equal(double, data * 2)
    _, (_, whole) = cache.run_padded(10, 10, flat, [("x", data, 3)], [3, 0])
    assert whole.shape == (45,)
    np.testing.assert_array_equal(whole[30:], 0)
    with pytest.raises(ShapeError, match="29 elements, 10 rows of 3"):
        cache.run_padded(10, 10, flat, [("x", data[:29], 3)], [3, 3])

    def mixing(n: int) -> Graph:
        g = Graph("mixing")
        return g.outputs(ops.softmax(g.input("x", (3 * n,)), axis=0))

    with pytest.raises(OptionError, match="padding would change"):
        BucketedCompileCache("cpu", [range(1, 16)]).run_padded(10, 10, mixing, [("x", data, 3)], [3])
