"""Token sampling: temperature, top-k, top-p and min-p, then one draw per row from an explicit key."""

from __future__ import annotations

import numpy as np

from strata.core import Dim, TensorType, f32, i64, known_le, u32
from strata.errors import OptionError, RunError
from strata.mir import Op, Sample, Value, constant, draw, function, op
from strata.ops.base.creation import iota
from strata.ops.base.frontend import Operand, as_value, same_shape, to_inexact
from strata.ops.base.movement import broadcast_to, insert_axis, reshape
from strata.ops.elementwise.logic import cast, logical_and, where
from strata.ops.elementwise.math import exp
from strata.ops.indexing.indexing import take_along_axis
from strata.ops.indexing.sorting import argmax, argsort, topk
from strata.ops.random import RandomBits, philox4x32
from strata.ops.reduce.cumulative import cumsum
from strata.ops.reduce.reduce import max_, sum_

COLDEST = 1e-6  # at and below this temperature the choice is the maximum


@op("sample")
class SampleToken(Op):
    """An id for each row of logits [.., V], from keys u32[.., 2] whose leading axes are those of the logits.

    Kept are the `top_k` largest (ties go to the smaller id), of these the shortest prefix by falling probability that
    reaches `top_p`, of these all with at least `min_p` times the largest probability. The id is the first, in the order
    of ids, whose running probability exceeds a uniform number r in [0, 1), so that an id of probability 0 is never
    drawn. `greedy`, or a temperature of 0, takes the maximum and needs no key.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    greedy: bool = False

    differentiable = False

    @property
    def takes_maximum(self) -> bool:
        return self.greedy or self.temperature <= COLDEST

    def infer(self, logits: TensorType, *key: TensorType) -> TensorType:
        def option(ok: bool, message: str) -> None:
            self.require(ok, message, code="O236", error=OptionError)

        option(self.top_k >= 0, f"top_k {self.top_k} is negative")
        option(0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]")
        option(0 <= self.min_p <= 1, f"min_p {self.min_p} is not in 0..1")
        option(self.temperature >= 0, f"temperature {self.temperature} is negative")
        self.require_dtype(logits.dtype.is_float, f"needs float logits, got {logits}", code="D104")
        self.require(logits.ndim >= 1 and logits.shape[-1] != 0, f"needs logits [.., V], got {logits}", code="S274")
        self.require(
            len(key) == (not self.takes_maximum),
            f"takes {'1 input' if self.takes_maximum else '2 inputs'}",
            code="S275",
        )
        for k in key:
            self.require_dtype(k.dtype is u32, f"a key is u32[2], got {k}", code="D222")
            lead = k.shape[:-1]
            fits = k.ndim >= 1 and k.shape[-1] == 2 and same_shape(lead, logits.shape[:-1][: len(lead)])
            self.require(fits, f"keys {k} do not lead the rows of {logits}", code="S272")
        return TensorType(i64, logits.shape[:-1])

    def numpy(self, logits: np.ndarray, *key: np.ndarray) -> np.ndarray:
        rows = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
        if np.isnan(rows).any() or (rows == np.inf).any() or (rows == -np.inf).all(-1).any():
            bad = int(np.argmax(np.isnan(rows).any(-1) | (rows == np.inf).any(-1) | (rows == -np.inf).all(-1)))
            raise RunError(f"sample: row {bad} of the logits has a NaN, an infinity or no finite entry", code="X220")
        if self.takes_maximum:
            return rows.argmax(-1).reshape(logits.shape[:-1])
        keys = key[0].reshape(-1, 2)
        count = len(rows) // max(len(keys), 1)
        numbers = np.arange(count, dtype=np.uint64)
        words = np.array(
            [np.stack(philox4x32((numbers // 4, 0, 0, 0), tuple(k)))[numbers % 4, np.arange(count)] for k in keys]
        )
        ids = [self._choose(row, word) for row, word in zip(rows, words.reshape(-1), strict=True)]
        return np.array(ids, np.int64).reshape(logits.shape[:-1])

    def _choose(self, row: np.ndarray, word: int) -> int:
        order = np.argsort(-row, kind="stable")
        kept = order[: self.top_k] if 0 < self.top_k < len(row) else order
        p = np.exp((row[kept] - row[kept[0]]) / self.temperature)
        p /= p.sum()
        last = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1 if self.top_p < 1 else len(p)
        chosen = sorted(
            (int(i), q) for i, q in zip(kept[:last], p[:last], strict=True) if q >= self.min_p * p[0] and q > 0
        )
        goal, running = (int(word) >> 8) * 2.0**-24 * sum(q for _, q in chosen), 0.0
        for i, q in chosen:
            running += q
            if running > goal:
                return i
        return chosen[-1][0]

    def decompose(self, logits: Value, *key: Value) -> Value:
        wide = cast(logits, f32)
        if self.takes_maximum:
            return argmax(wide, -1)
        size = logits.shape[-1]
        limited = self.top_k > 0 and not known_le(size, self.top_k)
        scores, ids = wide, None
        if limited or self.top_p < 1:
            scores, ids = topk(wide, self.top_k if limited else size.__index__())
        high = max_(scores, -1, keepdims=True)
        weights = exp((scores - high) * (1 / self.temperature))
        keep = weights > 0.0
        if self.min_p > 0:
            keep = logical_and(keep, weights >= self.min_p)
        if self.top_p < 1:
            before = cumsum(weights, -1, exclusive=True)
            keep = logical_and(keep, before < sum_(weights, -1, keepdims=True) * self.top_p)
        weights = where(keep, weights, constant(0, f32))
        if ids is not None:
            order = argsort(ids, -1)
            ids, weights = take_along_axis(ids, order), take_along_axis(weights, order)
        running = cumsum(weights, -1)
        rows = logits.shape[len(key[0].shape) - 1 : -1]
        total = sum_(weights, -1, keepdims=True)
        beyond = running > insert_axis(uniform_rows(key[0], rows), -1) * total
        place = reshape(iota((weights.shape[-1],), 0, i64), (*(1,) * (weights.ndim - 1), weights.shape[-1]))
        last = max_(where(weights > 0.0, place, constant(0, i64)), -1, keepdims=True)
        first = argmax(cast(beyond, f32), -1, keepdims=True)
        found = where(max_(cast(beyond, f32), -1, keepdims=True) > 0.0, first, last)
        chosen = found if ids is None else take_along_axis(ids, found)
        return reshape(chosen, logits.shape[:-1])

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(*(x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True)))

    @classmethod
    def samples(cls) -> list[Sample]:
        key = np.array([3, 4], np.uint32)
        logits = draw(f32[3, 6], distinct=True)
        ties = np.array([[1, 1, 1, -np.inf], [0, 2, 2, 2]], np.float32)
        return [
            Sample(logits, key), Sample(logits, key, top_k=3), Sample(logits, key, top_p=0.7, temperature=0.5),
            Sample(logits, key, top_k=4, top_p=0.8, min_p=0.1), Sample(logits, greedy=True),
            Sample(logits, temperature=0.0), Sample(f32[5], key), Sample(f32[0, 3], key),
            Sample(f32[2, 1], key, top_p=0.5),
            Sample(f32[2, 2, 4], np.array([[1, 2], [3, 4]], np.uint32)), Sample(ties, key, top_k=2),
        ]  # fmt: skip


def uniform_rows(key: Value, rows: tuple[Dim, ...]) -> Value:
    """One uniform number for each row, from one key or a batch of keys."""
    return cast(RandomBits(rows)(key) >> constant(8, u32), f32) * 2.0**-24


@function()
def sample(
    logits: Operand, key: Operand | None = None, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    temperature: float = 1.0, greedy: bool = False,
) -> Value:  # fmt: skip
    """An id for each row of logits. Without `greedy`, or a temperature of 0, it needs a key: fold in the step for a
    stream."""
    chosen = SampleToken(top_k, float(top_p), float(min_p), float(temperature), greedy)
    rows = to_inexact(as_value(logits))
    if chosen.takes_maximum:
        return chosen(rows)
    if key is None:
        raise OptionError("sample: needs a key to draw from", code="O237", fix="greedy=True, or random.key(seed)")
    return chosen(rows, as_value(key))
