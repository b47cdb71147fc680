"""Rounding to small integers, as quantised programs do it, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

from strata.core import DType, f32, i32
from strata.kernel.ir import Const, Expr, Scalar

_FAR = 1 << 15  # shifts beyond it are no zero points


@dataclass(frozen=True, slots=True)
class QuantCode:
    """round(x) + shift as a number of a dtype, which saturates and has 0 for NaN; less `back` where it is a float
    again."""

    x: Expr
    shift: int
    dtype: DType
    back: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """Between which round(x) is kept."""
        bits = self.dtype.bits
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if self.dtype.kind == "int" else (0, (1 << bits) - 1)
        return low - self.shift, high - self.shift


def code_of(node: Expr) -> QuantCode | None:
    """A node as a code of 8 or 16 bits or as the float that such a code becomes; None where it is neither.

    cast.u8(add(round(x), 128.0))
    cast.f32(sub(cast.i32(cast.u8(add(round(x), 128.0))), 128))
    """
    match node:
        case Scalar("cast", (x,)) if node.dtype.is_int and node.dtype.bits in (8, 16) and x.dtype is f32:
            return _rounded(x, node.dtype)
        case Scalar("cast", (Scalar("sub", (Scalar("cast", (code,)) as wide, Const(value, _))),)):
            if node.dtype is f32 and wide.dtype is i32 and abs(value.real) <= _FAR:
                return _read_back(code, int(value.real))
        case Scalar("cast", (code,)) if node.dtype is f32:
            return _read_back(code, 0)
    return None


def _read_back(node: Expr, back: int) -> QuantCode | None:
    found = code_of(node) if node.dtype.is_int else None
    return None if found is None else QuantCode(found.x, found.shift, found.dtype, back)


def _rounded(x: Expr, dtype: DType) -> QuantCode | None:
    match x:
        case Scalar("round", (inner,)):
            made = QuantCode(inner, 0, dtype)
        case Scalar("add", (Scalar("round", (inner,)), Const(value, _))):
            shift = value.real
            if not abs(shift) <= _FAR or shift != int(shift):
                return None
            made = QuantCode(inner, int(shift), dtype)
        case _:
            return None
    if made.bounds[0] >= 0 and (above := _relu(made.x)) is not None:  # what is below 0 becomes 0 anyway, and NaN
        return QuantCode(above, made.shift, dtype)
    return made


def _relu(node: Expr) -> Expr | None:
    """x where a node is the larger of x and 0."""
    match node:
        case Scalar("select", (Scalar("lt", (a, Const(0.0, _))), Const(0.0, _), x)) if a is x:
            return x
        case Scalar("max", (x, Const(0.0, _))) | Scalar("max", (Const(0.0, _), x)):
            return x
    return None
