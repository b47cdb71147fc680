"""Every op on its samples in every integer type, bool and complex type that it accepts: compiled is interpreted.

Integers are drawn at the extremes of their type, where they wrap. Integer and boolean results are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.core import ALL_DTYPES, DType, as_dtype
from strata.errors import StrataError
from strata.mir import REGISTRY, Graph, Op, evaluate
from strata.runtime import Session
from strata.testing.backend_suite import TOLERANCE
from strata.testing.check import build, feeds, single_op_graph, type_of

SAMPLES = 2  # of each op
DTYPES = [t for t in ALL_DTYPES if not t.is_float]
IN_ORDER = ("searchsorted",)  # the first operand is sorted: of others nothing is said
FURTHER = ("bool", "i4", "u4", "u8", "i64", "c64")  # types of the samples after the first
FACTORS = ("eig", "eigh", "svd", "qr", "lu", "schur")  # are not unique, and checked as products elsewhere
LEFT_OUT = (*FACTORS, "custom")  # of users' own code nothing is known


def numbers(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if dtype.is_complex:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype.np)
    low = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
    high = low + (1 << dtype.bits) - 1
    edges = np.array([low, low + 1, high, high - 1, high // 2, high // 3, 0, 1, 2, *([-1, -2] if low else [])], object)
    drawn = np.asarray(edges[rng.integers(len(edges), size=shape)])
    return drawn.astype(np.int8 if dtype.name == "i4" else dtype.np).astype(dtype.np)


def case(cls: type[Op], number: int, dtype: DType, rng: np.random.Generator) -> tuple[Graph, list[np.ndarray]] | None:
    """A graph of one op, and what it is fed; None where the op does not take the type."""
    sample = cls.samples()[number]
    given = sample.arrays()
    arrays = [numbers(dtype, a.shape, rng) if a.dtype == given[0].dtype else a for a in given]
    if cls.name in IN_ORDER:
        wide = np.complex128 if dtype.is_complex else np.uint64 if dtype.name == "u64" else np.int64
        arrays[0] = np.sort(arrays[0].astype(wide), -1).astype(arrays[0].dtype)
    try:
        return single_op_graph(build(cls, sample), [type_of(a) for a in arrays]), arrays
    except StrataError:
        return None


@pytest.mark.parametrize("cls", [c for c in REGISTRY.classes() if c.name not in LEFT_OUT], ids=lambda c: c.name)
def test_compiled_is_interpreted(cls: type[Op], rng: np.random.Generator) -> None:
    device = Session("cpu")
    for number in range(min(SAMPLES, len(cls.samples()))):
        for dtype in DTYPES if cls.samples()[number].inputs else []:
            found = case(cls, number, dtype, rng) if number == 0 or dtype.name in FURTHER else None
            if found is None:
                continue
            graph, arrays = found
            try:
                wants = evaluate(graph, feeds(arrays))
            except StrataError as error:
                with pytest.raises(type(error)):
                    device.compile(graph).run(feeds(arrays))
                continue
            for got, want in zip(device.compile(graph).run(feeds(arrays)), wants, strict=True):
                kind = as_dtype(want.dtype)
                name = f"{cls.name} {number} {dtype}"
                assert (got.dtype, got.shape) == (want.dtype, want.shape), name
                if not kind.is_inexact:
                    np.testing.assert_array_equal(got, want, err_msg=name)
                    continue
                mine, right = (a.astype(np.complex128) for a in (got, want))
                known = right[np.isfinite(right)]
                close, scale = TOLERANCE[kind.name], max(1.0, float(np.max(np.abs(known), initial=0.0)))
                np.testing.assert_allclose(mine, right, rtol=close, atol=close * scale, err_msg=name)


@pytest.mark.parametrize("name", ["pool_max", "pool_min"])
@pytest.mark.parametrize("dtype", [t for t in ALL_DTYPES if t.is_float and t.bits < 32], ids=str)
def test_borders_of_pools_lose_in_types_without_infinities(name: str, dtype: DType, rng: np.random.Generator) -> None:
    fields: dict[str, Any] = {"kernel": (3,), "stride": (1,), "padding": ((1, 1),), "dilation": (1,)}
    op = REGISTRY[name](**fields)
    x = rng.standard_normal((2, 9)).astype(dtype.np)
    graph = single_op_graph(op, [type_of(x)])
    (got,), (want,) = Session("cpu").compile(graph).run(feeds([x])), evaluate(graph, feeds([x]))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
