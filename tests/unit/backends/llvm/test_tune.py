"""Schedules by measuring: whatever is tried gives the kernel's results, and what is found is found once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import compile_kernel, lower, machine_of
from strata.backends.llvm.codegen.compile_batch import template_of
from strata.backends.llvm.gemm.tiles import near_tiles
from strata.backends.llvm.runtime import tune
from strata.core import Target, f64, sym
from strata.errors import CompileError, ParseError
from strata.kernel import Changes, PoolTiles, Schedule, check_own_schedule, parse_schedule
from strata.lir import KEPT, Lir, Step, parse_module, show_module
from tests.unit.kernel import samples

SAMPLES = {
    "softmax": samples.softmax(sym("R"), 200),
    "softmax f64": samples.softmax(sym("R"), 77, f64),
    "layernorm": samples.layernorm(sym("R"), 129),
    "column_sum": samples.reduction((sym("R"), 300), (0,)),
    "row_sum": samples.reduction((sym("R"), 300), (1,)),
    "argmax": samples.reduction((sym("R"), 70), (1,), "argmax"),
    "merge_heads": samples.merge_heads(2, 3, sym("R"), 16),
    "concatenate": samples.concatenate(sym("R"), 40, 24),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_schedule_near_the_heuristics_gives_the_results(name: str) -> None:
    sample, target = SAMPLES[name], Target.host()
    lowered = lower(sample.kernel, target)
    changes = Changes(lowered.kernel, lowered.nest, machine_of(target))
    arrays = sample.arrays({"R": 37})
    expected = sample.reference(*arrays)
    tolerance = 1e-12 if sample.kernel.outputs[0].dtype == f64 else 2e-5
    for schedule in changes(lowered.schedule):
        native = compile_kernel(sample.kernel, target, schedule)
        for threads in (1, 2):
            outputs = native.run(arrays, threads=threads)
            for out, right in zip(outputs, expected if len(outputs) > 1 else [expected], strict=True):
                np.testing.assert_allclose(out, right, rtol=tolerance, atol=tolerance, err_msg=str(schedule))


def softmax_graph() -> st.Graph:
    g = st.Graph("rows")
    x = g.input("x", (64, 500), "f32")
    g.outputs(x.softmax(axis=-1), x.sum(axis=0))
    return g


def test_a_tuned_graph_gives_the_same_results_and_shows_its_schedules() -> None:
    x = np.random.default_rng(1).standard_normal((64, 500)).astype(np.float32)
    session = st.Session("cpu")
    plain = session.compile(softmax_graph())
    tuned = session.compile(softmax_graph(), st.CompileOptions(tune="beam"))
    for one, other in zip(plain.run(x=x), tuned.run(x=x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert all(k.schedule for k in tuned.lir.kernels.values())
    assert not any(k.schedule for k in plain.lir.kernels.values())
    assert parse_module(show_module(tuned.lir)).kernels == tuned.lir.kernels


def test_a_schedule_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = replace(samples.softmax(64, 333).kernel, name="kernel")
    found = tune.best_schedule(kernel, Target.host())
    assert found is not None
    assert found.trials > 1
    assert found.seconds <= found.before

    def refuse(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(tune, "_search", refuse)
    assert tune.best_schedule(kernel, Target.host()) == found


def test_a_candidate_with_other_results_is_refused() -> None:
    bench = tune._Bench(samples.softmax(8, 64).kernel, Target.host(), 1)
    schedule = lower(bench.kernel, bench.target).schedule
    (first,) = bench.measure([schedule])
    assert first is not None
    assert bench.expected is not None
    bench.expected[0][0, 0] += 1
    assert bench.measure([schedule]) == [None]


def test_empty_kernels_keep_their_schedules() -> None:
    g = st.Graph("empty")
    x = g.input("x", (32, 48), "f32")
    g.outputs(x.reshape((32 * 48,))[:0].exp())
    lir = st.CompilePipeline("cpu", st.CompileOptions(tune="beam")).compile(g).lir
    assert not any(k.schedule for k in lir.kernels.values())


# -------------------------------------------------------------------------------------------------------- templates


def _step_of(kind: str) -> tuple[Lir, Step]:
    g = st.Graph(kind)
    if kind == "pool":
        x = g.input("x", (3, 5, 24, 40))
        g.outputs(st.ops.max_pool2d(x, 3, 2, 1) * 2.0)
    elif kind == "conv":
        x, w = g.input("x", (1, 16, 12, 20)), g.param("w", (24, 16, 3, 3))
        g.outputs(st.ops.conv2d(x, w, padding=1).relu())
    else:
        m = st.sym("m", 1, 300) if kind == "open" else 70
        x, w = g.input("x", (m, 90)), g.param("w", (90, 100))
        g.outputs((x @ w).gelu())
    lir = st.CompilePipeline("cpu").compile(g).lir
    found = [s for s in lir.schedule if _first(lir, s) is not None]
    return lir, found[0]


def _first(lir: Lir, step: Step) -> Any:
    if step.kernel is None:
        return None
    kept = [b for b, x in zip(step.kernel.input_names, step.inputs, strict=True) if lir.buffer(x).role in KEPT]
    return template_of(step.kernel, Target.host(), step, frozenset(kept), step.convolves)


@pytest.mark.parametrize("kind", ["matmul", "open", "conv", "pool"])
def test_tiles_near_the_heuristics_give_the_same_bits(kind: str) -> None:
    lir, step = _step_of(kind)
    first, registers = _first(lir, step)
    bench = tune._StepBench(tune.step_alone(lir, step), Target.host(), 2)
    assert bench.measure([Schedule((first,))]) != [None]
    if isinstance(first, PoolTiles):
        near = [PoolTiles(1, 2), PoolTiles(1, 5), PoolTiles(2, 12)]
    else:
        near = list(dict.fromkeys(near_tiles(first, registers)))[::3]
    tried = [one for one in near if bench._ready(Schedule((one,))) is not None]
    assert len(tried) >= 3, "most of what is near fits"
    for one in tried:
        assert parse_schedule(str(Schedule((one,)))).actions == (one,)
    unfit = [one for one in near if one not in tried]
    for one in unfit:  # refused because it does not fit, not because its bits differ
        with pytest.raises((CompileError, AssertionError)):
            bench._made(Schedule((one,)))


def test_a_plan_with_searched_tiles_reads_back_and_has_the_bits_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_is_fastest(self: Any, runs: Any, rounds: int = 1) -> dict[int, float]:
        return {at: 1.0 / (at + 2) for at in runs}

    def first_is_fastest(self: Any, one: Schedule, other: Schedule) -> tuple[float, float]:
        return 1.0, 2.0

    monkeypatch.setattr(tune._Bench, "_times", last_is_fastest)
    monkeypatch.setattr(tune._Bench, "compare", first_is_fastest)
    g = st.Graph("searched")
    x, w = g.input("x", (75, 96)), g.param("w", (96, 130))
    g.outputs((x @ w).relu())
    plain, tuned = (st.Session("cpu").compile(g, st.CompileOptions(tune=how)) for how in ("heuristic", "beam"))
    (kernel,) = tuned.lir.kernels.values()
    assert kernel.schedule.startswith("matmul tile ")
    assert parse_module(show_module(tuned.lir)) == tuned.lir
    rng = np.random.default_rng(0)
    x0, w0 = rng.random((75, 96), np.float32), rng.random((96, 130), np.float32)
    for compiled in (plain, tuned):
        compiled.set_param("w", w0)
    assert (plain.run(x=x0)[0] == tuned.run(x=x0)[0]).all()


def test_tiles_that_do_not_fit_are_refused() -> None:
    lir, step = _step_of("matmul")
    first, _ = _first(lir, step)
    bench = tune._StepBench(tune.step_alone(lir, step), Target.host(), 1)
    for change in ({"rows": 0}, {"panels": 0}, {"rows": 1 << 20}, {"k_block": 3}, {"vectors": 99}):
        with pytest.raises(CompileError, match="does not fit"):
            bench._made(Schedule((replace(first, **change),)))
    with pytest.raises(CompileError, match="it is of a template, and this kernel is loops"):
        check_own_schedule(replace(samples.softmax(8, 64).kernel, schedule=str(first)))
    with pytest.raises(ParseError, match="stands alone"):
        parse_schedule(f"{first}; parallel 1 grain 1")


def test_random_values_stay_inside_what_they_index() -> None:
    kernel = samples.gather(50, 20, 8).kernel
    assert tune._index_buffers(kernel) == {b.name for b in kernel.inputs if b.dtype.is_int}
    found = tune.best_schedule(kernel, Target.host())
    assert found is None or found.seconds > 0
