"""The stages of a compile: results, reports, dispatch, specialisation, refusals."""

import re
from dataclasses import replace

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends import Capabilities, register_backend, registry
from strata.backends.reference import ReferenceBackend
from strata.core import f32, sym
from strata.errors import (
    CompileError,
    DeviceError,
    MemoryLimitError,
    OptionError,
    ShapeError,
    SymbolError,
    TraceError,
    UnknownNameError,
)
from strata.hir import HirModule
from strata.mir import Graph, evaluate, infer_binding
from strata.runtime import CompileOptions, CompilePipeline, Session, assert_fused, dispatch_report

FUSED = (
    "fused_matmul_bias_act",
    "fused_swiglu",
    "fused_residual_layer_norm",
    "fused_residual_rms_norm",
    "elementwise_region",
)


class Claiming(ReferenceBackend):
    """A device with kernels for some fused ops, without steps on the host."""

    name = "claiming"
    capabilities = Capabilities(claims=frozenset(FUSED), host_steps=False)
    refused: tuple[str, ...] = ()

    def takes(self, op, types=()):
        if op.name.startswith("fused") or op.name == "elementwise_region":
            return op.name in self.capabilities.claims
        return op.name not in self.refused


@pytest.fixture
def claiming():
    """Registers a device that refuses some ops; gives its name."""

    def make(*refused: str, **changes) -> str:
        backend = Claiming()
        backend.refused = refused
        backend.capabilities = replace(backend.capabilities, **changes)
        register_backend("claiming", backend)
        return "claiming"

    yield make
    with registry._lock:
        registry._made.pop("claiming", None)


def linear(bias=True, act="gelu") -> HirModule:
    m = HirModule("linear")
    x, w = m.input("x", (4, 8)), m.param("w", (8, 16))
    b = m.param("b", (16,)) if bias else None
    m.outputs(m.linear(x, w, b, act=act))
    return m


def deep(batch=4) -> Graph:
    g = Graph("deep")
    h = g.input("x", (batch, 8))
    for i in range(3):
        h = ops.gelu(h @ g.param(f"w{i}", f32[8, 8]) + g.param(f"b{i}", f32[8]))
    return g.outputs(h)


# -------------------------------------------------------------------------------------------------------------- results


def test_a_linear_block_is_one_kernel():
    result = CompilePipeline("cpu").compile(linear())
    assert result.fusion.nodes_after == 4
    assert result.fusion.fused_products == 1
    assert [s.label for s in result.lir.schedule] == ["matmul + add + gelu"]


def test_memory_is_shared():
    placement = CompilePipeline("cpu").compile(deep()).lir.placement()
    assert 0 < placement.arena_size <= placement.unshared
    assert placement.bytes_saved == placement.unshared - placement.arena_size


def test_modules_defined_by_a_function():
    m = HirModule.define("two", lambda m: (m.input("x", (4, 8)) @ m.param("w", (8, 8))).relu() @ m.param("v", (8, 2)))
    assert CompilePipeline("cpu").compile_module(m).lir.arena_size > 0


def test_plans_have_phases_io_and_a_steady_fingerprint():
    results = [CompilePipeline("cpu").compile(deep()).lir for _ in range(2)]
    assert results[0].fingerprint() == results[1].fingerprint()
    assert [name for name, _ in results[0].io.inputs] == ["x"]
    assert results[0].manifest().alignment == 64
    assert len(results[0].phases["steady"]) == 3


def test_fingerprints_see_everything():
    base = deep()
    seen = {CompilePipeline("cpu").compile(base).lir.fingerprint()}
    variants = [
        CompileOptions(exact=False),
        CompileOptions(fusion=False),
        CompileOptions(kernel_dispatch="force_common"),
    ]
    for options in variants:
        seen.add(CompilePipeline("cpu", options).compile(base).lir.fingerprint())
    g = Graph("deep")
    x = g.input("x", (4, 8))
    for number in (1.0, 2.0):
        table = ops.take(g.constant(np.full((8, 3), number, np.float32)), g.constant(np.array([0])), axis=0)
        seen.add(CompilePipeline("cpu").compile(g.returning(x[:, :3] + table)).lir.fingerprint())
    assert len(seen) == 1 + len(variants) + 2
    assert CompilePipeline("cpu").compile(deep()).lir.fingerprint() in seen
    assert CompileOptions(threads=3).key == CompileOptions().key


def test_results_keep_their_shapes():
    g = Graph("g")
    x = g.input("x", (1, 1, 1024))
    assert CompilePipeline("cpu").compile(g.outputs(ops.exp(x))).lir.graph.results[0].shape == (1, 1, 1024)


def test_a_plan_has_no_stage_before():
    result = CompilePipeline("cpu").compile(deep())
    for planned in (result, result.lir):
        with pytest.raises(TraceError, match="planned already"):
            CompilePipeline("cpu").lower(planned)


def test_a_plan_passes_through():
    pipe = CompilePipeline("cpu")
    result = pipe.compile(deep())
    passed = pipe.compile(result.lir)
    assert passed.lir is result.lir
    assert passed.passes == ()
    assert not passed.fusion.missed
    assert pipe.compile(result) is result
    compiled = Session("cpu").compile(result.lir)
    feeds = {name: np.ones(kind.shape, np.float32) for name, kind in compiled.inputs.items()}
    compiled.set_params({name: np.ones(kind.shape, np.float32) for name, kind in compiled.params.items()})
    whole = Session("cpu").compile(deep())
    whole.set_params({name: np.ones(kind.shape, np.float32) for name, kind in whole.params.items()})
    np.testing.assert_array_equal(compiled.run(feeds)[0], whole.run(feeds)[0])


def test_a_plan_for_another_target_is_refused():
    made = CompilePipeline("metal").compile(deep()).lir
    with pytest.raises(CompileError, match="is for wgsl"):
        CompilePipeline("cpu").compile(made)


# ------------------------------------------------------------------------------------------------- claims and targets


def test_supported_ops_are_a_claim():
    g = Graph("bias")
    graph = g.outputs(ops.relu(g.input("x", (4, 4)) @ g.param("w", (4, 4)) + g.param("b", (4,))))
    pipe = CompilePipeline("cpu")
    claimed = pipe.with_supported_ops(["matmul", "add", "maximum", "relu", "broadcast_to"])
    assert claimed.options.supported_ops == ("matmul", "add", "maximum", "relu", "broadcast_to")
    assert pipe.options.supported_ops is None
    assert claimed.compile(graph).dispatch.compile_ready
    with pytest.raises(CompileError, match="cannot run 1 of the ops of 'bias': relu") as caught:
        pipe.with_supported_ops(["matmul", "add"]).compile(graph)
    assert "supported: matmul, add" in str(caught.value)
    assert pipe.with_supported_ops(()).compile(graph).dispatch.compile_ready  # an empty claim is no claim
    with pytest.raises(OptionError, match="no op is named"):
        pipe.with_supported_ops(["matmull"])


@pytest.mark.parametrize(("name", "runner"), [("metal", "wgpu"), ("mlx", "wgpu"), ("rocm", "xla"), ("tpu", "xla")])
def test_targets_without_a_device_plan(name: str, runner: str):
    g = Graph("gelu")
    x = g.input("x", (8, 4))
    graph = g.outputs(ops.gelu(x @ g.param("w", (4, 6)) + g.param("b", (6,))))
    pipe = CompilePipeline(name)
    result = pipe.compile(graph)
    assert [s.label.partition(" + ")[0] for s in result.lir.schedule] == ["matmul"]
    assert result.fusion.fused_matmul_bias_act == 1
    assert result.dispatch.compile_ready
    assert runner in pipe.backend.description
    assert name in str(st.dispatch_report(graph, name))
    with pytest.raises(DeviceError, match=f"'{runner}' runs its programs"):
        Session(name)
    with pytest.raises(DeviceError, match=f"'{runner}' runs its programs"):
        pipe.backend.compile(result.lir)


# ---------------------------------------------------------------------------------------------------------- planners


def branches() -> Graph:
    """Scratch buffers of several sizes and types, some alive together."""
    g = Graph("branches")
    x = g.input("x", (64, 64))
    a = ops.softmax(x @ x, axis=1)
    b = ops.softmax(a @ x, axis=0) @ a
    c = ops.cumsum(ops.cast(b, "f64") @ ops.cast(a, "f64"), axis=0)
    return g.outputs(ops.cast(c, "f32") @ b, ops.sum(a @ b, axis=0))


def test_planners_agree_and_share_less_and_less(rng: np.random.Generator):
    x = rng.standard_normal((64, 64)).astype(np.float32)
    sizes, results = {}, {}
    for mode in ("arena", "remap", "off"):
        compiled = Session("cpu").compile(branches(), memory_planner=mode)
        sizes[mode], results[mode] = compiled.lir.arena_size, compiled.run(x=x)
        assert compiled.lir.memory.mode == mode
    assert sizes["arena"] <= sizes["remap"] <= sizes["off"]
    assert sizes["arena"] < sizes["off"]
    for made in results.values():
        for one, other in zip(made, results["arena"], strict=True):
            np.testing.assert_array_equal(one, other)


def test_planners_of_one_graph():
    pipe = CompilePipeline("cpu")
    graph, _ = pipe.optimize(branches())
    off = pipe.plan(graph, st.MemoryPlanOptions("off", 4096))
    placed = off.placement()
    spans = sorted((at, off.buffer(name)) for name, at in placed.offsets.items())
    assert all(at % 4096 == 0 for at, _ in spans)
    assert len({at for at, _ in spans}) == len(spans)
    assert placed.arena_size == placed.unshared
    assert st.parse(str(off)) == off
    assert "memory off 4096" in str(off)
    assert off.fingerprint() != pipe.plan(graph).fingerprint()
    with pytest.raises(OptionError, match="planner is one of arena, remap, off"):
        st.MemoryPlanOptions("pool")
    with pytest.raises(OptionError, match="power of two from 64 to 4096"):
        st.CompileOptions(arena_alignment=96)


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_arena_alignment(alignment: int, rng: np.random.Generator):
    options = CompileOptions(arena_alignment=alignment)
    pipe = CompilePipeline("cpu", options)
    assert pipe.arena_alignment == alignment
    lir = pipe.compile(branches()).lir
    assert all(at % alignment == 0 for at in lir.placement().offsets.values())
    assert lir.manifest().alignment == alignment
    assert f"align={alignment}" in pipe.inspect(branches())
    x = rng.standard_normal((64, 64)).astype(np.float32)
    plain, aligned = (Session("cpu").compile(branches(), o).run(x=x) for o in (None, options))
    np.testing.assert_array_equal(plain[0], aligned[0])


# -------------------------------------------------------------------------------------------------------- dynamic sizes


def test_symbols_are_listed_and_specialised():
    batch = sym("batch", 1, 1024)
    result = CompilePipeline("cpu").compile(deep(batch))
    assert result.has_dynamic_dims
    assert result.dynamic_symbols == ("batch",)
    small, large = result.specialize({"batch": 1}), result.specialize({"batch": 128})
    assert not small.has_dynamic_dims
    assert small.lir.graph.results[0].shape == (1, 8)
    assert large.lir.arena_size > small.lir.arena_size > 0
    assert result.lir.arena_size >= large.lir.arena_size  # planned for the upper bound


def test_unbound_symbols_stay():
    m = HirModule("m")
    x = m.input_batch_seq("x", hidden=64)
    m.outputs(m.linear(x, m.param("w", (64, 64)), m.param("b", (64,)), act="relu"))
    result = CompilePipeline("cpu").compile(m)
    assert result.dynamic_symbols == ("batch", "seq")
    half = result.specialize({"batch": 1})
    assert half.dynamic_symbols == ("seq",)
    assert half.specialize({"seq": 8}).lir.graph.results[0].shape == (1, 8, 64)
    with pytest.raises(UnknownNameError, match="no symbolic size 'bach'; did you mean 'batch'"):
        result.specialize({"bach": 1})


def test_options_bind_sizes_too():
    result = CompilePipeline("cpu", CompileOptions(dim_binding={"batch": 3})).compile(deep(sym("batch")))
    assert result.lir.graph.results[0].shape == (3, 8)


def test_sizes_without_bounds_are_placed_when_known():
    lir = CompilePipeline("cpu").compile(deep(sym("batch"))).lir
    with pytest.raises(SymbolError, match="has no upper bound"):
        lir.placement()
    assert lir.placement({"batch": 2}).arena_size > 0


def test_bindings_come_from_shapes():
    g = Graph("g")
    s = sym("s")
    x, y = g.input("x", (sym("b"), s)), g.input("y", (s + 1,))
    assert infer_binding({x: (2, 5), y: (6,)}) == {"b": 2, "s": 5}
    with pytest.raises(SymbolError, match=r"input 'y' has size 9 where s \+ 1 = 6 \(s = 5 from 'x'\)"):
        infer_binding({x: (2, 5), y: (9,)})
    flat = Graph("flat")
    flat.outputs(ops.exp(flat.input("x", (sym("b") * s,))))
    with pytest.raises(SymbolError, match=r"the size b\*s is symbolic; a number is needed here"):
        Session("cpu").compile(flat).run(x=np.ones(10, np.float32))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_memory_limit_names_the_peak_and_the_largest():
    with pytest.raises(
        MemoryLimitError, match=r"needs 256 bytes of scratch memory, the limit is 100; largest: %0 : f32\[4, 8\]"
    ):
        CompilePipeline("cpu", CompileOptions(memory_limit=100)).compile(deep())
    assert CompilePipeline("cpu", CompileOptions(memory_limit=256)).compile(deep()).lir.arena_size == 256


def test_wrong_programs_fail_where_they_are_written():
    g = Graph("g")
    x = g.input("x", (4, 6))
    for wrong in (lambda: ops.reshape(x, (5, 5)), lambda: ops.narrow(x, 1, 4, 3), lambda: x @ g.param("w", (4, 2))):
        with pytest.raises(ShapeError) as error:
            wrong()
        assert error.value.place is not None
        assert error.value.place.short.startswith("test_pipeline.py")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_dispatch": "native"}, "kernel_dispatch is one of"),
        ({"tune": "random"}, "tune is one of heuristic, beam"),
        ({"precision": "f12"}, "no precision policy is named 'f12'"),
        ({"fusion": "on"}, "fusion is True, False or FusionLimits"),
        ({"memory_limit": -1}, "memory_limit must be a count"),
        ({"force_common": ("sofmax",)}, "did you mean 'softmax'"),
        ({"force_common": "softmax", "force_native": "softmax"}, "in force_common and in force_native"),
        ({"passes": "fold{limit=}, x"}, "no pass is named 'x'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((OptionError, UnknownNameError), match=re.escape(message)):
        CompileOptions(**options)


# ------------------------------------------------------------------------------------------------------- fusion reports


def test_summary_line():
    report = CompilePipeline("cpu").compile(deep()).fusion
    assert report.summary_line().startswith("nodes=16→10 matmul=3→3 fused_mm_act=3")
    assert report.kernels == 3
    assert report.matmul_before == 3
    assert report.attention == 0
    first = ["integer_products", "inline_scan", "simplify", "fold{sizes=False}"]
    assert [p.name for p in report.passes][:4] == first
    with pytest.raises(AttributeError):
        _ = report.convolutions


def test_products_of_one_left_side_that_stay_apart():
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    g.outputs(*(x @ g.input(f"w{i}", f32[8, 16]) for i in range(2)))
    report = CompilePipeline("cpu").compile(g).fusion
    assert report.missed_shared_matmul() == 1
    assert "2 matmuls share their left side and stay apart: 2 of their weights are not parameters" in str(report)
    assert "missed_shared_mm=1" in report.summary_line()
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    g.outputs(*(x @ g.param(f"w{i}", f32[8, 16]) for i in range(3)))
    assert not CompilePipeline("cpu").compile(g).fusion.missed
    left_out = CompilePipeline("cpu", CompileOptions(skip_passes=("share_matmul",))).compile(g).fusion
    assert "3 matmuls share their left side and stay apart: share_matmul did not join them" in str(left_out)


def test_narrow_products_are_no_misses():
    """A router of a few columns stays on its own by choice."""
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    g.outputs(x @ g.param("w", f32[8, 16]), x @ g.param("router", f32[8, 4]))
    assert not CompilePipeline("cpu").compile(g).fusion.missed_shared_matmul()


def test_assert_fused():
    assert_fused(deep(), "matmul", "add", "gelu")
    assert_fused(CompilePipeline("cpu").compile(deep()), "matmul", "gelu")
    g = Graph("g")
    x = g.input("x", f32[4, 4])
    g.outputs(ops.exp(x) @ x)
    with pytest.raises(CompileError, match="no kernel computes exp and matmul together") as error:
        assert_fused(g, "exp", "matmul")
    assert "exp → matmul: matmul reads it as a matrix" in str(error.value)
    with pytest.raises(CompileError, match="no step computes softmax; the steps are exp, matmul"):
        assert_fused(g, "softmax")


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_shows_every_stage():
    text = CompilePipeline("cpu").inspect(linear())
    parts = (
        "══ HIR ══", "hir @linear", "══ MIR ══", "mir @linear", "══ pass decompose ══", "lir @linear", "arena:",
        "fingerprint:", "kernel @k0", "══ fusion ══",
    )  # fmt: skip
    for part in parts:
        assert part in text, part
    assert "# 4 → 6 nodes: add +1, fused_matmul_bias_act -1, gelu +1, matmul +1" in text


def test_explain_names_cuts_and_lines():
    g = Graph("g")
    x = g.input("x", f32[4, 4])
    h = ops.exp(x)
    g.outputs(h @ x)
    text = str(CompilePipeline("cpu").compile(g).explain())
    assert "exp → matmul: matmul reads it as a matrix   [test_pipeline.py" in text
    assert "h = ops.exp(x)" in text
    assert "passes\n  15 changed nothing" in text
    assert "no fusion was missed" in text
    assert "arena 64 bytes, lower bound 64" in text


# ------------------------------------------------------------------------------------------------------------- dispatch


def test_what_runs_how():
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    g.outputs(ops.softmax(x), ops.eigh(x @ x.T)[0])
    report = dispatch_report(g, "cpu")
    assert report.path("softmax") == "decomposed"
    assert report.path("matmul") == "native"
    assert report.path("eigh") in ("host", "native")
    assert report.path("exp") is None
    assert report.compile_ready
    assert "dispatch on cpu, prefer_native: ready" in str(report)


def test_every_offender_is_named_with_its_line(claiming):
    g = Graph("g")
    x = g.input("x", f32[4, 4])
    y = ops.sort(x)
    z = ops.cholesky(y)
    g.outputs(z, ops.sort(z))
    with pytest.raises(CompileError) as error:
        CompilePipeline(claiming("sort", "cholesky")).compile(g)
    text = str(error.value)
    assert text.startswith("claiming cannot run 3 of the ops of 'g': sort, cholesky")
    assert "y = ops.sort(x)" in text
    assert "z = ops.cholesky(y)" in text
    report = dispatch_report(g, claiming("sort", "cholesky"))
    assert not report.compile_ready
    assert [o.op for o in report.unsupported] == ["sort", "cholesky", "sort"]


def test_compositions_are_taken_apart_for_a_smaller_claim(claiming):
    m = linear(act="relu")
    device = claiming(claims=frozenset())
    result = CompilePipeline(device).compile(m)
    assert {n.op.name for n in result.lir.graph.nodes()} == {"input", "param", "matmul", "add", "relu"}
    assert result.dispatch.path("fused_matmul_bias_act") == "decomposed"
    assert result.dispatch.compile_ready


@pytest.mark.parametrize("op", ["group_norm", "relu_backward"])
def test_lowered_for_a_device_without_them(claiming, op):
    g = Graph("g")
    x = g.input("x", f32[2, 4, 3])
    made = ops.group_norm(x, 2) if op == "group_norm" else ops.relu_backward(x, x)
    result = CompilePipeline(claiming(op)).compile(g.outputs(made))
    names = {n.op.name for n in result.lir.graph.nodes()}
    assert op not in names
    assert {"group_norm": {"reduce_sum", "rsqrt"}, "relu_backward": {"greater", "where"}}[op] <= names
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)}
    np.testing.assert_allclose(evaluate(result.lir.graph, feeds)[0], evaluate(g, feeds)[0], rtol=1e-5, atol=1e-6)


def test_legal_graphs_stay_as_they_are(claiming):
    g = Graph("g")
    before = g.outputs(ops.sort(g.input("x", f32[4])))
    after, _ = CompilePipeline(claiming()).optimize(before)
    assert after == before


def test_element_types_that_a_device_does_not_hold(claiming):
    g = Graph("g")
    g.outputs(ops.exp(g.input("x", (4,), "f64")))
    with pytest.raises(CompileError, match="cannot run 1 of the ops") as error:
        CompilePipeline(claiming(dtypes=frozenset({"f32", "i32"}))).compile(g)
    assert "it does not hold f64: cast to one of f32, i32" in str(error.value)


def test_dispatch_policies():
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    g.outputs(ops.silu(x))
    common = CompilePipeline("cpu", CompileOptions(force_common="silu")).compile(g)
    assert "silu" not in {n.op.name for n in common.lir.graph.nodes()}
    native = CompilePipeline("cpu").compile(g)
    assert "silu" in {n.op.name for n in native.lir.graph.nodes()}
    h = Graph("h")
    h.outputs(ops.layer_norm(h.input("x", f32[4, 8])))
    for options in (CompileOptions(force_native="layer_norm"), CompileOptions(kernel_dispatch="force_native")):
        with pytest.raises(CompileError, match="cpu cannot run 1 of the ops of 'h': layer_norm") as error:
            CompilePipeline("cpu", options).compile(h)
        assert "it decomposes into reduce_sum" in str(error.value)


def test_search_is_refused_where_there_is_none(claiming):
    with pytest.raises(OptionError, match="claiming has no search for schedules"):
        CompilePipeline(claiming(), CompileOptions(tune="beam"))


# ------------------------------------------------------------------------------------------------------------- training


def test_training_plans_share_their_weights():
    g = Graph("loss")
    x, w, b = g.input("x", f32[4, 8]), g.param("w", f32[8, 3]), g.param("b", f32[3])
    g.outputs(ops.mean(ops.square(ops.tanh(x @ w + b))))
    made = CompilePipeline("cpu").compile_training(g)
    assert made.wrt == ("w", "b")
    assert made.weights == {"b": (0, 12), "w": (64, 96)}
    for part in (made.forward, made.backward):
        assert part.lir.manifest().weight_layout() == made.weights
    assert not any(n.op.name.startswith("fused") for n in made.backward.lir.graph.nodes())
    assert [x.shape for x in made.backward.lir.graph.results] == [(), (8, 3), (3,)]
    assert made.forward.fusion.fused_products == 1
