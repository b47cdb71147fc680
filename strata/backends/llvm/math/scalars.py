"""Scalar functions of the kernel IR as LLVM IR: one table from name to emission, for any dtype and number of lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.backends.llvm.ir.builder import (
    IrFunction,
    bits_of,
    constant,
    integer_of,
    with_element,
)
from strata.backends.llvm.ir.float_ops import VectorMath, in_registers
from strata.backends.llvm.ir.registers import (
    Parts,
    from_memory,
    memory_type,
    register_type,
    to_memory,
)
from strata.backends.llvm.math import angles, error_function, exponentials, gamma, logs, powers
from strata.backends.llvm.math.convert import convert
from strata.core import DType, Target, bool_
from strata.errors import CompileError


@dataclass(frozen=True, slots=True)
class ScalarCall:
    """A scalar function about to be emitted: operand registers and types, all with the same number of lanes."""

    f: IrFunction
    target: Target
    name: str
    args: tuple[Parts, ...]
    dtypes: tuple[DType, ...]
    result: DType
    lanes: int

    @property
    def dtype(self) -> DType:
        """Of the first operand."""
        return self.dtypes[0]

    @property
    def type(self) -> str:
        """Of one component of the first operand."""
        return register_type(self.dtype, self.lanes)

    @property
    def a(self) -> str:
        return self.args[0][0]

    @property
    def b(self) -> str:
        return self.args[1][0]


Emission = Callable[[ScalarCall], Parts]


def emit_scalar(call: ScalarCall) -> Parts:
    """Registers that hold the result."""
    emission = _TABLE.get(call.name)
    if emission is None:
        raise CompileError(f"scalar function {call.name} has no emission", code="C130")
    if call.dtype.is_complex and call.name not in _COMPLEX_SAFE:
        emission = _COMPLEX.get(call.name, _no_complex)
    return emission(call)


def _no_complex(call: ScalarCall) -> Parts:
    raise CompileError(f"{call.name} of {call.dtype} cannot be compiled", code="C131")


def combine(f: IrFunction, kind: str, dtype: DType, lanes: int, a: Parts, b: Parts, target: Target) -> Parts:
    """One step of a reduction."""
    name = {"sum": "add", "prod": "mul", "all": "and", "any": "or"}.get(kind, kind)
    if kind in ("max", "min") and dtype.is_float:
        return (f.intrinsic(f"{kind}imum", register_type(dtype, lanes), a[0], b[0], flags="nsz"),)
    if kind == "sum" and dtype.is_bool:
        name = "or"
    return emit_scalar(ScalarCall(f, target, name, (a, b), (dtype, dtype), dtype, lanes))


# arithmetic


def _binary(floating: str, signed: str, unsigned: str | None = None) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        if call.dtype.is_float:
            name = floating
        else:
            name = signed if call.dtype.kind == "int" or unsigned is None else unsigned
        return (call.f.binary(name, call.type, call.a, call.b),)

    return emit


def _bool_arithmetic(otherwise: Emission, operation: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        return (call.f.binary(operation, call.type, call.a, call.b),) if call.dtype.is_bool else otherwise(call)

    return emit


def _div(call: ScalarCall) -> Parts:
    return (call.f.binary("fdiv", call.type, call.a, call.b),) if call.dtype.is_float else _truncdiv(call)


def _safe_divisor(call: ScalarCall) -> tuple[str, str, str]:
    """(divisor without 0 and without the one quotient that overflows, is zero, is the overflow)."""
    f, type_ = call.f, call.type
    zero = f.compare("eq", type_, call.b, constant(type_, 0))
    wraps = "false" if call.lanes == 1 else "zeroinitializer"
    if call.dtype.kind == "int":
        least = constant(type_, -(1 << (bits_of(type_) - 1)))
        minus = f.compare("eq", type_, call.b, constant(type_, -1))
        wraps = f.binary("and", with_element(type_, "i1"), minus, f.compare("eq", type_, call.a, least))
    bad = f.binary("or", with_element(type_, "i1"), zero, wraps)
    return f.select(type_, bad, constant(type_, 1), call.b), zero, wraps


def _quotient(call: ScalarCall, divisor: str) -> str:
    """Of whole numbers, towards 0. Processors divide them one by one, but floats in vectors: twice the bits of a number
    and more are enough, since no quotient is nearer to the next whole number than one part of the divisor."""
    f, type_, bits = call.f, call.type, bits_of(call.type)
    signed = call.dtype.kind == "int"
    is_number = not call.b.startswith("%")  # then it is a multiplication
    if call.lanes == 1 or bits > 32 or is_number:
        return f.binary("sdiv" if signed else "udiv", type_, call.a, divisor)
    real = with_element(type_, "float" if bits <= 16 else "double")
    a, b = (f.convert("sitofp" if signed else "uitofp", type_, v, real) for v in (call.a, divisor))
    whole = with_element(type_, "i32")
    made = f.convert("fptosi" if signed or bits < 32 else "fptoui", real, f.binary("fdiv", real, a, b), whole)
    return made if bits == 32 else f.convert("trunc", whole, made, type_)


def _truncdiv(call: ScalarCall) -> Parts:
    f, type_ = call.f, call.type
    if call.dtype.is_float:
        return (f.intrinsic("trunc", type_, f.binary("fdiv", type_, call.a, call.b)),)
    divisor, zero, _ = _safe_divisor(call)
    quotient = _quotient(call, divisor)
    return (f.select(type_, zero, constant(type_, 0), quotient),)


def _rem(call: ScalarCall) -> Parts:
    f, type_ = call.f, call.type
    if call.dtype.is_float:
        return (in_registers(exponentials.fmod)(VectorMath(f, type_, call.target), call.a, call.b),)
    divisor, zero, wraps = _safe_divisor(call)
    left = f.binary("sub", type_, call.a, f.binary("mul", type_, _quotient(call, divisor), divisor))
    none = f.binary("or", with_element(type_, "i1"), zero, wraps)
    return (f.select(type_, none, constant(type_, 0), left),)


def _floordiv(call: ScalarCall) -> Parts:
    f, type_ = call.f, call.type
    if call.dtype.is_float:
        return (in_registers(exponentials.floor_divide)(VectorMath(f, type_, call.target), call.a, call.b),)
    if call.dtype.kind == "uint":
        return _truncdiv(call)
    divisor, zero, _ = _safe_divisor(call)
    quotient = _quotient(call, divisor)
    left = f.binary("sub", type_, call.a, f.binary("mul", type_, quotient, divisor))
    adjust = _signs_differ(call, left)
    lower = f.binary("add", type_, quotient, f.convert("sext", with_element(type_, "i1"), adjust, type_))
    return (f.select(type_, zero, constant(type_, 0), lower),)


def _signs_differ(call: ScalarCall, left: str) -> str:
    f, type_ = call.f, call.type
    flips = f.compare("slt", type_, f.binary("xor", type_, left, call.b), constant(type_, 0))
    return f.binary("and", with_element(type_, "i1"), flips, f.compare("ne", type_, left, constant(type_, 0)))


def _mod(call: ScalarCall) -> Parts:
    f, type_ = call.f, call.type
    if call.dtype.is_float:
        return (in_registers(exponentials.python_mod)(VectorMath(f, type_, call.target), call.a, call.b),)
    if call.dtype.kind == "uint":
        return _rem(call)
    (left,) = _rem(call)
    zero = f.compare("eq", type_, call.b, constant(type_, 0))
    fixed = f.select(type_, _signs_differ(call, left), f.binary("add", type_, left, call.b), left)
    return (f.select(type_, zero, constant(type_, 0), fixed),)


def _neg(call: ScalarCall) -> Parts:
    if call.dtype.is_float:
        return (call.f.op(f"fneg {call.type} {call.a}"),)
    return (call.f.binary("sub", call.type, constant(call.type, 0), call.a),)


def _abs(call: ScalarCall) -> Parts:
    if call.dtype.is_float:
        return (call.f.intrinsic("fabs", call.type, call.a),)
    if call.dtype.kind != "int":
        return call.args[0]
    negative = call.f.compare("slt", call.type, call.a, constant(call.type, 0))
    return (call.f.select(call.type, negative, _neg(call)[0], call.a),)


def _min_max(name: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        if call.dtype.is_float:
            if not call.target.triple.startswith("x86"):  # one instruction, in which -0.0 is below 0.0
                return (call.f.intrinsic(f"{name}imum", call.type, call.a, call.b),)
            first = call.f.compare("olt" if name == "min" else "ogt", call.type, call.a, call.b)
            chosen = call.f.select(call.type, first, call.a, call.b)  # of two zeros, the second, as in NumPy
            is_nan = call.f.compare("uno", call.type, call.a, call.a)
            return (call.f.select(call.type, is_nan, call.a, chosen),)
        if call.dtype.is_bool:
            return (call.f.binary("and" if name == "min" else "or", call.type, call.a, call.b),)
        sign = "s" if call.dtype.kind == "int" else "u"
        return (call.f.intrinsic(f"{sign}{name}", call.type, call.a, call.b),)

    return emit


def _math(function: Callable[[VectorMath, str], str]) -> Emission:
    return lambda call: (in_registers(function)(VectorMath(call.f, call.type, call.target), call.a),)


def _math2(function: Callable[[VectorMath, str, str], str]) -> Emission:
    return lambda call: (in_registers(function)(VectorMath(call.f, call.type, call.target), call.a, call.b),)


def _intrinsic(name: str) -> Emission:
    """An LLVM intrinsic on floats; integers are left as they are."""
    return lambda call: (call.f.intrinsic(name, call.type, call.a),) if call.dtype.is_float else call.args[0]


def _pow(call: ScalarCall) -> Parts:
    if call.dtype.is_float:
        return (in_registers(powers.power)(VectorMath(call.f, call.type, call.target), call.a, call.b),)
    return (powers.integer_power(call.f, call.type, call.a, call.b, signed=call.dtype.kind == "int"),)


def _gcd(call: ScalarCall) -> Parts:
    return (powers.greatest_divisor(call.f, call.type, call.a, call.b, signed=call.dtype.kind == "int"),)


def _rsqrt(call: ScalarCall) -> Parts:
    root = call.f.intrinsic("sqrt", call.type, call.a)
    return (call.f.binary("fdiv", call.type, constant(call.type, 1.0), root),)


def _sign(call: ScalarCall) -> Parts:
    f, type_ = call.f, call.type
    if call.dtype.kind == "uint":
        return (f.select(type_, f.compare("ne", type_, call.a, constant(type_, 0)), constant(type_, 1), call.a),)
    if call.dtype.kind == "int":
        above = f.convert("zext", with_element(type_, "i1"), f.compare("sgt", type_, call.a, constant(type_, 0)), type_)
        below = f.convert("sext", with_element(type_, "i1"), f.compare("slt", type_, call.a, constant(type_, 0)), type_)
        return (f.binary("or", type_, above, below),)
    one = f.intrinsic("copysign", type_, constant(type_, 1.0), call.a)
    ordered = f.compare("one", type_, call.a, constant(type_, 0.0))
    is_nan = f.compare("uno", type_, call.a, call.a)
    return (f.select(type_, ordered, one, f.select(type_, is_nan, call.a, constant(type_, 0.0))),)


def _copysign(call: ScalarCall) -> Parts:
    return (call.f.intrinsic("copysign", call.type, call.a, call.b),)


def _fma(call: ScalarCall) -> Parts:
    c = call.args[2][0]
    if call.dtype.is_float:
        return (call.f.fma(call.type, call.a, call.b, c),)
    return (call.f.binary("add", call.type, call.f.binary("mul", call.type, call.a, call.b), c),)


# tests, bits, choice


def _compare(ordered: str, signed: str, unsigned: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        if call.dtype.is_float:
            predicate = ordered
        else:
            predicate = signed if call.dtype.kind == "int" else unsigned
        return (call.f.compare(predicate, call.type, call.a, call.b),)

    return emit


def _float_test(test: Callable[[IrFunction, str, str], str], for_integers: bool) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        if call.dtype.is_float:
            return (test(call.f, call.type, call.a),)
        return (constant(register_type(bool_, call.lanes), for_integers),)

    return emit


def _isnan(f: IrFunction, type_: str, x: str) -> str:
    return f.compare("uno", type_, x, x)


def _isinf(f: IrFunction, type_: str, x: str) -> str:
    return f.compare("oeq", type_, f.intrinsic("fabs", type_, x), constant(type_, float("inf")))


def _isfinite(f: IrFunction, type_: str, x: str) -> str:
    return f.compare("olt", type_, f.intrinsic("fabs", type_, x), constant(type_, float("inf")))


def _signbit(call: ScalarCall) -> Parts:
    if not call.dtype.is_signed:
        return (constant(register_type(bool_, call.lanes), 0),)
    whole = integer_of(call.type) if call.dtype.is_float else call.type
    bits = call.f.convert("bitcast", call.type, call.a, whole)
    return (call.f.compare("slt", whole, bits, constant(whole, 0)),)


def _bits(name: str) -> Emission:
    return lambda call: (call.f.binary(name, call.type, call.a, call.b),)


def _not(call: ScalarCall) -> Parts:
    return (call.f.binary("xor", call.type, call.a, constant(call.type, 1 if call.dtype.is_bool else -1)),)


def _shift(left: bool) -> Emission:
    """Amounts outside the width give what shifting by one bit at a time would give."""

    def emit(call: ScalarCall) -> Parts:
        f, type_ = call.f, call.type
        bits = bits_of(type_)
        inside = f.compare("ult", type_, call.b, constant(type_, bits))
        amount = f.select(type_, inside, call.b, constant(type_, 0))
        name = "shl" if left else "ashr" if call.dtype.kind == "int" else "lshr"
        outside = constant(type_, 0)
        if name == "ashr":
            outside = f.binary("ashr", type_, call.a, constant(type_, bits - 1))
        return (f.select(type_, inside, f.binary(name, type_, call.a, amount), outside),)

    return emit


def _select(call: ScalarCall) -> Parts:
    type_ = register_type(call.result, call.lanes)
    pairs = zip(call.args[1], call.args[2], strict=True)
    return tuple(call.f.select(type_, call.a, then, otherwise) for then, otherwise in pairs)


# conversions


def _cast(call: ScalarCall) -> Parts:
    source, result = call.dtype, call.result
    if result.is_complex:
        element = result.real
        real = convert(call.f, call.target, call.args[0][0], source.real, element, call.lanes)
        if source.is_complex:
            return real, convert(call.f, call.target, call.args[0][1], source.real, element, call.lanes)
        return real, constant(register_type(element, call.lanes), 0.0)
    if source.is_complex and result.is_bool:
        zero = constant(call.type, 0.0)
        tests = [call.f.compare("une", call.type, part, zero) for part in call.args[0]]
        return (call.f.binary("or", with_element(call.type, "i1"), *tests),)
    return (convert(call.f, call.target, call.a, source.real, result, call.lanes),)


def _bitcast(call: ScalarCall) -> Parts:
    stored = to_memory(call.f, call.dtype, call.a, call.lanes, call.target)
    bits = call.f.convert("bitcast", memory_type(call.dtype, call.lanes), stored, memory_type(call.result, call.lanes))
    return (from_memory(call.f, call.result, bits, call.lanes, call.target),)


# complex numbers


def _component(name: str, dtype: DType, call: ScalarCall, *args: str) -> str:
    made = ScalarCall(call.f, call.target, name, tuple((a,) for a in args), (dtype,) * len(args), dtype, call.lanes)
    return emit_scalar(made)[0]


def _complex_pairwise(name: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        real = call.dtype.real
        return tuple(_component(name, real, call, *parts) for parts in zip(*call.args, strict=True))

    return emit


def _complex_mul(call: ScalarCall) -> Parts:
    (a, b), (c, d) = call.args[0], call.args[1]
    real = call.dtype.real
    second = [_component("mul", real, call, b, x) for x in (d, c)]
    if (
        call.target.has_fma
    ):  # where NumPy has it too: an infinity of one product is not lost to an overflow of the other
        second[0] = _component("neg", real, call, second[0])
        return tuple(call.f.fma(call.type, a, x, other) for x, other in zip((c, d), second, strict=True))
    first = [_component("mul", real, call, a, x) for x in (c, d)]
    return _component("sub", real, call, first[0], second[0]), _component("add", real, call, first[1], second[1])


def _complex_div(call: ScalarCall) -> Parts:
    """Smith's method as in NumPy: scaled by the larger component of the divisor, so that squares cannot overflow."""
    f, type_ = call.f, call.type
    (a, b), (c, d) = call.args[0], call.args[1]
    larger = f.compare("oge", type_, f.intrinsic("fabs", type_, c), f.intrinsic("fabs", type_, d))
    big, small = f.select(type_, larger, c, d), f.select(type_, larger, d, c)
    ratio = f.binary("fdiv", type_, small, big)
    scale = f.binary("fadd", type_, big, f.binary("fmul", type_, small, ratio))
    x, y = f.select(type_, larger, a, b), f.select(type_, larger, b, a)
    re = f.binary("fadd", type_, x, f.binary("fmul", type_, y, ratio))
    straight = f.binary("fsub", type_, b, f.binary("fmul", type_, a, ratio))
    turned = f.binary("fsub", type_, f.binary("fmul", type_, b, ratio), a)
    im = f.select(type_, larger, straight, turned)
    scale = f.binary("fdiv", type_, constant(type_, 1.0), scale)
    zero, above = f.compare("oeq", type_, big, constant(type_, 0.0)), f.intrinsic("fabs", type_, c)
    return tuple(
        f.select(type_, zero, f.binary("fdiv", type_, given, above), f.binary("fmul", type_, part, scale))
        for given, part in ((a, re), (b, im))
    )


def _complex_abs(call: ScalarCall) -> Parts:
    return (in_registers(exponentials.hypot)(VectorMath(call.f, call.type, call.target), *call.args[0]),)


def _complex_equal(predicate: str, join: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        tests = [call.f.compare(predicate, call.type, x, y) for x, y in zip(*call.args, strict=True)]
        return (call.f.binary(join, with_element(call.type, "i1"), *tests),)

    return emit


def _complex_test(name: str, join: str) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        tests = [_component(name, call.dtype.real, call, x) for x in call.args[0]]
        return (call.f.binary(join, with_element(call.type, "i1"), *tests),)

    return emit


def _conj(call: ScalarCall) -> Parts:
    if not call.dtype.is_complex:
        return call.args[0]
    return call.args[0][0], call.f.op(f"fneg {call.type} {call.args[0][1]}")


def _complex_math(function: Callable[[VectorMath, str, str], tuple[str, str]]) -> Emission:
    return lambda call: in_registers(function)(VectorMath(call.f, call.type, call.target), *call.args[0])


def _part(at: int) -> Emission:
    def emit(call: ScalarCall) -> Parts:
        if call.dtype.is_complex:
            return (call.args[0][at],)
        return (call.args[0][0] if at == 0 else constant(call.type, 0),)

    return emit


_TABLE: Final[dict[str, Emission]] = {
    "add": _bool_arithmetic(_binary("fadd", "add"), "or"),
    "sub": _binary("fsub", "sub"),
    "mul": _bool_arithmetic(_binary("fmul", "mul"), "and"),
    "div": _div,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": _mod,
    "rem": _rem,
    "neg": _neg,
    "abs": _abs,
    "min": _min_max("min"),
    "max": _min_max("max"),
    "pow": _pow,
    "gcd": _gcd,
    "exp": _math(exponentials.exp),
    "exp2": _math(exponentials.exp2),
    "expm1": _math(exponentials.expm1),
    "log": _math(logs.log),
    "log2": _math(logs.log2),
    "log1p": _math(logs.log1p),
    "sqrt": _intrinsic("sqrt"),
    "rsqrt": _rsqrt,
    "sin": _math(angles.sin),
    "cos": _math(angles.cos),
    "tan": _math(angles.tan),
    "asin": _math(angles.asin),
    "acos": _math(angles.acos),
    "atan": _math(angles.atan),
    "atan2": _math2(angles.atan2),
    "sinh": _math(exponentials.sinh),
    "cosh": _math(exponentials.cosh),
    "tanh": _math(exponentials.tanh),
    "asinh": _math(logs.asinh),
    "acosh": _math(logs.acosh),
    "atanh": _math(logs.atanh),
    "erf": _math(error_function.erf),
    "gelu": _math(error_function.gelu),
    "erfc": _math(error_function.erfc),
    "lgamma": _math(gamma.lgamma),
    "sigmoid": _math(exponentials.sigmoid),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "trunc": _intrinsic("trunc"),
    "round": _intrinsic("roundeven"),
    "sign": _sign,
    "copysign": _copysign,
    "conj": _conj,
    "and": _bits("and"),
    "or": _bits("or"),
    "xor": _bits("xor"),
    "not": _not,
    "shl": _shift(True),
    "shr": _shift(False),
    "fma": _fma,
    "eq": _compare("oeq", "eq", "eq"),
    "ne": _compare("une", "ne", "ne"),
    "lt": _compare("olt", "slt", "ult"),
    "le": _compare("ole", "sle", "ule"),
    "gt": _compare("ogt", "sgt", "ugt"),
    "ge": _compare("oge", "sge", "uge"),
    "isnan": _float_test(_isnan, False),
    "isinf": _float_test(_isinf, False),
    "isfinite": _float_test(_isfinite, True),
    "signbit": _signbit,
    "real": _part(0),
    "imag": _part(1),
    "complex": lambda call: (call.a, call.b),
    "select": _select,
    "cast": _cast,
    "bitcast": _bitcast,
    "index": lambda call: call.args[0],
    "data": lambda call: call.args[0],
}
_COMPLEX_SAFE: Final = frozenset(("real", "imag", "select", "cast", "conj"))
_COMPLEX: Final[dict[str, Emission]] = {
    "add": _complex_pairwise("add"),
    "sub": _complex_pairwise("sub"),
    "neg": _complex_pairwise("neg"),
    "mul": _complex_mul,
    "div": _complex_div,
    "abs": _complex_abs,
    "eq": _complex_equal("oeq", "and"),
    "ne": _complex_equal("une", "or"),
    "isnan": _complex_test("isnan", "or"),
    "isinf": _complex_test("isinf", "or"),
    "isfinite": _complex_test("isfinite", "and"),
    "exp": _complex_math(angles.complex_exp),
    "log": _complex_math(angles.complex_log),
    "sqrt": _complex_math(angles.complex_sqrt),
}
