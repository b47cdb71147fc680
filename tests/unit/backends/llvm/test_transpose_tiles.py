"""Transposes in squares: every type and instruction set, edges, places inside a line, thread counts."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import compile_kernel, emit_text, lower
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.backends.llvm.jit.isolate import is_unusual
from strata.core import Target, bf16, bool_, c64, f16, f32, f64, i8, i32, substitute, sym, u8
from strata.kernel import KernelBuilder, NonTemporal, Tile, interpret, parse_schedule
from tests.unit.kernel import samples

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
ROWS, COLUMNS = sym("R", 0), sym("C", 0)
SIZES = (1, 15, 16, 33, 100)


def tile_of(sample: samples.Sample) -> Tile | None:
    return lower(sample.kernel, Target.host()).schedule.tile


def test_text_of_a_tile() -> None:
    text = "parallel 2 grain 1; vectorise 1 by 16; tile 0 by 16 blocks 512 x 256"
    assert str(parse_schedule(text)) == text
    assert parse_schedule(text).tile == Tile(0, 16, 512, 256)


def test_which_kernels_are_turned() -> None:
    assert tile_of(samples.transpose((500, 300), (1, 0))) is not None
    assert tile_of(samples.transpose((20, 30, 40), (2, 1, 0))) is not None  # whatever is between the two axes
    assert tile_of(samples.transpose((20, 30, 40), (0, 2, 1))) is not None
    assert tile_of(samples.transpose((20, 30, 40), (1, 0, 2))) is None  # rows stay rows
    assert tile_of(samples.transpose((500, 3), (1, 0))) is None  # too narrow for a square


def test_narrow_transposes_have_narrow_squares() -> None:
    def width(shape: tuple[int, ...], order: tuple[int, ...]) -> int:
        tile = lower(samples.transpose(shape, order).kernel, Target.named("avx512")).schedule.tile
        return tile.by if tile is not None else 0

    assert width((500, 9), (1, 0)) == 8
    assert width((500, 300), (1, 0)) == 16
    assert width((8, 64, 64, 32), (3, 2, 1, 0)) == 8
    assert width((12, 32, 64, 64), (3, 2, 1, 0)) == 8
    assert width((32, 32, 32, 4), (3, 2, 1, 0)) == 4
    assert width((5, 6, 7, 8, 9), (4, 3, 2, 1, 0)) == 0  # most of every square would be outside


def test_small_elements_have_wide_squares() -> None:
    def width(dtype: Any, rows: int, columns: int) -> int:
        k = KernelBuilder("turn")
        x = k.input("x", dtype[rows, columns])
        k.output("y", dtype[columns, rows], lambda ix: x[ix[1], ix[0]])
        tile = lower(k.build(), Target.named("avx512")).schedule.tile
        return tile.by if tile is not None else 0

    assert [width(t, 300, 500) for t in (u8, f16, f32, f64)] == [32, 32, 16, 8]
    assert [width(t, 40, 40) for t in (u8, f16, f32)] == [16, 16, 16]  # wide ones would be half outside
    assert width(u8, 20, 300) == 16


@pytest.mark.parametrize("name", TARGETS)
def test_code_of_transposes_is_made_in_this_process(name: str) -> None:
    target = Target.named(name)
    made = lower(samples.transpose((4096, 4096), (1, 0)).kernel, target)
    assert made.schedule.tile is not None
    assert not is_unusual(emit_text([made], target), target)


def test_large_transposes_go_past_the_caches() -> None:
    rows = 4 * Target.host().l3_bytes // 4096
    schedule = lower(samples.transpose((rows, 1024), (1, 0)).kernel, Target.host()).schedule
    assert any(isinstance(a, NonTemporal) for a in schedule.actions)


@pytest.mark.few(18)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("past", ["", "; nontemporal y"])
@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16, i8, u8, i32, bool_, c64])
def test_squares_at_any_place(dtype: Any, past: str, target: str) -> None:
    """Arrays that begin inside a line, of sizes that are no multiple of a square."""
    k = KernelBuilder("turn")
    x = k.input("x", dtype[ROWS, COLUMNS])
    k.output("y", dtype[COLUMNS, ROWS], lambda ix: x[ix[1], ix[0]])
    size = Target.named(target).vector_bytes
    widest = max(4, min(32 if size == 64 else 16, size // dtype.itemsize))
    for by, wide, asks in ((widest, 1, ""), (widest, 2, " ahead 32 to 2"), (max(4, widest // 2), 1, ""), (4, 4, "")):
        schedule = parse_schedule(
            f"parallel 2 grain 1; vectorise 1 by {by * wide}; tile 0 by {by} blocks 32 x 64; "
            f"prefetch x along 0{asks}{past}"
        )
        _check_squares(compile_kernel(k.build(), Target.named(target), schedule), dtype)


def _check_squares(native: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for rows, columns, shift in [(r, c, s) for r in SIZES for c in SIZES for s in (0, 1, 5)]:
        source = np.zeros(rows * columns + shift, dtype.np)[shift:]
        source[:] = rng.integers(0, 2 if dtype is bool_ else 100, source.size).astype(dtype.np)
        memory = np.zeros(source.size + shift + 64, dtype.np)
        out = memory[shift : shift + source.size]
        sizes = {"R": rows, "C": columns}
        block = native.arguments([source, out], sizes)
        count = int(substitute(native.lowered.points, sizes))
        default_pool().parallel(native.address, ctypes.addressof(block), count, 1, 2)
        assert out.tobytes() == source.reshape(rows, columns).T.tobytes()
        assert not memory[:shift].any()
        assert not memory[shift + source.size :].any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(96, 70), (96, 128), (1024, 70)])  # rows that are short, and long ones
@pytest.mark.parametrize("wide", [1, 2])
def test_whole_lines_past_the_caches(target: str, shape: tuple[int, int], wide: int) -> None:
    """Rows of whole lines, at the start of a line and elsewhere."""
    k = KernelBuilder("turn")
    x = k.input("x", f32[shape])
    k.output("y", f32[shape[::-1]], lambda ix: x[ix[1], ix[0]])
    by = Target.named(target).lanes(4)
    schedule = parse_schedule(
        f"parallel 2 grain 1; vectorise 1 by {by * wide}; tile 0 by {by} blocks 32 x 32; prefetch x along 0; "
        "nontemporal y"
    )
    native = compile_kernel(k.build(), Target.named(target), schedule)
    source = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for shift in range(17):
        memory = np.zeros(source.size + 64, np.float32)
        out = memory[shift : shift + source.size]
        block = native.arguments([source, out], {})
        default_pool().parallel(native.address, ctypes.addressof(block), int(native.lowered.points), 1, 2)
        assert out.tobytes() == source.T.tobytes()
        assert not memory[:shift].any()
        assert not memory[shift + source.size :].any()


def test_blocks_of_large_transposes() -> None:
    """Pieces of rows are asked for block by block; where blocks have whole rows of the result, along the rows."""
    avx512 = Target.named("avx512")

    def chosen(*shape: int, target: Target = avx512) -> str:
        return str(lower(samples.transpose(shape, (1, 0)).kernel, target).schedule)

    rows = 2 * max(avx512.l3_bytes, 32 << 20) // 4096
    whole = "vectorise 1 by 32; tile 0 by 16 blocks 64 x 512; nontemporal y; prefetch x along 0"
    assert chosen(rows, 1024).endswith(whole)
    assert chosen(rows, 1000).endswith(whole)
    assert whole.replace("by 16", "by 8").replace("by 32", "by 16") in chosen(rows, 1024, target=Target.named("avx2"))
    assert chosen(1000, 4 * rows).endswith(whole.replace("by 32", "by 16"))  # rows of the result are no whole lines
    assert chosen(32 * rows, 32).endswith(whole.replace("by 32", "by 16").replace("64 x", "32 x"))
    along = "vectorise 1 by 32; tile 0 by 16 blocks 512 x 512; nontemporal y; prefetch x along 0 ahead 64 to 2"
    assert chosen(64, 16 * rows).endswith(along)
    near = "vectorise 1 by 16; tile 0 by 16 blocks 256 x 32; prefetch x along 0 ahead 32 to 2"
    assert chosen(128, 1024).endswith(near)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(3, 40, 130), (2, 130, 40), (5, 16, 16), (4, 33, 50), (7, 100, 20)])
@pytest.mark.parametrize("asks", ["", " ahead 16 to 2"])
def test_blocks_of_several_matrices(shape: tuple[int, ...], asks: str, target: str) -> None:
    """The block after the last one of a matrix is the first one of the next."""
    k = KernelBuilder("turn")
    batch, rows, columns = shape
    x = k.input("x", f32[shape])
    k.output("y", f32[batch, columns, rows], lambda ix: x[ix[0], ix[2], ix[1]] * 2)
    by = Target.named(target).lanes(4)
    schedule = parse_schedule(
        f"parallel 3 grain 1; vectorise 2 by {by}; tile 1 by {by} blocks {2 * by} x 32; prefetch x along 1{asks}"
    )
    native = compile_kernel(k.build(), Target.named(target), schedule)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wanted = np.ascontiguousarray(array.transpose(0, 2, 1) * 2)
    for threads in (1, 2, 7):
        (got,) = native.run([array], threads=threads)
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("target", TARGETS)
def test_squares_with_values_of_rows_and_columns(target: str) -> None:
    """A turned load beside one that is not, a value for each row and one for each column."""
    k = KernelBuilder("mixed")
    x, y = k.input("x", f32[ROWS, COLUMNS]), k.input("y", f32[COLUMNS, ROWS])
    row, column = k.input("row", f32[COLUMNS]), k.input("column", f32[ROWS])
    k.output("z", f32[COLUMNS, ROWS], lambda ix: (x[ix[1], ix[0]] + y[ix]) * row[ix[0]] + column[ix[1]])
    native = compile_kernel(k.build(), Target.named(target))
    assert native.lowered.schedule.tile is not None
    rng = np.random.default_rng(0)
    for rows, columns in [(r, c) for r in (0, *SIZES) for c in (0, *SIZES)]:
        shapes = (rows, columns), (columns, rows), (columns,), (rows,)
        arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        sizes = {"R": rows, "C": columns}
        (wanted,) = interpret(native.original, arrays, sizes)
        expected = native.run(arrays, sizes=sizes, threads=1)[0]
        np.testing.assert_allclose(expected, wanted, rtol=1e-6)
        for threads in (2, 7):
            (got,) = native.run(arrays, sizes=sizes, threads=threads)
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (2, 0, 1), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize("shape", [(17, 20, 33), (64, 2, 31), (2, 40, 16), (40, 40, 3), (8, 30, 7), (4, 5, 12)])
def test_every_order_of_three_axes(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    sample = samples.transpose(shape, order)
    (array,) = sample.arrays({})
    (got,) = compile_kernel(sample.kernel)(array)
    assert got.tobytes() == np.ascontiguousarray(array.transpose(order)).tobytes()


def test_a_transpose_into_a_given_array() -> None:
    g = st.Graph("turn")
    g.outputs(g.input("x", (48, 100)).transpose(1, 0) * 2)
    compiled = st.Session("cpu").compile(g)
    x = np.random.default_rng(0).standard_normal((48, 100)).astype(np.float32)
    memory = np.zeros(4801, np.float32)
    compiled.run_into({"x": x}, [memory[1:].reshape(100, 48)])
    assert memory[1:].tobytes() == (x.T * 2).tobytes()


@pytest.mark.parametrize("dtype", [f16, bf16, bool_, c64])
def test_what_only_moves_keeps_every_bit(dtype: Any) -> None:
    """NaN with any payload, in both halves of a result that is moved twice."""
    k = KernelBuilder("move")
    x, mask = k.input("x", dtype[40, 50]), k.input("mask", bool_[40])
    k.output("y", dtype[50, 40], lambda ix: x[ix[1], ix[0]])
    k.output("z", dtype[40, 50], lambda ix: x[ix])
    k.output("kept", bool_[40], lambda ix: mask[ix])
    native = compile_kernel(k.build())
    width = {1: np.uint8, 2: np.uint16, 8: np.uint64}[dtype.itemsize]
    bits = (
        np.random.default_rng(0)
        .integers(0, 2 if dtype is bool_ else 1 << (8 * dtype.itemsize - 2), (40, 50))
        .astype(width)
    )
    flags = np.arange(40) % 3 == 0
    turned, same, kept = native(bits.view(dtype.np), flags)
    assert turned.tobytes() == bits.T.tobytes()
    assert same.tobytes() == bits.tobytes()
    assert kept.tobytes() == flags.tobytes()


def test_what_is_computed_with_is_not_moved_as_bits() -> None:
    k = KernelBuilder("both")
    x = k.input("x", f16[40, 50])
    k.output("y", f16[50, 40], lambda ix: x[ix[1], ix[0]])
    k.output("z", f16[40, 50], lambda ix: x[ix] + x[ix])
    array = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float16)
    turned, double = compile_kernel(k.build())(array)
    assert turned.tobytes() == array.T.tobytes()
    assert double.tobytes() == (array + array).tobytes()
