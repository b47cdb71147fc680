"""Sampling on a device: the likeliest token, or a draw by temperature, top-k, top-p and min-p.

Draws are as `Sampler` has them, from the same random numbers: the first token at which the running sum of weights, in
the order of tokens and in f64, exceeds a share of the sum of all. A device adds up in another order than the host,
which no draw shows unless a sum is within 1e-15 or so of where two tokens meet.

Nothing is sorted. The least logit that is kept is found bit by bit: of numbers in the order of floats, the largest one
so that enough tokens, or enough probability, are not below it. Each bit takes one sum over the vocabulary, in a turn of
a loop.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.arguments import untouched
from strata.core import f32, f64, i32, i64, sym, u32
from strata.mir import Graph, Value, constant
from strata.models.cached import ROW
from strata.models.weights import ops
from strata.runtime import CompiledGraph, Session

BITS: Final = 32  # of a logit
DRAW: Final = ("temperature", "min_p", "number", "top_k", "top_p")  # what is sent for each row


@untouched
class Chooser:
    """Graphs that choose tokens from logits on the device, and put them into their slots."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs: dict[tuple[bool, bool], CompiledGraph] = {}
        self._rows: CompiledGraph | None = None

    def graph(self, *, draws: bool, filters: bool = False) -> CompiledGraph:
        """Of the likeliest tokens; with `draws` also of those that are drawn, with `filters` by top-k and top-p."""
        key = (draws, filters)
        if key not in self._graphs:
            self._graphs[key] = Session(self._device).compile(choice(draws=draws, filters=filters))
        return self._graphs[key]

    @property
    def rows(self) -> CompiledGraph:
        """Some rows of logits."""
        if self._rows is None:
            graph = Graph("logits_of")
            logits = graph.input("logits", (sym("B", 1), sym("V", 1)), f32)
            graph.outputs(ops.take(logits, graph.input("which", (sym("R", 1),), i64), axis=0))
            self._rows = Session(self._device).compile(graph)
        return self._rows


def choice(*, draws: bool, filters: bool = False) -> Graph:
    """Tokens i32[B] from logits f32[B, V], -1 where the largest is not finite, and the slots with the new tokens."""
    graph = Graph("choose")
    batch, vocab = sym("B", 1), sym("V", 1)
    logits = graph.input("logits", (batch, vocab), f32)
    rows = graph.input("rows", (batch, len(ROW)), i64)
    tokens = graph.input("tokens", (sym("M", 1), 1, 1), i32)
    best = ops.argmax(logits, axis=1)
    high = ops.take_along_axis(logits, ops.reshape(best, (batch, 1)), axis=1)
    found: Value = best
    if draws:
        how = graph.input("draws", (batch, len(DRAW)), f64)
        heat, least, number, count, share = (ops.narrow(how, 1, at, 1) for at in range(len(DRAW)))
        weights = ops.exp((ops.cast(logits, f64) - ops.cast(high, f64)) / ops.maximum(heat, 1e-6))
        if filters:
            weights = _of_top_p(logits, _of_top_k(logits, weights, count), share)
        weights = ops.where(weights >= least, weights, 0.0)
        running = ops.cumsum(weights, axis=1)
        below = running <= number * ops.narrow(running, 1, vocab - 1, 1)
        place = ops.reduce_sum(ops.cast(below, i64), axes=(1,))
        drawn = ops.where(place < ops.dim_size(vocab), place, best)
        found = ops.where(ops.reshape(heat, (batch,)) > 0.0, drawn, best)
    is_good = ops.reshape(ops.isfinite(high), (batch,))
    chosen = ops.cast(ops.where(is_good, found, -1), i32)
    entering = ops.reshape(ops.maximum(chosen, 0), (batch, 1, 1))
    slots = ops.narrow(rows, 1, 0, 1)
    graph.outputs(chosen, ops.paged_update(tokens, entering, slots, ops.zeros((batch,), i64)))
    return graph


def _of_top_k(logits: Value, weights: Value, count: Value) -> Value:
    """Weights of so many of the largest logits, of equal ones the first; 0 keeps all."""
    keys, ones = _ordered(logits), ops.ones_like(weights)
    edge = _edge(keys, ones, count)
    rank = ops.cumsum(ops.cast(ops.equal(keys, edge), f64), axis=1)
    more = count - _total(ops.where(keys > edge, ones, 0.0))
    kept = (keys > edge) | (ops.equal(keys, edge) & (rank <= more)) | (count <= 0.0)
    return ops.where(kept, weights, 0.0)


def _of_top_p(logits: Value, weights: Value, share: Value) -> Value:
    """The largest of the weights, until they have a share of their sum."""
    keys = _ordered(logits)
    goal = share * _total(weights)
    edge = _edge(keys, weights, goal)
    rank = ops.cumsum(ops.cast(ops.equal(keys, edge) & (weights > 0.0), f64), axis=1)
    before = (
        _total(ops.where(keys > edge, weights, 0.0)) + (rank - 1.0) * weights
    )  # what equal ones have that are first
    kept = (keys > edge) | (ops.equal(keys, edge) & (before < goal)) | (share >= 1.0)
    return ops.where(kept, weights, 0.0)


def _total(x: Value) -> Value:
    return ops.insert_axis(ops.reduce_sum(x, axes=(1,)), 1)


def _ordered(x: Value) -> Value:
    """Whole numbers in the order of floats, u32[B, V]."""
    bits = ops.bitcast(ops.where(ops.equal(x, 0.0), 0.0, x), u32)  # -0.0 is 0.0
    sign = np.uint32(1 << (BITS - 1))
    return ops.where(bits < sign, bits ^ sign, ~bits)


def _edge(keys: Value, sizes: Value, goal: Value) -> Value:
    """The largest number so that the sizes of all keys that are not below it reach a goal, u32[B, 1]."""
    none = ops.cast(ops.zeros_like(goal), u32)

    def decide(found: Value, bit: Value) -> tuple[Value, tuple[()]]:
        tried = found + bit
        enough = _total(ops.where(keys >= tried, sizes, 0.0)) >= goal
        return ops.where(enough, tried, found), ()

    bits = constant(np.left_shift(np.uint32(1), np.arange(BITS, dtype=np.uint32)[::-1]))
    last, _ = ops.scan(decide, none, bits)
    return last
