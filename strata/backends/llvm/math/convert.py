"""Conversions between real types: floats, integers and booleans of all widths, rounded once."""

from __future__ import annotations

from strata.backends.llvm.ir.builder import (
    IrFunction,
    bits_of,
    constant,
    element_of,
    integer_of,
    lanes_of,
    vector,
    with_element,
)
from strata.backends.llvm.ir.registers import register_type, round_through
from strata.backends.llvm.ir.saturate import float_to_integer
from strata.core import DType, Target, f32


def convert(f: IrFunction, target: Target, x: str, source: DType, result: DType, lanes: int) -> str:
    """One component from one real type to another."""
    from_type, to_type = register_type(source, lanes), register_type(result, lanes)
    if source is result:
        return round_through(f, result, x, lanes, target, is_own=True)
    if result.is_bool:
        return f.compare("une" if source.is_float else "ne", from_type, x, constant(from_type, 0))
    if source.is_bool:
        if result.is_float:
            return f.select(to_type, x, constant(to_type, 1.0), constant(to_type, 0.0))
        return f.convert("zext", from_type, x, to_type)
    if source.is_float and result.is_float:
        # f64 to a small float must not round twice: round to odd on the way to f32
        if result is not f32 and from_type != to_type and bits_of(to_type) == 32:
            x = _round_to_odd(f, from_type, x, to_type, target)
        else:
            x = _resize_float(f, from_type, x, to_type)
        return round_through(f, result, x, lanes, target)
    if source.is_float:
        return float_to_integer(f, from_type, x, result, to_type)
    if result.is_float:
        name = "sitofp" if source.kind == "int" else "uitofp"
        return round_through(f, result, f.convert(name, from_type, x, to_type), lanes, target)
    return _resize_integer(f, source, from_type, x, result, to_type)


def _resize_float(f: IrFunction, from_type: str, x: str, to_type: str) -> str:
    if from_type == to_type:
        return x
    return f.convert("fptrunc" if bits_of(to_type) < bits_of(from_type) else "fpext", from_type, x, to_type)


def _round_to_odd(f: IrFunction, from_type: str, x: str, to_type: str, target: Target) -> str:
    if target.has_avx512 and lanes_of(from_type) >= 8:
        return _round_to_odd_by_instruction(f, from_type, x, to_type)
    near = f.convert("fptrunc", from_type, x, to_type)
    back = f.convert("fpext", to_type, near, from_type)
    exact = f.compare("ueq", from_type, back, x)
    whole = integer_of(to_type)
    bits = f.convert("bitcast", to_type, near, whole)
    # towards zero when rounding went away from it, then set the last bit
    away = f.compare("ogt", from_type, f.intrinsic("fabs", from_type, back), f.intrinsic("fabs", from_type, x))
    down = f.binary("add", whole, bits, f.convert("sext", with_element(whole, "i1"), away, whole))
    odd = f.binary("or", whole, down, constant(whole, 1))
    return f.convert("bitcast", whole, f.select(whole, exact, bits, odd), to_type)


def _round_to_odd_by_instruction(f: IrFunction, from_type: str, x: str, to_type: str) -> str:
    """Rounded towards zero; the last bit is set where that cut something off."""
    if lanes_of(from_type) > 8:
        half, made = (vector(element_of(t), lanes_of(t) // 2) for t in (from_type, to_type))
        return f.by_halves(from_type, x, to_type, lambda part: _round_to_odd_by_instruction(f, half, part, made))
    towards_zero = ((to_type, "zeroinitializer"), ("i8", -1), ("i32", 11))
    cut = f.call(to_type, "llvm.x86.avx512.mask.cvtpd2ps.512", (from_type, x), *towards_zero)
    inexact = f.compare("one", from_type, f.convert("fpext", to_type, cut, from_type), x)
    whole = integer_of(to_type)
    bits = f.convert("bitcast", to_type, cut, whole)
    odd = f.binary("or", whole, bits, constant(whole, 1))
    return f.convert("bitcast", whole, f.select(whole, inexact, odd, bits), to_type)


def _resize_integer(f: IrFunction, source: DType, from_type: str, x: str, result: DType, to_type: str) -> str:
    if bits_of(to_type) < bits_of(from_type):
        x = f.convert("trunc", from_type, x, to_type)
    else:
        x = f.convert("sext" if source.kind == "int" else "zext", from_type, x, to_type)
    if result.bits == 4:
        up = f.binary("shl", to_type, x, constant(to_type, 4))
        x = f.binary("ashr" if result.kind == "int" else "lshr", to_type, up, constant(to_type, 4))
    return x
