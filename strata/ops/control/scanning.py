"""scan: a loop over the leading axis with carried state, its derivatives, checkpoints and batching.

A scan keeps the loop body as a closed graph. Its backward pass is another scan in the opposite direction over the
carries that entered each step; `checkpoints` nests two scans so that only the carries entering each segment are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.core import Dim, SymExpr, TensorType, bool_, f64, floordiv, i64, known_le
from strata.errors import OptionError
from strata.kinds import counted
from strata.mir import Graph, Nested, Op, Sample, Value, batch_values, op, placeholder, pullback, pushforward
from strata.ops.base.creation import zeros_like
from strata.ops.base.movement import broadcast_to, concat, moveaxis, narrow, reshape
from strata.ops.control.tracing import is_wide, make_graph, narrowed, numbered, runner, used

Run = tuple[Dim, int, Dim]  # the first step, how many segments, and how many steps in each


@dataclass(frozen=True, slots=True)
class Sweep:
    """The body of a backward pass, and which inputs of the forward body its inputs and outputs belong to."""

    step: Graph
    moving: list[int]  # carries with a cotangent
    summed: list[int]  # constants with one, added up over the steps
    stacked: list[int]  # xs with one
    saved: list[int]  # carries whose values on entry of each step are needed
    shared: list[int]  # constants, and carries that never change, that are needed
    rows: list[int]  # xs that are needed
    seen: list[int]  # ys with a cotangent


@op("scan")
class ScanOp(Op):
    """Steps of a body over the leading axis: (carries, consts, row of each xs) → (carries, ys).

    Inputs are the first carries, then values that every step sees, then xs with `length` rows each. Outputs are the
    last carries, then the ys of all steps, stacked. `reverse` runs from the last row to the first. `checkpoints` = K
    only matters to the backward pass: it keeps K carries (after steps ceil((k + 1)·length / K) - 1) and computes the
    others again.
    """

    body: Graph
    length: Dim
    num_carry: int
    num_consts: int
    reverse: bool = False
    checkpoints: int | None = None

    multi_output = True
    dtypes = (f64,)  # the body states its types

    def infer(self, *types: TensorType) -> tuple[TensorType, ...]:
        body, carries = self.body, self.num_carry
        leaves, results = [x.type for x in body.inputs], [x.type for x in body.results]
        listed = ", ".join(f"{n}: {t}" for n, t in zip(body.input_names, leaves, strict=True))
        self.require(
            not body.params, f"the body has a parameter {body.param_names[:1]}: pass it as an input", code="S340"
        )
        self.require(
            len(types) == len(leaves) and carries + self.num_consts <= len(leaves),
            f"{len(types)} values for a body that takes ({listed}), {carries} carries and {self.num_consts} constants",
            code="S341",
        )
        self.require(
            len(results) >= carries,
            f"the body returns {counted(len(results), 'value')}, fewer than {carries} carries",
            code="S342",
        )
        for i in range(carries):
            self.require(
                results[i] == leaves[i],
                f"carry {i} enters a step as {leaves[i]} and leaves it as {results[i]}",
                code="S343",
            )
        for i, (given, wanted) in enumerate(zip(types, leaves, strict=True)):
            if i < carries + self.num_consts:
                self.require(given == wanted, f"input {i} is {given}, the body takes ({listed})", code="S344")
            else:
                row = TensorType(wanted.dtype, (self.length, *wanted.shape))
                self.require(
                    given == row, f"input {i} is {given}, {self.length} rows of {wanted} are {row}", code="S345"
                )
        if self.checkpoints is not None:
            fits = self.checkpoints >= 1 and not known_le(self.length + 1, self.checkpoints)
            self.require(
                fits, f"{self.checkpoints} checkpoints for {self.length} steps", code="O250", error=OptionError
            )
        return (*results[:carries], *(TensorType(t.dtype, (self.length, *t.shape)) for t in results[carries:]))

    def nested(self) -> tuple[Nested, ...]:
        first = self.num_carry + self.num_consts
        varies = len(self.body.inputs) > self.num_consts
        return (Nested(self.body, range(self.num_carry, first) if varies else range(0)),)

    def with_nested(self, graphs: Sequence[Graph]) -> ScanOp:
        return replace(self, body=graphs[0])

    def numpy(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        types = [x.type for x in self.body.inputs]
        wide = is_wide(arrays, types)
        inputs = narrowed(arrays, types, wide=wide)
        length, first = self.length.__index__(), self.num_carry + self.num_consts
        carries, consts, xs = inputs[: self.num_carry], inputs[self.num_carry : first], inputs[first:]
        ys: list[np.ndarray] = [
            np.empty((length, *x.type.static_shape), _dtype(x, wide)) for x in self.body.results[self.num_carry :]
        ]
        step = runner(self.body, wide=wide)
        for t in reversed(range(length)) if self.reverse else range(length):
            outs = step([*carries, *consts, *(x[t] for x in xs)])
            carries = list(outs[: self.num_carry])
            for y, row in zip(ys, outs[self.num_carry :], strict=True):
                y[t] = row
        return (*carries, *ys)

    # ----------------------------------------------------------------------------------------------------- derivatives

    def jvp(self, *inputs: Value, out: Any, dx: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        leaves, carries = self.body.inputs, self.num_carry
        active = [t is not None for t in dx]
        names = [placeholder(f"d{i}", x.type) for i, x in enumerate(leaves)]
        while True:
            tangents = [n if a else None for n, a in zip(names, active, strict=True)]
            douts = pushforward(self.body.results, leaves, tangents)
            grown = [a or (i < carries and douts[i] is not None) for i, a in enumerate(active)]
            if grown == active:
                break
            active = grown

        def split(values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            first = carries + self.num_consts
            return list(values[:carries]), list(values[carries:first]), list(values[first:])

        seeds = [zeros_like(x) if t is None else t for x, t in zip(inputs, dx, strict=True)]
        starts: list[Value] = []
        formals: list[tuple[str, Value]] = []
        for prefix, group, tangent_group, given, seed, on in zip(
            "ckx", split(leaves), split(names), split(inputs), split(seeds), split(active), strict=True
        ):
            formals += numbered(prefix, group) + numbered(f"d{prefix}", _keep(tangent_group, on))
            starts += given + _keep(seed, on)
        moving = [i for i in range(carries) if active[i]]
        varying = [i for i in range(carries, len(douts)) if douts[i] is not None]
        results = [
            *self.body.results[:carries], *(_or_zeros(douts[i], self.body.results[i]) for i in moving),
            *self.body.results[carries:], *(_or_zeros(douts[i], self.body.results[i]) for i in varying),
        ]  # fmt: skip
        consts = self.num_consts + sum(active[carries : carries + self.num_consts])
        step = make_graph(self.body.name, formals, results)
        outs = replace(self, body=step, num_carry=carries + len(moving), num_consts=consts)(*starts)
        found: list[Value | None] = [None] * len(douts)
        for place, i in enumerate(moving):
            found[i] = outs[carries + place]
        for place, i in enumerate(varying):
            found[i] = outs[len(outs) - len(varying) + place]
        return tuple(found)

    def vjp(self, *inputs: Value, out: Any, ct: tuple[Value | None, ...], **_: Any) -> tuple[Value | None, ...]:
        sweep = self._sweep(ct)
        if sweep is None:
            return (None,) * len(inputs)
        state = [_or_zeros(ct[i], inputs[i]) for i in sweep.moving] + [zeros_like(inputs[i]) for i in sweep.summed]
        upstream = [_present(ct[i]) for i in sweep.seen]
        if self.checkpoints is None or not sweep.saved:
            outs = self._backward(sweep, state, inputs, upstream)
        else:
            outs = self._backward_by_segments(sweep, state, inputs, upstream)
        found: list[Value | None] = [None] * len(inputs)
        for i, value in zip((*sweep.moving, *sweep.summed, *sweep.stacked), outs, strict=True):
            found[i] = value
        return tuple(found)

    def _sweep(self, ct: Sequence[Value | None]) -> Sweep | None:
        """The body of the backward pass; None when nothing flows."""
        leaves, carries = self.body.inputs, self.num_carry
        upstream = [placeholder(f"u{i}", x.type) for i, x in enumerate(self.body.results)]
        active = [c is not None for c in ct]
        while True:  # a carry whose cotangent is zero at the end may get one from the steps before
            cts = [u if a else None for u, a in zip(upstream, active, strict=True)]
            grads = pullback(self.body.results, cts, leaves)
            grown = [a or (i < carries and grads[i] is not None) for i, a in enumerate(active)]
            if grown == active:
                break
            active = grown
        first = carries + self.num_consts
        moving = [i for i in range(carries) if active[i]]
        summed = [i for i in range(carries, first) if grads[i] is not None]
        stacked = [i for i in range(first, len(leaves)) if grads[i] is not None]
        totals = [placeholder(f"t{i}", leaves[i].type) for i in summed]
        results = [
            *(_or_zeros(grads[i], leaves[i]) for i in moving),
            *(total + _present(grads[i]) for total, i in zip(totals, summed, strict=True)),
            *(_present(grads[i]) for i in stacked),
        ]  # fmt: skip
        if not results:
            return None
        needed = used(leaves, results)
        same = [i < carries and self.body.results[i] == x for i, x in enumerate(leaves)]  # carries that never change
        saved = [i for i in range(carries) if needed[i] and not same[i]]
        shared = [i for i in range(first) if needed[i] and (i >= carries or same[i])]
        rows = [i for i in range(first, len(leaves)) if needed[i]]
        seen = [i for i in range(carries, len(ct)) if active[i]]
        step = make_graph(f"{self.body.name}_vjp", [
            *numbered("d", [upstream[i] for i in moving]), *numbered("t", totals),
            *numbered("k", [leaves[i] for i in shared]), *numbered("c", [leaves[i] for i in saved]),
            *numbered("x", [leaves[i] for i in rows]), *numbered("u", [upstream[i] for i in seen]),
        ], results)  # fmt: skip
        return Sweep(step, moving, summed, stacked, saved, shared, rows, seen)

    def _backward(
        self, sweep: Sweep, state: Sequence[Value], inputs: Sequence[Value], upstream: Sequence[Value]
    ) -> tuple[Value, ...]:
        """One scan in the opposite direction over the carries that entered each step."""
        entering: tuple[Value, ...] = ()
        if sweep.saved:
            body = self.body.returning(*self.body.results, *(self.body.inputs[i] for i in sweep.saved))
            entering = replace(self, body=body, checkpoints=None)(*inputs)[len(self.body.results) :]
        backward = ScanOp(sweep.step, self.length, len(state), len(sweep.shared), not self.reverse)
        outs: tuple[Value, ...] = backward(
            *state, *(inputs[i] for i in sweep.shared), *entering, *(inputs[i] for i in sweep.rows), *upstream
        )
        return outs

    def _backward_by_segments(
        self, sweep: Sweep, state: list[Value], inputs: Sequence[Value], upstream: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Keep the carries that enter each segment; a segment's other carries are computed again when it is swept."""
        assert self.checkpoints is not None
        carries, first = self.num_carry, self.num_carry + self.num_consts
        runs = []
        entry, consts = list(inputs[:carries]), inputs[carries:first]
        for run in segment_runs(self.length, self.checkpoints):
            rows = [self._cut(x, run) for x in inputs[first:]]
            segments = self._segments(*run[1:])
            body = segments.body.returning(*segments.body.results, *segments.body.inputs[:carries])
            outs = replace(segments, body=body)(*entry, *consts, *rows)
            runs.append((run, outs[len(self.body.results) :], rows))
            entry = list(outs[:carries])
        pieces: list[list[Value]] = []
        for run, anchors, rows in reversed(runs):
            cts = [self._cut(u, run) for u in upstream]
            segment = self._segment_backward(sweep, state, run[2], upstream)
            outs = ScanOp(segment, run[1], len(state), len(consts), not self.reverse)(
                *state, *consts, *anchors, *rows, *cts
            )
            state = list(outs[: len(state)])
            pieces.append([reshape(y, (run[1] * run[2], *y.shape[2:])) for y in outs[len(state) :]])
        if not self.reverse:
            pieces.reverse()
        return (*state, *(concat(column, 0) for column in zip(*pieces, strict=True)))

    def _segment_backward(self, sweep: Sweep, state: Sequence[Value], steps: Dim, upstream: Sequence[Value]) -> Graph:
        """(state, consts, carries on entry, rows, upstream rows) of one segment → (state, cotangents of its rows)."""
        graph = Graph("segment_vjp")
        first = self.num_carry + self.num_consts
        leaves = self.body.inputs
        inner_state = [graph.input(f"s{i}", x.type) for i, x in enumerate(state)]
        consts = [graph.input(f"k{i}", x.type) for i, x in enumerate(leaves[self.num_carry : first])]
        carries = [graph.input(f"c{i}", x.type) for i, x in enumerate(leaves[: self.num_carry])]
        rows = [graph.input(f"x{i}", _rows_of(x.type, steps)) for i, x in enumerate(leaves[first:])]
        cts = [graph.input(f"u{i}", _rows_of(x.type.drop(0), steps)) for i, x in enumerate(upstream)]
        inner = replace(self, length=steps, checkpoints=None)
        return graph.outputs(*inner._backward(sweep, inner_state, (*carries, *consts, *rows), cts))

    def segmented(self, *inputs: Value) -> tuple[Value, ...]:
        """The same as scans over segments of scans over steps, which is how the backward pass sees it."""
        assert self.checkpoints is not None
        first = self.num_carry + self.num_consts
        carries, consts, xs = list(inputs[: self.num_carry]), inputs[self.num_carry : first], inputs[first:]
        pieces: list[list[Value]] = []
        for run in segment_runs(self.length, self.checkpoints):
            outs = self._segments(*run[1:])(*carries, *consts, *(self._cut(x, run) for x in xs))
            carries = list(outs[: self.num_carry])
            pieces.append([reshape(y, (run[1] * run[2], *y.shape[2:])) for y in outs[self.num_carry :]])
        if self.reverse:
            pieces.reverse()
        return (*carries, *(concat(column, 0) for column in zip(*pieces, strict=True)))

    def _cut(self, x: Value, run: Run) -> Value:
        """The rows of a run of segments, [segments, steps, …]."""
        start, count, steps = run
        begin = self.length - start - count * steps if self.reverse else start
        part = narrow(x, 0, begin, count * steps)
        return reshape(part, (count, steps, *x.shape[1:]))

    def _segments(self, count: int, steps: Dim) -> ScanOp:
        """A scan over `count` segments of `steps` steps each."""
        inner = replace(self, length=steps, checkpoints=None)
        graph = Graph("segment")
        first = self.num_carry + self.num_consts
        formals = []
        for i, (name, leaf) in enumerate(zip(self.body.input_names, self.body.inputs, strict=True)):
            formals.append(graph.input(name, leaf.type if i < first else _rows_of(leaf.type, steps)))
        return replace(self, body=graph.outputs(*inner(*formals)), length=count, checkpoints=None)

    # --------------------------------------------------------------------------------------------------------- batching

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> tuple[Value, ...]:
        leaves, carries, first = self.body.inputs, self.num_carry, self.num_carry + self.num_consts
        flags = list(batched)
        names = [placeholder(f"b{i}", x.type.with_shape((size, *x.shape))) for i, x in enumerate(leaves)]
        while True:
            table = batch_values(
                self.body.results, {x: n for x, n, b in zip(leaves, names, flags, strict=True) if b}, size
            )
            grown = [b or (i < carries and self.body.results[i] in table) for i, b in enumerate(flags)]
            if grown == flags:
                break
            flags = grown
        results = []
        for i, x in enumerate(self.body.results):
            spread = i < carries and flags[i] and x not in table
            results.append(broadcast_to(x, (size, *x.shape)) if spread else table.get(x, x))
        starts = []
        for i, x in enumerate(inputs):
            if i < first:
                starts.append(broadcast_to(x, (size, *x.shape)) if flags[i] and not batched[i] else x)
            else:
                starts.append(moveaxis(x, 0, 1) if batched[i] else x)
        formals = [n if b else x for x, n, b in zip(leaves, names, flags, strict=True)]
        body = make_graph(self.body.name, list(zip(self.body.input_names, formals, strict=True)), results)
        outs = []
        for i, (x, y) in enumerate(zip(self.body.results, replace(self, body=body)(*starts), strict=True)):
            if i >= carries and x in table:
                outs.append(moveaxis(y, 0, 1))
            else:
                outs.append(y if i < carries and flags[i] else broadcast_to(y, (size, *y.shape)))
        return tuple(outs)

    @classmethod
    def samples(cls) -> list[Sample]:
        xs, weight = f64[5, 3], f64[3, 3]
        return [
            Sample(f64[3], weight, xs, body=_cell(), length=5, num_carry=1, num_consts=1),
            Sample(f64[3], weight, xs, body=_cell(), length=5, num_carry=1, num_consts=1, reverse=True),
            Sample(f64[3], weight, xs, body=_cell(), length=5, num_carry=1, num_consts=1, checkpoints=2),
            Sample(f64[3], weight, xs, body=_cell(), length=5, num_carry=1, num_consts=1, reverse=True, checkpoints=3),
            Sample(f64[3], weight, f64[0, 3], body=_cell(), length=0, num_carry=1, num_consts=1),
            Sample(i64[()], f64[()], f64[2], f64[4], body=_counter(), length=4, num_carry=2, num_consts=1),
            Sample(f64[4, 2], bool_[4], body=_mapped(), length=4, num_carry=0, num_consts=0),
        ]  # fmt: skip


def _dtype(x: Value, wide: bool) -> np.dtype[Any]:
    if wide and x.dtype.is_inexact:
        return np.dtype(np.complex128 if x.dtype.is_complex else np.float64)
    return x.dtype.np


def _keep(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def _or_zeros(x: Value | None, like: Value) -> Value:
    return zeros_like(like) if x is None else x


def _rows_of(kind: TensorType, count: Dim) -> TensorType:
    return kind.with_shape((count, *kind.shape))


def _present(x: Value | None) -> Value:
    assert x is not None
    return x


def segment_ends(length: Dim, count: int) -> list[Dim]:
    """One past the last step of each segment: ceil((k + 1)·length / count)."""
    return [floordiv(length * (k + 1) + (count - 1), count) for k in range(count)]


def segment_runs(length: Dim, count: int) -> list[Run]:
    """Segments as runs of equal length."""
    runs: list[Run] = []
    start: Dim = 0
    for end in segment_ends(length, count):
        steps = end - start
        if runs and runs[-1][2] == steps and not isinstance(steps, SymExpr):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, steps)
        else:
            runs.append((start, 1, steps))
        start = end
    return runs


def _cell() -> Graph:
    """tanh(c @ w + x), and the product with the row as y."""
    g = Graph("cell")
    c, w, x = g.input("c", f64[3]), g.input("w", f64[3, 3]), g.input("x", f64[3])
    new = (c @ w + x).tanh()
    return g.outputs(new, new * x)


def _counter() -> Graph:
    """An integer carry that counts, a float carry that it scales, and no dependence of y on the carries."""
    g = Graph("counter")
    n, c, k, x = g.input("n", i64[()]), g.input("c", f64[()]), g.input("k", f64[2]), g.input("x", f64[()])
    return g.outputs(n + 1, c.sin() * n.cast(f64) + k.sum(), k * x, n)


def _mapped() -> Graph:
    g = Graph("mapped")
    x, flag = g.input("x", f64[2]), g.input("flag", bool_[()])
    return g.outputs(flag.where(x * x, x.exp()))
