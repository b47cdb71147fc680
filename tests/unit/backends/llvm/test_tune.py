"""Schedules by measuring: whatever is tried gives the kernel's results, and what is found is found once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen import tune
from strata.backends.llvm.codegen.compile import compile_kernel, lower, machine_of
from strata.core import Target, f64, sym
from strata.kernel import Changes
from strata.lir import parse_module, show_module
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


def test_products_and_empty_kernels_keep_their_schedules() -> None:
    g = st.Graph("mixed")
    x, w = g.input("x", (32, 48), "f32"), g.param("w", (48, 16), "f32")
    g.outputs((x @ w).relu(), x.reshape((32 * 48,))[:0].exp())
    lir = st.CompilePipeline("cpu", st.CompileOptions(tune="beam")).compile(g).lir
    assert not any(k.schedule for k in lir.kernels.values())


def test_random_values_stay_inside_what_they_index() -> None:
    kernel = samples.gather(50, 20, 8).kernel
    assert tune._index_buffers(kernel) == {b.name for b in kernel.inputs if b.dtype.is_int}
    found = tune.best_schedule(kernel, Target.host())
    assert found is None or found.seconds > 0
