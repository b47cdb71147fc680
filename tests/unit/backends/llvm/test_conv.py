"""Generated convolutions against the op's own NumPy meaning."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import numpy as np
import pytest

from strata.backends.llvm.conv.grouped import emit_beside, fits_beside, plan_beside
from strata.backends.llvm.conv.table import Convolution, ConvWindow, emit_convolution, line_tiles, plan_convolution
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit.jit import MachineCode
from strata.core import DType, Target, f32, f64, i8, u8
from strata.ops.conv.conv import Conv
from strata.ops.conv.conv_filled import ConvFilled
from tests.unit.backends.llvm.compiled import compiled
from tests.unit.backends.llvm.run_gemm import build_pack

HOST = Target.host()
TARGETS = [HOST, *(t for t in map(Target.named, ("baseline", "avx2", "avx512")) if t.runs_on(HOST))]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@cache
def build(spec: Convolution) -> MachineCode:
    module = IrModule(spec.product.target.triple)
    return compiled(module, spec.product.target, emit_convolution(module, spec, None, "conv"))


def run(x: np.ndarray, w: np.ndarray, op: Conv, spec: Convolution, counts: tuple[int, ...], dtype: DType) -> np.ndarray:
    """x [N, C, *sizes] and w [O, C / groups, *kernel] through the channels-last kernel."""
    groups, rank = int(op.groups), x.ndim - 2
    channels, outputs = w.shape[1], w.shape[0] // groups
    nhwc = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    weights = np.ascontiguousarray(
        np.moveaxis(w.reshape(groups, outputs, channels, -1), (3, 2, 1), (1, 2, 3)).reshape(groups, -1, outputs)
    )
    panels = spec.product.panels(dtype)
    k = weights.shape[1]
    packed = np.full(groups * panels.size(outputs, k) + 16, 99, dtype.np)
    values: dict[str, int] = dict(
        source=weights.ctypes.data, packed=packed.ctypes.data, n=outputs, k=k, k_stride=outputs, n_stride=1,
        source_batch=k * outputs, packed_batch=panels.size(outputs, k),
    )  # fmt: skip
    block = np.array([values[s] for s in PACK_SLOTS], np.int64)
    KERNEL(build_pack(panels).address("kernel"))(block.ctypes.data, 0, panels.chunks(outputs, groups))
    out = np.full((x.shape[0], *counts, w.shape[0]), 77, spec.product.out.np)
    strides = [s // nhwc.itemsize for s in nhwc.strides]
    pixels = x.shape[0] * int(np.prod(counts))
    values = dict(
        a=nhwc.ctypes.data, b=packed.ctypes.data, out=out.ctypes.data, m=pixels, n=outputs, k=k, a_row=0, a_k=1,
        out_row=w.shape[0], out_column=1, batch0_extent=groups, batch0_a=channels, batch0_b=panels.size(outputs, k),
        batch0_out=outputs, x_image=strides[0],
    )  # fmt: skip
    for axis in range(rank):
        values |= {f"size{axis}": x.shape[axis + 2], f"count{axis}": counts[axis], f"low{axis}": op.padding[axis][0]}
        values[f"x{axis}"] = strides[axis + 1]
    block = np.array([values[s] for s in spec.product.slots], np.int64)
    kernel = KERNEL(build(spec).address("conv"))
    for chunk in reversed(range(spec.product.chunk_count(pixels, outputs, groups))):
        kernel(block.ctypes.data, chunk, chunk + 1)
    return np.moveaxis(out, -1, 1)


CASES = [
    # sizes, channels, outputs, kernel, stride, padding, dilation, input dilation, groups
    ((7, 7), 16, 48, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 1),
    ((9, 6), 5, 7, (3, 2), (2, 1), ((0, 2), (1, 0)), (1, 2), (1, 1), 1),
    ((8, 8), 12, 20, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1), 4),
    ((10,), 6, 9, (4,), (3,), ((2, 1),), (2,), (1,), 3),
    ((4, 5, 6), 3, 8, (2, 3, 2), (1, 2, 1), ((1, 0), (1, 1), (0, 1)), (1, 1, 1), (1, 1, 1), 1),
    ((5, 6), 4, 6, (3, 3), (1, 1), ((1, 2), (2, 1)), (1, 1), (2, 3), 2),
    ((6, 6), 1, 3, (5, 5), (1, 1), ((4, 4), (4, 4)), (1, 1), (1, 1), 1),
    ((14, 14), 20, 30, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), 1),
    ((15, 16), 3, 8, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), (1, 1), 1),
    ((3, 3), 100, 100, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1), 1),
]


@pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_against_the_op(case: tuple, dtype: DType) -> None:
    sizes, channels, outputs, kernel, stride, padding, dilation, spread, groups = case
    rng = np.random.default_rng(0)
    op = Conv(stride=stride, padding=padding, dilation=dilation, groups=groups, input_dilation=spread)
    w = rng.standard_normal((outputs, channels // groups, *kernel))
    window = ConvWindow(kernel, stride, dilation, spread)
    for images in (1, 3):
        x = rng.standard_normal((images, channels, *sizes))
        exact = op.numpy(x, w)
        spec = plan_convolution(
            images * int(np.prod(exact.shape[2:])), outputs // groups, channels // groups, window, HOST, dtype=dtype,
            groups=groups, width=exact.shape[-1],
        )  # fmt: skip
        result = run(x.astype(dtype.np), w.astype(dtype.np), op, spec, exact.shape[2:], dtype)
        assert np.allclose(result, exact, atol=2e-4 if dtype is f32 else 1e-12)


APART = [
    # width, kernel, stride, padding, dilation
    (28, 3, 1, (12, 12), 12),
    (28, 3, 1, (6, 6), 6),
    (30, 3, 1, (18, 18), 18),
    (20, 5, 1, (8, 8), 4),
    (33, 3, 2, (7, 9), 8),
    (9, 3, 1, (9, 9), 9),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("apart", APART, ids=str)
def test_taps_far_apart(apart: tuple, target: Target) -> None:
    """Tiles end where taps begin or cease to see x."""
    size, taps, stride, padding, dilation = apart
    rng = np.random.default_rng(0)
    op = Conv(stride=(1, stride), padding=((1, 1), padding), dilation=(1, dilation), groups=1, input_dilation=(1, 1))
    window = ConvWindow((3, taps), (1, stride), (1, dilation), (1, 1))
    x, w = rng.standard_normal((2, 20, 5, size)), rng.standard_normal((50, 20, 3, taps))
    exact = op.numpy(x, w)
    results = []
    for edges in ((padding[0], size), None):
        spec = plan_convolution(
            2 * int(np.prod(exact.shape[2:])), 50, 20, window, target, width=exact.shape[-1], edges=edges, m_exact=True
        )
        if spec.line:
            assert edges
            assert sum(spec.line) == exact.shape[-1]
            assert f"line {spec.line}" in str(spec)
        results.append(run(x.astype(np.float32), w.astype(np.float32), op, spec, exact.shape[2:], f32))
        assert np.allclose(results[-1], exact, atol=2e-4)
    assert np.array_equal(*results)


def test_few_images_keep_threads_busy_where_there_may_be_many() -> None:
    window = ConvWindow((5, 1), (1, 1), (1, 1), (1, 1))
    many = plan_convolution(100_000, 512, 256, window, HOST).product
    few = plan_convolution(100_000, 512, 256, window, HOST, fewest=508).product
    assert few.chunk_count(508, 512) >= 32 > many.chunk_count(508, 512)


def test_which_lines_are_cut() -> None:
    def cut(width: int, low: int, dilation: int, taps: int = 3) -> tuple[int, ...]:
        return line_tiles(width, (low, width), ConvWindow((3, taps), (1, 1), (1, dilation), (1, 1)), 8)

    assert cut(28, 12, 12) == (6, 6, 4, 6, 6)
    assert cut(28, 6, 6) == (6, 8, 8, 6)
    assert cut(28, 1, 1) == cut(28, 2, 2) == cut(4000, 9, 9) == ()


@pytest.mark.few(12)
@pytest.mark.parametrize("case", [c for c in CASES if c[1] // c[-1] % 4 == 0], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("codes", "fill"), [(u8, 0), (u8, 113), (i8, 0), (i8, -7)], ids=str)
def test_codes(case: tuple, target: Target, codes: DType, fill: int) -> None:
    """Bytes times bytes, summed exactly; outside lies a fill."""
    sizes, channels, outputs, kernel, stride, padding, dilation, spread, groups = case
    rng = np.random.default_rng(0)
    op = ConvFilled(stride, padding, dilation, groups, spread, fill)
    info = np.iinfo(codes.np)
    x = rng.integers(info.min, info.max + 1, (2, channels, *sizes)).astype(codes.np)
    w = rng.integers(-128, 128, (outputs, channels // groups, *kernel)).astype(np.int8)
    exact = op.numpy(x, w)
    window, pixels = ConvWindow(kernel, stride, dilation, spread), 2 * int(np.prod(exact.shape[2:]))
    spec = plan_convolution(
        pixels, outputs // groups, channels // groups, window, target, dtype=codes, weights=i8, fill=fill,
        groups=groups, width=exact.shape[-1],
    )  # fmt: skip
    np.testing.assert_array_equal(run(x, w, op, spec, exact.shape[2:], i8), exact)


def test_images_do_not_depend_on_their_batch() -> None:
    rng = np.random.default_rng(0)
    op = Conv(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), groups=1, input_dilation=(1, 1))
    window = ConvWindow((3, 3), (1, 1), (1, 1), (1, 1))
    x, w = rng.standard_normal((5, 8, 7, 7)).astype(np.float32), rng.standard_normal((33, 8, 3, 3)).astype(np.float32)
    many = run(x, w, op, plan_convolution(5 * 49, 33, 8, window, HOST), (7, 7), f32)
    for i in range(5):
        assert (run(x[i : i + 1], w, op, plan_convolution(49, 33, 8, window, HOST), (7, 7), f32)[0] == many[i]).all()


def test_stack_use_is_bounded() -> None:
    for pixels, channels, side in itertools.product((1, 49, 50000), (1, 64, 512), (1, 3, 7, 31)):
        spec = plan_convolution(pixels, 64, channels, ConvWindow((side, side), (1, 1), (1, 1), (1, 1)), HOST)
        assert spec.stack_bytes <= 256 << 10, str(spec)


DEPTHWISE = [
    # sizes, kernel, stride, padding, dilation
    ((7, 7), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    ((9, 8), (5, 3), (2, 1), ((2, 2), (0, 1)), (1, 2)),
    ((20,), (4,), (1,), ((3, 0),), (1,)),
]


def run_beside(x: np.ndarray, w: np.ndarray, spec: Convolution, counts: tuple[int, ...], op: Conv) -> np.ndarray:
    """x [N, C, *sizes] and w [O, C / groups, *kernel] through the channels-last kernel of groups side by side."""
    outputs, sizes, target = len(w), x.shape[2:], spec.product.target
    module = IrModule(target.triple)
    code = compiled(module, target, emit_beside(module, spec, None, "beside"))
    nhwc = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    weights = np.ascontiguousarray(np.moveaxis(w.reshape(outputs, w.shape[1], -1), (2, 1), (0, 1)))
    out = np.full((len(x), *counts, outputs), 77, spec.product.out.np)
    strides = [s // nhwc.itemsize for s in nhwc.strides]
    pixels = len(x) * int(np.prod(counts))
    values = dict(
        a=nhwc.ctypes.data, b=weights.ctypes.data, out=out.ctypes.data, m=pixels, n=outputs,
        k=weights.shape[0] * weights.shape[1], a_row=0, a_k=1, out_row=outputs, out_column=1, batch0_extent=1,
        batch0_a=0, batch0_b=0, batch0_out=0,
        x_image=strides[0],
    )  # fmt: skip
    for axis in range(len(sizes)):
        values |= {f"size{axis}": sizes[axis], f"count{axis}": counts[axis], f"low{axis}": op.padding[axis][0]}
        values[f"x{axis}"] = strides[axis + 1]
    block = np.array([values[s] for s in spec.product.slots], np.int64)
    KERNEL(code.address("beside"))(block.ctypes.data, 0, spec.product.chunk_count(pixels, outputs))
    return np.moveaxis(out, -1, 1)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("channels", [1, 16, 33, 96, 130])
def test_depthwise(channels: int, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    for sizes, kernel, stride, padding, dilation in DEPTHWISE:
        spread = (1,) * len(sizes)
        op = Conv(stride=stride, padding=padding, dilation=dilation, groups=channels, input_dilation=spread)
        x, w = rng.standard_normal((2, channels, *sizes)), rng.standard_normal((channels, 1, *kernel))
        exact = op.numpy(x, w)
        counts = exact.shape[2:]
        window = ConvWindow(kernel, stride, dilation, spread)
        spec = plan_beside(2 * int(np.prod(counts)), channels, window, HOST, dtype=dtype, width=counts[-1])
        result = run_beside(x.astype(dtype.np), w.astype(dtype.np), spec, counts, op)
        assert np.allclose(result, exact, atol=2e-4 if dtype is f32 else 1e-12)


@pytest.mark.few(9)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("codes", "fill"), [(u8, 0), (u8, 113), (i8, -7)], ids=str)
@pytest.mark.parametrize("channels", [1, 33, 96])
def test_depthwise_codes(channels: int, target: Target, codes: DType, fill: int) -> None:
    rng = np.random.default_rng(0)
    info = np.iinfo(codes.np)
    for sizes, kernel, stride, padding, dilation in DEPTHWISE:
        spread = (1,) * len(sizes)
        op = ConvFilled(stride, padding, dilation, channels, spread, fill)
        x = rng.integers(info.min, info.max + 1, (2, channels, *sizes)).astype(codes.np)
        w = rng.integers(-128, 128, (channels, 1, *kernel)).astype(np.int8)
        exact = op.numpy(x, w)
        counts = exact.shape[2:]
        spec = plan_beside(
            2 * int(np.prod(counts)), channels, ConvWindow(kernel, stride, dilation, spread), target, dtype=codes,
            weights=i8, fill=fill, width=counts[-1],
        )  # fmt: skip
        np.testing.assert_array_equal(run_beside(x, w, spec, counts, op), exact)


GROUPS = [
    # groups, channels and outputs of one
    (8, 4, 4), (5, 4, 4), (3, 2, 2), (33, 2, 2), (6, 8, 8), (3, 16, 16), (7, 1, 2), (5, 1, 4), (9, 1, 16), (6, 2, 4),
    (4, 3, 4), (3, 5, 8), (2, 24, 16), (3, 40, 8),
]  # fmt: skip
WINDOWS = [
    # sizes, kernel, stride, padding, dilation, input dilation
    ((7, 7), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1)),
    ((9, 11), (5, 3), (2, 2), ((2, 2), (0, 3)), (1, 2), (1, 1)),
    ((4, 5), (3, 3), (1, 1), ((2, 1), (1, 2)), (1, 1), (2, 3)),
    ((6, 17), (1, 1), (1, 2), ((0, 0), (0, 0)), (1, 1), (1, 1)),
    ((30,), (4,), (1,), ((3, 0),), (3,), (1,)),
    ((3, 4, 5), (2, 1, 3), (1, 2, 1), ((0, 1), (0, 0), (1, 1)), (1, 1, 1), (1, 1, 1)),
]


@pytest.mark.few(28)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_groups_side_by_side(group: tuple[int, int, int], dtype: DType, target: Target) -> None:
    groups, channels, outputs = group
    rng = np.random.default_rng(0)
    for at, (sizes, kernel, stride, padding, dilation, spread) in enumerate(WINDOWS):
        window = ConvWindow(kernel, stride, dilation, spread)
        if not fits_beside(channels, outputs, groups, window, dtype, target):
            continue
        op = Conv(stride=stride, padding=padding, dilation=dilation, groups=groups, input_dilation=spread)
        x = rng.standard_normal((2, groups * channels, *sizes))
        w = rng.standard_normal((groups * outputs, channels, *kernel))
        exact = op.numpy(x, w)
        counts = exact.shape[2:]
        spec = plan_beside(
            2 * int(np.prod(counts)), groups, window, target, channels=channels, outputs=outputs, dtype=dtype,
            width=counts[-1] if at % 2 else None, pixel=groups * channels if at % 3 else 0,
        )  # fmt: skip
        result = run_beside(x.astype(dtype.np), w.astype(dtype.np), spec, counts, op)
        assert np.allclose(result, exact, atol=2e-4 if dtype is f32 else 1e-12), str(spec)


def test_which_groups_are_side_by_side() -> None:
    window = ConvWindow((3, 3), (1, 1), (1, 1), (1, 1))
    wide, narrow = Target.named("avx512"), Target.named("baseline")
    assert all(fits_beside(c, c, 8, window, f32, t) for c in (1, 2, 4, 8, 16) for t in (wide, narrow))
    assert not any(fits_beside(*case, window, f32, wide) for case in ((4, 4, 1), (12, 12, 8), (32, 32, 4), (8, 4, 8)))
    assert not fits_beside(4, 4, 8, window, i8, wide)
