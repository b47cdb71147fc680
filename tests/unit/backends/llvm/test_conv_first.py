"""Convolutions with channels first: against double precision, for every instruction set, epilogue and open size."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.codegen.compile_batch import planes_plan
from strata.backends.llvm.conv.nchw import Border, Planes, emit_planes, plan_planes
from strata.backends.llvm.conv.nchw_direct import Lines, emit_lines, plan_lines
from strata.backends.llvm.conv.table import ConvWindow
from strata.backends.llvm.ir.builder import IrModule
from strata.core import Target, sym
from strata.mir import Graph
from strata.ops.conv.conv import Conv
from strata.runtime import CompileOptions, Session
from tests.unit.backends.llvm.compiled import compiled

HOST = Target.host()
LEVELS = [t for t in map(Target.named, ("baseline", "avx2", "avx512", "host")) if t.runs_on(HOST)]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
ops: Any = functions

CASES = [
    # images, channels, sizes, outputs, kernel, stride, padding, dilation, groups
    (1, 5, (14, 14), 5, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 5),
    (2, 3, (9, 37), 3, (5, 5), (2, 2), ((2, 2), (2, 2)), (1, 1), 3),
    (1, 4, (20, 21), 4, (3, 5), (3, 2), ((1, 0), (0, 4)), (2, 3), 4),
    (2, 2, (7, 7), 2, (7, 7), (1, 1), ((3, 3), (3, 3)), (1, 1), 2),
    (1, 33, (1, 5), 33, (1, 3), (1, 1), ((0, 0), (1, 1)), (1, 1), 33),
    (1, 2, (40, 6), 2, (3, 3), (1, 2), ((-1, 2), (3, -1)), (1, 1), 2),
    (1, 3, (33, 35), 10, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    (2, 1, (28, 28), 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    (3, 4, (5, 60), 1, (3, 3), (1, 1), ((0, 2), (0, 0)), (1, 2), 1),
    (1, 2, (4, 5), 9, (2, 2), (1, 2), ((0, 0), (1, 0)), (1, 1), 1),
    (2, 3, (17, 70), 12, (4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1), 1),
    (1, 1, (1, 333), 40, (1, 10), (1, 5), ((0, 0), (2, 1)), (1, 1), 1),
    (1, 2, (5, 100), 5, (2, 3), (1, 3), ((1, 0), (4, 2)), (1, 7), 1),
    (1, 2, (5, 90), 5, (2, 9), (2, 8), ((1, 0), (4, 2)), (1, 1), 1),
]


def exact(case: tuple, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    *_, stride, padding, dilation, groups = case
    one = (1,) * len(stride)
    op = Conv(stride=stride, padding=padding, dilation=dilation, groups=groups, input_dilation=one)
    return op.numpy(x.astype(np.float64), w.astype(np.float64))


def arrays(case: tuple, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    images, channels, sizes, outputs, kernel, *_, groups = case
    x = rng.standard_normal((images, channels, *sizes)).astype(np.float32)
    return x, rng.standard_normal((outputs, channels // groups, *kernel)).astype(np.float32)


def run_kernel(case: tuple, x: np.ndarray, w: np.ndarray, counts: tuple[int, ...], spec: Planes | Lines) -> np.ndarray:
    """All chunks, the last one first."""
    target = spec.product.target
    module = IrModule(target.triple)
    code = compiled(module, target, emit(module, spec))
    out = np.full((x.shape[0], w.shape[0], *counts), 77, np.float32)
    pixels, strides = math.prod(counts), [s // 4 for s in x.strides]
    rows = x.shape[0] * w.shape[0]
    packed = np.ascontiguousarray(np.moveaxis(w, 1, -1))
    values: dict[str, int] = dict(
        a=x.ctypes.data, b=packed.ctypes.data, out=out.ctypes.data, m=rows, n=pixels, k=spec.k, a_row=0, a_k=1,
        out_row=pixels, out_column=1, x_image=strides[0], x_channel=strides[1],
    )  # fmt: skip
    for axis in range(len(counts)):
        values |= {f"size{axis}": x.shape[axis + 2], f"count{axis}": counts[axis], f"low{axis}": case[6][axis][0]}
        values[f"x{axis}"] = strides[axis + 2]
    block = np.array([values[s] for s in spec.product.slots], np.int64)
    for chunk in reversed(range(chunks(spec, x.shape[0], rows, counts))):
        KERNEL(code.address("conv"))(block.ctypes.data, chunk, chunk + 1)
    return out


def chunks(spec: Planes | Lines, images: int, rows: int, counts: tuple[int, ...]) -> int:
    if isinstance(spec, Lines):
        *front, height, width = counts
        return math.prod([images, *front, -(-height // spec.lines), -(-width // spec.columns)])
    if spec.is_depthwise:
        return -(-rows // spec.planes) * -(-counts[0] // spec.lines)
    return images * -(-math.prod(counts) // (spec.product.panel_columns * spec.product.chunk_panels))


def emit(module: IrModule, spec: Planes | Lines) -> str:
    if isinstance(spec, Lines):
        return emit_lines(module, spec, None, "conv")
    return emit_planes(module, spec, None, "conv")


@pytest.mark.few(14)
@pytest.mark.parametrize("target", LEVELS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])
def test_kernel(case: tuple, target: Target, rng: np.random.Generator) -> None:
    images, channels, _, outputs, kernel, stride, _, dilation, groups = case
    x, w = arrays(case, rng)
    expected = exact(case, x, w)
    counts = expected.shape[2:]
    window = ConvWindow(kernel, stride, dilation, (1, 1))
    for planned in ((images, counts), (8, (100, 200))):  # as it is, and for more than there is
        spec = plan_planes(planned[0], outputs, channels // groups, planned[1], window, target, groups=groups)
        assert spec.stack_bytes < 128 << 10
        np.testing.assert_allclose(run_kernel(case, x, w, counts, spec), expected, rtol=1e-5, atol=1e-4)


SMALL = [
    # images, channels, sizes, outputs, kernel, stride, padding, dilation, groups
    (1, 20, (7, 7), 20, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 20),
    (2, 9, (7, 7), 9, (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1), 9),
    (1, 17, (14, 14), 17, (5, 5), (2, 2), ((2, 2), (2, 2)), (1, 1), 17),
    (3, 4, (8, 8), 4, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4),
    (1, 5, (9, 6), 5, (3, 4), (2, 1), ((3, 2), (-1, 2)), (1, 2), 5),
    (2, 3, (5, 7), 3, (2, 3), (1, 2), ((4, 4), (5, 5)), (2, 1), 3),
    (1, 2, (1, 1), 2, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2),
]


@pytest.mark.few(7)
@pytest.mark.parametrize("target", LEVELS, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=[f"case{i}" for i in range(len(SMALL))])
def test_planes_of_one_tile(case: tuple, target: Target, rng: np.random.Generator) -> None:
    """Borders that are known give the bits that others give."""
    images, _, sizes, outputs, kernel, stride, padding, dilation, groups = case
    x, w = arrays(case, rng)
    expected = exact(case, x, w)
    counts = expected.shape[2:]
    window = ConvWindow(kernel, stride, dilation, (1, 1))
    borders = tuple(Border(low, size, n) for (low, _), size, n in zip(padding, sizes, counts, strict=True))
    results = []
    for known in (borders, ()):
        spec = plan_planes(images, outputs, 1, counts, window, target, groups=groups, borders=known)
        assert not spec.borders or f" {borders[0]}" in str(spec)
        results.append(run_kernel(case, x, w, counts, spec))
        np.testing.assert_allclose(results[-1], expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("case", [c for c in SMALL if min(c[2]) > 6], ids=str)
@pytest.mark.parametrize("kind", ["relu", "silu", "residual"])
def test_program_of_planes_of_one_tile(case: tuple, kind: str, rng: np.random.Generator) -> None:
    x, w = arrays(case, rng)
    sums = exact(case, x, w)
    r = rng.standard_normal(sums.shape).astype(np.float32)
    g = Graph("conv")
    given, residual = g.input("x", x.shape), g.input("r", r.shape)
    y: Any = ops.conv2d(given, g.param("w", w.shape), **options(case))
    match kind:
        case "relu":
            y, expected = y.relu() + residual.mean(), np.maximum(sums, 0) + r.mean(dtype=np.float64)
        case "silu":
            y, expected = y * y.sigmoid() + residual, sums / (1 + np.exp(-sums)) + r
        case _:
            y, expected = (y + residual).relu(), np.maximum(sums + r, 0)
    g.outputs(y)
    made = Session("cpu").compile(g)
    made.set_params({"w": w})
    steps = [s for s in made.lir.schedule if s.kernel is not None and s.slides is not None]
    assert [planes_plan(s.kernel, made.lir.target, s).convolution.borders != () for s in steps] == [True]
    np.testing.assert_allclose(made.run(x=x, r=r)[0], expected, rtol=1e-5, atol=1e-4)


LONG_LINES = [
    # images, channels, sizes, outputs, kernel, stride, padding, dilation, groups
    (1, 3, (33, 95), 20, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    (2, 1, (6, 64), 7, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    (1, 4, (9, 60), 1, (3, 3), (1, 1), ((0, 2), (0, 0)), (1, 2), 1),
    (2, 3, (17, 225), 12, (4, 4), (4, 4), ((0, 0), (0, 0)), (1, 1), 1),
    (1, 1, (1, 20000), 9, (1, 10), (1, 5), ((0, 0), (2, 1)), (1, 1), 1),
    (1, 2, (5, 150), 17, (2, 3), (1, 3), ((1, 0), (4, 2)), (1, 7), 1),
    (1, 2, (30, 333), 5, (5, 9), (3, 8), ((-1, 3), (4, -2)), (2, 1), 1),
    (2, 3, (5, 9, 47), 10, (3, 5, 5), (1, 2, 2), ((1, 1), (2, 2), (2, 2)), (1, 1, 1), 1),
    (1, 1, (7, 6, 24), 4, (3, 3, 3), (2, 1, 1), ((2, 0), (1, 1), (1, 1)), (2, 1, 1), 1),
    (1, 2, (2, 2, 5), 3, (2, 2, 2), (1, 1, 1), ((0, 0), (0, 0), (0, 0)), (1, 1, 1), 1),
]


@pytest.mark.few(10)
@pytest.mark.parametrize("target", LEVELS, ids=str)
@pytest.mark.parametrize("case", LONG_LINES, ids=[f"case{i}" for i in range(len(LONG_LINES))])
def test_lines(case: tuple, target: Target, rng: np.random.Generator) -> None:
    images, channels, _, outputs, kernel, stride, _, dilation, _ = case
    x, w = arrays(case, rng)
    expected = exact(case, x, w)
    counts = expected.shape[2:]
    window = ConvWindow(kernel, stride, dilation, (1,) * len(stride))
    more = (8, (*(9 for _ in counts[:-2]), 100, 4096))
    for (planned, sizes), is_exact in (((images, counts), True), ((images, counts), False), (more, False)):
        spec = plan_lines(planned, outputs, channels, sizes, window, target, width_exact=is_exact)
        if spec is None:  # panels of pixels leave fewer lanes idle
            lanes = target.lanes(4)
            assert len(counts) == 2
            assert -(-sizes[-1] // lanes) * lanes > 1.05 * sizes[-1]
            continue
        assert spec.stack_bytes < 128 << 10
        np.testing.assert_allclose(run_kernel(case, x, w, counts, spec), expected, rtol=1e-5, atol=1e-4)


def test_lines_that_leave_lanes_idle_are_not_taken() -> None:
    window = ConvWindow((3, 3), (1, 1), (1, 1), (1, 1))
    target = Target.named("avx512")
    for width, fits in ((112, True), (150, False), (28, False), (30, False), (31, True)):
        assert (plan_lines(1, 8, 3, (9, width), window, target) is not None) == fits


# in programs


def is_kept(made: Any) -> bool:
    """Whether the one convolution of a program has channels first, and nothing is turned around."""
    steps = [s for s in made.lir.schedule if s.kernel is not None and s.slides is not None]
    assert len(steps) == 1
    plan = planes_plan(steps[0].kernel, made.lir.target, steps[0])
    return plan is not None and not any(n.op.name == "transpose" for s in made.lir.schedule for n in s.nodes)


def options(case: tuple) -> dict[str, Any]:
    *_, stride, padding, dilation, groups = case
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


@pytest.mark.parametrize("case", [c for c in (*CASES, *LONG_LINES) if min(c[2]) > 10 - 2 * len(c[2])], ids=str)
def test_program(case: tuple, rng: np.random.Generator) -> None:
    x, w = arrays(case, rng)
    b = rng.standard_normal(w.shape[0]).astype(np.float32)
    g = Graph("conv")
    given = g.input("x", x.shape)
    g.outputs(ops.conv(given, g.param("w", w.shape), g.param("b", b.shape), **options(case)).relu())
    made = Session("cpu").compile(g)
    assert is_kept(made)
    made.set_params({"w": w, "b": b})
    expected = np.maximum(exact(case, x, w) + b.reshape(-1, *(1 for _ in case[2])), 0)
    np.testing.assert_allclose(made.run(x=x)[0], expected, rtol=1e-5, atol=1e-4)


EPILOGUES = ("none", "residual", "image", "line", "column", "pixel", "cast", "silu")


def with_epilogue(kind: str, y: Any, expected: np.ndarray, values: dict[str, Any], feeds: dict) -> tuple:
    match kind:
        case "residual":
            return (y + values["r"]).relu(), np.maximum(expected + feeds["r"], 0)
        case "silu":
            return y * y.sigmoid(), expected / (1 + np.exp(-expected))
        case "cast":
            return (y * 4.0).cast("i32"), np.trunc(expected * 4)
        case "image" | "line" | "column" | "pixel":
            return y * values[kind], expected * feeds[kind]
    return y, expected


@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("width", [21, 24, 47])  # panels of pixels; lines that end in half a vector; a masked one
def test_epilogue(kind: str, groups: int, width: int, rng: np.random.Generator) -> None:
    g = Graph(kind)
    shapes = {"x": (2, 3, 9, width), "w": (3, 3 // groups, 3, 3), "r": (2, 3, 9, width), "image": (2, 3, 1, 1)}
    shapes |= {"line": (9, 1), "column": (width,), "pixel": (2, 1, 9, width)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    values = {n: g.input(n, s) for n, s in shapes.items()}
    sums = exact((1, 3, (9, width), 3, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups), feeds["x"], feeds["w"])
    y, expected = with_epilogue(
        kind, ops.conv2d(values["x"], values["w"], padding=1, groups=groups), sums, values, feeds
    )
    g.outputs(y)
    made = Session("cpu").compile(g)
    assert is_kept(made)
    found = made.run(**{n: feeds[n] for n in g.input_names})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1 if kind == "cast" else 1e-4)


@pytest.mark.parametrize("kind", EPILOGUES)
def test_epilogue_of_volumes(kind: str, rng: np.random.Generator) -> None:
    g = Graph(kind)
    shapes = {"x": (2, 3, 4, 5, 31), "w": (10, 3, 3, 3, 3), "r": (2, 10, 4, 5, 31), "image": (2, 10, 1, 1, 1)}
    shapes |= {"line": (4, 5, 1), "column": (31,), "pixel": (2, 1, 4, 5, 31)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    values = {n: g.input(n, s) for n, s in shapes.items()}
    same = ((1, 1),) * 3
    sums = exact((2, 3, (4, 5, 31), 10, (3, 3, 3), (1,) * 3, same, (1,) * 3, 1), feeds["x"], feeds["w"])
    y, expected = with_epilogue(kind, ops.conv3d(values["x"], values["w"], padding=1), sums, values, feeds)
    g.outputs(y)
    made = Session("cpu").compile(g)
    assert is_kept(made)
    found = made.run(**{n: feeds[n] for n in g.input_names})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1 if kind == "cast" else 1e-4)


@pytest.mark.parametrize("kind", ["none", "residual", "image", "column", "pixel", "cast", "silu"])
@pytest.mark.parametrize("channels", [1, 3])
def test_epilogue_of_lines(kind: str, channels: int, rng: np.random.Generator) -> None:
    """A line is a plane of one; nothing is copied to have its axis dropped again."""
    g = Graph(kind)
    shapes = {"x": (2, channels, 203), "w": (10, channels, 10), "r": (2, 10, 39), "image": (2, 10, 1)}
    shapes |= {"column": (39,), "pixel": (2, 1, 39)}
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    values = {n: g.input(n, s) for n, s in shapes.items()}
    sums = exact((2, channels, (203,), 10, (10,), (5,), ((0, 0),), (1,), 1), feeds["x"], feeds["w"])
    y, expected = with_epilogue(kind, ops.conv1d(values["x"], values["w"], stride=5), sums, values, feeds)
    g.outputs(y)
    results = []
    for threads in (1, 2, 7):
        made = Session("cpu").compile(g, CompileOptions(threads=threads))
        assert is_kept(made)
        assert len(made.lir.schedule) == 1
        results.append(made.run(**{n: feeds[n] for n in g.input_names})[0])
        np.testing.assert_array_equal(results[-1], results[0])
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1 if kind == "cast" else 1e-4)


def test_lines_of_any_length(rng: np.random.Generator) -> None:
    w, b = rng.standard_normal((8, 2, 5)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    g = Graph("lines")
    n, length = sym("N", 0, 4), sym("T", 1, 500)
    x, given, shift = g.input("x", (n, 2, length)), g.param("w", w.shape), g.param("b", b.shape)
    y = ops.conv1d(x, given, shift, stride=2, padding=2)
    g.outputs(y, ops.reshape(y.relu(), (n, 8, 1, y.shape[-1])))
    made = Session("cpu").compile(g)
    made.set_params({"w": w, "b": b})
    for images, size in ((1, 1), (3, 64), (0, 7), (2, 500)):
        feed = rng.standard_normal((images, 2, size)).astype(np.float32)
        sums = exact((images, 2, (size,), 8, (5,), (2,), ((2, 2),), (1,), 1), feed, w) + b[:, None]
        plain, positive = made.run(x=feed)
        np.testing.assert_allclose(plain, sums, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(positive, np.maximum(sums, 0)[:, :, None], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_open_sizes_threads_and_batch(groups: int, rng: np.random.Generator) -> None:
    w, b = rng.standard_normal((12, 4, 3, 3)), rng.standard_normal(12)
    if groups > 1:
        w, b = w[:4, :1], b[:4]
    w, b = w.astype(np.float32), b.astype(np.float32)
    g = Graph("conv")
    x = g.input("x", (sym("N", 0, 8), 4, sym("H", 1, 300), sym("W", 1, 300)))
    g.outputs(ops.conv2d(x, g.param("w", w.shape), g.param("b", b.shape), padding=1, groups=groups).relu())
    made = Session("cpu").compile(g)
    assert is_kept(made)
    made.set_params({"w": w, "b": b})
    case = (1, 4, (1, 1), len(w), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups)
    for shape in ((1, 4, 1, 1), (2, 4, 2, 17), (3, 4, 40, 33), (0, 4, 8, 8), (5, 4, 130, 16)):
        feed = rng.standard_normal(shape).astype(np.float32)
        outs = []
        for threads in (1, 2, 7):
            outs.append(np.empty((shape[0], len(w), *shape[2:]), np.float32))
            made._executable.run([feed], [outs[-1]], dict(zip("NHW", (shape[0], *shape[2:]), strict=True)), threads)
            np.testing.assert_array_equal(outs[-1], outs[0])
        if shape[0]:
            expected = np.maximum(exact(case, feed, w) + b.reshape(-1, 1, 1), 0)
            np.testing.assert_allclose(outs[0], expected, rtol=1e-5, atol=1e-4)
            np.testing.assert_array_equal(made.run(x=feed[-1:])[0][0], outs[0][-1])


def test_views_are_read_where_they_lie(rng: np.random.Generator) -> None:
    """A part of the channels of a larger image, and weights in another order."""
    g = Graph("conv")
    x, w = g.input("x", (2, 8, 9, 10)), g.param("w", (3, 3, 1, 5))
    g.outputs(ops.conv2d(x[:, 2:7, 1:, :], w.transpose((3, 2, 0, 1)), padding=1, groups=5))
    made = Session("cpu").compile(g)
    feed, taps = (
        rng.standard_normal((2, 8, 9, 10)).astype(np.float32),
        rng.standard_normal((3, 3, 1, 5)).astype(np.float32),
    )
    made.set_params({"w": taps})
    case = (2, 5, (8, 10), 5, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 5)
    expected = exact(case, feed[:, 2:7, 1:, :], taps.transpose(3, 2, 0, 1))
    np.testing.assert_allclose(made.run(x=feed)[0], expected, rtol=1e-5, atol=1e-4)


def test_only_what_is_alone_stays() -> None:
    """Between other convolutions, a depth-wise one has channels last as they do."""
    g = Graph("net")
    x = g.input("x", (1, 16, 14, 14))
    y = ops.conv2d(x, g.param("a", (32, 16, 3, 3)), padding=1).relu()
    y = ops.conv2d(y + 1.0, g.param("d", (32, 1, 3, 3)), padding=1, groups=32)
    g.outputs(y)
    made = Session("cpu").compile(g)
    names = [n.op.name for s in made.lir.schedule for n in s.nodes]
    assert names.count("conv_last") == 2
    assert "conv_first" not in names
