"""Floats to integers: truncated, saturated, NaN to 0. Vectors stay vectors, which LLVM's own intrinsics do not."""

from __future__ import annotations

import math

import numpy as np

from strata.backends.llvm.ir.builder import IrFunction, bits_of, constant, lanes_of, suffix, vector, with_element
from strata.core import DType
from strata.kernel import QuantCode


def float_to_integer(f: IrFunction, from_type: str, x: str, result: DType, to_type: str) -> str:
    """x, f32 or f64 registers, as integers of a dtype in registers of `to_type`."""
    signed = result.kind == "int"
    low, high = (-(1 << result.bits - 1), (1 << result.bits - 1) - 1) if signed else (0, (1 << result.bits) - 1)
    if lanes_of(from_type) == 1 and result.bits != 4:
        name = "llvm.fptosi.sat" if signed else "llvm.fptoui.sat"
        return f.call(to_type, f"{name}.{suffix(to_type)}.{suffix(from_type)}", (from_type, x))
    least, most = constant(from_type, float(low)), _largest(from_type, high)
    kept = f.select(from_type, f.compare("ogt", from_type, x, least), x, least)  # and NaN the least
    kept = f.select(from_type, f.compare("olt", from_type, kept, constant(from_type, most)), kept,
                    constant(from_type, most))  # fmt: skip
    whole = to_type if bits_of(to_type) >= 32 else with_element(to_type, "i32")
    by_sign = signed or bits_of(whole) > result.bits  # unsigned numbers that fit a signed one: most processors like it
    made = f.convert("fptosi" if by_sign else "fptoui", from_type, kept, whole)
    if signed:
        made = f.select(whole, f.compare("ord", from_type, x, x), made, constant(whole, 0))
    if most != high:
        above = f.compare("ogt", from_type, x, constant(from_type, most))
        made = f.select(whole, above, constant(whole, high), made)
    return made if whole == to_type else f.convert("trunc", whole, made, to_type)


def rounded_to_code(f: IrFunction, code: QuantCode, x: str, lanes: int) -> str:
    """A code, or the float that it becomes, from x in registers of f32: kept within bounds, then rounded to an integer
    by one instruction."""
    real, whole = vector("float", lanes), vector("i32", lanes)
    least, most = (constant(real, float(bound)) for bound in code.bounds)
    kept = f.select(real, f.compare("ogt", real, x, least), x, least)  # and NaN the least
    kept = f.select(real, f.compare("olt", real, kept, most), kept, most)
    made = f.call(whole, f"llvm.lrint.{suffix(whole)}.{suffix(real)}", (real, kept))
    if code.dtype.kind == "int":
        made = f.select(whole, f.compare("ord", real, x, x), made, constant(whole, -code.shift))
    shift = code.shift - (code.back or 0)
    if shift:
        made = f.binary("add", whole, made, constant(whole, shift))
    if code.back is not None:
        return f.convert("sitofp", whole, made, real)
    return f.convert("trunc", whole, made, vector(f"i{code.dtype.bits}", lanes))


def _largest(type_: str, high: int) -> float:
    """The largest float that is no larger than an integer."""
    kind = np.float32 if bits_of(type_) == 32 else np.float64
    near = kind(high)
    return float(near if int(near) <= high else np.nextafter(near, kind(-math.inf)))
