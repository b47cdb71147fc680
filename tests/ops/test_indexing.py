"""Gathers, scatters and moving windows against torch, NumPy and plain loops; cases of the op specification."""

import itertools

import numpy as np
import pytest
import torch

import strata as st
from strata import ops
from strata.config import using
from strata.core import f32, f64, i32, i64, sym
from strata.errors import DTypeError, IndexRangeError, OptionError, ShapeError
from strata.mir import Graph, Value, batch, evaluate, evaluate_values, placeholder, pullback
from tests.ops.evaluation import gradients, hessian_product, leaf, run

RNG = np.random.default_rng(0)


# -------------------------------------------------------------------------------------------------------------- gathers


def test_case_70_gather_shape() -> None:
    table, ids = placeholder("t", f32[30522, 384]), placeholder("i", i64[4, 15])
    assert ops.gather(table, ids).shape == (4, 15, 384)


def test_case_93_gather_axis_1_with_two_axes_of_i32_ids() -> None:
    table = RNG.standard_normal((2, 5, 3))
    ids = RNG.integers(0, 5, (4, 2)).astype(np.int32)
    np.testing.assert_array_equal(run(lambda t, i: ops.gather(t, i, 1), table, ids), table[:, ids])


def test_case_93_embedding_gradient_with_batched_ids() -> None:
    """W7, W8: every id of [B, S] counts, also where ids repeat."""
    table, ids = RNG.standard_normal((7, 3)), np.array([[1, 1, 6], [0, 1, 6]])
    ct = RNG.standard_normal((2, 3, 3))
    expected = np.zeros_like(table)
    for b, s in itertools.product(range(2), range(3)):
        expected[ids[b, s]] += ct[b, s]
    grad, _ = gradients(lambda t, i: ops.embedding(i, t), [table, ids], ct)
    np.testing.assert_allclose(grad, expected, rtol=1e-12)
    np.testing.assert_allclose(run(lambda c, i: ops.gather_backward(c, i, 7), ct, ids), expected, rtol=1e-12)


def test_gather_backward_on_an_inner_axis() -> None:
    ids, ct = np.array([[0, 3], [3, 3]]), RNG.standard_normal((2, 2, 2, 3))
    expected = np.zeros((2, 4, 3))
    for a, b in itertools.product(range(2), range(2)):
        expected[:, ids[a, b]] += ct[:, a, b]
    np.testing.assert_allclose(run(lambda c, i: ops.gather_backward(c, i, 4, 1), ct, ids), expected, rtol=1e-12)


def test_symbolic_sizes() -> None:
    rows, count = sym("V", 1), sym("S", 1)
    graph = Graph()
    table, ids = graph.input("t", (rows, 3)), graph.input("i", (count,), "i64")
    out = ops.gather(table, ids)
    (grad,) = pullback([out], [out], [table])
    graph.outputs(out, grad, ops.one_hot(ids, rows), table[ids, 1:])
    data, at = RNG.standard_normal((4, 3)).astype(np.float32), np.array([3, 0, 3])
    added = np.zeros_like(data)
    np.add.at(added, at, data[at])
    expected = [data[at], added, np.eye(4)[at], data[at, 1:]]
    for got, want in zip(evaluate(graph, {"t": data, "i": at}), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_float_ids_are_truncated() -> None:
    table = np.arange(5.0)
    np.testing.assert_array_equal(run(ops.gather, table, np.float32([0.0, 3.7, 2.0])), [0, 3, 2])


@pytest.mark.parametrize("wrap", [False, True])
def test_ids_outside_their_axis_are_clamped_or_an_error_in_the_interpreter_too(wrap: bool) -> None:
    """W21."""
    table = np.arange(4.0)
    for bad in [4, -5] if wrap else [4, -5, -1]:
        np.testing.assert_array_equal(
            run(lambda t, i: ops.gather(t, i, wrap=wrap), table, np.array([bad])), [3 if bad > 0 else 0]
        )
        with using(check_indices=True), pytest.raises(IndexRangeError, match=f"id {bad} is outside"):
            run(lambda t, i: ops.gather(t, i, wrap=wrap), table, np.array([bad]))
        with pytest.raises(IndexRangeError, match=f"id {bad} is outside"):  # known when the graph is made
            run(lambda t, bad=bad: ops.gather(t, np.array([bad]), wrap=wrap), table)
    if wrap:
        np.testing.assert_array_equal(run(lambda t, i: ops.gather(t, i, wrap=True), table, np.array([-1, -4])), [3, 0])


def test_take_along_axis_broadcasts() -> None:
    x, ids = RNG.standard_normal((3, 4)), np.array([[1, -1]])
    np.testing.assert_array_equal(run(lambda a, i: ops.take_along_axis(a, i, 1), x, ids), np.take_along_axis(x, ids, 1))


def test_gather_elements_as_torch() -> None:
    x, ids = RNG.standard_normal((3, 5, 4)), RNG.integers(0, 5, (2, 6, 4))
    expected = torch.gather(torch.tensor(x), 1, torch.tensor(ids)).numpy()
    np.testing.assert_array_equal(run(lambda a, i: ops.gather_elements(a, i, 1), x, ids), expected)


def test_gather_nd_as_a_loop() -> None:
    x, ids = RNG.standard_normal((2, 3, 4, 2)), RNG.integers(0, 3, (2, 5, 2))
    expected = np.stack([[x[b, i, j] for i, j in ids[b]] for b in range(2)])
    np.testing.assert_array_equal(run(lambda a, i: ops.gather_nd(a, i, batch_dims=1), x, ids), expected)


def test_one_hot_as_torch() -> None:
    ids = np.array([[0, 2], [1, 3]])
    expected = torch.nn.functional.one_hot(torch.tensor(ids), 4).numpy()
    np.testing.assert_array_equal(run(lambda i: ops.one_hot(i, 4), ids), expected)
    np.testing.assert_array_equal(run(lambda i: ops.one_hot(i, 4, axis=0), ids), np.moveaxis(expected, -1, 0))
    np.testing.assert_array_equal(run(lambda i: ops.one_hot(i, 2), np.array([5, -1])), np.zeros((2, 2)))


# ------------------------------------------------------------------------------------------------------------- scatters

TORCH = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@pytest.mark.parametrize("reduction", TORCH)
def test_scatter_elements_and_its_gradient_as_torch(reduction: str) -> None:
    x, updates, ct = RNG.standard_normal((4, 3)), RNG.standard_normal((6, 3)), RNG.standard_normal((4, 3))
    ids = RNG.integers(0, 4, (6, 3))

    def fn(a: Value, i: Value, u: Value) -> Value:
        return ops.scatter_elements(a, i, u, 0, reduction=reduction)

    tx, tu = torch.tensor(x, requires_grad=True), torch.tensor(updates, requires_grad=True)
    expected = tx.scatter_reduce(0, torch.tensor(ids), tu, TORCH[reduction])
    np.testing.assert_allclose(run(fn, x, ids, updates), expected.detach().numpy(), rtol=1e-12)
    expected.backward(torch.tensor(ct))
    gx, none, gu = gradients(fn, [x, ids, updates], ct)
    assert none is None
    np.testing.assert_allclose(gx, tx.grad.numpy(), rtol=1e-10)
    np.testing.assert_allclose(gu, tu.grad.numpy(), rtol=1e-10)


def test_ties_of_scatter_max_share_the_derivative() -> None:
    x, ids, updates, ct = np.array([2.0, 5.0]), np.array([0, 0, 1]), np.array([2.0, 2.0, 1.0]), np.array([3.0, 4.0])
    gx, _, gu = gradients(lambda a, i, u: ops.scatter_elements(a, i, u, reduction="max"), [x, ids, updates], ct)
    np.testing.assert_allclose(gx, [1, 4])
    np.testing.assert_allclose(gu, [1, 1, 0])


@pytest.mark.parametrize("form", ["elements", "nd"])
def test_scatter_mul_is_exact_at_zeros_also_twice(form: str) -> None:
    ids = np.array([1, 1, 1, 0, 1])
    updates = np.array([0.0, 2.0, 0.0, 3.0, -1.5])
    x = np.array([2.0, 0.5])

    def fn(u: Value) -> Value:
        if form == "elements":
            return ops.scatter_elements(x, ids, u, reduction="mul")
        return ops.scatter_nd(x, ids[:, None], u, reduction="mul")

    ct, v = np.array([1.0, 2.0]), RNG.standard_normal(5)
    (grad,) = gradients(fn, [updates], ct)
    np.testing.assert_allclose(grad, [0, 0, 0, 2, 0], atol=1e-15)
    got, expected = hessian_product(fn, updates, ct, v)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
    assert np.any(np.abs(expected) > 0.1)


def test_scatter_nd_as_a_loop() -> None:
    x, ids, updates = RNG.standard_normal((3, 4, 2)), RNG.integers(0, 3, (5, 2)), RNG.standard_normal((5, 2))
    for reduction, step in {"none": lambda a, b: b, "add": np.add, "mul": np.multiply, "min": np.minimum}.items():
        expected = x.copy()
        for (i, j), u in zip(ids, updates, strict=True):
            expected[i, j] = step(expected[i, j], u)
        got = run(lambda a, i, u, r=reduction: ops.scatter_nd(a, i, u, reduction=r), x, ids, updates)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_index_add_and_put_along_axis() -> None:
    x, ids, updates = RNG.standard_normal((2, 4)), np.array([3, 1, 3]), RNG.standard_normal((2, 3))
    expected = torch.tensor(x).index_add(1, torch.tensor(ids), torch.tensor(updates)).numpy()
    np.testing.assert_allclose(run(lambda a, i, u: ops.index_add(a, 1, i, u), x, ids, updates), expected, rtol=1e-12)
    placed = x.copy()
    np.put_along_axis(placed, np.array([[-1]]), 7.0, 1)
    np.testing.assert_array_equal(run(lambda a: ops.put_along_axis(a, np.array([[-1]]), 7.0, 1), x), placed)


def test_scatter_add_accumulates_half_precision_in_f32() -> None:
    updates = np.full(4096, 1.0, np.float16)
    out = run(lambda u, i: ops.scatter_add(u, i, 1), updates, np.zeros(4096, np.int64))
    assert out[0] == 4096  # adding in f16 stops at 2048


# ------------------------------------------------------------------------------------------------------- moving windows


def test_a_cache_is_written_and_read_back() -> None:
    cache, step = np.zeros((2, 5, 3)), RNG.standard_normal((2, 1, 3))
    position = placeholder("position", i64[()])
    k, v = leaf("k", cache), leaf("v", step)
    written = ops.dynamic_update_slice(k, v, (0, position, 0))
    back = ops.dynamic_slice(written, (0, position, 0), (2, 1, 3))
    for at, inside in [(0, 0), (3, 3), (9, 4), (-2, 0)]:
        full, part = evaluate_values([written, back], {k: cache, v: step, position: np.array(at)}, {})
        np.testing.assert_array_equal(full[:, inside : inside + 1], step)
        assert np.count_nonzero(full) == step.size
        np.testing.assert_array_equal(part, step)


def test_each_row_of_a_batch_has_its_own_start() -> None:
    x, update, starts = RNG.standard_normal((3, 4, 5)), RNG.standard_normal((3, 2, 5)), np.array([0, 2, 9])
    row, part, start = placeholder("x", f64[4, 5]), placeholder("u", f64[2, 5]), placeholder("s", i64[()])
    outs = [ops.dynamic_update_slice(row, part, (start, 0)), ops.dynamic_slice(row, (start, 0), (2, 5))]
    batched = {row: leaf("bx", x), part: leaf("bu", update), start: leaf("bs", starts)}
    known = {batched[row]: x, batched[part]: update, batched[start]: starts}
    updated, windows = evaluate_values(batch(outs, batched, 3), known, {})
    for b, s in enumerate([0, 2, 2]):
        expected = x[b].copy()
        expected[s : s + 2] = update[b]
        np.testing.assert_array_equal(updated[b], expected)
        np.testing.assert_array_equal(windows[b], x[b, s : s + 2])


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_updates_of_an_empty_axis_go_nowhere_and_have_no_gradient() -> None:
    updates, ids, x = st.ones((3, 2)), st.zeros(3, "i64"), st.zeros((0, 2))
    cases = (
        lambda u: st.scatter_add(u, ids, 0),
        lambda u: st.scatter_nd(x, ids.reshape(3, 1), u, reduction="add"),
        lambda u: st.scatter_elements(x, st.zeros((3, 2), "i64"), u, 0, reduction="add"),
    )
    for scattered in cases:
        assert scattered(updates).shape == (0, 2)
        for slope in (st.grad(lambda u, f=scattered: f(u).sum()), st.jit(st.grad(lambda u, f=scattered: f(u).sum()))):
            np.testing.assert_array_equal(slope(updates).numpy(), np.zeros((3, 2)))


def test_mistakes() -> None:
    x, ids, flags = placeholder("x", f32[3, 4]), placeholder("i", i32[2, 5]), placeholder("b", f32[2]) > 0
    with pytest.raises(DTypeError, match=r"gather: ids must be integers, got bool\[2\]"):
        ops.gather(x, flags)
    with pytest.raises(ShapeError, match=r"ids i32\[2, 5\] do not fit f32\[3, 4\] off axis 0"):
        ops.gather_elements(x, ids, 0)
    with pytest.raises(ShapeError, match=r"coordinates of length 5 are too long for f32\[3, 4\]"):
        ops.gather_nd(x, ids)
    with pytest.raises(OptionError, match="reduction 'mean' is not one of none, add, mul, max, min"):
        ops.scatter_elements(x, ids, placeholder("u", f32[2, 5]), 1, reduction="mean")
    with pytest.raises(ShapeError, match=r"ids i32\[2, 5\] and updates f32\[2, 4\] differ in shape"):
        ops.scatter_elements(x, ids, placeholder("u", f32[2, 4]), 1)
    with pytest.raises(ShapeError, match=r"updates f32\[2, 4\] do not begin with the shape of ids i32\[2, 5\]"):
        ops.scatter_add(placeholder("u", f32[2, 4]), ids, 3)
    with pytest.raises(ShapeError, match=r"a window \[4, 4\] does not fit into f32\[3, 4\]"):
        ops.dynamic_slice(x, (0, 0), (4, 4))
    with pytest.raises(ShapeError, match=r"1 start for f32\[3, 4\]"):
        ops.dynamic_slice(x, (0,), (1, 4))
    with pytest.raises(ShapeError, match=r"the table must be \[vocabulary, width\]"):
        ops.embedding(ids, placeholder("t", f32[3]))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float64])
@pytest.mark.parametrize("width", [1, 3, 4, 16, 31, 32, 33, 64, 100, 130, 257])
def test_rows_of_all_widths(width: int, dtype: type) -> None:
    """Whole registers, parts of one, and both; along the last axis by single elements. The same for any threads."""
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((300, width)) * 50).astype(dtype)
    rows, columns = rng.integers(-300, 300, 500), rng.integers(0, width, (300, 70)).astype(np.int32)
    g = st.Graph("rows")
    table, i, j = g.input("x", x.shape, x.dtype), g.input("i", rows.shape, "i64"), g.input("j", columns.shape, "i32")
    g.outputs(st.ops.take(table, i, axis=0), st.ops.take_along_axis(table, j, axis=1))
    for threads in (1, 2, 7):
        compiled = st.Session("cpu").compile(g, st.CompileOptions(threads=threads))
        taken, along = compiled.run(x=x, i=rows, j=columns)
        np.testing.assert_array_equal(taken, x[rows])
        np.testing.assert_array_equal(along, np.take_along_axis(x, columns.astype(np.int64), 1))
