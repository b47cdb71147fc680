"""Kernels for ops without a lowering, in the interpreter of kernels: no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.backends import ordering
from strata.backends.ordering import DIRECT, RUN, is_plain
from strata.backends.wgsl.overrides import own_phases
from strata.backends.wgsl.phases import phases_of_all
from strata.core import f32, f64, sym
from strata.kernel import Phases, interpret, verify_kernel
from strata.lir import Spacing
from strata.mir import REGISTRY, Op, Sample, as_tuple, run_op
from strata.ops.indexing.sorting import order_of
from strata.testing.check import build, type_of

SAMPLES = [(name, n, s) for name in ("sort", "argsort", "topk", "cummax", "cummin")
           for n, s in enumerate(REGISTRY[name].samples())]  # fmt: skip


def _run(phases: Phases, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    known = {f"in{i}": a for i, a in enumerate(arrays)}
    for kernel in phases.kernels:
        verify_kernel(kernel)
        results = interpret(kernel, [known[b.name] for b in kernel.inputs])
        known |= {b.name: r for b, r in zip(kernel.outputs, results, strict=True)}
    return [known[f"out{i}"] for i in range(sum(name.startswith("out") for name in known))]


@pytest.mark.parametrize(("name", "number", "sample"), SAMPLES, ids=[f"{a}-{b}" for a, b, _ in SAMPLES])
def test_phases_give_what_the_op_means(name: str, number: int, sample: Sample) -> None:
    op, arrays = build(REGISTRY[name], sample), sample.arrays()
    types = tuple(type_of(a) for a in arrays)
    phases = ordering.own_phases(op, types)
    assert phases is not None
    want = run_op(op, arrays, as_tuple(op.infer(*types)))
    for one, other in zip(_run(phases, arrays), want, strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))
    whole, made = phases_of_all(phases)
    assert whole.input_names == ("in0",)
    assert whole.output_names == tuple(f"out{i}" for i in range(len(want)))
    assert made.kernels


def made(name: str, *fields: Any) -> Op:
    cls: Any = REGISTRY[name]
    op: Op = cls(*fields)
    return op


@pytest.mark.parametrize("count", [DIRECT, DIRECT + 1, 4 * RUN, 5 * RUN + 7])
@pytest.mark.parametrize("descending", [False, True])
def test_long_rows_are_runs_that_are_merged(count: int, descending: bool, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (2, count)).astype(np.float32)  # many are equal
    x[0, rng.integers(0, count, 9)] = np.nan
    x[1, rng.integers(0, count, 9)] = -np.inf
    kind = type_of(x)
    order = order_of(x, 1, descending)
    for op, want in (
        (made("argsort", 1, descending, True), [order]),
        (made("sort", 1, descending, True), [np.take_along_axis(x, order, 1)]),
        (made("topk", 1, 5, descending), [np.take_along_axis(x, order, 1)[:, :5], order[:, :5]]),
    ):
        phases = ordering.own_phases(op, (kind,))
        assert phases is not None
        assert (len(phases.kernels) == 1) == (count <= DIRECT and op.name != "topk")
        for one, other in zip(_run(phases, [x]), want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_stays_on_the_host() -> None:
    argsort = build(REGISTRY["argsort"], REGISTRY["argsort"].samples()[0])
    assert own_phases(argsort, (f64[3, 4],)) is None  # shaders do not hold f64
    assert own_phases(argsort, (f32[3, 9999],)) is not None
    assert own_phases(argsort, (f32[3, sym("n", 1)],)) is None
    assert own_phases(build(REGISTRY["exp"], REGISTRY["exp"].samples()[0]), (f32[3],)) is None


def test_views_that_lie_in_order() -> None:
    assert is_plain(Spacing(0, (4, 1)), f32[3, 4])
    assert is_plain(Spacing(0, (9, 1)), f32[1, 4])
    assert not is_plain(Spacing(0, (1, 3)), f32[3, 4])
    assert not is_plain(Spacing(2, (4, 1)), f32[3, 4])
