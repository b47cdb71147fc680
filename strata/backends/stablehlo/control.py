"""Branches and loops as StableHLO: bodies are regions that capture outer values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import bool_, i64


@rule("cond")
def _cond(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    predicate, *captures = xs
    kinds = [(t.dtype, t.static_shape) for t in types_of(op, xs)]

    def branch(graph: Any) -> Any:
        def write() -> list[Hlo]:
            made, failed = w.inside(lambda: w.graph(graph, captures))
            return [*made, failed]

        return ([], write)

    *made, failed = w.b.many(
        "stablehlo.if", [predicate], "", [*kinds, (bool_, ())], [branch(op.then), branch(op.orelse)]
    )
    w.fail_if(failed)
    return tuple(made)


@rule("while")
def _while(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    b, count = w.b, op.num_carry
    consts = list(xs[count:])

    def test(failed: Hlo, steps: Hlo, *carries: Hlo) -> Hlo:
        (goes_on,), broken = w.inside(lambda: w.graph(op.cond, [*carries, *consts]))
        goes_on = b.same("and", goes_on, b.same("not", b.same("or", failed, broken)))
        if op.max_iterations is None:
            return goes_on
        return b.same("and", goes_on, b.compare("LT", steps, b.const(op.max_iterations, i64)))

    def body(failed: Hlo, steps: Hlo, *carries: Hlo) -> list[Hlo]:
        made, broken = w.inside(lambda: w.graph(op.body, [*carries, *consts]))
        return [b.same("or", failed, broken), b.same("add", steps, b.const(1, i64)), *made]

    failed, _, *made = b.while_([b.const(value=False, dtype=bool_), b.const(0, i64), *xs[:count]], test, body)
    w.fail_if(failed)
    return tuple(made)


@rule("scan")
def _scan(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    b, carries, first = w.b, op.num_carry, op.num_carry + op.num_consts
    consts, rows = list(xs[carries:first]), list(xs[first:])
    length, made = int(op.length), types_of(op, xs)
    stacked = [b.const(0, t.dtype, t.static_shape) for t in made[carries:]]
    if length == 0:
        return (*xs[:carries], *stacked)

    def step(at: Hlo, failed: Hlo, *state: Hlo) -> list[Hlo]:
        place = b.same("subtract", b.const(length - 1, i64), at) if op.reverse else at
        row = [b.row(x, place) for x in rows]
        outs, broken = w.inside(lambda: w.graph(op.body, [*state[:carries], *consts, *row]))
        kept = [b.set_row(y, v, place) for y, v in zip(state[carries:], outs[carries:], strict=True)]
        return [b.same("or", failed, broken), *outs[:carries], *kept]

    failed, *results = b.repeat(length, [b.const(value=False, dtype=bool_), *xs[:carries], *stacked], step)
    w.fail_if(failed)
    return tuple(results)
