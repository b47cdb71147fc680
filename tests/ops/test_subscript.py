"""x[index] and index_update against NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata import ops
from strata.config import using
from strata.core import TensorType, bool_, f32, f64, i64, sym
from strata.errors import DTypeError, IndexRangeError, OptionError, TraceError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
I = np.array([1, 0, -1])
J = np.array([[0], [2]])
MASK = np.array([[True, False, True], [False, True, True]])

INDICES = [
    0, -1, (0, 1), (slice(None), 2), slice(1, 2), (..., slice(None, None, 2)), (..., slice(None, None, -1)),
    (slice(None), slice(None), slice(3, 0, -2)), (slice(None), slice(5, 1)), (slice(-2, None), None, ..., 3, None),
    None, ..., (), (0, 1, 2, 3), (..., None, 1), I, (slice(None), I), (I, slice(None), I), (I, I), (I, J),
    (slice(None), J, I), (slice(None), I, I),
    (slice(None), I, slice(None), J), (0, slice(None), I), (slice(None), 0, I), (slice(None), 0, slice(None), I),
    (slice(None), I, None, J), (I, ..., J), (I, None, J), (I, 1, ..., None), (0, ..., I), ([0, 1], [0, 2], ..., [1]),
    (I, slice(None, None, -1), I, slice(1, 4, 2)), MASK, (MASK, I[:1]),
    (MASK, ..., np.array([True, False, True, True, True])),
    (slice(None), np.array([True, False, True])), True, False, (slice(None), True), (I, True), (I, slice(None), True),
    [], ([], I[:0]),
    (slice(None), np.array(1)), np.array(True), np.zeros((2, 0), np.int64), (slice(None), I, ..., J), range(1, 2),
    (slice(None), I, I, ..., J), (slice(None), slice(None), 1, ..., I),
]  # fmt: skip


def show(index: object) -> str:
    return repr(index).replace("\n", " ")


@pytest.mark.parametrize("index", INDICES, ids=show)
def test_getitem(index) -> None:
    x = placeholder("x", f32[2, 3, 4, 5])
    out = x[index]
    expected = X[index]
    assert out.shape == expected.shape
    np.testing.assert_array_equal(evaluate_values([out], {x: X}, {})[0], expected)


@pytest.mark.parametrize("index", INDICES, ids=show)
@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_index_update(index, reduction: str) -> None:
    x, v = (
        placeholder("x", f32[2, 3, 4, 5]),
        np.random.default_rng(0).standard_normal(X[index].shape).astype(np.float32) * 100,
    )
    expected = X.copy()
    if reduction == "none":
        expected[index] = v
    else:
        {"add": np.add, "max": np.maximum}[reduction].at(expected, index, v)
    out = ops.index_update(x, index, v, reduction=reduction)
    np.testing.assert_array_equal(evaluate_values([out], {x: X}, {})[0], expected)


@pytest.mark.parametrize("index", INDICES, ids=show)
def test_gradient_of_getitem_is_a_scatter(index) -> None:
    x = placeholder("x", f64[2, 3, 4, 5])
    out = x[index]
    ct = np.random.default_rng(1).standard_normal(X[index].shape)
    seed = placeholder("ct", TensorType(f64, ct.shape))
    (grad,) = pullback([out], [seed], [x])
    expected = np.zeros(X.shape)
    np.add.at(expected, index, ct)
    got = np.zeros(X.shape) if grad is None else evaluate_values([grad], {x: X.astype(np.float64), seed: ct}, {})[0]
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def items(n: int) -> st.SearchStrategy:
    bound = st.none() | st.integers(-n - 2, n + 2)
    slices = st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 3, -1, -2, -3]))
    arrays = st.lists(st.integers(-n, n - 1), min_size=1, max_size=1).map(np.array)
    pairs = st.lists(st.integers(-n, n - 1), min_size=2, max_size=2).map(lambda v: np.array(v).reshape(2, 1))
    return st.one_of(st.integers(-n, n - 1), slices, arrays, pairs)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_getitem_as_numpy_for_any_index(data) -> None:
    rank = data.draw(st.integers(0, 4))
    index = [data.draw(items(2 if rank < 4 else n)) for n in X.shape[:rank]]
    for _ in range(data.draw(st.integers(0, 2))):
        index.insert(data.draw(st.integers(0, len(index))), None)
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), ...)
    index = tuple(index)
    x = placeholder("x", f32[2, 3, 4, 5])
    np.testing.assert_array_equal(evaluate_values([x[index]], {x: X}, {})[0], X[index])


def test_ids_known_only_at_run_time() -> None:
    x, i, j = placeholder("x", f32[2, 3, 4, 5]), placeholder("i", i64[3]), placeholder("j", i64[()])
    ids, one = np.array([1, 0, -1]), np.array(-2)
    for out, expected in [
        (x[i], X[ids]), (x[:, j], X[:, -2]), (x[i, :, j], X[ids, :, -2]), (x[0, :, i], X[0, :, ids]),
        (x[[j, j]], X[[-2, -2]]),
        (x[j, ..., 1], X[-2, ..., 1]), (x[:, i, i, ::-1], X[:, ids, ids, ::-1]),
    ]:  # fmt: skip
        np.testing.assert_array_equal(evaluate_values([out], {x: X, i: ids, j: one}, {})[0], expected)


def test_out_of_range_at_run_time() -> None:
    x, i = placeholder("x", f32[3]), placeholder("i", i64[2])
    arrays = {x: np.arange(3, dtype=np.float32), i: np.array([0, 3])}
    np.testing.assert_array_equal(evaluate_values([x[i]], arrays, {})[0], [0, 2])
    with using(check_indices=True), pytest.raises(IndexRangeError, match=r"id 3 is outside -3..2"):
        evaluate_values([x[i]], arrays, {})


@pytest.mark.parametrize(
    "index", [np.s_[1:], np.s_[:-1], np.s_[-1], np.s_[::-1], np.s_[:3], np.s_[1:-1:2], np.s_[-2:], np.s_[::-2]]
)
@pytest.mark.parametrize("size", [3, 4, 7])
def test_symbolic_sizes(index, size: int) -> None:
    graph = Graph()
    x = graph.input("x", (sym("S", 3), 2))
    graph.outputs(x[index])
    data = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2)
    (got,) = evaluate(graph, {"x": data})
    np.testing.assert_array_equal(got, data[index])
    bound = graph.bind({"S": size})
    np.testing.assert_array_equal(evaluate(bound, {"x": data})[0], data[index])


def test_index_update_with_symbolic_size() -> None:
    size = sym("S", 3)
    graph = Graph()
    x, v = graph.input("x", (size,)), graph.input("v", (size - 1,))
    graph.outputs(ops.index_update(x, np.s_[1:], v))
    data = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(evaluate(graph, {"x": data, "v": -data[1:]})[0], [0, -1, -2, -3, -4])


def test_gradient_of_index_update_with_repeated_ids_goes_to_the_last() -> None:
    x, v = placeholder("x", f64[4]), placeholder("v", f64[3])
    out = ops.index_update(x, np.array([1, 1, 2]), v)
    ct = placeholder("ct", f64[4])
    grads = pullback([out], [ct], [x, v])
    gx, gv = evaluate_values(grads, {x: np.zeros(4), v: np.zeros(3), ct: np.arange(1.0, 5.0)}, {})
    np.testing.assert_array_equal(gx, [1, 0, 0, 4])
    np.testing.assert_array_equal(gv, [0, 2, 3])


def test_mistakes() -> None:
    x = placeholder("x", f32[2, 3])
    with pytest.raises(IndexRangeError, match=r"3 indices for f32\[2, 3\], which has 2 axes"):
        x[0, 0, 0]
    with pytest.raises(IndexRangeError, match=r"index 2 is outside axis 0 of f32\[2, 3\]"):
        x[2]
    with pytest.raises(IndexRangeError, match=r"index -4 is outside axis 1"):
        x[:, [0, -4]]
    with pytest.raises(TraceError, match="where"):
        x[placeholder("m", bool_[2])]
    with pytest.raises(TraceError, match="dynamic_slice"):
        x[placeholder("i", i64[()]) :]
    with pytest.raises(DTypeError, match="ints, slices"):
        x[1.5]
    with pytest.raises(DTypeError, match="must be integers"):
        x[placeholder("f", f32[2])]
    with pytest.raises(OptionError, match="non-zero"):
        x[::0]
    with pytest.raises(OptionError, match="more than once"):
        x[..., ...]
    with pytest.raises(IndexRangeError, match=r"a mask of shape \[3\] does not fit f32\[2, 3\]"):
        x[np.ones(3, bool)]
