"""Rules of StableHLO's element-wise operations, constants and calls; and of CHLO's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from strata import ops
from strata.core import DType, as_dtype, bool_
from strata.errors import LowerError
from strata.io.stablehlo.lapack import ROUTINES
from strata.io.stablehlo.rules import (
    RULES,
    Item,
    ModuleReader,
    assert_equal,
    direction_of,
    equality_of,
    folded_sizes,
    op_named,
    rule,
    scalar,
    static_shape,
    static_type,
)
from strata.io.stablehlo.syntax import HloOp, dense
from strata.mir import Value, constant


def _cbrt(x: Value) -> Value:
    return ops.sign(x) * ops.power(ops.abs(x), scalar(1 / 3, x))


def _away_from_zero(x: Value) -> Value:
    size = ops.abs(x)
    down = ops.floor(size)
    return ops.copysign(down + ops.cast(size - down >= scalar(0.5, x), x.dtype), x)


def _tanh(x: Value) -> Value:
    if not x.dtype.is_complex:
        return ops.tanh(x)
    a, b = ops.tanh(ops.real(x)), ops.tan(ops.imag(x))
    one = scalar(1, a)
    below = one + ops.square(a * b)
    return _complex(a * (one + ops.square(b)) / below, b * (one - ops.square(a)) / below)


def _not(x: Value) -> Value:
    return ops.logical_not(x) if x.dtype.is_bool else ops.bitwise_not(x)


def _word(x: Value) -> Value:
    """Bits as an unsigned integer."""
    made: Value = ops.bitcast(x, as_dtype(f"u{8 * x.dtype.itemsize}"))
    return made


def _leading_zeros(x: Value) -> Value:
    """Bits above the highest one that is set: those below it are set, too, and then counted."""
    bits = 8 * x.dtype.itemsize
    word = _word(x)
    shift = 1
    while shift < bits:
        word = ops.bitwise_or(word, ops.bitwise_right_shift(word, scalar(shift, word)))
        shift *= 2
    return ops.cast(scalar(bits, word) - ops.cast(ops.bitwise_count(word), word.dtype), x.dtype)


def _erf_inverse(y: Value) -> Value:
    """A rational start, made exact by Newton's steps on erf (erfc where it is near 1, which keeps digits)."""
    wide = y if y.dtype.itemsize > 2 else ops.cast(y, as_dtype("f32"))
    w = -ops.log1p(-wide * wide)
    a = 0.147
    t = scalar(2 / (math.pi * a), w) - w * scalar(0.5, w)
    x = ops.copysign(ops.sqrt(ops.sqrt(t * t + w * scalar(1 / a, w)) - t), wide)
    size = ops.abs(wide)
    for _ in range(4 if wide.dtype.itemsize == 8 else 3):
        at = ops.abs(x)
        far = scalar(1.0, w) - size - ops.erfc(at)
        error = ops.where(size < scalar(0.5, w), ops.erf(at) - size, far)
        step = error * scalar(math.sqrt(math.pi) / 2, w) * ops.exp(at * at)
        x = ops.copysign(ops.maximum(at - step, scalar(0.0, w)), wide)
    ends = ops.where(size > scalar(1.0, w), scalar(math.nan, w), ops.copysign(scalar(math.inf, w), wide))
    x = ops.where(
        size < scalar(1.0, w),
        ops.where(ops.equal(wide, scalar(0.0, w)), wide, x),
        ops.where(ops.isnan(size), wide, ends),
    )
    return ops.cast(x, y.dtype)


UNARY: dict[str, Callable[[Value], Any]] = {
    "abs": ops.abs, "negate": ops.negative, "exponential": ops.exp, "exponential_minus_one": ops.expm1, "log": ops.log,
    "log_plus_one": ops.log1p, "logistic": ops.sigmoid, "sqrt": ops.sqrt, "rsqrt": ops.rsqrt, "cbrt": _cbrt,
    "sine": ops.sin, "cosine": ops.cos, "tan": ops.tan, "tanh": _tanh, "ceil": ops.ceil, "floor": ops.floor,
    "round_nearest_even": ops.round, "round_nearest_afz": _away_from_zero, "sign": ops.sign, "not": _not,
    "popcnt": lambda x: ops.cast(ops.bitwise_count(_word(x)), x.dtype), "count_leading_zeros": _leading_zeros,
    "is_finite": ops.isfinite, "real": ops.real, "imag": ops.imag, "optimization_barrier": lambda x: x,
    "chlo.erf": ops.erf, "chlo.erfc": ops.erfc, "chlo.erf_inv": _erf_inverse, "chlo.lgamma": ops.lgamma,
    "chlo.digamma": ops.digamma, "chlo.acos": ops.acos, "chlo.acosh": ops.acosh, "chlo.asin": ops.asin,
    "chlo.asinh": ops.asinh, "chlo.atan": ops.atan, "chlo.atanh": ops.atanh, "chlo.cosh": ops.cosh,
    "chlo.sinh": ops.sinh, "chlo.square": ops.square, "chlo.conj": ops.conj, "chlo.tan": ops.tan,
    "chlo.is_inf": ops.isinf, "chlo.is_pos_inf": lambda x: ops.equal(x, scalar(math.inf, x)),
    "chlo.is_neg_inf": lambda x: ops.equal(x, scalar(-math.inf, x)),
}  # fmt: skip


def _shifted(shift: Callable[[Value, Value], Value], *, logical: bool = False, keeps_sign: bool = False) -> Any:
    """A shift; by as many bits as there are, or more, nothing is left, or the sign alone."""

    def shifted(x: Value, y: Value) -> Value:
        bits = 8 * x.dtype.itemsize
        given = x.dtype
        if logical:
            x, y = _word(x), _word(y)
        most = scalar(bits - 1, y)
        few = _word(y) < constant(np.asarray(bits, f"u{bits // 8}"))
        rest = shift(x, most) if keeps_sign else scalar(0, x)
        made = ops.where(few, shift(x, ops.where(few, y, scalar(0, y))), rest)
        return ops.bitcast(made, given) if logical else made

    return shifted


def _divide(x: Value, y: Value) -> Value:
    if not x.dtype.is_int:
        return ops.divide(x, y)
    zero = ops.equal(y, scalar(0, y))  # division by zero gives -1, all bits set
    made = ops.trunc_divide(x, ops.where(zero, scalar(1, y), y))
    return ops.where(zero, constant(np.asarray(-1).astype(x.dtype.np)), made)


def _remainder(x: Value, y: Value) -> Value:
    if not x.dtype.is_int:
        return ops.fmod(x, y)
    zero = ops.equal(y, scalar(0, y))  # by zero gives the dividend
    return ops.where(zero, x, ops.fmod(x, ops.where(zero, scalar(1, y), y)))


def _logical(on_bools: Callable[[Value, Value], Value], on_others: Callable[[Value, Value], Value]) -> Any:
    return lambda x, y: on_bools(x, y) if x.dtype.is_bool else on_others(x, y)


def _complex(a: Value, b: Value) -> Value:
    made: Value = op_named("complex")(a, b)
    return made


BINARY: dict[str, Callable[[Value, Value], Any]] = {
    "add": _logical(ops.logical_or, ops.add), "subtract": ops.subtract,
    "multiply": _logical(ops.logical_and, ops.multiply), "divide": _divide, "remainder": _remainder,
    "maximum": _logical(ops.logical_or, ops.maximum), "minimum": _logical(ops.logical_and, ops.minimum),
    "power": ops.power, "atan2": ops.atan2,
    "and": _logical(ops.logical_and, ops.bitwise_and), "or": _logical(ops.logical_or, ops.bitwise_or),
    "xor": _logical(ops.logical_xor, ops.bitwise_xor), "shift_left": _shifted(ops.bitwise_left_shift),
    "shift_right_arithmetic": _shifted(ops.bitwise_right_shift, keeps_sign=True),
    "shift_right_logical": _shifted(ops.bitwise_right_shift, logical=True),
    "complex": _complex,
}  # fmt: skip


@rule(*UNARY)
def unary(module: ModuleReader, op: HloOp, given: list[Item]) -> Any:
    name = op.name.removeprefix("stablehlo.")
    if name == "optimization_barrier":
        return given
    return Item(UNARY[name](given[0].value), folded_sizes(name, given))


@rule(*BINARY)
def binary(module: ModuleReader, op: HloOp, given: list[Item]) -> Any:
    name = op.name.removeprefix("stablehlo.")
    both = None if given[0].equality is None or name != "and" else given[0].equality
    return Item(BINARY[name](given[0].value, given[1].value), folded_sizes(name, given), both)


COMPARE: dict[str, Callable[[Value, Value], Value]] = {
    "EQ": ops.equal, "NE": ops.not_equal, "GE": ops.greater_equal, "GT": ops.greater, "LE": ops.less_equal,
    "LT": ops.less,
}  # fmt: skip


@rule("compare")
def compare(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    return Item(COMPARE[direction_of(op)](given[0].value, given[1].value), None, equality_of(op, given))


@rule("select")
def select(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    made: Value = ops.where(*(x.value for x in given))
    return made


@rule("clamp")
def clamp(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    low, x, high = (i.value for i in given)
    made: Value = ops.minimum(ops.maximum(x, low), high)
    return made


@rule("constant")
def constant_(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    kind = static_type(op)
    value = op.attributes["value"]
    array = dense(value, kind) if isinstance(value, str) else np.asarray(value, kind.dtype.np).reshape(static_shape(op))
    sizes = tuple(int(x) for x in array.reshape(-1)) if kind.dtype.is_int and array.size <= 32 else None
    return Item(constant(array), sizes)


@rule("convert")
def convert(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    return Item(_cast(given[0].value, static_type(op).dtype), folded_sizes("convert", given))


def _cast(x: Value, dtype: DType) -> Value:
    made: Value = ops.not_equal(x, scalar(0, x)) if dtype is bool_ and x.dtype is not bool_ else ops.cast(x, dtype)
    return made


@rule("bitcast_convert")
def bitcast_convert(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    """Between types of other widths, the elements of a wide one lie along their own last axis, the lowest bits
    first."""
    x, dtype = given[0].value, static_type(op).dtype
    if min(x.dtype.bits, dtype.bits) < 8 and x.dtype.bits != dtype.bits:
        raise LowerError(f"bits of {x.dtype} as {dtype}, which has another width, are not supported", code="L511")
    wide, narrow = 8 * max(x.dtype.itemsize, dtype.itemsize), 8 * min(x.dtype.itemsize, dtype.itemsize)
    if narrow < wide:
        word, part = as_dtype(f"u{wide}"), as_dtype(f"u{narrow}")
        places = constant(np.arange(0, wide, narrow), word)
        if x.dtype.itemsize < dtype.itemsize:
            parts = ops.bitwise_left_shift(ops.cast(ops.bitcast(x, part), word), places)
            x = ops.cast(ops.sum(parts, -1), word)  # no two have a bit in one place
        else:
            parts = ops.bitwise_right_shift(ops.expand_dims(ops.bitcast(x, word), x.ndim), places)
            x = ops.cast(ops.bitwise_and(parts, constant((1 << narrow) - 1, word)), part)
    made: Value = ops.bitcast(x, dtype)
    return made


@rule("reduce_precision")
def reduce_precision(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    """Rounded as a narrower type would, where there is such a type."""
    if op.words:  # `format = e8m7` in the short form
        bits = op.words[-1]
    else:
        found = op.attributes.get("format")
        bits = found or f"e{op.attributes['exponent_bits']}m{op.attributes['mantissa_bits']}"
    x = given[0].value
    if bits in ("e8m23", "e11m52"):
        return x if bits == "e11m52" or x.dtype.itemsize == 4 else _through(x, "f32")
    if bits not in ("e5m10", "e8m7"):
        raise LowerError(f"no element type has the bits {bits}", code="L511")
    return _through(x, "f16" if bits == "e5m10" else "bf16")


def _through(x: Value, name: str) -> Value:
    made: Value = ops.cast(ops.cast(x, as_dtype(name)), x.dtype)
    return made


# ---------------------------------------------------------------------------------------------------------------- calls


@rule("call")
def call(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Item]:
    name = op.words[0] if op.words else op.attributes["callee"]
    return module.call(module.functions[name], given)


@rule("composite")
def composite(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Item]:
    return module.call(module.functions[op.attributes["decomposition"]], given)


IDENTITIES = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
    "LayoutConstraint",
)


@rule("custom_call")
def custom_call(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Item]:
    """What others name instead of writing out: contracts on sizes, and notes for other compilers."""
    name = op.words[0] if op.words else op.attributes["call_target_name"]
    if name == "shape_assertion":
        assert_equal(given[0].equality)
        return []
    if name in IDENTITIES:
        return given
    if name in ROUTINES:
        return [Item(x) for x in ROUTINES[name](op, given)]
    inner = RULES.get(name.removeprefix("stablehlo."))  # an operation that is not the dialect's own
    if name.startswith("stablehlo.") and inner is not None:
        found: list[Item] = inner(module, op, given)
        return found
    raise LowerError(f"custom call {name!r} is not part of StableHLO", code="L511")


@rule("tuple")
def tuple_(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Item]:
    return [Item(tuple(given))]


@rule("get_tuple_element")
def get_tuple_element(module: ModuleReader, op: HloOp, given: list[Item]) -> Item:
    found: Item = given[0].value[op.attributes["index"]]
    return found
