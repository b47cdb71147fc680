"""The table of scalar functions: arity, result type and NumPy meaning of each.

Renderers keep their own table from these names to target code; nothing else may list them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strata.core import DType, bool_, c64, c128, f64, i4, u4

Array = Any


@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """One function of scalars. `result` is 'same' (as the first argument), 'bool', 'given', or a rule's name."""

    name: str
    arity: int
    result: str
    numpy: Callable[..., Array]
    cost: int = 1  # rough instructions in one vector register, for schedule choices
    kinds: str = "f"  # of numbers that it takes: f(loats), i(ntegers), b(ools), c(omplex numbers)

    def takes(self, dtype: DType) -> bool:
        """Whether it is defined for numbers of a type; those of four bits are only stored, cast and chosen."""
        if dtype.is_int and dtype.bits < 8:
            return "4" in self.kinds
        kind = "b" if dtype.is_bool else "i" if dtype.is_int else "c" if dtype.is_complex else "f"
        return kind in self.kinds

    def result_dtype(self, dtypes: tuple[DType, ...], given: DType | None) -> DType:
        match self.result:
            case "bool":
                return bool_
            case "given":
                assert given is not None, f"{self.name} needs a result type"
                return given
            case "second":
                return dtypes[1]
            case "real":
                return dtypes[0].real
            case "complex":
                return c128 if dtypes[0] is f64 else c64
            case _:
                return dtypes[0]


def _special(name: str) -> Callable[..., Array]:
    """A function of SciPy, which is loaded when the interpreter first needs one of them."""

    def call(*args: Array) -> Array:
        import scipy.special

        return getattr(scipy.special, name)(*args)

    return call


def _quiet(function: Callable[..., Array]) -> Callable[..., Array]:
    def call(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return function(*args)

    return call


def _wide(function: Callable[..., Array]) -> Callable[..., Array]:
    """Evaluated in f64 and rounded once: for types whose NumPy version is missing or rounds twice."""

    def call(*args: Array) -> Array:
        dtype = np.asarray(args[0]).dtype
        if dtype.kind == "c":
            return function(*args)
        with np.errstate(all="ignore"):
            return np.asarray(function(*[np.asarray(a).astype(np.float64) for a in args])).astype(dtype)

    return call


def _floordiv(a: Array, b: Array) -> Array:
    return np.floor_divide(a, b) if np.asarray(a).dtype.kind in "iub" else _wide(np.floor_divide)(a, b)


def _truncdiv(a: Array, b: Array) -> Array:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind not in "iu":
        wide = np.float32 if a.dtype.itemsize < 4 else a.dtype
        return np.trunc(a.astype(wide) / b.astype(wide)).astype(a.dtype)
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = np.asarray(a - np.fmod(a, safe)) // safe
    return np.where(b == 0, np.zeros_like(quotient), quotient).astype(a.dtype)


def _mod(a: Array, b: Array) -> Array:
    a = np.asarray(a)
    if a.dtype.kind in "iu":
        return np.remainder(a, b)
    r = np.fmod(a, b)
    fixed = np.where((r != 0) & ((np.asarray(b) < 0) != (r < 0)), r + b, r)
    return np.where(fixed == 0, np.copysign(np.zeros_like(r), b), fixed).astype(a.dtype)


def _shift(left: bool) -> Callable[..., Array]:
    def call(a: Array, b: Array) -> Array:
        a = np.asarray(a)
        bits = a.dtype.itemsize * 8
        amount = np.asarray(b).astype(np.int64)
        inside = (amount >= 0) & (amount < bits)
        shifted = (np.left_shift if left else np.right_shift)(a, np.where(inside, amount, 0).astype(a.dtype))
        outside = np.zeros_like(a) if left else np.where(a < 0, -np.ones_like(a), np.zeros_like(a))
        return np.where(inside, shifted, outside).astype(a.dtype)

    return call


def _int_pow(a: Array, b: Array) -> Array:
    a, b = np.asarray(a), np.asarray(b)
    result, base, rest = np.ones(np.broadcast(a, b).shape, a.dtype), a, b
    while np.any(rest > 0):
        result = np.where((rest & 1) != 0, result * base, result).astype(a.dtype)
        base, rest = (base * base).astype(a.dtype), np.where(rest > 0, rest >> 1, 0).astype(b.dtype)
    if a.dtype.kind == "u":
        return result
    negative = np.where(a == 1, a, np.where(a == -1, np.where((b & 1) != 0, a, a * a), a * 0))
    return np.where(b < 0, negative, result).astype(a.dtype)


def _pow(a: Array, b: Array) -> Array:
    kind = np.asarray(a).dtype.kind
    return _int_pow(a, b) if kind in "iu" else np.power(a, b) if kind == "c" else _wide(np.power)(a, b)


def _gelu(x: Array) -> Array:
    return x * 0.5 * (_special("erf")(x * math.sqrt(0.5)) + 1.0)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x)) if np.asarray(x).dtype.kind == "c" else _wide(_special("expit"))(x)


def _sign(x: Array) -> Array:
    x = np.asarray(x)
    if x.dtype.kind in "iu":
        return np.sign(x)
    return np.where(np.isnan(x), x, np.where(x == 0, x * 0, np.copysign(np.ones_like(x), x))).astype(x.dtype)


def _complex(re: Array, im: Array) -> Array:
    dtype = np.complex128 if np.asarray(re).dtype == np.float64 else np.complex64
    out = np.empty(np.broadcast(re, im).shape, dtype)
    out.real, out.imag = re, im
    return out


def _lgamma(x: Array) -> Array:
    return np.where(np.isneginf(x), np.inf, _special("gammaln")(x))


def _fma(a: Array, b: Array, c: Array) -> Array:
    """In f64 for narrower floats, where the product is exact."""
    narrow = np.asarray(a).dtype.itemsize <= 4 and np.asarray(a).dtype.kind not in "iuc"
    return _wide(lambda x, y, z: x * y + z)(a, b, c) if narrow else a * b + c


def _integers_too(function: Callable[..., Array], otherwise: Callable[[Array], Array]) -> Callable[..., Array]:
    """Rounding and tests that are trivial for integers."""

    def call(x: Array) -> Array:
        return otherwise(np.asarray(x)) if np.asarray(x).dtype.kind in "iub" else function(x)

    return call


def _same(x: Array) -> Array:
    return x


def _false(x: Array) -> Array:
    return np.zeros(x.shape, np.bool_)


def _true(x: Array) -> Array:
    return np.ones(x.shape, np.bool_)


def _rows() -> list[ScalarFunction]:
    same: list[tuple[str, int, Callable[..., Array], int]] = [
        ("add", 2, np.add, 1), ("sub", 2, np.subtract, 1), ("mul", 2, np.multiply, 1), ("div", 2, np.divide, 4),
        ("floordiv", 2, _floordiv, 20), ("truncdiv", 2, _truncdiv, 20), ("mod", 2, _mod, 20), ("rem", 2, np.fmod, 20),
        ("neg", 1, np.negative, 1), ("min", 2, np.minimum, 3), ("max", 2, np.maximum, 3),
        ("gcd", 2, np.gcd, 200), ("pow", 2, _pow, 60), ("exp", 1, _wide(np.exp), 14), ("exp2", 1, _wide(np.exp2), 12),
        ("expm1", 1, _wide(np.expm1), 24), ("log", 1, _wide(np.log), 20), ("log2", 1, _wide(np.log2), 22),
        ("log1p", 1, _wide(np.log1p), 26), ("sqrt", 1, np.sqrt, 8), ("rsqrt", 1, _wide(lambda x: 1 / np.sqrt(x)), 10),
        ("sin", 1, _wide(np.sin), 30), ("cos", 1, _wide(np.cos), 30), ("tan", 1, _wide(np.tan), 40),
        ("asin", 1, _wide(np.arcsin), 30), ("acos", 1, _wide(np.arccos), 30), ("atan", 1, _wide(np.arctan), 25),
        ("atan2", 2, _wide(np.arctan2), 40), ("sinh", 1, _wide(np.sinh), 40), ("cosh", 1, _wide(np.cosh), 40),
        ("tanh", 1, _wide(np.tanh), 25), ("asinh", 1, _wide(np.arcsinh), 40), ("acosh", 1, _wide(np.arccosh), 40),
        ("atanh", 1, _wide(np.arctanh), 40), ("erf", 1, _wide(_special("erf")), 30), ("gelu", 1, _wide(_gelu), 24),
        ("erfc", 1, _wide(_special("erfc")), 45), ("lgamma", 1, _wide(_lgamma), 80), ("sigmoid", 1, _sigmoid, 24),
        ("floor", 1, _integers_too(np.floor, _same), 1), ("ceil", 1, _integers_too(np.ceil, _same), 1),
        ("trunc", 1, _integers_too(np.trunc, _same), 1), ("round", 1, _integers_too(np.rint, _same), 1),
        ("sign", 1, _sign, 4), ("copysign", 2, np.copysign, 2), ("conj", 1, np.conj, 1),
        ("and", 2, np.bitwise_and, 1), ("or", 2, np.bitwise_or, 1), ("xor", 2, np.bitwise_xor, 1),
        ("not", 1, np.invert, 1), ("shl", 2, _shift(True), 3), ("shr", 2, _shift(False), 3),
        ("fma", 3, _fma, 1),
    ]  # fmt: skip
    tests: list[tuple[str, int, Callable[..., Array]]] = [
        ("eq", 2, np.equal), ("ne", 2, np.not_equal), ("lt", 2, np.less), ("le", 2, np.less_equal),
        ("gt", 2, np.greater), ("ge", 2, np.greater_equal), ("isnan", 1, _integers_too(np.isnan, _false)),
        ("isinf", 1, _integers_too(np.isinf, _false)), ("isfinite", 1, _integers_too(np.isfinite, _true)),
        ("signbit", 1, lambda x: x < 0 if np.asarray(x).dtype.kind in "iu" else np.signbit(x)),
    ]  # fmt: skip
    rows = [
        ScalarFunction(name, arity, "same", _quiet(function), cost, _KINDS.get(name, "f"))
        for name, arity, function, cost in same
    ]
    rows += [
        ScalarFunction(name, arity, "bool", _quiet(function), kinds=_KINDS.get(name, "f"))
        for name, arity, function in tests
    ]
    rows += [
        ScalarFunction("abs", 1, "real", _quiet(np.abs), kinds="fic"),
        ScalarFunction("real", 1, "real", np.real, kinds="c"),
        ScalarFunction("imag", 1, "real", np.imag, kinds="c"),
        ScalarFunction("complex", 2, "complex", _complex),
        ScalarFunction("select", 3, "second", np.where, kinds="fibc4"),
        ScalarFunction("cast", 1, "given", lambda x: x, kinds="fibc4"),  # the target type is the node's: see interp
        ScalarFunction("bitcast", 1, "given", lambda x: x, kinds="fi"),
        ScalarFunction("index", 1, "same", _same, cost=0, kinds="i"),  # of i64: data that says where an element is
        ScalarFunction("data", 1, "same", _same, cost=0, kinds="i"),  # of i64: an index that is a number of a tensor
    ]
    return rows


_KINDS: Final = {  # of functions that take more than floats, or others
    **dict.fromkeys(("add", "sub", "mul", "neg"), "fic"),
    **dict.fromkeys(("div", "exp", "log", "sqrt"), "fc"),
    **dict.fromkeys(("floordiv", "truncdiv", "mod", "rem", "pow", "sign", "fma", "signbit"), "fi"),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "isinf", "isfinite"), "fi"),
    **dict.fromkeys(("min", "max", "lt", "le", "gt", "ge"), "fib"),
    **dict.fromkeys(("eq", "ne"), "fibc"),
    **dict.fromkeys(("and", "or", "xor", "not"), "ib"),
    **dict.fromkeys(("shl", "shr", "gcd"), "i"),
    "isnan": "fic",
    "conj": "c",
}


SCALARS: Final[dict[str, ScalarFunction]] = {row.name: row for row in _rows()}


def cast_array(x: Array, dtype: DType) -> Array:
    """NumPy's meaning of `cast`: floats to integers truncate and saturate, NaN gives 0; to bool tests for non-zero."""
    x = np.asarray(x)
    if x.dtype in (i4.np, u4.np):
        x = x.astype(np.int8)
    with np.errstate(all="ignore"):
        if dtype.is_bool:
            return x != 0
        if x.dtype.kind == "c" and not dtype.is_complex:
            x = x.real
        if dtype.is_int and (x.dtype.kind == "f" or x.dtype.kind == "V"):
            return _saturate(x.astype(np.float64), dtype)
        if dtype.is_int and dtype.bits == 4:
            wrapped = x.astype(np.int64) & 15
            return (wrapped - ((wrapped & 8) << 1 if dtype.kind == "int" else 0)).astype(np.int8).astype(dtype.np)
        return x.astype(dtype.np)


def _saturate(x: Array, dtype: DType) -> Array:
    low, high = (
        (-(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1) if dtype.kind == "int" else (0, (1 << dtype.bits) - 1)
    )
    whole = np.trunc(np.where(np.isnan(x), 0, x))
    top, bottom = whole >= float(high), whole <= float(low)
    inner = np.where(top | bottom, 0, whole)
    storage = np.dtype(np.int8 if dtype.bits == 4 else dtype.np)
    kept = inner.astype(np.uint64 if dtype.kind == "uint" else np.int64).astype(storage)
    return np.where(top, storage.type(high), np.where(bottom, storage.type(low), kept)).astype(dtype.np)


def bitcast_array(x: Array, dtype: DType) -> Array:
    return np.ascontiguousarray(x).view(dtype.np).reshape(np.shape(x))
