"""Scalar functions of the kernel IR as Triton text: one table from name to expression, for every dtype.

An expression uses operators and `tl` functions where they mean what the IR means, and functions of the prelude
otherwise. What the interpreter and the compiler disagree on (rounding to bf16, NaN in reductions) is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.backends.triton.codegen.elements import BITS, is_small, literal, memory, number, register
from strata.core import DType
from strata.errors import CompileError


@dataclass(frozen=True, slots=True)
class TritonCall:
    """A scalar function about to be written: operands as text, their types, and what to tell of prelude functions."""

    name: str
    args: tuple[str, ...]
    dtypes: tuple[DType, ...]
    result: DType
    needs: Callable[[str], str]  # the name of a prelude function, which the kernel then has
    is_natural: bool = False  # the first operand is a whole number that is not negative, the second a positive one

    @property
    def dtype(self) -> DType:
        return self.dtypes[0]

    @property
    def a(self) -> str:
        return self.args[0]

    @property
    def b(self) -> str:
        return self.args[1]

    @property
    def register(self) -> str:
        return register(self.dtype)

    @property
    def is_wide(self) -> bool:
        return self.dtype.name == "f64"


Emission = Callable[[TritonCall], str]


def emit_scalar(call: TritonCall) -> str:
    """The text of a scalar function."""
    emission = _TABLE.get(call.name)
    if emission is None or call.dtype.is_complex or call.result.is_complex:
        raise CompileError(f"scalar function {call.name} of {call.dtype} has no Triton form", code="C130")
    return emission(call)


def _infix(sign: str) -> Emission:
    return lambda call: f"({call.a} {sign} {call.b})"


def _with_bools(sign: str, for_bools: str) -> Emission:
    return lambda call: f"({call.a} {for_bools if call.dtype.is_bool else sign} {call.b})"


def divided(a: str, b: str, dtype: DType) -> str:
    """A quotient of floats, rounded once."""
    return f"({a} / {b})" if dtype.name == "f64" else f"tl.div_rn({a}, {b})"


def _div(call: TritonCall) -> str:
    return divided(call.a, call.b, call.dtype) if call.dtype.is_float else _whole("truncdiv")(call)


def _whole(name: str) -> Emission:
    """Division and remainder: plain where operands are natural numbers, functions of the prelude otherwise."""
    sign = "%" if name in ("mod", "rem") else "//"

    def emit(call: TritonCall) -> str:
        if call.dtype.is_float:
            return f"{call.needs(f'{name}_f64' if call.is_wide else f'{name}_f32')}({call.a}, {call.b})"
        if call.is_natural:
            return f"({call.a} {sign} {call.b})"
        if call.dtype.kind == "uint":
            plain = "rem_unsigned" if sign == "%" else "truncdiv_unsigned"
            return f"{call.needs(plain)}({call.a}, {call.b})"
        return f"{call.needs(f'{name}_signed')}({call.a}, {call.b})"

    return emit


def _neg(call: TritonCall) -> str:
    """Triton's own minus is 0 - x up to 3.6, which has no negative zero."""
    return f"(0 - {call.a})" if call.dtype.is_int else f"({call.a} * -1.0)"


def _abs(call: TritonCall) -> str:
    return call.a if call.dtype.kind in ("uint", "bool") else f"tl.abs({call.a})"


def _extreme(name: str) -> Emission:
    def emit(call: TritonCall) -> str:
        if call.dtype.is_bool:
            return f"({call.a} {'&' if name == 'min' else '|'} {call.b})"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if call.dtype.is_float else ""
        return f"tl.{name}imum({call.a}, {call.b}{nan})"

    return emit


def _direct(name: str) -> Emission:
    return lambda call: f"tl.{name}({call.a})"


def _helper(name: str) -> Emission:
    """A prelude function of floats, of one precision or the other."""
    return lambda call: f"{call.needs(f'{name}_f64' if call.is_wide else f'{name}_f32')}({', '.join(call.args)})"


def _rounding(direct: str | None, helper: str = "") -> Emission:
    def emit(call: TritonCall) -> str:
        if not call.dtype.is_float:
            return call.a
        return f"tl.{direct}({call.a})" if direct else f"{call.needs(helper)}({call.a})"

    return emit


def _sqrt(call: TritonCall) -> str:
    return f"tl.sqrt({call.a})" if call.is_wide else f"tl.sqrt_rn({call.a})"


def _rsqrt(call: TritonCall) -> str:
    return divided("1.0", _sqrt(call), call.dtype)


def _pow(call: TritonCall) -> str:
    if call.dtype.is_float:
        return _helper("pow")(call)
    return f"{call.needs(f'pow_{call.dtype.kind}{max(call.dtype.bits, 8)}')}({call.a}, {call.b})"


def _gcd(call: TritonCall) -> str:
    return f"{call.needs(f'gcd_{call.dtype.kind}{call.dtype.bits}')}({call.a}, {call.b})"


def _sign(call: TritonCall) -> str:
    zero = literal(0, call.dtype)
    if call.dtype.is_float:
        return f"{call.needs('sign')}({call.a})"
    positive = f"({call.a} > {zero}).to({call.register})"
    return positive if call.dtype.kind == "uint" else f"({positive} - ({call.a} < {zero}).to({call.register}))"


def _signbit(call: TritonCall) -> str:
    if call.dtype.is_float:
        return f"{call.needs('signbit_f64' if call.is_wide else 'signbit_f32')}({call.a})"
    return f"({call.a} < 0)"


def _not(call: TritonCall) -> str:
    if call.dtype.is_bool:
        return f"({call.a} == 0)"
    ones = -1 if call.dtype.kind == "int" else (1 << call.dtype.bits) - 1
    return f"({call.a} ^ {number(ones, call.dtype)})"


def _shift(left: bool) -> Emission:
    """Amounts outside the width give what shifting by one bit at a time would give."""

    def emit(call: TritonCall) -> str:
        bits, signed = max(call.dtype.bits, 8), call.dtype.kind == "int"
        inside = f"(({call.b} >= 0) & ({call.b} < {bits}))" if signed else f"({call.b} < {bits})"
        amount = f"tl.where({inside}, {call.b}, {number(0, call.dtype)})"
        outside = number(0, call.dtype)
        if not left and signed:
            outside = f"({call.a} >> {number(bits - 1, call.dtype)})"
        return f"tl.where({inside}, {call.a} {'<<' if left else '>>'} {amount}, {outside})"

    return emit


def _test(for_floats: str, for_integers: str) -> Emission:
    def emit(call: TritonCall) -> str:
        if call.dtype.is_float:
            return for_floats.format(call.a)
        return f"({call.a} {for_integers} {call.a})"

    return emit


def _order(sign: str) -> Emission:
    """Truth values are numbers of one bit to Triton, and signed: they are compared as wider ones."""

    def emit(call: TritonCall) -> str:
        a, b = (f"{x}.to(tl.int32)" for x in call.args) if call.dtype.is_bool else call.args
        return f"({a} {sign} {b})"

    return emit


def _select(call: TritonCall) -> str:
    return f"tl.where({', '.join(call.args)})"


def _fma(call: TritonCall) -> str:
    return f"tl.fma({', '.join(call.args)})" if call.dtype.is_float else f"({call.a} * {call.b} + {call.args[2]})"


# conversions


def _cast(call: TritonCall) -> str:
    source, result = call.dtype, call.result
    if result.is_bool:
        return call.a if source.is_bool else f"({call.a} != 0)"
    if result.is_float:
        if is_small(source) and register(source) == register(result) and not is_small(result):
            return call.a
        made = call.a if register(source) == register(result) else f"{call.a}.to({register(result)})"
        return rounded(made, result, call.needs) if is_small(result) else made
    if source.is_float:
        return f"{call.needs(_saturation(source, result))}({call.a})"
    if result.bits == 4:
        return decoded(f"({call.a}.to({memory(result)}) & 15)", result, call.needs)
    return f"{call.a}.to({register(result)})"


def _saturation(source: DType, result: DType) -> str:
    return f"{'f64' if source.name == 'f64' else 'f32'}_to_{result.name}"


def rounded(value: str, dtype: DType, needs: Callable[[str], str]) -> str:
    """An f32 value rounded to a type of fewer bits, still as f32."""
    if dtype.name == "f16":
        return f"{value}.to(tl.float16).to(tl.float32)"
    return decoded(encoded(value, dtype, needs), dtype, needs)


def encoded(value: str, dtype: DType, needs: Callable[[str], str]) -> str:
    """A value as it lies in memory."""
    if dtype.name in BITS:
        return f"{needs(f'to_{dtype.name}')}({value})"
    return value if register(dtype) == memory(dtype) else f"{value}.to({memory(dtype)})"


def decoded(value: str, dtype: DType, needs: Callable[[str], str]) -> str:
    """What lies in memory as a value."""
    if dtype.name in BITS:
        return f"{needs(f'from_{dtype.name}')}({value})"
    if dtype.is_bool:
        return f"({value} != 0)"
    if dtype.bits == 4:  # a byte whose upper half says nothing
        return f"({value} & 15)" if dtype.kind == "uint" else f"((({value} & 15) ^ 8) - 8)"
    return value if register(dtype) == memory(dtype) else f"{value}.to({register(dtype)})"


def dot(left: str, right: str, sums: str, dtype: DType, needs: Callable[[str], str]) -> str:
    """Two tiles as they lie in memory, multiplied and added to sums: floats in f32, with no bits left out of f32."""
    match dtype.name:
        case "bf16":
            return f"{needs('dot_bf16')}({left}, {right}, {sums})"
        case "i8":
            return f"tl.dot({left}, {right}, {sums}, out_dtype=tl.int32)"
        case "f16":
            return f"tl.dot({left}, {right}, {sums})"
        case _:
            return f'tl.dot({left}, {right}, {sums}, input_precision="ieee")'


def _bitcast(call: TritonCall) -> str:
    stored = encoded(call.a, call.dtype, call.needs)
    if call.result.name == "bf16" and call.dtype.name != "bf16":
        stored = f"{call.needs('bits_to_bf16')}({stored}.to(tl.uint16, bitcast=True))"
    elif memory(call.dtype) != memory(call.result):
        stored = f"{stored}.to({memory(call.result)}, bitcast=True)"
    return decoded(stored, call.result, call.needs)


_TABLE: Final[dict[str, Emission]] = {
    "add": _with_bools("+", "|"),
    "sub": _infix("-"),
    "mul": _with_bools("*", "&"),
    "div": _div,
    "floordiv": _whole("floordiv"),
    "truncdiv": _whole("truncdiv"),
    "mod": _whole("mod"),
    "rem": _whole("rem"),
    "neg": _neg,
    "abs": _abs,
    "min": _extreme("min"),
    "max": _extreme("max"),
    "pow": _pow,
    "gcd": _gcd,
    "exp": _direct("exp"),
    "exp2": _direct("exp2"),
    "log": _direct("log"),
    "log2": _direct("log2"),
    "sin": _direct("sin"),
    "cos": _direct("cos"),
    "erf": _direct("erf"),
    **{
        name: _helper(name)
        for name in (
            "expm1",
            "log1p",
            "tan",
            "asin",
            "acos",
            "atan",
            "atan2",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "acosh",
            "atanh",
            "gelu",
            "erfc",
            "lgamma",
            "sigmoid",
            "copysign",
        )
    },  # fmt: skip
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding(None, "trunc"),
    "round": lambda call: _helper("round")(call) if call.dtype.is_float else call.a,
    "sign": _sign,
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "not": _not,
    "shl": _shift(True),
    "shr": _shift(False),
    "fma": _fma,
    "eq": _infix("=="),
    "ne": _infix("!="),
    "lt": _order("<"),
    "le": _order("<="),
    "gt": _order(">"),
    "ge": _order(">="),
    "isnan": _test("({0} != {0})", "!="),
    "isinf": _test('(tl.abs({0}) == float("inf"))', "!="),
    "isfinite": _test('(tl.abs({0}) < float("inf"))', "=="),
    "signbit": _signbit,
    "select": _select,
    "cast": _cast,
    "bitcast": _bitcast,
    "index": lambda call: call.a,
    "data": lambda call: call.a,
}
NAMES: Final = frozenset(_TABLE)
