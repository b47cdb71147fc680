"""Scalar functions as StableHLO: a row for each function of the table in strata.kernel, edge cases included.

Floats of fewer than 32 bits are computed in f32 and rounded once. Where StableHLO leaves a case open, or answers it in
another way (a division of integers by 0, a shift by more than the width, a float beyond the integers), the row says
what we want.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, kind, kind_of
from strata.core import DType, bool_, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64

Row = Callable[..., Hlo]
_SIGNED = {8: i8, 16: i16, 32: i32, 64: i64}
_UNSIGNED = {8: u8, 16: u16, 32: u32, 64: u64}


def scalar(b: StableHloBuilder, name: str, dtype: DType, xs: list[Hlo]) -> Hlo:
    """A function on values of one shape."""
    if name == "cast":
        return cast(b, xs[0], dtype)
    if name == "bitcast":
        return b.bitcast(xs[0], dtype)
    row = ROWS[name]
    first = xs[1 if name == "select" else 0].dtype
    if first.is_float and first.bits < 32 and name not in _EXACT:
        made = row(b, *(b.convert(x, f32) if x.dtype is first else x for x in xs))
        return b.convert(made, dtype) if made.dtype is f32 else made
    return row(b, *xs)


def cast(b: StableHloBuilder, x: Hlo, dtype: DType) -> Hlo:
    """Floats to integers truncate and saturate, NaN gives 0; anything to bool tests for non-zero."""
    source = x.dtype
    if source is dtype:
        return x
    if dtype.is_bool:
        if source.bits == 4:
            x = b.convert(x, i8 if source.kind == "int" else u8)
        return b.compare("NE", x, b.like(0, x))
    if source.is_complex and not dtype.is_complex:
        return cast(b, _real(b, x), dtype)
    if dtype.is_complex and not source.is_complex:
        part = cast(b, x, dtype.real)
        return b.to("stablehlo.complex", [part, b.like(0, part)], dtype, x.shape)
    if source.is_float and dtype.is_int:
        return _saturated(b, x, dtype)
    if source.is_int and source.bits == 4 and not dtype.is_int:
        x = b.convert(x, i8 if source.kind == "int" else u8)
    if dtype.is_float and dtype.bits == 8 and x.dtype is not f32:
        x = b.convert(x, f32)
    return b.convert(x, dtype)


def _saturated(b: StableHloBuilder, x: Hlo, dtype: DType) -> Hlo:
    signed = dtype.kind == "int"
    low, high = (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if signed else (0, (1 << dtype.bits) - 1)
    if x.dtype.bits < 32:
        x = b.convert(x, f32)
    stored = dtype if dtype.bits >= 8 else i8 if signed else u8
    whole = _trunc(b, b.select(b.compare("NE", x, x), b.like(0, x), x))
    top, bottom = b.compare("GE", whole, b.like(float(high), x)), b.compare("LE", whole, b.like(float(low), x))
    inner = b.convert(b.select(b.same("or", top, bottom), b.like(0, x), whole), stored)
    made = b.select(top, b.like(high, inner), b.select(bottom, b.like(low, inner), inner))
    return b.convert(made, dtype)


def _real(b: StableHloBuilder, x: Hlo) -> Hlo:
    return b.to("stablehlo.real", [x], x.dtype.real, x.shape)


def _imag(b: StableHloBuilder, x: Hlo) -> Hlo:
    return b.to("stablehlo.imag", [x], x.dtype.real, x.shape)


def _complex(b: StableHloBuilder, re: Hlo, im: Hlo) -> Hlo:
    from strata.core import c64, c128

    if re.dtype not in (f32, f64):
        re, im = b.convert(re, f32), b.convert(im, f32)
    return b.to("stablehlo.complex", [re, im], c128 if re.dtype is f64 else c64, re.shape)


def _trunc(b: StableHloBuilder, x: Hlo) -> Hlo:
    if not x.dtype.is_float:
        return x
    return b.select(b.compare("LT", x, b.like(0, x)), b.same("ceil", x), b.same("floor", x))


def _is_zero(b: StableHloBuilder, x: Hlo) -> Hlo:
    return b.compare("EQ", x, b.like(0, x))


def _safe(b: StableHloBuilder, x: Hlo) -> Hlo:
    """A divisor, 1 in the place of 0."""
    return b.select(_is_zero(b, x), b.like(1, x), x)


def _unless_zero(b: StableHloBuilder, divisor: Hlo, made: Hlo) -> Hlo:
    return b.select(_is_zero(b, divisor), b.like(0, made), made)


def _differs_in_sign(b: StableHloBuilder, rest: Hlo, divisor: Hlo) -> Hlo:
    """Whether a remainder is not 0 and lies on the other side of it than the divisor."""
    zero = b.like(0, rest)
    crossed = b.compare("NE", b.compare("LT", rest, zero), b.compare("LT", divisor, zero))
    return b.same("and", b.compare("NE", rest, zero), crossed)


def _floordiv(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    if x.dtype.is_int:
        divisor = _safe(b, y)
        quotient = b.same("divide", x, divisor)
        if x.dtype.kind == "int":
            rest = b.same("remainder", x, divisor)
            less = b.same("subtract", quotient, b.like(1, x))
            quotient = b.select(_differs_in_sign(b, rest, divisor), less, quotient)
        return _unless_zero(b, y, quotient)
    if x.dtype is f32:
        return b.convert(_floordiv(b, b.convert(x, f64), b.convert(y, f64)), f32)
    # from the remainder, as a rounded quotient may lie on the next whole number
    rest, plain = b.same("remainder", x, y), b.same("divide", x, y)
    quotient = b.same("divide", b.same("subtract", x, rest), y)
    less = b.same("subtract", quotient, b.like(1, x))
    quotient = b.select(_differs_in_sign(b, rest, y), less, quotient)
    whole = b.same("floor", quotient)
    far = b.compare("GT", b.same("subtract", quotient, whole), b.like(0.5, x))
    whole = b.select(far, b.same("add", whole, b.like(1, x)), whole)
    zero = _copysign(b, b.like(0, x), plain)
    made = b.select(_is_zero(b, quotient), zero, whole)
    return b.select(_is_zero(b, y), plain, made)


def _truncdiv(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    if x.dtype.is_float:
        return _trunc(b, b.same("divide", x, y))
    return _unless_zero(b, y, b.same("divide", x, _safe(b, y)))


def _mod(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    if x.dtype.is_int:
        rest = b.same("remainder", x, _safe(b, y))
        if x.dtype.kind == "int":
            rest = b.select(_differs_in_sign(b, rest, y), b.same("add", rest, y), rest)
        return _unless_zero(b, y, rest)
    rest = b.same("remainder", x, y)
    fixed = b.select(_differs_in_sign(b, rest, y), b.same("add", rest, y), rest)
    return b.select(_is_zero(b, fixed), _copysign(b, b.like(0, x), y), fixed)


def _rem(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    if x.dtype.is_float:
        return b.same("remainder", x, y)
    return _unless_zero(b, y, b.same("remainder", x, _safe(b, y)))


def _signbit(b: StableHloBuilder, x: Hlo) -> Hlo:
    if x.dtype.is_float:
        x = b.bitcast(x, _SIGNED[x.dtype.bits])
    return b.compare("LT", x, b.like(0, x))


def _copysign(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    size = b.same("abs", x)
    return b.select(_signbit(b, y), b.same("negate", size), size)


def _sign(b: StableHloBuilder, x: Hlo) -> Hlo:
    return b.same("minimum", x, b.like(1, x)) if x.dtype.kind == "uint" else b.same("sign", x)


def _abs(b: StableHloBuilder, x: Hlo) -> Hlo:
    if x.dtype.kind == "uint":
        return x
    if not x.dtype.is_complex:
        return b.same("abs", x)
    size = b.to("stablehlo.abs", [x], x.dtype.real, x.shape)
    far = b.same("or", _isinf(b, _real(b, x)), _isinf(b, _imag(b, x)))
    return b.select(far, b.like(math.inf, size), size)  # beside an infinity, NaN is not seen


def _divide(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    """Of complex numbers as NumPy divides them: scaled by the larger part of the divisor."""
    if not x.dtype.is_complex:
        return b.same("divide", x, y)
    (re, im), (c, d) = ((_real(b, z), _imag(b, z)) for z in (x, y))
    above = b.same("abs", c)
    flat = b.compare("GE", above, b.same("abs", d))
    big, small = b.select(flat, c, d), b.select(flat, d, c)
    ratio = b.same("divide", small, big)
    scale = b.same("divide", b.like(1, big), b.same("add", big, b.same("multiply", small, ratio)))
    first = b.same("add", b.select(flat, re, im), b.same("multiply", b.select(flat, im, re), ratio))
    straight = b.same("subtract", im, b.same("multiply", re, ratio))
    turned = b.same("subtract", b.same("multiply", im, ratio), re)
    parts = ((re, first), (im, b.select(flat, straight, turned)))
    zero = _is_zero(b, big)
    return _complex(b, *(b.select(zero, b.same("divide", z, above), b.same("multiply", p, scale)) for z, p in parts))


def _gcd(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    def test(_: Hlo, rest: Hlo) -> Hlo:
        return any_of(b, b.compare("NE", rest, b.like(0, rest)))

    def step(a: Hlo, rest: Hlo) -> list[Hlo]:
        done = _is_zero(b, rest)
        return [b.select(done, a, rest), b.select(done, rest, b.same("remainder", a, _safe(b, rest)))]

    return b.while_([_abs(b, x), _abs(b, y)], test, step)[0]


def any_of(b: StableHloBuilder, x: Hlo) -> Hlo:
    """Whether any element is true."""
    start = b.const(False, bool_)
    return b.reduce([x], [start], range(x.ndim), lambda p, q: (b.same("or", p, q),))[0]


def _pow(b: StableHloBuilder, x: Hlo, y: Hlo) -> Hlo:
    if not x.dtype.is_int:
        return b.same("power", x, y)
    one, zero = b.like(1, x), b.like(0, x)

    def test(_r: Hlo, _p: Hlo, rest: Hlo) -> Hlo:
        return any_of(b, b.compare("GT", rest, b.like(0, rest)))

    def step(result: Hlo, power: Hlo, rest: Hlo) -> list[Hlo]:
        odd = b.compare("NE", b.same("and", rest, b.like(1, rest)), b.like(0, rest))
        result = b.select(odd, b.same("multiply", result, power), result)
        return [result, b.same("multiply", power, power), b.same("shift_right_logical", rest, b.like(1, rest))]

    start = b.same("maximum", y, zero)
    made = b.while_([one, x, start], test, step)[0]
    if x.dtype.kind == "uint":
        return made
    odd = b.compare("NE", b.same("and", y, one), zero)
    minus = b.like(-1, x)
    below = b.select(b.compare("EQ", x, minus), b.select(odd, minus, one), zero)
    below = b.select(b.compare("EQ", x, one), one, below)
    return b.select(b.compare("LT", y, zero), below, made)


def _shift(name: str) -> Row:
    def row(b: StableHloBuilder, x: Hlo, amount: Hlo) -> Hlo:
        unsigned = _UNSIGNED[x.dtype.bits]
        far = b.compare("GE", b.bitcast(amount, unsigned), b.const(x.dtype.bits, unsigned, x.shape))
        near = b.select(far, b.like(0, amount), amount)
        which = name if name == "shift_left" or x.dtype.kind == "int" else "shift_right_logical"
        outside = b.like(0, x)
        if which == "shift_right_arithmetic":
            outside = b.select(b.compare("LT", x, outside), b.like(-1, x), outside)
        return b.select(far, outside, b.same(which, x, near))

    return row


def _isnan(b: StableHloBuilder, x: Hlo) -> Hlo:
    if x.dtype.is_complex:
        return b.same("or", _isnan(b, _real(b, x)), _isnan(b, _imag(b, x)))
    return b.compare("NE", x, x)


def _isinf(b: StableHloBuilder, x: Hlo) -> Hlo:
    if not x.dtype.is_float:
        return b.const(False, bool_, x.shape)
    return b.compare("EQ", b.same("abs", x), b.like(math.inf, x))


def _isfinite(b: StableHloBuilder, x: Hlo) -> Hlo:
    if not x.dtype.is_float:
        return b.const(True, bool_, x.shape)
    return b.to("stablehlo.is_finite", [x], bool_, x.shape)


def _conj(b: StableHloBuilder, x: Hlo) -> Hlo:
    return _complex(b, _real(b, x), b.same("negate", _imag(b, x)))


def _fma(b: StableHloBuilder, x: Hlo, y: Hlo, z: Hlo) -> Hlo:
    if x.dtype is f32:  # the product is exact in f64
        return b.convert(_fma(b, *(b.convert(v, f64) for v in (x, y, z))), f32)
    return b.same("add", b.same("multiply", x, y), z)


def _gelu(b: StableHloBuilder, x: Hlo) -> Hlo:
    tail = _chlo("erfc")(b, b.same("multiply", x, b.like(-math.sqrt(0.5), x)))
    return b.same("multiply", b.same("multiply", x, b.like(0.5, x)), tail)


def _lgamma(b: StableHloBuilder, x: Hlo) -> Hlo:
    return b.select(_isinf(b, x), b.like(math.inf, x), _chlo("lgamma")(b, x))


def _same(name: str) -> Row:
    return lambda b, *xs: b.same(name, *xs)


def _chlo(name: str) -> Row:
    return lambda b, x: b.op(f"chlo.{name} {x.name} : {kind(x)} -> {kind_of(x.dtype, x.shape)}", x.dtype, x.shape)


def _round(name: str) -> Row:
    return lambda b, x: b.same(name, x) if x.dtype.is_float else x


def _test(direction: str) -> Row:
    return lambda b, x, y: b.compare(direction, x, y)


def _log2(b: StableHloBuilder, x: Hlo) -> Hlo:
    """The exponent is taken apart, so that powers of two come out exact."""
    if x.dtype not in (f32, f64):
        return b.same("multiply", b.same("log", x), b.like(1 / math.log(2), x))
    bits, exponent_bits = (23, 8) if x.dtype is f32 else (52, 11)
    bias, whole = (1 << exponent_bits - 1) - 1, _SIGNED[x.dtype.bits]
    raw = b.bitcast(x, whole)
    exponent = b.same("shift_right_logical", raw, b.const(bits, whole, x.shape))
    inside = b.same(
        "and", b.compare("GT", x, b.like(0, x)), b.compare("LT", exponent, b.const(2 * bias + 1, whole, x.shape))
    )
    inside = b.same("and", inside, b.compare("GT", exponent, b.const(0, whole, x.shape)))
    mantissa = b.same("and", raw, b.const((1 << bits) - 1, whole, x.shape))
    scaled = b.bitcast(b.same("or", mantissa, b.const(bias << bits, whole, x.shape)), x.dtype)
    high = b.compare("GT", scaled, b.like(math.sqrt(2), x))
    scaled = b.select(high, b.same("multiply", scaled, b.like(0.5, x)), scaled)
    count = b.convert(b.same("subtract", exponent, b.const(bias, whole, x.shape)), x.dtype)
    count = b.select(high, b.same("add", count, b.like(1, x)), count)
    factor = b.like(1 / math.log(2), x)
    exact = b.same("add", count, b.same("multiply", b.same("log", scaled), factor))
    return b.select(inside, exact, b.same("multiply", b.same("log", x), factor))


ROWS: Final[dict[str, Row]] = {
    "add": _same("add"), "sub": _same("subtract"), "mul": _same("multiply"), "div": _divide,
    "floordiv": _floordiv, "truncdiv": _truncdiv, "mod": _mod, "rem": _rem, "neg": _same("negate"),
    "min": _same("minimum"), "max": _same("maximum"), "gcd": _gcd, "pow": _pow, "exp": _same("exponential"),
    "exp2": lambda b, x: b.same("power", b.like(2, x), x), "expm1": _same("exponential_minus_one"),
    "log": _same("log"), "log2": _log2, "log1p": _same("log_plus_one"), "sqrt": _same("sqrt"), "rsqrt": _same("rsqrt"),
    "sin": _same("sine"), "cos": _same("cosine"), "tan": _same("tan"), "asin": _chlo("asin"), "acos": _chlo("acos"),
    "atan": _chlo("atan"), "atan2": _same("atan2"), "sinh": _chlo("sinh"), "cosh": _chlo("cosh"), "tanh": _same("tanh"),
    "asinh": _chlo("asinh"), "acosh": _chlo("acosh"), "atanh": _chlo("atanh"), "erf": _chlo("erf"), "gelu": _gelu,
    "erfc": _chlo("erfc"), "lgamma": _lgamma, "sigmoid": _same("logistic"), "floor": _round("floor"),
    "ceil": _round("ceil"), "trunc": _trunc, "round": _round("round_nearest_even"), "sign": _sign,
    "copysign": _copysign, "conj": _conj, "and": _same("and"), "or": _same("or"), "xor": _same("xor"),
    "not": _same("not"), "shl": _shift("shift_left"), "shr": _shift("shift_right_arithmetic"), "fma": _fma,
    "eq": _test("EQ"), "ne": _test("NE"), "lt": _test("LT"), "le": _test("LE"), "gt": _test("GT"), "ge": _test("GE"),
    "isnan": _isnan, "isinf": _isinf, "isfinite": _isfinite, "signbit": _signbit, "abs": _abs, "real": _real,
    "imag": _imag, "complex": _complex, "index": lambda b, x: x, "data": lambda b, x: x,
    "select": lambda b, c, x, y: b.select(c, x, y),
}  # fmt: skip
_EXACT: Final = frozenset({"select", "neg", "signbit", "copysign", "abs", "complex", "min", "max"})
