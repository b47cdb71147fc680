"""Elementary functions as straight-line vector code, for f32 and f64 and any number of lanes: exponentials, logarithms,
powers and remainders. Angles are in vector_angles, the error function in vector_normal.

Bounds, in units in the last place, as measured by tests/unit/backends/llvm/test_vector_math.py: f32 at most 2, f64 at
most 4. Zeros keep their sign, denormals are exact in and out, infinities and NaN give what NumPy gives. Functions that
are seldom in a hot loop are computed in f64 for f32; the few that have no vector form here call the C library lane by
lane.

Coefficients are Chebyshev interpolants made with 50 digits, rounded to f64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from strata.backends.llvm.builder import (
    Function,
    bits_of,
    constant,
    element_of,
    lanes_of,
    suffix,
    vector,
    with_element,
)
from strata.backends.llvm.vector_floats import MAGIC, MANTISSA, Math, in_double, library

_INF: Final = math.inf

# (e^r - 1 - r) / r² on |r| ≤ ln2 / 2
_EXPM1 = {
    32: (0.5, 0.16666573381900845, 0.04166655011030512, 0.008363773874405574, 0.0013926926614021907),
    64: (0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333325544, 0.0013888888888883327,
         0.00019841269876864356, 2.4801587327007187e-05, 2.755725283351691e-06, 2.75572718102198e-07,
         2.5106274733573296e-08, 2.0915442297780116e-09),
}  # fmt: skip
# (e^r - 1) / r on |r| ≤ ln2 / 32, for exponentials with a table of 2^(k/16)
_EXP_NEAR = (1.0, 0.5000146624343743, 0.16666959914371368)
_EXP2_NEAR = tuple(c * math.log(2) ** (i + 1) for i, c in enumerate(_EXP_NEAR))  # and (2ʳ - 1) / r on |r| ≤ 1 / 32
_EXP2_LEAST: Final = -160.0  # 0 in f32
_POWERS = tuple(2.0 ** (k / 16) for k in range(16))
# (log((1 + s) / (1 - s)) - 2s) / s³ as a function of s², for (1 + s) / (1 - s) in [⅔, 1½]: to 33, 40 and 60 bits
_LOG = {
    32: (0.6666666627679424, 0.4000031148954007, 0.2853272481682966, 0.23747744217942318),
    40: (0.6666666667003059, 0.3999999579905708, 0.2857226548730508, 0.22164123984126827, 0.19811681903039247),
    64: (0.6666666666666666, 0.4000000000000781, 0.285714285673329, 0.22222223038856737, 0.18181738372176304,
         0.15388837982487807, 0.13210295347045856, 0.13604517062769542),
}  # fmt: skip
_LOG2_E = {32: (1.4426950216293335, 1.925963033500117e-08), 64: (1.4426950408889634, 2.0355273740931033e-17)}
# what of it is left behind ⅔, divided by s²; and ⅔ in two words
_LOG_TAIL = (
    0.39999999999999997, 0.28571428571435653, 0.22222222218511686, 0.18181818921642132, 0.1538454308470165,
    0.1333715833861458, 0.11653266543585238, 0.12192267677956177,
)  # fmt: skip
_TWO_THIRDS = 0.6666666666666666, 3.700743415417188e-17
# (2ʳ - 1) / r to 39 bits, |r| ≤ ½
_EXP2_SHORT = (
    0.6931471805568324, 0.24022650695888503, 0.055504109063258665, 0.00961812913523614, 0.0013333478473685416,
    0.00015403475186530786, 1.5303700711365693e-05, 1.325080551750225e-06,
)  # fmt: skip
# (tanh x - x) / x³ in x², |x| ≤ 0.6
_TANH = (-0.3333333033273155, 0.13332915366987452, -0.053873948848643334, 0.02111095904951479, -0.006269119719649729)
# (sinh x - x) / x³ in x², |x| ≤ 1
_SINH = {
    32: (0.16666666646842135, 0.00833333967591706, 0.0001983810196868388, 2.8062802582277454e-06),
    64: (0.16666666666666666, 0.008333333333333333, 0.00019841269841269773, 2.755731922404034e-06,
         2.505210836405804e-08, 1.6059048396350562e-10, 7.646625361656657e-13, 2.8445264169895285e-15),
}  # fmt: skip

_LN2 = {32: (0.693359375, -0.00021219444005469057), 64: (0.6931471675634384, 1.2996506893889889e-08)}
_LOG_LN2 = {32: (0.693115234375, 3.1946183870e-05), 64: _LN2[64]}  # both parts positive: infinities do not cancel
_EXP_LIMITS = {32: (-104.0, 88.8), 64: (-746.0, 710.0)}
_LEAST_NORMAL = {32: 2.0**-126, 64: 2.0**-1022}


# exponentials


def reduce_exp(m: Math, x: str) -> tuple[str, str, str]:
    """(n as a float, n as an integer, e^r - 1) with x = n ln2 + r."""
    shifted = m.fma(x, m.c(1 / math.log(2)), m.c(MAGIC[m.bits]))
    n = m.sub(shifted, m.c(MAGIC[m.bits]))
    whole = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[m.bits])))
    high, low = _LN2[m.bits]
    r = m.fma(n, m.c(-low), m.fma(n, m.c(-high), x))
    return n, whole, m.fma(m.mul(r, r), m.polynomial(r, _EXPM1[m.bits]), r)


def _scale(m: Math, x: str, n: str, whole: str) -> str:
    """x * 2ⁿ, rounded once; n is given as a float and as an integer."""
    if m.target.has_avx512 and lanes_of(m.type) * m.bits >= 128:
        return _scale_by_instruction(m, x, n)
    half = m.integer("ashr", whole, m.i(1))  # in two steps, so that the result may be denormal or overflow
    return m.mul(m.mul(x, m.power_of_two(half)), m.power_of_two(m.integer("sub", whole, half)))


def _scale_by_instruction(m: Math, x: str, n: str) -> str:
    """AVX-512 has an instruction for it, which takes at most one register."""
    lanes, f = lanes_of(m.type), m.f
    most = 512 // m.bits
    if lanes > most:
        half = replace(m, type=vector(element_of(m.type), lanes // 2))
        parts = [range(lanes // 2), range(lanes // 2, lanes)]
        low, high = (
            _scale_by_instruction(half, *(f.shuffle(m.type, a, "poison", picks) for a in (x, n))) for picks in parts
        )
        return f.shuffle(half.type, low, high, range(lanes))
    width, kind = lanes * m.bits, "ps" if m.bits == 32 else "pd"
    mask = f"i{max(8, lanes)}"
    rounding = (("i32", "4"),) if width == 512 else ()  # as the processor is set
    arguments = ((m.type, x), (m.type, n), (m.type, "zeroinitializer"), (mask, "-1"), *rounding)
    return f.call(m.type, f"llvm.x86.avx512.mask.scalef.{kind}.{width}", *arguments)


def _exp_by_table(m: Math, x: str) -> str:
    """eˣ = 2ⁿ · 2^(k/16) · eʳ; both n + k/16, which the scaling rounds down, and k come from one addition."""
    magic = m.c(MAGIC[m.bits] / len(_POWERS))
    shifted = m.fma(x, m.c(1 / math.log(2)), magic)
    n = m.sub(shifted, magic)
    high, low = _LN2[m.bits]
    r = m.fma(n, m.c(-low), m.fma(n, m.c(-high), x))
    power = m.look_up(m.as_bits(shifted), _POWERS)
    return _scale_by_instruction(m, m.fma(m.mul(power, r), m.polynomial(r, _EXP_NEAR), power), n)


def exp(m: Math, x: str) -> str:
    low, high = _EXP_LIMITS[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    if m.has_tables:
        return _exp_by_table(m, inside)
    n, whole, q = reduce_exp(m, inside)
    return _scale(m, m.add(q, m.c(1.0)), n, whole)


def exp_below(m: Math, x: str) -> str:
    """eˣ of numbers that are not above 0, as in a softmax; what would be denormal may be 0."""
    if m.has_tables:
        return _exp_by_table(m, m.at_least(x, _EXP_LIMITS[m.bits][0]))
    if m.target.has_avx512 and lanes_of(m.type) * m.bits >= 128:
        n, whole, q = reduce_exp(m, m.at_least(x, _EXP_LIMITS[m.bits][0]))
        return _scale(m, m.add(q, m.c(1.0)), n, whole)
    low = {32: -87.0, 64: -708.0}[m.bits]
    _, whole, q = reduce_exp(m, m.at_least(x, low))
    scale = m.power_of_two(whole)
    return m.select(m.test("olt", x, m.c(low)), m.c(0.0), m.fma(scale, q, scale))


def exp_of_product(m: Math, x: str, scale: float) -> str:
    """e^(x·scale) of numbers that are not above 0 and a positive scale; what would be denormal may be 0."""
    if not m.has_tables:
        return exp_below(m, x if scale == 1.0 else m.mul(x, m.c(scale)))
    # 2ⁿ · 2^(k/16) · 2ʳ as in _exp_by_table, in powers of two from the start: x·scale is never rounded by itself
    factor, magic = m.c(scale / math.log(2)), m.c(MAGIC[m.bits] / len(_POWERS))
    inside = m.at_least(x, _EXP2_LEAST * math.log(2) / scale)
    shifted = m.fma(inside, factor, magic)
    n = m.sub(shifted, magic)
    r = m.fma(inside, factor, m.neg(n))
    power = m.look_up(m.as_bits(shifted), _POWERS)
    return _scale_by_instruction(m, m.fma(m.mul(power, r), m.polynomial(r, _EXP2_NEAR), power), n)


def exp2(m: Math, x: str) -> str:
    low, high = {32: (-151.0, 129.0), 64: (-1076.0, 1025.0)}[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    shifted = m.add(inside, m.c(MAGIC[m.bits]))
    n = m.sub(shifted, m.c(MAGIC[m.bits]))
    whole = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[m.bits])))
    r = m.mul(m.sub(inside, n), m.c(math.log(2)))
    q = m.fma(m.mul(r, r), m.polynomial(r, _EXPM1[m.bits]), r)
    return _scale(m, m.add(q, m.c(1.0)), n, whole)


def expm1(m: Math, x: str) -> str:
    low, high = {32: (-30.0, 89.0), 64: (-60.0, 710.0)}[m.bits]
    inside = m.at_most(m.at_least(x, low), high)
    _, whole, q = reduce_exp(m, inside)
    scale = m.power_of_two(m.integer("sub", whole, m.i(1)))  # one less, so that n = 1024 does not overflow too early
    half = m.fma(scale, q, m.sub(scale, m.c(0.5)))
    return m.copysign(m.add(half, half), x)


def sigmoid(m: Math, x: str) -> str:
    e = exp(m, m.neg(m.abs(x)))
    top = m.select(m.test("olt", x, m.c(0.0)), e, m.c(1.0))
    whole = m.add(e, m.c(1.0))
    inverse = m.div(m.c(1.0), whole)
    quotient = m.mul(top, inverse)
    lost = m.sub(e, m.sub(whole, m.c(1.0)))
    rest = m.fma(m.neg(quotient), lost, m.fma(m.neg(quotient), whole, top))
    return m.fma(rest, inverse, quotient)


def tanh(m: Math, x: str) -> str:
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


def _half_exp(m: Math, a: str) -> str:
    """eᵃ / 2, which does not overflow before sinh and cosh do."""
    n, whole, q = reduce_exp(m, m.at_most(a, {32: 100.0, 64: 720.0}[m.bits]))
    return _scale(m, m.add(q, m.c(1.0)), m.sub(n, m.c(1.0)), m.integer("sub", whole, m.i(1)))


def sinh(m: Math, x: str) -> str:
    a = m.abs(x)
    half = _half_exp(m, a)
    large = m.sub(half, m.div(m.c(0.25), half))
    z = m.mul(a, a)
    small = m.fma(m.mul(a, z), m.polynomial(z, _SINH[m.bits]), a)
    return m.copysign(m.select(m.test("olt", a, m.c(1.0)), small, large), x)


def cosh(m: Math, x: str) -> str:
    half = _half_exp(m, m.abs(x))
    return m.add(half, m.div(m.c(0.25), half))


# logarithms


def _reduce_log(m: Math, x: str) -> tuple[str, str]:
    """(k as a float, f) with x = 2ᵏ (1 + f) and 1 + f near 1, for positive x; k is infinite where log x is."""
    if m.has_exponents:
        mantissa = m.mantissa(x)
        return m.sub(m.exponent(x), m.exponent(mantissa)), m.sub(mantissa, m.c(1.0))
    tiny = m.test("olt", x, m.c(_LEAST_NORMAL[m.bits]))
    bits = m.as_bits(m.select(tiny, m.mul(x, m.c(2.0 ** (MANTISSA[m.bits] + 1))), x))
    root = m.as_bits(m.c(math.sqrt(0.5)))
    offset = m.integer("sub", bits, root)
    k = m.integer("ashr", offset, m.i(MANTISSA[m.bits]))
    mantissa = m.integer("sub", bits, m.integer("shl", k, m.i(MANTISSA[m.bits])))
    exponent = m.f.convert("sitofp", m.whole, k, m.type)
    exponent = m.sub(exponent, m.select(tiny, m.c(MANTISSA[m.bits] + 1.0), m.c(0.0)))
    return exponent, m.sub(m.from_bits(mantissa), m.c(1.0))


def _log_of(m: Math, f: str) -> tuple[str, str]:
    """(f, rest) with log(1 + f) = f + rest."""
    s = m.div(f, m.add(f, m.c(2.0)))
    z = m.mul(s, s)
    half_square = m.mul(m.mul(f, f), m.c(0.5))
    inner = m.fma(m.polynomial(z, _LOG[m.bits]), z, half_square)
    return f, m.fma(s, inner, m.neg(half_square))


def _log_specials(m: Math, x: str, result: str) -> str:
    if m.has_exponents:  # zeros and infinities are right
        return m.select(m.test("olt", x, m.c(0.0)), m.c(math.nan), result)
    positive = m.test("ogt", x, m.c(0.0))
    result = m.select(m.test("oeq", x, m.c(_INF)), x, result)
    zero_or_nan = m.select(m.test("oeq", x, m.c(0.0)), m.c(-_INF), m.c(math.nan))
    return m.select(positive, result, zero_or_nan)


def log(m: Math, x: str) -> str:
    k, f = _reduce_log(m, x)
    f, rest = _log_of(m, f)
    high, low = _LOG_LN2[m.bits]
    small = m.fma(k, m.c(low), rest)
    return _log_specials(m, x, m.fma(k, m.c(high), m.add(f, small)))


def log2(m: Math, x: str) -> str:
    """log(1 + f) / ln2 with the rounding of the product given back."""
    if not m.target.has_fma and m.bits == 32:
        return in_double(log2)(m, x)
    k, f = _reduce_log(m, x)
    f, rest = _log_of(m, f)
    total = m.add(f, rest)
    lost = m.sub(rest, m.sub(total, f))
    high, low = (m.c(part) for part in _LOG2_E[m.bits])
    product = m.mul(total, high)
    error = m.fma(total, high, m.neg(product)) if m.target.has_fma else m.c(0.0)
    below = m.fma(total, low, m.fma(lost, high, error))
    return _log_specials(m, x, m.add(k, m.add(product, below)))


def log1p(m: Math, x: str) -> str:
    u = m.add(x, m.c(1.0))
    lost = m.sub(x, m.sub(u, m.c(1.0)))
    usable = m.test("one", lost, m.c(0.0))
    usable = m.f.binary("and", m.flag, usable, m.test("olt", m.abs(u), m.c(_INF)))
    correction = m.select(usable, m.div(lost, u), m.c(0.0))
    result = m.add(log(m, u), correction)
    return m.select(m.test("oeq", u, m.c(1.0)), x, result)


@in_double
def asinh(m: Math, x: str) -> str:
    a = m.abs(x)
    big = m.test("ogt", a, m.c(1e8))
    z = m.mul(a, a)
    near = log1p(m, m.add(a, m.div(z, m.add(m.sqrt(m.add(z, m.c(1.0))), m.c(1.0)))))
    far = m.add(log(m, a), m.c(math.log(2)))
    return m.copysign(m.select(big, far, near), x)


@in_double
def acosh(m: Math, x: str) -> str:
    t = m.sub(x, m.c(1.0))
    near = log1p(m, m.add(t, m.sqrt(m.fma(t, t, m.add(t, t)))))
    far = m.add(log(m, x), m.c(math.log(2)))
    made = m.select(m.test("ogt", x, m.c(1e8)), far, near)
    return m.select(m.test("olt", x, m.c(1.0)), m.c(math.nan), made)


@in_double
def atanh(m: Math, x: str) -> str:
    a = m.abs(x)
    made = m.mul(log1p(m, m.div(m.add(a, a), m.sub(m.c(1.0), a))), m.c(0.5))
    return m.copysign(made, x)


def power(m: Math, x: str, y: str) -> str:
    """f32 through f64, where a plain product of logarithms is accurate enough; f64 with logarithms of two words."""
    f = m.f
    if m.bits == 64:
        if not m.target.has_fma:
            return library("pow", m, x, y)
        magnitude = _power_in_two_words(m, m.abs(x), y)
    else:
        wide = m.doubled()
        a, b = (f.convert("fpext", m.type, v, wide.type) for v in (m.abs(x), y))
        magnitude = f.convert("fptrunc", wide.type, _exp2_short(wide, wide.mul(_log2_short(wide, a), b)), m.type)
    whole = m.test("oeq", f.intrinsic("trunc", m.type, y), y)
    half = m.mul(y, m.c(0.5))
    odd = f.binary("and", m.flag, whole, m.test("one", f.intrinsic("trunc", m.type, half), half))
    signed = m.select(odd, m.copysign(magnitude, x), magnitude)
    finite_negative = f.binary("and", m.flag, m.test("olt", x, m.c(0.0)), m.test("ogt", x, m.c(-_INF)))
    not_whole = f.binary("xor", m.flag, whole, constant(m.flag, 1))
    signed = m.select(f.binary("and", m.flag, finite_negative, not_whole), m.c(math.nan), signed)
    is_one = f.binary("or", m.flag, m.test("oeq", y, m.c(0.0)), m.test("oeq", x, m.c(1.0)))
    # (-1) ** ±inf is 1
    unit = f.binary("and", m.flag, m.test("oeq", m.abs(x), m.c(1.0)), m.test("oeq", m.abs(y), m.c(_INF)))
    return m.select(f.binary("or", m.flag, is_one, unit), m.c(1.0), signed)


def _product(m: Math, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str]:
    """Of two numbers of two words each."""
    high = m.mul(a[0], b[0])
    return high, m.fma(a[1], b[0], m.fma(a[0], b[1], m.fma(a[0], b[0], m.neg(high))))


def _sum(m: Math, large: str, b: tuple[str, str]) -> tuple[str, str]:
    """Of a number that is 0 or not smaller than the other, which has two words."""
    high = m.add(large, b[0])
    return high, m.add(m.sub(b[0], m.sub(high, large)), b[1])


def _power_in_two_words(m: Math, x: str, y: str) -> str:
    """xʸ of f64, x not negative: log2 x to 63 bits, as s (2 + s² (⅔ + …)) with s = f / (2 + f)."""
    k, f = _reduce_log(m, x)
    below, below_rest = _sum(m, m.c(2.0), (f, m.c(0.0)))
    s = m.div(f, below)
    rest = m.fma(m.neg(s), below_rest, m.fma(m.neg(s), below, f))
    both = s, m.div(rest, below)
    z = _product(m, both, both)
    tail = m.fma(z[0], m.polynomial(z[0], _LOG_TAIL), m.c(_TWO_THIRDS[1]))
    inner = _product(m, z, _sum(m, m.c(_TWO_THIRDS[0]), (tail, m.c(0.0))))
    natural = _product(m, both, _sum(m, m.c(2.0), inner))
    high, low = (m.c(part) for part in _LOG2_E[64])
    log = _sum(m, k, _product(m, natural, (high, low)))
    exponent = m.mul(_log_specials(m, x, log[0]), y)
    usual = m.test("olt", m.abs(exponent), m.c(1100.0))
    lost = m.fma(log[1], y, m.fma(log[0], y, m.neg(exponent)))
    lost = m.select(usual, lost, m.c(0.0))  # of infinities it is NaN
    inside = m.at_most(m.at_least(exponent, -1100.0), 1100.0)
    shifted = m.add(inside, m.c(MAGIC[64]))
    n = m.sub(shifted, m.c(MAGIC[64]))
    r = m.mul(m.add(m.sub(inside, n), lost), m.c(math.log(2)))
    q = m.fma(m.mul(r, r), m.polynomial(r, _EXPM1[64]), r)
    return _scale(m, m.add(q, m.c(1.0)), n, m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[64]))))


def _log2_short(m: Math, x: str) -> str:
    """log2 in f64 to 38 bits: what a power in f32 needs."""
    k, f = _reduce_log(m, x)
    s = m.div(f, m.add(f, m.c(2.0)))
    z = m.mul(s, s)
    part = m.fma(m.mul(s, z), m.polynomial(z, _LOG[40]), m.add(s, s))
    return _log_specials(m, x, m.fma(part, m.c(_LOG2_E[64][0]), k))


def _exp2_short(m: Math, x: str) -> str:
    """2ˣ in f64 to 38 bits, where the result is not below 2⁻²⁰⁰ and not above 2²⁰⁰."""
    inside = m.at_most(m.at_least(x, -200.0), 200.0)
    shifted = m.add(inside, m.c(MAGIC[64]))
    r = m.sub(inside, m.sub(shifted, m.c(MAGIC[64])))
    n = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[64])))
    scale = m.power_of_two(n)
    return m.fma(m.mul(scale, r), m.polynomial(r, _EXP2_SHORT), scale)


def integer_power(f: Function, type_: str, x: str, y: str, *, signed: bool) -> str:
    """Square and multiply, one bit of the exponent a turn, wrapping; a negative exponent gives 0, 1 or -1."""
    flag = with_element(type_, "i1")

    def turn(_: str, state: list[str]) -> list[str]:
        result, base, rest = state
        odd = f.compare("ne", type_, f.binary("and", type_, rest, constant(type_, 1)), constant(type_, 0))
        multiplied = f.select(type_, odd, f.binary("mul", type_, result, base), result)
        return [multiplied, f.binary("mul", type_, base, base), f.binary("lshr", type_, rest, constant(type_, 1))]

    carried = ((type_, constant(type_, 1)), (type_, x), (type_, y))
    result = f.loop(0, bits_of(type_), 1, carried, turn)[0]
    if not signed:
        return result
    negative = f.compare("slt", type_, y, constant(type_, 0))
    odd = f.compare("ne", type_, f.binary("and", type_, y, constant(type_, 1)), constant(type_, 0))
    minus_one = f.compare("eq", type_, x, constant(type_, -1))
    alternate = f.select(type_, odd, constant(type_, -1), constant(type_, 1))
    one = f.compare("eq", type_, x, constant(type_, 1))
    inverse = f.select(type_, minus_one, alternate, f.select(type_, one, x, constant(type_, 0)))
    return f.select(type_, f.op(f"and {flag} {negative}, {negative}"), inverse, result)


def greatest_divisor(f: Function, type_: str, x: str, y: str, *, signed: bool) -> str:
    """Euclid's algorithm, as many turns as the slowest lane needs."""
    if signed:  # the magnitudes, read as unsigned
        x, y = (f.call(type_, f"llvm.abs.{suffix(type_)}", (type_, v), ("i1", "false")) for v in (x, y))
    head, turn, done = f.fresh("head"), f.fresh("turn"), f.fresh("done")
    before, a, b = f.block, "%" + f.fresh("a"), "%" + f.fresh("b")
    next_a, next_b = "%" + f.fresh("a"), "%" + f.fresh("b")
    f.branch(head)
    f.label(head)
    f.statement(f"{a} = phi {type_} [ {x}, %{before} ], [ {next_a}, %{turn} ]")
    f.statement(f"{b} = phi {type_} [ {y}, %{before} ], [ {next_b}, %{turn} ]")
    ended = f.compare("eq", type_, b, constant(type_, 0))
    flag = with_element(type_, "i1")
    lanes = lanes_of(type_)
    all_ended = ended if lanes == 1 else f.call("i1", f"llvm.vector.reduce.and.v{lanes}i1", (flag, ended))
    f.branch_if(all_ended, done, turn)
    f.label(turn)
    rest = f.binary("urem", type_, a, f.select(type_, ended, constant(type_, 1), b))
    f.statement(f"{next_a} = select {flag} {ended}, {type_} {a}, {type_} {b}")
    f.statement(f"{next_b} = select {flag} {ended}, {type_} {b}, {type_} {rest}")
    f.branch(head)
    f.label(done)
    return a


# the rest


def lgamma(m: Math, x: str) -> str:
    return library("lgamma", m, x)


def fmod(m: Math, x: str, y: str) -> str:
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


def python_mod(m: Math, x: str, y: str) -> str:
    r = fmod(m, x, y)
    differs = m.test("one", r, m.c(0.0))
    signs = m.f.binary("xor", m.flag, m.test("olt", r, m.c(0.0)), m.test("olt", y, m.c(0.0)))
    fixed = m.select(m.f.binary("and", m.flag, differs, signs), m.add(r, y), r)
    return m.select(m.test("oeq", fixed, m.c(0.0)), m.copysign(m.c(0.0), y), fixed)


def floor_divide(m: Math, x: str, y: str) -> str:
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


def hypot(m: Math, x: str, y: str) -> str:
    """√(x² + y²) without overflow on the way."""
    if m.bits == 32:
        wide = m.doubled()
        a, b = (m.f.convert("fpext", m.type, v, wide.type) for v in (x, y))
        root = m.f.convert("fptrunc", wide.type, wide.sqrt(wide.fma(a, a, wide.mul(b, b))), m.type)
        infinite = m.f.binary("or", m.flag, m.test("oeq", m.abs(x), m.c(_INF)), m.test("oeq", m.abs(y), m.c(_INF)))
        return m.select(infinite, m.c(_INF), root)
    return library("hypot", m, x, y)
