"""Sizes at their edges: what a symbol of 0, 1 or its bounds gives is what the number gives, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import sym
from strata.errors import IndexRangeError, ShapeError
from strata.mir import Graph, Value, evaluate
from strata.runtime import CompileOptions, Session, specialize
from strata.transforms import grad
from tests.backends.guard_pages import run_guarded

MOST = 64
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, MOST)
MOVES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    **{f"roll {by}": (lambda x, by=by: x.roll(by, 0), lambda a, by=by: np.roll(a, by, 0))  # type: ignore[misc]
       for by in (-1, 1, -3, 5, -40, 100)},
    "roll of all": (lambda x: x.roll(-2), lambda a: np.roll(a, -2)),
    "backwards": (lambda x: x[::-1], lambda a: a[::-1]),
    "backwards by two": (lambda x: x[::-2], lambda a: a[::-2]),
    "backwards from the third": (lambda x: x[2::-3], lambda a: a[2::-3]),
    "backwards down to the second": (lambda x: x[:1:-2], lambda a: a[:1:-2]),
    "from the second last": (lambda x: x[-2::3], lambda a: a[-2::3]),
    "nothing": (lambda x: x[3:1], lambda a: a[3:1]),
    "by three": (lambda x: x[1::3], lambda a: a[1::3]),
    "flipped": (lambda x: x.flip(0), lambda a: a[::-1]),
    "padded": (lambda x: x.pad([(2, 1), (0, 0)]), lambda a: np.pad(a, [(2, 1), (0, 0)])),
    "twice": (lambda x: x.repeat(2, 0), lambda a: np.repeat(a, 2, 0)),
    "mean": (lambda x: x.mean(1), lambda a: a.mean(1)),
}  # fmt: skip


def opened(move: Callable[[Value], Value], low: int = 0) -> Graph:
    g = Graph("edges")
    x = g.input("x", (sym("n", low, MOST), 3))
    return g.outputs(move(x))


def array(n: int) -> np.ndarray:
    return np.arange(3 * n, dtype=np.float32).reshape(n, 3) + 1


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("fusion", [True, False])
def test_moves_at_every_size(name: str, fusion: bool) -> None:
    move, meaning = MOVES[name]
    graph = opened(move)
    compiled = Session("cpu").compile(graph, CompileOptions(fusion=fusion))
    buckets = specialize(graph, "cpu", buckets={"n": [8, MOST]})
    for n in SIZES:
        want = meaning(array(n))
        for got in (compiled.run(x=array(n))[0], evaluate(graph, {"x": array(n)})[0], buckets.run(x=array(n))[0],
                    move(st.tensor(array(n))).numpy()):  # fmt: skip
            np.testing.assert_array_equal(got, want, err_msg=f"{n}")


@pytest.mark.parametrize("name", MOVES)
def test_moves_stay_inside_their_arrays(name: str) -> None:
    graph = opened(MOVES[name][0])
    for n in (0, 1, 2, 3, 5, 8, 17):
        (got,) = run_guarded(graph, {"x": array(n)}, "cpu")
        np.testing.assert_array_equal(got, MOVES[name][1](array(n)))


@pytest.mark.parametrize("name", ["backwards by two", "by three", "roll -1", "padded", "from the second last"])
def test_gradients_at_every_size(name: str) -> None:
    """What a stepped slice gives back is spread out again, nothing of it where there was nothing."""
    move, _ = MOVES[name]
    g = Graph("edges")
    x = g.input("x", (sym("n", 0, MOST), 3))
    g.outputs(ops.sum(ops.square(move(x))))
    backward = grad(g, ["x"])
    compiled = Session("cpu").compile(backward)
    for n in (0, 1, 2, 3, 5, 8):
        feeds = {"x": array(n), "d_output": np.float32(1)}
        (got,) = compiled.run(feeds)
        want = st.grad(lambda v: (move(v) ** 2).sum())(st.tensor(array(n))).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_the_mean_of_nothing_is_no_number(name: str) -> None:
    """As in the Array API standard, with a warning from nobody."""
    graph = opened(lambda x: getattr(ops, name)(x, axis=0))
    results = [
        Session("cpu").compile(graph).run(x=array(0))[0],
        Session("cpu").compile(graph.bind({"n": 0})).run(x=array(0))[0],
        evaluate(graph, {"x": array(0)})[0],
        getattr(st, name)(st.tensor(array(0)), axis=0).numpy(),
        np.asarray(st.jit(lambda x: getattr(st, name)(x, axis=0))(array(0))),
    ]
    for got in results:
        assert got.shape == (3,)
        assert np.isnan(got).all()


def test_the_greatest_of_nothing_is_an_error_everywhere() -> None:
    graph = opened(lambda x: ops.max(x, axis=0))
    for run in (
        lambda: Session("cpu").compile(graph).run(x=array(0)),
        lambda: Session("reference").compile(graph).run(x=array(0)),
        lambda: evaluate(graph, {"x": array(0)}),
        lambda: st.tensor(array(0)).max(0).numpy(),
        lambda: specialize(graph, "cpu", buckets={"n": [8]}).run(x=array(0)),
    ):
        with pytest.raises(ShapeError, match="S124"):
            run()


def test_known_ids_into_a_size_that_is_known_later() -> None:
    graph = opened(lambda x: ops.take(x, [2, 0], axis=0))
    compiled = Session("cpu").compile(graph)
    for n in (3, 5, MOST):
        np.testing.assert_array_equal(compiled.run(x=array(n))[0], array(n)[[2, 0]])
        np.testing.assert_array_equal(evaluate(graph, {"x": array(n)})[0], array(n)[[2, 0]])
    for n in (0, 1, 2):
        for run in (
            lambda: compiled.run(x=array(n)),  # noqa: B023
            lambda: evaluate(graph, {"x": array(n)}),  # noqa: B023
            lambda: st.tensor(array(n)).take([2, 0], axis=0).numpy(),  # noqa: B023
            lambda: graph.bind({"n": n}),  # noqa: B023
        ):
            with pytest.raises(IndexRangeError):
                run()


def test_the_best_of_a_size_that_is_their_number() -> None:
    """k equals the size, so that the shared program has the size in its place."""
    best = st.jit(lambda x: st.topk(x, 2, 0), buckets={0: {0: [8, MOST]}})
    for n in (2, 3, 5, 8, 9, 2):
        values, places = best(array(n))
        np.testing.assert_array_equal(np.asarray(values), array(n)[::-1][:2])
        np.testing.assert_array_equal(np.asarray(places), np.arange(n)[::-1][:2, None].repeat(3, 1))
    for n in (0, 1):
        with pytest.raises(ShapeError, match="S210"):
            best(array(n))


@pytest.mark.parametrize("low", [0, 1])
def test_buckets_begin_where_sizes_do(low: int) -> None:
    graph = opened(lambda x: x * 2, low)
    shared = specialize(graph, "cpu", buckets={"n": [8, MOST]})
    for n in (1, 8, 9, MOST):
        np.testing.assert_array_equal(shared.run(x=array(n))[0], array(n) * 2)
    if low:
        with pytest.raises(ShapeError, match="S153"):
            shared.run(x=array(0))
    else:
        assert shared.run(x=array(0))[0].shape == (0, 3)
    assert len(shared.variants) == 2


def test_parts_of_parameters_are_replaced_before_the_first_run() -> None:
    """An update of what is known from parameters alone starts from a copy of them."""
    for fusion in (True, False):
        g = Graph("update")
        w, x = g.param("w", (4, 2)), g.input("x", (4, 2))
        g.outputs(ops.dynamic_update_slice(w, ops.flip(w, 0)[:1], [0, 0]) + x)
        compiled = Session("cpu").compile(g, CompileOptions(fusion=fusion))
        weights = np.arange(8, dtype=np.float32).reshape(4, 2)
        compiled.set_param("w", weights)
        (got,) = compiled.run(x=np.zeros((4, 2), np.float32))
        np.testing.assert_array_equal(got, np.concatenate([weights[-1:], weights[1:]]))


@pytest.mark.parametrize("columns", [0, 3])
def test_an_id_into_nothing_is_an_error_where_results_are_empty_too(columns: int) -> None:
    for rows in (0, sym("n", 0, 8)):
        g = Graph("ids")
        x, i = g.input("x", (rows, columns)), g.input("i", (2,), "i64")
        g.outputs(ops.gather(x, i) + 1.0)
        feeds = {"x": np.zeros((0, columns), np.float32), "i": np.array([0, 0])}
        for device in ("cpu", "reference"):
            with pytest.raises(IndexRangeError):
                Session(device).compile(g).run(feeds)
        with pytest.raises(IndexRangeError):
            evaluate(g, feeds)


def test_computed_ids_are_clamped_also_where_they_follow_from_constants() -> None:
    """Folding makes them known, which ids that a user writes down are from the start: those are refused."""
    g = Graph("ids")
    x = g.input("x", (3,))
    ids = ops.cast(g.constant(np.array([1.0, 6.0])), "i64") + 1
    g.outputs(ops.gather(x, ids))
    for device in ("cpu", "reference"):
        (got,) = Session(device).compile(g).run(x=np.arange(3, dtype=np.float32))
        np.testing.assert_array_equal(got, [2, 2])


def test_numbers_that_happen_to_be_a_size_stay_numbers() -> None:
    """An axis, a kernel or a count that equals a size is not opened with it where shapes share a program."""
    programs: list[tuple[Callable[[Any], Any], tuple[int, ...]]] = [
        (lambda x: st.sort(x, axis=2), (2, 1, 2)),
        (lambda x: st.cummax(x, axis=2)[0], (2, 3, 2)),
        (lambda x: st.max_pool1d(x, 2, stride=1), (2, 1, 5)),
        (lambda x: st.topk(x, 3, axis=-1)[0], (3, 4)),
        (lambda x: st.roll(x, 2, 0), (2, 3)),
    ]
    rng = np.random.default_rng(0)
    for fn, shape in programs:
        shared = st.jit(fn, buckets={0: {0: [8]}})
        for rows in (shape[0], shape[0] + 1, 7, 1):
            a = rng.standard_normal((rows, *shape[1:])).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(shared(a)), fn(st.tensor(a)).numpy())


def test_reductions_of_what_is_always_empty() -> None:
    g = Graph("empty")
    x = g.input("x", (sym("n", 0, 8), 0), "bool")
    g.outputs(ops.any(x), ops.all(x), ops.sum(ops.cast(x, "i32")))
    compiled = Session("cpu").compile(g)
    for n in (0, 1, 8):
        assert [a.item() for a in compiled.run(x=np.zeros((n, 0), bool))] == [False, True, 0]
