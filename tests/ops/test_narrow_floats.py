"""Functions of one operand in f16 and bf16: rounded once, from what they are in f64."""

from __future__ import annotations

import numpy as np
import pytest

from strata.core import DType, bf16, f16
from strata.mir import REGISTRY, Graph, Op
from strata.ops.elementwise.math import Math
from strata.runtime import Session
from strata.testing.check import build

SMALL = 1e-3  # what is below may be a difference of larger numbers
EPSILON = {f16: 2.0**-10, bf16: 2.0**-7}
NUMBERS = np.concatenate([np.linspace(-6, 6, 1001), np.linspace(0, 1, 257)])
FUNCTIONS = [cls for cls in REGISTRY.classes() if issubclass(cls, Math)]


def of_one(cls: type[Op]) -> Op | None:
    """The op as a sample of one float operand has it."""
    for sample in cls.samples():
        arrays = sample.arrays()
        if len(arrays) == 1 and arrays[0].dtype == np.float32:
            return build(cls, sample)
    return None


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda c: c.name)
def test_rounded_once(cls: type[Op], dtype: DType) -> None:
    op = of_one(cls)
    if op is None:
        return
    x = NUMBERS.astype(dtype.np)
    g = Graph("narrow")
    g.outputs(op(g.input("x", dtype[x.shape])))
    found = Session("cpu").compile(g).run({"x": x})[0]
    if found.dtype != x.dtype:
        return
    with np.errstate(all="ignore"):
        true = np.asarray(op.numpy(x.astype(np.float64)))
    seen = np.isfinite(true) & (np.abs(true) > SMALL) & (np.abs(true) < 6e4)
    unit = 2.0 ** np.floor(np.log2(np.abs(true[seen]))) * EPSILON[dtype]
    assert np.max(np.abs(found[seen].astype(np.float64) - true[seen]) / unit, initial=0) <= 0.6
