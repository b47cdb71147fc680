"""pow and gcd as vector code. Error bounds are as in `exponentials`."""

from __future__ import annotations

import math
from typing import Final

from strata.backends.llvm.ir.builder import (
    IrFunction,
    Value,
    bits_of,
    constant,
    element_of,
    lanes_of,
    suffix,
    with_element,
)
from strata.backends.llvm.ir.float_ops import MAGIC, MANTISSA, VectorMath, library
from strata.backends.llvm.ir.native import while_loop
from strata.backends.llvm.math.exponentials import EXPM1, POWERS, scale_by
from strata.backends.llvm.math.logs import INVERSES, LOG, LOG2_E, LOG_NEAR, log_specials, reduce_log

_INF: Final = math.inf

# what is left of (log((1 + s) / (1 - s)) - 2s) / s³ after ⅔, divided by s²; and ⅔ in two words
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
# the same to 29 and to 54 bits, |r| ≤ 1/32
_EXP2_NEAR = {32: (0.6931471800725673, 0.24023429474074587, 0.055505909859790196), 64: (
    0.6931471805599453, 0.24022650695910086, 0.05550410866482159, 0.009618129106525547, 0.0013333558145579008,
    0.00015403756259242926, 1.5252907757503674e-05,
)}  # fmt: skip
# 1 / c by the first four bits of a mantissa in [¾, 1½), log2 c as a multiple of 2⁻¹⁶ or 2⁻⁴¹, and what that leaves
_NEAR = {32: (
    (1.0, 0.9131230711936951, 0.8641035556793213, 0.8210868239402771, 0.7807068228721619, 0.7444276213645935,
     0.7099243998527527, 0.6798762679100037, 1.3079835176467896, 1.2541598081588745, 1.2094388008117676,
     1.1634294986724854, 1.1237488985061646, 1.0828760862350464, 1.0511552095413208, 1.0),
    (0.0, 0.1311187744140625, 0.210723876953125, 0.284393310546875, 0.357147216796875, 0.4257965087890625,
     0.4942626953125, 0.5566558837890625, -0.3873443603515625, -0.32672119140625, -0.2743377685546875,
     -0.2183837890625, -0.1683197021484375, -0.1148681640625, -0.0719757080078125, 0.0),
    (0.0, -1.5342747905489063e-11, 9.118718974354678e-11, -2.0235466080542608e-10, 1.4076344256874762e-10,
     -2.853668967794931e-10, -2.1803383751239913e-11, -9.535110895297905e-11, -6.99217350685899e-10,
     -2.3351706679441975e-10, -3.5044170343390135e-10, -1.1025790697116733e-10, 5.314937934208785e-10,
     -3.9607625512694256e-10, 1.69983555009523e-10, 0.0),
), 64: (
    INVERSES,
    (
        0.0, 0.12918845108424648, 0.2093842517565463, 0.2853978548091618, 0.35752603547143735,
        0.42623897903240504, 0.4918470554516716, 0.5545574006932839, -0.3852918972079351,
        -0.32759404894204636, -0.2721852249051153, -0.21866384790610027, -0.16712449679835117,
        -0.11736701158815777, -0.06930600141413379, 0.0,
    ),
    (
        0.0, -5.118127192748965e-14, 1.0194618030191602e-13, -7.865963166542275e-14, 9.547947337295594e-14,
        1.5459921478792103e-13, 3.863517329502037e-14, -1.0214000371697653e-13, -1.455497166157018e-13,
        -2.803247464453949e-14, 3.9635573442512854e-14, -9.96416816465213e-15, -9.603422230307799e-14,
        4.62139464779828e-15, -3.326515720917529e-14, 0.0,
    ),
)}  # fmt: skip
# logarithms in base 2 of what powers of 2^(1/16) lose by their rounding to f64
_POWERS_LOST = (
    0.0, 1.1814687944889186e-16, -4.030762245465049e-17, 1.1291358427388442e-16, 4.830810003324493e-17,
    5.411338755317555e-17, 2.823727173974899e-17, 8.203857878088789e-17, -9.861987250874697e-17,
    -3.4034755435046924e-17, 7.436847846534485e-17, 2.213297620457818e-17, 7.033369914725411e-17,
    2.4316441556717945e-17, 2.5826072121629267e-17, -7.999838669414994e-17,
)  # fmt: skip


def power(m: VectorMath, x: str, y: str) -> str:
    """f32 by tables or through f64, where a plain product of logarithms is accurate enough; f64 with logarithms of two
    words."""
    f = m.f
    if m.has_tables or m.has_wide_tables:
        return _with_rare_specials(m, x, y, _power_by_table(m, m.abs(x), y))
    if m.bits == 64:
        if not m.target.has_fma:
            return library("pow", m, x, y)
        return _with_rare_specials(m, x, y, _power_in_two_words(m, m.abs(x), y))
    wide = m.doubled()
    a, b = (f.convert("fpext", m.type, v, wide.type) for v in (m.abs(x), y))
    magnitude = f.convert("fptrunc", wide.type, _exp2_short(wide, wide.mul(_log2_short(wide, a), b)), m.type)
    return _with_specials(m, x, y, magnitude)


def _with_rare_specials(m: VectorMath, x: str, y: str, magnitude: str) -> str:
    """The same as `_with_specials`, skipped where all bases are positive and all numbers finite."""
    f = m.f
    plain = f.binary("and", m.flag, m.test("ogt", x, m.c(0.0)), m.test("olt", x, m.c(_INF)))
    plain = f.binary("and", m.flag, plain, m.test("olt", m.abs(y), m.c(_INF)))
    if lanes_of(m.type) > 1:
        plain = f.call("i1", f"llvm.vector.reduce.and.{suffix(m.flag)}", (m.flag, plain))
    return f.if_(plain, lambda: [magnitude], lambda: [_with_specials(m, x, y, magnitude)], (m.type,))[0]


def _with_specials(m: VectorMath, x: str, y: str, magnitude: str) -> str:
    """xʸ from |x|ʸ: signs of odd powers, and what NaN, infinities and fractions of negative numbers give."""
    f = m.f
    whole = m.test("oeq", f.intrinsic("trunc", m.type, y), y)
    half = m.mul(y, m.c(0.5))
    odd = f.binary("and", m.flag, whole, m.test("one", f.intrinsic("trunc", m.type, half), half))
    signed = m.select(odd, m.copysign(magnitude, x), magnitude)
    finite_negative = f.binary("and", m.flag, m.test("olt", x, m.c(0.0)), m.test("ogt", x, m.c(-_INF)))
    not_whole = f.binary("xor", m.flag, whole, constant(m.flag, 1))
    none = f.binary("or", m.flag, f.binary("and", m.flag, finite_negative, not_whole), m.test("uno", x, y))
    signed = m.select(none, m.c(math.nan), signed)
    is_one = f.binary("or", m.flag, m.test("oeq", y, m.c(0.0)), m.test("oeq", x, m.c(1.0)))
    # (-1) ** ±inf is 1
    unit = f.binary("and", m.flag, m.test("oeq", m.abs(x), m.c(1.0)), m.test("oeq", m.abs(y), m.c(_INF)))
    return m.select(f.binary("or", m.flag, is_one, unit), m.c(1.0), signed)


def _power_by_table(m: VectorMath, x: str, y: str) -> str:
    """xʸ, x not negative, by log2 x in two words: to 32 bits, in f64 to 62. Where the result is not a
    number, it is arbitrary."""
    log, log_rest = _log2_by_table(m, x)
    exponent = m.mul(log, y)
    exponent_rest = m.bounded(m.fma(log_rest, y, m.fma(log, y, m.neg(exponent))), 2.0**-8)  # of infinities it is NaN
    exponent = m.bounded(exponent, {32: 200.0, 64: 1100.0}[m.bits])
    magic = m.c(MAGIC[m.bits] / len(POWERS))
    shifted = m.add(exponent, magic)
    n = m.sub(shifted, magic)
    place = m.as_bits(shifted)
    if m.bits == 64:
        exponent_rest = m.add(exponent_rest, m.look_up(place, _POWERS_LOST))
    r = m.add(m.sub(exponent, n), exponent_rest)
    two_to = m.look_up(place, POWERS)
    return m.scaled(m.fma(m.mul(two_to, r), m.polynomial(r, _EXP2_NEAR[m.bits]), two_to), n)


def _log2_by_table(m: VectorMath, x: str) -> tuple[str, str]:
    """log2 x as a number and the remainder, which is NaN where x is 0 or infinite."""
    mantissa = m.mantissa(x)
    k = m.sub(m.exponent(x), m.exponent(mantissa))
    place = m.integer("lshr", m.as_bits(mantissa), m.i(MANTISSA[m.bits] - 4))
    inverse, start, start_rest = (m.look_up(place, numbers) for numbers in _NEAR[m.bits])
    product = m.mul(mantissa, inverse)
    rest = m.fma(mantissa, inverse, m.neg(product))
    f = m.sub(product, m.c(1.0))  # and the rest of the product
    square = m.mul(f, f)
    square_rest = m.fma(f, f, m.neg(square))
    # log(1 + f) = f - f²/2 + f³ (…): the first two terms in two words
    near = m.fma(square, m.c(-0.5), f)
    below = m.fma(m.neg(f), rest, rest)  # rest / (1 + f)
    if m.bits == 64:
        below = m.fma(square, rest, below)
    below = m.fma(square_rest, m.c(-0.5), below)
    below = m.fma(m.mul(square, f), m.polynomial_of_halves(f, square, LOG_NEAR[m.bits]), below)
    below = m.add(m.fma(square, m.c(-0.5), m.sub(f, near)), below)
    near, before = m.add(near, below), near
    below = m.sub(below, m.sub(near, before))
    high, low = (m.c(part) for part in LOG2_E[m.bits])
    part = m.mul(near, high)
    part_rest = m.fma(below, high, m.fma(near, low, m.fma(near, high, m.neg(part))))
    whole = m.add(k, start)  # exact
    log = m.add(whole, part)
    return log, m.add(m.sub(part, m.sub(log, whole)), m.add(part_rest, start_rest))


def _product(m: VectorMath, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str]:
    """Of two numbers of two words each."""
    high = m.mul(a[0], b[0])
    return high, m.fma(a[1], b[0], m.fma(a[0], b[1], m.fma(a[0], b[0], m.neg(high))))


def _sum(m: VectorMath, large: str, b: tuple[str, str]) -> tuple[str, str]:
    """Of a number that is 0 or not smaller than the other, which has two words."""
    high = m.add(large, b[0])
    return high, m.add(m.sub(b[0], m.sub(high, large)), b[1])


def _power_in_two_words(m: VectorMath, x: str, y: str) -> str:
    """xʸ of f64, x not negative: log2 x to 63 bits, as s (2 + s² (⅔ + …)) with s = f / (2 + f)."""
    k, f = reduce_log(m, x)
    below, below_rest = _sum(m, m.c(2.0), (f, m.c(0.0)))
    inverse = m.div(m.c(1.0), below)
    s = m.mul(f, inverse)
    rest = m.fma(m.neg(s), below_rest, m.fma(m.neg(s), below, f))
    both = s, m.mul(rest, inverse)
    z = _product(m, both, both)
    tail = m.fma(z[0], m.polynomial(z[0], _LOG_TAIL), m.c(_TWO_THIRDS[1]))
    inner = _product(m, z, _sum(m, m.c(_TWO_THIRDS[0]), (tail, m.c(0.0))))
    natural = _product(m, both, _sum(m, m.c(2.0), inner))
    high, low = (m.c(part) for part in LOG2_E[64])
    log = _sum(m, k, _product(m, natural, (high, low)))
    exponent = m.mul(log_specials(m, x, log[0]), y)
    usual = m.test("olt", m.abs(exponent), m.c(1100.0))
    lost = m.fma(log[1], y, m.fma(log[0], y, m.neg(exponent)))
    lost = m.select(usual, lost, m.c(0.0))  # of infinities it is NaN
    inside = m.at_most(m.at_least(exponent, -1100.0), 1100.0)
    shifted = m.add(inside, m.c(MAGIC[64]))
    n = m.sub(shifted, m.c(MAGIC[64]))
    r = m.mul(m.add(m.sub(inside, n), lost), m.c(math.log(2)))
    q = m.fma(m.mul(r, r), m.polynomial(r, EXPM1[64]), r)
    return scale_by(m, m.add(q, m.c(1.0)), n, m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[64]))))


def _log2_short(m: VectorMath, x: str) -> str:
    """log2 in f64 to 38 bits: what a power in f32 needs."""
    k, f = reduce_log(m, x)
    s = m.div(f, m.add(f, m.c(2.0)))
    z = m.mul(s, s)
    part = m.fma(m.mul(s, z), m.polynomial(z, LOG[40]), m.add(s, s))
    return log_specials(m, x, m.fma(part, m.c(LOG2_E[64][0]), k))


def _exp2_short(m: VectorMath, x: str) -> str:
    """2ˣ in f64 to 38 bits, where the result is not below 2⁻²⁰⁰ and not above 2²⁰⁰."""
    inside = m.at_most(m.at_least(x, -200.0), 200.0)
    shifted = m.add(inside, m.c(MAGIC[64]))
    r = m.sub(inside, m.sub(shifted, m.c(MAGIC[64])))
    n = m.integer("sub", m.as_bits(shifted), m.as_bits(m.c(MAGIC[64])))
    scale = m.power_of_two(n)
    return m.fma(m.mul(scale, r), m.polynomial(r, _EXP2_SHORT), scale)


def integer_power(f: IrFunction, type_: str, x: str, y: str, *, signed: bool) -> str:
    """Square and multiply, one bit of the exponents a turn until none has any left, wrapping; a negative exponent gives
    0, 1 or -1."""
    zero, one = constant(type_, 0), constant(type_, 1)
    if signed:  # the sign of a negative exponent, which has all turns, is not looked at
        negative = f.compare("slt", type_, y, zero)
        y_left = f.select(type_, negative, f.binary("and", type_, y, one), y)
    else:
        y_left = y

    def some_left(state: list[str]) -> str:
        return any_lane(f, type_, f.compare("ne", type_, state[2], zero))

    def turn(state: list[str]) -> list[Value]:
        result, base, rest = state
        odd = f.compare("ne", type_, f.binary("and", type_, rest, one), zero)
        multiplied = f.select(type_, odd, f.binary("mul", type_, result, base), result)
        return [multiplied, f.binary("mul", type_, base, base), f.binary("lshr", type_, rest, one)]

    carried = [(type_, one), (type_, x), (type_, y_left)]
    result = while_loop(f, carried, some_left, turn)[0]
    if not signed:
        return result
    # with an odd negative exponent the result is x, with an even one 1: 1 and -1 are right, all others 0
    unit = f.binary("or", with_element(type_, "i1"), *(f.compare("eq", type_, x, constant(type_, v)) for v in (1, -1)))
    inverse = f.select(type_, unit, result, zero)
    return f.select(type_, negative, inverse, result)


def any_lane(f: IrFunction, type_: str, flags: str) -> str:
    """Whether a test of numbers of a type holds for one of them."""
    flag = with_element(type_, "i1")
    return flags if lanes_of(type_) == 1 else f.call("i1", f"llvm.vector.reduce.or.{suffix(flag)}", (flag, flags))


def greatest_divisor(f: IrFunction, type_: str, x: str, y: str, *, signed: bool) -> str:
    """Euclid's algorithm, lane by lane: no processor divides whole numbers in vectors, and each needs its own turns."""
    if signed:  # the magnitudes, read as unsigned
        x, y = (f.call(type_, f"llvm.abs.{suffix(type_)}", (type_, v), ("i1", "false")) for v in (x, y))
    lanes, element = lanes_of(type_), element_of(type_)
    if lanes == 1:
        return _euclid(f, element, x, y)
    size = bits_of(element) // 8
    xs, ys = (f.alloca(element, lanes) for _ in range(2))
    f.store(type_, x, xs, size)
    f.store(type_, y, ys, size)

    def one(lane: str, _: list[str]) -> None:
        place = f.address(element, xs, lane)
        b = f.load(element, f.address(element, ys, lane), size)
        f.store(element, _euclid(f, element, f.load(element, place, size), b), place, size)

    f.loop(0, lanes, 1, (), one)
    return f.load(type_, xs, size)


def _euclid(f: IrFunction, type_: str, x: str, y: str) -> str:
    def left(state: list[str]) -> str:
        return f.compare("ne", type_, state[1], 0)

    def turn(state: list[str]) -> list[Value]:
        return [state[1], f.binary("urem", type_, *state)]

    return while_loop(f, [(type_, x), (type_, y)], left, turn)[0]
