"""ONNX export: element-wise ops, casts, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import dim_prod
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import NUMBER, largest
from strata.io.onnx.exporter import Exporter, Writer, fields, spells, writes
from strata.mir import Node, Value

DIRECT = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "add": "Add", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "cos": "Cos", "cosh": "Cosh", "divide": "Div",
    "equal": "Equal", "erf": "Erf", "exp": "Exp", "gelu": "Gelu", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "isinf": "IsInf", "isnan": "IsNaN", "less": "Less", "less_equal": "LessOrEqual",
    "log": "Log", "maximum": "Max", "minimum": "Min", "multiply": "Mul",
    "power": "Pow", "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin",
    "sinh": "Sinh", "softplus": "Softplus", "sqrt": "Sqrt", "stop_gradient": "Identity", "subtract": "Sub",
    "tan": "Tan", "tanh": "Tanh", "where": "Where",
}  # fmt: skip
GELU, ONE_AXIS, SMALL_REDUCED = 20, 13, 12  # the opsets that have it, softmax of one axis, extremes of small integers


def _direct(op: str) -> Writer:
    return lambda e, node, xs: str(e.add(op, xs))


for _name, _op in DIRECT.items():
    writes(_name, since=GELU if _op == "Gelu" else 0)(_direct(_op))


@writes("barrier", "fence", "checked_ids")
def _same(e: Exporter, node: Node, xs: list[str]) -> list[str]:
    return xs


@writes("ensure", "ensure_ids")
def _ensure(e: Exporter, node: Node, xs: list[str]) -> str:
    """What is checked, without its check: ONNX has none."""
    return xs[0]


@writes("ceil", "floor", "round")
def _rounded(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add(node.op.name.capitalize(), xs)) if node.inputs[0].dtype.is_float else xs[0]


@writes("negative")
def _negative(e: Exporter, node: Node, xs: list[str]) -> str:
    dtype = node.inputs[0].dtype
    return str(e.add("Neg", xs) if dtype.is_float or dtype.is_signed else e.add("Sub", [e.array(0, dtype.np), *xs]))


@writes("relu")
def _relu(e: Exporter, node: Node, xs: list[str]) -> str:
    dtype = node.inputs[0].dtype
    return str(e.add("Relu", xs)) if dtype.is_float or dtype.is_signed else xs[0]


@writes("gelu_tanh", since=GELU)
def _gelu_tanh(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Gelu", xs, approximate="tanh"))


@writes("rsqrt")
def _rsqrt(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Reciprocal", [e.add("Sqrt", xs)]))


@writes("not_equal")
def _not_equal(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Not", [e.add("Equal", xs)]))


@writes("bitwise_not")
def _bitwise_not(e: Exporter, node: Node, xs: list[str]) -> str:
    return str(e.add("Not" if node.inputs[0].dtype.is_bool else "BitwiseNot", xs))


@writes("bitwise_and", "bitwise_or", "bitwise_xor")
def _bitwise(e: Exporter, node: Node, xs: list[str]) -> str:
    name = node.op.name.removeprefix("bitwise_").capitalize()
    return str(e.add(name if node.inputs[0].dtype.is_bool else f"Bitwise{name}", xs))


@writes("remainder", "fmod")
def _mod(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    if node.op.name == "remainder" and node.inputs[0].dtype.is_float:
        y = node.inputs[1]
        rest = ops.fmod(*node.inputs)
        turned = ops.where(ops.logical_xor(rest < 0, y < 0), rest + y, rest)
        return e.composed([ops.where(ops.equal(rest, 0), ops.copysign(ops.zeros_like(rest), y), turned)])
    return str(e.add("Mod", xs, fmod=int(node.op.name == "fmod")))


@writes("cast")
def _cast(e: Exporter, node: Node, xs: list[str]) -> str:
    """Small integers saturate, which ONNX leaves open."""
    source, target = node.inputs[0].dtype, node.types[0].dtype
    x = xs[0]
    if source.is_float and target.is_int and target.bits <= 16:
        ends = (
            (-(1 << (target.bits - 1)), (1 << (target.bits - 1)) - 1)
            if target.is_signed
            else (0, (1 << target.bits) - 1)
        )
        for op, end in zip(("Max", "Min"), ends, strict=True):
            if abs(end) <= largest(source.np):
                x = e.add(op, [x, e.array(end, source.np)])
    is_small_float = target.is_float and target.bits <= 8
    return str(e.add("Cast", [x], to=NUMBER[target.np], saturate=0 if is_small_float else None))


@writes("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
def _reduce(e: Exporter, node: Node, xs: list[str]) -> str:
    op = f"Reduce{node.op.name.removeprefix('reduce_').capitalize()}"
    return str(e.add(op, [xs[0], e.array(fields(node)["axes"], np.int64)], keepdims=0, noop_with_empty_axes=1))


@writes("reduce_all", "reduce_any")
def _reduce_bool(e: Exporter, node: Node, xs: list[str]) -> str:
    op = "ReduceMin" if node.op.name == "reduce_all" else "ReduceMax"
    axes = e.array(fields(node)["axes"], np.int64)
    flags = e.add("Cast", [xs[0]], to=NUMBER[np.dtype(np.uint8 if e.opset >= SMALL_REDUCED else np.int32)])
    return str(e.add("Cast", [e.add(op, [flags, axes], keepdims=0, noop_with_empty_axes=1)], to=NUMBER[np.dtype(bool)]))


@writes("softmax", "log_softmax")
def _softmax(e: Exporter, node: Node, xs: list[str]) -> str:
    name, axis, rank = (
        "Softmax" if node.op.name == "softmax" else "LogSoftmax",
        fields(node)["axis"],
        node.inputs[0].ndim,
    )
    if e.opset >= ONE_AXIS or axis in (-1, rank - 1):
        return str(e.add(name, xs, axis=axis))
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    return str(e.add("Transpose", [e.add(name, [e.add("Transpose", xs, perm=order)], axis=rank - 1)], perm=order))


@writes("bitwise_left_shift", "bitwise_right_shift")
def _shift(e: Exporter, node: Node, xs: list[str]) -> str:
    """In the unsigned type of 32 or 64 bits; counts beyond the width leave the sign, or nothing."""
    dtype = node.inputs[0].dtype
    is_left = node.op.name == "bitwise_left_shift"
    wide = np.dtype(np.uint64 if dtype.bits == 64 else np.uint32)
    signed = np.dtype(np.int64 if dtype.bits == 64 else np.int32)

    def cast(x: str, to: Any) -> str:
        return str(e.add("Cast", [x], to=NUMBER[np.dtype(to)]))

    def shifted(x: str) -> str:
        return str(e.add("BitShift", [cast(x, wide), count], direction="LEFT" if is_left else "RIGHT"))

    x, by = cast(xs[0], signed), cast(xs[1], np.int64)
    none, most = e.array(0, np.int64), e.array(dtype.bits - 1, np.int64)
    beyond = e.add("Or", [e.add("Less", [by, none]), e.add("Less", [most, by])])
    count = cast(e.add("Where", [beyond, none, by]), wide)
    zero = e.array(0, signed)
    if is_left:
        return cast(e.add("Where", [beyond, zero, cast(shifted(x), signed)]), dtype.np)
    found, rest = cast(shifted(x if dtype.is_signed else cast(xs[0], wide)), signed), zero
    if dtype.is_signed:
        minus = e.add("Less", [x, zero])
        turned = e.add("BitwiseNot", [cast(shifted(e.add("BitwiseNot", [x])), signed)])
        found, rest = e.add("Where", [minus, turned, found]), e.add("Where", [minus, e.array(-1, signed), zero])
    return cast(e.add("Where", [beyond, rest, found]), dtype.np)


@writes("floor_divide")
def _floor_divide(e: Exporter, node: Node, xs: list[str]) -> str | Sequence[str]:
    dtype = node.inputs[0].dtype
    if dtype.is_float:
        return e.composed([ops.cast(_floored(*node.inputs), dtype)])
    quotient = e.add("Div", xs)
    if not dtype.is_signed:
        return str(quotient)
    rest = e.add("Sub", [xs[0], e.add("Mul", [quotient, xs[1]])])
    zero = e.array(0, dtype.np)
    apart = e.add("Xor", [e.add("Less", [rest, zero]), e.add("Less", [xs[1], zero])])
    odd = e.add("And", [e.add("Not", [e.add("Equal", [rest, zero])]), apart])
    return str(e.add("Sub", [quotient, e.add("Cast", [odd], to=NUMBER[dtype.np])]))


def _floored(x: Value, y: Value) -> Value:
    """The quotient of what the remainder leaves is a whole number; an infinite y is further than every x."""
    whole = ops.round((x - ops.remainder(x, y)) / y)
    beyond = ops.where(ops.logical_xor(x < 0, y < 0), -1.0, 0.0)
    is_beyond = ops.logical_and(ops.isinf(y), ops.logical_not(ops.isinf(x)))
    whole = ops.where(ops.equal(y, 0), x / y, whole)
    return ops.where(is_beyond, ops.where(ops.equal(x, 0), 0.0, beyond), whole)


# said in other ops


@spells("trunc")
def _trunc(op: Any, x: Value) -> Value:
    return ops.where(x < 0, ops.ceil(x), ops.floor(x)) if x.dtype.is_float else x


@spells("exp2")
def _exp2(op: Any, x: Value) -> Value:
    return ops.exp(x * float(np.log(2.0)))


@spells("log2")
def _log2(op: Any, x: Value) -> Value:
    return ops.log(x) * float(1 / np.log(2.0))


@spells("expm1")
def _expm1(op: Any, x: Value) -> Value:
    """Kahan's: the error of exp(x) near 1 is that of the log of what it gives."""
    y = ops.exp(x)
    near = (y - 1) * x / ops.log(y)
    return ops.where(ops.equal(y, 1), x, ops.where(abs(x) < 1, near, y - 1))


@spells("log1p")
def _log1p(op: Any, x: Value) -> Value:
    y = x + 1
    near = ops.log(y) * x / (y - 1)
    return ops.where(ops.equal(y, 1), x, ops.where(abs(x) < 1, near, ops.log(y)))


@spells("logaddexp")
def _logaddexp(op: Any, x: Value, y: Value) -> Value:
    gap = ops.where(ops.equal(x, y), 0.0, x - y)  # of two infinities, too
    return ops.maximum(x, y) + ops.log1p(ops.exp(-abs(gap)))


@spells("hypot")
def _hypot(op: Any, x: Value, y: Value) -> Value:
    high, low = ops.maximum(abs(x), abs(y)), ops.minimum(abs(x), abs(y))
    part = ops.where(ops.equal(low, high), 1.0, low / high)
    return ops.where(ops.equal(high, 0), 0.0, high * ops.sqrt(part * part + 1))


@spells("signbit")
def _signbit(op: Any, x: Value) -> Value:
    return ops.logical_or(x < 0, 1 / x < 0)


@spells("copysign")
def _copysign(op: Any, x: Value, y: Value) -> Value:
    return ops.where(ops.signbit(y), -abs(x), abs(x))


@spells("atan2")
def _atan2(op: Any, y: Value, x: Value) -> Value:
    both = ops.logical_and(ops.isinf(x), ops.isinf(y))
    slope = ops.where(both, ops.sign(x) * ops.sign(y), y / ops.where(ops.equal(x, 0), 1.0, x))
    half = ops.copysign(ops.full_like(y, float(np.pi)), y)
    turned = ops.atan(slope) + ops.where(x < 0, half, 0.0)
    upright = ops.where(ops.equal(y, 0), ops.where(ops.signbit(x), half, y), half / 2)
    return ops.where(ops.equal(x, 0), upright, turned)


@spells("searchsorted")
def _searchsorted(op: Any, numbers: Value, x: Value) -> Value:
    batch = numbers.ndim - 1
    spread = (*numbers.shape[:-1], *(1,) * (x.ndim - batch), numbers.shape[-1])
    table, wanted = ops.reshape(numbers, spread), ops.insert_axis(x, x.ndim)
    found = table <= wanted if op.right else table < wanted
    if x.dtype.is_float:  # NaN is after every number
        last = ops.isnan(wanted) if op.right else ops.logical_and(ops.isnan(wanted), ops.logical_not(ops.isnan(table)))
        found = ops.logical_or(found, last)
    return ops.sum(ops.cast(found, "i64"), -1)


@spells("random_bits")
def _random_bits(op: Any, key: Value, *first: Value) -> Value:
    """The generator's rounds in i64, whose products wrap as those of u64 do."""
    lead, mask = key.shape[:-1], (1 << 32) - 1
    count = dim_prod(op.shape)
    blocks = (count + 3) // 4

    def high(x: Value) -> Value:
        return ops.cast(ops.bitwise_right_shift(ops.cast(x, "u64"), ops.full((), 32, "u64")), "i64")

    def low(x: Value) -> Value:
        return ops.bitwise_and(x, ops.full((), mask, "i64"))

    block = ops.reshape(ops.iota(blocks), (*(1,) * len(lead), blocks))
    if first:
        block = ops.insert_axis(ops.cast(first[0], "i64"), len(lead)) + block
    c = [low(block), high(block), ops.zeros_like(block), ops.full_like(block, op.domain)]
    k = [ops.narrow(ops.cast(key, "i64"), -1, i, 1) for i in (0, 1)]
    for _ in range(op.rounds):
        a, b = c[0] * op.multipliers[0], c[2] * op.multipliers[1]
        c = [high(b) ^ c[1] ^ k[0], low(b), high(a) ^ c[3] ^ k[1], low(a)]
        k = [low(x + step) for x, step in zip(k, op.key_steps, strict=True)]
    shape = (*lead, blocks)
    words = ops.stack([ops.broadcast_to(x, shape) for x in c], -1)
    flat = ops.narrow(ops.reshape(words, (*lead, blocks * 4)), -1, 0, count)
    return ops.cast(ops.reshape(flat, (*lead, *op.shape)), "u32")


@spells("bitwise_count")
def _bitwise_count(op: Any, x: Value) -> Value:
    """Sums of neighbouring bits, pairs, fours, … of |x|."""
    wide = ops.cast(abs(ops.cast(x, "i64")) if x.dtype.is_signed else x, "u64")

    def part(mask: int, by: int) -> tuple[Value, Value]:
        held = ops.full((), mask, "u64")
        high = ops.bitwise_right_shift(wide, ops.full((), by, "u64"))
        return tuple(ops.cast(ops.bitwise_and(v, held), "i64") for v in (wide, high))

    for mask, by in ((0x5555555555555555, 1), (0x3333333333333333, 2), (0x0F0F0F0F0F0F0F0F, 4), (0x00FF00FF00FF00FF, 8),
                     (0x0000FFFF0000FFFF, 16), (0x00000000FFFFFFFF, 32)):  # fmt: skip
        low, high = part(mask, by)
        wide = ops.cast(low + high, "u64")
    return ops.cast(ops.cast(wide, "i64"), "u8")
