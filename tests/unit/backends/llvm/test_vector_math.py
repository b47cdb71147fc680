"""The stated error bounds: at most 2 ulp in f32 (against f64), at most 4 in f64 (against 40 digits)."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import DType, Target, f32, f64, sym
from strata.kernel import SCALARS, KernelBuilder, apply

RANGES = {
    "exp": (-104, 89), "exp2": (-150, 128), "expm1": (-20, 89), "log": (0, 100), "log2": (0, 100), "log1p": (-1, 100),
    "sin": (-3000, 3000), "cos": (-3000, 3000), "tan": (-20000, 20000), "asin": (-1, 1), "acos": (-1, 1),
    "atan": (-50, 50),
    "sinh": (-88, 88), "cosh": (-88, 88), "tanh": (-10, 10), "asinh": (-50, 50), "acosh": (1, 50), "atanh": (-1, 1),
    "erf": (-5, 5), "erfc": (-5, 9), "sigmoid": (-100, 100), "sqrt": (0, 100), "rsqrt": (0, 100),
}  # fmt: skip
EDGES = (0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, -1e-40, 88.7, -87.5, -104, 710, -746, 1e30, -1e30, 1e5, 1e10)
TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]


def points(name: str, dtype: DType, count: int) -> Any:
    rng = np.random.default_rng(7)
    low, high = RANGES[name]
    wide, narrow = rng.uniform(low, high, count), rng.uniform(low, high, count) / 100
    huge = np.exp(rng.uniform(-80, 80, count // 4)) * rng.choice([-1, 1], count // 4)
    return np.concatenate([EDGES, wide, narrow, huge]).astype(dtype.np)


def native(name: str, dtype: DType, target: str, x: Any) -> Any:
    k = KernelBuilder("k")
    view = k.input("x", dtype[sym("n")])
    k.output("y", dtype[sym("n")], lambda ix: apply(name, view[ix[0]]))
    return compile_kernel(k.build(), Target.named(target))(x)[0]


def check_specials(x: Any, got: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    infinite = np.isinf(got) | np.isinf(wanted)
    np.testing.assert_array_equal(got[infinite], wanted[infinite])
    zero = (wanted == 0) & (got == 0)
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]), err_msg=str(x[zero]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RANGES)
def test_single(name: str, target: str) -> None:
    x = points(name, f32, 20000)
    got = native(name, f32, target, x)
    exact = np.asarray(SCALARS[name].numpy(x.astype(np.float64)))
    with np.errstate(over="ignore"):
        wanted = exact.astype(np.float32)
    check_specials(x, got, wanted)
    finite = np.isfinite(got) & np.isfinite(wanted)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(wanted[finite]))
    worst = int(error.argmax())
    assert error.max() <= 2.0, f"{error.max():.2f} ulp at {x[finite][worst]!r}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "exp", "erf"])
def test_single_densely(name: str, target: str) -> None:
    """Every 127th number between 2^-7 and 88: errors peak where few random numbers are, as below a power of two."""
    ends = np.float32([2.0**-7, 88]).view(np.uint32)
    x = np.arange(ends[0], ends[1], 127, np.uint32).view(np.float32)
    x = np.concatenate([x, -x])
    exact = np.asarray(SCALARS[name].numpy(x.astype(np.float64)))
    wanted = np.maximum(np.abs(exact), np.finfo(np.float32).tiny).astype(np.float32)  # below it, a place has one size
    error = np.abs(native(name, f32, target, x) - exact) / np.spacing(wanted)
    worst = int(error.argmax())
    assert error[worst] <= 2.0, f"{error[worst]:.2f} ulp at {x[worst]!r}"


@pytest.mark.parametrize("target", TARGETS)
def test_gelu(target: str) -> None:
    """x Φ(x) is as exact as on the positive side: where Φ is small, it is a small difference."""
    rng = np.random.default_rng(3)
    near = rng.uniform(-6.5, 6.5, 60000), rng.uniform(-0.1, 0.1, 20000), np.arange(-48, 49) * 0.125
    huge = np.exp(rng.uniform(-80, 80, 5000)) * rng.choice([-1, 1], 5000)
    x = np.concatenate([EDGES, *near, huge]).astype(np.float32)
    got = native("gelu", f32, target, x)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.asarray(SCALARS["gelu"].numpy(x.astype(np.float64)))
        scale = np.maximum(np.abs(exact), np.abs(exact - x)).astype(np.float32)  # gelu(-x) is gelu(x) - x
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))
    finite = np.isfinite(x)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(scale[finite])
    worst = int(error.argmax())
    assert error.max() <= 2.0, f"{error.max():.2f} ulp at {x[finite][worst]!r}"
    assert (np.sign(got[finite]) * np.sign(x[finite]) >= 0).all()
    assert got[np.isposinf(x)] == np.inf


@pytest.mark.parametrize("name", RANGES)
def test_double(name: str) -> None:
    x = points(name, f64, 300)
    got = native(name, f64, "host", x)
    check_specials(x, got, np.asarray(SCALARS[name].numpy(x)))
    with mpmath.workdps(40):
        for point, value in zip(x, got, strict=True):
            if np.isfinite(value) and np.isfinite(point):
                exact = _exact(name, mpmath.mpf(float(point)))
                spacing = float(np.spacing(abs(float(exact)))) or 5e-324
                assert abs(mpmath.mpf(float(value)) - exact) <= 4 * spacing, (point, value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["asinh", "acosh"])
def test_double_of_all_sizes(name: str, target: str) -> None:
    """Small, near 1, large and around the border from where a root is its argument; the C library has long doubles."""
    rng = np.random.default_rng(2)
    sizes = np.exp2(
        np.concatenate([rng.uniform(-1074, 1023, 9000), rng.uniform(-45, 35, 20000), rng.uniform(-3, 4, 20000)])
    )
    border = 2.0**27 * (1 + rng.uniform(-1, 1, 3000) * 1e-6)
    x = np.concatenate([sizes, border, 1 + sizes, [0.0, np.inf, np.nan, 1.0, np.nextafter(1, 2), 5e-324]])
    x = np.concatenate([x, -x]) if name == "asinh" else x[~(x < 1)]
    got = native(name, f64, target, x)
    exact = (np.arcsinh if name == "asinh" else np.arccosh)(x.astype(np.longdouble))
    check_specials(x, got, exact.astype(np.float64))
    finite = np.isfinite(x)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(exact[finite].astype(np.float64)))
    worst = int(error.argmax())
    assert error[worst] <= 4.0, f"{error[worst]:.2f} ulp at {x[finite][worst]!r}"


def _exact(name: str, x: Any) -> Any:
    match name:
        case "sigmoid":
            return 1 / (1 + mpmath.exp(-x))
        case "rsqrt":
            return 1 / mpmath.sqrt(x)
        case "exp2":
            return mpmath.mpf(2) ** x
        case "log2":
            return mpmath.log(x) / mpmath.log(2)
        case _:
            return getattr(mpmath, name)(x)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", ["pow", "atan2", "rem", "mod"])
def test_two_arguments(name: str, dtype: DType, target: str) -> None:
    """Numbers of all sizes, near ones, and every pair of special ones; remainders are exact."""
    rng = np.random.default_rng(5)
    wide = np.exp(rng.uniform(-40, 40, (2, 3000))) * rng.choice([-1, 1], (2, 3000))
    near = rng.standard_normal((2, 3000)) * [[10], [3]]
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2, -2, 0.5, 3, -3, 1e-45, 7.5, 1e30])
    pairs = np.stack([np.repeat(special, special.size), np.tile(special, special.size)])
    x, y = np.concatenate([wide, near, np.abs(near), pairs], axis=1).astype(dtype.np)
    k = KernelBuilder("k")
    a, b = (k.input(n, dtype[sym("n")]) for n in "xy")
    k.output("z", dtype[sym("n")], lambda ix: apply(name, a[ix[0]], b[ix[0]]))
    (got,) = compile_kernel(k.build(), Target.named(target))(x, y)
    is_exact = name in ("rem", "mod")
    with np.errstate(all="ignore"):
        exact = np.asarray(SCALARS[name].numpy(*(v if is_exact else v.astype(np.float64) for v in (x, y))))
        wanted = exact.astype(dtype.np)
    check_specials(x, got, wanted)
    finite = np.isfinite(got) & np.isfinite(wanted)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(wanted[finite]))
    assert error.max() <= (0.0 if is_exact else 2.0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*(name for name in RANGES if name not in ("sin", "cos", "tan")), "lgamma"])
def test_numbers_of_all_sizes(name: str, target: str) -> None:
    """Every 32749th number of f32, denormals and NaN among them, and the borders between ways to compute."""
    bits = np.arange(5, 1 << 32, 32749, dtype=np.uint64).astype(np.uint32)
    borders = np.array([0.25, 0.36, 0.5, 0.6, 0.75, 1, 1.0625, 1.5, 9, 10, 4096, 2**24, 2**64, 3.4e38], np.float32)
    near = (borders.view(np.uint32)[:, None] + np.arange(-3, 4)).astype(np.uint32).ravel()
    x = np.concatenate([bits, near, near ^ np.uint32(1 << 31)]).view(np.float32)
    got = native(name, f32, target, x)
    with np.errstate(all="ignore"):
        exact = np.asarray(SCALARS[name].numpy(x.astype(np.float64)))
        wanted = exact.astype(np.float32)
    check_specials(x, got, wanted)
    finite = np.isfinite(got) & np.isfinite(wanted)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(wanted[finite]))
    worst = int(error.argmax())
    assert error[worst] <= 2.0, f"{error[worst]:.2f} ulp at {x[finite][worst]!r}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_hard_powers(dtype: DType, target: str) -> None:
    """Results that are denormal or near overflow, bases near 1 with huge exponents, negative bases with whole ones."""
    rng = np.random.default_rng(11)
    count = 30000
    least, most, digits = (-149, 128, 23) if dtype is f32 else (-1074, 1024, 52)
    anywhere = np.exp2(rng.uniform(least, most, count))
    near_one = 1 + rng.uniform(-1, 1, count) * np.exp2(rng.uniform(-digits, -1, count))
    bases = np.concatenate([anywhere, near_one]).astype(dtype.np)
    bases = bases[bases != 1]
    exponents = rng.uniform(least - 3, most + 1, bases.size) / np.log2(bases.astype(np.longdouble))
    negative = -np.exp2(rng.uniform(least, most, count))
    whole = rng.integers(-7, 8, count).astype(np.float64)
    huge = np.array([2**24, 2**24 - 1, 1 - 2**24, 2**25 + 4, 1e30, -1e30])
    units = np.repeat([-1.0, -0.99999994, -1.0000001, 1.0000001], huge.size)
    x = np.concatenate([bases, negative, -rng.uniform(0, 9, count), units]).astype(dtype.np)
    y = np.concatenate([exponents, whole, whole, np.tile(huge, 4)]).astype(dtype.np)
    k = KernelBuilder("k")
    a, b = (k.input(n, dtype[sym("n")]) for n in "xy")
    k.output("z", dtype[sym("n")], lambda ix: apply("pow", a[ix[0]], b[ix[0]]))
    (got,) = compile_kernel(k.build(), Target.named(target))(x, y)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
        wanted = exact.astype(dtype.np)
    check_specials(x, got, wanted)
    finite = np.isfinite(got) & np.isfinite(wanted)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(wanted[finite]))
    assert error.max() <= 2.0
