"""Algebraic simplification: bit-exact rules, and a marked set that may round differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from strata.core import DType
from strata.mir import Graph, Value, as_tuple, constant
from strata.ops import Concat, broadcast_to, cast, exp, logsumexp, negative, reshape, transpose
from strata.passes.base import Pass, PassContext, register, rewrite
from strata.passes.match import RuleSet, V, constant_number, pat

RULES = RuleSet()
GROUP = 16  # inputs of a concat, where there are too many


def _as(x: Value, like: tuple[Any, ...]) -> Value:
    return broadcast_to(x, like)


@RULES.rule(pat.multiply(V.x, 1))
def times_one(x: Value) -> Value | None:
    """x * 1 is x; of complex numbers, the 0 of 1 + 0j makes NaN of an infinity."""
    return None if x.dtype.is_complex else x


@RULES.rule(pat.divide(V.x, 1))
def over_one(x: Value) -> Value | None:
    """x / 1 is x, but for complex infinities."""
    return None if x.dtype.is_complex else x


@RULES.rule(pat.subtract(V.x, 0))
def minus_zero(x: Value) -> Value | None:
    """x - 0 is x; x + 0 is not, as -0 + 0 is 0."""
    return x


@RULES.rule(pat.add(V.x, 0))
def plus_zero(x: Value) -> Value | None:
    """x + 0 is x for integers."""
    return x if x.dtype.is_int else None


@RULES.rule(pat.negative(pat.negative(V.x)))
def double_negative(x: Value) -> Value:
    return x


@RULES.rule(pat.bitwise_not(pat.bitwise_not(V.x)))
def double_not(x: Value) -> Value:
    return x


@RULES.rule(pat.subtract(V.x, pat.negative(V.y)))
def minus_negative(x: Value, y: Value) -> Value | None:
    """x - (-y) is x + y."""
    return x + y


@RULES.rule(pat.add(V.x, pat.negative(V.y)))
def plus_negative(x: Value, y: Value) -> Value | None:
    """x + (-y) is x - y."""
    return x - y


@RULES.rule(pat.where(V.c, V.x, V.x))
def same_branches(c: Value, x: Value) -> Value | None:
    """Both branches are x."""
    return x if len(x.shape) >= len(c.shape) else None


@RULES.rule(pat.where(V.c, V.x, pat.stop_gradient(V.x)))
def gradients_in_some_places(c: Value, x: Value) -> Value | None:
    """Both branches are x; that its gradients are counted in some places only has been seen to."""
    return same_branches(c, x)


@RULES.rule(pat.transpose(pat.transpose(V.x, perm=V.inner), perm=V.outer))
def transpose_of_transpose(x: Value, inner: tuple[int, ...], outer: tuple[int, ...]) -> Value:
    return transpose(x, [inner[p] for p in outer])


@RULES.rule(pat.reshape(pat.reshape(V.x), shape=V.shape))
def reshape_of_reshape(x: Value, shape: tuple[Any, ...]) -> Value:
    return reshape(x, shape)


@RULES.rule(pat.broadcast_to(pat.broadcast_to(V.x), shape=V.shape))
def broadcast_of_broadcast(x: Value, shape: tuple[Any, ...]) -> Value:
    return broadcast_to(x, shape)


@RULES.rule(pat.cast(pat.cast(V.x, dtype=V.inner), dtype=V.outer))
def cast_of_cast(x: Value, inner: DType, outer: DType) -> Value | None:
    """A detour through a type that holds every value of the first changes nothing; where an integer becomes a float
    and an integer again, it saturates, and wraps without the detour."""
    wraps = x.dtype.is_int and inner.is_float and outer.is_int and not (outer is x.dtype or holds(outer, x.dtype))
    return cast(x, outer) if holds(inner, x.dtype) and not wraps else None


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if wide is narrow:
        return True
    if narrow.is_bool:
        return True
    digits = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53, "f8e4m3": 4, "f8e5m2": 3}
    if wide.is_float and narrow.is_float:
        return (
            digits[wide.name] >= digits[narrow.name]
            and wide.bits > narrow.bits
            and (wide.bits >= 32 or narrow.bits < 16)
        )
    if wide.is_float and narrow.is_int:
        return digits[wide.name] >= narrow.bits
    if wide.is_int and narrow.is_int:
        return wide.bits > narrow.bits and (wide.kind == "int" or narrow.kind == "uint")
    return False


@RULES.rule(pat.log(pat.softmax(V.x, axis=V.axis)), exact=False)
def log_of_softmax(x: Value, axis: int) -> Value:
    """softmax underflows to 0 far from the maximum, and log(0) loses the gradient."""
    return x - logsumexp(x, axis=axis, keepdims=True)


@RULES.rule(pat.log(pat.exp(V.x)), exact=False)
def log_of_exp(x: Value) -> Value | None:
    return x if x.dtype.is_float else None


@RULES.rule(pat.multiply(pat.multiply(V.x, V.a), V.b), exact=False)
def joined_factors(x: Value, a: Value, b: Value) -> Value | None:
    """(x * a) * b is x * (a b) for constants a and b."""
    first, second = constant_number(a), constant_number(b)
    if first is None or second is None or not x.dtype.is_float or x.shape == ():
        return None
    return x * constant(first * second, x.dtype)


@RULES.rule(pat.divide(V.x, V.c), exact=False)
def by_reciprocal(x: Value, c: Value) -> Value | None:
    """A division by a constant as a multiplication."""
    number = constant_number(c)
    if number is None or number == 0 or not x.dtype.is_float or x.shape == ():
        return None
    return x * constant(1.0 / number, x.dtype)


@RULES.rule(pat.multiply(pat.exp(V.x), pat.exp(V.y)), exact=False)
def product_of_exp(x: Value, y: Value) -> Value | None:
    """exp(x) exp(y) is exp(x + y)."""
    return exp(x + y) if x.dtype.is_float else None


@RULES.rule(pat.subtract(0, V.x))
def zero_minus(x: Value) -> Value | None:
    """0 - x is -x for integers; for floats 0 - 0 is 0, not -0."""
    return negative(x) if x.dtype.is_int else None


@register
@dataclass(frozen=True)
class Simplify(Pass):
    """Apply the algebra above; rules that change rounding only when the compile allows it."""

    name: ClassVar[str] = "simplify"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        made = RULES(graph, ctx, self.name)
        wide = any(isinstance(n.op, Concat) and len(n.inputs) > Concat.many for n in made.nodes())
        return rewrite(made, _in_groups, self.name) if wide else made


def _in_groups(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    """A concat of very many inputs, those that are computed element by element in groups: each is one kernel with what
    computes its inputs, and no element asks all of the inputs whose it is."""
    op = value.node.op
    if not isinstance(op, Concat) or len(inputs) <= Concat.many:
        return None
    made: list[Value] = []
    for computed, run in groupby(inputs, lambda x: x.node.op.elementwise):
        parts = list(run)
        if computed:
            groups = [parts[i : i + GROUP] for i in range(0, len(parts), GROUP)]
            parts = [op(*group) if len(group) > 1 else group[0] for group in groups]
        made += parts
    return as_tuple(op(*made)) if len(made) < len(inputs) else None
