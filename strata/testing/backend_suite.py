"""The suite that a backend must pass: every sample of every op, against NumPy in f64.

A backend's author runs it as `for case in cases(): run_case("my_device", case)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strata.core import DType, TensorType, as_dtype
from strata.mir import REGISTRY, Op, Sample, evaluate
from strata.runtime import CompiledGraph, Session
from strata.testing.check import build, claimed_dtypes, feeds, single_op_graph, type_of

TOLERANCE = {
    "f64": 1e-9,
    "c128": 1e-9,
    "f32": 2e-5,
    "c64": 2e-5,
    "f16": 4e-3,
    "bf16": 3e-2,
    "f8e4m3": 0.13,
    "f8e5m2": 0.26,
}


@dataclass(frozen=True)
class SampleCase:
    """One op on one sample in one dtype."""

    op: type[Op]
    sample: Sample
    number: int
    dtype: DType | None = None  # None: as the sample says

    @property
    def name(self) -> str:
        return f"{self.op.name}-{self.number}" + (f"-{self.dtype}" if self.dtype else "")

    def arrays(self) -> list[np.ndarray]:
        arrays = self.sample.arrays()
        if self.dtype is None:
            return arrays
        first = arrays[0].dtype
        return [a.astype(self.dtype.np) if a.dtype == first else a for a in arrays]


def cases(ops: list[type[Op]] | None = None) -> Iterator[SampleCase]:
    """Every sample of every op, and the first sample of each in all dtypes of its class that the op claims."""
    for cls in ops if ops is not None else REGISTRY.classes():
        for i, sample in enumerate(cls.samples()):
            yield SampleCase(cls, sample, i)
            if i == 0 and sample.inputs:
                first = as_dtype(sample.arrays()[0].dtype)
                for dtype in claimed_dtypes(cls):
                    same_kind = (dtype.is_float, dtype.is_int, dtype.is_complex) == (
                        first.is_float,
                        first.is_int,
                        first.is_complex,
                    )
                    if same_kind and dtype is not first and not dtype.is_bool:
                        yield SampleCase(cls, sample, i, dtype)


def compile_case(device: str, case: SampleCase) -> CompiledGraph:
    types = [type_of(a) for a in case.arrays()]
    return Session(device).compile(single_op_graph(build(case.op, case.sample), types))


def run_case(device: str, case: SampleCase) -> None:
    """Compile, run and compare; an AssertionError shows the numbers that disagree."""
    arrays = case.arrays()
    compiled = compile_case(device, case)
    op = build(case.op, case.sample)
    graph = single_op_graph(op, [type_of(a) for a in arrays])
    expected = evaluate(graph, feeds(arrays), wide=True)
    results = op.matched(compiled.run(feeds(arrays)), expected)
    for got, want, out in zip(results, expected, graph.results, strict=True):
        compare(got, want, out.type, case.name)


def compare(got: np.ndarray, want: np.ndarray, kind: TensorType, name: str) -> None:
    """Exact for integers and booleans; within the type's precision for floats, scaled by the largest value."""
    assert (got.shape, got.dtype) == (want.shape, kind.dtype.np), f"{name}: {kind}, got {got.dtype}{got.shape}"
    if not kind.dtype.is_inexact:
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=name)
        return
    tolerance = TOLERANCE[kind.dtype.name]
    finite = want[np.isfinite(want)]
    scale = max(1.0, float(np.max(np.abs(finite), initial=0.0)))
    np.testing.assert_allclose(got.astype(want.dtype), want, rtol=tolerance, atol=tolerance * scale, err_msg=name)
