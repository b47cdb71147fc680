"""Donated arguments: results are written where they lie, shown by pointers, wherever that is right."""

from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.config import using
from strata.errors import RunError
from strata.lir import may_take_over
from strata.mir import Graph
from strata.runtime import Session


def place(t: st.Tensor) -> int:
    """Where a tensor's array begins; looking at it does not make the memory known to others."""
    from strata.tensor.data import handle_of

    handle = handle_of(t.value)
    assert handle is not None
    return int(handle.array.ctypes.data)


def own(array: np.ndarray) -> st.Tensor:
    """A tensor whose memory nobody else has seen."""
    return st.jit(lambda x: x + 0.0)(array)


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
def test_a_sum_is_written_over_its_argument(size: int) -> None:
    step = st.jit(lambda w, x: w + x, donate_argnums=(0,))
    w = own(np.zeros(size, "f"))
    x = np.arange(size, dtype="f")
    first = place(w)
    for _ in range(3):
        w = step(w, x)
        assert place(w) == first
    np.testing.assert_array_equal(w.numpy(), 3 * x)


def test_an_optimiser_step_keeps_every_array(rng) -> None:
    """Weights are read by the whole gradient, and written last; moments beside them."""

    def update(state: dict[str, Any], x: st.Tensor) -> tuple[dict[str, Any], st.Tensor]:
        def loss(w: st.Tensor) -> st.Tensor:
            return ((x @ w).tanh() ** 2.0).mean()

        value, slope = st.value_and_grad(loss)(state["w"])
        m = 0.9 * state["m"] + 0.1 * slope
        return {"w": state["w"] - 0.5 * m, "m": m}, value

    x = rng.standard_normal((8, 16)).astype("f")
    start = {"w": rng.standard_normal((16, 4)).astype("f"), "m": np.zeros((16, 4), "f")}
    plain, donated = st.jit(update), st.jit(update, donate_argnums=(0,))
    kept: Any = dict(start)
    given: Any = {n: own(a) for n, a in start.items()}
    before = {n: place(t) for n, t in given.items()}
    for _ in range(5):
        kept, want = plain(kept, x)
        given, got = donated(given, x)
        assert got.numpy() == want.numpy()
    assert {place(given["w"]), place(given["m"])} == set(before.values())
    for name in start:
        np.testing.assert_array_equal(given[name].numpy(), kept[name].numpy())


def test_a_cache_takes_rows_in_place() -> None:
    write = st.jit(
        lambda cache, row, at: st.dynamic_update_slice(cache, row, [at, 0]), donate_argnums=(0,), static_argnums=(2,)
    )
    cache = own(np.zeros((6, 3), "f"))
    first = place(cache)
    for at in range(3):
        cache = write(cache, np.full((1, 3), at + 1, "f"), at)
        assert place(cache) == first
    np.testing.assert_array_equal(cache.numpy()[:4, 0], [1, 2, 3, 0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w[::-1] + 1.0,  # read elsewhere
        lambda w: w + w.sum(),  # a reduction of all of it
        lambda w: w.cumsum(0),
        st.sort,
        lambda w: st.roll(w, 1) * w,
        lambda w: w @ w.T if w.ndim == 2 else w * w.mean(),
    ],
)
def test_what_reads_more_than_its_element_is_right(fn, rng) -> None:
    for shape in ((5,), (40, 40)):
        data = rng.standard_normal(shape).astype("f")
        got = st.jit(fn, donate_argnums=(0,))(own(data))
        np.testing.assert_allclose(got.numpy(), st.jit(fn)(data).numpy(), rtol=1e-6)


def test_an_argument_read_after_the_result_is_kept(rng) -> None:
    def fn(w: st.Tensor) -> tuple[st.Tensor, st.Tensor]:
        first = w * 2.0
        return first, st.sort(first) + st.sort(w)

    data = rng.standard_normal(64).astype("f")
    for got, want in zip(st.jit(fn, donate_argnums=(0,))(own(data)), st.jit(fn)(data), strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_memory_that_others_see_is_left_alone() -> None:
    step = st.jit(lambda w: w + 1.0, donate_argnums=(0,))
    array = np.zeros(1000, "f")
    step(st.tensor(array))
    step(array)
    assert not array.any()
    seen = own(array)
    view = seen.numpy()
    step(seen)
    assert not view.any()


def test_one_array_twice_is_not_written_over() -> None:
    step = st.jit(lambda a, b: (a + 1.0, a[::-1] * b), donate_argnums=(0,))
    t = own(np.arange(1000, dtype="f"))
    first, second = step(t, t)
    np.testing.assert_array_equal(first.numpy(), np.arange(1000) + 1.0)
    np.testing.assert_array_equal(second.numpy(), np.arange(1000, dtype="f")[::-1] * np.arange(1000, dtype="f"))


def test_donated_tensors_are_gone_also_after_an_error() -> None:
    step = st.jit(lambda w: w * 2.0, donate_argnums=(0,))
    w = own(np.ones(8, "f"))
    step(w)
    with pytest.raises(RunError, match="donated"):
        w.numpy()


def test_threads_do_not_change_the_bits(rng) -> None:
    data = rng.standard_normal((257, 33)).astype("f")
    results = []
    for threads in (1, 2, 7):
        with using(num_threads=threads):
            results.append(st.jit(lambda w: st.tanh(w) * w, donate_argnums=(0,))(own(data)).numpy())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_plans_say_what_they_write_over() -> None:
    g = Graph("g")
    x, y = g.input("x", (4, 4)), g.input("y", (4, 4))
    lir = Session("cpu").compile(g.outputs(x + y, ops.sort(y), x)).lir
    assert not may_take_over(lir, "x", 0)  # x itself is a result
    assert not may_take_over(lir, "y", 2)
    g = Graph("g")
    x, y = g.input("x", (4, 4)), g.input("y", (4, 5))
    lir = Session("cpu").compile(g.outputs(ops.tanh(x), x @ y)).lir
    order = [s.label for s in lir.schedule]
    assert may_take_over(lir, "x", 0) == (order.index("tanh") > order.index("matmul"))
    assert not may_take_over(lir, "y", 1) or order.index("matmul") == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (7, 33), (130, 100), (300, 513)])
def test_a_residual_behind_a_product_is_written_over(shape, rng) -> None:
    """The epilogue reads it beside the sums; so does a row's reduction that reads other values."""
    m, n = shape
    x, w = rng.standard_normal((m, 40)).astype("f"), rng.standard_normal((40, n)).astype("f")
    data = rng.standard_normal(shape).astype("f")
    for fn in (lambda r, a, b: r * 0.9 + a @ b, lambda r, a, b: r + (a * 2.0).sum(1, keepdims=True)):
        for threads in (1, 2):
            with using(num_threads=threads):
                residual = own(data)
                first = place(residual)
                got = st.jit(fn, donate_argnums=(0,))(residual, x, w)
            assert place(got) == first
            np.testing.assert_array_equal(got.numpy(), st.jit(fn)(data, x, w).numpy())


def test_views_of_a_donated_tensor_keep_their_elements() -> None:
    """Small expressions run in NumPy, which makes views."""
    x = own(np.full((4, 4), 2.0, "f"))
    flat, part = x.reshape((16,)).realize(), x[1:3].realize()
    st.jit(lambda x: x + 1.0, donate_argnums=(0,))(x)
    assert flat.numpy().tolist() == [2.0] * 16
    assert part.numpy().tolist() == [[2.0] * 4] * 2


def test_what_a_function_closed_over_is_not_written_over() -> None:
    w = own(np.full((4, 4), 2.0, "f"))
    reader = st.jit(lambda x: x + w)
    assert reader(np.zeros((4, 4), "f")).numpy()[0, 0] == 2.0
    st.jit(lambda x: x + 1.0, donate_argnums=(0,))(w)
    assert reader(np.zeros((4, 4), "f")).numpy()[0, 0] == 2.0


def test_a_tensor_given_twice_is_not_written_over() -> None:
    x = own(np.arange(6, dtype="f"))
    step = st.jit(lambda a, b: (a + 1.0, a[::-1] * b), donate_argnums=(0,))
    first, second = step(x, x)
    assert first.numpy().tolist() == [1, 2, 3, 4, 5, 6]
    assert second.numpy().tolist() == [0, 4, 6, 6, 4, 0]


def test_an_expression_outlives_a_donated_tensor_that_is_equal() -> None:
    """Equal expressions are one value, and a constant is the same one everywhere: giving up a tensor is not theirs."""
    step = st.jit(lambda x: x + 1.0, donate_argnums=(0,))
    x = st.tensor([1.0, 2.0, 3.0])
    first, second, third = x * 3.0, x * 3.0, st.asarray((x * 3.0).value)
    late = second + 1.0
    for _ in range(3):  # by its signature, then as a call like the one before
        step(x * 3.0)
    step(first)
    with pytest.raises(RunError, match="donated"):
        first.numpy()
    third.realize()
    step(third)
    assert late.tolist() == [4.0, 7.0, 10.0]
    assert second.tolist() == [3.0, 6.0, 9.0]
    number = st.full((), 0.25)
    step(number)
    with pytest.raises(RunError, match="donated"):
        number.numpy()
    again = st.full((), 0.25).realize()
    step(again)
    assert st.full((), 0.25).item() == 0.25
    assert (x * st.full((), 0.25)).tolist() == [0.25, 0.5, 0.75]


def test_a_planned_tensor_that_is_donated_does_not_take_its_expression_along() -> None:
    x = st.tensor([1.0, 2.0])
    planned, other = x * 5.0, x * 5.0
    planned.prepare().execute()
    st.jit(lambda x: x + 1.0, donate_argnums=(0,))(planned)
    assert other.tolist() == [5.0, 10.0]


def test_writing_to_a_tensor_does_not_write_to_equal_expressions() -> None:
    x = st.tensor([1.0, 2.0])
    first, second = x + 6.0, x + 6.0
    late = second * 2.0
    first.realize().data()[:] = 0.0
    first.data()[0] = 1.0
    assert first.tolist() == [1.0, 0.0]
    assert second.tolist() == [7.0, 8.0]
    assert late.tolist() == [14.0, 16.0]
    number = st.full((), 2.5).realize()
    number.data()[...] = 9.0
    assert number.item() == 9.0
    assert (x * 2.5).tolist() == [2.5, 5.0]
    zeros = st.zeros((3,)).realize()
    zeros.data()[0] = 1.0
    assert zeros.tolist() == [1.0, 0.0, 0.0]
    assert st.zeros((3,)).tolist() == [0.0, 0.0, 0.0]
