"""Control flow: torch's higher-order ops, whose arguments are graphs, as ours; and attention that scores by a graph.

A graph comes as a function of values (`convert.Subgraph`). It uses what is around it only through its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strata import ops
from strata.core import TensorType, f32, f64, i32
from strata.mir import Value, batch_values, placeholder
from strata.torch.aten.backward import derivative
from strata.torch.aten.promotion import value
from strata.torch.table import Unsupported, aten


@aten("higher_order::cond")
def cond(out: Any, predicate: Any, then: Any, orelse: Any, operands: Sequence[Any]) -> Any:
    if isinstance(predicate, bool):
        return list((then if predicate else orelse)(*operands))
    test = ops.reshape(value(predicate), ())
    return list(ops.cond(test, lambda: _typed(out, then(*operands)), lambda: _typed(out, orelse(*operands))))


def _typed(kinds: Sequence[TensorType], made: Sequence[Any]) -> tuple[Value, ...]:
    """What a graph gave, in the types that torch states."""
    if len(made) != len(kinds) or any(x is None for x in (*made, *kinds)):
        raise Unsupported("a graph inside gives what is no tensor")
    return tuple(value(x, kind.dtype) for x, kind in zip(made, kinds, strict=True))


@aten("higher_order::while_loop")
def while_loop(out: Any, test: Any, body: Any, carried: Sequence[Any], others: Sequence[Any], written: str = "") -> Any:
    if written:
        raise Unsupported("a loop that writes to its arguments")
    start = _typed(out, carried)
    return list(
        ops.while_loop(
            lambda state: ops.reshape(value(test(*state, *others)[0]), ()),
            lambda state: _typed(out, body(*state, *others)),
            start,
        )
    )


@aten("higher_order::scan")
def scan(out: Any, body: Any, start: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]) -> Any:
    rows = [TensorType(kind.dtype, kind.shape[1:]) for kind in out[len(start) :]]
    kinds = [*out[: len(start)], *rows]

    def step(state: Any, row: Any) -> Any:
        made = _typed(kinds, body(*state, *row, *others))
        return made[: len(start)], made[len(start) :]

    last, stacked = ops.scan(step, _typed(kinds[: len(start)], start), tuple(xs))
    return [*last, *stacked]


@aten("higher_order::map_impl")
def map_rows(out: Any, body: Any, xs: Sequence[Any], others: Sequence[Any]) -> Any:
    return scan(out, body, (), xs, others)


@aten("higher_order::associative_scan")
def associative_scan(out: Any, combine: Any, xs: Sequence[Any], others: Sequence[Any]) -> Any:
    length = out[0].shape[0]
    if not isinstance(length, int) or length == 0:
        raise Unsupported("as many steps as an argument says, or none")
    first = [ops.narrow(x, 0, 0, 1) for x in xs]
    rest = [ops.narrow(x, 0, 1, length - 1) for x in xs]
    kinds = [TensorType(kind.dtype, kind.shape[1:]) for kind in out]

    def step(state: Any, row: Any) -> Any:
        made = _typed(kinds, combine(*state, *row, *others))
        return made, made

    start = tuple(ops.reshape(x, kind.shape) for x, kind in zip(first, kinds, strict=True))
    _, stacked = ops.scan(step, start, tuple(rest))
    return [ops.concat([x, y], axis=0) for x, y in zip(first, stacked, strict=True)]


@aten("higher_order::invoke_subgraph")
def invoke_subgraph(out: Any, body: Any, identifier: Any, *operands: Any) -> Any:
    return list(body(*operands))


@aten("higher_order::wrap_with_set_grad_enabled")
def with_gradients(out: Any, enabled: bool, body: Any, *operands: Any) -> Any:
    return list(body(*operands))


# ------------------------------------------------------------------------------------------------------ flex_attention

_AXES = 4  # of scores: batch, head, query, key


@aten("higher_order::flex_attention")
def flex_attention(
    out: Any, q: Value, k: Value, v: Value, score: Any, mask: Sequence[Any], scale: float, options: Any = None,
    score_others: Sequence[Any] = (), mask_others: Sequence[Any] = (),
) -> Any:  # fmt: skip
    return _flex(q, k, v, score, mask[-1], scale, score_others, mask_others)


@aten("higher_order::flex_attention_backward")
def flex_attention_backward(
    out: Any, q: Value, k: Value, v: Value, y: Any, lse: Any, ct: Value | None, ct_lse: Value | None, score: Any,
    joint: Any, mask: Sequence[Any], scale: float, options: Any = None, score_others: Sequence[Any] = (),
    mask_others: Sequence[Any] = (),
) -> Any:  # fmt: skip
    attended, sums, _ = _flex(q, k, v, score, mask[-1], scale, score_others, mask_others)
    pairs = [(z, c) for z, c in ((attended, ct), (sums, ct_lse)) if c is not None]
    wanted = [i for i, kind in enumerate(out[3]) if kind is not None]
    found = derivative([z for z, _ in pairs], [c for _, c in pairs], [q, k, v, *(score_others[i] for i in wanted)])
    others: list[Any] = [None] * len(out[3])
    for i, made in zip(wanted, found[3:], strict=True):
        others[i] = made
    return [*found[:3], others]


def _flex(
    q: Value, k: Value, v: Value, score: Any, mask: Any, scale: float, score_others: Sequence[Any],
    mask_others: Sequence[Any],
) -> list[Value]:  # fmt: skip
    """The output, the binary logarithms of the sums, and the largest scores in the same unit."""
    dtype = f64 if q.dtype is f64 else f32
    if q.shape[0] != k.shape[0]:
        k, v = (ops.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    if q.shape[1] != k.shape[1]:  # several heads of queries for one of keys
        k, v = (ops.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = ops.matmul(value(q, dtype), ops.swapaxes(value(k, dtype), -1, -2)) * value(scale, dtype)
    low = value(-math.inf, dtype)
    changed = value(_at_each(score, scores, scores.shape, score_others), dtype)
    seen = _at_each(mask, None, scores.shape, mask_others)
    changed = ops.where(seen, changed, low)
    is_empty = ops.all(ops.equal(changed, low), axis=-1, keepdims=True)
    sums = ops.logsumexp(ops.where(is_empty, value(0, dtype), changed), axis=-1)
    sums = ops.where(ops.reshape(is_empty, sums.shape), low, sums)
    weights = ops.softmax(ops.where(is_empty, value(0, dtype), changed), axis=-1)
    weights = ops.where(is_empty, value(0, dtype), weights)
    unit = value(1 / math.log(2), dtype)
    attended = ops.matmul(value(weights, q.dtype), value(v, q.dtype))
    return [attended, sums * unit, ops.max(changed, axis=-1) * unit]


def _at_each(graph: Any, scores: Value | None, shape: Sequence[Any], others: Sequence[Any]) -> Value:
    """A graph of one score (where it takes one) and its four ids, for all scores: batched over an axis at a time.

    An id has the one axis that it counts along until others need it, so a bias by distance is made once for all heads.
    """
    ids = [placeholder(f"at{axis}", TensorType(i32, ())) for axis in range(_AXES)]
    score = None if scores is None else placeholder("score", TensorType(scores.dtype, ()))
    (found,) = graph(*([] if score is None else [score]), *ids, *others)
    made = value(found)
    shared = {x: x for x in others if isinstance(x, Value)}
    for axis in reversed(range(_AXES)):
        rows = {ids[axis]: ops.iota((shape[axis],), 0, i32)}
        if score is not None and scores is not None:
            row = placeholder("scores", TensorType(scores.dtype, tuple(shape[axis:]))) if axis else scores
            rows[score], score = row, row
        batched = batch_values([made], rows, shape[axis], shared).get(made)
        made = ops.broadcast_to(made, (shape[axis], *made.shape)) if batched is None else batched
    return made
