"""Comparisons, selection, casts, and logic on booleans and bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from typing import cast as cast_type

import numpy as np

from strata.core import (
    Dim,
    DType,
    TensorType,
    as_dtype,
    bf16,
    bool_,
    broadcast_shapes,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
)
from strata.mir import METHODS, Op, Sample, UnaryOp, Value, constant, draw, function, op
from strata.ops.base.elementwise import ElementwiseBinary, ElementwiseUnary, lift, unbroadcast
from strata.ops.base.frontend import Operand, as_value, promoted

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

FnT = TypeVar("FnT", bound=Callable[..., Any])


class Compare(ElementwiseBinary):
    """A comparison: booleans out. NaN compares unequal to everything."""

    differentiable = False
    allowed = "ordered"
    dtypes = "ordered"

    def result_dtype(self, dtype: DType) -> DType:
        return bool_

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], f32[3, 4]), Sample(i32[4, 1], i32[3]), Sample(f64[0, 3], f64[3]),
            Sample(bool_[4], bool_[4]),
            Sample(np.array([np.nan, 1, 1], np.float32), np.array([np.nan, np.nan, 1], np.float32)),
        ]  # fmt: skip


@op("equal")
class Equal(Compare):
    """x == y."""

    allowed = "any"
    commutative = True
    in_kernel = "eq"


@op("not_equal")
class NotEqual(Compare):
    """x != y; true when either is NaN."""

    allowed = "any"
    commutative = True
    in_kernel = "ne"


@op("less")
class Less(Compare):
    """x < y."""

    in_kernel = "lt"


@op("less_equal")
class LessEqual(Compare):
    """x <= y."""

    in_kernel = "le"


@op("greater")
class Greater(Compare):
    """x > y."""

    in_kernel = "gt"


@op("greater_equal")
class GreaterEqual(Compare):
    """x >= y."""

    in_kernel = "ge"


@op("where")
class Where(Op):
    """x where the condition is true, else y. The branch that is not taken never leaks, not even a NaN."""

    elementwise = True

    def infer(self, condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
        self.require_dtype(condition.dtype is bool_, f"the condition must be bool, got {condition}", code="D106")
        self.require_dtype(x.dtype is y.dtype, f"the branches differ in dtype, {x} and {y}", code="D103")
        return TensorType(x.dtype, broadcast_shapes(condition.shape, x.shape, y.shape, what=self.name))

    def numpy(self, condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(condition, x, y)

    def jvp(self, condition: Value, x: Value, y: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value:
        zero = constant(0, out.dtype)
        tx, ty = (zero if t is None else t for t in dx[1:])
        return METHODS["broadcast_to"](Where()(condition, tx, ty), out.shape)

    def vjp(self, condition: Value, x: Value, y: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        zero = constant(0, ct.dtype)
        to_x, to_y = Where()(condition, ct, zero), Where()(condition, zero, ct)
        return None, unbroadcast(to_x, x.shape), unbroadcast(to_y, y.shape)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        rank = max(x.ndim - b for x, b in zip(inputs, batched, strict=True))
        lifted = (lift(x, rank) if b else x for x, b in zip(inputs, batched, strict=True))
        shape = broadcast_shapes(*(x.shape[1:] if b else x.shape for x, b in zip(inputs, batched, strict=True)))
        return METHODS["broadcast_to"](self(*lifted), (size, *shape))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        condition, x, y = (v[k.broadcast(index, v.shape)] for v in inputs)
        return k.select(condition, x, y)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(bool_[3, 4], f32[3, 4], f32[3, 4]), Sample(bool_[4, 1], f32[3], f32[()]),
            Sample(bool_[0], f32[0], f32[1]),
            Sample(bool_[3], i64[3], i64[3], grad=False),
            Sample(
                np.array([True, False]), np.array([1, np.nan], np.float32), np.array([np.nan, 2], np.float32),
                grad=False,
            ),
        ]  # fmt: skip


@op("cast")
class Cast(UnaryOp):
    """To another dtype. Floats to integers truncate and saturate, NaN to 0; complex to real takes the real part."""

    dtype: DType

    dtypes = "any"
    elementwise = True

    def infer(self, x: TensorType) -> TensorType:
        return x.with_dtype(self.dtype)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return cast_array(x, self.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value | None:
        return cast(dx, self.dtype) if self.dtype.is_inexact else None

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value | None:
        if not (x.dtype.is_inexact and self.dtype.is_inexact):
            return None
        if x.dtype.is_complex == self.dtype.is_complex:
            return cast(ct, x.dtype)
        # gradients of complex numbers are with respect to the conjugate: half of, or twice, the real one
        return cast(ct * 0.5, x.dtype) if x.dtype.is_complex else cast(METHODS["real"](ct) * 2.0, x.dtype)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return k.cast(inputs[0][index], self.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        floats = np.array([0, 1.5, -1.5, 300, -300, np.nan, np.inf, 3e9], np.float32)
        return [
            Sample(f32[3, 4], dtype=f64), Sample(f32[()], dtype=f32, grad=False), Sample(floats, dtype=i8, grad=False),
            Sample(floats, dtype=u8, grad=False), Sample(floats, dtype=i64, grad=False),
            Sample(floats, dtype=bool_, grad=False),
            Sample(bool_[5], dtype=f32, grad=False), Sample(i64[0, 2], dtype=i32, grad=False),
            Sample(f32[4], dtype=bf16, grad=False), Sample(f32[4], dtype=f16, grad=False),
            Sample(f16[4], dtype=f32, grad=False),
        ]  # fmt: skip


@op("bitcast")
class Bitcast(UnaryOp):
    """The bits of `source` under another element type of the same width."""

    source: DType
    dtype: DType

    dtypes = (f64,)  # of the first sample: `source` says which one an op takes
    elementwise = True
    differentiable = False

    def infer(self, x: TensorType) -> TensorType:
        whole = not {self.source.kind, self.dtype.kind} & {"bool", "complex"} and self.source.bits == self.dtype.bits
        self.require_dtype(
            whole and x.dtype is self.source, f"the bits of {x.dtype} are not those of {self.dtype}", code="D246"
        )
        return x.with_dtype(self.dtype)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, self.source.np).view(self.dtype.np).reshape(x.shape)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return k.bitcast(inputs[0][index], self.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        floats = np.array([0, -0.0, 1.5, -1.5, np.inf, -np.inf, 1e-40, 3e38], np.float32)
        return [
            Sample(f64[3, 2], source=f64, dtype=i64), Sample(floats.view(np.uint32), source=u32, dtype=f32),
            Sample(floats.view(np.int32), source=i32, dtype=u32), Sample(i8[0, 2], source=i8, dtype=u8),
            Sample(np.arange(-4, 4).astype(np.int16), source=i16, dtype=u16),
        ]  # fmt: skip


def cast_array(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The conversion table of `cast`, on arrays."""
    if dtype.is_bool:
        return x != 0
    if x.dtype.kind == "c" and not dtype.is_complex:
        x = x.real
    given = as_dtype(x.dtype)
    if dtype.is_int and given.is_float:
        wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        low, high = int_bounds(dtype)
        inside = np.where((wide > low) & (wide < float(high)), wide, 0.0).astype(np.int64 if low < 0 else np.uint64)
        return np.where(wide >= float(high), high, np.where(wide <= low, low, inside)).astype(dtype.np)
    return x.astype(dtype.np)


def int_bounds(dtype: DType) -> tuple[int, int]:
    if dtype.kind == "uint":
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


class Bitwise(ElementwiseBinary):
    """Logic on the bits of integers, or on booleans."""

    differentiable = False
    allowed = "integral"
    dtypes = "integral"

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(i32[3, 4], i32[3, 4]), Sample(bool_[4, 1], bool_[3]), Sample(u8[0], u8[1])]


@op("bitwise_and")
class BitwiseAnd(Bitwise):
    """x & y."""

    commutative = True
    in_kernel = "and_"


@op("bitwise_or")
class BitwiseOr(Bitwise):
    """x | y."""

    commutative = True
    in_kernel = "or_"


@op("bitwise_xor")
class BitwiseXor(Bitwise):
    """x ^ y."""

    commutative = True
    in_kernel = "xor"


@op("bitwise_not")
class BitwiseNot(ElementwiseUnary):
    """~x; logical not on booleans."""

    differentiable = False
    allowed = "integral"
    dtypes = "integral"
    in_kernel = "not_"

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(i32[3, 4]), Sample(bool_[4]), Sample(u8[0])]


class Shift(ElementwiseBinary):
    """A shift of integers; a count outside 0..bits-1 shifts everything out, also a negative one, as in NumPy."""

    differentiable = False
    allowed = "int"
    dtypes = "int"

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(i32[3, 4], draw(i32[4], 0, 8)),
            Sample(u8[4], draw(u8[4], 0, 8)),
            Sample(i64[3], draw(i64[3], 0, 70)),
            Sample(np.array([-128, 127, -1, 5], np.int8), np.array([[-1], [-128], [8], [127]], np.int8)),
        ]


@op("bitwise_left_shift")
class LeftShift(Shift):
    """x << y."""

    in_numpy = "left_shift"
    in_kernel = "shl"


@op("bitwise_right_shift")
class RightShift(Shift):
    """x >> y; the sign is kept on signed integers."""

    in_numpy = "right_shift"
    in_kernel = "shr"


class Predicate(ElementwiseUnary):
    """A question about one number: booleans out."""

    differentiable = False
    allowed = "inexact"
    dtypes = "float"

    def result_dtype(self, dtype: DType) -> DType:
        return bool_

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(np.array([0, 1, np.nan, np.inf, -np.inf], np.float32)), Sample(f32[()]), Sample(f64[0, 2])]


@op("isnan")
class IsNan(Predicate):
    """Whether x is NaN."""


@op("isinf")
class IsInf(Predicate):
    """Whether x is infinite."""


@op("stop_gradient")
class StopGradient(UnaryOp):
    """x, with no derivative."""

    dtypes = "any"
    differentiable = False
    elementwise = True

    def infer(self, x: TensorType) -> TensorType:
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return x

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return inputs[0][index]

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4])]


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def bitcast(x: Operand, dtype: Any) -> Value:
    """The same bits as another element type of the same width; the same value when it has it already."""
    value, wanted = as_value(x), as_dtype(dtype)
    return value if value.dtype is wanted else Bitcast(value.dtype, wanted)(value)


@function("astype")
def cast(x: Operand, dtype: Any) -> Value:
    """x in another dtype; the same value when it has it already."""
    value, wanted = as_value(x), as_dtype(dtype)
    return value if value.dtype is wanted else Cast(wanted)(value)


def rounded_once(made: FnT) -> FnT:
    """A function of several ops as one: numbers of half precision are f32 in between."""

    @wraps(made)
    def call(*args: Any, **options: Any) -> Any:
        given = {name: as_value(a) for name, a in _tensors(args, options)}
        kinds = {x.dtype for x in given.values() if x.dtype.is_float}
        (kind, *others) = kinds or (f32,)
        if others or kind.itemsize >= 4:
            return made(*args, **options)
        wide = {name: cast(x, kind.accumulator) if x.dtype is kind else x for name, x in given.items()}
        out = made(*(wide.get(i, a) for i, a in enumerate(args)), **{n: wide.get(n, a) for n, a in options.items()})
        return cast(out, kind) if out.dtype.is_float else out

    return cast_type("Any", call)


def _tensors(args: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[int | str, Any]]:
    named: list[tuple[int | str, Any]] = [*enumerate(args), *options.items()]
    return [(n, a) for n, a in named if isinstance(a, (Value, np.ndarray))]


@function()
def where(condition: Operand, x: Operand, y: Operand) -> Value:
    """x where the condition is true, else y."""
    return Where()(to_bool(condition), *promoted(x, y))


def to_bool(x: Operand) -> Value:
    return cast(as_value(x), bool_)


def _binary_function(cls: type[ElementwiseBinary], *aliases: str) -> Any:
    def apply(x: Operand, y: Operand) -> Value:
        return cls()(*promoted(x, y))

    apply.__name__ = apply.__qualname__ = cls.name
    apply.__doc__ = cls.__doc__
    return function(*aliases)(apply)


equal = _binary_function(Equal, "eq")
not_equal = _binary_function(NotEqual, "ne")
less = _binary_function(Less, "lt")
less_equal = _binary_function(LessEqual, "le")
greater = _binary_function(Greater, "gt")
greater_equal = _binary_function(GreaterEqual, "ge")
bitwise_and = _binary_function(BitwiseAnd)
bitwise_or = _binary_function(BitwiseOr)
bitwise_xor = _binary_function(BitwiseXor)
bitwise_left_shift = _binary_function(LeftShift)
bitwise_right_shift = _binary_function(RightShift)


@function("bitwise_invert")
def bitwise_not(x: Operand) -> Value:
    """~x."""
    return BitwiseNot()(as_value(x))


@function()
def logical_and(x: Operand, y: Operand) -> Value:
    """Whether both are non-zero."""
    return BitwiseAnd()(to_bool(x), to_bool(y))


@function()
def logical_or(x: Operand, y: Operand) -> Value:
    """Whether either is non-zero."""
    return BitwiseOr()(to_bool(x), to_bool(y))


@function()
def logical_xor(x: Operand, y: Operand) -> Value:
    """Whether exactly one is non-zero."""
    return BitwiseXor()(to_bool(x), to_bool(y))


@function()
def logical_not(x: Operand) -> Value:
    """Whether x is zero."""
    return BitwiseNot()(to_bool(x))


def _predicate(x: Operand, cls: type[Predicate]) -> Value:
    value = as_value(x)
    return cls()(value) if value.dtype.is_inexact else METHODS["broadcast_to"](constant(False, bool_), value.shape)


@function()
def isnan(x: Operand) -> Value:
    """Whether x is NaN."""
    return _predicate(x, IsNan)


@function()
def isinf(x: Operand) -> Value:
    """Whether x is infinite."""
    return _predicate(x, IsInf)


@function()
def isfinite(x: Operand) -> Value:
    """Whether x is neither NaN nor infinite."""
    return logical_not(logical_or(isnan(x), isinf(x)))


@function()
def stop_gradient(x: Operand) -> Value:
    """x as a constant for differentiation."""
    return StopGradient()(as_value(x))
