"""Neighbours that read one value row by row share a kernel: values against the interpreter, and what stays apart."""

from collections.abc import Callable

import numpy as np
import pytest

from strata import ops
from strata.core import f16, f32, f64, sym
from strata.mir import Graph, Value, evaluate
from strata.runtime import CompiledGraph, CompileOptions, Session

ROWS, PARTS = 6, (8, 5, 3)


def split_product(rows: object = ROWS, dtype=f32) -> tuple[Graph, list[Value]]:
    """A product whose columns go three ways."""
    g = Graph("siblings")
    x = g.input("x", (rows, 4), dtype)
    whole = x @ g.param("w", (4, sum(PARTS)), dtype)
    starts = [0, PARTS[0], PARTS[0] + PARTS[1]]
    return g, [ops.narrow(whole, 1, at, n) for at, n in zip(starts, PARTS, strict=True)]


def random_feeds(graph: Graph, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for x in (*graph.inputs, *graph.params):
        shape = tuple(d if isinstance(d, int) else rows for d in x.shape)
        kind = x.dtype.np
        feeds[x.node.op.key] = rng.standard_normal(shape).astype(kind) if x.dtype.is_float else np.full(shape, 2, kind)
    return feeds


def labels(compiled: CompiledGraph) -> list[str]:
    return [s.label for s in compiled.lir.schedule if s.phase != "prologue"]


def compiled_and_checked(graph: Graph, *rows: int) -> CompiledGraph:
    compiled = Session("cpu").compile(graph)
    for count in rows or (ROWS,):
        feeds = random_feeds(graph, count)
        compiled.set_params({n: feeds[n] for n in graph.param_names})
        results = compiled.run({n: feeds[n] for n in graph.input_names})
        for got, want in zip(results, evaluate(graph, feeds, wide=True), strict=True):
            close = 1e-2 if got.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(got, want, rtol=close, atol=close)
    return compiled


@pytest.mark.parametrize("dtype", [f16, f32, f64], ids=str)
def test_parts_of_a_product_share_a_kernel(dtype) -> None:
    g, (a, b, c) = split_product(dtype=dtype)
    compiled = compiled_and_checked(g.outputs(ops.tanh(a), ops.exp(b), ops.sin(c)))
    assert labels(compiled) == ["matmul", "slice + tanh + exp + sin"]


def test_rows_of_any_number() -> None:
    g, (a, b, c) = split_product(sym("N", 0, 64))
    compiled = compiled_and_checked(g.outputs(ops.tanh(a), ops.exp(b), ops.sin(c)), 0, 1, 7, 64)
    assert len(labels(compiled)) == 2


def caches(rows: int, new: Callable[[Value], Value] = ops.tanh, *, read_again: bool = False) -> Graph:
    """Two caches that take rows of a product, and a part of it that goes its own way."""
    g, (a, b, c) = split_product(rows)
    at = g.input("at", (), "i64")
    keys, values = g.input("keys", (ROWS, 5)), g.input("values", (ROWS, 3))
    kept = [ops.dynamic_update_slice(*pair, [at, 0]) for pair in ((keys, new(b)), (values, c))]
    more = [keys * 2.0] if read_again else []
    return g.outputs(ops.exp(a), *kept, *more)


def test_updates_join_and_stay_in_place() -> None:
    graph = caches(2)
    compiled = compiled_and_checked(graph)
    assert labels(compiled) == ["matmul", "slice + exp + tanh + dynamic_update_slice"]
    feeds = random_feeds(graph)
    expected = evaluate(graph, feeds)
    out = [np.empty((2, 8), np.float32), feeds["keys"], feeds["values"]]
    compiled.run_into({n: feeds[n] for n in graph.input_names}, out)
    for got, want in zip(out, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_an_old_value_that_others_read_stays_apart() -> None:
    """Joined, the update would come before a reader of what it changes."""
    compiled = compiled_and_checked(caches(2, read_again=True))
    assert sum("dynamic_update_slice" in label for label in labels(compiled)) == 2


def test_two_updates_of_one_value() -> None:
    """Each reads what the other would change: they cannot both come last."""
    g = Graph("forks")
    x = g.input("x", (2, 9))
    y = x * 0.5
    first, second = (ops.dynamic_update_slice(x, new, [0, 0]) for new in (ops.gelu(y), ops.relu(y)))
    compiled_and_checked(g.outputs(ops.sort(first, axis=1), second))


def test_an_update_that_reads_what_it_changes() -> None:
    """The rows move by one: the new value must not take over the old one's memory."""
    g = Graph("shift")
    x = g.input("x", (40, 33))
    old = ops.sort(x, axis=0)
    g.outputs(ops.dynamic_update_slice(old, ops.narrow(old, 0, 0, 39), [1, 0]).sum(0), old.sum())
    compiled_and_checked(g)
    g = Graph("shift")
    old = ops.sort(g.input("x", (40, 33)), axis=0)
    moved = ops.dynamic_update_slice(old, ops.narrow(old, 0, 0, 39) * 2.0, [1, 0])
    compiled_and_checked(g.outputs(ops.sort(moved, axis=0)))


def test_what_reads_its_neighbour_stays_apart() -> None:
    g, (a, _, _) = split_product()
    first = ops.tanh(a)
    compiled = compiled_and_checked(g.outputs(first, ops.sort(first, axis=0), ops.flip(first, 0) + a))
    assert len(labels(compiled)) >= 3


def test_long_rows_stay_apart() -> None:
    """Rows are what threads share out: two long ones would leave a thread without work."""
    g = Graph("long")
    whole = ops.sort(g.input("x", (1, 1 << 16)), axis=1)
    compiled = compiled_and_checked(g.outputs(ops.tanh(whole), ops.narrow(ops.exp(whole), 1, 5, 1 << 15)))
    assert len(labels(compiled)) == 3


def test_different_rows_stay_apart() -> None:
    g = Graph("rows")
    whole = ops.sort(g.input("x", (6, 8)), axis=1)
    compiled = compiled_and_checked(g.outputs(ops.tanh(whole), ops.narrow(ops.exp(whole), 0, 1, 3)))
    assert len(labels(compiled)) == 3


def test_threads_do_not_change_the_bits() -> None:
    g, (a, b, c) = split_product(257)
    graph = g.outputs(ops.tanh(a), ops.exp(b), ops.sin(c))
    feeds = random_feeds(graph)
    results = []
    for threads in (1, 2, 7):
        compiled = Session("cpu").compile(graph, CompileOptions(threads=threads))
        compiled.set_params({"w": feeds["w"]})
        results.append(compiled.run({"x": feeds["x"]}))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_the_text_of_joined_updates_reads_back() -> None:
    from strata.lir import parse_module, show_module

    lir = Session("cpu").compile(caches(2)).lir
    again = parse_module(show_module(lir))
    assert [s.updates for s in again.schedule] == [s.updates for s in lir.schedule]
    assert show_module(again) == show_module(lir)
