"""Traces: valid JSON, spans that nest, every thread, no cost when off."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.errors import OptionError
from strata.mir import Graph
from strata.runtime import CompiledGraph, Session
from strata.runtime.report import observe, tracing
from strata.runtime.report.observe import OBSERVERS
from tests.counts import codes


def network(n: int = 512) -> CompiledGraph:
    g = Graph('net "quoted"')
    x, w = g.input("x", (n, n)), g.param("w", (n, n))
    c = Session("cpu").compile(g.outputs(ops.softmax(x @ w, axis=-1) @ w))
    c.set_param("w", np.ones((n, n), np.float32))
    return c


def spans(path) -> list[dict]:
    text = path.read_text()
    assert text.startswith("[")
    return [e for e in json.loads(text) if e["ph"] == "X"]


def test_trace_has_compiles_runs_and_kernels(tmp_path) -> None:  # behaviour 102
    path = tmp_path / "run.json"
    with st.trace(path):
        c = network()
        c.run(x=np.ones((512, 512), np.float32))
    found = spans(path)
    names = [e["name"] for e in found]
    assert "compile" in names
    assert "code" in names
    assert 'run net "quoted"' in names
    kernels = [e for e in found if e["cat"] == "kernel"]
    assert {s.label for s in c.lir.schedule} <= {e["name"] for e in kernels}
    product = next(e for e in kernels if "matmul" in e["name"])
    assert product["args"]["flops"] >= 2 * 512**3
    assert "f32[512, 512]" in product["args"]["shapes"]
    assert product["args"]["bytes"] >= 3 * 4 * 512 * 512


def test_spans_nest_on_every_thread(tmp_path) -> None:
    path = tmp_path / "run.json"
    c = network(64)
    with st.trace(path):
        threads = [threading.Thread(target=lambda: c.run(x=np.ones((64, 64), np.float32))) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        network(96)
    by_thread: dict[int, list[dict]] = {}
    for e in spans(path):
        by_thread.setdefault(e["tid"], []).append(e)
    assert len(by_thread) >= 5
    for events in by_thread.values():
        stack: list[float] = []
        for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"] + 1e-3:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1] + 1e-3, e
            stack.append(e["ts"] + e["dur"])


def test_workers_appear_under_their_own_numbers(tmp_path) -> None:
    path = tmp_path / "run.json"
    g = Graph("g")
    c = Session("cpu").compile(g.outputs(ops.exp(g.input("x", (1 << 22,)))), threads=2)
    x = np.ones(1 << 22, np.float32)
    with st.trace(path):
        for _ in range(20):  # a busy machine may let the second thread sleep through some
            c.run(x=x)
    assert len({e["tid"] for e in spans(path) if e["cat"] == "kernel"}) >= 2


def test_nothing_is_traced_outside(tmp_path) -> None:
    c = network(32)
    path = tmp_path / "run.json"
    with st.trace(path):
        pass
    c.run(x=np.ones((32, 32), np.float32))
    assert spans(path) == []
    assert OBSERVERS == []


def test_errors_inside_still_write_the_trace(tmp_path) -> None:
    path = tmp_path / "run.json"
    c = network(32)
    with pytest.raises(KeyError), st.trace(path):  # noqa: PT012 - the error comes after a run
        c.run(x=np.ones((32, 32), np.float32))
        raise KeyError
    assert spans(path)
    assert OBSERVERS == []


def test_bad_paths_are_refused_before_anything_runs(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(OptionError), st.trace(path):
            pytest.fail("ran")


def test_tracing_costs_nothing_when_off(tmp_path) -> None:
    """A run enters no function for traces, and no more of any other than before there was a trace."""
    c = network(64)
    x = np.ones((64, 64), np.float32)

    def run() -> None:
        c.run(x=x)

    for _ in range(10):
        run()
    before = codes(run)
    with st.trace(tmp_path / "run.json"):
        traced = codes(run)
    for _ in range(10):
        run()
    assert {code.co_filename for code in traced} & {tracing.__file__, observe.__file__}
    assert not {code.co_filename for code in before} & {tracing.__file__, observe.__file__}
    assert codes(run) == before


def test_values_in_a_trace(tmp_path):
    """Every kernel with the ranges of what it read and made: NaN and infinities are counted, not hidden."""
    g = Graph("ranges")
    x = g.input("x", (64, 64))
    graph = g.outputs(ops.log(ops.softmax(x @ x, axis=1) - 0.5), ops.sum(ops.cast(x, "i32"), axis=0))
    compiled = Session("cpu").compile(graph)
    data = np.random.default_rng(0).uniform(-2, 3, (64, 64)).astype(np.float32)
    with st.trace(tmp_path / "v.json", values=True):
        first, _ = compiled.run(x=data)
    events = [e for e in json.loads((tmp_path / "v.json").read_text()) if "inputs" in e.get("args", {})]
    assert {e["name"] for e in events} == {s.label for s in compiled.lir.schedule}
    read = next(e["args"]["inputs"]["x"] for e in events if "x" in e["args"]["inputs"])
    assert read == {"type": "f32[64, 64]", "min": float(data.min()), "max": float(data.max())}
    last = next(e["args"]["outputs"]["out0"] for e in events if "out0" in e["args"]["outputs"])
    assert last["nan"] == int(np.isnan(first).sum()) > 0
    assert last["max"] == float(np.nanmax(first))
    with st.trace(tmp_path / "plain.json"):
        compiled.run(x=data)
    assert not any("inputs" in e.get("args", {}) for e in json.loads((tmp_path / "plain.json").read_text()))


def test_values_of_weights_that_are_packed(tmp_path):
    """A parameter of which only the packed form is kept, and one that is computed from it, are no obstacle."""
    g = Graph("packed")
    x, w, v = g.input("x", (64, 64)), g.param("w", (64, 64)), g.param("v", (32, 64))
    compiled = Session("cpu").compile(g.outputs(ops.relu(x @ w) @ ops.exp(v).T))
    weights = np.random.default_rng(0).uniform(-2, 3, (64, 64)).astype(np.float32)
    compiled.set_params({"w": weights, "v": weights[:32]})
    ones = np.ones((64, 64), np.float32)
    with st.trace(tmp_path / "w.json", values=True), st.watch_finite():
        (found,) = compiled.run(x=ones)
    events = [e for e in json.loads((tmp_path / "w.json").read_text()) if "inputs" in e.get("args", {})]
    read = next(e["args"]["inputs"]["w"] for e in events if "w" in e["args"]["inputs"])
    assert read == {"type": "f32[64, 64]", "min": float(weights.min()), "max": float(weights.max())}
    np.testing.assert_array_equal(found, compiled.run(x=ones)[0])
    compiled.set_param("w", np.full((64, 64), np.inf, np.float32))
    with st.watch_finite():  # the weight is to blame, and no op
        compiled.run(x=ones)


def test_attention_says_how_it_masks(tmp_path):
    g = Graph("attend")
    q, k, v = (g.input(n, (1, 2, 64, 16)) for n in "qkv")
    compiled = Session("cpu").compile(g.outputs(ops.scaled_dot_product_attention(q, k, v, is_causal=True)))
    ones = np.ones((1, 2, 64, 16), np.float32)
    with st.trace(tmp_path / "a.json", values=True):
        compiled.run(q=ones, k=ones, v=ones)
    events = [e for e in json.loads((tmp_path / "a.json").read_text()) if "attention" in e.get("args", {})]
    (event,) = (e for e in events if e["cat"] == "op")  # beside it, one for a worker that took a part
    assert {e["args"]["attention"] for e in events} == {event["args"]["attention"]}
    assert "causal=True" in event["args"]["attention"]
