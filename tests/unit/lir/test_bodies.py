"""Plans inside of loops and branches: as text, in the store, under the options and in the reports of their program."""

import numpy as np
import pytest

import strata as st
from strata import CompileOptions
from strata.core import f32, sym
from strata.errors import CompileError, ParseError, VerifyError
from strata.lir import Lir, parse_module, show_module
from strata.mir import METHODS, Graph
from strata.ops import ScanOp, cond
from strata.passes import FusionLimits
from strata.runtime.compile.pipeline import CompilePipeline
from strata.runtime.storage.stored import check_plan, read_plan, write_plan


def _program() -> Graph:
    g = Graph("g")
    t = sym("t")
    h, w, xs = g.input("h", f32[4, 16]), g.param("w", f32[16, 16]), g.input("xs", f32[t, 4, 16])
    table = np.arange(64, dtype=np.float32).reshape(4, 16) / 64

    body = Graph("body")
    c, k, x = body.input("c", f32[4, 16]), body.input("k", f32[16, 16]), body.input("x", f32[4, 16])
    new = METHODS["tanh"](METHODS["matmul"](c, METHODS["exp"](k)) + x)
    made = cond(METHODS["sum"](new) > 0.0, lambda: new * table, lambda: new + table)
    return g.outputs(*ScanOp(body.outputs(made, made), t, 1, 1)(h, w, xs))


@pytest.fixture(scope="module")
def lir() -> Lir:
    return CompilePipeline("cpu").compile(_program()).lir


def _inner(lir: Lir) -> Lir:
    return next(s.bodies[0] for s in lir.schedule if s.bodies)


def test_a_loop_has_the_plan_of_its_body_and_that_of_its_branches(lir: Lir) -> None:
    body = _inner(lir)
    assert body.schedule[0].phase == "prologue"  # exp of what stays the same
    assert [len(s.bodies) for s in body.schedule if s.name == "cond"] == [2]
    assert [s.name for _, s in lir.walk()].count("cond") == 1


def test_the_text_reads_back(lir: Lir) -> None:
    back = parse_module(show_module(lir))
    assert back == lir
    assert _inner(back) == _inner(lir)
    assert back.fingerprint() == parse_module(str(back)).fingerprint()


def test_text_with_a_body_that_is_not_the_ops_is_refused(lir: Lir) -> None:
    text = show_module(lir)
    with pytest.raises(ParseError, match="expected `body 0 of step 3"):
        parse_module(text.replace("\nbody 0 of", "\nbody 7 of"))
    outer, mark, inner = text.partition("\nbody 0 of step 0")
    for old, new in (("input x", "input y"), (", x: f32", ", y: f32"), ("(%1, x)", "(%1, y)")):
        inner = inner.replace(old, new)
    with pytest.raises(VerifyError, match="a body body that is not the graph of its op"):
        parse_module(outer + mark + inner)


def test_a_stored_plan_has_its_bodies_and_runs(lir: Lir, rng: np.random.Generator) -> None:
    g = _program()
    data = write_plan(lir, g)
    assert data is not None
    back = read_plan(data, g, lambda: lir.graph)
    assert not check_plan(back)
    assert _inner(back).summary() == _inner(lir).summary()
    h, xs = rng.random((4, 16), np.float32), rng.random((5, 4, 16), np.float32)
    compiled = st.Session("cpu").compile(g)
    weight = rng.random((16, 16), np.float32) / 20
    compiled.set_param("w", weight)
    state, table = h, np.arange(64, dtype=np.float32).reshape(4, 16) / 64
    for x in xs:
        state = np.tanh(state @ np.exp(weight) + x)
        state = state * table if state.sum() > 0 else state + table
    np.testing.assert_allclose(compiled.run(h=h, xs=xs)[0], state, rtol=1e-4, atol=1e-5)


def test_limits_of_fusion_reach_bodies() -> None:
    limited = CompilePipeline("cpu", CompileOptions(fusion=FusionLimits(max_steps=1))).compile(_program()).lir
    assert all(len(s.nodes) == 1 for s in _inner(limited).schedule if s.kernel is not None)


def test_reports_tell_of_bodies() -> None:
    result = CompilePipeline("cpu").compile(_program())
    st.assert_fused(result, "matmul", "add", "tanh")
    with pytest.raises(CompileError, match="no kernel computes matmul and reduce_sum together"):
        st.assert_fused(result, "matmul", "reduce_sum")
    assert any("matmul + add + tanh" in label for label in result.fusion.fused_kernels)
    text = str(result.explain())
    assert "|   1 k" in text
    assert "(once, before the first turn)" in text
    assert "all in scan" in [p.name for p in result.fusion.passes]
    assert f"{len(result.fusion.passes)} changed nothing" in text
