"""Convolutions with fewer products: against double precision and the direct form, for every instruction set."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.codegen.compile_batch import convolution_plan
from strata.backends.llvm.conv.match import ConvPlan
from strata.backends.llvm.conv.table import ConvWindow
from strata.backends.llvm.conv.winograd import (
    Winograd,
    emit_pack_taps,
    emit_winograd,
    plan_winograd,
    winograd_wins,
)
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.registers import memory_type
from strata.config import using
from strata.core import Target, as_dtype, f32, sym
from strata.mir import Graph
from strata.ops.conv.conv import Conv
from strata.runtime import Session
from tests.unit.backends.llvm.compiled import compiled

HOST = Target.host()
LEVELS = [t for t in map(Target.named, ("baseline", "avx2", "avx512", "host")) if t.runs_on(HOST)]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
WINDOW = ConvWindow((3, 3), (1, 1), (1, 1), (1, 1))
ops: Any = functions


def exact(x: np.ndarray, w: np.ndarray, padding: Any) -> np.ndarray:
    op = Conv(stride=(1, 1), padding=padding, dilation=(1, 1), groups=1, input_dilation=(1, 1))
    return op.numpy(x.astype(np.float64), w.astype(np.float64))


# the kernel by itself


def run_kernel(x: np.ndarray, w: np.ndarray, padding: Any, spec: Winograd) -> np.ndarray:
    """x [N, C, H, W] and w [O, C, 3, 3] through the kernel, last chunk first."""
    outputs, channels = w.shape[:2]
    nhwc, taps = np.ascontiguousarray(np.moveaxis(x, 1, -1)), np.ascontiguousarray(w.transpose(2, 3, 1, 0))

    def load(f: IrFunction, channel: Value, output: Value, lanes: int, mask: str | None) -> list[str]:
        source = f.load("ptr", f.address("i64", "%args", PACK_SLOTS.index("source")), 8)
        type_ = memory_type(f32, lanes)
        places = [f.add(f.mul(f.add(channel, tap * channels), outputs), output) for tap in range(9)]
        lines = [f.address("float", source, place) for place in places]
        return [f.load(type_, p, 4, mask) for p in lines]

    target = spec.product.target
    module, packing = IrModule(target.triple), IrModule(target.triple)
    code = compiled(module, target, emit_winograd(module, spec, None, "conv"))
    pack = compiled(packing, target, emit_pack_taps(packing, spec, "pack", load))
    packed = np.full(spec.packed_elements(outputs) + 64, 99, np.float32)
    values: dict[str, int] = dict(source=taps.ctypes.data, packed=packed.ctypes.data, n=outputs)
    block = np.array([values.get(s, 0) for s in PACK_SLOTS], np.int64)
    KERNEL(pack.address("pack"))(block.ctypes.data, 0, spec.product.panels().chunks(outputs))
    counts = [x.shape[axis + 2] + sum(padding[axis]) - 2 for axis in range(2)]
    out = np.full((x.shape[0], *counts, outputs), 77, np.float32)
    strides = [s // 4 for s in nhwc.strides]
    tiles = x.shape[0] * -(-counts[0] // 2) * -(-counts[1] // 2)
    values = dict(
        a=nhwc.ctypes.data, b=packed.ctypes.data, out=out.ctypes.data, m=tiles, n=outputs, k=16 * channels, a_row=0,
        a_k=1, out_row=outputs, out_column=1, x_image=strides[0],
    )  # fmt: skip
    for axis in range(2):
        values |= {f"size{axis}": x.shape[axis + 2], f"count{axis}": counts[axis], f"low{axis}": padding[axis][0]}
        values[f"x{axis}"] = strides[axis + 1]
    block = np.array([values[s] for s in spec.product.slots], np.int64)
    for chunk in reversed(range(spec.product.chunk_count(tiles, outputs))):
        KERNEL(code.address("conv"))(block.ctypes.data, chunk, chunk + 1)
    return np.moveaxis(out, -1, 1)


SAME = ((1, 1), (1, 1))
KERNEL_CASES = [
    # images, channels, sizes, outputs, padding
    (1, 8, (3, 3), 8, ((0, 0), (0, 0))),
    (2, 16, (7, 7), 48, SAME),
    (1, 1, (4, 5), 1, SAME),
    (3, 9, (1, 1), 5, SAME),
    (2, 33, (5, 8), 17, ((2, 0), (0, 3))),
    (1, 130, (9, 6), 150, SAME),
    (1, 12, (8, 21), 70, ((-1, 2), (2, -2))),
    (1, 270, (2, 3), 33, SAME),
    (5, 24, (6, 4), 24, ((2, 2), (2, 2))),
]


@pytest.mark.few(9)
@pytest.mark.parametrize("target", LEVELS, ids=str)
@pytest.mark.parametrize("case", KERNEL_CASES, ids=[f"case{i}" for i in range(len(KERNEL_CASES))])
def test_kernel(case: tuple, target: Target, rng: np.random.Generator) -> None:
    images, channels, sizes, outputs, padding = case
    x = rng.standard_normal((images, channels, *sizes)).astype(np.float32)
    w = rng.standard_normal((outputs, channels, 3, 3)).astype(np.float32)
    expected = exact(x, w, padding)
    tiles = images * -(-expected.shape[2] // 2) * -(-expected.shape[3] // 2)
    for m, m_exact in ((tiles, True), (tiles, False), (1000, False)):  # exact, and planned for more than there are
        spec = plan_winograd(m, outputs, channels, WINDOW, target, m_exact=m_exact)
        result = run_kernel(x, w, padding, spec)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6 * 3 * channels**0.5)


def test_stack_use_is_bounded() -> None:
    for target in LEVELS:
        for tiles in (1, 49, 50000):
            for channels in (8, 64, 500, 4096):
                for outputs in (1, 64, 512):
                    spec = plan_winograd(tiles, outputs, channels, WINDOW, target)
                    assert spec.stack_bytes <= 480 << 10, str(spec)


# in programs


def plans(made: Any) -> list[ConvPlan]:
    found = [convolution_plan(s.kernel, made.lir.target, s) for s in made.lir.schedule if s.kernel is not None]
    return [p for p in found if p is not None]


def program(x: np.ndarray, w: np.ndarray, *, winograd: bool = True, finish: Any = None, **options: Any) -> Any:
    g = Graph("conv")
    y = ops.conv2d(g.input("x", x.shape), g.param("w", w.shape), **options)
    g.outputs(finish(y) if finish else y)
    with using(winograd=winograd):
        made = Session("cpu").compile(g)
        assert [p.is_winograd for p in plans(made)] == [winograd]
    made.set_params({"w": w})
    return made


@pytest.mark.parametrize("channels", [16, 64, 200, 512])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_errors_are_those_of_the_direct_form(channels: int, offset: float, rng: np.random.Generator) -> None:
    """Within the bound of a dot product, and no more than a little above the direct form on average."""
    x = (rng.standard_normal((1, channels, 13, 14)) + offset).astype(np.float32)
    w = (rng.standard_normal((24, channels, 3, 3)) / (9 * channels) ** 0.5).astype(np.float32)
    expected = exact(x, w, SAME)
    size = exact(abs(x), abs(w), SAME)  # of what is summed
    fast, direct = (program(x, w, winograd=on, padding=1).run(x=x)[0] - expected for on in (True, False))
    assert np.max(abs(fast) / size) < 2e-7 * (channels + 12)
    typical_fast, typical_direct = (float(np.sqrt(np.mean(e**2))) for e in (fast, direct))
    assert typical_fast < 2 * typical_direct


def test_small_integers_are_exact(rng: np.random.Generator) -> None:
    x = rng.integers(-8, 9, (2, 16, 9, 9)).astype(np.float32)
    w = rng.integers(-8, 9, (16, 16, 3, 3)).astype(np.float32)
    np.testing.assert_array_equal(program(x, w, padding=1).run(x=x)[0], exact(x, w, SAME))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stay_in_their_windows(value: float, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 16, 9, 10)).astype(np.float32)
    w = rng.standard_normal((16, 16, 3, 3)).astype(np.float32)
    made = program(x, w, padding=1)
    for y, column in ((0, 0), (3, 4), (4, 5), (8, 9)):
        spoiled = x.copy()
        spoiled[0, 5, y, column] = value
        result = made.run(x=spoiled)[0]
        touched = np.zeros((9, 10), bool)
        touched[max(0, y - 1) : y + 2, max(0, column - 1) : column + 2] = True
        assert not np.isfinite(result[..., touched]).any()
        np.testing.assert_array_equal(result[..., ~touched], made.run(x=x)[0][..., ~touched])


def test_results_do_not_depend_on_threads_or_batch(rng: np.random.Generator) -> None:
    w = rng.standard_normal((40, 24, 3, 3)).astype(np.float32)
    g = Graph("conv")
    x = g.input("x", (sym("N", 1, 16), 24, 15, 13))
    g.outputs(ops.conv2d(x, g.param("w", w.shape), padding=1).relu())
    made = Session("cpu").compile(g)
    assert plans(made)[0].is_winograd
    made.set_params({"w": w})
    feed = rng.standard_normal((5, 24, 15, 13)).astype(np.float32)
    outs = []
    for threads in (1, 2, 7):
        outs.append(np.empty((5, 40, 15, 13), np.float32))
        made._executable.run([feed], [outs[-1]], {"N": 5}, threads)
        np.testing.assert_array_equal(outs[-1], outs[0])
    np.testing.assert_allclose(outs[0], np.maximum(exact(feed, w, SAME), 0), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(made.run(x=feed[3:4])[0][0], outs[0][3])
    np.testing.assert_array_equal(
        program(feed[:1], w, padding=1, finish=lambda y: y.relu()).run(x=feed[:1])[0], outs[0][:1]
    )


def test_open_sizes(rng: np.random.Generator) -> None:
    w, b = rng.standard_normal((17, 20, 3, 3)).astype(np.float32), rng.standard_normal(17).astype(np.float32)
    g = Graph("conv")
    x = g.input("x", (sym("N", 1, 8), 20, sym("H", 1, 100), sym("W", 1, 100)))
    y = ops.conv2d(x, g.param("w", w.shape), g.param("b", b.shape), padding=((1, 1), (1, 1)))
    g.outputs((y + ops.mean(x, axis=1, keepdims=True)).relu())
    made = Session("cpu").compile(g)
    assert plans(made)[0].is_winograd
    made.set_params({"w": w, "b": b})
    for shape in ((1, 20, 1, 1), (2, 20, 2, 7), (3, 20, 17, 16), (1, 20, 64, 3)):
        feed = rng.standard_normal(shape).astype(np.float32)
        expected = exact(feed, w, SAME) + b.reshape(17, 1, 1) + feed.mean(1, keepdims=True, dtype=np.float64)
        np.testing.assert_allclose(made.run(x=feed)[0], np.maximum(expected, 0), rtol=1e-5, atol=1e-4)


def test_weights_given_for_each_run(rng: np.random.Generator) -> None:
    """In both orders of their axes."""
    for last in (False, True):
        g = Graph("conv")
        x, w = g.input("x", (1, 16, 8, 8)), g.input("w", (3, 3, 16, 24) if last else (24, 16, 3, 3))
        g.outputs(ops.conv2d(x, w.transpose((3, 2, 0, 1)) if last else w, padding=1))
        made = Session("cpu").compile(g)
        assert plans(made)[0].is_winograd
        for _ in range(2):
            feed = rng.standard_normal((1, 16, 8, 8)).astype(np.float32)
            taps = rng.standard_normal((24, 16, 3, 3)).astype(np.float32)
            given = np.ascontiguousarray(taps.transpose(2, 3, 1, 0)) if last else taps
            np.testing.assert_allclose(made.run(x=feed, w=given)[0], exact(feed, taps, SAME), rtol=1e-5, atol=1e-4)


def test_gradients(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    import strata as st

    x = rng.standard_normal((2, 16, 9, 8)).astype(np.float32)
    w = (rng.standard_normal((24, 16, 3, 3)) * 0.1).astype(np.float32)
    loss = st.grad(lambda x, w: (x.conv2d(w, padding=1) ** 2).sum(), argnums=(0, 1))
    found = [np.asarray(g.numpy()) for g in loss(st.tensor(x), st.tensor(w))]
    leaves = [torch.from_numpy(a).double().requires_grad_() for a in (x, w)]
    (torch.nn.functional.conv2d(*leaves, padding=1) ** 2).sum().backward()
    for mine, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=2e-5, atol=2e-3)


# when it is taken


def test_where_it_pays() -> None:
    def fits(channels: int, outputs: int, *counts: int, window: ConvWindow = WINDOW) -> bool:
        return winograd_wins(window, channels, outputs, counts[0], counts, 1) == 1

    assert fits(64, 64, 56, 56)
    assert fits(512, 512, 7, 7)
    assert fits(16, 16, 64, 64)
    assert fits(64, 1, 28, 28)
    assert not fits(3, 64, 224, 224)
    assert not fits(256, 256, 1, 1)
    assert not fits(256, 256, 2, 2)
    assert not fits(64, 64, 1, 100)  # of three lines of taps one is inside
    assert not fits(64, 64, 56, 56, window=ConvWindow((3, 3), (2, 2), (1, 1), (1, 1)))
    assert not fits(64, 64, 56, 56, window=ConvWindow((3, 3), (1, 1), (2, 2), (1, 1)))
    assert not fits(64, 64, 56, 56, window=ConvWindow((5, 5), (1, 1), (1, 1), (1, 1)))


def test_doubles_and_groups_are_direct() -> None:
    for dtype, groups in (("f64", 1), ("f32", 2)):
        g = Graph("conv")
        x, w = g.input("x", (1, 32, 14, 14), dtype), g.param("w", (32, 32 // groups, 3, 3), dtype)
        g.outputs(ops.conv2d(x, w, padding=1, groups=groups))
        assert [p.is_winograd for p in plans(Session("cpu").compile(g))] == [False]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_floats_are_rounded_once(dtype: str, rng: np.random.Generator) -> None:
    """Tiles are f32 from the first sum to the last: what comes out is next to the exact result or is it."""
    g = Graph("conv")
    g.outputs(ops.conv2d(g.input("x", (1, 32, 14, 14), dtype), g.param("w", (32, 32, 3, 3), dtype), padding=1))
    made = Session("cpu").compile(g)
    assert [p.is_winograd for p in plans(made)] == [True]
    kind = as_dtype(dtype).np
    x, w = rng.standard_normal((1, 32, 14, 14)).astype(kind), (rng.standard_normal((32, 32, 3, 3)) / 16).astype(kind)
    made.set_param("w", w)
    near = exact(x, w, ((1, 1), (1, 1))).astype(kind).astype(np.float64)
    step = {"f16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    away = np.abs(np.asarray(made.run(x=x)[0]).astype(np.float64) - near)
    assert (away <= step * np.abs(near) + 1e-5).all()
    assert (away == 0).mean() > 0.9
