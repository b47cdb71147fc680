"""Every composition means what its own NumPy formula says: the two are written independently."""

from functools import partial

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.core import TensorType, as_dtype
from strata.mir import REGISTRY, Op, Sample, as_tuple, evaluate_values, placeholder, run_op
from strata.ops.base.elementwise import Elementwise
from tests.groups import check_all

COMPOSED = [
    cls
    for cls in REGISTRY.classes()
    if cls.decompose is not Op.decompose and cls.numpy not in (Op.numpy, Elementwise.numpy) and cls.pure
]


@pytest.mark.parametrize("cls", COMPOSED, ids=lambda c: c.name)
def test_decomposition_equals_numpy(cls: type[Op]) -> None:
    check_all((f"{cls.name}-{i}", partial(check, cls, sample)) for i, sample in enumerate(cls.samples()))


def check(cls: type[Op], sample: Sample) -> None:
    op, arrays = cls(**sample.fields), sample.arrays()
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    outs = as_tuple(op.decompose(*inputs))
    types = op.infer_types([x.type for x in inputs])
    assert tuple(x.type for x in outs) == types
    expected = run_op(op, arrays, types)
    for got, want in zip(evaluate_values(outs, dict(zip(inputs, arrays, strict=True)), {}), expected, strict=True):
        kind = as_dtype(got.dtype)
        tolerance = {16: 2e-2, 32: 2e-5}.get(kind.real.bits, 1e-10) if kind.is_inexact else 0
        np.testing.assert_allclose(
            got.astype(want.dtype), want, rtol=tolerance, atol=tolerance, err_msg=f"{cls.name} on {sample}"
        )
