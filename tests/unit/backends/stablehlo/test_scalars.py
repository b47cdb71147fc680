"""Scalar functions as StableHLO, at the edges of their types, against the NumPy meaning of kernel IR."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from strata.backends.stablehlo.adapter import client
from strata.backends.stablehlo.build import StableHloBuilder, kind
from strata.backends.stablehlo.scalars import ROWS, scalar
from strata.core import ALL_DTYPES, DType, as_dtype, bool_, f32
from strata.kernel import SCALARS
from strata.kernel.scalars import bitcast_array, cast_array

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -2.5, 2.0, 3.0, -3.0, 7.25, 88.0, -88.0, 1e4, -3e4, 2.5e-3,
          np.inf, -np.inf, np.nan]  # fmt: skip
LARGE = [1e10, -1e10, 3e38, 2147483648.0, 4294967296.0, 9.3e18, -9.3e18, 255.5, 127.9, -128.9]
WIDE = {"gcd": 6, "pow": 6}  # functions whose oracle wants small numbers: |x| at most
ULPS = {"sin": 4, "cos": 4, "tan": 8, "pow": 16, "exp2": 8, "lgamma": 600, "erf": 8, "erfc": 64, "gelu": 64, "log2": 4,
        "acosh": 16, "atanh": 16, "asinh": 16, "sinh": 128, "cosh": 128, "asin": 8, "acos": 8, "atan": 8,
        "atan2": 8, "sigmoid": 8, "tanh": 8, "rsqrt": 4, "expm1": 8, "log1p": 8, "exp": 4, "log": 4, "div": 8,
        "sqrt": 8, "abs": 4, "mul": 4}  # fmt: skip
NARROW = {"add", "mul", "div", "floordiv", "mod", "min", "max", "exp", "sqrt", "round", "trunc", "sign",
          "copysign", "select", "eq", "lt", "neg", "abs", "signbit", "isnan", "isinf", "isfinite", "fma"}  # fmt: skip


def values_of(dtype: DType) -> np.ndarray:
    """Numbers at the edges of a type."""
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_complex:
        parts = [0.0, 1.0, -1.5, 0.25, 3.0]
        return np.array([complex(a, b) for a in parts for b in parts], dtype.np)
    if dtype.is_float:
        with np.errstate(all="ignore"):
            return np.array(FLOATS + (LARGE if dtype.bits >= 32 else [])).astype(dtype.np)
    low, high = (
        (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if dtype.kind == "int" else (0, (1 << dtype.bits) - 1)
    )
    near = [v for v in (-9, -5, -2, -1, 0, 1, 2, 3, 7, 8, 31, 33, 63, 64, 65) if low <= v <= high]
    return np.array([low, low + 1, *near, high - 1, high], np.int64 if low else np.uint64).astype(dtype.np)


def arguments(name: str, dtype: DType) -> list[np.ndarray]:
    """All pairs (or triples) of them."""
    function, values = SCALARS[name], values_of(dtype)
    if name in WIDE and dtype.is_int:
        values = values[np.abs(values.astype(np.float64)) <= WIDE[name]]
    if name == "select":
        grids = np.meshgrid(np.array([False, True]), values, values, indexing="ij")
    elif name == "fma":
        grids = np.meshgrid(values[:6], values[:6], values[:6], indexing="ij")
    else:
        grids = np.meshgrid(*[values] * function.arity, indexing="ij")
    return [g.reshape(-1) for g in grids]


def run_all(jobs: list[tuple[str, DType, list[np.ndarray]]]) -> list[np.ndarray]:
    """Functions on arrays, all of them in one module."""
    b = StableHloBuilder()
    arrays = [a for _, _, given in jobs for a in given]
    formals = [b.fresh(as_dtype(a.dtype), a.shape) for a in arrays]
    rest = iter(formals)
    outs = [scalar(b, name, dtype, [next(rest) for _ in given]) for name, dtype, given in jobs]
    head = ", ".join(f"{x.name}: {kind(x)}" for x in formals)
    kinds = ", ".join(map(kind, outs))
    body = "\n".join(b.lines)
    text = (
        f"module @m {{ func.func public @main({head}) -> ({kinds}) {{\n{body}\n"
        f"return {', '.join(x.name for x in outs)} : {kinds} }} }}"
    )
    loaded = client().place(0).load(text, "scalars")
    return [client().take(r) for r in client().run(loaded, [client().place(0).put(a) for a in arrays])]


def jobs_for(dtype: DType) -> Iterator[tuple[str, DType, list[np.ndarray]]]:
    for name, function in SCALARS.items():
        narrow = dtype.is_float and dtype.bits < 32  # computed in f32: how they get there and back is of interest
        if name in ("cast", "bitcast") or not function.takes(dtype) or (narrow and name not in NARROW):
            continue
        given = arguments(name, dtype)
        yield name, function.result_dtype(tuple(as_dtype(a.dtype) for a in given), dtype), given


def test_every_function_has_a_row() -> None:
    assert set(ROWS) == set(SCALARS) - {"cast", "bitcast"}


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_functions(dtype: DType) -> None:
    jobs = list(jobs_for(dtype))
    wrong = []
    for (name, result, given), got in zip(jobs, run_all(jobs), strict=True):
        with np.errstate(all="ignore"):
            wanted = np.asarray(SCALARS[name].numpy(*given)).astype(result.np)
        wrong += [f"{name}({', '.join(str(a[i]) for a in given)}) = {got[i]}, not {wanted[i]}"
                  for i in range(len(got)) if not agrees(name, result, got[i], wanted[i])]  # fmt: skip
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:40])


def agrees(name: str, dtype: DType, got: np.generic, wanted: np.generic) -> bool:
    if not dtype.is_inexact:
        return bool(got == wanted)
    if dtype.is_complex:
        a, b = complex(got), complex(wanted)
        if not np.isfinite(b):
            return not np.isfinite(a)
        return a == b or bool(abs(a - b) <= 64 * float(np.finfo(dtype.real.np).eps) * max(1.0, abs(b)))
    a, b = float(got), float(wanted)
    if np.isnan(b) or np.isnan(a):
        return bool(np.isnan(a) and np.isnan(b))
    tiny = 3e-308 if dtype.bits == 64 else 1.2e-38 if dtype.name != "f16" else 0.0  # flushed to zero
    if a == b or (abs(b) < tiny and abs(a) < tiny):
        return name in ("max", "min") or a != 0 or b != 0 or np.signbit(a) == np.signbit(b)
    if name == "lgamma" and abs(b) < 1:  # near its zeros what counts is the distance
        return abs(a - b) < (1e-6 if dtype.bits <= 32 else 1e-14)
    ulps = ULPS.get(name, 0) if dtype.bits >= 32 else 1 if name in ULPS else 0
    step = (
        abs(float(np.spacing(np.abs(wanted))))
        if dtype.bits >= 16 and dtype.name != "bf16"
        else abs(b) / (4 if dtype.bits == 8 else 128)
    )
    return abs(a - b) <= ulps * step


@pytest.mark.few(6)
@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
def test_casts(source: DType) -> None:
    given = values_of(source)
    targets = [t for t in ALL_DTYPES if t is not source]
    for target, got in zip(targets, run_all([("cast", t, [given]) for t in targets]), strict=True):
        with np.errstate(all="ignore"):
            wanted = cast_array(given, target)
        np.testing.assert_array_equal(
            got.astype(np.float64) if target.bits <= 16 and not target.is_bool else got,
            wanted.astype(np.float64) if target.bits <= 16 and not target.is_bool else wanted,
            err_msg=f"{source} to {target} of {given}",
        )


def test_bits_stay() -> None:
    given = values_of(f32)
    for target in (t for t in ALL_DTYPES if t.bits == 32 and t is not f32 and t is not bool_):
        (got,) = run_all([("bitcast", target, [given])])
        np.testing.assert_array_equal(got, bitcast_array(given, target))
