"""Functions of complex numbers at infinities, NaN, the largest and the smallest numbers: as NumPy (C99, Annex G)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata import ops
from strata.core import DType, c64, c128
from strata.mir import Graph
from strata.runtime import Session

FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp, "log": np.log, "log10": np.log10, "sqrt": np.sqrt, "abs": np.abs,
    "sign": np.sign, "square": np.square, "reciprocal": np.reciprocal,
}  # fmt: skip


def points(dtype: DType) -> np.ndarray:
    info = np.finfo(dtype.real.np)
    most, least, tiny = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    ends = [
        0.0,
        -0.0,
        1.5,
        -1.5,
        np.inf,
        -np.inf,
        np.nan,
        most,
        -most,
        most / 8,
        least,
        tiny,
        -tiny,
        95.0,
        800.0,
        -800.0,
    ]
    made = np.empty((len(ends), len(ends)), dtype.np)
    made.real, made.imag = np.array(ends)[:, None], np.array(ends)
    return made.reshape(-1)


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    info = np.finfo(b.dtype)
    near = np.abs(a - b) <= 8 * info.eps * np.maximum(np.abs(b), info.tiny)
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)) | (np.isfinite(a) & np.isfinite(b) & near))


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ends_of_the_plane(name: str, dtype: DType, device: str) -> None:
    z = points(dtype)
    graph = Graph("ends")
    graph.outputs(getattr(ops, name)(graph.input("x", z.shape, dtype)))
    (got,) = Session(device).compile(graph).run(x=z)
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name](z)
        good = same(got.real, want.real) & same(got.imag, want.imag)
    assert good.all(), [(z[i], got[i], want[i]) for i in np.nonzero(~good)[0]]


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
@pytest.mark.parametrize("name", ["multiply", "divide", "reciprocal", "square"])
def test_arithmetic_has_the_bits_of_numpy(name: str, dtype: DType, device: str) -> None:
    first, second = (z.reshape(-1) for z in np.meshgrid(points(dtype), points(dtype)))
    arrays = {"x": first, "y": second} if name in ("multiply", "divide") else {"x": first}
    graph = Graph("ends")
    graph.outputs(getattr(ops, name)(*(graph.input(key, z.shape, dtype) for key, z in arrays.items())))
    (got,) = Session(device).compile(graph).run(**arrays)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(*arrays.values())
    for part, wanted in ((got.real, want.real), (got.imag, want.imag)):
        assert np.array_equal(part, wanted, equal_nan=True)
        assert (np.isnan(wanted) | (np.signbit(part) == np.signbit(wanted))).all()


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
@pytest.mark.parametrize("name", ["sign", "square", "reciprocal", "multiply", "divide"])
def test_infinities_and_nan_on_xla(name: str, dtype: DType) -> None:
    """Numbers that are neither tiny nor huge, which XLA flushes to 0 or rounds in another order."""
    pytest.importorskip("jax")
    z = points(dtype)
    z = z[[all(x in (0, 1.5, -1.5) or not np.isfinite(x) for x in (v.real, v.imag)) for v in z]]
    first, second = (part.reshape(-1) for part in np.meshgrid(z, z))
    arrays = {"x": first, "y": second} if name in ("multiply", "divide") else {"x": z}
    graph = Graph("ends")
    graph.outputs(getattr(ops, name)(*(graph.input(key, a.shape, dtype) for key, a in arrays.items())))
    (got,) = Session("xla").compile(graph).run(**arrays)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(*arrays.values())
        assert (same(got.real, want.real) & same(got.imag, want.imag)).all()
