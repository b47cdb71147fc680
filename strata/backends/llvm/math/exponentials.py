"""exp and its relatives as straight-line vector code, for f32 and f64 and any number of lanes; remainders.

Bounds, in units in the last place, as measured by tests/unit/backends/llvm/test_vector_math.py: f32 at most 2, f64 at
most 4. Zeros keep their sign, denormals are exact in and out, infinities and NaN give what NumPy gives. Functions that
are seldom in a hot loop are computed in f64 for f32; the few that have no vector form here call the C library lane by
lane.

Coefficients are Chebyshev interpolants made with 50 digits, rounded to f64."""

from __future__ import annotations

import math
import struct
from typing import Final

from strata.backends.llvm.ir.builder import lanes_of, suffix
from strata.backends.llvm.ir.float_ops import MAGIC, MANTISSA, VectorMath, library

_INF: Final = math.inf

# (e^r - 1 - r) / r² on |r| ≤ ln2 / 2
EXPM1 = {
    32: (0.5, 0.16666573381900845, 0.04166655011030512, 0.008363773874405574, 0.0013926926614021907),
    64: (0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333325544, 0.0013888888888883327,
         0.00019841269876864356, 2.4801587327007187e-05, 2.755725283351691e-06, 2.75572718102198e-07,
         2.5106274733573296e-08, 2.0915442297780116e-09),
}  # fmt: skip
# (e^r - 1) / r on |r| ≤ ln2 / 32, for exponentials with a table of 2^(k/16)
EXP_NEAR = (1.0, 0.5000146624343743, 0.16666959914371368)
_EXP2_NEAR = tuple(c * math.log(2) ** (i + 1) for i, c in enumerate(EXP_NEAR))  # and (2ʳ - 1) / r on |r| ≤ 1 / 32
_EXP2_LEAST: Final = -160.0  # 0 in f32
POWERS = tuple(2.0 ** (k / 16) for k in range(16))
_ROUNDED = tuple(struct.unpack("f", struct.pack("f", power))[0] for power in POWERS)
_POWERS_LOST = tuple(math.log1p((p - r) / r) for p, r in zip(POWERS, _ROUNDED, strict=True))  # by their rounding to f32
# (tanh x - x) / x³ in x², |x| ≤ 0.6
_TANH = (-0.3333333033273155, 0.13332915366987452, -0.053873948848643334, 0.02111095904951479, -0.006269119719649729)
# (sinh x - x) / x³ in x², |x| ≤ 1
_SINH = {
    32: (0.16666666646842135, 0.00833333967591706, 0.0001983810196868388, 2.8062802582277454e-06),
    64: (0.16666666666666666, 0.008333333333333333, 0.00019841269841269773, 2.755731922404034e-06,
         2.505210836405804e-08, 1.6059048396350562e-10, 7.646625361656657e-13, 2.8445264169895285e-15),
}  # fmt: skip

LN2 = {32: (0.693359375, -0.00021219444005469057), 64: (0.6931471675634384, 1.2996506893889889e-08)}
_EXP_LIMITS = {32: (-104.0, 88.8), 64: (-746.0, 710.0)}


# exponentials


def reduce_exp(m: VectorMath, x: str) -> tuple[str, str, str]:
    """(n as a float, n as an integer, e^r - 1) with x = n ln2 + r."""
    shifted = m.fma(x, m.c(1 / math.log(2)), m.c(MAGIC[m.bits]))
    n = m.sub(shifted, m.c(MAGIC[m.bits]))
    whole = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[m.bits])))
    high, low = LN2[m.bits]
    r = m.fma(n, m.c(-low), m.fma(n, m.c(-high), x))
    return n, whole, m.fma(m.mul(r, r), m.polynomial(r, EXPM1[m.bits]), r)


def scale_by(m: VectorMath, x: str, n: str, whole: str) -> str:
    """x * 2ⁿ, rounded once; n is given as a float and as an integer."""
    if m.target.has_avx512 and lanes_of(m.type) * m.bits >= 128:
        return m.scaled(x, n)
    half = m.integer("ashr", whole, m.i(1))  # in two steps, so that the result may be denormal or overflow
    return m.mul(m.mul(x, m.power_of_two(half)), m.power_of_two(m.integer("sub", whole, half)))


def _exp_by_table(m: VectorMath, x: str, *, exact: bool = False) -> str:
    """eˣ = 2ⁿ · 2^(k/16) · eʳ; both n + k/16, which the scaling rounds down, and k come from one addition.

    If exact, the rounding of the powers of 2^(1/16) is counted: 0.6 in place of 1 ulp at most."""
    magic = m.c(MAGIC[m.bits] / len(POWERS))
    shifted = m.fma(x, m.c(1 / math.log(2)), magic)
    n = m.sub(shifted, magic)
    high, low = LN2[m.bits]
    r = m.fma(n, m.c(-low), m.fma(n, m.c(-high), x))
    power = m.look_up(m.as_bits(shifted), POWERS)
    if exact:
        r = m.add(r, m.look_up(m.as_bits(shifted), _POWERS_LOST))
    return m.scaled(m.fma(m.mul(power, r), m.polynomial(r, EXP_NEAR), power), n)


def exp(m: VectorMath, x: str) -> str:
    low, high = _EXP_LIMITS[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    if m.has_tables:
        return _exp_by_table(m, inside)
    n, whole, q = reduce_exp(m, inside)
    return scale_by(m, m.add(q, m.c(1.0)), n, whole)


def exp_below(m: VectorMath, x: str) -> str:
    """eˣ of numbers that are not above 0, as in a softmax; what would be denormal may be 0."""
    if m.has_tables:
        return _exp_by_table(m, m.at_least(x, _EXP_LIMITS[m.bits][0]))
    if m.target.has_avx512 and lanes_of(m.type) * m.bits >= 128:
        n, whole, q = reduce_exp(m, m.at_least(x, _EXP_LIMITS[m.bits][0]))
        return scale_by(m, m.add(q, m.c(1.0)), n, whole)
    low = {32: -87.0, 64: -708.0}[m.bits]
    _, whole, q = reduce_exp(m, m.at_least(x, low))
    scale = m.power_of_two(whole)
    return m.select(m.test("olt", x, m.c(low)), m.c(0.0), m.fma(scale, q, scale))


def exp_of_product(m: VectorMath, x: str, scale: float) -> str:
    """e^(x·scale) of numbers that are not above 0 and a positive scale; what would be denormal may be 0."""
    if not m.has_tables:
        return exp_below(m, x if scale == 1.0 else m.mul(x, m.c(scale)))
    # 2ⁿ · 2^(k/16) · 2ʳ as in _exp_by_table, in powers of two from the start: x·scale is never rounded by itself
    factor, magic = m.c(scale / math.log(2)), m.c(MAGIC[m.bits] / len(POWERS))
    inside = m.at_least(x, _EXP2_LEAST * math.log(2) / scale)
    shifted = m.fma(inside, factor, magic)
    n = m.sub(shifted, magic)
    r = m.fma(inside, factor, m.neg(n))
    power = m.look_up(m.as_bits(shifted), POWERS)
    return m.scaled(m.fma(m.mul(power, r), m.polynomial(r, _EXP2_NEAR), power), n)


def exp2(m: VectorMath, x: str) -> str:
    low, high = {32: (-151.0, 129.0), 64: (-1076.0, 1025.0)}[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    shifted = m.add(inside, m.c(MAGIC[m.bits]))
    n = m.sub(shifted, m.c(MAGIC[m.bits]))
    whole = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[m.bits])))
    r = m.mul(m.sub(inside, n), m.c(math.log(2)))
    q = m.fma(m.mul(r, r), m.polynomial(r, EXPM1[m.bits]), r)
    return scale_by(m, m.add(q, m.c(1.0)), n, whole)


def expm1(m: VectorMath, x: str) -> str:
    low, high = {32: (-30.0, 89.0), 64: (-60.0, 710.0)}[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    _, whole, q = reduce_exp(m, inside)
    scale = m.power_of_two(m.integer("sub", whole, m.i(1)))  # one less, so that n = 1024 does not overflow too early
    half = m.fma(scale, q, m.sub(scale, m.c(0.5)))
    return m.copysign(m.add(half, half), x)


def sigmoid(m: VectorMath, x: str) -> str:
    """1 / (1 + e⁻ˣ), or eˣ / (1 + eˣ) below 0. There a place of the result may be half of one of eˣ, which has to be
    more exact than elsewhere."""
    inside = m.at_least(m.neg(m.abs(x)), _EXP_LIMITS[m.bits][0])
    negative = m.test("olt", x, m.c(0.0))
    low = None
    if m.has_tables:
        e = _exp_by_table(m, inside, exact=True)
    else:
        n, whole, q = reduce_exp(m, inside)
        made = m.add(q, m.c(1.0))
        e = scale_by(m, made, n, whole)
        if not m.target.has_fma:  # then q is less exact, and what the sum lost is counted
            low = m.select(negative, scale_by(m, m.sub(q, m.sub(made, m.c(1.0))), n, whole), m.c(0.0))
    top = m.select(negative, e, m.c(1.0))
    below = m.add(e, m.c(1.0))
    # what it is off by is in the rest, and the square of that is too little to be seen
    inverse = m.inverse_near(below) if m.has_tables else m.div(m.c(1.0), below)
    quotient = m.mul(top, inverse)
    lost = m.sub(e, m.sub(below, m.c(1.0)))
    rest = m.fma(m.neg(quotient), lost, m.fma(m.neg(quotient), below, top))
    return m.fma(rest if low is None else m.add(rest, low), inverse, quotient)


def tanh(m: VectorMath, x: str) -> str:
    if m.has_tables:
        return _tanh_by_table(m, x)
    a = m.abs(x)
    t = expm1(m, m.at_most(m.add(a, a), 60.0))
    large = m.div(t, m.add(t, m.c(2.0)))
    if m.bits == 32:
        z = m.mul(x, x)
        small = m.fma(m.mul(a, z), m.polynomial(z, _TANH), a)
        # near 1 the quotient loses a bit that 1 - 2 / (t + 2) keeps
        top = m.sub(m.c(1.0), m.div(m.c(2.0), m.add(t, m.c(2.0))))
        large = m.select(m.test("olt", a, m.c(0.6)), small, top)
    return m.copysign(large, x)


def _tanh_by_table(m: VectorMath, x: str) -> str:
    """1 - 2 / (e²ˣ + 1) of |x|; a polynomial near 0, and for NaN."""
    z = m.mul(x, x)
    small = m.fma(m.mul(x, z), m.polynomial(z, _TANH), x)
    factor, magic = m.c(2 / math.log(2)), m.c(MAGIC[m.bits] / len(POWERS))
    inside = m.magnitude_at_most(x, 10.0)
    shifted = m.fma(inside, factor, magic)
    n = m.sub(shifted, magic)
    r = m.fma(inside, factor, m.neg(n))
    power = m.look_up(m.as_bits(shifted), POWERS)
    below = m.add(m.scaled(m.fma(m.mul(power, r), m.polynomial(r, _EXP2_NEAR), power), n), m.c(1.0))
    near = m.inverse_near(below)
    inverse = m.fma(m.fma(m.neg(below), near, m.c(1.0)), near, near)
    large = m.fma(inverse, m.c(-2.0), m.c(1.0))
    return m.copysign(m.select(m.test("ult", z, m.c(0.36)), small, large), x)


def _half_exp(m: VectorMath, a: str) -> str:
    """eᵃ / 2, which does not overflow before sinh and cosh do."""
    n, whole, q = reduce_exp(m, m.at_most(a, {32: 100.0, 64: 720.0}[m.bits]))
    return scale_by(m, m.add(q, m.c(1.0)), m.sub(n, m.c(1.0)), m.integer("sub", whole, m.i(1)))


def sinh(m: VectorMath, x: str) -> str:
    a = m.abs(x)
    half = _half_exp(m, a)
    large = m.sub(half, m.div(m.c(0.25), half))
    z = m.mul(a, a)
    small = m.fma(m.mul(a, z), m.polynomial(z, _SINH[m.bits]), a)
    return m.copysign(m.select(m.test("olt", a, m.c(1.0)), small, large), x)


def cosh(m: VectorMath, x: str) -> str:
    half = _half_exp(m, m.abs(x))
    return m.add(half, m.div(m.c(0.25), half))


# the rest


def fmod(m: VectorMath, x: str, y: str) -> str:
    """The exact remainder with the sign of x. Quotients that are not exact integers of the type, infinities and NaN go
    to the C library, all lanes."""
    f = m.f
    if not m.target.has_fma:
        return library("fmod", m, x, y)
    a, b = m.abs(x), m.abs(y)
    quotient = m.div(a, b)
    usual = m.test("olt", quotient, m.c(2.0 ** (MANTISSA[m.bits] - 1)))
    usual = f.binary("and", m.flag, usual, m.test("olt", b, m.c(_INF)))
    if lanes_of(m.type) > 1:
        usual = f.call("i1", f"llvm.vector.reduce.and.{suffix(m.flag)}", (m.flag, usual))

    def near() -> list[str]:
        # the quotient may have been rounded up to the next whole number, and then one too many was taken
        rest = f.fma(m.type, m.neg(f.intrinsic("trunc", m.type, quotient)), b, a)
        rest = m.select(m.test("olt", rest, m.c(0.0)), m.add(rest, b), rest)
        return [m.copysign(rest, x)]

    return f.if_(usual, near, lambda: [library("fmod", m, x, y)], (m.type,))[0]


def python_mod(m: VectorMath, x: str, y: str) -> str:
    r = fmod(m, x, y)
    differs = m.test("one", r, m.c(0.0))
    signs = m.f.binary("xor", m.flag, m.test("olt", r, m.c(0.0)), m.test("olt", y, m.c(0.0)))
    fixed = m.select(m.f.binary("and", m.flag, differs, signs), m.add(r, y), r)
    return m.select(m.test("oeq", fixed, m.c(0.0)), m.copysign(m.c(0.0), y), fixed)


def floor_divide(m: VectorMath, x: str, y: str) -> str:
    """The whole number below x / y as exactly known, not below its rounded quotient: 1 // 0.1 is 9."""
    left = fmod(m, x, y)
    quotient = m.div(m.sub(x, left), y)
    signs = m.f.binary("xor", m.flag, m.test("olt", left, m.c(0.0)), m.test("olt", y, m.c(0.0)))
    lower = m.f.binary("and", m.flag, m.test("one", left, m.c(0.0)), signs)
    quotient = m.select(lower, m.sub(quotient, m.c(1.0)), quotient)
    whole = m.f.intrinsic("floor", m.type, quotient)
    whole = m.select(m.test("ogt", m.sub(quotient, whole), m.c(0.5)), m.add(whole, m.c(1.0)), whole)
    plain = m.div(x, y)
    whole = m.select(m.test("oeq", quotient, m.c(0.0)), m.copysign(m.c(0.0), plain), whole)
    return m.select(m.test("oeq", y, m.c(0.0)), plain, whole)


def hypot(m: VectorMath, x: str, y: str) -> str:
    """√(x² + y²) without overflow on the way."""
    if m.bits == 32:
        wide = m.doubled()
        a, b = (m.f.convert("fpext", m.type, v, wide.type) for v in (x, y))
        root = m.f.convert("fptrunc", wide.type, wide.sqrt(wide.fma(a, a, wide.mul(b, b))), m.type)
        infinite = m.f.binary("or", m.flag, m.test("oeq", m.abs(x), m.c(_INF)), m.test("oeq", m.abs(y), m.c(_INF)))
        return m.select(infinite, m.c(_INF), root)
    return library("hypot", m, x, y)
