"""The shipped suite on the `wgpu` device, and programs on it against the processor. Skipped where there is no GPU.

pytest tests/backends/test_wgpu.py               each op once: a minute on a software GPU
pytest tests/backends/test_wgpu.py -m slow       every sample in every type
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends import backend_for
from strata.config import using
from strata.core import f32, f64, i64, sym, u8
from strata.errors import DeviceError, IndexRangeError, OutOfMemoryError
from strata.mir import REGISTRY, Graph, Op, evaluate
from strata.testing.backend_suite import cases, run_case
from tests.differential.draw import draw_program
from tests.differential.paths import check
from tests.groups import check_all

try:
    st.Device("wgpu")
except DeviceError as error:
    pytest.skip(str(error), allow_module_level=True)

every_op = pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)


@every_op
def test_first_sample(cls: type[Op]) -> None:
    for case in islice(cases([cls]), 1):
        run_case("wgpu", case)


@pytest.mark.slow
@every_op
def test_samples(cls: type[Op]) -> None:
    check_all((case.name, partial(run_case, "wgpu", case)) for case in cases([cls]))


def agrees(graph: Graph, feeds: dict[str, np.ndarray], tolerance: float = 2e-5) -> st.CompiledGraph:
    """Compile for the device, compare two runs with each other and with the interpreter."""
    compiled = st.Session("wgpu").compile(graph)
    for name in graph.param_names:
        compiled.set_param(name, feeds[name])
    given = {name: feeds[name] for name in graph.input_names}
    first, again = compiled.run(given), compiled.run(given)
    for a, b, want in zip(first, again, evaluate(graph, feeds), strict=True):
        np.testing.assert_array_equal(a, b)
        scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0))) if want.dtype.kind == "f" else 1
        np.testing.assert_allclose(a, want, rtol=tolerance, atol=tolerance * scale)
    return compiled


def test_a_layer(rng: np.random.Generator) -> None:
    g = Graph("layer")
    x, w, b = g.input("x", f32[33, 65]), g.param("w", f32[65, 70]), g.param("b", f32[70])
    g.outputs(ops.gelu(x @ w + b))
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (33, 65)), ("w", (65, 70)), ("b", 70))}
    assert agrees(g, feeds).host_steps == []


@pytest.mark.parametrize("shape", [(3, 1), (5, 64), (7, 300), (2, 5000), (1, 70000), (4000, 70)])
def test_rows(shape: tuple[int, int], rng: np.random.Generator) -> None:
    g = Graph("rows")
    x = g.input("x", f32[shape])
    g.outputs(x.softmax(-1), ops.layer_norm(x, g.input("w", f32[shape[1:]]), g.input("b", f32[shape[1:]])),
              x.sum(), x.max(axis=1), x.mean(axis=0), ops.argmax(x, axis=1), ops.argmin(x, axis=0))  # fmt: skip
    feeds = {"x": rng.standard_normal(shape).astype(np.float32)}
    feeds |= {n: rng.standard_normal(shape[1:]).astype(np.float32) for n in ("w", "b")}
    assert agrees(g, feeds).host_steps == []


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (33, 65, 70), (130, 40, 64), (64, 1, 64), (70, 300, 17)])
def test_products_in_tiles(m: int, k: int, n: int, rng: np.random.Generator) -> None:
    g = Graph("product")
    x, w, b = g.input("x", f32[3, m, k]), g.input("w", f32[3, n, k]), g.input("b", f32[n])
    g.outputs(ops.relu(x @ ops.transpose(w, (0, 2, 1)) + b), x[0] @ ops.transpose(w[1], (1, 0)))
    feeds = {"x": rng.standard_normal((3, m, k)).astype(np.float32), "b": rng.standard_normal(n).astype(np.float32)}
    agrees(g, feeds | {"w": rng.standard_normal((3, n, k)).astype(np.float32)})


@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_convolutions(stride: int, dilation: int, groups: int, rng: np.random.Generator) -> None:
    g = Graph("conv")
    x, w = g.input("x", f32[2, 8, 19, 23]), g.input("w", f32[18, 8 // groups, 3, 5])
    padding = ((1, 1), (2, 0))
    g.outputs(ops.conv(x, w, stride=(stride, 1), padding=padding, dilation=(1, dilation), groups=groups))
    agrees(g, {"x": rng.standard_normal((2, 8, 19, 23)).astype(np.float32),
               "w": rng.standard_normal((18, 8 // groups, 3, 5)).astype(np.float32)})  # fmt: skip


def test_open_products(rng: np.random.Generator) -> None:
    n = sym("n", 0)
    g = Graph("open")
    g.outputs(g.input("x", f32[n, 64]) @ g.input("w", f32[64, 80]), ops.transpose(g.input("y", f32[n, 20]), (1, 0))
              @ g.input("z", f32[n, 30]))  # fmt: skip
    compiled = st.Session("wgpu").compile(g)
    for rows in (5, 0, 1, 64, 130):
        feeds = {name: rng.standard_normal((rows, size)).astype(np.float32)
                 for name, size in (("x", 64), ("y", 20), ("z", 30))}  # fmt: skip
        feeds["w"] = rng.standard_normal((64, 80)).astype(np.float32)
        for got, want in zip(compiled.run(feeds), evaluate(g, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs(seed: int) -> None:
    check(draw_program(seed), ["wgpu"])


def test_an_onnx_model_equals_the_processor(rng: np.random.Generator) -> None:
    """Convolutions, a norm, pooling and a classifier, with a batch whose size is open."""
    pytest.importorskip("onnx", reason="ONNX models need the package onnx")
    from strata.io.onnx import export, load

    n = sym("n", 1)
    g = Graph("net")
    x = g.input("x", f32[n, 3, 16, 16])
    weights = {"w1": (8, 3, 3, 3), "w2": (16, 8, 3, 3), "w3": (16, 10), "gain": (8,), "shift": (8,)}
    w = {name: g.param(name, f32[shape]) for name, shape in weights.items()}
    y = ops.relu(ops.conv(x, w["w1"], padding=((1, 1), (1, 1))))
    y = y * ops.reshape(w["gain"], (1, 8, 1, 1)) + ops.reshape(w["shift"], (1, 8, 1, 1))
    y = ops.relu(ops.conv(y, w["w2"], stride=(2, 2)))
    g.outputs((y.mean(axis=(2, 3)) @ w["w3"]).softmax(-1))
    params = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in weights.items()}
    model = export(g, params=params)
    on_cpu, on_gpu = load(model, device="cpu"), load(model, device="wgpu")
    for batch in (1, 3):
        array = rng.standard_normal((batch, 3, 16, 16)).astype(np.float32)
        for a, b in zip(_results(on_cpu.run({"x": array})), _results(on_gpu.run({"x": array})), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


def _results(found: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in (found.values() if isinstance(found, dict) else found)]


def test_a_grid_wider_than_one_dimension_takes(rng: np.random.Generator) -> None:
    g = Graph("wide")
    x = g.input("x", u8[5_000_001])
    g.outputs(ops.cast(x, f32).sum(), x + x)
    agrees(g, {"x": rng.integers(0, 255, 5_000_001).astype(np.uint8)})


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (7,), (5, 8), (5, 6), (3, 5, 4), (257,), (0,)])
def test_words_of_packed_elements(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Whole words, words that two rows share, words at the end; several widths at once, and a part of a buffer."""
    g = Graph("words")
    x, y = g.input("x", shape, "i8"), g.input("y", shape, "bf16")
    g.outputs(x + x, x > 3, ops.cast(x, f32) * 2.0, ops.cast(x, "i16") * 300, y + y, ops.cast(y, "f16"),
              ops.concat([x, x], axis=0), ops.concat([x, x + x], axis=len(shape) - 1))  # fmt: skip
    array = rng.integers(-100, 100, shape).astype(np.int8)
    compiled = st.Session("wgpu").compile(g)
    feeds = {"x": array, "y": (array / 8).astype(y.dtype.np)}
    for got, want in zip(compiled.run(feeds), evaluate(g, feeds), strict=True):
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_neighbours_in_a_word_are_kept(rng: np.random.Generator) -> None:
    """Every element of a byte is written by another invocation."""
    g = Graph("bytes")
    x = g.input("x", u8[1001, 3])
    g.outputs(ops.transpose(x, (1, 0)), x > 100, ops.cast(x, st.int16), ops.flip(x, (0, 1)))
    agrees(g, {"x": rng.integers(0, 255, (1001, 3)).astype(np.uint8)})


@pytest.mark.parametrize("dtype", ["f32", "i8", "i64", "f16"])
def test_orders(dtype: str, rng: np.random.Generator) -> None:
    """Many equal elements, NaN among them, along both axes."""
    g = Graph("orders")
    x = g.input("x", (70, 130), dtype)
    for axis in (0, 1):
        g.outputs(*g.results, ops.sort(x, axis=axis), ops.argsort(x, axis=axis, descending=True),
                  *ops.topk(x, 5, axis=axis), *ops.topk(x, 3, axis=axis, largest=False), *ops.cummax(x, axis=axis),
                  *ops.cummin(x, axis=axis))  # fmt: skip
    array = rng.integers(-9, 9, (70, 130)).astype(x.dtype.np)
    if x.dtype.is_float:
        array[rng.integers(0, 70, 40), rng.integers(0, 130, 40)] = np.nan
    assert agrees(g, {"x": array}).host_steps == []


@pytest.mark.parametrize("count", [2047, 2048, 2500, 5041])
def test_long_running_reductions(count: int, rng: np.random.Generator) -> None:
    g = Graph("running")
    x, n = g.input("x", f32[3, count]), g.input("n", i64[count])
    g.outputs(ops.cumsum(x, axis=1), ops.cumsum(x * 2.0, axis=1, reverse=True) + 1.0, ops.cumsum(n, axis=0),
              ops.cumsum(x, axis=1, exclusive=True), ops.cummax(x, axis=1)[0])  # fmt: skip
    agrees(g, {"x": rng.standard_normal((3, count)).astype(np.float32), "n": rng.integers(-9, 1 << 40, count)})


def test_rows_that_are_too_long_to_sort_by_ranks(rng: np.random.Generator) -> None:
    g = Graph("long")
    g.outputs(ops.sort(g.input("x", f32[9000])))
    assert agrees(g, {"x": rng.standard_normal(9000).astype(np.float32)}).host_steps == []


def test_symbolic_sizes(rng: np.random.Generator) -> None:
    n = sym("n", 0)
    g = Graph("open")
    x = g.input("x", f32[n, 40])
    g.outputs(x.softmax(-1), ops.concat([x, x * 2.0], axis=0), ops.cumsum(x, axis=0), x.sum(axis=0),
              ops.transpose(x, (1, 0)))  # fmt: skip
    compiled = st.Session("wgpu").compile(g)
    for rows in (3, 0, 1, 700):
        feeds = {"x": rng.standard_normal((rows, 40)).astype(np.float32)}
        for got, want in zip(compiled.run(feeds), evaluate(g, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


def test_numbers_of_64_bits(rng: np.random.Generator) -> None:
    g = Graph("wide")
    x, y = g.input("x", i64[500]), g.input("y", i64[500])
    g.outputs(x + y, x * y, x // y, x % y, ops.maximum(x, y), x < y, x.sum(), x.max(), ops.cast(x, f32),
              ops.bitwise_left_shift(x, y % 70), ops.bitwise_right_shift(x, y % 70), ops.bitwise_xor(x, y))  # fmt: skip
    x = rng.integers(-(2**63), 2**63 - 1, 500)
    y = rng.integers(-(2**40), 2**40, 500) * rng.choice([1, 0, 1 << 20], 500)
    compiled = agrees(g, {"x": x, "y": y})
    assert compiled.host_steps == []


SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3e38, -3e38, 1e-38, 1e-42, 88.8, -104.0, 2147483648.0],
    np.float32,
)


@pytest.mark.parametrize("name", [
    "exp", "expm1", "log", "log1p", "log2", "sqrt", "sin", "cos", "tanh", "erf", "sigmoid", "floor", "round", "sign",
    "abs", "reciprocal", "isnan", "isinf", "isfinite", "square", "relu", "atan", "asin", "acosh",
])  # fmt: skip
def test_numbers_that_are_not_finite(name: str) -> None:
    g = Graph(name)
    g.outputs(getattr(ops, name)(g.input("x", f32[SPECIAL.shape])))
    agrees(g, {"x": SPECIAL})


@pytest.mark.parametrize("name", [
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "floor_divide", "remainder", "equal",
    "not_equal", "less", "greater_equal", "atan2", "copysign", "fmod",
])  # fmt: skip
def test_pairs_of_numbers_that_are_not_finite(name: str) -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
    g = Graph(name)
    g.outputs(getattr(ops, name)(g.input("x", f32[a.shape]), g.input("y", f32[a.shape])))
    agrees(g, {"x": a, "y": b})


@pytest.mark.parametrize(("name", "low", "high", "ulps"), [
    ("log", 1e-6, 1e6, 3), ("log2", 1e-6, 1e6, 4), ("rsqrt", 1e-6, 1e9, 3),
    ("exp", -103, 88.5, 2), ("exp2", -148, 127.9, 2), ("expm1", -80, 80, 3), ("log1p", -0.9, 1e3, 4),
    ("sqrt", 0, 1e9, 3), ("sin", -100, 100, 3), ("cos", -1e30, 1e30, 3), ("tan", -50, 50, 4),
    ("arcsin", -1, 1, 3), ("arccos", -1, 1, 3), ("arctan", -9, 9, 3), ("sinh", -88, 88, 5),
    ("cosh", -88, 88, 4), ("tanh", -20, 20, 3), ("arcsinh", -1e4, 1e4, 4), ("arccosh", 1.1, 1e4, 4),
    ("arctanh", -0.99, 0.99, 3),
])  # fmt: skip
def test_elementary_functions_are_right_to_a_few_ulps(
    name: str, low: float, high: float, ulps: float, rng: np.random.Generator
) -> None:
    x = rng.uniform(low, high, 4000).astype(np.float32)
    x[:1000] = np.clip(rng.standard_normal(1000), low, high)
    wide = x.astype(np.float64)
    want = 1 / np.sqrt(wide) if name == "rsqrt" else getattr(np, name)(wide)
    g = Graph(name)
    g.outputs(getattr(ops, name.replace("arc", "a"))(g.input("x", f32[4000])))
    (got,) = st.Session("wgpu").compile(g).run(x=x)
    normal = np.isfinite(want) & (np.abs(want) > np.finfo(np.float32).tiny)
    off = np.abs(got - want)[normal] / np.spacing(np.abs(want[normal]).astype(np.float32))
    assert off.max() <= ulps, f"{off.max()} at {x[normal][off.argmax()]}"


def test_arithmetic_that_compilers_shorten() -> None:
    g = Graph("shortened")
    x = g.input("x", f32[SPECIAL.shape])
    g.outputs(x - x, x / x, x * 0.0, 0.0 - x, ops.equal(x, x), ops.not_equal(x, x))
    agrees(g, {"x": SPECIAL})


def test_casts_saturate() -> None:
    g = Graph("casts")
    x = g.input("x", f32[SPECIAL.shape])
    g.outputs(*(ops.cast(x * 3.0, t) for t in ("i8", "u8", "i16", "i32", "u32", "i64", "u64", "bool", "f16", "bf16",
                                               "f8e4m3", "f8e5m2")))  # fmt: skip
    compiled = st.Session("wgpu").compile(g)
    for got, want in zip(compiled.run(x=SPECIAL), evaluate(g, {"x": SPECIAL}), strict=True):
        wide = want.dtype if want.dtype.kind in "biu" else np.float64
        np.testing.assert_array_equal(got.astype(wide), want.astype(wide), strict=True)


def test_f64_is_left_to_the_host_and_reported(rng: np.random.Generator) -> None:
    g = Graph("mixed")
    x = g.input("x", f32[8, 8])
    g.outputs(ops.cast(ops.exp(ops.cast(x, f64)), f32) @ x)
    compiled = agrees(g, {"x": rng.standard_normal((8, 8)).astype(np.float32)})
    assert set(compiled.host_steps) == {"cast", "exp"}
    report = st.dispatch_report(g, "wgpu")
    assert report.path("matmul") == "native"
    assert report.path("exp") == "host"


def test_a_buffer_beyond_the_limit_is_refused_by_name() -> None:
    n = sym("n", 1)
    g = Graph("large")
    g.outputs(g.input("x", f32[n, 1]) + g.input("y", f32[1, n]))
    compiled = st.Session("wgpu").compile(g)
    arrays = np.ones(6000, np.float32)
    with pytest.raises(OutOfMemoryError, match="maxStorageBufferBindingSize"):
        compiled.run(x=arrays.reshape(-1, 1), y=arrays.reshape(1, -1))
    (again,) = compiled.run(x=arrays[:3].reshape(-1, 1), y=arrays[:3].reshape(1, -1))
    np.testing.assert_array_equal(again, np.full((3, 3), 2, np.float32))


def test_the_device_has_a_name() -> None:
    assert "wgpu" in st.devices()
    assert st.Device("wgpu").full_name.startswith("wgpu (")
    with pytest.raises(DeviceError, match="wgpu finds no such GPU"):
        st.Device("wgpu:99")


def test_shaders_can_be_read() -> None:
    g = Graph("shown")
    g.outputs(ops.exp(g.input("x", f32[4])))
    page = st.Session("wgpu").compile(g).explain()
    assert "@compute" in page.code["k0"]
    assert "code" in str(page)


def test_scale_and_softcap_change_attention(rng: np.random.Generator) -> None:
    feeds = {name: rng.standard_normal((1, 2, 9, 16)).astype(np.float32) for name in "qkv"}
    seen = []
    for scale, softcap in ((0.25, None), (1.0, None), (0.25, 2.0)):
        g = Graph("attention")
        values = [g.input(name, (1, 2, 9, 16)) for name in "qkv"]
        g.outputs(ops.attention(*values, num_heads=2, layout="bhsd", scale=scale, softcap=softcap))
        compiled = agrees(g, feeds)
        assert compiled.host_steps == []
        seen.append(compiled.run(feeds)[0])
    assert not np.allclose(seen[0], seen[1])
    assert not np.allclose(seen[0], seen[2])


def test_draws_follow_the_softmax_and_the_key() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    count = 4000
    g = Graph("draws")
    rows = ops.broadcast_to(g.input("logits", f32[4]), (count, 4))
    g.outputs(ops.sample(rows, g.input("key", (2,), "u32")), ops.argmax(rows, axis=1))
    runs = []
    for device in ("wgpu", "cpu"):
        compiled = st.Session(device).compile(g)
        runs.append([compiled.run(logits=logits, key=np.asarray(st.random.key(n))) for n in (0, 1, 0)])
    (first, second, again), (on_cpu, *_) = runs
    np.testing.assert_array_equal(again[0], first[0])
    assert (first[0] != second[0]).any()
    np.testing.assert_allclose(np.bincount(first[0], minlength=4) / count, np.exp(logits), atol=0.03)
    assert (first[0] == on_cpu[0]).mean() > 0.999  # an ulp of a logarithm may decide between two
    np.testing.assert_array_equal(first[1], np.zeros(count))


def test_labels_outside_their_classes_are_an_error() -> None:
    g = Graph("labels")
    x, labels = g.input("x", f32[2, 3]), g.input("labels", i64[2])
    g.outputs(ops.softmax_cross_entropy_with_logits(x, labels))
    compiled = st.Session("wgpu").compile(g)
    feeds = {"x": np.ones((2, 3), np.float32), "labels": np.array([0, 2])}
    assert np.isfinite(compiled.run(feeds)[0]).all()
    with pytest.raises(IndexRangeError, match="label 3 of row 1 is outside the 3 classes"):
        compiled.run(feeds | {"labels": np.array([0, 3])})


def test_many_threads(rng: np.random.Generator) -> None:
    g = Graph("threads")
    g.outputs(g.input("x", f32[64, 64]).softmax(-1) @ g.input("w", f32[64, 64]))
    compiled = st.Session("wgpu").compile(g)
    feeds = [{n: rng.standard_normal((64, 64)).astype(np.float32) for n in ("x", "w")} for _ in range(12)]
    alone = [compiled.run(f)[0] for f in feeds]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda f: compiled.run(f)[0], feeds))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b)


def test_functions_of_tensors_train_as_on_the_processor(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((32, 10)).astype(np.float32), np.eye(3, dtype=np.float32)[rng.integers(0, 3, 32)]
    start = {
        "w1": rng.standard_normal((10, 16)).astype(np.float32),
        "w2": rng.standard_normal((16, 3)).astype(np.float32),
    }

    def loss(p: Any, a: Any, b: Any) -> Any:
        return ((a @ p["w1"]).gelu() @ p["w2"] - b).square().mean()

    found = []
    for device in ("cpu", "wgpu"):
        with using(device=device):

            @st.jit
            def step(p: Any, a: Any, b: Any) -> Any:
                value, slopes = st.value_and_grad(loss)(p, a, b)
                return value, {name: p[name] - 0.1 * slopes[name] for name in p}

            p, losses = {name: st.tensor(w) for name, w in start.items()}, []
            for _ in range(3):
                value, p = step(p, st.tensor(x), st.tensor(y))
                losses.append(float(np.asarray(value)))
            found.append((losses, {name: np.asarray(w) for name, w in p.items()}))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for name in start:
        np.testing.assert_allclose(found[1][1][name], found[0][1][name], rtol=1e-5, atol=1e-6)


def test_a_training_step_equals_the_processor(rng: np.random.Generator) -> None:
    g = Graph("step")
    x, y = g.input("x", f32[16, 12]), g.input("y", f32[16, 3])
    w1, w2 = g.param("w1", f32[12, 20]), g.param("w2", f32[20, 3])
    logits = ops.gelu(x @ w1) @ w2
    g.outputs(-(ops.log_softmax(logits, axis=-1) * y).sum() / 16.0)
    feeds = {n: (rng.standard_normal(s) * 0.3).astype(np.float32) for n, s in (("x", (16, 12)), ("w1", (12, 20)),
                                                                             ("w2", (20, 3)))}  # fmt: skip
    feeds["y"] = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 16)]
    step = st.transforms.grad_with_loss(g)
    results = []
    for device in ("cpu", "wgpu"):
        compiled = st.Session(device).compile(step)
        for name in step.param_names:
            compiled.set_param(name, feeds[name])
        given = {n: feeds[n] if n in feeds else np.ones((), np.float32) for n in step.input_names}
        results.append(compiled.run(given))
        assert compiled.host_steps == []
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_triton_can_be_loaded_behind_the_device() -> None:
    """Each has an LLVM inside; the wrong order of the two ends the process."""
    pytest.importorskip("triton")
    program = "import strata as st; st.Device('wgpu'); import triton; print('alive')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["alive"], done.stderr


def test_a_processor_that_plays_a_gpu_is_not_chosen_for_speed() -> None:
    g = Graph("large")
    x = g.input("x", (512, 512))
    chosen = st.pick_device(g.outputs(x @ x), ["cpu", "wgpu"])
    assert chosen == "cpu" or backend_for("wgpu").capabilities.of_processor is None
