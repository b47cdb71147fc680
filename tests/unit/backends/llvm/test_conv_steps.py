"""Convolutions as steps of a program: geometries against torch, epilogues, symbolic sizes, threads, kernel counts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.codegen.compile_batch import convolution_plan, planes_plan
from strata.backends.llvm.conv.match import ConvPlan, find_convolution
from strata.backends.llvm.conv.match_nchw import PlanesPlan
from strata.core import as_dtype, substitute, sym
from strata.mir import Graph, Value
from strata.ops import to_first
from strata.runtime import CompilePipeline, Session
from strata.runtime.storage.stored import read_plan, write_plan

torch = pytest.importorskip("torch")
ops: Any = functions


def compiled(graph: Graph, params: dict[str, np.ndarray]) -> Any:
    made = Session("cpu").compile(graph)
    made.set_params(params)
    return made


def templates(made: Any) -> list[ConvPlan | PlanesPlan]:
    """The convolutions of a program that run through a template."""
    target = made.lir.target
    steps = [s for s in made.lir.schedule if s.kernel is not None]
    plans = [find(s.kernel, target, s) for s in steps for find in (convolution_plan, planes_plan)]
    return [p for p in plans if p is not None]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


CASES = [
    # images, channels, sizes, outputs, kernel, options
    (1, 8, (9, 9), 16, (3, 3), {"padding": 1}),
    (2, 16, (7, 7), 24, (3, 3), {}),
    (2, 3, (15, 16), 8, (7, 7), {"stride": 2, "padding": 3}),
    (1, 32, (12, 12), 32, (3, 3), {"stride": 2, "padding": 1}),
    (1, 32, (8, 8), 40, (1, 1), {"stride": 2}),
    (1, 6, (9, 10), 10, (3, 2), {"dilation": (2, 3), "padding": (2, 1)}),
    (2, 12, (8, 9), 20, (3, 3), {"groups": 4, "padding": 1}),
    (2, 33, (7, 8), 33, (3, 3), {"groups": 33, "padding": 1}),
    (1, 16, (9, 9), 16, (5, 5), {"groups": 16, "stride": 2, "padding": 2}),
    (1, 8, (6, 6), 32, (3, 3), {"groups": 8, "padding": 1}),
    (2, 5, (20,), 7, (4,), {"stride": 3, "padding": 2}),
    (1, 8, (30,), 8, (5,), {"groups": 8, "padding": 2}),
    (1, 3, (5, 6, 7), 8, (2, 3, 2), {"stride": (1, 2, 1), "padding": 1}),
    (1, 6, (5, 5, 5), 6, (3, 3, 3), {"groups": 6, "padding": 1}),
    (1, 20, (1, 1), 8, (1, 1), {"padding": 1}),
    (3, 4, (3, 3), 130, (3, 3), {"padding": 2}),
    (2, 24, (9, 8), 1, (3, 3), {"padding": 1}),
    (2, 20, (9, 8), 20, (3, 3), {"groups": 5, "padding": 1}),
    (1, 12, (9, 10), 24, (3, 3), {"groups": 6, "padding": 1, "stride": 2}),
    (2, 48, (7, 7), 48, (3, 3), {"groups": 3, "padding": 1}),
    (1, 24, (11,), 24, (5,), {"groups": 3, "dilation": 2}),
    (1, 6, (3, 4, 5), 6, (2, 2, 3), {"groups": 3, "padding": 1}),
    (2, 1, (331,), 24, (10,), {"stride": 5}),
    (1, 3, (40,), 7, (5,), {"padding": 2, "dilation": 2}),
    (2, 3, (16, 36), 20, (4, 4), {"stride": 4}),
    (1, 64, (9, 8), 3, (3, 3), {"padding": 1}),
]


@pytest.mark.few(13)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])
def test_against_torch(case: tuple, last: bool, rng: np.random.Generator) -> None:
    """Images given with channels first, and last."""
    images, channels, sizes, outputs, kernel, options = case
    rank = len(sizes)
    g = Graph("conv")
    shape = (outputs, channels // options.get("groups", 1), *kernel)
    given = (images, *sizes, channels) if last else (images, channels, *sizes)
    x, w, b = g.input("x", given), g.param("w", shape), g.param("b", (outputs,))
    y = getattr(ops, f"conv{rank}d")(x.transpose(to_first(rank)) if last else x, w, b, **options).relu()
    g.outputs(y)
    feeds = {"x": normal(rng, images, channels, *sizes), "w": normal(rng, *shape), "b": normal(rng, outputs)}
    made = compiled(g, {"w": feeds["w"], "b": feeds["b"]})
    (plan,) = templates(made)
    assert isinstance(plan, ConvPlan) or not last
    arrays = [torch.from_numpy(feeds[n]).double() for n in ("x", "w", "b")]
    expected = getattr(torch.nn.functional, f"conv{rank}d")(*arrays, **options).relu().numpy()
    feed = np.ascontiguousarray(np.moveaxis(feeds["x"], 1, -1)) if last else feeds["x"]
    np.testing.assert_allclose(made.run(x=feed)[0], expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(("dtype", "close"), [("f32", 2e-5), ("f64", 1e-12), ("f16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize(("groups", "channels", "outputs"), [(3, 24, 60), (2, 32, 16), (4, 20, 20)])
def test_pointwise_groups_are_products(
    groups: int, channels: int, outputs: int, dtype: str, close: float, rng: np.random.Generator
) -> None:
    """One by itself needs no transposes: a matrix product for each group, for any number of images and pixels."""
    g = Graph("conv")
    x = g.input("x", (sym("n", 1, 8), channels, sym("h", 1, 64), 9), dtype)
    w, b = g.param("w", (outputs, channels // groups, 1, 1), dtype), g.param("b", (outputs,), dtype)
    g.outputs(ops.conv2d(x, w, b, groups=groups).relu())
    kind = as_dtype(dtype).np
    params = {"w": normal(rng, outputs, channels // groups, 1, 1).astype(kind), "b": normal(rng, outputs).astype(kind)}
    made = compiled(g, params)
    names = [n.op.name for s in made.lir.schedule for n in s.nodes]
    assert "matmul" in names
    assert "transpose" not in names
    for shape in ((1, channels, 12, 9), (3, channels, 1, 9)):
        feed = normal(rng, *shape).astype(kind)
        wide = [torch.from_numpy(a.astype(np.float64)) for a in (feed, params["w"], params["b"])]
        expected = torch.nn.functional.conv2d(*wide, groups=groups).relu().numpy()
        outs = []
        for threads in (1, 2, 7):
            out = np.empty(expected.shape, kind)
            made._executable.run([feed], [out], {"n": shape[0], "h": shape[2]}, threads)
            outs.append(out)
        np.testing.assert_allclose(outs[0].astype(np.float64), expected, rtol=close, atol=close)
        assert all(np.array_equal(outs[0], other) for other in outs[1:])


TRANSPOSED = [
    ((5, 6), 6, 8, (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ((4, 4), 8, 12, (2, 2), {"stride": 2}),
    ((7,), 4, 8, (4,), {"stride": 3, "padding": 1}),
    ((4, 5), 8, 16, (3, 3), {"groups": 2, "dilation": 2}),
    ((3, 4, 3), 4, 6, (2, 2, 2), {"stride": 2}),
    ((5, 6), 24, 1, (2, 2), {"stride": 2}),
]


@pytest.mark.parametrize("case", TRANSPOSED, ids=[f"case{i}" for i in range(len(TRANSPOSED))])
def test_transposed_against_torch(case: tuple, rng: np.random.Generator) -> None:
    sizes, channels, outputs, kernel, options = case
    rank, groups = len(sizes), options.get("groups", 1)
    g = Graph("conv")
    shape = (channels, outputs // groups, *kernel)
    x, w, b = g.input("x", (2, channels, *sizes)), g.param("w", shape), g.param("b", (outputs,))
    g.outputs(getattr(ops, f"conv_transpose{rank}d")(x, w, b, **options))
    feeds = {"x": normal(rng, 2, channels, *sizes), "w": normal(rng, *shape), "b": normal(rng, outputs)}
    made = compiled(g, {"w": feeds["w"], "b": feeds["b"]})
    apart = options == {"stride": 2} and set(kernel) == {2}  # then it is a product of matrices
    rows = options.get("stride", 1) ** (rank - 1)  # phases of all axes but the last, which share a convolution
    assert len(templates(made)) == (0 if apart else rows)
    assert any(k.product is not None for k in made._executable.kernels.values())
    arrays = [torch.from_numpy(feeds[n]).double() for n in ("x", "w", "b")]
    expected = getattr(torch.nn.functional, f"conv_transpose{rank}d")(*arrays, **options).numpy()
    np.testing.assert_allclose(made.run(x=feeds["x"])[0], expected, rtol=2e-5, atol=2e-4)


def test_weights_may_be_computed_or_given(rng: np.random.Generator) -> None:
    """Weights that are an input are packed for every run."""
    g = Graph("conv")
    x, w = g.input("x", (1, 8, 6, 6)), g.input("w", (16, 8, 3, 3))
    g.outputs(ops.conv2d(x, w * 2.0, padding=1), ops.conv2d(x, w, padding=1))
    feeds = {"x": normal(rng, 1, 8, 6, 6), "w": normal(rng, 16, 8, 3, 3)}
    made = compiled(g, {})
    assert len(templates(made)) == 2
    twice, once = made.run(**feeds)
    expected = torch.nn.functional.conv2d(*(torch.from_numpy(feeds[n]).double() for n in "xw"), padding=1).numpy()
    np.testing.assert_allclose(once, expected, rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(twice, 2 * expected, rtol=2e-5, atol=2e-4)


def test_half_and_double(rng: np.random.Generator) -> None:
    for dtype, close in (("f16", 2e-2), ("f64", 1e-12)):
        g = Graph("conv")
        x, w = g.input("x", (1, 8, 6, 6), dtype), g.param("w", (16, 8, 3, 3), dtype)
        g.outputs(ops.conv2d(x, w, padding=1).relu())
        feeds = {n: rng.standard_normal(s) for n, s in (("x", (1, 8, 6, 6)), ("w", (16, 8, 3, 3)))}
        kind = {"f16": np.float16, "f64": np.float64}[dtype]
        feeds = {n: a.astype(kind) for n, a in feeds.items()}
        made = compiled(g, {"w": feeds["w"]})
        assert len(templates(made)) == 1
        expected = torch.nn.functional.conv2d(*(torch.from_numpy(feeds[n]).double() for n in "xw"), padding=1).relu()
        np.testing.assert_allclose(made.run(x=feeds["x"])[0], expected.numpy(), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    "case", [CASES[0], CASES[2], CASES[6], CASES[18], (2, 24, (9, 8), 24, (3, 3), {"groups": 24, "padding": 1})]
)
def test_narrow_floats_through_templates(case: tuple, dtype: str, rng: np.random.Generator) -> None:
    """Sums are rounded once, whatever the kind of convolution; a second one reads what the first has rounded."""
    images, channels, sizes, outputs, kernel, options = case
    g = Graph("conv")
    n = sym("n", 1, 8)
    shapes = {"w": (outputs, channels // options.get("groups", 1), *kernel), "v": (8, outputs, 1, 3)}
    x, w, v = g.input("x", (n, channels, *sizes), dtype), *(g.param(k, s, dtype) for k, s in shapes.items())
    g.outputs(ops.conv2d(ops.conv2d(x, w, **options).relu(), v))
    kind = as_dtype(dtype).np
    params = {k: (normal(rng, *s) / 4).astype(kind) for k, s in shapes.items()}
    given = normal(rng, images, channels, *sizes).astype(kind)
    made = compiled(g, params)
    assert len(templates(made)) == 2
    (got,) = made.run(x=given)
    a, b, c = (torch.from_numpy(m.astype(np.float64)) for m in (given, params["w"], params["v"]))
    first = torch.nn.functional.conv2d(a, b, **options).relu().numpy().astype(kind)
    expected = torch.nn.functional.conv2d(torch.from_numpy(first.astype(np.float64)), c).numpy()
    assert got.dtype == kind
    unit = float(ml_dtypes.finfo(kind).eps)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2 * unit, atol=8 * unit)


# epilogues


def epilogues(kind: str) -> tuple[Graph, Any]:
    """A graph around one convolution of x [2, 16, 6, 6], and what torch makes of it."""
    g = Graph(kind)
    x, w, v = g.input("x", (2, 16, 6, 6)), g.param("w", (16, 16, 3, 3)), g.param("v", (16,))
    spread = v.reshape((16, 1, 1))
    y = ops.conv2d(x, w, padding=1)
    match kind:
        case "residual":
            return g.outputs((y + x).relu()), lambda y, x, v: (y + x).relu()
        case "residual_behind":
            return g.outputs(y.relu() * spread + x), lambda y, x, v: y.relu() * v + x
        case "norm":
            made = ops.batch_norm(y, v, v, v, v * v + 1.0)
            return g.outputs(made.relu()), lambda y, x, v: (v * (y - v) / (v * v + 1 + 1e-5).sqrt() + v).relu()
        case "image_scale":
            scale = ops.mean(x, axis=(2, 3)).reshape((2, 16, 1, 1))
            return g.outputs(y * scale), lambda y, x, v: y * x.mean((2, 3), keepdim=True)
        case "pixel_scale":
            return g.outputs(y * ops.mean(x, axis=1, keepdims=True)), lambda y, x, v: y * x.mean(1, keepdim=True)
        case "silu":
            return g.outputs(y * y.sigmoid()), lambda y, x, v: y * y.sigmoid()
    return g.outputs(ops.clip(y * 0.5, 0.0, 6.0)), lambda y, x, v: (y * 0.5).clamp(0, 6)


@pytest.mark.parametrize("kind", ["residual", "residual_behind", "norm", "image_scale", "pixel_scale", "silu", "clip"])
def test_epilogue(kind: str, rng: np.random.Generator) -> None:
    g, reference = epilogues(kind)
    feeds = {"x": normal(rng, 2, 16, 6, 6), "w": normal(rng, 16, 16, 3, 3) * 0.1, "v": normal(rng, 16)}
    made = compiled(g, {n: feeds[n] for n in g.param_names})
    assert len(templates(made)) == 1
    x, w, v = (torch.from_numpy(feeds[n]).double() for n in ("x", "w", "v"))
    expected = reference(torch.nn.functional.conv2d(x, w, padding=1), x, v.reshape(16, 1, 1)).numpy()
    np.testing.assert_allclose(made.run(x=feeds["x"])[0], expected, rtol=2e-5, atol=1e-4)


# sizes known at run time, threads


def small_net(x: Value, g: Graph) -> Value:
    """Spatial, depth-wise, point-wise and strided convolutions with pools around them."""
    y = ops.conv2d(x, g.param("a", (16, 3, 3, 3)), g.param("b", (16,)), stride=2, padding=1).relu()
    y = ops.max_pool2d(y, 3, stride=2, padding=1)
    z = ops.conv2d(y, g.param("d", (16, 1, 3, 3)), padding=1, groups=16).relu()
    z = ops.conv2d(z, g.param("q", (16, 4, 3, 3)), padding=1, groups=4).relu()
    y = (ops.conv2d(z, g.param("p", (16, 16, 1, 1))) + y).relu()
    z = ops.avg_pool2d(y, 2, stride=2)
    return ops.mean(ops.concat([z, ops.max_pool2d(y, 2, stride=2)], axis=1), axis=(2, 3))


def torch_net(x: Any, p: dict[str, Any]) -> Any:
    f = torch.nn.functional
    y = f.max_pool2d(f.conv2d(x, p["a"], p["b"], stride=2, padding=1).relu(), 3, stride=2, padding=1)
    z = f.conv2d(f.conv2d(y, p["d"], padding=1, groups=16).relu(), p["q"], padding=1, groups=4).relu()
    y = (f.conv2d(z, p["p"]) + y).relu()
    return torch.cat([f.avg_pool2d(y, 2, stride=2), f.max_pool2d(y, 2, stride=2)], 1).mean((2, 3))


def net_params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"a": (16, 3, 3, 3), "b": (16,), "d": (16, 1, 3, 3), "q": (16, 4, 3, 3), "p": (16, 16, 1, 1)}
    return {n: normal(rng, *s) * 0.3 for n, s in shapes.items()}


def test_symbolic_images_and_sizes(rng: np.random.Generator) -> None:
    g = Graph("net")
    x = g.input("x", (sym("N", 1, 64), 3, sym("H", 16, 512), sym("W", 16, 512)))
    g.outputs(small_net(x, g))
    params = net_params(rng)
    made = compiled(g, params)
    assert len(templates(made)) >= 2
    weights = {n: torch.from_numpy(a).double() for n, a in params.items()}
    for shape in ((1, 3, 32, 32), (3, 3, 17, 40), (2, 3, 61, 16)):
        feed = normal(rng, *shape)
        expected = torch_net(torch.from_numpy(feed).double(), weights).numpy()
        np.testing.assert_allclose(made.run(x=feed)[0], expected, rtol=2e-5, atol=2e-5)


def test_results_do_not_depend_on_threads_or_batch(rng: np.random.Generator) -> None:
    g = Graph("net")
    g.outputs(small_net(g.input("x", (sym("N", 1, 8), 3, 33, 35)), g))
    made = compiled(g, net_params(rng))
    feed = normal(rng, 5, 3, 33, 35)
    outs = []
    for threads in (1, 2, 7):
        out = np.empty((5, 32), np.float32)
        made._executable.run([feed], [out], {"N": 5}, threads)
        outs.append(out)
    assert all(np.array_equal(outs[0], other) for other in outs[1:])
    np.testing.assert_array_equal(made.run(x=feed[3:4])[0][0], outs[0][3])


def test_stored_plans_keep_their_convolutions(rng: np.random.Generator) -> None:
    """A plan that is read back has no graph, and runs through the same templates."""
    g = Graph("net")
    g.outputs(small_net(g.input("x", (sym("N", 1, 8), 3, 33, sym("W", 16, 64))), g))
    lir = CompilePipeline("cpu").compile(g).lir
    data = write_plan(lir, g)
    assert data is not None
    again = read_plan(data, g, lambda: g)
    assert [s.views for s in again.schedule] == [s.views for s in lir.schedule]
    before, after = ([find_convolution(s.kernel, s) is not None for s in p.schedule if s.kernel] for p in (lir, again))
    assert before == after
    assert sum(after) == 4


# kernel counts


def bottleneck(stride: int = 1, channels: int = 64, inner: int = 16, outputs: int = 64) -> Graph:
    g = Graph("bottleneck")
    x = g.input("x", (1, channels, 14, 14))

    def conv(value: Value, name: str, out: int, kernel: int, step: int = 1) -> Value:
        w = g.param(name, (out, int(value.shape[1]), kernel, kernel))
        y = ops.conv2d(value, w, stride=step, padding=kernel // 2)
        return ops.batch_norm(y, *(g.param(f"{name}_{p}", (out,)) for p in ("gamma", "beta", "mean", "var")))

    y = conv(conv(x, "one", inner, 1).relu(), "two", inner, 3, stride).relu()
    shortcut = x if stride == 1 and channels == outputs else conv(x, "short", outputs, 1, stride)
    return g.outputs((conv(y, "three", outputs, 1) + shortcut).relu())


@pytest.mark.parametrize(("stride", "count"), [(1, 3), (2, 4)])
def test_a_bottleneck_is_one_kernel_per_convolution(stride: int, count: int) -> None:
    lir = CompilePipeline("cpu").compile(bottleneck(stride)).lir
    steps = [[n.op.name for n in s.nodes] for s in lir.schedule if s.phase != "prologue"]
    assert [names.count("conv_last") for names in steps if "conv_last" in names] == [1] * count
    assert [names for names in steps if "conv_last" not in names] == [["transpose"], ["transpose"]]


@pytest.mark.parametrize("taps", [2, 7, 64, 256])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_filters_of_one_signal(taps: int, stride: int, is_symbolic: bool, rng: np.random.Generator) -> None:
    """Their windows are read where they lie: copied one by one, they would be `taps` times the signal."""
    length = 1037
    g = Graph("filter")
    x = g.input("x", (1, 1, sym("length", lo=taps) if is_symbolic else length))
    w = g.param("w", (1, 1, taps))
    g.outputs(ops.conv(x, w, stride=stride) + 0.5)
    weights, signal = normal(rng, 1, 1, taps), normal(rng, 1, 1, length)
    made = compiled(g, {"w": weights})
    (y,) = made.run(x=signal)
    windows = np.lib.stride_tricks.sliding_window_view(signal[0, 0].astype(np.float64), taps)[::stride]
    np.testing.assert_allclose(y[0, 0], windows @ weights[0, 0] + 0.5, rtol=1e-4, atol=1e-4)
    executable = made._executable
    sizes = {"length": length} if is_symbolic else {}
    workspace = [int(substitute(executable.workspace_of(s), sizes)) for s in made.lir.schedule if s.kernel is not None]
    assert sum(workspace) <= 8 * signal.nbytes
    for threads in (1, 2, 7):
        again = Session("cpu", threads=threads).compile(g)
        again.set_param("w", weights)
        np.testing.assert_array_equal(again.run(x=signal)[0], y)


def test_long_lines_of_taps_are_not_unrolled(rng: np.random.Generator) -> None:
    """Code is written out for every tap of a line: a filter of hundreds of them is another template's."""
    for taps, stride, is_template in (((16, 16), (16, 16), True), ((1, 100), (1, 9), True), ((1, 256), (1, 9), False)):
        g = Graph("conv")
        x, w = g.input("x", (1, 1, 16, 400)), g.param("w", (8, 1, *taps))
        g.outputs(ops.conv2d(x, w, stride=stride))
        values = {"w": normal(rng, 8, 1, *taps)}
        made = compiled(g, values)
        assert bool(templates(made)) == is_template
        given = normal(rng, 1, 1, 16, 400)
        expected = torch.nn.functional.conv2d(
            torch.from_numpy(given.astype(np.float64)), torch.from_numpy(values["w"].astype(np.float64)), stride=stride
        )
        np.testing.assert_allclose(made.run(x=given)[0], expected.numpy(), rtol=1e-4, atol=1e-4)
