"""Loops and branches as native programs: against loops in Python, nested, reversed, empty, with symbolic sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.control.body import GraphBody
from strata.core import Target, f32, sym
from strata.errors import RunError
from strata.lir import plan
from strata.mir import METHODS, Graph, Nested
from strata.ops.control.branching import cond
from strata.ops.control.custom import Extension, Extensions, custom
from strata.ops.control.looping import scan, while_loop
from strata.runtime import Session


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _cell(weight: Any) -> Any:
    def body(h: Any, x: Any) -> Any:
        h = METHODS["tanh"](METHODS["matmul"](h, weight) + x)
        return h, h * 2.0

    return body


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_recurrent_cell(native: Any, steps: int, reverse: bool) -> None:
    h, w, xs = _draw(4, 30), _draw(30, 30) / 6, _draw(steps, 4, 30)
    last, ys = native(lambda a, b, c: scan(_cell(b), a, c, reverse=reverse), h, w, xs)
    want, state = np.zeros((steps, 4, 30), np.float32), h
    for t in reversed(range(steps)) if reverse else range(steps):
        state = np.tanh(state @ w + xs[t])
        want[t] = state * 2
    np.testing.assert_allclose(last, state, atol=1e-5)
    np.testing.assert_allclose(ys, want, atol=1e-5)


def test_symbolic_steps_and_batch(native: Any) -> None:
    t, b = sym("t"), sym("b")
    for steps, batch in ((1, 1), (6, 3)):
        h, w, xs = _draw(batch, 8), _draw(8, 8) / 3, _draw(steps, batch, 8)
        shapes = [(b, 8), (8, 8), (t, b, 8)]
        last, _ = native(lambda x, y, z: scan(_cell(y), x, z), h, w, xs, shapes=shapes, threads=(2,))
        for row in xs:
            h = np.tanh(h @ w + row)
        np.testing.assert_allclose(last, h, atol=1e-5)


def test_results_that_are_inputs_constants_or_twice_the_same(native: Any) -> None:
    def body(carry: Any, x: Any) -> Any:
        a, b = carry
        total = a + x
        return (b, total), (x, total, total, METHODS["ones_like"](x), a)

    a: Any = _draw(3)
    b: Any = _draw(3, seed=1)
    xs = _draw(5, 3, seed=2)

    def flat(x: Any, y: Any, z: Any) -> list[Any]:
        carries, outs = scan(body, (x, y), z)
        return [*carries, *outs]

    got = native(flat, a, b, xs)
    want: list[list[Any]] = [[] for _ in range(5)]
    for x in xs:
        total = a + x
        for row, value in zip(want, (x, total, total, np.ones(3), a), strict=True):
            row.append(value)
        a, b = b, total
    expected_all: list[Any] = [a, b, *map(np.array, want)]
    for array, expected in zip(got, expected_all, strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-6)


def _body(graph: Graph, *, in_loop: bool) -> GraphBody:
    """A body whose second input stays the same."""
    return GraphBody(plan(Nested(graph, range(1, 2)).opened()), Target.host(), in_loop=in_loop)


def test_what_does_not_change_is_computed_once() -> None:
    """The packed weight, and what depends on constants of the loop alone, belong to the program that runs once."""

    graph = Graph("body")
    h, w = graph.input("h", f32[4, 32]), graph.input("w", f32[32, 32])
    graph.outputs(METHODS["matmul"](h, METHODS["exp"](w)))
    bound = _body(graph, in_loop=True).bind_body({}, 0)
    assert (bound.once.count, bound.steady.count) == (2, 1)


def test_loops_in_loops_and_branches(native: Any) -> None:
    def inner(total: Any, y: Any) -> Any:
        total = cond(METHODS["sum"](y) > 0.0, lambda: total + y, lambda: total - y * 0.5)
        return total, total

    xs = _draw(4, 6, 3)
    zero = np.zeros(3, np.float32)
    last, ys = native(lambda a, b: scan(lambda c, x: scan(inner, c, x), a, b), zero, xs)
    state: Any = zero
    want: list[Any] = []
    for y in xs.reshape(-1, 3):
        state = state + y if y.sum() > 0 else state - y * np.float32(0.5)
        want.append(state)
    np.testing.assert_allclose(last, state, atol=1e-5)
    np.testing.assert_allclose(ys.reshape(-1, 3), want, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 0, 3, 100])
def test_while(native: Any, limit: int | None) -> None:
    def step(state: Any) -> Any:
        x, n = state
        return x * 1.5, n + 1.0

    x, n = np.array([1, 2, 3], np.float32), np.array(0, np.float32)
    got = native(lambda a, b: while_loop(lambda s: METHODS["sum"](s[0]) < 50.0, step, (a, b), max_iter=limit), x, n)
    while x.sum() < 50 and (limit is None or n < limit):
        x, n = x * np.float32(1.5), n + 1
    np.testing.assert_allclose(got[0], x, rtol=1e-6)
    assert got[1] == n


def test_branches(native: Any) -> None:
    def choose(test: Any, x: Any) -> Any:
        return cond(test, lambda: (x * 2.0, x), lambda: (METHODS["sort"](x), METHODS["zeros_like"](x)))

    x = _draw(40)
    for test, want in ((True, (x * 2, x)), (False, (np.sort(x), 0 * x))):
        got = native(choose, np.array(test), x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_failure_inside_a_loop_ends_it(native: Any) -> None:
    def body(a: Any, _: Any) -> Any:
        return METHODS["inv"](a) * 0.0, METHODS["sum"](a)

    with pytest.raises(RunError, match="solve: the matrix is singular, pivot 0 is 0"):
        native(lambda a: scan(body, a, None, length=1000), np.eye(3, dtype=np.float32))


def test_derivative_of_a_loop(native: Any) -> None:
    h, w, xs = _draw(2, 5), _draw(5, 5) / 3, _draw(7, 2, 5)
    graph = Graph("g")
    a, b, c = graph.input("a", f32[2, 5]), graph.input("b", f32[5, 5]), graph.input("c", f32[7, 2, 5])
    from strata.mir import evaluate, pullback

    last, ys = scan(_cell(b), a, c)
    loss = METHODS["sum"](ys) + METHODS["sum"](last)
    (grad,) = pullback([loss], [METHODS["ones_like"](loss)], [b])
    assert grad is not None
    graph.outputs(grad)
    compiled = Session("cpu").compile(graph)
    assert not compiled.host_steps
    feeds = {"a": h, "b": w, "c": xs}
    np.testing.assert_allclose(compiled.run(feeds)[0], evaluate(graph, feeds)[0], rtol=1e-3, atol=1e-4)


def test_python_in_the_body_keeps_the_loop_on_the_host() -> None:
    known = Extensions()
    known.register(Extension("halve", infer=lambda x, attrs: x, execute=lambda x, attrs: x / 2))
    with known.active():
        graph = Graph("g")
        a, xs = graph.input("a", f32[3]), graph.input("xs", f32[4, 3])
        last, _ = scan(lambda c, x: (custom("halve", c) + x, None), a, xs)
        compiled = Session("cpu").compile(graph.outputs(METHODS["exp"](last)))
        assert compiled.host_steps == ["scan"]
        start, rows = _draw(3), _draw(4, 3, seed=1)
        (got,) = compiled.run(a=start, xs=rows)
    for row in rows:
        start = start / 2 + row
    np.testing.assert_allclose(got, np.exp(start), rtol=1e-5)


def _loops(graph_of: Any, *values: Any) -> Any:
    """A compiled graph of values by name: "h" and "xs" are inputs, others parameters."""
    graph = Graph("loop")
    leaves = [
        graph.input(name, shape) if name in ("h", "xs") else graph.param(name, f32[tuple(shape)])
        for name, shape in values
    ]
    graph.outputs(*graph_of(*leaves))
    return Session("cpu").compile(graph)


def test_weights_of_a_body_are_packed_when_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every run, and no other form of them is kept; a new value counts from the next run on."""
    t, bind, once = sym("t"), GraphBody.bind_body, []

    def watched(body: GraphBody, *sizes: Any) -> Any:
        bound = bind(body, *sizes)
        once.append(bound.once.count)
        return bound

    monkeypatch.setattr(GraphBody, "bind_body", watched)

    def loop(h: Any, w: Any, xs: Any) -> Any:
        last, ys = scan(_cell(w), h, xs)
        return last, ys

    compiled = _loops(loop, ("h", (2, 24)), ("w", (24, 24)), ("xs", (t, 2, 24)))
    h = _draw(2, 24)
    for seed in (1, 2):
        w = _draw(24, 24, seed=seed) / 5
        compiled.set_param("w", w)
        for steps in (3, 1, 5):
            xs, state = _draw(steps, 2, 24, seed=3), h
            for row in xs:
                state = np.tanh(state @ w + row)
            np.testing.assert_allclose(compiled.run(h=h, xs=xs)[0], state, atol=1e-5)
    assert once == [0] * 6
    assert compiled._executable.packed_bytes >= w.nbytes
    assert "w" not in compiled._executable.named_arrays([h, xs], compiled.run(h=h, xs=xs))


def test_weights_and_inputs_that_meet_before_the_loop() -> None:
    """What depends on weights alone is computed when they are set, what depends on an input too in each run."""

    def loop(h: Any, a: Any, b: Any, xs: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            def inner(s: Any, _: Any) -> Any:
                return METHODS["tanh"](METHODS["matmul"](s, METHODS["exp"](b))), s

            mixed = METHODS["matmul"](state, METHODS["exp"](a)) + METHODS["matmul"](state, h * a)
            again, _ = scan(inner, METHODS["tanh"](mixed + x), xs[:2])
            return again, again

        start = METHODS["zeros_like"](xs[0])
        return scan(body, start, xs)

    compiled = _loops(loop, ("h", (8, 8)), ("a", (8, 8)), ("b", (8, 8)), ("xs", (4, 3, 8)))
    h, xs = _draw(8, 8) / 9, _draw(4, 3, 8)
    for seed in (1, 2):
        a, b = _draw(8, 8, seed=seed) / 9, _draw(8, 8, seed=seed + 5) / 9
        compiled.set_param("a", a)
        if seed == 1:
            compiled.set_param("b", b)
            kept = b
        for factor in (1, 2):
            state = np.zeros((3, 8), np.float32)
            for row in xs:
                state = np.tanh(state @ np.exp(a) + state @ (h * factor * a) + row)
                for _ in range(2):
                    state = np.tanh(state @ np.exp(kept))
            np.testing.assert_allclose(compiled.run(h=h * factor, xs=xs)[0], state, atol=1e-5)


def test_weights_of_a_while_loop() -> None:
    def loop(h: Any, w: Any) -> Any:
        def body(state: Any) -> Any:
            x, n = state
            return METHODS["tanh"](METHODS["matmul"](x, w)), n - 1.0

        return while_loop(lambda s: s[1] > 0.0, body, (h[:1], h[0, 0] * 0.0 + 3.0))

    compiled = _loops(loop, ("h", (2, 16)), ("w", (16, 16)))
    for seed in (1, 2):
        w, h = _draw(16, 16, seed=seed) / 4, _draw(2, 16)
        compiled.set_param("w", w)
        want = h[:1]
        for _ in range(3):
            want = np.tanh(want @ w)
        np.testing.assert_allclose(compiled.run(h=h)[0], want, atol=1e-5)


def test_small_steps_of_a_loop_are_shared_by_threads(native: Any) -> None:
    """Threads do not fall asleep between turns: less work than elsewhere is worth handing out, with the same bits."""

    graph = Graph("body")
    h, w = graph.input("h", f32[8, 64]), graph.input("w", f32[64, 256])
    graph.outputs(METHODS["tanh"](METHODS["matmul"](h, w)))
    chunks = [
        next(k.product.points for k in _body(graph, in_loop=in_loop).kernels.values() if k.product)
        for in_loop in (True, False)
    ]
    assert chunks[0] > chunks[1] == 1
    h0, w0, xs = _draw(8, 64), _draw(64, 64) / 8, _draw(5, 8, 64)
    last, _ = native(lambda a, b, c: scan(_cell(b), a, c), h0, w0, xs, threads=(1, 2, 7))
    for row in xs:
        h0 = np.tanh(h0 @ w0 + row)
    np.testing.assert_allclose(last, h0, atol=1e-5)
