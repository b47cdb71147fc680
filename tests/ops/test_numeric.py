"""Quotients, remainders and the like against NumPy, Python and torch."""

import math

import numpy as np
import pytest
import torch
from scipy import special

import strata as st
from strata import ops
from strata.core import f32
from strata.errors import DTypeError, OptionError
from strata.mir import REGISTRY, Graph, placeholder
from strata.runtime import CompileOptions, Session
from tests.ops.evaluation import gradients, leaf, run

RNG = np.random.default_rng(0)
A = np.array([7.5, -7.5, 7.5, -7.5, 0.0, 1.0, -1e-20, 5.0])
B = np.array([2.0, 2.0, -2.0, -2.0, 3.0, 0.1, 3.0, -0.7])
INTS = np.array([-7, -6, -1, 0, 1, 6, 7], np.int32)


def test_floats_divide_as_in_python() -> None:
    np.testing.assert_array_equal(run(lambda x, y: x // y, A, B), [a // b for a, b in zip(A, B, strict=True)])
    np.testing.assert_array_equal(run(lambda x, y: x % y, A, B), [a % b for a, b in zip(A, B, strict=True)])
    np.testing.assert_array_equal(run(ops.fmod, A, B), [math.fmod(a, b) for a, b in zip(A, B, strict=True)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compiled_quotients_have_the_bits_of_numpy(dtype: type) -> None:
    """Also at infinities, huge quotients, and in the sign of zero."""
    edges = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.1, -0.1, 3, -3], dtype)
    bits = np.random.default_rng(1).integers(0, 256, (2, 20000 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    x, y = np.hstack([np.array(np.meshgrid(edges, edges)).reshape(2, -1), bits])
    g = Graph("divide")
    a, b = (g.input(n, x.shape, x.dtype.name) for n in "ab")
    c = Session("cpu").compile(g.outputs(a // b, a % b, ops.fmod(a, b)))
    with np.errstate(all="ignore"):
        wanted = np.floor_divide(x, y), np.remainder(x, y), np.fmod(x, y)
    for got, want in zip(c.run(a=x, b=y), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@pytest.mark.parametrize("y", [-3, -1, 1, 2, 5])
def test_integers_divide_as_in_python(y: int) -> None:
    np.testing.assert_array_equal(run(lambda x: x // y, INTS), [int(a) // y for a in INTS])
    np.testing.assert_array_equal(run(lambda x: x % y, INTS), [int(a) % y for a in INTS])
    np.testing.assert_array_equal(run(lambda x: ops.fmod(x, y), INTS), np.fmod(INTS, y))
    np.testing.assert_array_equal(run(lambda x: 100 // (x + 20), INTS), [100 // (int(a) + 20) for a in INTS])


def test_an_integer_divided_by_zero_gives_zero() -> None:
    for fn in (ops.floor_divide, ops.remainder, ops.fmod):
        np.testing.assert_array_equal(run(lambda x, f=fn: f(x, 0), INTS), np.zeros(7))


@pytest.mark.parametrize("name", ["remainder", "fmod"])
def test_gradient_of_remainders_as_torch(name: str) -> None:
    a, b = np.delete(A, 5), np.delete(B, 5)  # 1 and 0.1: torch takes 10 for the whole quotient, which is 9
    ct = RNG.standard_normal(7)
    x, y = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
    getattr(torch, name)(x, y).backward(torch.tensor(ct))
    gx, gy = gradients(getattr(ops, name), [a, b], ct)
    np.testing.assert_allclose(gx, x.grad.numpy())
    np.testing.assert_allclose(gy, y.grad.numpy())


def test_hypot_and_logaddexp_do_not_overflow() -> None:
    big = np.array([1e200, 3e-200, 0.0, np.inf, np.inf])
    other = np.array([1e200, 4e-200, 0.0, np.nan, -np.inf])
    np.testing.assert_allclose(run(ops.hypot, big, other), np.hypot(big, other))
    x, y = np.array([1000.0, -1000.0, -np.inf, np.inf, 0.0]), np.array([1000.0, -999.0, -np.inf, np.inf, 0.0])
    np.testing.assert_allclose(run(ops.logaddexp, x, y), np.logaddexp(x, y))
    gx, gy = gradients(ops.logaddexp, [x, y], np.ones(5))
    np.testing.assert_allclose(gx + gy, 1)
    assert np.all(np.isfinite(gx))
    gx, _ = gradients(ops.hypot, [np.zeros(2), np.array([0.0, 2.0])], np.ones(2))
    np.testing.assert_array_equal(gx, [0, 0])


def test_the_exponent_of_what_is_no_number_has_no_derivative() -> None:
    _, gy = gradients(ops.power, [np.array([np.nan, 0.0, -1.0, np.e]), np.full(4, 2.0)], np.ones(4))
    np.testing.assert_allclose(gy, [np.nan, 0, 0, np.e**2])


def test_bits() -> None:
    x = np.array([0, 1, -1, 255, -256, 2**31 - 1, -(2**31)], np.int32)
    np.testing.assert_array_equal(run(ops.bitwise_count, x), np.bitwise_count(x))
    np.testing.assert_array_equal(
        run(ops.gcd, x, np.int32([0, 4, 6, 10, 24, 7, 6])), np.gcd(x, np.int32([0, 4, 6, 10, 24, 7, 6]))
    )
    a, b = np.array([4, -6, 0, 3]), np.array([6, 4, 5, 7])
    np.testing.assert_array_equal(run(ops.lcm, a, b), np.lcm(a, b))
    ends = np.array([-128, -127, -3, 2, 64, 126, 127], np.int8)  # multiples wrap
    np.testing.assert_array_equal(run(ops.lcm, ends[:, None], ends), np.lcm(ends[:, None], ends))
    np.testing.assert_array_equal(run(ops.signbit, np.array([0.0, -0.0, -3.0, 2.0])), [False, True, True, False])
    np.testing.assert_array_equal(run(ops.signbit, a), a < 0)


def test_numbers_win_over_nan_in_fmax() -> None:
    x, y = np.array([np.nan, 1.0, np.nan, 3.0]), np.array([2.0, np.nan, np.nan, 1.0])
    np.testing.assert_array_equal(run(ops.fmax, x, y), np.fmax(x, y))
    np.testing.assert_array_equal(run(ops.fmin, x, y), np.fmin(x, y))
    gx, gy = gradients(ops.fmax, [x, y], np.ones(4))
    np.testing.assert_array_equal(gx[[0, 1, 3]], [0, 1, 1])
    np.testing.assert_array_equal(gy[[0, 1, 3]], [1, 0, 0])


def test_clip() -> None:
    x = np.array([-2.0, 0.0, 0.5, 1.0, 3.0])
    np.testing.assert_array_equal(run(lambda a: ops.clip(a, 0, 1), x), np.clip(x, 0, 1))
    np.testing.assert_array_equal(run(lambda a: ops.clip(a, max=1), x), np.minimum(x, 1))
    np.testing.assert_array_equal(gradients(lambda a: ops.clip(a, 0, 1), [x], np.ones(5))[0], [0, 1, 1, 1, 0])
    assert ops.clip(placeholder("x", f32[2]), 0, 1).dtype is f32
    with pytest.raises(OptionError, match="a lower or an upper bound"):
        ops.clip(placeholder("x", f32[2]))


def test_isclose_nan_to_num_heaviside_lerp() -> None:
    x = np.array([1.0, 1.0, np.inf, np.inf, np.nan, 1e10, 0.0])
    y = np.array([1.0 + 1e-6, 1.1, np.inf, -np.inf, np.nan, 1.00001e10, 1e-9])
    for equal_nan in (False, True):
        got = run(lambda a, b, e=equal_nan: ops.isclose(a, b, equal_nan=e), x, y)
        np.testing.assert_array_equal(got, np.isclose(x, y, equal_nan=equal_nan))
    assert not run(ops.allclose, x, y)
    special = np.float32([np.nan, np.inf, -np.inf, 2])
    np.testing.assert_array_equal(run(ops.nan_to_num, special), np.nan_to_num(special))
    np.testing.assert_array_equal(run(lambda a: ops.nan_to_num(a, 1, 2, 3), special), [1, 2, 3, 2])
    np.testing.assert_array_equal(run(lambda a: ops.heaviside(a, 0.5), x - 1), np.heaviside(x - 1, 0.5))
    np.testing.assert_allclose(run(lambda a: ops.lerp(a, 3.0, 0.25), np.array([1.0, 2.0])), [1.5, 2.25])


def test_copysign() -> None:
    x, y = np.array([1.0, -2.0, 3.0, 0.0]), np.array([-0.0, 0.0, -5.0, -1.0])
    np.testing.assert_array_equal(run(ops.copysign, x, y), np.copysign(x, y))
    np.testing.assert_array_equal(gradients(ops.copysign, [x, y], np.ones(4))[0], [-1, -1, -1, -0.0])


def test_mistakes() -> None:
    with pytest.raises(DTypeError, match="does not take f32"):
        ops.gcd(leaf("x", np.float32([1])), leaf("y", np.float32([1])))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_special_functions_far_out_and_below_zero(device: str, dtype: str) -> None:
    x = np.array([-20.5, -7.75, -3.3, -1.0, -0.5, -1e-3, 0.1, 0.5, 1, 2, 3, 5, 6, 8, 9], dtype)
    graph = Graph("special")
    v = graph.input("x", x.shape, dtype)
    first = graph.outputs(v.erfc(), v.digamma(), v.lgamma(), REGISTRY["polygamma"](order=1)(v))
    found = Session(device).compile(first).run(x=x)
    wide = x.astype("f8")
    wanted = (special.erfc(wide), special.digamma(wide), special.gammaln(wide), special.polygamma(1, wide))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6 if dtype == "f4" else 1e-12, atol=0)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_special_functions_at_their_poles_and_infinities(device: str, dtype: type) -> None:
    x = np.array([0.0, -0.0, -1.0, -2.0, np.inf, -np.inf, np.nan], dtype)
    graph = Graph("edges")
    v = graph.input("x", x.shape, x.dtype)
    found = Session(device).compile(graph.outputs(v.lgamma(), v.digamma())).run(x=x)
    np.testing.assert_array_equal(found[0], [math.inf] * 6 + [math.nan])
    np.testing.assert_array_equal(found[1], [-math.inf, math.inf, math.nan, math.nan, math.inf, math.nan, math.nan])


def test_erfc_has_the_derivative_of_minus_erf() -> None:
    x = np.array([-1.0, 0.3, 4.0], "f4")
    np.testing.assert_allclose(
        st.grad(lambda x: st.erfc(x).sum())(x).numpy(), -2 / np.sqrt(np.pi) * np.exp(-(x * x)), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 7, 8, -1, -2, -3, -4, -8, 0.5, -0.5, 1.5, 2.5])
def test_known_exponents(exponent: float, dtype: type) -> None:
    """Without logarithms where that is exact enough; signs of zeros, infinities and NaN as those of any power."""
    edges = [
        0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        -1,
        2,
        -2,
        1e-45,
        1e-310,
        -1e-310,
        3e38,
        -3e38,
        2.0**-64,
        2.0**64,
        6e4,
    ]
    sizes = np.exp(RNG.uniform(-80, 80, 500)) * RNG.choice([-1, 1], 500)
    with np.errstate(all="ignore"):
        x = np.concatenate([edges, RNG.uniform(-5, 5, 500), sizes]).astype(dtype)
        exact = np.power(x.astype(np.longdouble), np.longdouble(exponent))
        wanted = exact.astype(dtype)
    g = Graph("known")
    g.outputs(ops.power(g.input("x", x.shape, x.dtype), float(exponent)))
    (got,) = Session("cpu").compile(g).run(x=x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))
    zero = wanted == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]))
    finite = np.isfinite(wanted)
    error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(wanted[finite]))
    assert error.max() <= (4 if dtype is np.float64 else 2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64])
def test_powers_of_whole_numbers(dtype: type) -> None:
    """They wrap; turns end with the largest exponent, which may be in any place."""
    x = RNG.integers(-7 if np.dtype(dtype).kind == "i" else 0, 8, 1000).astype(dtype)
    y = RNG.integers(0, 5, 1000).astype(dtype)
    y[[3, 500, 999]] = 63, 100, 31
    np.testing.assert_array_equal(run(ops.power, x, y), x**y)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("fusion", [True, False])
def test_means_of_narrow_floats_do_not_overflow(device: str, fusion: bool) -> None:
    """Neither the sum of a row nor the number of its elements is a number of f16."""
    g = Graph("narrow")
    x, long = g.input("x", (3, 1000), "f16"), g.input("long", (70_000,), "f16")
    made = [ops.mean(x, axis=1), ops.var(x, axis=1), ops.std(x * 8.0, axis=1), ops.mean(long)]
    compiled = Session(device).compile(g.outputs(*made), CompileOptions(fusion=fusion))
    rows = np.where(np.arange(3000).reshape(3, 1000) % 2, 104.0, 96.0).astype(np.float16)
    mean, var, std, one = compiled.run(x=rows, long=np.ones(70_000, np.float16))
    assert (mean.dtype, var.dtype, std.dtype) == (np.float16,) * 3
    np.testing.assert_array_equal(mean, [100] * 3)
    np.testing.assert_array_equal(var, [16] * 3)
    np.testing.assert_array_equal(std, [32] * 3)
    assert float(one) == 1.0
