"""Element-wise ops: the base class with its derivative and batching rules, and arithmetic.

Operands broadcast as in NumPy and have one dtype. An op states its partial derivatives once; both modes follow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strata.core import Dim, DType, TensorType, as_dtype, broadcast_shapes, c128, f32, f64, i32, i64
from strata.errors import DTypeError, SymbolError
from strata.mir import METHODS, Op, Sample, Value, constant, current_origin, draw, function, op
from strata.ops.base.frontend import Operand, promoted

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Partial = Value | int | None  # None: no derivative; 1 and -1 need no multiplication


class Elementwise(Op):
    """An op whose output element depends on one element of each input.

    Subclasses write `numpy`, `scalar` (the kernel expression) and, when differentiable, `partials`: the derivative of
    the output with respect to each input, as values of the output's shape or broadcastable to it.
    """

    elementwise = True
    allowed: ClassVar[str] = "numeric"  # any, numeric, real, float, inexact, int, bool, integral (int or bool), complex

    def infer(self, *types: TensorType) -> TensorType:
        dtype = types[0].dtype
        for t in types[1:]:
            if t.dtype is not dtype:
                self.require_dtype(False, f"operands differ in dtype, {types[0]} and {t}", code="D103")
        if not accepts(self.allowed, dtype):
            self.require_dtype(False, f"does not take {dtype}, only {self.allowed} types", code="D104")
        first, made = types[0], self.result_dtype(dtype)
        if made is dtype and all(not t.shape or t.shape == first.shape for t in types):  # as it mostly is
            return first
        return TensorType(made, broadcast_shapes(*(t.shape for t in types), what=self.name))

    def result_dtype(self, dtype: DType) -> DType:
        return dtype

    def partials(self, *inputs: Value, out: Value) -> tuple[Partial, ...]:
        self.missing("vjp")

    def scalar(self, k: KernelBuilder, *xs: Expr) -> Expr:
        self.missing("lower")

    def jvp(self, *inputs: Value, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        total: Value | None = None
        kind, partials = self._wide_partials(inputs, out)
        for partial, tangent in zip(partials, dx, strict=True):
            if tangent is None or partial is None:
                continue
            term = _times(METHODS["cast"](tangent, kind), partial)
            total = term if total is None else total + term
        return None if total is None else METHODS["broadcast_to"](METHODS["cast"](total, out.dtype), out.shape)

    def vjp(self, *inputs: Value, out: Value, ct: Value) -> tuple[Value | None, ...]:
        kind, partials = self._wide_partials(inputs, out)
        wide = METHODS["cast"](ct, kind)
        return tuple(
            None if partial is None else METHODS["cast"](unbroadcast(_times(wide, _conj(partial)), x.shape), x.dtype)
            for x, partial in zip(inputs, partials, strict=True)
        )

    def _wide_partials(self, inputs: tuple[Value, ...], out: Value) -> tuple[DType, tuple[Partial, ...]]:
        """The partials, and the type to compute with them in: of half precision it is f32 where they take several ops,
        so that a derivative is rounded once."""
        partials = self.partials(*inputs, out=out)
        is_plain = all(p is None or isinstance(p, int) or p in inputs for p in partials)
        if is_plain or not out.dtype.is_float or out.dtype.itemsize >= 4:
            return out.dtype, partials
        wide = out.dtype.accumulator
        return wide, self.partials(*(METHODS["cast"](x, wide) for x in inputs), out=METHODS["cast"](out, wide))

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        rank = max(x.ndim - b for x, b in zip(inputs, batched, strict=True))
        lifted = (lift(x, rank) if b else x for x, b in zip(inputs, batched, strict=True))
        return METHODS["broadcast_to"](self(*lifted), (size, *self._plain_shape(inputs, batched)))

    def _plain_shape(self, inputs: tuple[Value, ...], batched: tuple[bool, ...]) -> tuple[Dim, ...]:
        shapes = (x.shape[1:] if b else x.shape for x, b in zip(inputs, batched, strict=True))
        return broadcast_shapes(*shapes, what=self.name)

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        return self.scalar(k, *(x[k.broadcast(index, x.shape)] for x in inputs))

    @classmethod
    def has_rule(cls, rule: str) -> bool:
        if rule in ("jvp", "vjp"):
            return cls.partials is not Elementwise.partials or getattr(cls, rule) is not getattr(Elementwise, rule)
        if rule == "lower":
            return cls.scalar is not Elementwise.scalar
        return super().has_rule(rule)


class ElementwiseUnary(Elementwise):
    """A function of one number: that of NumPy and that of the kernel builder, under the op's name or another."""

    in_numpy: ClassVar[str] = ""
    in_kernel: ClassVar[str] = ""

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return getattr(np, self.in_numpy or self.name)(x)

    def scalar(self, k: KernelBuilder, x: Expr) -> Expr:
        return getattr(k, self.in_kernel or self.name)(x)


class ElementwiseBinary(Elementwise):
    """A function of two numbers, named in the same way."""

    in_numpy: ClassVar[str] = ""
    in_kernel: ClassVar[str] = ""

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return getattr(np, self.in_numpy or self.name)(x, y)

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return getattr(k, self.in_kernel or self.name)(x, y)


def accepts(allowed: str, dtype: DType) -> bool:
    """Whether a class of dtypes, as ops name it, includes a dtype."""
    match allowed:
        case "any":
            return True
        case "numeric":
            return not dtype.is_bool
        case "real":
            return not dtype.is_complex and not dtype.is_bool
        case "ordered":
            return not dtype.is_complex
        case "float":
            return dtype.is_float
        case "inexact":
            return dtype.is_inexact
        case "int":
            return dtype.is_int
        case "integral":
            return dtype.is_int or dtype.is_bool
        case "bool":
            return dtype.is_bool
        case "complex":
            return dtype.is_complex
    raise AssertionError(f"unknown class of dtypes {allowed!r}")


def _times(x: Value, factor: Value | int) -> Value:
    if isinstance(factor, int):
        return x if factor == 1 else -x if factor == -1 else x * factor
    return x * factor


def _conj(x: Value | int) -> Value | int:
    return METHODS["conj"](x) if isinstance(x, Value) and x.dtype.is_complex else x


def lift(x: Value, rank: int) -> Value:
    """A batched value with singleton axes after its batch axis, so that the rest aligns as NumPy does for `rank`."""
    missing = rank - (x.ndim - 1)
    return METHODS["reshape"](x, (x.shape[0], *(1,) * missing, *x.shape[1:])) if missing else x


def unbroadcast(x: Value, shape: tuple[Dim, ...]) -> Value:
    """Sum `x` down to a shape that broadcasts to its own: the transpose of broadcasting."""
    if x.shape == shape:
        return x
    if (
        len(x.shape) < len(shape) or broadcast_shapes(x.shape, shape) != x.shape
    ):  # a partial of lower rank: spread it first
        return unbroadcast(METHODS["broadcast_to"](x, broadcast_shapes(x.shape, shape)), shape)
    lead = x.ndim - len(shape)
    for d, wide in zip(shape, x.shape[lead:], strict=True):
        if d not in (1, wide):
            raise SymbolError(
                f"the derivative with respect to an operand of {list(shape)}, used as {list(x.shape[lead:])}, is a sum "
                f"where {d} is 1 and none where it is {wide}",
                code="S158", place=current_origin().place, fix=f"declare the size {wide} in place of {d}, or 1",
            )  # fmt: skip
    axes = [*range(lead)] + [lead + i for i, d in enumerate(shape) if d == 1 and x.shape[lead + i] != 1]
    return METHODS["reshape"](METHODS["reduce_sum"](x, tuple(axes)), shape) if axes else METHODS["reshape"](x, shape)


# ----------------------------------------------------------------------------------------------------------- arithmetic


class Arithmetic(ElementwiseBinary):
    """A binary op on numbers."""

    dtypes = "numeric"

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], f32[3, 4]), Sample(f32[4, 1, 3], f32[5, 1]), Sample(f32[()], f32[2]),
            Sample(f32[0, 3], f32[3]),
            Sample(i32[5], i32[5], grad=False), Sample(i64[2, 3], i64[3], grad=False),
        ]  # fmt: skip


@op("add")
class Add(Arithmetic):
    """x + y; integers wrap."""

    commutative = True

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return 1, 1

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return x + y


@op("subtract")
class Subtract(Arithmetic):
    """x - y; integers wrap."""

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return 1, -1

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return x - y


@op("multiply")
class Multiply(Arithmetic):
    """x * y; integers wrap."""

    commutative = True

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return y, x

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return x * y


@op("divide")
class Divide(Arithmetic):
    """x / y. Integers divide with truncation towards zero, and x / 0 is 0."""

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return truncating_divide(x, y) if x.dtype.kind in "iu" else x / y

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        return reciprocal_of(y), -out / y

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        return k.truncdiv(x, y) if x.dtype.is_int else x / y

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], draw(f32[3, 4], 0.5, 2.0)), Sample(f32[4, 1, 3], draw(f32[5, 1], -2.0, -0.5)),
            Sample(f32[0, 3], draw(f32[3], 0.5, 2.0)), Sample(i32[5], draw(i32[5], 1, 4), grad=False),
            Sample(np.array([7, -7, 7, -7, 3]), np.array([2, 2, -2, -2, 0]), grad=False),
        ]  # fmt: skip


def truncating_divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    safe = np.where(y == 0, 1, y)
    quotient = np.floor_divide(x, safe)
    inexact = (quotient * safe != x) & ((x < 0) != (safe < 0))
    return np.where(y == 0, 0, quotient + inexact).astype(x.dtype)


def reciprocal_of(y: Value) -> Value:
    return constant(1, y.dtype) / y


class Selecting(Arithmetic):
    """maximum and minimum: NaN wins; at a tie the first operand takes the whole derivative."""

    allowed = "ordered"
    commutative = True

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # of two equal numbers, zeros of both signs among them, the second is chosen; of f16, NumPy chooses the first
        return super().numpy(y, x) if x.dtype == np.float16 else super().numpy(x, y)

    def picks_first(self, x: Value, y: Value) -> Value:
        self.missing("vjp")

    def jvp(self, x: Value, y: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        zero = constant(0, out.dtype)
        first, second = (zero if t is None else t for t in dx)
        return METHODS["broadcast_to"](METHODS["where"](self.picks_first(x, y), first, second), out.shape)

    def vjp(self, x: Value, y: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        zero, first = constant(0, ct.dtype), self.picks_first(x, y)
        to_x, to_y = METHODS["where"](first, ct, zero), METHODS["where"](first, zero, ct)
        return unbroadcast(to_x, x.shape), unbroadcast(to_y, y.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], distinct=True), f32[3, 4]), Sample(draw(f32[4, 1, 3], distinct=True), f32[5, 1]),
            Sample(i32[5], i32[5], grad=False),
            Sample(np.array([1, np.nan, 2, -0.0], np.float32), np.array([np.nan, 1, 2, 0.0], np.float32), grad=False),
        ]  # fmt: skip


@op("maximum")
class Maximum(Selecting):
    """The larger of x and y; NaN if either is."""

    in_kernel = "max"

    def picks_first(self, x: Value, y: Value) -> Value:
        return x >= y


@op("minimum")
class Minimum(Selecting):
    """The smaller of x and y; NaN if either is."""

    in_kernel = "min"

    def picks_first(self, x: Value, y: Value) -> Value:
        return x <= y


@op("power")
class Power(Arithmetic):
    """x ** y; integers wrap, and give 1, -1 or 0 for a negative y; the derivative in y is 0 where x ≤ 0.

    A negative power of an integer is the whole part of 1 / x ** -y: that of 1 is 1, of -1 it is ±1, of others 0.
    """

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind != "i" or not np.any(y < 0):
            return np.power(x, y)
        unit = np.where(abs(x) == 1, np.where(y & 1, x, x * x), 0)
        return np.where(y < 0, unit, np.power(x, np.maximum(y, 0))).astype(x.dtype)

    def partials(self, x: Value, y: Value, *, out: Value) -> tuple[Partial, ...]:
        one, zero = constant(1, x.dtype), constant(0, x.dtype)
        slope = METHODS["where"](METHODS["equal"](y, zero), zero, y * METHODS["power"](x, y - one))
        if x.dtype.is_complex:
            base = METHODS["where"](METHODS["equal"](x, zero), one, x)
            return slope, METHODS["where"](METHODS["equal"](x, zero), zero, out * METHODS["log"](base))
        flat = x <= zero
        return slope, METHODS["where"](flat, zero, out * METHODS["log"](METHODS["where"](flat, one, x)))

    def scalar(self, k: KernelBuilder, x: Expr, y: Expr) -> Expr:
        from strata.kernel import Const

        if x.dtype.is_complex:
            return _complex_power(k, x, y)
        made = _power_by(k, x, float(y.value.real)) if isinstance(y, Const) and x.dtype.is_float else None
        return k.pow(x, y) if made is None else made

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(draw(f32[3, 4], 0.3, 3.0), f32[3, 4]), Sample(draw(f32[4, 1], 0.3, 3.0), f32[3]),
            Sample(np.array([-2, -1, 0, 0, 3], np.float32), np.array([2, 3, 2, 0, -1], np.float32), grad=False),
            Sample(draw(i32[5], 0, 4), draw(i32[5], 0, 4), grad=False),
        ]  # fmt: skip


def _complex_power(k: KernelBuilder, x: Expr, y: Expr) -> Expr:
    """exp(y log x), in c128 whatever the type: the error of an exponent grows with its size."""
    base, exponent, zero = x.cast(c128), y.cast(c128), k.const(0, c128)
    real = k.and_(k.gt(k.real(exponent), k.const(0, f64)), k.eq(k.imag(exponent), k.const(0, f64)))
    of_zero = k.select(real, zero, k.const(complex(math.nan, math.nan), c128))
    made = k.select(k.eq(base, zero), of_zero, k.exp(exponent * k.log(base)))
    made = k.select(k.eq(exponent, k.const(1, c128)), base, made)
    return k.select(k.eq(exponent, zero), k.const(1, c128), made).cast(x.dtype)


def _power_by(k: KernelBuilder, x: Expr, exponent: float) -> Expr | None:
    """x to a known exponent that needs no logarithm: at most 2 units in the last place off, in f64 at most 4."""
    dtype, far = x.dtype, k.const(math.inf, x.dtype)
    if exponent in (0.5, -0.5, 1.5):  # as of other powers, that of -0 is a positive one, and that of -inf not NaN
        root = k.sqrt(x) + k.const(0, dtype)
        made = {0.5: lambda: root, -0.5: lambda: k.const(1, dtype) / root, 1.5: lambda: x * root + k.const(0, dtype)}[
            exponent
        ]()
        return k.select(k.eq(x, -far), k.const(0, dtype) if exponent < 0 else far, made)
    if not exponent.is_integer() or abs(exponent) > 8 or (dtype is f64 and not -3 <= exponent <= 7):
        return None
    # products of what is rounded already: as many as the bounds allow, and more of them in the next wider type
    wide = dtype if dtype is f64 or (dtype is f32 and -2 <= exponent <= 4) else f64 if dtype is f32 else f32
    one, base = k.const(1, wide), x.cast(wide)
    if exponent < 0 and wide is dtype:
        base = one / base  # first: the power itself may be too large where its inverse is a denormal number
    made = _product(one, base, abs(int(exponent)))
    return (one / made if exponent < 0 and wide is not dtype else made).cast(dtype)


def _product(one: Expr, base: Expr, count: int) -> Expr:
    """base to a small whole power, by squares."""
    if count < 2:
        return base if count else one
    half = _product(one, base, count // 2)
    return half * half * base if count % 2 else half * half


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def add(x: Operand, y: Operand) -> Value:
    """Element-wise sum."""
    return Add()(*numbers(x, y))


@function("sub")
def subtract(x: Operand, y: Operand) -> Value:
    """Element-wise difference."""
    return Subtract()(*numbers(x, y))


@function("mul")
def multiply(x: Operand, y: Operand) -> Value:
    """Element-wise product."""
    return Multiply()(*numbers(x, y))


@function("div", "true_divide")
def divide(x: Operand, y: Operand) -> Value:
    """Element-wise quotient; integers become floats as in NumPy. `trunc_divide` keeps integers."""
    a, b = numbers(x, y)
    if a.dtype.is_int:
        wide = f64 if a.dtype.bits == 64 else f32
        a, b = METHODS["cast"](a, wide), METHODS["cast"](b, wide)
    return Divide()(a, b)


@function()
def trunc_divide(x: Operand, y: Operand) -> Value:
    """Quotient of integers rounded towards zero; x / 0 is 0. Floats divide exactly."""
    return Divide()(*numbers(x, y))


@function()
def maximum(x: Operand, y: Operand) -> Value:
    """Element-wise maximum; NaN wins."""
    return Maximum()(*promoted(x, y))


@function()
def minimum(x: Operand, y: Operand) -> Value:
    """Element-wise minimum; NaN wins."""
    return Minimum()(*promoted(x, y))


@function("pow")
def power(x: Operand, y: Operand) -> Value:
    """Element-wise power. Small integer exponents become multiplications; integers take no negative number as exponent.

    Of a tensor of integers, a negative exponent gives what truncating division gives: 1 for 1, ±1 for -1, else 0."""
    kind = as_dtype(x.dtype) if isinstance(x, (Value, np.ndarray, np.generic)) else None
    if isinstance(y, (int, np.integer)) and y < 0 and kind is not None and (kind.is_int or kind.is_bool):
        raise DTypeError(
            f"power: an integer cannot be raised to a negative integer, {kind}{list(np.shape(x))} to {y}",
            code="D105", place=current_origin().place,
        )  # fmt: skip
    if isinstance(y, int) and not isinstance(y, bool) and isinstance(x, Value) and y in (1, 2, 3):
        return x if y == 1 else x * x if y == 2 else x * x * x
    return Power()(*numbers(x, y))


def numbers(x: Any, y: Any) -> tuple[Value, ...]:
    """Promoted operands; booleans count as integers."""
    a, b = promoted(x, y)
    if a.dtype.is_bool:
        return METHODS["cast"](a, i32), METHODS["cast"](b, i32)
    return a, b
