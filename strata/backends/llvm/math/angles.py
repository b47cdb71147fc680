"""sin, cos, tan and their inverses as straight-line vector code, and the complex functions made of them.

Bounds and coefficients are as in `exponentials`."""

from __future__ import annotations

import math
from collections.abc import Callable

from strata.backends.llvm.ir.builder import lanes_of, suffix
from strata.backends.llvm.ir.float_ops import MAGIC, VectorMath, library
from strata.backends.llvm.math.exponentials import exp, hypot
from strata.backends.llvm.math.logs import log

# (sin x - x) / x³ and (cos x - 1 + x²/2) / x⁴ as functions of x², |x| ≤ π/4
_SIN = {
    32: (-0.16666666663624022, 0.00833333178567173, -0.00019840039113012213, 2.7243811975258105e-06),
    64: (-0.16666666666666666, 0.008333333333333331, -0.0001984126984126457, 2.755731921895673e-06,
         -2.5052106100926675e-08, 1.605851097953535e-10, -7.58549250782124e-13),
}  # fmt: skip
_COS = {
    32: (0.04166666453694609, -0.0013888279449649538, 2.454289633694463e-05),
    64: (0.041666666666666664, -0.0013888888888888887, 2.480158730158437e-05, -2.75573192211902e-07,
         2.0876755717957296e-09, -1.147044941240971e-11, 4.745202155702359e-14),
}  # fmt: skip
# (tan x - x) / x³ in x², |x| ≤ π/4
_TAN = (
    0.33333333286900957, 0.133333429485378, 0.05396501346636389, 0.021910702780532202, 0.008609118222415316,
    0.004425659266571193, -4.415010354464529e-07, 0.001789472626449566,
)  # fmt: skip
# (atan x - x) / x³ in x², |x| ≤ 1
_ATAN = {
    32: (-0.3333333308107325, 0.19999949321141886, -0.14284003794733482, 0.11088261628734793, -0.08931826777379753,
         0.07031914250026051, -0.048960514027031186, 0.026305001110008577, -0.009144629760565749,
         0.0014886919392991963),
    64: (-0.3333333333333333, 0.19999999999999554, -0.14285714285648404, 0.11111111107234799, -0.09090908969557403,
         0.07692305354678655, -0.06666636435777692, 0.05882074956371294, -0.05261265735709454, 0.04752086773576656,
         -0.04308119655330471, 0.03872640214042632, -0.033750132001619734, 0.027567942297344678,
         -0.020238706986393514, 0.012756172907694298, -0.006575683344151699, 0.002622977891906089,
         -0.0007518472526973822, 0.0001368724853148122, -1.1832505417555692e-05),
}  # fmt: skip
# (asin x - x) / x³ in x² up to the limit; f32 goes on to where the other form has no bits to lose
_ASIN_LIMIT = {32: 0.66, 64: 0.5}
_ASIN = {
    32: (0.16666666407728126, 0.07500075099261438, 0.044607567497323856, 0.031004503506890234, 0.017084481771006015,
         0.040992548877648034, -0.04123485958348494, 0.06933974044167242),
    64: (0.16666666666666666, 0.07500000000000118, 0.044642857142551895, 0.03038194447553234, 0.02237215744350722,
         0.017352816540325496, 0.01396378001220357, 0.011566459612121669, 0.009621842970100282, 0.009319560794767446,
         0.0030448799094556773, 0.019554513336123378, -0.01924167174674304, 0.02961201126495512),
}  # fmt: skip

_HALF_PI = {
    32: (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    64: (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
}
_TURN_LIMIT = {32: 30000.0, 64: 1.0e6}  # above, the remainder by π/2 needs more bits than three words of it


def _reduce_turn(m: VectorMath, x: str) -> tuple[str, str]:
    """(quadrant as an integer, r) with x = quadrant π/2 + r and |r| ≤ π/4."""
    shifted = m.fma(x, m.c(2 / math.pi), m.c(MAGIC[m.bits]))
    n = m.sub(shifted, m.c(MAGIC[m.bits]))
    r = x
    for part in _HALF_PI[m.bits]:
        r = m.f.fma(m.type, n, m.c(-part), r)  # rounded once even where that is slow: the terms cancel
    return m.as_bits(shifted), r


def _turning(m: VectorMath, x: str, name: str, make: Callable[[str, str], str]) -> str:
    """make(quadrant, what is left); arguments too large for three words of π go to the C library. Others in the same
    register keep the bits that they have without them."""
    f = m.f
    near = make(*_reduce_turn(m, x))
    large = m.test("ogt", m.abs(x), m.c(_TURN_LIMIT[m.bits]))
    some = large
    if lanes_of(m.type) > 1:
        some = f.call("i1", f"llvm.vector.reduce.or.{suffix(m.flag)}", (m.flag, large))
    return f.if_(some, lambda: [m.select(large, library(name, m, x), near)], lambda: [near], (m.type,))[0]


def _sine_and_cosine(m: VectorMath, r: str) -> tuple[str, str]:
    z = m.mul(r, r)
    sine = m.fma(m.mul(r, z), m.polynomial(z, _SIN[m.bits]), r)
    return sine, m.add(m.fma(m.mul(z, z), m.polynomial(z, _COS[m.bits]), m.mul(z, m.c(-0.5))), m.c(1.0))


def _is_odd(m: VectorMath, quadrant: str) -> str:
    return m.f.compare("ne", m.whole, m.integer("and", quadrant, m.i(1)), m.i(0))


def _with_sign(m: VectorMath, quadrant: str, value: str) -> str:
    """Minus the value in the third and fourth quadrants."""
    sign = m.integer("shl", m.integer("and", quadrant, m.i(2)), m.i(m.bits - 2))
    return m.from_bits(m.integer("xor", m.as_bits(value), sign))


def sin(m: VectorMath, x: str) -> str:
    def make(quadrant: str, r: str) -> str:
        sine, cosine = _sine_and_cosine(m, r)
        value = _with_sign(m, quadrant, m.select(_is_odd(m, quadrant), cosine, sine))
        return m.select(m.test("oeq", x, m.c(0.0)), x, value)  # sin(-0) is -0

    return _turning(m, x, "sin", make)


def cos(m: VectorMath, x: str) -> str:
    def make(quadrant: str, r: str) -> str:
        sine, cosine = _sine_and_cosine(m, r)
        following = m.integer("add", quadrant, m.i(1))
        return _with_sign(m, following, m.select(_is_odd(m, following), cosine, sine))

    return _turning(m, x, "cos", make)


def tan(m: VectorMath, x: str) -> str:
    def make(quadrant: str, r: str) -> str:
        odd = _is_odd(m, quadrant)
        if m.bits == 32:
            r, lost = _reduce_turn_exactly(m, x)
            z = m.mul(r, r)
            inner = m.fma(lost, m.add(z, m.c(1.0)), m.mul(m.mul(r, z), m.polynomial(z, _TAN)))
            tangent = m.add(r, inner)
            value = m.select(odd, m.div(m.c(-1.0), tangent), tangent)
        else:
            sine, cosine = _sine_and_cosine(m, r)
            value = m.div(m.select(odd, m.neg(cosine), sine), m.select(odd, sine, cosine))
        return m.select(m.test("oeq", x, m.c(0.0)), x, value)

    return _turning(m, x, "tan", make)


def _reduce_turn_exactly(m: VectorMath, x: str) -> tuple[str, str]:
    """r of `_reduce_turn`, and what it was rounded by."""
    fma = m.f.fma
    n = m.sub(m.fma(x, m.c(2 / math.pi), m.c(MAGIC[m.bits])), m.c(MAGIC[m.bits]))
    first, second, third = (m.c(-part) for part in _HALF_PI[m.bits])
    near = fma(m.type, n, first, x)  # exact: a multiple of the last bit of π
    product = m.mul(n, second)
    total = m.add(near, product)
    added = m.sub(total, near)
    error = m.add(m.sub(near, m.sub(total, added)), m.sub(product, added))
    lost = fma(m.type, n, third, m.add(error, fma(m.type, n, second, m.neg(product))))
    r = m.add(total, lost)
    return r, m.sub(lost, m.sub(r, total))


def atan(m: VectorMath, x: str) -> str:
    a = m.abs(x)
    inverted = m.test("ogt", a, m.c(1.0))
    t = m.select(inverted, m.div(m.c(1.0), a), a)
    made = _atan_of(m, t)
    turned = m.add(m.sub(m.c(_HALF_PI[m.bits][0]), made), m.c(_HALF_PI[m.bits][1]))
    return m.copysign(m.select(inverted, turned, made), x)


def _atan_of(m: VectorMath, t: str) -> str:
    z = m.mul(t, t)
    return m.fma(m.mul(t, z), m.polynomial(z, _ATAN[m.bits]), t)


def atan2(m: VectorMath, y: str, x: str) -> str:
    ay, ax = m.abs(y), m.abs(x)
    steep = m.test("ogt", ay, ax)
    low, high = m.select(steep, ax, ay), m.select(steep, ay, ax)
    ratio = m.div(low, high)
    both_zero = m.test("oeq", high, m.c(0.0))
    both_infinite = m.test("oeq", low, m.c(math.inf))
    ratio = m.select(both_zero, m.c(0.0), m.select(both_infinite, m.c(1.0), ratio))
    angle = _atan_of(m, ratio)
    angle = m.select(steep, m.add(m.sub(m.c(_HALF_PI[m.bits][0]), angle), m.c(_HALF_PI[m.bits][1])), angle)
    backwards = m.f.compare("slt", m.whole, m.as_bits(x), m.i(0))
    angle = m.select(backwards, m.add(m.sub(m.c(2 * _HALF_PI[m.bits][0]), angle), m.c(2 * _HALF_PI[m.bits][1])), angle)
    unordered = m.test("uno", x, y)
    return m.select(unordered, m.c(math.nan), m.copysign(angle, y))


def _asin_half(m: VectorMath, t: str, z: str) -> str:
    return m.fma(m.mul(t, z), m.polynomial(z, _ASIN[m.bits]), t)


def _asin_of_size(m: VectorMath, x: str) -> tuple[str, str]:
    """Whether |x| is near 1, and asin of |x|, or there of what is half as far from π/2."""
    a = m.abs(x)
    outer = m.test("ogt", a, m.c(_ASIN_LIMIT[m.bits]))
    z = m.select(outer, m.mul(m.sub(m.c(1.0), a), m.c(0.5)), m.mul(a, a))
    return outer, _asin_half(m, m.select(outer, m.sqrt(z), a), z)


def asin(m: VectorMath, x: str) -> str:
    outer, made = _asin_of_size(m, x)
    turned = m.sub(m.c(_HALF_PI[m.bits][0]), m.sub(m.add(made, made), m.c(_HALF_PI[m.bits][1])))
    return m.copysign(m.select(outer, turned, made), x)


def acos(m: VectorMath, x: str) -> str:
    outer, made = _asin_of_size(m, x)
    double = m.add(made, made)
    negative = m.test("olt", x, m.c(0.0))
    far = m.select(negative, m.add(m.sub(m.c(2 * _HALF_PI[m.bits][0]), double), m.c(2 * _HALF_PI[m.bits][1])), double)
    near = m.sub(m.c(_HALF_PI[m.bits][0]), m.sub(m.copysign(made, x), m.c(_HALF_PI[m.bits][1])))
    return m.select(outer, far, near)


# complex numbers


_EXP_LIMIT = {32: 88.0, 64: 709.0}  # above, eˣ is taken in two steps: times a small sine it may still be a number
_ROOM = {32: (2.0**125, 2.0**-100), 64: (2.0**1021, 2.0**-968)}  # outside, a length overflows or lacks digits


def complex_exp(m: VectorMath, re: str, im: str) -> tuple[str, str]:
    limit = _EXP_LIMIT[m.bits]
    above = m.test("ogt", re, m.c(limit))
    e = exp(m, m.select(above, m.sub(re, m.c(limit)), re))
    rest = m.select(above, m.c(math.exp(limit)), m.c(1.0))
    real, imaginary = (m.mul(e, m.mul(part(m, im), rest)) for part in (cos, sin))
    imaginary = m.select(m.test("oeq", im, m.c(0.0)), im, imaginary)
    lost = m.test("une", m.sub(im, im), m.c(0.0))  # no direction: an infinite length stays, and so does none
    none = m.f.binary("and", m.flag, lost, m.test("oeq", re, m.c(-math.inf)))
    ends = m.f.binary("and", m.flag, lost, m.test("oeq", m.abs(re), m.c(math.inf)))
    return m.select(ends, e, real), m.select(none, e, imaginary)


def complex_log(m: VectorMath, re: str, im: str) -> tuple[str, str]:
    (x, y), scale = _with_room(m, re, im, (0.25, 2.0**64))
    lacks = _by_room(m, scale, (2 * math.log(2.0), -64 * math.log(2.0)), 0.0)
    return m.add(log(m, hypot(m, x, y)), lacks), atan2(m, im, re)


def complex_sqrt(m: VectorMath, re: str, im: str) -> tuple[str, str]:
    (x, y), scale = _with_room(m, re, im, (0.25, 2.0**64))
    size = hypot(m, x, y)
    root = m.sqrt(m.mul(m.add(size, m.abs(x)), m.c(0.5)))
    other = m.div(m.abs(y), m.add(root, root))
    other = m.select(m.test("oeq", root, m.c(0.0)), m.c(0.0), other)
    infinite = m.test("oeq", m.abs(im), m.c(math.inf))
    back = _by_room(m, scale, (2.0, 2.0**-32), 1.0)
    root, other = (m.select(infinite, m.c(math.inf), m.mul(v, back)) for v in (root, other))
    right = m.test("oge", re, m.c(0.0))
    return m.select(right, root, other), m.copysign(m.select(right, other, root), im)


def _with_room(m: VectorMath, re: str, im: str, scales: tuple[float, float]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Both parts, scaled where they are very large or very small, and the tests for both."""
    high, low = _ROOM[m.bits]
    a, b = m.abs(re), m.abs(im)
    larger = m.select(m.test("ogt", a, b), a, b)
    tests = m.test("ogt", larger, m.c(high)), m.test("olt", larger, m.c(low))
    scale = _by_room(m, tests, scales, 1.0)
    return (m.mul(re, scale), m.mul(im, scale)), tests


def _by_room(m: VectorMath, tests: tuple[str, str], values: tuple[float, float], usual: float) -> str:
    large, small = tests
    return m.select(large, m.c(values[0]), m.select(small, m.c(values[1]), m.c(usual)))
