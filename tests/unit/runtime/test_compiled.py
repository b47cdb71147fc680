"""CompiledGraph: arrays in and out, parameters, state, clones, threads, observation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import ALL_DTYPES, DType, as_dtype, bf16, f16, sym
from strata.errors import (
    ArgumentError,
    DTypeError,
    OptionError,
    RunError,
    ShapeError,
    StrataError,
    SymbolError,
    UnknownNameError,
)
from strata.mir import Graph
from strata.runtime import CompiledGraph, Session
from strata.runtime.execute.arrays import kept_apart
from strata.runtime.report.observe import OBSERVERS
from strata.runtime.report.profile import Stopwatch
from tests.counts import calls


def compiled(build, *, device: str = "cpu", **inputs) -> CompiledGraph:
    g = Graph("g")
    values = [g.input(name, *kind) for name, kind in inputs.items()]
    made = build(*values)
    return Session(device).compile(g.outputs(*(made if isinstance(made, tuple) else (made,))))


def test_matmul_bias_gelu_end_to_end() -> None:  # behaviour 89
    g = Graph("ffn")
    x, w, b = g.input("x", (1, 2)), g.param("w", (2, 2)), g.param("b", (2,))
    c = Session("cpu").compile(g.outputs(ops.gelu(x @ w + b)))
    c.set_params({"w": np.eye(2, dtype=np.float32), "b": np.array([0.5, -1.5], np.float32)})
    (out,) = c.run(x=np.ones((1, 2), np.float32))
    np.testing.assert_allclose(out, [[1.3997892, -0.1542688]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_params_inputs_and_outputs(dtype: str) -> None:  # behaviour 90
    g = Graph("half")
    x, w = g.input("x", (2, 4), dtype), g.param("w", (4,), dtype)
    kind = x.dtype.np
    c = Session("cpu").compile(g.outputs(x * w, ops.cast(ops.cast(x, "f32") * 0.1, dtype), ops.cast(w, "f32")))
    weights = np.array([0.1, 2, 3, 4], kind)
    c.set_param("w", weights)
    data = np.arange(8).reshape(2, 4).astype(kind)
    product, scaled, wide = c.run(x=data)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, weights.astype(np.float32))
    assert product.dtype == kind
    assert scaled.dtype == kind
    np.testing.assert_array_equal(product.astype(np.float32), data.astype(np.float32) * weights.astype(np.float32))
    np.testing.assert_array_equal(scaled, (data.astype(np.float32) * np.float32(0.1)).astype(kind))


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_precision_is_widened_for_parameters_of_f32(dtype: DType) -> None:  # behaviour 90
    g = Graph("wide")
    x, w = g.input("x", (2, 4)), g.param("w", (4,))
    c = Session("cpu").compile(g.outputs(x * w))
    weights = np.array([0.1, 2, 3e-8, -4], dtype.np)
    for given in (weights, weights[::-1], st.tensor(weights)):
        c.set_param("w", given)
        np.testing.assert_array_equal(c.run(x=np.ones((2, 4), np.float32))[0][1], np.asarray(given).astype(np.float32))
    for other in (np.zeros(4), np.zeros(4, np.int32)):  # digits would be lost, or it is no float
        with pytest.raises(DTypeError, match=r"parameter 'w' is f32\[4\], got"):
            c.set_param("w", other)
    with pytest.raises(DTypeError, match=r"input 'x' is f32\[2, 4\], got"):
        c.run(x=np.zeros((2, 4), dtype.np))


def test_scalar_and_last_axis_broadcast_in_a_chain() -> None:  # behaviour 91
    c = compiled(lambda x, v, s: ops.relu((x + v) * s - v), x=((3, 4),), v=((4,),), s=((),))
    x, v = np.arange(12, dtype=np.float32).reshape(3, 4) - 6, np.arange(4, dtype=np.float32)
    (out,) = c.run(x=x, v=v, s=np.float32(2))
    np.testing.assert_array_equal(out, np.maximum((x + v) * 2 - v, 0))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_goes_in_and_out(dtype, device: str) -> None:
    c = compiled(lambda x: (x, ops.concat([x, x], axis=0)), x=((3,), dtype), device=device)
    data = np.array([0, 1, 1]).astype(dtype.np)
    same, twice = c.run(x=data)
    assert same.dtype == twice.dtype == dtype.np
    np.testing.assert_array_equal(same, data)
    np.testing.assert_array_equal(twice, np.concatenate([data, data]))


def test_arrays_are_read_where_they_lie() -> None:
    c = compiled(lambda x: x + 1.0, x=((1 << 16,),))
    data = np.zeros(1 << 16, np.float32)
    data.flags.writeable = False
    assert c._arrays({"x": data})[0] is data
    strided = np.zeros((2, 1 << 16), np.float32).T[:, 0]
    np.testing.assert_array_equal(c.run(x=strided)[0], 1)
    np.testing.assert_array_equal(c.run(x=np.zeros(1 << 17, np.float32)[::2])[0], 1)


def test_unaligned_arrays_are_copied() -> None:
    c = compiled(lambda x: x + 1.0, x=((4,),))
    raw = np.zeros(17, np.uint8)[1:].view(np.float32)
    np.testing.assert_array_equal(c.run(x=raw)[0], 1)


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [OnlyDlpack, memoryview, bytearray, list, st.asarray])
def test_anything_that_holds_an_array_is_taken(wrap) -> None:
    c = compiled(lambda x: x + x, x=((4,), "u8" if wrap is bytearray else "f32"))
    data = np.array([1, 2, 3, 4], np.uint8 if wrap is bytearray else np.float32)
    value = bytearray(data.tobytes()) if wrap is bytearray else data.tolist() if wrap is list else wrap(data)
    if wrap is bytearray:
        value = memoryview(value)
    np.testing.assert_array_equal(c.run(x=value)[0], data + data)


@pytest.mark.parametrize("bad", [object(), "text", {1: 2}, [object()], None])
def test_what_is_no_array_is_refused(bad) -> None:
    c = compiled(lambda x: x + 1.0, x=((4,),))
    with pytest.raises(StrataError):
        c.run(x=bad)


def test_names_shapes_and_dtypes_are_checked() -> None:
    g = Graph("g")
    x, w = g.input("x", (2, 3)), g.param("w", (3,))
    c = Session("cpu").compile(g.outputs(x * w))
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(UnknownNameError, match="no value yet"):
        c.run(x=good)
    with pytest.raises(UnknownNameError, match="no parameter 'v'"):
        c.set_param("v", np.zeros(3, np.float32))
    c.set_param("w", np.ones(3, np.float32))
    with pytest.raises(UnknownNameError, match=r"'x' .* is missing"):
        c.run()
    with pytest.raises(UnknownNameError, match="no input 'y'"):
        c.run(x=good, y=good)
    with pytest.raises(ShapeError, match=r"f32\[2, 3\], got f32\[3, 2\]"):
        c.run(x=good.T)
    with pytest.raises(DTypeError, match=r"got f64\[2, 3\]"):
        c.run(x=good.astype(np.float64))


def test_run_into_refuses_other_arguments() -> None:
    g = Graph("g")
    c = Session("cpu").compile(g.outputs(g.input("x", (4,)) + 1.0))
    run: Any = c.run_into
    feeds, out = {"x": np.ones(4, np.float32)}, [np.empty(4, np.float32)]
    with pytest.raises(ArgumentError, match="takes 2 arguments by position, got 3"):
        run(feeds, out, 1)
    with pytest.raises(ArgumentError, match="no argument 'outs'; did you mean 'out'"):
        run(feeds, outs=out)
    for missing in ((), (feeds,), (None, out)):
        with pytest.raises(OptionError, match="got NoneType"):
            run(*missing)
    run(out=out, feeds=feeds)
    np.testing.assert_array_equal(out[0], np.full(4, 2.0, np.float32))


def test_run_into_checks_and_fills() -> None:
    c = compiled(lambda x: (x + 1.0, x * 2.0), x=((4,),))
    feeds = {"x": np.arange(4, dtype=np.float32)}
    outs = [np.empty(4, np.float32), np.empty(4, np.float32)]
    c.run_into(feeds, outs)
    np.testing.assert_array_equal(outs, [[1, 2, 3, 4], [0, 2, 4, 6]])
    with pytest.raises(OptionError, match="2 outputs, got 1"):
        c.run_into(feeds, outs[:1])
    with pytest.raises(ShapeError, match="not contiguous"):
        c.run_into(feeds, [np.empty(8, np.float32)[::2], outs[1]])
    frozen = np.empty(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="cannot be written"):
        c.run_into(feeds, [frozen, outs[1]])
    with pytest.raises(DTypeError):
        c.run_into(feeds, [[0, 0, 0, 0], outs[1]])  # type: ignore[list-item]
    with pytest.raises(DTypeError):
        c.run_into(feeds, [np.empty(4), outs[1]])
    with pytest.raises(OptionError, match="out is a list of arrays, got NoneType"):
        c.run_into(feeds, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "shift"), [("f32", 1), ("f32", 2), ("f64", 4), ("c64", 4), ("c128", 8), ("i64", 3)])
def test_results_lie_at_multiples_of_their_size(dtype: str, shift: int) -> None:
    """Large ones are stored in whole cache lines, which elements between two places never reach."""
    count, kind = 3 << 20, as_dtype(dtype).np
    c = compiled(lambda x: x + x, x=((count,), dtype))
    memory = np.zeros(count * kind.itemsize + 64, np.uint8)
    x = np.ndarray(count, kind, memory, shift)
    x[...] = np.arange(count)
    with pytest.raises(ShapeError, match="not a multiple of its elements' size"):
        c.run_into({"x": x}, [np.ndarray(count, kind, memory.copy(), shift)])
    np.testing.assert_array_equal(c.run(x=x)[0], x + x)  # inputs may lie anywhere


@pytest.mark.parametrize("shift", [0, 1, 500, 999, 1000])
def test_run_into_memory_of_an_input(shift: int) -> None:
    c = compiled(lambda x: (x[::-1], x * 2.0), x=((1000,),))
    memory = np.arange(2500, dtype=np.float32)
    x, twice = memory[500:1500].copy(), np.empty(1000, np.float32)
    c.run_into({"x": memory[500:1500]}, [memory[500 + shift : 1500 + shift], twice])
    np.testing.assert_array_equal(memory[500 + shift : 1500 + shift], x[::-1])
    np.testing.assert_array_equal(twice, x * 2)
    with pytest.raises(OptionError, match="outputs 0 and 1 overlap"):
        c.run_into({"x": x}, [memory[:1000], memory[shift : 1000 + shift] if shift < 1000 else memory[:1000]])


@pytest.mark.parametrize("of_their_own", [True, False])
def test_run_into_caches_in_place(of_their_own: bool) -> None:
    """A cache that the plan changes in place is not copied; where something reads what it was, it is."""
    g = Graph("caches")
    at, row = g.input("at", (), "i64"), g.input("row", (1, 3))
    caches = [g.input(f"c{i}", (50, 3)) for i in range(3)]
    made = [ops.dynamic_update_slice(c, row * float(i + 1), (at, 0)) for i, c in enumerate(caches)]
    c = Session("cpu").compile(g.outputs(made[0].sum(), *made, caches[2] - made[2]))
    assert [[c._updates(i, j) for j in (1, 2, 3)] for i in (2, 3)] == [[True, False, False], [False, True, False]]
    memory = np.arange(451, dtype=np.float32)
    held = [memory[1 + 150 * i : 151 + 150 * i].reshape(50, 3) for i in range(3)]
    held = [a.copy() for a in held] if of_their_own else held
    want = [a.copy() for a in held]
    feeds = {"at": np.array(7), "row": np.ones((1, 3), np.float32), **{f"c{i}": a for i, a in enumerate(held)}}
    total, away = np.empty((), np.float32), np.empty((50, 3), np.float32)
    arrays, outputs = [feeds[n] for n, _ in c._inputs], [total, *held, away]
    kept = kept_apart(arrays, outputs, c._updates)
    assert [a is b for a, b in zip(arrays, kept, strict=True)] == [True, True, True, True, c._updates(4, 3)]
    c.run_into(feeds, outputs)
    for i, before in enumerate(want):
        after = before.copy()
        after[7] = i + 1
        np.testing.assert_array_equal(held[i], after)
    np.testing.assert_allclose(total, held[0].sum())
    np.testing.assert_array_equal(away, want[2] - held[2])


def test_results_are_never_shared() -> None:
    c = compiled(lambda x: x + 1.0, x=((1 << 15,),))
    held = [c.run(x=np.full(1 << 15, i, np.float32))[0] for i in range(20)]
    assert [float(a[7]) for a in held] == [i + 1.0 for i in range(20)]


def test_submit_and_pipelined_runs() -> None:
    c = compiled(lambda x: x * 3.0, x=((1000,),))
    sets = [{"x": np.full(1000, i, np.float32)} for i in range(16)]
    assert [float(f.result()[0][0]) for f in [c.submit(s) for s in sets]] == [3.0 * i for i in range(16)]
    assert [float(o[0][0]) for o in c.run_pipelined(sets)] == [3.0 * i for i in range(16)]
    with pytest.raises(UnknownNameError):
        c.submit(y=1).result()


# state


def test_bound_inputs_persist_and_given_ones_override() -> None:
    c = compiled(lambda x, s: x + s, x=((2,),), s=((2,),))
    one = np.ones(2, np.float32)
    kept = np.array([10, 20], np.float32)
    c.bind("s", kept)
    kept[:] = 0  # bind copies
    np.testing.assert_array_equal(c.run(x=one)[0], [11, 21])
    np.testing.assert_array_equal(c.run(x=one, s=one)[0], [2, 2])
    np.testing.assert_array_equal(c.read("s"), [10, 20])
    c.bind("s", None)
    with pytest.raises(UnknownNameError, match="'s'"):
        c.run(x=one)
    with pytest.raises(UnknownNameError, match="no kept value"):
        c.read("s")
    with pytest.raises(UnknownNameError, match="no input 'q'"):
        c.bind("q", one)


def test_an_output_feeds_an_input() -> None:
    c = compiled(lambda x, s: (s.sum(), s + x), x=((2,),), s=((2,),))
    c.bind("s", np.zeros(2, np.float32))
    c.feed("s", output=1)
    held = [c.run(x=np.ones(2, np.float32)) for _ in range(5)]
    assert [float(a) for a, _ in held] == [0, 2, 4, 6, 8]
    assert [float(b[0]) for _, b in held] == [1, 2, 3, 4, 5]  # what was returned is not written again
    np.testing.assert_array_equal(c.read("s"), [5, 5])
    with pytest.raises(ValueError):
        held[0][1][0] = 3
    out = [np.empty((), np.float32), np.empty(2, np.float32)]
    c.run_into({"x": np.ones(2, np.float32)}, out)
    np.testing.assert_array_equal(c.read("s"), [6, 6])
    c.feed("s", None)
    c.run(x=np.ones(2, np.float32))
    np.testing.assert_array_equal(c.read("s"), [6, 6])


def test_feeds_are_checked() -> None:
    c = compiled(lambda x, s: (x + 1.0, s * 2.0), x=((2,),), s=((3,),))
    with pytest.raises(ShapeError, match="cannot become"):
        c.feed("s", 0)
    with pytest.raises(OptionError, match="no output 2"):
        c.feed("s", 2)
    c.feed("s", 1)
    c.bind("s", np.ones(3, np.float32))
    with pytest.raises(OptionError, match="no output '1'"):
        c.feed("s", "1")  # type: ignore[arg-type]
    c.run(x=np.ones(2, np.float32))
    np.testing.assert_array_equal(c.read("s"), [2, 2, 2])  # what was refused has changed nothing


@pytest.mark.parametrize("into", [False, True])
def test_one_output_feeds_two_inputs(into: bool) -> None:
    g = Graph("two")
    a, b, x = (g.input(name, (3,)) for name in "abx")
    c = Session("cpu").compile(g.outputs(a - b, ops.dynamic_update_slice(a, x[:1], [0]) + b * 0.0))
    for name in "ab":
        c.bind(name, np.ones(3, np.float32))
        c.feed(name, 1)
    for i in range(3):
        feeds = {"x": np.full(3, i, np.float32)}
        if into:
            c.run_into(feeds, [np.empty(3, np.float32) for _ in range(2)])
        else:
            c.run(feeds)
        np.testing.assert_array_equal(c.read("a"), [i, 1, 1])
        np.testing.assert_array_equal(c.read("b"), [i, 1, 1])


def cache_step(length: int = 64) -> Graph:
    g = Graph("step")
    new, cache, at = g.input("new", (1, 4)), g.input("cache", (length, 4)), g.input("at", (), "i64")
    made = ops.dynamic_update_slice(cache, new, (at, g.constant(0, "i64")))
    return g.outputs(made.sum(axis=0), made)


def test_state_is_updated_in_place_where_the_plan_can() -> None:
    c = Session("cpu").compile(cache_step())
    c.bind("cache", np.zeros((64, 4), np.float32))
    c.feed("cache", 1)
    before = c._state.values["cache"]  # type: ignore[union-attr]
    for i in range(8):
        total, _ = c.run(new=np.full((1, 4), i, np.float32), at=np.int64(i))
        assert float(total[0]) == sum(range(i + 1))
    assert (c._state.values["cache"] is before) == bool(c._state._in_place)  # type: ignore[union-attr]
    np.testing.assert_array_equal(c.read("cache")[:8, 0], np.arange(8))


def test_growing_state_follows_a_symbolic_size() -> None:
    g = Graph("grow")
    past, x = g.input("past", (sym("S", 0, 100), 2)), g.input("x", (1, 2))
    c = Session("cpu").compile(g.outputs(ops.concat([past, x], axis=0)))
    c.bind("past", np.zeros((0, 2), np.float32))
    c.feed("past", 0)
    for i in range(5):
        (out,) = c.run(x=np.full((1, 2), i, np.float32))
        assert out.shape == (i + 1, 2)
    np.testing.assert_array_equal(c.read("past")[:, 0], np.arange(5))


def test_sizes_of_parameters_and_inputs_must_agree() -> None:
    g = Graph("g")
    n = sym("n", 1, 8)
    x, b, v = g.input("x", (n,)), g.param("b", (n,)), g.param("v", (n,))
    c = Session("cpu").compile(g.outputs(x + b + v))
    c.set_params({"b": np.ones(3, np.float32), "v": np.ones(3, np.float32)})
    np.testing.assert_array_equal(c.run(x=np.ones(3, np.float32))[0], [3, 3, 3])
    for size in (2, 5):
        with pytest.raises(SymbolError, match=f"parameter 'b' has size 3 where n = {size}"):
            c.run(x=np.ones(size, np.float32))
        with pytest.raises(SymbolError, match="parameter 'b' has size 3"):
            c.run_into({"x": np.ones(size, np.float32)}, [np.ones(size, np.float32)])
    c.set_param("v", np.ones(5, np.float32))
    with pytest.raises(SymbolError, match="parameter 'v' has size 5 where n = 3"):
        c.run(x=np.ones(3, np.float32))
    c.set_param("b", np.ones(5, np.float32))
    np.testing.assert_array_equal(c.run(x=np.ones(5, np.float32))[0], [3] * 5)


# many threads


def test_many_threads_give_what_one_gives(rng) -> None:
    g = Graph("g")
    n = sym("N", 1, 64)
    x, w = g.input("x", (n, 32)), g.param("w", (32, 16))
    c = Session("cpu").compile(g.outputs(ops.softmax(x @ w, axis=-1), (x * 2.0).sum(axis=0)))
    c.set_param("w", rng.standard_normal((32, 16)).astype(np.float32))
    feeds = [rng.standard_normal((int(rng.integers(1, 65)), 32)).astype(np.float32) for _ in range(8)]
    serial = [c.run(x=f) for f in feeds]
    wrong: list[object] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed)
        for _ in range(50):
            i = int(order.integers(len(feeds)))
            if not all(np.array_equal(a, b) for a, b in zip(c.run(x=feeds[i]), serial[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_params_change_while_others_run() -> None:
    g = Graph("g")
    x, w = g.input("x", (64, 64)), g.param("w", (64, 64))
    c = Session("cpu").compile(g.outputs(x @ w))
    c.set_param("w", np.full((64, 64), 1, np.float32))
    x0 = np.ones((64, 64), np.float32)
    seen: set[float] = set()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            (out,) = c.run(x=x0)
            values = np.unique(out)
            seen.add(float(values[0]) if len(values) == 1 else float("nan"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(50):
        c.set_param("w", np.full((64, 64), i % 4 + 1, np.float32))
    stop.set()
    for t in threads:
        t.join(60)
    assert seen <= {64.0, 128.0, 192.0, 256.0}


# speed


def test_calls_are_cheap() -> None:
    """Few functions of Python; their seconds are in benchmarks/costs.py."""
    c = compiled(lambda x: x + 1.0, x=((4,),))
    x, out = np.ones(4, np.float32), [np.empty(4, np.float32)]
    feeds = {"x": x}
    for _ in range(10):
        c.run(x=x)
        c.run_into(feeds, out)
    assert calls(lambda: c.run(x=x)) <= 4
    assert calls(lambda: c.run_into(feeds, out)) <= 4
    assert len(vars(c)) < 30  # from there on Python keeps attributes in a way that is slower to read


# seeing


def test_profile_has_a_row_for_each_step() -> None:
    g = Graph("g")
    x, w = g.input("x", (32, 64)), g.param("w", (64, 64))
    c = Session("cpu").compile(g.outputs(ops.softmax(x @ w, axis=-1) @ w))
    c.set_param("w", np.ones((64, 64), np.float32))
    p = c.profile(repeats=2)
    assert [r.label for r in p.rows] == [s.label for s in c.lir.schedule if s.phase != "prologue"]
    first = p.rows[0]
    assert first.seconds > 0
    assert first.flops >= 2 * 32 * 64 * 64
    assert first.bytes == 4 * (32 * 64 + 64 * 64 + 32 * 64)
    assert "GFLOP/s" in str(p)
    assert "f32[32, 64]" in str(p)
    assert (
        Session("reference").compile(Graph("r").outputs(Graph("r").constant(1.0))).profile().rows[0].label
        == "the whole graph"
    )


def test_watch_names_the_first_bad_op() -> None:
    c = compiled(lambda x: ops.exp(ops.log(x) * 2.0) + 1.0, x=((3,),))
    ok, bad = np.array([1, 2, 3], np.float32), np.array([1, -1, 3], np.float32)
    with st.watch_finite():
        c.run(x=ok)
        with pytest.raises(RunError, match=r"log makes NaN at \[1\]") as caught:
            c.run(x=bad)
    assert caught.value.place is not None
    assert caught.value.place.file == __file__
    assert np.isnan(c.run(x=bad)[0][1])  # not watched any more


def test_what_watches_one_run_is_not_confused_by_others(tmp_path) -> None:
    """A run of another graph, in another thread, between the beginning and the end of this one."""
    n = sym("n", 1, 64)
    small = compiled(lambda x: ops.log(x) + 1.0, x=((n,),))
    large = compiled(lambda a, b: ops.exp(a @ b) * ops.sum(b), a=((n, 4),), b=((4, 4),))
    feeds = {"a": np.zeros((5, 4), np.float32), "b": np.zeros((4, 4), np.float32)}

    class Between:
        """Runs the other graph when the small one begins."""

        def begin(self, compiled: CompiledGraph, binding: object, arrays: object) -> None:
            if compiled is small:
                thread = threading.Thread(target=large.run, args=(feeds,))
                thread.start()
                thread.join()

        def step(self, *rest: object) -> None: ...

        def end(self, *rest: object) -> None: ...

    @contextmanager
    def disturbed() -> Iterator[None]:
        OBSERVERS.append(between := Between())
        try:
            yield
        finally:
            OBSERVERS.remove(between)

    with st.watch_finite(), disturbed():
        small.run(x=np.ones(3, np.float32))
        with pytest.raises(RunError, match=r"log makes NaN at \[1\]"):
            small.run(x=np.array([1, -1, 3], np.float32))
    with st.trace(tmp_path / "t.json"), disturbed():
        small.run(x=np.ones(9, np.float32))
    events = json.loads((tmp_path / "t.json").read_text())
    shown = {e["args"]["shapes"] for e in events if e.get("cat") == "kernel" and e["args"].get("step")}
    assert "f32[9] -> f32[9]" in shown
    watch = Stopwatch(small)
    watch.begin(large, {"n": 5}, [])
    watch.step(large, 9, 0, 10, [], None)
    assert (watch.best, watch.binding) == ({}, {})


def test_looking_at_a_graph_does_not_change_its_state() -> None:
    g = Graph("g")
    x, s = g.input("x", (2,)), g.input("s", (2,))
    c = Session("cpu").compile(g.outputs(x + s))
    c.bind("s", np.zeros(2, np.float32))
    c.feed("s", 0)
    c.run(x=np.ones(2, np.float32))
    c.profile(x=np.ones(2, np.float32), repeats=3)
    np.testing.assert_array_equal(c.read("s"), 1)


def test_watch_blames_the_maker_of_an_infinity() -> None:
    c = compiled(lambda x, m: (ops.softmax(x + m, axis=-1), ops.exp(x * 100.0)), x=((2,),), m=((2,),))
    mask = np.array([0, -np.inf], np.float32)
    with st.watch_finite(inf=False):
        c.run(x=np.ones(2, np.float32), m=mask)
    with st.watch_finite(), pytest.raises(RunError, match="exp makes an infinity"):
        c.run(x=np.ones(2, np.float32), m=mask)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_arrays_of_another_byte_order_are_read(device: str) -> None:
    g = st.Graph("swapped")
    x, w = g.input("x", (3, 4)), g.param("w", (4,))
    c = st.Session(device).compile(g.outputs(x * w))
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    c.set_param("w", np.arange(4).astype(np.dtype(np.float32).newbyteorder()))
    (out,) = c.run(x=values.astype(values.dtype.newbyteorder()))
    np.testing.assert_array_equal(out, values * np.arange(4))
    with pytest.raises(st.errors.DTypeError, match="of another byte order"):
        c.run_into({"x": values}, out=[np.empty((3, 4), values.dtype.newbyteorder())])


def test_numbers_of_python_lose_nothing() -> None:
    g = st.Graph("numbers")
    i, f = g.input("i", (2,), "i64"), g.input("f", (2,))
    c = st.Session("cpu").compile(g.outputs(i + 1, f * 2))
    assert [out.tolist() for out in c.run(i=[1, True], f=[1, 2.5])] == [[2, 2], [2.0, 5.0]]
    with pytest.raises(st.errors.DTypeError, match=r"input 'i' is i64\[2\], got f64\[2\]"):
        c.run(i=[1.5, 2], f=[1, 2])
    with pytest.raises(st.errors.DTypeError, match=r"input 'f' is f32\[2\], got c128\[2\]"):
        c.run(i=[1, 2], f=[1j, 2])


def test_a_wrong_name_among_many_is_told_in_one_line() -> None:
    g = Graph("g")
    x = g.input("x", (2,))
    for i in range(40):
        x = x + g.param(f"w{i}", (2,))
    c = Session("cpu").compile(g.outputs(x))
    with pytest.raises(UnknownNameError, match=r"it has w0, .*, w11 and 28 more; did you mean 'w39'\?"):
        c.set_param("w.39", np.zeros(2, np.float32))
    assert repr(c).endswith("… 36 more parameters) -> f32[2]>")
    assert c.signature.count("param ") == 40
