"""Library functions for kernels, written in Triton: what it has no function for.

They use `tl` functions that have one meaning on NVIDIA and AMD GPUs and in the interpreter (exp, log, sin, sqrt, erf,
fma), and no vendor library. Errors are a few units in the last place unless a comment says otherwise. A function of
f32 and one of f64 are made of one text; `{T}` is the type.

Rounding to bf16 is an instruction on GPUs. The interpreter truncates instead, and its `fma` rounds twice in some
versions: where the result depends on either, it gets its own text.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from math import factorial, log, pi, sqrt
from typing import Final

from strata.backends.triton.codegen.block_functions import block_functions


def is_prelude(name: str) -> bool:
    """Whether a name is that of a function here."""
    return name in _table(interpreted=False)


def prelude(names: set[str], *, interpreted: bool) -> str:
    """The texts of functions and of all that they call, each after those it calls."""
    table = _table(interpreted=interpreted)
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = table[name]
        for other in re.findall(r"\b[a-z]\w*", text):
            if other in table and other != name:
                add(other)
        done[name] = text

    for name in sorted(names):
        add(name)
    return "".join(f"@triton.jit\n{text}\n\n" for text in done.values())


@cache
def _table(*, interpreted: bool) -> dict[str, str]:
    texts = [*_WHOLE, *_bits(interpreted), *_reductions(), *_dots(interpreted), *block_functions(interpreted)]
    for name, bits in (("f32", 32), ("f64", 64)):
        texts += [*_floats(name, bits), _remainder(name, interpreted=interpreted)]
    for kind, bits in ((k, b) for k in ("int", "uint") for b in (8, 16, 32, 64)):
        texts += _integers(kind, bits)
    texts += [_saturation(source, name) for source in ("f32", "f64") for name in _LIMITS]
    return {re.match(r"def (\w+)", text)[1]: text for text in texts}  # type: ignore[index]


_WHOLE: Final = (
    """def truncdiv_unsigned(a, b):
    bad = b == 0
    return tl.where(bad, 0, a // tl.where(bad, 1, b).to(b.dtype)).to(a.dtype)
""",
    """def rem_unsigned(a, b):
    bad = b == 0
    return tl.where(bad, 0, a % tl.where(bad, 1, b).to(b.dtype)).to(a.dtype)
""",
    """def safe_divisor(b):
    return tl.where((b == 0) | (b == -1), 1, b).to(b.dtype)
""",
    """def truncdiv_signed(a, b):
    q = tl.where(b == -1, 0 - a, a // safe_divisor(b))
    return tl.where(b == 0, 0, q).to(a.dtype)
""",
    """def rem_signed(a, b):
    return tl.where((b == 0) | (b == -1), 0, a % safe_divisor(b)).to(a.dtype)
""",
    """def floordiv_signed(a, b):
    r = rem_signed(a, b)
    return (truncdiv_signed(a, b) - ((r != 0) & ((r < 0) != (b < 0))).to(a.dtype)).to(a.dtype)
""",
    """def mod_signed(a, b):
    r = rem_signed(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r).to(a.dtype)
""",
    """def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))
""",
    """def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)).to(x.dtype)
""",
)


def _integers(kind: str, bits: int) -> list[str]:
    name, steps = f"{kind}{bits}", {8: 14, 16: 25, 32: 47, 64: 92}[bits]  # Euclid's steps for Fibonacci numbers
    remainder = "rem_signed" if kind == "int" else "rem_unsigned"
    one = "tl.full([], 1, a.dtype)"
    negative = (
        f"tl.where(b < 0, tl.where(a == 1, {one}, tl.where(a == -1, "
        f"tl.where((b & 1) != 0, a, {one}), 0)), result).to(a.dtype)"
    )
    size = "tl.abs(a)" if kind == "int" else "a"
    return [
        f"""def gcd_{name}(a, b):
    for step in range({steps}):
        r = {remainder}(a, b)
        a = tl.where(b == 0, a, b)
        b = tl.where(b == 0, b, r)
    return {size}
""",
        f"""def pow_{name}(a, b):
    result = (a * 0 + b * 0 + 1).to(a.dtype)
    base = (a + b * 0).to(a.dtype)
    rest = b + a * 0
    for step in range({bits if kind == "uint" else bits - 1}):
        result = tl.where((rest & 1) != 0, result * base, result).to(a.dtype)
        base = (base * base).to(a.dtype)
        rest = rest >> 1
    return {negative if kind == "int" else "result"}
""",
    ]


_LIMITS: Final = {
    "i4": (-8, 7), "u4": (0, 15),
    **{f"i{n}": (-(1 << (n - 1)), (1 << (n - 1)) - 1) for n in (8, 16, 32, 64)},
    **{f"u{n}": (0, (1 << n) - 1) for n in (8, 16, 32, 64)},
}  # fmt: skip


def _saturation(source: str, name: str) -> str:
    """Floats to integers: towards 0, the nearest that there is, 0 for NaN."""
    low, high = _LIMITS[name]
    register = {"i4": "int8", "u4": "uint8"}.get(name, name.replace("i", "int").replace("u", "uint"))
    return f"""def {source}_to_{name}(x):
    whole = tl.where(x != x, 0.0, x)
    top = whole >= {float(high)!r}
    bottom = whole <= {float(low)!r}
    inner = tl.where(top | bottom, 0.0, whole).to(tl.{register})
    most = tl.full([], {high}, tl.{register})
    least = tl.full([], {low}, tl.{register})
    return tl.where(top, most, tl.where(bottom, least, inner))
"""


def _bits(interpreted: bool) -> list[str]:
    """Floats of 16 and 8 bits that travel as their bits."""
    if interpreted:
        to_bf16 = """def to_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    made = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, (bits >> 16) | 0x40, made).to(tl.uint16)
"""
        from_bf16 = """def from_bf16(x):
    return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
"""
        bits = """def bits_to_bf16(x):
    return x
"""
    else:
        to_bf16 = """def to_bf16(x):
    return x.to(tl.bfloat16)
"""
        from_bf16 = """def from_bf16(x):
    return x.to(tl.float32)
"""
        bits = """def bits_to_bf16(x):
    return x.to(tl.bfloat16, bitcast=True)
"""
    return [
        bits,
        to_bf16,
        from_bf16,
        """def from_f8e5m2(x):
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
""",
        # a number of a few bits: the exponent is moved by a product, which is exact, and knows subnormal numbers
        """def from_f8e4m3(x):
    bits = x.to(tl.uint32)
    size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
    return (size.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
""",
        _to_f8("f8e4m3", mantissa=3, bias=7, top=480.0, over="0x7F", nan="0x7F"),
        _to_f8("f8e5m2", mantissa=2, bias=15, top=65536.0, over="0x7C", nan="0x7E"),
    ]


def _to_f8(name: str, *, mantissa: int, bias: int, top: float, over: str, nan: str) -> str:
    """To nearest, ties to even. Numbers below the smallest normal one are rounded by adding a large one, others by
    adding half of the last place that stays to their bits; what rounds to `top`, past the largest number, is `over`."""
    drop = 23 - mantissa
    step = 2.0 ** (1 - bias - mantissa)  # between subnormal numbers
    large = step * 2**23 * 1.5
    return f"""def to_{name}(x):
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.abs(x)
    small = ((size + {large!r}) - {large!r}) * {1 / step!r}
    low = tl.where(size < {2.0 ** (1 - bias)!r}, small, 0.0).to(tl.uint32)
    half = (bits & 0x7FFFFFFF) + {(1 << (drop - 1)) - 1} + ((bits >> {drop}) & 1)
    high = (half >> {drop}) - {(127 - bias) << mantissa}
    made = tl.where(size < {2.0 ** (1 - bias)!r}, low, high)
    made = tl.where(half >= {_bits_of(top)}, {over}, made)
    made = tl.where(x != x, {nan}, made)
    return (made | ((bits >> 24) & 0x80)).to(tl.uint8)
"""


def _bits_of(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def _reductions() -> list[str]:
    texts = [
        """def times(a, b):
    return a * b
""",
        """def row_prod(x):
    return tl.reduce(x, 1, times, keep_dims=True)
""",
    ]
    for name, worst in (("max", "-inf"), ("min", "inf")):
        texts += [
            f"""def row_{name}_float(x):
    is_nan = x != x
    best = tl.{name}(tl.where(is_nan, float("{worst}"), x), axis=1, keep_dims=True)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=1, keep_dims=True) > 0, float("nan"), best).to(x.dtype)
""",
            f"""def row_{name}_whole(x):
    return tl.{name}(x, axis=1, keep_dims=True).to(x.dtype)
""",
            f"""def larger_{name}_float(a, b):
    return tl.{name}imum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
            f"""def larger_{name}_whole(a, b):
    return tl.{name}imum(a, b)
""",
            f"""def scan_{name}_float(x):
    return tl.associative_scan(x, 1, larger_{name}_float)
""",
            f"""def scan_{name}_whole(x):
    return tl.associative_scan(x, 1, larger_{name}_whole)
""",
        ]
    return texts


def _dots(interpreted: bool) -> list[str]:
    """Products of tiles, added to what there is."""
    wide = 'from_bf16(a), from_bf16(b), sums, input_precision="ieee"' if interpreted else "a, b, sums"
    return [
        f"""def dot_bf16(a, b, sums):
    return tl.dot({wide})
""",
        f"""def inside_bf16(where, x):
    return tl.where(where, x, 0).to(tl.{"uint16" if interpreted else "bfloat16"})
""",
    ]


# floats


def _poly(x: str, coefficients: list[float]) -> str:
    """Horner's rule, the constant term first in the list."""
    text = repr(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        text = f"({text} * {x} + {c!r})"
    return text


def _divide(bits: int) -> str:
    return "({0} / {1})" if bits == 64 else "tl.div_rn({0}, {1})"


def _floats(name: str, bits: int) -> list[str]:
    wide = bits == 64
    uint, sign_bit = f"tl.uint{bits}", 1 << (bits - 1)
    root = "tl.sqrt({0})" if wide else "tl.sqrt_rn({0})"

    def over(a: str, b: str) -> str:
        return _divide(bits).format(a, b)

    def sqrt_of(a: str) -> str:
        return root.format(a)

    terms_exp = [1 / factorial(k) for k in range(1, 18 if wide else 10)]
    terms_sinh = [1 / factorial(2 * k + 1) for k in range(11 if wide else 6)]
    terms_log = [2 / (2 * k + 1) for k in range(12 if wide else 6)]
    terms_atan = [(-1) ** k / (2 * k + 1) for k in range(13 if wide else 7)]
    far, large = (20.0, 1e150) if wide else (10.0, 1e18)
    return [
        f"""def copysign_{name}(x, y):
    size = x.to({uint}, bitcast=True) & {sign_bit - 1}
    return (size | (y.to({uint}, bitcast=True) & {sign_bit})).to(x.dtype, bitcast=True)
""",
        f"""def signbit_{name}(x):
    return (x.to({uint}, bitcast=True) >> {bits - 1}) != 0
""",
        f"""def round_{name}(x):
    low = tl.floor(x)
    part = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    up = (part > 0.5) | ((part == 0.5) & (odd != 0.0))
    return copysign_{name}(tl.where(up, low + 1.0, low), x)
""",
        f"""def expm1_{name}(x):
    near = x * {_poly("x", terms_exp)}
    return tl.where(tl.abs(x) < 0.5, near, tl.exp(x) - 1.0)
""",
        f"""def log1p_{name}(x):
    s = {over("x", "(2.0 + x)")}
    s2 = s * s
    near = s * {_poly("s2", terms_log)}
    return tl.where(tl.abs(x) < 0.25, near, tl.log(1.0 + x))
""",
        _tanh(name, wide, far),
        f"""def sinh_{name}(x):
    size = tl.abs(x)
    x2 = x * x
    e = tl.exp(size * 0.5)
    away = (0.5 * e) * e - {over(over("0.5", "e"), "e")}
    return tl.where(size < 1.0, x * {_poly("x2", terms_sinh)}, copysign_{name}(away, x))
""",
        f"""def cosh_{name}(x):
    e = tl.exp(tl.abs(x) * 0.5)
    return (0.5 * e) * e + {over(over("0.5", "e"), "e")}
""",
        f"""def asinh_{name}(x):
    size = tl.abs(x)
    inner = tl.where(size > {large!r}, 1.0, size)
    near = log1p_{name}(inner + {over("inner * inner", f"(1.0 + {sqrt_of('inner * inner + 1.0')})")})
    return copysign_{name}(tl.where(size > {large!r}, tl.log(size) + {log(2)!r}, near), x)
""",
        f"""def acosh_{name}(x):
    t = tl.where(x > {large!r}, 1.0, x) - 1.0
    near = log1p_{name}(t + {sqrt_of("2.0 * t + t * t")})
    return tl.where(x < 1.0, float("nan"), tl.where(x > {large!r}, tl.log(x) + {log(2)!r}, near))
""",
        f"""def atanh_{name}(x):
    size = tl.abs(x)
    return copysign_{name}(0.5 * log1p_{name}({over("2.0 * size", "(1.0 - size)")}), x)
""",
        f"""def tan_{name}(x):
    return {over("tl.sin(x)", "tl.cos(x)")}
""",
        # the angle of a slope between 0 and 1, halved twice so that few terms are enough
        f"""def slope_{name}(t):
    h = {over("t", f"(1.0 + {sqrt_of('1.0 + t * t')})")}
    h = {over("h", f"(1.0 + {sqrt_of('1.0 + h * h')})")}
    h2 = h * h
    return 4.0 * h * {_poly("h2", terms_atan)}
""",
        f"""def atan_{name}(x):
    size = tl.abs(x)
    steep = size > 1.0
    angle = slope_{name}(tl.where(steep, {over("1.0", "size")}, size))
    return copysign_{name}(tl.where(steep, {pi / 2!r} - angle, angle), x)
""",
        f"""def atan2_{name}(y, x):
    a = tl.abs(x)
    b = tl.abs(y)
    low = tl.where(a < b, a, b)
    high = tl.where(a < b, b, a)
    both = low == float("inf")
    t = tl.where(high == 0.0, 0.0, {over("low", "tl.where(high == 0.0, 1.0, tl.where(both, 1.0, high))")})
    angle = slope_{name}(tl.where(both, 1.0, t))
    angle = tl.where(b > a, {pi / 2!r} - angle, angle)
    angle = tl.where(signbit_{name}(x), {pi!r} - angle, angle)
    angle = copysign_{name}(angle, y)
    return tl.where((x != x) | (y != y), float("nan"), angle).to(x.dtype)
""",
        f"""def asin_{name}(x):
    return atan2_{name}(x, {sqrt_of("(1.0 - x) * (1.0 + x)")})
""",
        f"""def acos_{name}(x):
    return 2.0 * atan2_{name}({sqrt_of("1.0 - x")}, {sqrt_of("1.0 + x")})
""",
        f"""def sigmoid_{name}(x):
    return 1.0 / (1.0 + tl.exp(-x))
""",
        _gelu(name, wide),
        f"""def mod_{name}(x, y):
    r = rem_{name}(x, y)
    fixed = tl.where((r != 0) & ((y < 0) != (r < 0)), r + y, r)
    return tl.where(fixed == 0, copysign_{name}(fixed, y), fixed)
""",
        f"""def truncdiv_{name}(x, y):
    return trunc({over("x", "y")})
""",
        f"""def floordiv_{name}(x, y):
    r = rem_{name}(x, y)
    q = {over("(x - r)", "y")}
    q = tl.where((r != 0) & ((y < 0) != (r < 0)), q - 1.0, q)
    low = tl.floor(q)
    whole = tl.where(q - low > 0.5, low + 1.0, low)
    plain = {over("x", "y")}
    whole = tl.where(q == 0, copysign_{name}(q * 0.0, plain), whole)
    return tl.where(y == 0, plain, whole)
""",
        # through f64, which holds the logarithm of a power of f32 to more bits than the result has
        f"""def pow_{name}(x, y):
    a = tl.abs(x).to(tl.float64)
    b = y.to(tl.float64)
    size = tl.exp2(b * tl.log2(a))
    whole = tl.floor(b) == b
    odd = whole & ((b - 2.0 * tl.floor(b * 0.5)) != 0.0) & (tl.abs(b) < 9007199254740992.0)
    size = tl.where(a == 0, tl.where(b > 0, 0.0, tl.where(b < 0, float("inf"), b)), size)
    size = tl.where((b == 0) | ((a == 1) & (tl.abs(b) == float("inf"))) | (x == 1), 1.0, size)
    made = tl.where(signbit_{name}(x) & odd, size * -1.0, size)
    bad = (x < 0) & (whole == 0) & (a < float("inf"))
    return tl.where(bad, float("nan"), made).to(x.dtype)
""",
        _lgamma(name),
        _erfc(name, wide),
    ]


def _tanh(name: str, wide: bool, far: float) -> str:
    if wide:
        return f"""def tanh_{name}(x):
    size = tl.abs(x)
    t = expm1_{name}(2.0 * tl.where(size > {far}, {far}, size))
    return copysign_{name}(t / (t + 2.0), x)
"""
    # tanh(x) / x by a polynomial of x² up to 0.6, a fit at Chebyshev nodes of 1.2 units in the last place; one
    # exponential and one quick division from there on, where 2 units of the quotient are less than 2 of the result
    fit = [0.999999997563096, -0.3333328397177243, 0.13331704702162125, -0.05376992178430189, 0.020757475443426328,
           -0.00585642786220461]  # fmt: skip
    return f"""def tanh_{name}(x):
    size = tl.abs(x)
    x2 = x * x
    near = x * {_poly("x2", fit)}
    away = 1.0 - 2.0 / (tl.exp(2.0 * tl.where(size > {far}, {far}, size)) + 1.0)
    return tl.where(size < 0.6, near, copysign_{name}(away, x))
"""


def _remainder(name: str, *, interpreted: bool) -> str:
    """Whole numbers of the divisor, times a power of two, are taken off 50 bits of the quotient at a time: exact."""
    loop = f"""    for step in range({43 if name == "f64" else 6}):
        ahead = (r.to(tl.int64, bitcast=True) >> 52) - (b.to(tl.int64, bitcast=True) >> 52) - 50
        ahead = tl.where(ahead < 0, 0, tl.where(ahead > 1000, 1000, ahead))
        s = b * ((ahead + 1023) << 52).to(tl.float64, bitcast=True)
        r = tl.fma(-tl.floor(r / s), s, r)
        r = tl.where(r < 0, r + s, r)
        r = tl.where(r >= s, r - s, r)
"""
    return f"""def rem_{name}(x, y):
    a = tl.abs(x).to(tl.float64)
    b = tl.abs(y).to(tl.float64)
    r = a + b * 0.0
{"    r = r % b" + chr(10) if interpreted else loop}\
    r = tl.where((b == float("inf")) & (a < float("inf")), a, r)
    return copysign_{name}(r.to(x.dtype), x)
"""


def _lgamma(name: str) -> str:
    """Stirling's series from 8 on, brought there by the recurrence; in f64, since terms cancel near 1 and 2."""
    series = [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156]
    return f"""def lgamma_{name}(x):
    given = x.to(tl.float64)
    left = given < 0.5
    a = tl.where(left, 1.0 - given, given)
    far = a >= 8.0
    low = tl.where(far, 1.0, a)
    product = low * (low + 1.0) * (low + 2.0) * (low + 3.0) * (low + 4.0) * (low + 5.0) * (low + 6.0) * (low + 7.0)
    z = tl.where(far, a, a + 8.0)
    w = 1.0 / z
    w2 = w * w
    tail = w * {_poly("w2", series)}
    big = tl.where(z == float("inf"), float("inf"), (z - 0.5) * tl.log(z) - z) + {0.5 * log(2 * pi)!r} + tail
    right = tl.where(far, big, big - tl.log(product))
    part = given - tl.floor(given + 0.5)
    mirrored = {log(pi)!r} - tl.log(tl.abs(tl.sin({pi!r} * part))) - right
    pole = (given <= 0) & (part == 0)
    made = tl.where(pole | (given == float("-inf")), float("inf"), tl.where(left, mirrored, right))
    return made.to(x.dtype)
"""


# The logarithm, in base 2, of the normal distribution below -a, as a polynomial of a. Up to 5.5 the distribution is
# right to 1.3e-7 of its value; beyond, where it is below 1e-8, the polynomial falls faster.
_LOG_TAIL = (
    -0.9999998211860657, -1.1511125564575195, -0.4591609537601471, -0.05260408669710159, 0.007166660390794277,
    -0.00016646948643028736, -0.00020456750644370914, 5.589651482296176e-05, -7.62258196118637e-06,
    5.619407374979346e-07, -1.77729457817577e-08,
)  # fmt: skip


def _gelu(name: str, wide: bool) -> str:
    """In f32 by one exponential, and without a difference that loses digits where x is negative."""
    if wide:
        return f"""def gelu_{name}(x):
    return 0.5 * x * (1.0 + tl.erf(x * {sqrt(0.5)!r}))
"""
    *rest, last = _LOG_TAIL
    steps = "".join(f"    p = p * a + {c!r}\n" for c in reversed(rest))
    return f"""def gelu_{name}(x):
    a = tl.abs(x)
    p = {last!r}
{steps}    tail = tl.exp2(p)
    return x * tl.where(x > 0, 1.0 - tail, tail)
"""


def _erfc(name: str, wide: bool) -> str:
    if wide:
        return f"""def erfc_{name}(x):
    return 1.0 - tl.erf(x)
"""
    # a fit by Chebyshev polynomials of 1.2e-7, relative, for x > 0 (Numerical Recipes, 6.2)
    fit = [
        -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
        0.17087277,
    ]  # fmt: skip
    return f"""def erfc_{name}(x):
    z = tl.abs(x)
    t = tl.div_rn(1.0, 1.0 + 0.5 * z)
    far = t * tl.exp({_poly("t", fit)} - z * z)
    made = tl.where(x < 0, 2.0 - far, far)
    made = tl.where(z == float("inf"), tl.where(x < 0, 2.0, 0.0), made)
    return tl.where(z < 0.5, 1.0 - tl.erf(x), made)
"""
