"""What is fused, what the report says of it, and how limits bound it: the same on every backend that plans kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from strata import ops
from strata.backends import register_backend, registry
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.target import Gpu
from strata.backends.wgsl.backend import WgpuBackend
from strata.core import Dim, f32, sym
from strata.errors import CompileError
from strata.mir import REGISTRY, Graph, Value, evaluate, leaf_name
from strata.passes import FusionLimits
from strata.runtime import CompileOptions, CompilePipeline, CompileResult, FusionReport, Session, dispatch_report
from strata.testing.check import type_of
from tests.programs import graphs

CLEAN = CompileOptions(assert_fusion_clean=True)


class Shaders(WgpuBackend):
    """Plans for shaders, where there need not be a GPU."""

    def __init__(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def _planning_devices() -> Iterator[None]:
    few = Shaders()
    few.capabilities = replace(WgpuBackend.capabilities, most_buffers=7, runs_bodies=True)
    made = {"shaders": Shaders(), "triton_planned": PlannedBackend(Gpu.named("sm_90")), "few_buffers": few}
    for name, backend in made.items():
        register_backend(name, backend)
    yield
    with registry._lock:
        for name in made:
            registry._made.pop(name, None)


no_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
KERNELS = ("cpu", "reference", "shaders", "triton_planned")  # devices whose steps are kernels of ours
DEVICES = (*KERNELS, pytest.param("xla", marks=no_jax))


def compiled(graph: Graph, device: str = "cpu", fusion: bool | FusionLimits = True) -> CompileResult:
    return CompilePipeline(device, CompileOptions(fusion=fusion)).compile(graph)


def report(graph: Graph, device: str = "cpu") -> FusionReport:
    return compiled(graph, device).fusion


def dense(act: str | None = "gelu", *, also: str | None = None, bias_first: bool = False) -> Graph:
    g = Graph("dense")
    x = g.input("x", f32[3, 4])
    if bias_first:
        b, w = g.param("b", f32[8]), g.param("w", f32[4, 8])
    else:
        w, b = g.param("w", f32[4, 8]), g.param("b", f32[8])
    product = x @ w
    total = product + b
    out = total if act is None else getattr(ops, act)(total)
    return g.outputs(out, *{"product": [product], "sum": [total], None: []}[also])


def swiglu(*, gate_first: bool = False, other: bool = False, kept: bool = False) -> Graph:
    g = Graph("swiglu")
    x, y = g.input("x", f32[3, 4]), g.input("y", f32[3, 4])
    up, gate = x @ g.param("up", f32[4, 8]), (y if other else x) @ g.param("gate", f32[4, 8])
    both = (ops.silu(gate), up) if gate_first else (up, ops.silu(gate))
    return g.outputs(ops.multiply(*both), *([up] if kept else []))


def chain(steps: int) -> Graph:
    g = Graph("chain")
    y = g.input("x", f32[4])
    for _ in range(steps):
        y = ops.sin(y)
    return g.outputs(y)


def wide(count: int) -> Graph:
    g = Graph("wide")
    total = g.input("x", f32[4])
    for i in range(count):
        total = total + g.input(f"x{i}", f32[4])
    return g.outputs(total)


# ------------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", [None, "gelu", "silu", "exp", "softplus"])
def test_matmul_bias_act_is_one_kernel(act: str | None, device: str) -> None:
    found = CompilePipeline(device, CLEAN).compile(dense(act)).fusion
    assert (found.kernels, found.fused_matmul_bias_act, found.fused_products) == (1, 1, 1)
    assert (found.nodes_before, found.nodes_after) == (5 if act is None else 6, 4)
    assert not found.missed
    assert "fused_mm_act=1" in found.summary_line()


def test_a_bias_may_be_declared_first() -> None:
    assert report(dense(bias_first=True)).fused_matmul_bias_act == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_residual_is_part_of_its_norm(norm: str, device: str) -> None:
    g = Graph("residual")
    x, y = g.input("x", f32[3, 8]), g.input("y", f32[3, 8])
    affine = g.param("gamma", f32[8]), g.param("beta", f32[8])
    found = report(g.outputs(getattr(ops, norm)(x + y, *affine)), device)
    if device == "reference":
        return  # there a norm is a step of its own
    assert (found.kernels, found.nodes_before, found.nodes_after) == (1, 6, 5)
    counts = found.fused_residual_ln, found.fused_residual_rms_norm
    assert counts == ((1, 0) if norm == "layer_norm" else (0, 1))
    plain = report(g.returning(getattr(ops, norm)(x, *affine)), device)
    assert plain.fused_residual_ln == plain.fused_residual_rms_norm == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_gate_is_in_its_product(gate_first: bool, device: str) -> None:
    found = CompilePipeline(device, CLEAN).compile(swiglu(gate_first=gate_first)).fusion
    assert (found.kernels, found.fused_swiglu, found.matmul_before, found.matmul_after) == (1, 1, 2, 1)
    assert found.nodes_after <= 6 < found.nodes_before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_halves_of_one_value_are_gate_and_up(gate_first: bool, device: str) -> None:
    g = Graph("halves")
    both = g.input("both", f32[3, 16])
    up, gate = (ops.narrow(both, 1, 8 * (i ^ gate_first), 8) for i in range(2))
    found = CompilePipeline(device, CLEAN).compile(g.outputs(up * ops.silu(gate))).fusion
    assert (found.kernels, found.fused_swiglu) == (1, 1)
    assert found.nodes_before - found.nodes_after == 3


@pytest.mark.parametrize("device", KERNELS)
def test_a_half_with_another_reader_keeps_its_product_whole(device: str) -> None:
    g = Graph("halves")
    both = g.input("x", f32[3, 8]) @ g.param("w", f32[8, 16])
    up, gate = (ops.narrow(both, 1, 8 * i, 8) for i in range(2))
    free = report(g.outputs(up * ops.silu(gate)), device)
    held = report(g.returning(up * ops.silu(gate), up), device)
    assert (free.kernels, free.missed_swiglu()) == (1, 0)
    assert held.kernels > 1
    assert held.missed_swiglu() == 1


def test_a_feed_forward_layer_of_an_encoder() -> None:
    g = Graph("ffn")
    x = g.input("x", f32[3, 8])
    h = ops.gelu(x @ g.param("w1", f32[8, 32]) + g.param("b1", f32[32]))
    y = h @ g.param("w2", f32[32, 8]) + g.param("b2", f32[8]) + x
    found = CompilePipeline("cpu", CLEAN).compile(g.outputs(ops.layer_norm(y))).fusion
    assert (found.kernels, found.fused_matmul_bias_act, found.fused_products) == (3, 2, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_is_one_region(device: str) -> None:
    g = Graph("g")
    a, b, c = (g.input(n, f32[4]) for n in "abc")
    chosen = ops.where(a > b, a, b) + c
    programs = ((ops.relu((a + b) * c), ["add", "multiply", "relu"]), (chosen, ["greater", "where", "add"]))
    for value, names in programs:
        made = compiled(g.returning(value), device)
        assert (made.fusion.kernels, made.fusion.elementwise_region) == (1, 1)
        (step,) = made.lir.schedule
        assert [n.op.name for n in step.nodes] == names
        assert sorted(step.inputs) == ["a", "b", "c"]
        apart = compiled(g.returning(value), device, fusion=False)
        assert [[n.op.name for n in s.nodes] for s in apart.lir.schedule] == [[name] for name in names]


def test_one_op_is_no_region_and_a_reduction_is_none() -> None:
    g = Graph("g")
    x = g.input("x", f32[4, 8])
    assert report(g.outputs(ops.exp(x))).elementwise_region == 0
    assert report(g.returning(ops.sum(ops.exp(x) * x, axis=-1))).elementwise_region == 0


def test_a_value_with_two_readers_is_computed_once() -> None:
    g = Graph("g")
    a, b, c = (g.input(n, f32[4]) for n in "abc")
    shared = a + b
    result = compiled(g.outputs(shared * c, ops.exp(shared)))
    assert [sorted(n.op.name for n in s.nodes) for s in result.lir.schedule] == [["add", "exp", "multiply"]]


def test_inner_ones_broadcast_as_numpy_does(rng: np.random.Generator) -> None:
    g = Graph("g")
    a, b, c = g.input("a", f32[8, 1]), g.input("b", f32[8, 4]), g.input("c", f32[1, 4])
    made = Session("cpu").compile(g.outputs(ops.tanh(a + b) * c))
    feeds = {n: rng.standard_normal(s).astype("f4") for n, s in (("a", (8, 1)), ("b", (8, 4)), ("c", (1, 4)))}
    np.testing.assert_allclose(made.run(feeds)[0], np.tanh(feeds["a"] + feeds["b"]) * feeds["c"], rtol=1e-6)
    assert len(made.lir.schedule) == 1


def test_named_ops_that_a_backend_runs_whole_are_counted() -> None:
    g = Graph("g")
    x, w, b = g.input("x", f32[3, 4]), g.param("w", f32[4, 8]), g.param("b", f32[8])
    g.outputs(ops.fused_matmul_bias_act(x, w, b, act="gelu"))
    for device in ("cpu", "reference"):  # one takes it apart, the other runs it as it is
        assert report(g, device).fused_matmul_bias_act == 1


@pytest.mark.parametrize("device", ["cpu", "shaders", "triton_planned"])
@pytest.mark.parametrize("name", ["fused_swiglu", "elementwise_region"])
def test_named_ops_are_taken_apart_and_are_one_kernel(name: str, device: str) -> None:
    sample = REGISTRY[name].samples()[0]
    g = Graph("g")
    values = [g.input(f"x{i}", type_of(a)) for i, a in enumerate(sample.arrays())]
    made = compiled(g.outputs(REGISTRY[name](**sample.fields)(*values)), device)
    assert made.dispatch.path(name) == "decomposed"
    assert name not in {n.op.name for n in made.lir.graph.nodes()}
    assert made.fusion.kernels == 1
    kept = compiled(g, "reference")
    assert kept.dispatch.path(name) == "native"


@pytest.mark.parametrize("device", ["cpu", "shaders", "triton_planned", "metal", "rocm"])
def test_attention_blocks_are_taken_apart(device: str) -> None:
    sample = REGISTRY["fused_attention_block"].samples()[0]
    g = Graph("g")
    values = [g.input(f"x{i}", type_of(a)) for i, a in enumerate(sample.arrays())]
    g.outputs(REGISTRY["fused_attention_block"](**sample.fields)(*values))
    found = dispatch_report(g, device)
    assert found.path("fused_attention_block") == "decomposed"
    assert found.compile_ready


def test_the_report_of_the_passes_alone_is_that_of_the_whole() -> None:
    pipe = CompilePipeline("cpu")
    _, early = pipe.optimize(swiglu())
    late = pipe.compile(swiglu()).fusion
    assert early.summary_line() == late.summary_line()


# ------------------------------------------------------------------------------------------------------- what is missed


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("also", ["product", "sum"])
def test_a_split_product_is_a_miss(also: str, device: str) -> None:
    found = report(dense(also=also), device)
    assert (found.missed_matmul_bias_act(), found.fused_matmul_bias_act) == (1, int(also == "sum"))
    reader = "add" if also == "product" else "gelu"
    assert f"{reader} is another kernel: it is a result of the graph" in str(found)
    with pytest.raises(CompileError, match="1 fusions were missed") as error:
        CompilePipeline(device, CLEAN).compile(dense(also=also))
    assert "product = x @ w" in str(error.value)


@pytest.mark.parametrize("device", KERNELS)
def test_a_product_that_several_kernels_need_is_a_miss(device: str) -> None:
    g = Graph("g")
    x, w = g.input("x", f32[4, 8]), g.param("w", f32[8, 8])
    product = x @ w
    found = report(g.outputs(ops.tanh(product), ops.sum(product, axis=0)), device)
    assert found.missed_matmul_bias_act() == 1
    with pytest.raises(CompileError, match="fusions were missed"):
        CompilePipeline(device, CLEAN).compile(g)


@pytest.mark.parametrize("device", KERNELS)
def test_what_cannot_be_an_epilogue_is_no_miss(device: str) -> None:
    g = Graph("g")
    x, w, v = g.input("x", f32[4, 8]), g.param("w", f32[8, 8]), g.param("v", f32[8, 8])
    h = ops.layer_norm(ops.tanh(x @ w) + x)
    CompilePipeline(device, CLEAN).compile(g.outputs(ops.softmax(h @ v), ops.sum(h @ w, axis=0)))


def test_gates_that_stay_apart_are_misses() -> None:
    assert "its two matmuls have different left sides" in str(report(swiglu(other=True)))
    kept = report(swiglu(kept=True))
    assert (kept.fused_products, kept.missed_swiglu()) == (0, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_models_are_clean(device: str) -> None:
    for graph in (graphs.one_encoder_layer(), graphs.llama(), graphs.resnet_block()):
        CompilePipeline(device, CLEAN).compile(graph)


# --------------------------------------------------------------------------------------------------------------- limits


def check_limits(result: CompileResult, limits: FusionLimits) -> None:
    for step in result.lir.schedule:
        if len(step.nodes) > 1:
            assert len(step.nodes) <= limits.max_steps, step.label
            assert len(set(step.read_buffers)) <= limits.max_inputs, step.label


PROGRAMS = {
    "encoder": graphs.one_encoder_layer(1, 8, 32, 4),
    "decoder": graphs.llama(1, 16, 32, 4, 2, 48),
    "convolutions": graphs.resnet_block(4, 6),
    "swiglu": swiglu(),
    "wide": wide(20),
    "chain": chain(40),
}
LIMITS = (FusionLimits(), FusionLimits(max_steps=5, max_inputs=3), FusionLimits(max_steps=2), FusionLimits(max_steps=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_is_beyond_the_limits(name: str, device: str) -> None:
    for limits in LIMITS:
        check_limits(compiled(PROGRAMS[name], device, limits), limits)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=no_jax)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_limits_do_not_change_what_is_computed(name: str, device: str, rng: np.random.Generator) -> None:
    graph = PROGRAMS[name]
    feeds = {leaf_name(x): drawn(x, rng) for x in (*graph.inputs, *graph.params)}
    wanted = evaluate(graph, feeds, wide=True)
    for limits in LIMITS[1:2]:
        made = Session(device).compile(graph, CompileOptions(fusion=limits))
        made.set_params({n: feeds[n] for n in graph.param_names})
        for got, want in zip(made.run({n: feeds[n] for n in graph.input_names}), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def drawn(x: Value, rng: np.random.Generator) -> np.ndarray:
    if not x.dtype.is_float:
        return np.full(x.type.static_shape, 3, x.dtype.np)
    return (rng.standard_normal(x.type.static_shape) * 0.5).astype(x.dtype.np)


@pytest.mark.parametrize("device", DEVICES)
def test_long_chains_and_wide_sums_are_cut(device: str) -> None:
    long = compiled(chain(40), device, FusionLimits())
    assert sorted(len(s.nodes) for s in long.lir.schedule) == [8, 32]
    assert long.fusion.elementwise_region == 2
    sums = compiled(wide(30), device, FusionLimits(max_inputs=16))
    assert [len(s.inputs) for s in sums.lir.schedule] == [16, 16]
    cuts = " ".join(c.reason for c in (*long.lir.cuts, *sums.lir.cuts))
    assert "the kernel has 32 ops already, the most that the fusion limits allow" in cuts
    assert "its kernel would read 31 buffers, 16 are the limit" in cuts
    assert len(compiled(chain(40), device).lir.schedule) == len(compiled(wide(30), device).lir.schedule) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_limits_that_split_a_product_are_misses(device: str) -> None:
    limits = FusionLimits(max_steps=2)
    result = compiled(dense(), device, limits)
    assert [[n.op.name for n in s.nodes] for s in result.lir.schedule] == [["matmul"], ["add", "gelu"]]
    assert result.fusion.missed_matmul_bias_act() == 1
    with pytest.raises(CompileError, match="1 fusions were missed"):
        CompilePipeline(device, CompileOptions(fusion=limits, assert_fusion_clean=True)).compile(dense())


@pytest.mark.parametrize("device", DEVICES)
def test_fusion_off_gives_each_op_a_kernel(device: str) -> None:
    result = compiled(dense(), device, fusion=False)
    assert [[n.op.name for n in s.nodes] for s in result.lir.schedule] == [["matmul"], ["add"], ["gelu"]]
    assert "fusion is switched off" in str(result.fusion)


@no_jax
def test_limited_modules_take_any_size(rng: np.random.Generator) -> None:
    n: Dim = sym("n")
    g = Graph("open")
    x, y = g.input("x", (n, 4)), g.input("y", (n, 4))
    g.outputs(ops.sort(ops.sin(ops.exp(x) + y) * x, axis=-1) * 2.0, x + y)
    made = Session("xla").compile(g, CompileOptions(fusion=FusionLimits(max_steps=2)))
    for rows in (1, 3):
        feeds = {name: rng.standard_normal((rows, 4)).astype(np.float32) for name in "xy"}
        for got, want in zip(made.run(feeds), evaluate(g.bind({"n": rows}), feeds, wide=True), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fusion", "most"),
    [(True, 7), (FusionLimits(max_inputs=12), 7), (FusionLimits(max_buffers=5), 5), (FusionLimits(max_buffers=9), 7)],
)
def test_kernels_take_no_more_buffers_than_the_device(fusion: bool | FusionLimits, most: int) -> None:
    """What they read and what they write, in bodies of loops, too."""
    body = Graph("body")
    c, x = body.input("c", f32[4]), [body.input(f"x{i}", f32[4]) for i in range(12)]
    body.outputs(sum(x, c), *(c * i + x[i] for i in range(9)))
    g = Graph("many")
    first, *rows = [g.input("c", f32[4]), *(g.input(f"x{i}", f32[3, 4]) for i in range(12))]
    g.outputs(*ops.ScanOp(body, 3, 1, 0)(first, *rows), *(rows[0] * i + rows[i] for i in range(9)))
    plan = CompilePipeline("few_buffers", CompileOptions(fusion=fusion)).compile(g).lir
    kernels = [k for lir in (plan, *(b for s in plan.schedule for b in s.bodies)) for k in lir.kernels.values()]
    assert any(step.bodies for step in plan.schedule)
    assert max(len(k.buffers) for k in kernels) <= most
    assert len(kernels) > 4
