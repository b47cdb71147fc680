"""Logarithms and inverse hyperbolic functions as straight-line vector code.

With tables in registers (AVX-512; f64 in some functions) a number is 2ᵏ · c · (1 + f): c is the nearest of sixteen
numbers, in f32 such that its logarithm is all but a float, so that log x = k ln2 + log c + log(1 + f) with a short
polynomial. Else it is 2ᵏ (1 + f), and log(1 + f) a polynomial in f / (2 + f). Bounds are as in `exponentials`."""

from __future__ import annotations

import math
from typing import Final

from strata.backends.llvm.ir.float_ops import MANTISSA, VectorMath, in_double

_INF: Final = math.inf
LEAST_NORMAL = {32: 2.0**-126, 64: 2.0**-1022}

# (log((1 + s) / (1 - s)) - 2s) / s³ as a function of s², for (1 + s) / (1 - s) in [⅔, 1½]: to 33, 40 and 60 bits
LOG = {
    32: (0.6666666627679424, 0.4000031148954007, 0.2853272481682966, 0.23747744217942318),
    40: (0.6666666667003059, 0.3999999579905708, 0.2857226548730508, 0.22164123984126827, 0.19811681903039247),
    64: (0.6666666666666666, 0.4000000000000781, 0.285714285673329, 0.22222223038856737, 0.18181738372176304,
         0.15388837982487807, 0.13210295347045856, 0.13604517062769542),
}  # fmt: skip
LOG2_E = {32: (1.4426950216293335, 1.925963033500117e-08), 64: (1.4426950408889634, 2.0355273740931033e-17)}
# both parts positive: infinities do not cancel
_LOG_LN2 = {32: (0.693115234375, 3.1946183870e-05), 64: (0.6931471675634384, 1.2996506893889889e-08)}

# 1 / c and the logarithm of c by the first four bits of a mantissa in [¾, 1½): in base e, then in base 2
_NEAR = {
    "e": (
        (1.0, 0.9144760966300964, 0.864982545375824, 0.8206610679626465, 0.7804491519927979, 0.7440316081047058,
         0.7110862731933594, 0.6810204982757568, 1.3065136671066284, 1.2551628351211548, 1.2075895071029663,
         1.1636261940002441, 1.123076319694519, 1.0843793153762817, 1.0495269298553467, 1.0),
        (0.0, 0.08940394967794418, 0.1450459510087967, 0.19764508306980133, 0.24788568913936615, 0.2956717610359192,
         0.3409615159034729, 0.38416287302970886, -0.2673622667789459, -0.22726531326770782, -0.188626229763031,
         -0.15154115855693817, -0.11607163399457932, -0.08100776374340057, -0.048339519649744034, 0.0),
    ),
    "2": (
        (1.0, 0.9141800999641418, 0.864696204662323, 0.8205010294914246, 0.7804515361785889, 0.7441802620887756,
         0.7112435698509216, 0.6807578206062317, 1.306103229522705, 1.255354642868042, 1.207939624786377,
         1.1632314920425415, 1.1224420070648193, 1.0847076177597046, 1.048885464668274, 1.0),
        (0.0, 0.12944968044757843, 0.2097347378730774, 0.2854229509830475, 0.357619047164917, 0.42627596855163574,
         0.4915843904018402, 0.5547864437103271, -0.3852689266204834, -0.3280949890613556, -0.2725483477115631,
         -0.21813823282718658, -0.16664090752601624, -0.11730621755123138, -0.06885714828968048, 0.0),
    ),
}  # fmt: skip
# (log(1 + f) - f) / f² and log2(1 + f) / f, for f from -1/32 to 1/16
_NEAR_E = (-0.5000000095174152, 0.3333444692486936, -0.25006669763161415, 0.18855219540622045)
_NEAR_2 = (1.44269503775118, -0.7213475528328663, 0.48091866066873556, -0.36077306032334583, 0.27120750055855675)
# 1 / c of f64 by the first four bits of a mantissa in [¾, 1½), chosen so that the logarithms of c in both bases are
# all but numbers of f64: off by a hundredth of a place at most
INVERSES = (
    1.0, 0.914345645904541, 0.8649062981476655, 0.820515302511362, 0.7805018541289539, 0.7441993425058764,
    0.7111140886942546, 0.6808659066545202, 1.3061240254616249, 1.2549188277300667, 1.2076356276026312,
    1.1636553677645596, 1.1228183110555012, 1.08475332745051, 1.0492118460233095, 1.0,
)  # fmt: skip
_LOGARITHMS = {"e": tuple(-math.log(c) for c in INVERSES), "2": tuple(-math.log2(c) for c in INVERSES)}
# (log(1 + f) - f + f²/2) / f³ for f from -1/32 to 1/16, to 33 and 62 bits of the logarithm
LOG_NEAR = {32: (0.33333341679695144, -0.2500111637796767, 0.19997291026079103, -0.15533318330438567), 64: (
    0.3333333333333333, -0.2500000000000004, 0.20000000000016763, -0.16666666666491084, 0.14285714215121456,
    -0.1249999959095311, 0.11111207577147492, -0.10001621097638053, 0.09055655706248213, -0.07255065447695472,
)}  # fmt: skip
# (asinh x - x) / x³ in x², |x| ≤ ½
_ASINH = (
    -0.16666643869385356, 0.07498663344213377, -0.044385868470018436, 0.028175553332144977, -0.013248071430890134,
)  # fmt: skip
_ASINH_FAR: Final = {32: 4096.0, 64: 2.0**27}  # from where x² + 1 is x² as far as a float can tell


def reduce_log(m: VectorMath, x: str) -> tuple[str, str]:
    """(k as a float, f) with x = 2ᵏ (1 + f) and 1 + f near 1, for positive x; k is infinite where log x is."""
    if m.has_exponents:
        mantissa = m.mantissa(x)
        return m.sub(m.exponent(x), m.exponent(mantissa)), m.sub(mantissa, m.c(1.0))
    tiny = m.test("olt", x, m.c(LEAST_NORMAL[m.bits]))
    bits = m.as_bits(m.select(tiny, m.mul(x, m.c(2.0 ** (MANTISSA[m.bits] + 1))), x))
    root = m.as_bits(m.c(math.sqrt(0.5)))
    offset = m.integer("sub", bits, root)
    k = m.integer("ashr", offset, m.i(MANTISSA[m.bits]))
    mantissa = m.integer("sub", bits, m.integer("shl", k, m.i(MANTISSA[m.bits])))
    exponent = m.f.convert("sitofp", m.whole, k, m.type)
    exponent = m.sub(exponent, m.select(tiny, m.c(MANTISSA[m.bits] + 1.0), m.c(0.0)))
    return exponent, m.sub(m.from_bits(mantissa), m.c(1.0))


def log_specials(m: VectorMath, x: str, result: str) -> str:
    """What the logarithm of zeros, infinities and negative numbers is, where the result is not that already."""
    if m.has_exponents:  # zeros and infinities are right
        return m.select(m.test("olt", x, m.c(0.0)), m.c(math.nan), result)
    positive = m.test("ogt", x, m.c(0.0))
    result = m.select(m.test("oeq", x, m.c(_INF)), x, result)
    zero_or_nan = m.select(m.test("oeq", x, m.c(0.0)), m.c(-_INF), m.c(math.nan))
    return m.select(positive, result, zero_or_nan)


def _log_of(m: VectorMath, f: str) -> tuple[str, str]:
    """(f, rest) with log(1 + f) = f + rest."""
    s = m.div(f, m.add(f, m.c(2.0)))
    z = m.mul(s, s)
    half_square = m.mul(m.mul(f, f), m.c(0.5))
    inner = m.fma(m.polynomial(z, LOG[m.bits]), z, half_square)
    return f, m.fma(s, inner, m.neg(half_square))


def _from_table(m: VectorMath, x: str, base: str, low: str = "") -> tuple[str, str, str]:
    """(k, log c, f) of x and, where it is given, a second word."""
    mantissa = m.mantissa(x)
    k = m.sub(m.exponent(x), m.exponent(mantissa))
    place = m.integer("lshr", m.as_bits(mantissa), m.i(MANTISSA[32] - 4))
    inverse, start = (m.look_up(place, numbers) for numbers in _NEAR[base])
    f = m.fma(mantissa, inverse, m.c(-1.0))
    if low:
        down = m.sub(m.exponent(mantissa), m.exponent(x))
        f = m.fma(m.scaled(low, m.at_most(down, 126.0)), inverse, f)  # of 0 it is infinite
    return k, start, f


def _from_wide_table(m: VectorMath, x: str, base: str, low: str = "") -> tuple[str, str, str]:
    """(k, log c, natural log(1 + f)) of a number of f64 and, where it is given, a second word."""
    mantissa = m.mantissa(x)
    k = m.sub(m.exponent(x), m.exponent(mantissa))
    place = m.integer("lshr", m.as_bits(mantissa), m.i(MANTISSA[64] - 4))
    inverse, start = (m.look_up(place, numbers) for numbers in (INVERSES, _LOGARITHMS[base]))
    f = m.fma(mantissa, inverse, m.c(-1.0))
    if low:
        f = m.fma(m.scaled(low, m.neg(k)), inverse, f)
    square = m.mul(f, f)
    tail = m.fma(m.polynomial_of_halves(f, square, LOG_NEAR[64]), f, m.c(-0.5))
    return k, start, m.fma(square, tail, f)


def _natural(m: VectorMath, k: str, start: str, f: str) -> str:
    near = m.fma(m.mul(f, f), m.polynomial(f, _NEAR_E), f)
    return m.fma(k, m.c(math.log(2)), m.add(start, near))


def log(m: VectorMath, x: str) -> str:
    if m.has_tables:
        return log_specials(m, x, _natural(m, *_from_table(m, x, "e")))
    k, f = reduce_log(m, x)
    f, rest = _log_of(m, f)
    high, low = _LOG_LN2[m.bits]
    small = m.fma(k, m.c(low), rest)
    return log_specials(m, x, m.fma(k, m.c(high), m.add(f, small)))


def log2(m: VectorMath, x: str) -> str:
    """Without a table log(1 + f) / ln2, with the rounding of the product given back."""
    if m.has_tables:
        k, start, f = _from_table(m, x, "2")
        return log_specials(m, x, m.add(k, m.fma(f, m.polynomial(f, _NEAR_2), start)))
    if m.has_wide_tables:
        k, start, near = _from_wide_table(m, x, "2")
        return log_specials(m, x, m.add(k, m.fma(near, m.c(LOG2_E[64][0]), start)))
    if not m.target.has_fma and m.bits == 32:
        return in_double(log2)(m, x)
    k, f = reduce_log(m, x)
    f, rest = _log_of(m, f)
    total = m.add(f, rest)
    lost = m.sub(rest, m.sub(total, f))
    high, low = (m.c(part) for part in LOG2_E[m.bits])
    product = m.mul(total, high)
    error = m.fma(total, high, m.neg(product)) if m.target.has_fma else m.c(0.0)
    below = m.fma(total, low, m.fma(lost, high, error))
    return log_specials(m, x, m.add(k, m.add(product, below)))


def log1p(m: VectorMath, x: str) -> str:
    u = m.add(x, m.c(1.0))
    lost = m.sub(x, m.sub(u, m.c(1.0)))
    if m.has_tables:
        made = _natural(m, *_from_table(m, u, "e", m.bounded(lost, 1.0)))  # of infinity, what is lost is not a number
        return m.copysign(log_specials(m, u, made), x)
    usable = m.test("one", lost, m.c(0.0))
    usable = m.f.binary("and", m.flag, usable, m.test("olt", m.abs(u), m.c(_INF)))
    correction = m.select(usable, m.div(lost, u), m.c(0.0))
    result = m.add(log(m, u), correction)
    return m.select(m.test("oeq", u, m.c(1.0)), x, result)


# inverses of hyperbolic functions


def asinh(m: VectorMath, x: str) -> str:
    """log(|x| + √(x² + 1)), the sum in two words."""
    if m.has_wide_tables:
        return _asinh_by_wide_table(m, x)
    if not m.has_tables:
        return _asinh_in_double(m, x)
    a, z = m.abs(x), m.mul(x, x)
    small = m.fma(m.mul(x, z), m.polynomial(z, _ASINH), x)
    square = m.fma(a, a, m.c(1.0))
    rest = m.fma(a, a, m.sub(m.c(1.0), square))
    root, root_rest = _root_in_two_words(m, square, square, rest)
    far = m.test("ogt", a, m.c(_ASINH_FAR[32]))
    total = m.add(root, a)
    total_rest = m.add(m.sub(a, m.sub(total, root)), root_rest)
    k, start, f = _from_table(m, m.select(far, a, total), "e", m.select(far, m.c(0.0), total_rest))
    k = m.select(far, m.add(k, m.c(1.0)), k)  # there it is log 2x
    return m.copysign(m.select(m.test("olt", z, m.c(0.25)), small, _natural(m, k, start, f)), x)


def _asinh_by_wide_table(m: VectorMath, x: str) -> str:
    """As above in f64, where small numbers, too, are what the second word says."""
    a = m.abs(x)
    square = m.fma(a, a, m.c(1.0))
    root, root_rest = _wide_root(m, square, m.fma(a, a, m.sub(m.c(1.0), square)))
    return m.copysign(_log_of_sum(m, a, root, a, root_rest), x)


def _wide_root(m: VectorMath, square: str, rest: str = "") -> tuple[str, str]:
    """√ of a number of one or two words that is not 0."""
    root = m.sqrt(square)
    near = m.inverse_near(root)
    inverse = m.fma(m.fma(m.neg(root), near, m.c(1.0)), near, near)
    left = m.fma(m.neg(root), root, square)
    return root, m.mul(m.add(left, rest) if rest else left, m.mul(inverse, m.c(0.5)))


def _log_of_sum(m: VectorMath, a: str, large: str, small: str, rest: str) -> str:
    """log(large + small) in f64, and of what is left of it; log 2a where a is so large that it is that."""
    far = m.test("ogt", a, m.c(_ASINH_FAR[64]))
    total = m.add(large, small)
    total_rest = m.select(far, m.c(0.0), m.add(m.sub(small, m.sub(total, large)), rest))
    total = m.select(far, a, total)
    k, start, near = _from_wide_table(m, total, "e", total_rest)
    k = m.select(far, m.add(k, m.c(1.0)), k)
    return m.fma(k, m.c(math.log(2)), m.add(start, near))


def acosh(m: VectorMath, x: str) -> str:
    """log(x + √(x² - 1)), the sum in two words."""
    if m.has_wide_tables:
        return _acosh_by_wide_table(m, x)
    if not m.has_tables:
        return _acosh_in_double(m, x)
    square = m.fma(x, x, m.c(-1.0))
    root, root_rest = _root_in_two_words(m, square, m.at_least(square, 2.0**-64))
    far = m.test("ogt", x, m.c(_ASINH_FAR[32]))
    total = m.add(x, root)
    total_rest = m.add(m.sub(root, m.sub(total, x)), root_rest)
    k, start, f = _from_table(m, m.select(far, x, total), "e", m.select(far, m.c(0.0), total_rest))
    k = m.select(far, m.add(k, m.c(1.0)), k)
    return m.select(m.test("olt", x, m.c(1.0)), m.c(math.nan), _natural(m, k, start, f))


def _acosh_by_wide_table(m: VectorMath, x: str) -> str:
    root, root_rest = _wide_root(m, m.at_least(m.fma(x, x, m.c(-1.0)), 2.0**-52))
    made = _log_of_sum(m, x, x, root, root_rest)
    made = m.select(m.test("oeq", x, m.c(1.0)), m.c(0.0), made)
    return m.select(m.test("olt", x, m.c(1.0)), m.c(math.nan), made)


def atanh(m: VectorMath, x: str) -> str:
    """½ log(1 + 2x / (1 - x)) of |x|, the quotient in two words."""
    if not m.has_tables:
        return _atanh_in_double(m, x)
    a = m.abs(x)
    below = m.sub(m.c(1.0), a)
    below_rest = m.sub(m.sub(m.c(1.0), below), a)
    inverse, double = m.inverse_near(below), m.add(a, a)
    ratio = m.mul(double, inverse)
    left = m.fma(m.neg(ratio), below_rest, m.fma(m.neg(ratio), below, double))
    total = m.add(ratio, m.c(1.0))
    rest = m.fma(left, inverse, m.sub(ratio, m.sub(total, m.c(1.0))))
    k, start, f = _from_table(m, total, "e", m.bounded(rest, 2.0**16))  # at 1 it is not a number
    made = log_specials(m, total, m.mul(_natural(m, k, start, f), m.c(0.5)))
    return m.copysign(made, x)


def _root_in_two_words(m: VectorMath, square: str, above: str, rest: str = "") -> tuple[str, str]:
    """√ of a number of one or two words; `above` is the first, or what stands for it where that is 0."""
    inverse = m.inverse_root_near(above)
    root = m.mul(square, inverse)
    left = m.fma(m.neg(root), root, square)
    return root, m.mul(m.mul(inverse, m.c(0.5)), m.add(left, rest) if rest else left)


@in_double
def _asinh_in_double(m: VectorMath, x: str) -> str:
    a = m.abs(x)
    big = m.test("ogt", a, m.c(1e8))
    z = m.mul(a, a)
    near = log1p(m, m.add(a, m.div(z, m.add(m.sqrt(m.add(z, m.c(1.0))), m.c(1.0)))))
    far = m.add(log(m, a), m.c(math.log(2)))
    return m.copysign(m.select(big, far, near), x)


@in_double
def _acosh_in_double(m: VectorMath, x: str) -> str:
    t = m.sub(x, m.c(1.0))
    near = log1p(m, m.add(t, m.sqrt(m.fma(t, t, m.add(t, t)))))
    far = m.add(log(m, x), m.c(math.log(2)))
    made = m.select(m.test("ogt", x, m.c(1e8)), far, near)
    return m.select(m.test("olt", x, m.c(1.0)), m.c(math.nan), made)


@in_double
def _atanh_in_double(m: VectorMath, x: str) -> str:
    a = m.abs(x)
    made = m.mul(log1p(m, m.div(m.add(a, a), m.sub(m.c(1.0), a))), m.c(0.5))
    return m.copysign(made, x)
