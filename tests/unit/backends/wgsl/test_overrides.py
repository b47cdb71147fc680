"""Kernels for ops without a lowering, in the interpreter of kernels: no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.backends.wgsl.overrides import MOST, is_plain, own_phases
from strata.backends.wgsl.phases import phases_of_all
from strata.core import f32, f64, sym
from strata.kernel import interpret, verify_kernel
from strata.lir import Spacing
from strata.mir import REGISTRY, Sample, as_tuple, run_op
from strata.testing.check import build, type_of

SAMPLES = [(name, n, s) for name in ("sort", "argsort", "topk", "cummax", "cummin")
           for n, s in enumerate(REGISTRY[name].samples()) if s.arrays()[0].dtype != np.float64]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "sample"), SAMPLES, ids=[f"{a}-{b}" for a, b, _ in SAMPLES])
def test_phases_give_what_the_op_means(name: str, number: int, sample: Sample) -> None:
    op, arrays = build(REGISTRY[name], sample), sample.arrays()
    types = tuple(type_of(a) for a in arrays)
    phases = own_phases(op, types)
    if name in ("cummax", "cummin") and types[0].dtype.is_bool:
        assert phases is None
        return
    assert phases is not None
    want = run_op(op, arrays, as_tuple(op.infer(*types)))
    known = {f"in{i}": a for i, a in enumerate(arrays)}
    for kernel in phases.kernels:
        verify_kernel(kernel)
        results = interpret(kernel, [known[b.name] for b in kernel.inputs])
        known |= {b.name: r for b, r in zip(kernel.outputs, results, strict=True)}
    for i, one in enumerate(want):
        np.testing.assert_array_equal(known[f"out{i}"].astype(np.float64), one.astype(np.float64))
    whole, made = phases_of_all(phases)
    assert whole.input_names == ("in0",)
    assert whole.output_names == tuple(f"out{i}" for i in range(len(want)))
    assert made.kernels


def test_what_stays_on_the_host() -> None:
    argsort = build(REGISTRY["argsort"], REGISTRY["argsort"].samples()[0])
    assert own_phases(argsort, (f64[3, 4],)) is None
    assert own_phases(argsort, (f32[3, MOST],)) is not None
    assert own_phases(argsort, (f32[3, MOST + 1],)) is None
    assert own_phases(argsort, (f32[3, sym("n", 1)],)) is None
    assert own_phases(build(REGISTRY["exp"], REGISTRY["exp"].samples()[0]), (f32[3],)) is None


def test_views_that_lie_in_order() -> None:
    assert is_plain(Spacing(0, (4, 1)), f32[3, 4])
    assert is_plain(Spacing(0, (9, 1)), f32[1, 4])
    assert not is_plain(Spacing(0, (1, 3)), f32[3, 4])
    assert not is_plain(Spacing(2, (4, 1)), f32[3, 4])
