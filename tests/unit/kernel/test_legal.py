"""Schedules that fit their kernel, and those that do not: the rules' own, the search's, and what anybody may write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.codegen.compile import compile_kernel, lower, lower_phases, machine_of
from strata.core import Target, sym
from strata.errors import CompileError
from strata.kernel import Changes, Kernel, check_schedule, interpret, parse_kernel, parse_schedule
from strata.mir import Graph

ROWS = """kernel @rows(x: f32[64, 48]) -> y: f32[64, 48] {
  axis i in 64
  axis j in 48
  axis r in 48
  %0 = x[i, j]
  %1 = x[i, r]
  %2 = exp(%1)
  %3 = sum %2 over r
  %4 = exp(%0)
  %5 = div(%4, %3)
  store y[i, j] = %5 over i, j
}
"""
COLUMNS = """kernel @columns(x: f32[40, 300]) -> y: f32[300] {
  axis j in 300
  axis r in 40
  %0 = x[r, j]
  %1 = sum %0 over r
  store y[j] = %1 over j
}
"""
TURNED = """kernel @turned(x: f32[40, 50]) -> y: f32[50, 40] {
  axis i in 50
  axis j in 40
  %0 = x[j, i]
  store y[i, j] = %0 over i, j
}
"""
NORMS = """kernel @norms(x: f32[64, 48]) -> y: f32[64, 48] {
  axis i in 64
  axis j in 48
  axis r in 48
  %0 = x[i, r]
  %1 = mul(%0, %0)
  %2 = sum %1 over r
  %3 = div(%1, %2)
  %4 = sum %3 over r
  %5 = x[i, j]
  %6 = div(%5, %4)
  store y[i, j] = %6 over i, j
}
"""
RUNNING = """kernel @running(x: f32[64, 48]) -> y: f32[64, 48] {
  axis i in 64
  axis j in 48
  axis r in 48
  %0 = x[i, r]
  %1 = sum %0 over r
  %2 = div(%0, %1)
  %3 = scan sum %2 over r through j
  store y[i, j] = %3 over i, j
}
"""
TEXTS = {"rows": ROWS, "columns": COLUMNS, "turned": TURNED, "norms": NORMS, "running": RUNNING}
REFUSED = {
    "rows: parallel 1 grain 0": "a grain is a positive number",
    "rows: parallel 9 grain 4": "1 loops can be handed out",
    "rows: parallel 1 grain 4; parallel 1 grain 8": "there is another one before it",
    "rows: vectorise 1 by 0": "lanes are a power of two",
    "rows: vectorise 1 by 7": "lanes are a power of two",
    "rows: vectorise 1 by 65536": "lanes are a power of two",
    "rows: vectorise 7 by 8": "there are 3 loops",
    "rows: vectorise 1 by 8; vectorise 1 by 16": "there is another one before it",
    "rows: tile 0 by 16 blocks 512 x 256": "not the last but one of the loops that are handed out",
    "turned: parallel 2 grain 1; tile 0 by 16 blocks 64 x 64": "does not run in vectors of this length",
    "turned: parallel 2 grain 1; vectorise 1 by 8; tile 0 by 8 blocks 0 x 64": "a block holds a square or more",
    "columns: exchange 0 by 8": "not a loop over elements that runs in vectors",
    "columns: vectorise 0 by 16; exchange 0 by 0": "steps are a power of two",
    "columns: vectorise 0 by 16; exchange 0 by 3": "steps are a power of two",
    "turned: vectorise 1 by 8; exchange 1 by 8": "no reduction inside",
    "rows: stage 2": "it is not a reduction",
    "rows: delay 0 beside 1": "in no row that ends with a loop",
    "rows: delay 1 beside 2": "not a reduction over the same row",
    "rows: delay 2 beside 9": "not a reduction over the same row",
    "norms: delay 2 beside 1": "a loop after it is not delayed",
    "norms: delay 3 beside 1; delay 2 beside 1": "the loop before it is delayed",
    "norms: delay 2 beside 2; delay 3 beside 2": "not a reduction over the same row",
    "norms: vectorise 1 by 8; vectorise 2 by 16; delay 2 beside 1; delay 3 beside 2": "vectors of the same length",
    "running: delay 2 beside 1": "goes through it in order",
    "rows: stagger 1": "not a loop over rows",
    "rows: vectorise 0 by 8; stagger 0": "not a loop over rows",
    "rows: stagger 9": "there are 3 loops",
    "columns: stagger 0": "go through each row several times",
    "running: stagger 0": "goes through its row in order",
    "norms: delay 2 beside 1; delay 3 beside 2; stagger 0": "loops of theirs are delayed",
    "rows: nontemporal x": "it is not an output",
    "rows: prefetch z along 1": "there is no such buffer",
}
TAKEN = (
    "rows: ",
    "rows: parallel 1 grain 3; vectorise 1 by 4; vectorise 2 by 64; stage 1; nontemporal y; delay 2 beside 1",
    "norms: vectorise 1 by 8; vectorise 2 by 8; vectorise 3 by 8; nontemporal y; delay 2 beside 1; delay 3 beside 2",
    "norms: vectorise 1 by 16; vectorise 2 by 8; vectorise 3 by 8; nontemporal y; delay 3 beside 1",
    "rows: vectorise 0 by 8",
    "rows: stagger 0",
    "norms: parallel 1 grain 3; vectorise 1 by 16; vectorise 3 by 4; nontemporal y; stagger 0",
    "rows: prefetch x along 1 ahead 100000000000",
    "columns: parallel 1 grain 37; vectorise 0 by 16; exchange 0 by 4",
    "turned: parallel 2 grain 1; vectorise 1 by 4; tile 0 by 4 blocks 4 x 8",
    "turned: parallel 2 grain 7",
)


@pytest.mark.parametrize("spelled", REFUSED)
def test_what_does_not_fit_is_refused(spelled: str) -> None:
    name, _, text = spelled.partition(": ")
    with pytest.raises(CompileError, match=REFUSED[spelled]):
        compile_kernel(parse_kernel(TEXTS[name]), None, parse_schedule(text))


@pytest.mark.parametrize("spelled", TAKEN)
@pytest.mark.parametrize("target", ["host", "baseline"])
def test_what_fits_is_right(spelled: str, target: str) -> None:
    name, _, text = spelled.partition(": ")
    kernel = parse_kernel(TEXTS[name])
    x = np.random.default_rng(0).standard_normal(kernel.inputs[0].type.static_shape).astype(np.float32)
    native = compile_kernel(kernel, Target.named(target), parse_schedule(text))
    assert str(native.lowered.schedule) == text
    np.testing.assert_allclose(native.run([x], threads=2)[0], interpret(kernel, [x])[0], rtol=1e-5)


def kernels() -> list[Kernel]:
    n = sym("n", 1, 4096)
    g = Graph("all")
    x, y, w = g.input("x", (n, 384)), g.input("y", (512, 1024)), g.param("w", (384,))
    large = g.input("large", (4096, 4096))
    outputs: list[Any] = [
        (x + 1).rms_norm(w), x.softmax(-1), x.sum(axis=0), y.sum(axis=1), y.T + 1.0, y.cumsum(axis=1), y.max(axis=0),
        st.ops.layer_norm(y), st.ops.concat([y, y * 2.0], axis=1), large.softmax(-1), large.T * 2.0, large.sum(axis=0),
        (y > 0).any(axis=1), st.ops.flip(y, 1), st.ops.argmax(y, axis=1),
    ]  # fmt: skip
    return list(st.CompilePipeline("cpu").compile(g.outputs(*outputs)).lir.kernels.values())


@pytest.mark.parametrize("target", ["host", "avx2", "baseline"])
def test_what_rules_and_searches_make_fits(target: str) -> None:
    level = Target.named(target)
    for kernel in kernels():
        for lowered in lower_phases(kernel, level)[0]:
            check_schedule(lowered.schedule, lowered.kernel, lowered.nest)
        first = lower(kernel, level)
        changes = Changes(first.kernel, first.nest, machine_of(level))
        near = list(changes(first.schedule))
        for schedule in dict.fromkeys([*near, *(s for one in near for s in changes(one))]):
            check_schedule(schedule, first.kernel, first.nest)
            assert parse_schedule(str(schedule)) == schedule
