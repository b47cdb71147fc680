"""The pattern language of rewrite rules.

    RULES = RuleSet()

    @RULES.rule(pat.log(pat.softmax(V.x, axis=V.axis)))
    def log_of_softmax(x, axis): ...

A pattern names an op and its inputs; `V.name` binds a value or a field, and binding a name twice asks for the same
value. A number stands for a constant of that value in any dtype and shape. Commutative ops match in both
orders. A rule returns None to decline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.errors import VerifyError
from strata.mir import METHODS, Constant, Graph, Value, as_tuple, toposort
from strata.passes.base import PassContext, rewrite

MAX_CHAIN = 32  # rules applied one after the other to a single value


@dataclass(frozen=True, slots=True)
class PatternVariable:
    """Binds what it meets."""

    name: str


class _Variables:
    def __getattr__(self, name: str) -> PatternVariable:
        return PatternVariable(name)


V = _Variables()


@dataclass(frozen=True, slots=True)
class Pattern:
    """An op applied to patterns."""

    op: str
    inputs: tuple[Any, ...]
    fields: tuple[tuple[str, Any], ...] = ()


class _Patterns:
    def __getattr__(self, op: str) -> Callable[..., Pattern]:
        return lambda *inputs, **fields: Pattern(op.rstrip("_"), inputs, tuple(fields.items()))


pat = _Patterns()


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, and what to make of a match. `exact` rules keep every bit of the result."""

    name: str
    pattern: Pattern
    body: Callable[..., Value | None]
    exact: bool


@dataclass
class RuleSet:
    """Rules by the op at their root."""

    rules: list[Rule] = field(default_factory=list)

    def rule(self, pattern: Pattern, *, exact: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a rule; its name is the function's."""

        def wrap(body: Callable[..., Any]) -> Callable[..., Any]:
            self.rules.append(Rule(body.__name__, pattern, body, exact))
            return body

        return wrap

    def __call__(self, graph: Graph, ctx: PassContext, made_by: str = "rules") -> Graph:
        """Apply all rules wherever they match, producers before consumers."""
        by_op: dict[str, list[Rule]] = defaultdict(list)
        for rule in self.rules:
            if rule.exact or not ctx.exact:
                by_op[rule.pattern.op].append(rule)
        return rewrite_each(graph, lambda value, _: _apply(by_op.get(value.node.op.name, ()), value), made_by)


def rewrite_each(graph: Graph, step: Callable[[Value, Uses], Value | None], made_by: str) -> Graph:
    """Apply `step` to every value of an op with one output, producers first, until it declines.

    The counts of uses are those of the graph as it was: what stands in for a value is used as often as it.
    """
    uses = Uses(graph)

    def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        node = value.node
        made = node.outputs if inputs == node.inputs else as_tuple(node.op(*inputs))
        for new, old in zip(made, node.outputs, strict=True):
            uses.inherit(new, old)
        if len(made) != 1:
            return None if inputs == node.inputs else made
        current = made[0]
        for _ in range(MAX_CHAIN):
            better = step(current, uses)
            if better is None:
                break
            uses.inherit(better, value)
            current = better
        return None if current == value else (current,)

    return rewrite(graph, change, made_by)


class Uses:
    """How often each value of a graph is read; a rewritten value inherits the count of the one it stands for."""

    def __init__(self, graph: Graph) -> None:
        self._count: dict[Value, int] = defaultdict(int)
        for value in [x for node in toposort(graph.results) for x in node.inputs] + list(graph.results):
            self._count[value] += 1

    def inherit(self, made: Value, old: Value) -> None:
        if made != old:
            self._count[made] = max(self._count.get(made, 0), self._count[old])

    def of(self, value: Value) -> int:
        return self._count.get(value, 1)


def _apply(rules: Sequence[Rule], value: Value) -> Value | None:
    for rule in rules:
        for bound in match(rule.pattern, value):
            made = rule.body(**bound)
            if made is None or made == value:
                continue
            if made.dtype is value.dtype and made.shape != value.shape:
                made = METHODS["broadcast_to"](made, value.shape)  # the dropped operand had the larger shape
            if made.type != value.type:
                raise VerifyError(f"rule {rule.name} turned {value.type} into {made.type}", code="V302")
            return made
    return None


def match(pattern: Any, value: Value) -> Iterator[dict[str, Any]]:
    """All ways in which a pattern matches a value, as bindings."""
    yield from _match(pattern, value, {})


def _match(pattern: Any, value: Value, bound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    match pattern:
        case PatternVariable(name):
            if name not in bound:
                yield {**bound, name: value}
            elif bound[name] == value:
                yield bound
        case Pattern():
            yield from _match_op(pattern, value, bound)
        case bool() | int() | float():
            if is_constant(value, pattern):
                yield bound
        case _:
            raise VerifyError(f"{pattern!r} is not a pattern", code="V303")


def _match_op(pattern: Pattern, value: Value, bound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    op = value.node.op
    if pattern.op == "constant":
        if isinstance(op, Constant) and pattern.inputs:
            yield {**bound, pattern.inputs[0].name: value}
        return
    if op.name != pattern.op or value.index != 0 or len(value.node.inputs) != len(pattern.inputs):
        return
    for key, wanted in pattern.fields:
        found = getattr(op, key)
        if isinstance(wanted, PatternVariable):
            if wanted.name in bound and bound[wanted.name] != found:
                return
            bound = {**bound, wanted.name: found}
        elif wanted != found:
            return
    orders = [pattern.inputs, pattern.inputs[::-1]] if op.commutative and len(pattern.inputs) == 2 else [pattern.inputs]
    for inputs in orders:
        states = [bound]
        for sub, x in zip(inputs, value.node.inputs, strict=True):
            states = [found for state in states for found in _match(sub, x, state)]
        yield from states


def is_constant(value: Value, number: float) -> bool:
    """Whether a value is a constant with this number everywhere."""
    while value.node.op.name == "broadcast_to":
        value = value.node.inputs[0]
    op = value.node.op
    if not isinstance(op, Constant) or op.data.array.size == 0:
        return False
    array = op.data.array
    return bool(np.all(array == array.dtype.type(number))) and not (
        number == 0 and array.dtype.kind == "f" and np.signbit(array).any()
    )


def constant_number(value: Value) -> float | None:
    """The number of a one-element constant, else None."""
    while value.node.op.name == "broadcast_to":
        value = value.node.inputs[0]
    op = value.node.op
    if isinstance(op, Constant) and op.data.array.size == 1 and not value.dtype.is_complex:
        return float(op.data.array.reshape(-1)[0])
    return None
