"""The table from scalar functions of the kernel IR to WGSL text, and element types in registers.

bool    truth values
i32     signed integers of up to 32 bits, and those of 64 bits that are known to fit (see bounds.py)
u32     unsigned integers of up to 32 bits
f32     floats of up to 32 bits; narrow ones are rounded after each operation
i64 u64 pairs of words
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from strata.core import DType

TYPES: Final = {"b": "bool", "i": "i32", "u": "u32", "f": "f32", "q": "vec2<u32>", "w": "vec2<u32>"}
"""WGSL's names for the classes of registers: q holds i64, w holds u64."""

HELD: Final = frozenset((
    "bool", "i4", "u4", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f8e4m3", "f8e5m2", "bf16", "f16", "f32",
))  # fmt: skip
"""Element types that shaders compute with; f64 and complex numbers are left to the host."""

_SAME = dict.fromkeys("iuqw", "{0}")


def _binary(text: str, kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds, text)


FUNCTIONS: Final[dict[str, dict[str, str]]] = {
    "add": {**_binary("({0} + {1})", "iuf"), **_binary("add64({0}, {1})", "qw")},
    "sub": {**_binary("({0} - {1})", "iuf"), **_binary("sub64({0}, {1})", "qw")},
    "mul": {**_binary("({0} * {1})", "iuf"), **_binary("mul64({0}, {1})", "qw")},
    "div": {"f": "({0} / {1})"},
    "fma": {**_binary("({0} * {1} + {2})", "iu"), "f": "fma({0}, {1}, {2})",
            **_binary("add64(mul64({0}, {1}), {2})", "qw")},
    "neg": {**_binary("(-{0})", "if"), "u": "(0u - {0})", **_binary("neg64({0})", "qw")},
    "abs": {**_binary("abs({0})", "if"), "u": "{0}", "q": "abs64({0})", "w": "{0}"},
    "floordiv": {"i": "floordiv_i({0}, {1})", "u": "div_u({0}, {1})", "f": "floordiv_f({0}, {1})",
                 "q": "floordiv_i64({0}, {1})", "w": "div_u64({0}, {1})"},
    "truncdiv": {"i": "truncdiv_i({0}, {1})", "u": "div_u({0}, {1})", "f": "truncdiv_f({0}, {1})",
                 "q": "truncdiv_i64({0}, {1})", "w": "div_u64({0}, {1})"},
    "mod": {"i": "mod_i({0}, {1})", "u": "mod_u({0}, {1})", "f": "mod_f({0}, {1})", "q": "mod_i64({0}, {1})",
            "w": "mod_u64({0}, {1})"},
    "rem": {"i": "rem_i({0}, {1})", "u": "mod_u({0}, {1})", "f": "rem_f({0}, {1})", "q": "rem_i64({0}, {1})",
            "w": "mod_u64({0}, {1})"},
    "min": {**_binary("min({0}, {1})", "iu"), "f": "min_f({0}, {1})", "q": "min_i64({0}, {1})",
            "w": "min_u64({0}, {1})", "b": "({0} && {1})"},
    "max": {**_binary("max({0}, {1})", "iu"), "f": "max_f({0}, {1})", "q": "max_i64({0}, {1})",
            "w": "max_u64({0}, {1})", "b": "({0} || {1})"},
    "gcd": {"i": "gcd_i({0}, {1})", "u": "gcd_u({0}, {1})", "q": "gcd_i64({0}, {1})", "w": "gcd_u64({0}, {1})"},
    "pow": {"i": "pow_i({0}, {1})", "u": "pow_u({0}, {1})", "f": "pow_f({0}, {1})", "q": "pow_i64({0}, {1})",
            "w": "pow_u64({0}, {1})"},
    **{name: {"f": f"{name}_f({{0}})"} for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "gelu", "lgamma", "sigmoid",
    )},
    "atan2": {"f": "atan2_f({0}, {1})"},
    **{name: {**_SAME, "f": f"{name}({{0}})"} for name in ("floor", "ceil", "trunc", "round")},
    **dict.fromkeys(("index", "data"), _SAME),
    "sign": {"i": "sign({0})", "u": "min({0}, 1u)", "f": "sign_f({0})", "q": "sign_i64({0})", "w": "sign_u64({0})"},
    "copysign": {"f": "copy_sign({0}, {1})"},
    "and": {"b": "({0} && {1})", **_binary("({0} & {1})", "iuqw")},
    "or": {"b": "({0} || {1})", **_binary("({0} | {1})", "iuqw")},
    "xor": {"b": "({0} != {1})", **_binary("({0} ^ {1})", "iuqw")},
    "not": {"b": "(!{0})", **_binary("(~{0})", "iuqw")},
    "shl": {"i": "shl_i({0}, {1}, {bits})", "u": "shl_u({0}, {1}, {bits}u)", **_binary("shl_64({0}, {1})", "qw")},
    "shr": {"i": "shr_i({0}, {1}, {bits})", "u": "shr_u({0}, {1}, {bits}u)", "q": "shr_i64({0}, {1})",
            "w": "shr_u64({0}, {1})"},
    "eq": {**_binary("({0} == {1})", "biu"), "f": "eq_f({0}, {1})", **_binary("eq64({0}, {1})", "qw")},
    "ne": {**_binary("({0} != {1})", "biu"), "f": "ne_f({0}, {1})", **_binary("(!eq64({0}, {1}))", "qw")},
    "lt": {**_binary("({0} < {1})", "iuf"), "b": "(!{0} && {1})", "q": "lt_i64({0}, {1})", "w": "lt_u64({0}, {1})"},
    "gt": {**_binary("({0} > {1})", "iuf"), "b": "({0} && !{1})", "q": "lt_i64({1}, {0})", "w": "lt_u64({1}, {0})"},
    "le": {**_binary("({0} <= {1})", "iuf"), "b": "(!{0} || {1})", "q": "(!lt_i64({1}, {0}))",
           "w": "(!lt_u64({1}, {0}))"},
    "ge": {**_binary("({0} >= {1})", "iuf"), "b": "({0} || !{1})", "q": "(!lt_i64({0}, {1}))",
           "w": "(!lt_u64({0}, {1}))"},
    "isnan": {"f": "is_nan({0})", **_binary("false", "iuqw")},
    "isinf": {"f": "is_inf({0})", **_binary("false", "iuqw")},
    "isfinite": {"f": "is_finite({0})", **_binary("true", "iuqw")},
    "signbit": {"f": "sign_bit({0})", "i": "({0} < 0)", "q": "is_negative({0})", **_binary("false", "uw")},
}  # fmt: skip

_EXACT = frozenset(("min", "max", "abs", "neg", "floor", "ceil", "trunc", "round", "sign", "copysign", "rem"))
"""Functions whose result is a number of the type when the arguments are: narrow floats are not rounded again."""


def kind_of(dtype: DType) -> str:
    """The class of the registers that hold a type (i64 in full)."""
    if dtype.is_bool:
        return "b"
    if dtype.is_float:
        return "f"
    if dtype.bits == 64:
        return "q" if dtype.kind == "int" else "w"
    return "i" if dtype.kind == "int" else "u"


def has_function(name: str, dtype: DType) -> bool:
    """Whether the table has a function for arguments of a type."""
    if dtype.name not in HELD:
        return False
    if name == "select":
        return True
    if name == "bitcast":
        return dtype.bits >= 8
    return name == "cast" or kind_of(dtype) in FUNCTIONS.get(name, {})


def literal(value: Any, kind: str) -> str:
    """A number as text."""
    match kind:
        case "b":
            return "true" if value else "false"
        case "i":
            return f"i32({int(value)})" if int(value) < 0 else f"{int(value)}"
        case "u":
            return f"{int(value)}u"
        case "f":
            return _float(float(value))
        case _:
            bits = int(value) & ((1 << 64) - 1)
            return f"vec2<u32>({bits & 0xFFFFFFFF}u, {bits >> 32}u)"


def _float(value: float) -> str:
    if math.isnan(value):
        return "not_a_number()"
    if math.isinf(value):
        return "infinity()" if value > 0 else "(-infinity())"
    number = np.float32(value)
    if number == 0:
        return "(-0.0)" if math.copysign(1, value) < 0 else "0.0"
    if abs(number) < np.finfo(np.float32).tiny:
        return f"from_bits({int(number.view(np.uint32))}u)"
    text = np.format_float_scientific(number, unique=True, trim="0")
    return f"({text})" if value < 0 else text


def scalar(name: str, kind: str, dtype: DType, args: list[str]) -> str:
    """A function of arguments of one class, as a number of the type that it gives."""
    bits = dtype.bits if dtype.is_int else 0
    text = FUNCTIONS[name][kind].format(*args, bits=bits)
    return text if name in _EXACT and dtype.is_float else fitted(text, dtype)


def fitted(text: str, dtype: DType) -> str:
    """A value of the registers as a number of a narrow type: integers wrap around, floats are rounded."""
    if dtype.is_float:
        return text if dtype.bits == 32 else f"round_{dtype.name}({text})"
    if dtype.is_int and dtype.bits < 32:
        if dtype.kind == "uint":
            return f"({text} & {(1 << dtype.bits) - 1}u)"
        return f"extractBits({text}, 0u, {dtype.bits}u)"
    return text


def convert(text: str, kind: str, to: str, dtype: DType) -> str:
    """`cast` from registers of one class to those of another, as a number of a type."""
    match kind, to:
        case _, "b":
            return {"b": text, "f": f"ne_f({text}, 0.0)", "i": f"({text} != 0)", "u": f"({text} != 0u)"}.get(
                kind, f"(!is_zero({text}))"
            )
        case "b", _:
            one = {"i": "1", "u": "1u", "f": "1.0"}.get(to, "vec2<u32>(1u, 0u)")
            zero = {"i": "0", "u": "0u", "f": "0.0"}.get(to, "vec2<u32>(0u, 0u)")
            return f"select({zero}, {one}, {text})"
        case "f", "f":
            return fitted(text, dtype)
        case "f", "i" | "u":
            return _saturated(text, to, dtype)
        case "f", _:
            return f"i64_of_f({text})" if to == "q" else f"u64_of_f({text})"
        case _, "f":
            wide = {"i": f"f32({text})", "u": f"f32({text})", "q": f"f32_of_i64({text})", "w": f"f32_of_u64({text})"}
            return fitted(wide[kind], dtype)
        case "q" | "w", "i":
            return fitted(f"bitcast<i32>({text}.x)", dtype)
        case "q" | "w", "u":
            return fitted(f"{text}.x", dtype)
        case "i", "q" | "w":
            return f"i64_of_i32({text})"
        case "u", "q" | "w":
            return f"u64_of_u32({text})"
        case "i", "u":
            return fitted(f"bitcast<u32>({text})", dtype)
        case "u", "i":
            return fitted(f"bitcast<i32>({text})", dtype)
        case _:
            return fitted(text, dtype)


def _saturated(text: str, to: str, dtype: DType) -> str:
    if dtype.bits == 32:
        return f"{'i32' if to == 'i' else 'u32'}_of_f({text})"
    if to == "u":
        return f"min(u32_of_f({text}), {(1 << dtype.bits) - 1}u)"
    half = 1 << (dtype.bits - 1)
    return f"clamp(i32_of_f({text}), -{half}, {half - 1})"


def bits_of(text: str, dtype: DType) -> str:
    """The bits of a number as they lie in memory, as u32 (or as a pair of words)."""
    match kind_of(dtype):
        case "b":
            return f"select(0u, 1u, {text})"
        case "f":
            return f"bitcast<u32>({text})" if dtype.bits == 32 else f"{dtype.name}_of_f32({text})"
        case "i":
            whole = f"bitcast<u32>({text})"
            return whole if dtype.itemsize == 4 else f"({whole} & {(1 << (8 * dtype.itemsize)) - 1}u)"
        case _:
            return text


def from_bits(text: str, dtype: DType) -> str:
    """A number from its bits in memory."""
    match kind_of(dtype):
        case "b":
            return f"({text} != 0u)"
        case "f":
            return f"bitcast<f32>({text})" if dtype.bits == 32 else f"f32_of_{dtype.name}({text})"
        case "i":
            if dtype.bits == 32:
                return f"bitcast<i32>({text})"
            return f"extractBits(bitcast<i32>({text}), 0u, {dtype.bits}u)"
        case "u":
            return text if dtype.bits != 4 else f"({text} & 15u)"
        case _:
            return text


def identity(kind: str, dtype: DType) -> Any:
    """What a reduction starts from."""
    match kind:
        case "sum" | "any":
            return 0
        case "prod" | "all":
            return 1
        case "max" | "argmax":
            return -math.inf if dtype.is_float else _extreme(dtype, -1)
        case _:
            return math.inf if dtype.is_float else _extreme(dtype, 1)


def _extreme(dtype: DType, sign: int) -> int:
    if dtype.is_bool:
        return int(sign > 0)
    half = 1 << (dtype.bits - 1)
    if dtype.kind == "uint":
        return 0 if sign < 0 else 2 * half - 1
    return -half if sign < 0 else half - 1


JOINS: Final = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "all": "and", "any": "or"}
"""The function that joins two parts of a reduction."""
