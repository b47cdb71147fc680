"""Loops that go through much memory: stores past the caches, reads asked for ahead, reductions around vectors."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel, lower
from strata.backends.llvm.executor.thread_pool import default_pool
from strata.core import DType, Target, TensorType, bf16, c64, f16, f32, f64, i8, i32, sym
from strata.errors import CompileError
from strata.kernel import (
    Delay,
    Exchange,
    KernelBuilder,
    NonTemporal,
    Prefetch,
    Schedule,
    Stage,
    Stagger,
    apply,
    interpret,
    parse_schedule,
    walk_loops,
)
from tests.unit.kernel import samples

TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
ROWS, COLUMNS = sym("R", 0), sym("C", 0)


def actions(sample: samples.Sample, kind: type, target: Target | None = None) -> list[Any]:
    return [a for a in lower(sample.kernel, target or Target.host()).schedule.actions if isinstance(a, kind)]


def test_text_of_the_actions() -> None:
    text = "parallel 2 grain 64; vectorise 1 by 32; exchange 1 by 8; prefetch in0 along 1; nontemporal out0"
    schedule = parse_schedule(text)
    assert str(schedule) == text
    assert schedule.exchanged(1) == 8
    assert schedule.exchanged(0) == 0
    assert schedule.streams("in0", 1)
    assert not schedule.streams("in0", 0)
    text = "prefetch in0 along 2 ahead 1024; prefetch in1 along 2 ahead 4096 to 2"
    schedule = parse_schedule(text)
    assert str(schedule) == text
    assert schedule.asks(2) == [Prefetch("in0", 2, 1024), Prefetch("in1", 2, 4096, cache=2)]
    assert not schedule.streams("in0", 2)
    assert str(parse_schedule("delay 3 beside 2")) == "delay 3 beside 2"
    assert parse_schedule("delay 3 beside 2").delay(3) == Delay(3, 2)
    assert parse_schedule("delay 3 beside 2").delay(2) is None


def test_large_results_go_past_the_caches_and_small_ones_do_not() -> None:
    large = 4 * Target.host().l3_bytes // 4096
    assert actions(samples.softmax(large, 1024), NonTemporal) == [NonTemporal("y")]
    assert actions(samples.softmax(256, 1024), NonTemporal) == []
    assert actions(samples.softmax(ROWS, 1024), NonTemporal) == []


def test_large_sums_ask_ahead() -> None:
    rows = 16 * Target.host().l2_bytes // 4096
    assert actions(samples.reduction((rows, 1024), (1,)), Prefetch, Target.named("avx2")) == [Prefetch("x", 1)]
    if Target.host().vector_bytes == 64:
        assert actions(samples.reduction((rows, 1024), (1,)), Prefetch) == [Prefetch("x", 1, 1024, 2)]
    assert actions(samples.reduction((rows, 1024), (0,)), Prefetch) == [Prefetch("x", 0)]
    assert actions(samples.reduction((64, 1024), (1,)), Prefetch) == []


def test_what_is_read_beside_stores_past_the_caches_is_asked_for() -> None:
    """At once where it is one stream; several come into the second cache."""
    rows = 4 * Target.host().l3_bytes // 4096
    wide = Target.host().vector_bytes == 64
    forms: dict[str, tuple[Any, list[Prefetch]]] = {
        "work": (lambda x, y, w: apply("gelu", x * w), [Prefetch("x", 1, 640)]),
        "one": (lambda x, y, w: x * w, [Prefetch("x", 1, 512)]),
        "two": (lambda x, y, w: x * w + y, [Prefetch("x", 1, 512, 2), Prefetch("y", 1, 512, 2)]),
    }
    for name, (form, wanted) in forms.items():
        k = KernelBuilder(name)
        x, y, w = k.input("x", f32[rows, 1024]), k.input("y", f32[rows, 1024]), k.input("w", f32[1024])
        k.output("z", f32[rows, 1024], lambda ix, form=form, x=x, y=y, w=w: form(x[ix], y[ix], w[ix[1]]))
        schedule = lower(k.build(), Target.host()).schedule
        assert [a for a in schedule.actions if isinstance(a, NonTemporal)] == [NonTemporal("z")]
        assert [a for a in schedule.actions if isinstance(a, Prefetch)] == (wanted if wide else [])


def test_a_loop_with_work_to_do_asks_for_the_next_row() -> None:
    assert actions(samples.softmax(64, 1000), Prefetch) == [Prefetch("x", 2, 1000)]
    assert actions(samples.layernorm(64, 1000), Prefetch) == []


def test_loops_that_find_their_rows_in_a_cache_ask_for_rows_to_come() -> None:
    """Where they have much to do, or where there are several rows; short rows and rows that fill a cache are left."""
    rows = 16 * Target.host().l2_bytes
    ahead = lambda n: -(-8192 // (4 * n)) * n
    for columns in (768, 1000, 4097):
        asked = actions(samples.softmax(rows // (4 * columns), columns), Prefetch)
        assert asked == [Prefetch("x", 2, ahead(columns), 2)]
        asked = actions(samples.layernorm(rows // (4 * columns), columns), Prefetch)
        assert asked == [Prefetch("x", 2, ahead(columns), 2), Prefetch("residual", 3, ahead(columns), 2)]
    for columns in (250, Target.host().l2_bytes // 32):
        asked = actions(samples.softmax(rows // (4 * columns), columns), Prefetch)
        assert not [a for a in asked if a.cache == 2]
    light = lower(_centred(rows // 4096, 1024), Target.host()).schedule
    assert [a for a in light.actions if isinstance(a, Prefetch)] == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [5, 15, 16, 33, 100, 257])
def test_rows_that_are_asked_for(columns: int, target: str) -> None:
    """Hints go beyond the last row, and change no result."""
    text = (
        "parallel 1 grain 2; vectorise 1 by 32; vectorise 2 by 32; vectorise 3 by 32; stage 1; nontemporal z; "
        "prefetch x along 2 ahead 4096 to 2; prefetch y along 3 ahead 64"
    )
    native = compile_kernel(_residual(ROWS, columns), Target.named(target), parse_schedule(text))
    plain = compile_kernel(_residual(ROWS, columns), Target.named(target), parse_schedule(text.partition("; stage")[0]))
    a, b = (np.random.default_rng(i).standard_normal((7, columns)).astype(np.float32) for i in range(2))
    np.testing.assert_array_equal(native(a, b)[0], plain(a, b)[0])


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_one_element_have_no_loop_to_ask_for(target: str) -> None:
    """Their sums are written out: a schedule for loops inside is refused, and the chosen one is right."""
    kernel = _residual(ROWS, 1)
    with pytest.raises(CompileError, match="there are 1 loops"):
        compile_kernel(kernel, Target.named(target), parse_schedule("parallel 1 grain 2; vectorise 1 by 32"))
    a, b = (np.random.default_rng(i).standard_normal((7, 1)).astype(np.float32) for i in range(2))
    np.testing.assert_array_equal(compile_kernel(kernel, Target.named(target))(a, b)[0], interpret(kernel, [a, b])[0])


def _rows_kernel(name: str, rows: Any, columns: int, dtype: DType, inputs: int, value: Any) -> Any:
    """A kernel over rows of x, or of x + y; `value` makes an element from the builder, the row and the column."""
    k = KernelBuilder(name)
    views = [k.input(n, dtype[rows, columns]) for n in ("x", "y")[:inputs]]

    def element(index: Any) -> Any:
        def row(j: Any) -> Any:
            first, *others = (k.accumulate(v[index[0], j]) for v in views)
            return first + others[0] if others else first

        return k.cast(value(k, row, index[1]), dtype)

    k.output("z", dtype[rows, columns], element)
    return k.build()


def _residual(rows: Any, columns: int, dtype: DType = f32) -> Any:
    """(x + y less its mean) over its spread."""

    def value(k: KernelBuilder, row: Any, column: Any) -> Any:
        mean = k.reduce("sum", columns, row) / float(columns)
        spread = k.reduce("sum", columns, lambda j: (row(j) - mean) * (row(j) - mean))
        return (row(column) - mean) / spread

    return _rows_kernel("residual", rows, columns, dtype, 2, value)


def _spread(rows: Any, columns: int, dtype: DType = f32) -> Any:
    """The same of one array: nothing is worth keeping."""

    def value(k: KernelBuilder, row: Any, column: Any) -> Any:
        mean = k.reduce("sum", columns, row) / float(columns)
        return (row(column) - mean) / k.reduce("sum", columns, lambda j: (row(j) - mean) * (row(j) - mean))

    return _rows_kernel("spread", rows, columns, dtype, 1, value)


def _softmax(rows: Any, columns: int, dtype: DType = f32) -> Any:
    def value(k: KernelBuilder, row: Any, column: Any) -> Any:
        top = k.reduce("max", columns, row)
        total = k.reduce("sum", columns, lambda j: apply("exp", row(j) - top))
        return apply("exp", row(column) - top) / total

    return _rows_kernel("softmax", rows, columns, dtype, 1, value)


def _weighted(rows: Any, columns: int, dtype: DType = f32) -> Any:
    """x + y times its softmax: two loops keep what the last one needs."""

    def value(k: KernelBuilder, row: Any, column: Any) -> Any:
        top = k.reduce("max", columns, row)
        total = k.reduce("sum", columns, lambda j: apply("exp", row(j) - top))
        return row(column) * (apply("exp", row(column) - top) / total)

    return _rows_kernel("weighted", rows, columns, dtype, 2, value)


def _four(rows: Any, columns: int, dtype: DType = f32) -> Any:
    """Three reductions, each after the one before it."""

    def value(k: KernelBuilder, row: Any, column: Any) -> Any:
        top = k.reduce("max", columns, row)
        near = k.reduce("sum", columns, lambda j: apply("abs", row(j) - top)) + 1.0
        total = k.reduce("sum", columns, lambda j: (row(j) - top) * (row(j) - top) / near)
        return row(column) * near + total

    return _rows_kernel("four", rows, columns, dtype, 2, value)


def _centred(rows: Any, columns: int, dtype: DType = f32) -> Any:
    return _rows_kernel(
        "centred", rows, columns, dtype, 1, lambda k, row, column: row(column) - k.reduce("sum", columns, row)
    )


def test_rows_are_woven_together() -> None:
    """All of their loops, in vectors of one length, where registers are many; else, of rows whose results go past the
    caches, the last beside dear work."""
    rows, wide = 4 * Target.host().l3_bytes // 4, Target.host().vector_registers >= 32
    everything = [Delay(2, 1), Delay(3, 2)] if wide else []
    assert actions(samples.softmax(rows // 1024, 1024), Delay) == (everything or [Delay(3, 2)])
    assert actions(samples.softmax(rows // 1024, 1024), Delay, Target.named("avx2")) == [Delay(3, 2)]
    assert actions(samples.softmax(rows // 1000, 1000), Delay) == []  # no whole lines
    assert actions(samples.softmax(256, 1024), Delay) == everything
    assert actions(samples.softmax(256, 1024), Delay, Target.named("avx2")) == []
    assert actions(samples.softmax(256, 64), Delay) == []  # of one step alone
    assert actions(samples.layernorm(rows // 1024, 1024), Delay) == everything
    assert actions(samples.layernorm(rows // 1024, 1024), Delay, Target.named("avx2")) == []
    for columns in (16, 48, 80, 1040, 8192):
        schedule = lower(samples.layernorm(rows // columns, columns).kernel, Target.host()).schedule
        delays = [a for a in schedule.actions if isinstance(a, Delay)]
        assert not delays or len({schedule.lanes(n) for n in (1, 2, 3)}) == 1
    for columns, woven in ((1024, wide), (16384, wide), (32768, False)):  # of longer rows, few fit a core's own cache
        light = lower(_centred(rows // columns, columns), Target.host()).schedule
        assert [a for a in light.actions if isinstance(a, Delay)] == ([Delay(2, 1)] if woven else [])


def test_short_rows_that_caches_hold_are_staggered() -> None:
    """Where loops have little to do and keep nothing of a row, so that they would wait for each other's sums."""
    staggers = lambda rows, columns: lower(_squared(rows, columns), Target.host()).schedule.staggers(0)
    assert all(staggers(512, columns) for columns in (16, 64, 100, 300))
    assert not staggers(2, 64)  # rows
    assert not staggers(512, 4100)  # their sums take longer than waiting for them
    assert actions(samples.softmax(512, 64), Stagger) == []
    assert parse_schedule("stagger 3").actions == (Stagger(3),)


def _squared(rows: Any, columns: int) -> Any:
    """Rows less their means, over the sums of their squares."""
    k = KernelBuilder("squared")
    x = k.input("x", f32[rows, columns])
    mean = lambda i: k.reduce("sum", columns, lambda j: x[i, j])
    square = lambda i: k.reduce("sum", columns, lambda j: (x[i, j] - mean(i)) * (x[i, j] - mean(i)))
    k.output("z", f32[rows, columns], lambda ix: (x[ix] - mean(ix[0])) * square(ix[0]))
    return k.build()


def test_woven_rows_are_asked_for_far_ahead_and_again_near() -> None:
    """By the first loop that reads them, in each buffer a little further ahead; whole rows where others lie between."""
    if Target.host().vector_registers < 32:
        pytest.skip("rows are woven together where registers are many")
    rows = 4 * Target.host().l3_bytes // 4096
    asked = lambda name, loop, far, near: [Prefetch(name, loop, far, 2), Prefetch(name, loop, near)]
    assert actions(samples.softmax(rows, 1024), Prefetch) == asked("x", 1, 2304, 512)
    wanted = asked("x", 1, 2304, 512) + asked("residual", 1, 3072, 512)
    assert actions(samples.layernorm(rows, 1024), Prefetch) == wanted
    k = KernelBuilder("gated")
    x, y = k.input("x", f32[rows, 2, 1024]), k.input("y", f64[rows, 1024])
    total = lambda ix: k.cast(k.reduce("sum", 1024, lambda j: x[ix[0], 1, j]), f64)
    k.output("z", f64[rows, 1024], lambda ix: y[ix] * total(ix))
    schedule = lower(k.build(), Target.host()).schedule
    wanted = asked("x", 1, 3 * 2048, 512) + asked("y", 2, 1536, 256)
    assert [a for a in schedule.actions if isinstance(a, Prefetch)] == wanted


_ALL = "delay 2 beside 1; delay 3 beside 2"
DELAYED: dict[str, Any] = {  # a kernel, how many inputs it has, and what is done to its loops
    "softmax": (lambda c, t: _softmax(ROWS, c, t), 1, "stage 2; nontemporal z; delay 3 beside 2"),
    "softmax woven": (lambda c, t: _softmax(ROWS, c, t), 1, f"stage 2; nontemporal z; {_ALL}"),
    "softmax from anew": (lambda c, t: _softmax(ROWS, c, t), 1, f"nontemporal z; {_ALL}"),
    "residual": (lambda c, t: _residual(ROWS, c, t), 2, "stage 1; nontemporal z; delay 3 beside 1"),
    "residual woven": (lambda c, t: _residual(ROWS, c, t), 2, f"stage 1; nontemporal z; {_ALL}"),
    "weighted": (lambda c, t: _weighted(ROWS, c, t), 2, "stage 1; stage 2; nontemporal z; delay 3 beside 2"),
    "weighted woven": (lambda c, t: _weighted(ROWS, c, t), 2, f"stage 1; stage 2; nontemporal z; {_ALL}"),
    "centred": (lambda c, t: _centred(ROWS, c, t), 1, "nontemporal z; delay 2 beside 1"),
    "spread": (lambda c, t: _spread(ROWS, c, t), 1, f"nontemporal z; {_ALL}"),
    "softmax near": (lambda c, t: _softmax(ROWS, c, t), 1, f"stage 2; {_ALL}"),
    "softmax staggered": (lambda c, t: _softmax(ROWS, c, t), 1, "stage 2; stagger 0"),
    "residual staggered": (lambda c, t: _residual(ROWS, c, t), 2, "stage 1; stagger 0"),
    "weighted staggered": (lambda c, t: _weighted(ROWS, c, t), 2, "stage 1; stage 2; nontemporal z; stagger 0"),
    "centred staggered": (lambda c, t: _centred(ROWS, c, t), 1, "stagger 0"),
    "four loops": (lambda c, t: _four(ROWS, c, t), 2, f"stage 1; nontemporal z; {_ALL}; delay 4 beside 3"),
    "four, two": (lambda c, t: _four(ROWS, c, t), 2, "stage 1; nontemporal z; delay 3 beside 1; delay 4 beside 3"),
}


@pytest.mark.few(48)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [64, 320, 336, 100])  # the last two leave some of a step over: nothing is delayed
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_rows_at_any_place(name: str, columns: int, target: str) -> None:
    """Whatever the distance from what is read to what is stored, and however rows are handed out: the same bits."""
    _check_delayed(name, columns, target, f32)


@pytest.mark.parametrize("dtype", [f64, f16, bf16], ids=str)
@pytest.mark.parametrize("name", [n for n in DELAYED if "woven" in n or "four" in n])
def test_delayed_rows_of_any_type(name: str, dtype: DType) -> None:
    _check_delayed(name, 128, "host", dtype)


def _check_delayed(name: str, columns: int, target: str, dtype: DType) -> None:
    make, inputs, actions = DELAYED[name]
    kernel = make(columns, dtype)
    loops = len(list(walk_loops(lower(kernel, Target.named(target)).nest)))
    text = "; ".join(["parallel 1 grain 2", *(f"vectorise {n} by 32" for n in range(1, loops))])
    at_once = [a for a in actions.split("; ") if not a.startswith(("delay", "stagger"))]
    plain = compile_kernel(kernel, Target.named(target), parse_schedule("; ".join([text, *at_once])))
    hints = f"prefetch x along 1 ahead 2560 to 2; prefetch x along {loops - 1} ahead 96"
    native = compile_kernel(kernel, Target.named(target), parse_schedule(f"{text}; {actions}; {hints}"))
    for rows, apart in ((1, 0), (2, 64), (3, 4), (7, 256), (6, 2048), (7, 4032), (5, 512)):
        rng = np.random.default_rng(rows)
        arrays = [(3 * rng.standard_normal((rows, columns))).astype(dtype.np) for _ in range(inputs)]
        (wanted,) = plain(*arrays)
        memory = np.zeros(wanted.nbytes + 8192, np.uint8)
        place = arrays[0].ctypes.data // 64 * 64 + dtype.itemsize * columns + max(apart, dtype.itemsize * bool(apart))
        start = (place - memory.ctypes.data) % 4096
        out = memory[start : start + wanted.nbytes]
        block = native.arguments([*arrays, out], {"R": rows})
        for grain, threads in ((1, 1), (rows, 1), (3, 2), (4, 7)):
            out[:] = 0
            default_pool().parallel(native.address, ctypes.addressof(block), rows, grain, threads)
            assert out.tobytes() == wanted.tobytes()
        out[:] = 0
        assert not memory.any()


@pytest.mark.parametrize("rows", [3, 4, 37, 161])
@pytest.mark.parametrize("columns", [128, 192, 256, 1088])
def test_rows_that_are_woven_by_the_rules(columns: int, rows: int) -> None:
    """On a processor whose caches hold nothing of them, against sums in f64. Rows have whole steps of all chains."""
    target = replace(Target.host(), l2_bytes=64, l3_bytes=256)
    for name, dtype in (("softmax", f32), ("softmax", bf16), ("layernorm", f32)):
        sample = samples.softmax(rows, columns, dtype) if name == "softmax" else samples.layernorm(rows, columns)
        kernel, rng = sample.kernel, np.random.default_rng(rows)
        native = compile_kernel(kernel, target)
        assert target.vector_registers < 32 or any(isinstance(a, Delay) for a in native.lowered.schedule.actions)
        arrays = [(3 * rng.standard_normal(b.type.static_shape)).astype(b.dtype.np) for b in kernel.inputs]
        outputs = [_at_a_line(b.type.static_shape, b.dtype.np) for b in kernel.outputs]
        block = native.arguments([*arrays, *outputs], {})
        found = []
        for threads in (1, 2, 7):
            default_pool().parallel(native.address, ctypes.addressof(block), rows, native.lowered.grain, threads)
            found.append([a.tobytes() for a in outputs])
        assert found[0] == found[1] == found[2]
        wanted = sample.reference(*arrays)
        tolerance = 1e-2 if dtype is bf16 else 2e-5
        for a, b in zip(outputs, wanted if isinstance(wanted, (list, tuple)) else [wanted], strict=True):
            np.testing.assert_allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance)


def _sum_and_norm(rows: Any, columns: int) -> Any:
    """x + y, and that less its mean over its spread."""
    k = KernelBuilder("results")
    x, y = k.input("x", f32[rows, columns]), k.input("y", f32[rows, columns])
    total = k.view(f32[rows, columns], lambda ix: x[ix] + y[ix])

    def value(index: Any) -> Any:
        mean = k.reduce("sum", columns, lambda j: total[index[0], j]) / float(columns)
        spread = k.reduce("sum", columns, lambda j: (total[index[0], j] - mean) * (total[index[0], j] - mean))
        return (total[index] - mean) / spread

    k.output("s", f32[rows, columns], lambda ix: total[ix])
    k.output("z", f32[rows, columns], value)
    return k.build()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stage", ["stage 1; ", ""])
def test_woven_rows_with_several_results(stage: str, target: str) -> None:
    """Where all begin with a cache line; else rows are done one after the other. The same bits."""
    columns, rows = 320, 11
    text = f"parallel 1 grain 4; vectorise 1 by 32; vectorise 2 by 32; vectorise 3 by 32; {stage}nontemporal s"
    kernel = _sum_and_norm(ROWS, columns)
    plain = compile_kernel(kernel, Target.named(target), parse_schedule(text))
    native = compile_kernel(kernel, Target.named(target), parse_schedule(f"{text}; nontemporal z; {_ALL}"))
    arrays = [np.random.default_rng(i).standard_normal((rows, columns)).astype(np.float32) for i in range(2)]
    wanted = plain(*arrays)
    for places in ((0, 0), (0, 64), (64, 4), (4, 0), (512, 1024), (4032, 64)):
        memory = [_at_a_line((rows * columns + 2048,), np.float32) for _ in places]
        outputs = [m[place // 4 :][: rows * columns] for m, place in zip(memory, places, strict=True)]
        block = native.arguments([*arrays, *outputs], {"R": rows})
        for grain, threads in ((rows, 1), (4, 2), (2, 7)):
            for m in memory:
                m[:] = 0
            default_pool().parallel(native.address, ctypes.addressof(block), rows, grain, threads)
            assert [a.tobytes() for a in outputs] == [a.tobytes() for a in wanted]
            assert all(np.count_nonzero(m) == np.count_nonzero(a) for m, a in zip(memory, wanted, strict=True))


def test_several_results_of_a_row_go_past_the_caches_where_rows_are_woven() -> None:
    rows, wide = 4 * Target.host().l3_bytes // 4096, Target.host().vector_registers >= 32
    for target, past in ((Target.host(), wide), (Target.named("avx2"), False)):
        schedule = lower(_sum_and_norm(rows, 1024), target).schedule
        found = [a for a in schedule.actions if isinstance(a, (NonTemporal, Delay))]
        assert found == ([NonTemporal("s"), NonTemporal("z"), Delay(2, 1), Delay(3, 2)] if past else [])
    uneven = lower(_sum_and_norm(rows, 1000), Target.host()).schedule
    assert not [a for a in uneven.actions if isinstance(a, (NonTemporal, Delay))]
    k = KernelBuilder("two")  # no rows: each would have to begin with a line
    x = k.input("x", f32[rows, 1024])
    k.output("s", f32[rows, 1024], lambda ix: x[ix] + 1.0)
    k.output("z", f32[rows, 1024], lambda ix: x[ix] * 2.0)
    assert not [a for a in lower(k.build(), Target.host()).schedule.actions if isinstance(a, NonTemporal)]


def _at_a_line(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    memory = np.zeros(np.prod(shape) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + memory.size - 64].view(dtype).reshape(shape)


def test_values_of_other_types_wait_for_their_row() -> None:
    """Places, numbers of two parts, truth values and one number of a row, which later loops of it need."""
    k = KernelBuilder("mixed")
    x, c, s = k.input("x", f32[ROWS, 64]), k.input("c", c64[ROWS, 64]), k.input("s", f32[ROWS])

    def value(index: Any) -> Any:
        at = k.reduce("argmax", 64, lambda j: x[index[0], j])
        total = k.reduce("sum", 64, lambda j: c[index[0], j])
        near = k.reduce("sum", 64, lambda j: c[index[0], j] * k.cast(apply("lt", j, at), c64) - total)
        return c[index] * total + near * k.cast(s[index[0]], c64)

    k.output("z", c64[ROWS, 64], value)
    kernel = k.build()
    loops = len(list(walk_loops(lower(kernel, Target.host()).nest)))
    vectors = "; ".join(f"vectorise {n} by 16" for n in range(1, loops))
    delays = "; ".join(f"delay {n} beside {n - 1}" for n in range(2, loops))
    native = compile_kernel(kernel, None, parse_schedule(f"parallel 1 grain 9; {vectors}; nontemporal z; {delays}"))
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 64)).astype(np.float32), rng.standard_normal((2, 9, 64)).astype(np.float32)
    arrays = [a, (b[0] + 1j * b[1]).astype(np.complex64), rng.standard_normal(9).astype(np.float32)]
    out = _at_a_line((9, 64), np.complex64)
    block = native.arguments([*arrays, out], {"R": 9})
    default_pool().parallel(native.address, ctypes.addressof(block), 9, 9, 1)
    np.testing.assert_allclose(out, interpret(kernel, arrays)[0], rtol=1e-4, atol=1e-4)


def test_rows_that_meet_are_kept() -> None:
    """A sum of two rows that three loops go through is stored by the first."""
    native = compile_kernel(_residual(ROWS, 1000))
    assert [a for a in native.lowered.schedule.actions if isinstance(a, Stage)] == [Stage(1)]
    a, b = (np.random.default_rng(i).standard_normal((7, 1000)).astype(np.float32) for i in range(2))
    (got,) = native(a, b)
    total = a.astype(np.float64) + b
    away = total - total.mean(1, keepdims=True)
    np.testing.assert_allclose(got, away / (away * away).sum(1, keepdims=True), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_kept_around_reductions_of_their_elements(target: str) -> None:
    """A softmax of products: what is kept is computed after a loop of its own."""
    k = KernelBuilder("scores")
    q, keys, mask = k.input("q", f32[ROWS, 5]), k.input("keys", f32[5, 100]), k.input("mask", f32[ROWS, 100])

    def value(index: Any) -> Any:
        def score(j: Any) -> Any:
            return k.reduce("sum", 5, lambda d: q[index[0], d] * keys[d, j]) + mask[index[0], j]

        top = k.reduce("max", 100, score)
        total = k.reduce("sum", 100, lambda j: apply("exp", score(j) - top))
        return apply("exp", score(index[1]) - top) / total

    k.output("y", f32[ROWS, 100], value)
    native = compile_kernel(k.build(), Target.named(target))
    a, b, c = (np.random.default_rng(1).standard_normal(s).astype(np.float32) for s in ((9, 5), (5, 100), (9, 100)))
    (got,) = native(a, b, c)
    scores = np.exp(a.astype(np.float64) @ b + c)
    np.testing.assert_allclose(got, scores / scores.sum(1, keepdims=True), rtol=1e-4)


def test_columns_are_summed_row_by_row() -> None:
    assert actions(samples.reduction((500, 1000), (0,)), Exchange) == [Exchange(0, 8)]
    assert actions(samples.reduction((500, 16), (0,)), Exchange) == []  # a row is one register
    assert actions(samples.reduction((500, 1000), (1,)), Exchange) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f32, f64, i8, bf16, c64])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_past_the_caches_at_any_place(dtype: Any, shift: int, target: str) -> None:
    """Rows of odd lengths, at places that are no multiple of a vector."""
    k = KernelBuilder("copy")
    n = sym("n", 0)
    x = k.input("x", dtype[5, n])
    k.output("y", dtype[5, n], lambda ix: x[ix] + x[ix])
    schedule = parse_schedule("parallel 1 grain 64; vectorise 0 by 32; nontemporal y")
    native = compile_kernel(k.build(), Target.named(target), schedule)
    for length in (0, 1, 7, 31, 64, 100, 333):
        array = np.random.default_rng(0).integers(-9, 9, (5, length)).astype(dtype.np)
        memory = np.zeros(array.size + shift + 64, dtype.np)
        out = memory[shift : shift + array.size]
        block = native.arguments([array, out], {"n": length})
        default_pool().parallel(native.address, ctypes.addressof(block), array.size, 64, 2)
        assert out.tobytes() == (array + array).tobytes()
        assert not memory[:shift].any()
        assert not memory[shift + array.size :].any()


@pytest.mark.parametrize("target", TARGETS)
def test_rows_past_the_caches(target: str) -> None:
    sample = samples.softmax(ROWS, COLUMNS)
    text = (
        "parallel 1 grain 2; vectorise 1 by 32; vectorise 2 by 32; vectorise 3 by 32; nontemporal y; prefetch x along 1"
    )
    native = compile_kernel(sample.kernel, Target.named(target), parse_schedule(text))
    for columns in (1, 15, 16, 33, 100, 257):
        arrays = sample.arrays({"R": 7, "C": columns})
        (got,) = native(*arrays)
        np.testing.assert_allclose(got, sample.reference(*arrays), rtol=1e-5, atol=1e-6)


REDUCTIONS = [
    ("sum", f32), ("sum", f64), ("sum", c64), ("sum", i32), ("prod", f32), ("max", f32), ("min", i8), ("argmax", f32),
    ("argmin", i32),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kind", "dtype"), REDUCTIONS)
def test_reductions_around_vectors(kind: str, dtype: Any, target: str) -> None:
    sample = samples.reduction((ROWS, COLUMNS), (0,), kind, dtype)
    native = compile_kernel(
        sample.kernel, Target.named(target), parse_schedule("parallel 1 grain 64; vectorise 0 by 32; exchange 0 by 4")
    )
    for rows in (1, 3, 4, 9, 1030):
        for columns in (1, 16, 40, 131):
            arrays = sample.arrays({"R": rows, "C": columns})
            arrays = [(a * 0.5 + 1).astype(a.dtype) if kind == "prod" else a for a in arrays]
            with np.errstate(all="ignore"):
                (wanted,) = interpret(sample.kernel, arrays, {})
            expected = native(*arrays)
            for threads in (2, 7):
                (got,) = native.run(arrays, threads=threads)
                assert got.tobytes() == expected[0].tobytes()
            np.testing.assert_allclose(expected[0], wanted, rtol=1e-4, atol=1e-4)


def test_several_reductions_around_vectors() -> None:
    """Two at once, of a value that has loads of its own, in more columns than one block of running values has."""
    k = KernelBuilder("moments")
    x, shift = k.input("x", f32[ROWS, COLUMNS]), k.input("shift", f32[COLUMNS])

    def value(index: Any) -> Any:
        first = k.reduce("sum", (ROWS,), lambda r: x[r, index[0]] - shift[index])
        second = k.reduce("sum", (ROWS,), lambda r: (x[r, index[0]] - shift[index]) * (x[r, index[0]] - shift[index]))
        return k.sqrt(second) + first * shift[index]

    k.output("y", TensorType(f32, (COLUMNS,)), value)
    schedule = Schedule((*parse_schedule("parallel 1 grain 6000; vectorise 0 by 64").actions, Exchange(0, 8)))
    native = compile_kernel(k.build(), None, schedule)
    rng = np.random.default_rng(1)
    for rows, columns in ((1, 3000), (37, 5000), (2100, 70)):
        array, by = rng.normal(size=(rows, columns)).astype(np.float32), rng.normal(size=columns).astype(np.float32)
        (got,) = native(array, by)
        centred = array.astype(np.float64) - by
        wanted = np.sqrt((centred**2).sum(0)) + centred.sum(0) * by
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-2)


def test_parts_of_column_sums_are_whole_rows() -> None:
    """However many columns there are: a chunk goes through memory from its first row to its last."""
    k = KernelBuilder("parts")
    x = k.input("x", f32[64, 250, 1040])
    k.output("y", f32[64, 1040], lambda ix: k.reduce("sum", 250, lambda r: x[ix[0], r, ix[1]]))
    schedule = lower(k.build(), Target.host()).schedule
    assert schedule.parallel.loops == 2
    assert schedule.parallel.grain % 1040 == 0
