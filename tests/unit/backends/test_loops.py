"""Loops and branches on a device, over a `cuda.core` that is NumPy, and on real devices where there are any.

Nothing comes down but flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strata import devices, ops
from strata.backends import loops, register_backend
from strata.core import DType, bool_, f32, f64, i64, sym
from strata.errors import RunError
from strata.mir import Graph, constant, evaluate
from strata.passes.expand.jacobi import MOST
from strata.runtime import CompiledGraph, Session
from strata.transforms import grad_with_loss
from tests.fake_cuda import FakeCore, fake_backend

FAKE = "fake_loops"


@pytest.fixture
def core() -> Iterator[FakeCore]:
    made = FakeCore()
    register_backend(FAKE, fake_backend(made, FAKE))
    yield made
    assert not made.broken


FOUND = [name for name in ("cuda", "wgpu") if any(d.startswith(name) for d in devices())]


@pytest.fixture(params=[FAKE, *FOUND])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == FAKE:
        request.getfixturevalue("core")
    return str(request.param)


def widest(device: str) -> DType:
    """The widest floats of a device; shaders have none of 64 bits."""
    return f32 if device == "wgpu" else f64


def agrees(graph: Graph, given: dict[str, Any], device: str, runs: int = 3, tolerance: float = 1e-5) -> CompiledGraph:
    """Nothing runs on the host, and each run has the results of the interpreter."""
    compiled = Session(device).compile(graph)
    assert not compiled.host_steps
    for name in graph.param_names:
        compiled.set_param(name, given[name])
    feeds = {name: given[name] for name in graph.input_names}
    want = evaluate(graph, given)
    for _ in range(runs):
        for one, other in zip(compiled.run(feeds), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    return compiled


def cell(width: int, kind: Any = f32) -> Graph:
    """An RNN's cell; what it gives has rows of another width."""
    g = Graph("cell")
    c, w, x = g.input("c", kind[2, width]), g.input("w", kind[width, width]), g.input("x", kind[2, width])
    new = ops.tanh(c @ w + x)
    return g.outputs(new, ops.sum(new, axis=0))


def recurrence(length: Any, width: int = 3, kind: Any = f32, *, reverse: bool = False) -> Graph:
    g = Graph("rnn")
    c, w, xs = g.input("c", kind[2, width]), g.param("w", kind[width, width]), g.input("xs", kind[length, 2, width])
    return g.outputs(*ops.ScanOp(cell(width, kind), length, 1, 1, reverse)(c, w, xs))


def drawn(rng: np.random.Generator, length: int, width: int = 3, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    shapes = {"c": (2, width), "w": (width, width), "xs": (length, 2, width)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("length", "width", "wide"), [(7, 3, 0), (6, 4, 0), (1, 5, 1), (0, 3, 0), (5, 5, 1), (4, 32, 0)]
)
def test_a_scan(device: str, rng: np.random.Generator, length: int, width: int, wide: int, reverse: bool) -> None:
    kind = widest(device) if wide else f32
    agrees(recurrence(length, width, kind, reverse=reverse), drawn(rng, length, width, kind.np), device)


def test_a_scan_is_one_graph_and_moves_nothing_in_between(core: FakeCore, rng: np.random.Generator) -> None:
    compiled = agrees(recurrence(9), drawn(rng, 9), FAKE, runs=2)
    core.log.clear()
    given = drawn(rng, 9)
    del given["w"]
    compiled.run(given)
    waits = [entry for entry in core.log if entry == "sync"]
    graphs = [entry for entry in core.log if entry.startswith("graph")]
    assert len(waits) <= 3  # two results that are read, and the end
    assert len(graphs) == 1
    assert not [entry for entry in core.log if entry.startswith("launch")]


@pytest.mark.parametrize("length", [64, 65, 71])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_long_scan_is_blocks_of_turns(
    device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, length: int, reverse: bool
) -> None:
    monkeypatch.setattr(loops, "UNROLLED", 16)
    monkeypatch.setattr(loops, "BLOCK", 24)
    agrees(recurrence(length, reverse=reverse), drawn(rng, length), device, runs=2)


def test_a_scan_of_any_length(device: str, rng: np.random.Generator) -> None:
    compiled = Session(device).compile(recurrence(sym("T", 0)))
    assert not compiled.host_steps
    for length in (0, 1, 4, 9):
        given = drawn(rng, length)
        want = evaluate(recurrence(length), given)
        compiled.set_param("w", given.pop("w"))
        for one, other in zip(compiled.run(given), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_carries_that_stay_swap_and_are_updated_in_place(device: str, rng: np.random.Generator) -> None:
    body = Graph("body")
    a, b, fixed = (body.input(name, f32[4]) for name in ("a", "b", "fixed"))
    table, at = body.input("table", f32[6, 4]), body.input("at", i64[()])
    new = ops.dynamic_update_slice(table, ops.reshape(a + fixed, (1, 4)), (at, constant(0, i64)))
    body.outputs(b, a * 2, fixed, new, at + 1, a)
    g = Graph("carries")
    given = [g.input(name, f32[4]) for name in "abc"]
    outs = ops.ScanOp(body, 6, 5, 0)(*given, g.input("t", f32[6, 4]), constant(0, i64))
    arrays = {name: rng.standard_normal(4).astype(np.float32) for name in "abc"}
    agrees(g.outputs(*outs), arrays | {"t": np.zeros((6, 4), np.float32)}, device)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_the_gradient_of_a_scan(device: str, rng: np.random.Generator, checkpoints: int | None) -> None:
    g = Graph("loss")
    c, w, xs = g.input("c", f32[2, 3]), g.param("w", f32[3, 3]), g.input("xs", f32[7, 2, 3])
    last, ys = ops.ScanOp(cell(3), 7, 1, 1, checkpoints=checkpoints)(c, w, xs)
    g.outputs(ops.sum(last * last) + ops.sum(ys))
    agrees(grad_with_loss(g, ("w",)), drawn(rng, 7) | {"d_output": np.float32(1)}, device)


def collatz(limit: int | None = None) -> Graph:
    """Steps until 1: branches in a loop."""
    halved, tripled = Graph("even"), Graph("odd")
    halved.outputs(ops.floor_divide(halved.input("n", i64[()]), 2))
    tripled.outputs(tripled.input("n", i64[()]) * 3 + 1)
    test, body = Graph("test"), Graph("body")
    n, _ = test.input("n", i64[()]), test.input("count", i64[()])
    test.outputs(ops.not_equal(n, 1))
    n, count = body.input("n", i64[()]), body.input("count", i64[()])
    (following,) = ops.Cond(halved, tripled)(ops.equal(n % 2, 0), n)
    body.outputs(following, count + 1)
    g = Graph("collatz")
    start = g.input("n", i64[()])
    return g.outputs(*ops.While(test, body, 2, limit)(start, constant(0, i64)))


@pytest.mark.parametrize("limit", [None, 0, 1, 5, 16, 40, 1000])
def test_a_loop_with_branches(device: str, limit: int | None) -> None:
    compiled = Session(device).compile(collatz(limit))
    assert not compiled.host_steps
    for n in (1, 2, 3, 6, 7, 27):
        want = evaluate(collatz(limit), {"n": np.int64(n)})
        for one, other in zip(compiled.run({"n": np.int64(n)}), want, strict=True):
            assert one == other


def test_a_loop_reads_its_flags_once_a_block(core: FakeCore) -> None:
    compiled = Session(FAKE).compile(collatz())
    compiled.run({"n": np.int64(27)})
    core.log.clear()
    (_, count) = compiled.run({"n": np.int64(27)})  # 111 turns
    assert count == 111
    assert core.log.count("sync") <= -(-112 // loops.TURNS) + 3


def branch(name: str, change: Any) -> Graph:
    g = Graph(name)
    x = g.input("x", f32[3, 4])
    return g.outputs(*change(x))


def test_branches(device: str, rng: np.random.Generator) -> None:
    then = branch("then", lambda x: (ops.softmax(x, axis=1), x))
    other = branch("other", lambda x: (x * constant(np.arange(4, dtype=np.float32)), ops.sin(x)))
    g = Graph("branches")
    p, x = g.input("p", bool_[()]), g.input("x", f32[3, 4])
    y, z = ops.Cond(then, other)(p, x * 2)
    g.outputs(y + 1, z)
    array = rng.standard_normal((3, 4)).astype(np.float32)
    compiled = Session(device).compile(g)
    assert not compiled.host_steps
    for flag in (True, False, True, True, False):
        given = {"p": np.bool_(flag), "x": array}
        for one, two in zip(compiled.run(given), evaluate(g, given), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_loops_inside_of_branches_and_scans(device: str, rng: np.random.Generator) -> None:
    """Newton's method for each row, where a row asks for it: a loop in a branch in a scan."""
    test, step = Graph("test"), Graph("step")
    x, a = test.input("x", f32[3]), test.input("a", f32[3])
    test.outputs(ops.max(ops.abs(x * x - a)) > 1e-5)
    x, a = step.input("x", f32[3]), step.input("a", f32[3])
    step.outputs((x + a / x) / 2)
    root, same = Graph("root"), Graph("same")
    a = root.input("a", f32[3])
    root.outputs(*ops.While(test, step, 1)(a, a))
    same.outputs(same.input("a", f32[3]))
    row = Graph("row")
    total, a, wanted = row.input("total", f32[3]), row.input("a", f32[3]), row.input("wanted", bool_[()])
    (y,) = ops.Cond(root, same)(wanted, a)
    row.outputs(total + y, y)
    g = Graph("roots")
    xs, flags = g.input("xs", f32[5, 3]), g.input("flags", bool_[5])
    g.outputs(*ops.ScanOp(row, 5, 1, 0)(constant(np.zeros(3, np.float32)), xs, flags))
    given = {"xs": rng.uniform(0.5, 4, (5, 3)).astype(np.float32), "flags": np.array([1, 0, 1, 1, 0], bool)}
    agrees(g, given, device)


def test_what_is_computed_once_is(device: str, rng: np.random.Generator) -> None:
    """A body's weights are prepared before its turns; here they are an input of the program."""
    body = Graph("body")
    c, w, x = body.input("c", f32[4]), body.input("w", f32[4, 4]), body.input("x", f32[4])
    body.outputs(ops.tanh(c @ ops.exp(w) + x))
    g = Graph("once")
    c, w, xs = g.input("c", f32[4]), g.input("w", f32[4, 4]), g.input("xs", f32[6, 4])
    g.outputs(*ops.ScanOp(body, 6, 1, 1)(c, w, xs))
    shapes = {"c": (4,), "w": (4, 4), "xs": (6, 4)}
    agrees(g, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, device)


def test_a_body_with_a_step_on_the_host_stays_there(device: str) -> None:
    body = Graph("body")
    kind, n = widest(device), MOST + 1
    c, x = body.input("c", kind[n, n]), body.input("x", kind[n, n])
    body.outputs(c + ops.svd(x)[1].sum())
    g = Graph("host")
    g.outputs(*ops.ScanOp(body, 2, 1, 0)(g.input("c", kind[n, n]), g.input("xs", kind[2, n, n])))
    assert Session(device).compile(g).host_steps == ["scan"]


def solving(kind: DType, n: int = 5) -> Graph:
    g = Graph("solving")
    a, b = g.input("a", kind[2, n, n]), g.input("b", kind[2, n, 3])
    return g.outputs(ops.solve(a, b))


def test_a_solve_and_its_gradient(device: str, rng: np.random.Generator) -> None:
    kind, tolerance = widest(device), 1e-5 if widest(device) is f64 else 1e-3
    a, b = rng.standard_normal((2, 5, 5)) + 4 * np.eye(5), rng.standard_normal((2, 5, 3))
    given = {"a": a.astype(kind.np), "b": b.astype(kind.np)}
    agrees(solving(kind), given, device, runs=2, tolerance=tolerance)
    g = Graph("loss")
    a, b = g.param("a", kind[2, 5, 5]), g.input("b", kind[2, 5, 3])
    g.outputs(ops.sum(ops.solve(a, b) ** 2))
    agrees(grad_with_loss(g, ("a",)), given | {"d_output": kind.np.type(1)}, device, runs=1, tolerance=tolerance)


def test_a_singular_matrix_is_the_error_of_other_devices(device: str, rng: np.random.Generator) -> None:
    kind = widest(device)
    compiled = Session(device).compile(solving(kind))
    a, b = rng.standard_normal((2, 5, 5)) + 4 * np.eye(5), rng.standard_normal((2, 5, 3))
    good = {"a": a.astype(kind.np), "b": b.astype(kind.np)}
    bad = {**good, "a": good["a"].copy()}
    bad["a"][1, 3] = bad["a"][1, 2] = 0
    for _ in range(2):
        with pytest.raises(RunError, match="singular") as found:
            compiled.run(bad)
        assert found.value.code == "X200"
        assert found.value.place is not None
        np.testing.assert_allclose(compiled.run(good)[0], np.linalg.solve(a, b), atol=1e-12 if kind is f64 else 1e-4)


def test_an_error_inside_of_a_loop(device: str, rng: np.random.Generator) -> None:
    """Of a turn that is not the last one; of a branch only where it is taken."""
    kind = widest(device)
    root, other = Graph("root"), Graph("other")
    root.outputs(ops.cholesky(root.input("a", kind[3, 3])))
    other.outputs(other.input("a", kind[3, 3]))
    body = Graph("body")
    a, wanted = body.input("a", kind[3, 3]), body.input("wanted", bool_[()])
    body.outputs(*ops.Cond(root, other)(wanted, a))
    g = Graph("roots")
    g.outputs(*ops.ScanOp(body, 4, 0, 0)(g.input("xs", kind[4, 3, 3]), g.input("flags", bool_[4])))
    compiled = Session(device).compile(g)
    assert not compiled.host_steps
    x = rng.standard_normal((4, 3, 3))
    x = x @ x.swapaxes(-1, -2) + np.eye(3)
    x[1] = -x[1]
    x = x.astype(kind.np)
    with pytest.raises(RunError, match="not positive definite") as found:
        compiled.run({"xs": x, "flags": np.ones(4, bool)})
    assert found.value.code == "X201"
    (found_roots,) = compiled.run({"xs": x, "flags": np.array([1, 0, 1, 1], bool)})
    want = [x[i] if i == 1 else np.linalg.cholesky(x[i]) for i in range(4)]
    np.testing.assert_allclose(found_roots, want, atol=1e-12 if kind is f64 else 1e-5)


@pytest.mark.parametrize("n", [1, 31, 64, 97, 240, 521])
def test_a_transform_of_any_length(core: FakeCore, rng: np.random.Generator, n: int) -> None:
    g = Graph("bins")
    x = g.input("x", f64[2, n])
    bins = ops.rfft(x)
    g.outputs(bins, ops.irfft(bins, n))
    agrees(g, {"x": rng.standard_normal((2, n))}, FAKE, runs=1)
