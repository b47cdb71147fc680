"""The `xla` device: whole programs, symbols, parameters, errors and stages, against the oracle."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import ALL_DTYPES, TABLES, DType, f32, i64
from strata.errors import DeviceError, IndexRangeError, MemoryLimitError, RunError
from strata.mir import Graph, evaluate
from strata.runtime import CompiledGraph, Session

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer(rows: Any = 4) -> Graph:
    g = Graph("layer")
    x, w, b = g.input("x", (rows, 8)), g.param("w", (8, 16)), g.param("b", (16,))
    return g.outputs(ops.gelu(x @ w + b))


def check(compiled: CompiledGraph, graph: Graph, params: dict[str, Any], **feeds: Any) -> None:
    for got, want in zip(compiled.run(feeds), evaluate(graph, {**params, **feeds}, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_layer_is_one_module() -> None:
    graph, params = layer(), {"w": numbers(8, 16), "b": numbers(16, seed=1)}
    compiled = Session("xla").compile(graph)
    compiled.set_params(params)
    check(compiled, graph, params, x=numbers(4, 8, seed=2))
    check(compiled, graph, params, x=numbers(8, 8, seed=3)[::2])
    params["b"] = numbers(16, seed=4)
    compiled.set_param("b", params["b"])
    check(compiled, graph, params, x=numbers(4, 8, seed=2))
    assert compiled.host_steps == []


def test_sizes_that_are_symbols() -> None:
    graph, params = layer(st.sym("rows", 0, 64)), {"w": numbers(8, 16), "b": numbers(16, seed=1)}
    compiled = Session("xla").compile(graph)
    compiled.set_params(params)
    for rows in (3, 1, 0, 3, 17):
        check(compiled, graph, params, x=numbers(rows, 8, seed=rows))


def test_programs_for_few_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "xla programs", replace(TABLES["xla programs"], capacity=2))
    g = Graph("g")
    compiled = Session("xla").compile(g.outputs(g.input("x", (st.sym("n", 0, 64),)) * 2.0))
    executable: Any = compiled._executable
    made = []
    monkeypatch.setattr(
        executable, "_made", lambda sizes, make=executable._made: (made.append(sizes["n"]), make(sizes))[1]
    )
    for n in (1, 2, 1, 3, 1, 2):  # 2 is the one that was not used for longest when 3 comes
        np.testing.assert_array_equal(compiled.run(x=np.ones(n, np.float32))[0], np.full(n, 2))
    assert made == [1, 2, 3, 2]


def test_memory_is_what_the_compiler_reports() -> None:
    g = Graph("products")
    x = g.input("x", (st.sym("n", 1), 512))
    w = g.constant(np.eye(512), "f32")
    g.outputs(ops.sum(ops.tanh(ops.tanh(x @ w) @ w) @ w))
    given = np.ones((2, 512), np.float32)
    compiled = Session("xla").compile(g)
    compiled.run(x=given)
    needed = compiled.memory.scratch
    assert needed
    Session("xla").compile(g, memory_limit=needed).run(x=given)
    with pytest.raises(MemoryLimitError, match=f"the limit is {needed - 1:,}"):
        Session("xla").compile(g, memory_limit=needed - 1).run(x=given)
    with pytest.raises(MemoryLimitError):
        Session("xla").compile(g.bind({"n": 2}), memory_limit=needed - 1)


def test_ops_of_the_host_lie_between_modules() -> None:
    g = Graph("between")
    x = g.input("x", (3, 3), "f64")
    w, v = ops.eigh(x @ ops.transpose(x, (1, 0)))
    g.outputs(ops.exp(w) + 1.0, ops.abs(v) * 2.0, x * 3.0)
    compiled = Session("xla").compile(g)
    assert compiled.host_steps == ["eigh"]
    given = np.random.default_rng(0).standard_normal((3, 3))
    for got, want in zip(compiled.run(x=given), evaluate(g, {"x": given}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_results_that_are_inputs_or_constants() -> None:
    g = Graph("leaves")
    x, w = g.input("x", (2,)), g.param("w", (3,))
    g.outputs(x, w, g.constant(np.arange(4.0)), x + 1.0, x)
    compiled = Session("xla").compile(g)
    compiled.set_param("w", np.ones(3, np.float32))
    made = compiled.run(x=np.array([1, 2], np.float32))
    for got, want in zip(made, ([1, 2], [1, 1, 1], [0, 1, 2, 3], [2, 3], [1, 2]), strict=True):
        np.testing.assert_array_equal(got, want)
    made[0][:] = 7  # results belong to the caller
    np.testing.assert_array_equal(compiled.run(x=np.array([1, 2], np.float32))[4], [1, 2])


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_constants_keep_their_bits(dtype: DType) -> None:
    rng = np.random.default_rng(0)
    g, made = Graph("constants"), []
    for shape in ((), (0, 3), (1,), (7,), (3, 5), (2, 3, 9)):
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        values = (raw[..., 0] & 1).astype(bool) if dtype.is_bool else raw[..., 0].astype(np.int8).astype(dtype.np)
        if dtype.is_inexact and dtype.bits >= 16:
            values = rng.standard_normal(shape).astype(dtype.np)
        made += [values, np.broadcast_to(values.reshape(-1)[:1], (2, 2)) if values.size else values]
    g.outputs(*(ops.reshape(g.constant(np.asarray(a)), (*a.shape, 1)) for a in made))
    for got, want in zip(Session("xla").compile(g).run(), made, strict=True):
        assert got.tobytes() == want.tobytes()
    text = st.stablehlo.export(g)
    from strata.backends.stablehlo.adapter import client

    for got, want in zip(client().run(client().place(0).load(text, "c"), []), made, strict=True):
        np.testing.assert_array_equal(client().take(got)[..., 0], want)


def test_large_constants_are_no_part_of_the_text() -> None:
    g = Graph("table")
    table = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
    g.outputs(ops.gather(g.constant(table), g.input("ids", i64[5]), axis=0))
    compiled = Session("xla").compile(g)
    ids = np.array([0, 299, 7, 7, 150])
    np.testing.assert_array_equal(compiled.run(ids=ids)[0], table[ids])
    assert len(compiled._executable.stablehlo()) < 10_000  # type: ignore[attr-defined]


def test_errors_that_only_a_run_can_find() -> None:
    g = Graph("singular")
    g.outputs(ops.solve(g.input("a", (2, 2)), g.input("b", (2, 1))) * 2.0)
    compiled = Session("xla").compile(g)
    b = np.ones((2, 1), np.float32)
    np.testing.assert_allclose(compiled.run(a=np.eye(2, dtype=np.float32), b=b)[0], 2 * b)
    with pytest.raises(RunError, match="singular"):
        compiled.run(a=np.ones((2, 2), np.float32), b=b)
    g = Graph("indefinite")
    x = g.input("x", f32[3, 2, 2])
    _, rows = ops.scan(lambda c, row: (c, ops.cholesky(row)), g.constant(0.0), x)
    g.outputs(rows)
    good = np.stack([np.eye(2, dtype=np.float32)] * 3)
    np.testing.assert_array_equal(Session("xla").compile(g).run(x=good)[0], good)
    bad = good.copy()
    bad[1] *= -1
    with pytest.raises(RunError, match="positive definite"):
        Session("xla").compile(g).run(x=bad)


def test_ids_out_of_range() -> None:
    g = Graph("ids")
    x, w, ids = g.input("x", (3, 2)), g.input("w", (4, 2, 5)), g.input("ids", i64[3])
    g.outputs(ops.grouped_matmul(x, w, ids))
    compiled = Session("xla").compile(g)
    feeds = {"x": numbers(3, 2), "w": numbers(4, 2, 5)}
    check(compiled, g, {}, **feeds, ids=np.array([3, 0, 1]))
    with pytest.raises(IndexRangeError, match="expert 4 of 4"):
        compiled.run({**feeds, "ids": np.array([3, 0, 4])})


def test_many_threads_share_a_program() -> None:
    graph = layer(st.sym("rows", 1, 64))
    compiled = Session("xla").compile(graph)
    params = {"w": numbers(8, 16), "b": numbers(16, seed=1)}
    compiled.set_params(params)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for rows in (1, 2, 5, 2, 1):
                check(compiled, graph, params, x=numbers(rows, 8, seed=seed + rows))
        except BaseException as error:  # noqa: BLE001 - threads have nobody to raise to
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_clones_have_parameters_of_their_own() -> None:
    g = Graph("g")
    c = Session("xla").compile(g.outputs(g.input("x", f32[3]) * g.param("w", f32[3])))
    one = np.ones(3, np.float32)
    c.set_param("w", 2 * one)
    other = c.clone()
    other.set_param("w", 3 * one)
    third = c.clone()
    c.set_param("w", 5 * one)
    for made, factor in ((c, 5), (other, 3), (third, 2)):
        np.testing.assert_array_equal(made.run(x=one)[0], factor * one)


def test_numbers_of_devices() -> None:
    assert st.Device("xla:0").backend is st.Device("xla").backend
    assert "xla" in st.devices()
    with pytest.raises(DeviceError, match="'xla:99' is not available"):
        st.Device("xla:99")


def test_jax_is_imported_by_the_first_use() -> None:
    code = (
        "import sys, strata as st; assert 'jax' not in sys.modules; st.Device('cpu'); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plans_show_modules_and_what_lies_between() -> None:
    g = Graph("between")
    x = g.input("x", (3, 3), "f64")
    w, v = ops.eigh(x @ x)
    g.outputs(ops.exp(w) + 1.0, v * g.constant(np.arange(3.0)), g.constant(np.arange(2)), x)
    compiled = Session("xla").compile(g)
    lir = compiled.lir
    lir.verify()
    assert [(s.name, s.is_module) for s in lir.schedule] == [("module0", True), ("eigh", False), ("module2", True)]
    assert st.parse(str(lir)) == lir
    assert "eigh runs on the host" in str(compiled.explain())
    assert compiled.stablehlo().count("func.func public @main") == 2


def test_text_that_runs_is_shown() -> None:
    compiled = Session("xla").compile(layer(st.sym("rows", 1, 64)))
    assert "tensor<5x16xf32>" in compiled.stablehlo(rows=5)
    assert "══ code module0 ══" in st.CompilePipeline("xla").inspect(layer())
    assert "stablehlo.dot_general" in Session("xla").compile(layer()).explain().code["module0"]
    assert compiled.explain().code == {}
    assert compiled.set_active_extent("rows", 3) is False
    assert "compiled for its sizes" in compiled.explain_extent("rows")[0]


def test_dispatch_names_every_path() -> None:
    g = Graph("paths")
    x = g.input("x", (4, 4))
    g.outputs(ops.softmax(ops.gelu(x), axis=-1), *ops.svd(x))
    report = st.dispatch_report(g, "xla")
    assert {p.op: p.path for p in report.ops} == {"gelu": "native", "softmax": "decomposed", "svd": "host"}
    assert report.compile_ready


def test_long_rows() -> None:
    """Steps that double would be fused into one that computes the first of them again and again."""
    x = np.random.default_rng(0).standard_normal((2, 50_000)).astype(np.float32)
    x[1, 400] = np.nan
    g = Graph("long")
    given = g.input("x", f32[2, 50_000])
    wide = ops.cast(given, "f64")
    g.outputs(
        ops.cumsum(wide, axis=1), *ops.cummax(given, axis=1), *ops.cummin(given, axis=1), ops.logcumsumexp(wide, axis=1)
    )
    for got, want in zip(Session("xla").compile(g).run(x=x), evaluate(g, {"x": x}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_a_fork_cannot_use_the_device() -> None:
    code = """
import os, numpy as np, strata as st
g = st.Graph("g")
c = st.Session("xla").compile(g.outputs(g.input("x", (2,)) + 1.0))
child = os.fork()
if not child:
    try:
        c.run(x=np.ones(2, "f4"))
    except st.errors.DeviceError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(c.run(x=np.ones(2, "f4"))[0])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "[2. 2.]\n", done.stderr[-2000:]
