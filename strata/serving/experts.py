"""A cache of mixture-of-experts weights: the experts that are used most stay in memory.

Results do not depend on it: an expert that is not in memory is fetched for the step that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import f32, i64, sym
from strata.errors import OptionError
from strata.mir import Graph
from strata.runtime import CompiledGraph, Session

ops: Any = functions  # found by name, also where a module has the same one


@dataclass(frozen=True)
class Moves:
    """What a refresh changed: experts that were loaded and that were dropped, lowest first."""

    came: tuple[int, ...] = ()
    went: tuple[int, ...] = ()


class ExpertPool:
    """Which of `experts` are in memory: `budget` of them, at first the lowest, chosen again every `every` steps."""

    def __init__(self, experts: int, budget: int, *, every: int = 1) -> None:
        if experts < 1 or budget < 0 or every < 1:
            raise OptionError(
                f"experts: a budget of {budget} for {experts}, looked at every {every} steps, makes no sense",
                code="O612",
            )
        self.experts, self.budget, self.every = experts, min(budget, experts), every
        self._resident = set(range(self.budget))
        self.refreshes = self.came = self.went = 0

    @property
    def resident(self) -> tuple[int, ...]:
        """The experts in memory, lowest first."""
        return tuple(sorted(self._resident))

    @property
    def mask(self) -> np.ndarray:
        """Which experts are in memory, bool[experts]."""
        found = np.zeros(self.experts, bool)
        found[list(self._resident)] = True
        return found

    def is_due(self, step: int, *, is_prefill: bool = False) -> bool:
        """Whether the experts are chosen again in this step; never where all of them are in memory."""
        return self.budget < self.experts and (is_prefill or step % self.every == 0)

    def refresh(self, ids: np.ndarray) -> Moves:
        """Keep the most used experts, of equals the lower; others stay unless their place is needed."""
        counts = hit_counts(ids, self.experts)
        order = np.lexsort((np.arange(self.experts), -counts))
        wanted = [int(e) for e in order[: self.budget] if counts[e] > 0]
        came = sorted(e for e in wanted if e not in self._resident)
        leaving = sorted((counts[e], -e) for e in self._resident - set(wanted))[: len(came)]
        went = sorted(-e for _, e in leaving)
        self._resident = (self._resident - set(went)) | set(came)
        self.refreshes, self.came, self.went = self.refreshes + 1, self.came + len(came), self.went + len(went)
        return Moves(tuple(came), tuple(went))


def hit_counts(ids: np.ndarray, experts: int) -> np.ndarray:
    """How often each expert was used, i64[experts]."""
    flat = np.asarray(ids).reshape(-1)
    if flat.dtype.kind not in "iu":
        flat = flat.astype(np.int64) if not flat.size else flat
    if flat.dtype.kind not in "iu":
        raise OptionError(f"experts: ids are integers, got {flat.dtype}", code="O612")
    if flat.size and not (flat.min() >= 0 and flat.max() < experts):
        raise OptionError(f"experts: {flat.min()} to {flat.max()} are not all among {experts}", code="O612")
    return np.bincount(flat, minlength=experts)


def merged_mask(pools: Sequence[ExpertPool]) -> np.ndarray:
    """Experts that are in memory in some layer, bool[experts]; `[p.mask for p in pools]` is each layer's."""
    found: np.ndarray = np.logical_or.reduce([p.mask for p in pools])
    return found


def affordable_experts(free: int, *, bytes_per_expert: int, layers: int, experts: int, reserve: int = 0) -> int:
    """How many experts of each layer fit into free memory, with `reserve` bytes left free."""
    if bytes_per_expert < 1 or layers < 1:
        raise OptionError(f"experts: {bytes_per_expert} bytes in {layers} layers are no experts", code="O612")
    return max(0, min((free - reserve) // (bytes_per_expert * layers), experts))


Fetch = Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]


class ExpertStore:
    """The feed-forward of one layer's experts; a pool says which of them are in memory.

    `fetch(expert)` gives its matrices, gate and up [K, N] and down [N, K], from wherever they are: a mapped file, or
    blocks that are decoded. `run` gives the same result, whichever experts are in memory.
    """

    def __init__(self, pool: ExpertPool, fetch: Fetch, *, device: str = "cpu") -> None:
        self.pool, self._fetch = pool, fetch
        self.fetched = 0  # how often an expert had to be fetched
        self._slots = {expert: at for at, expert in enumerate(pool.resident)}
        gate, up, down = fetch(0)
        if gate.ndim != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
            shapes = ", ".join(str(list(w.shape)) for w in (gate, up, down))
            raise OptionError(f"experts: gate, up and down of {shapes} do not fit", code="O612")
        self._stacks = [np.empty((max(1, pool.budget), *w.shape), np.float32) for w in (gate, up, down)]
        for expert, at in self._slots.items():
            self._put(expert, at)
        self._graph = _feed_forward(*gate.shape, device=device)
        self._step = 0

    def _put(self, expert: int, at: int) -> None:
        self.fetched += 1
        for stack, w in zip(self._stacks, self._fetch(expert), strict=True):
            stack[at] = w

    def run(self, x: np.ndarray, ids: np.ndarray, *, is_prefill: bool = False) -> np.ndarray:
        """Rows f32[M, K] through the experts i64[M] that each is routed to: f32[M, K]."""
        ids = np.asarray(ids, np.int64)
        if self.pool.is_due(self._step, is_prefill=is_prefill):
            moves = self.pool.refresh(ids)
            for gone, new in zip(moves.went, moves.came, strict=False):
                self._slots[new] = self._slots.pop(gone)
                self._put(new, self._slots[new])
        self._step += 1
        out = np.empty_like(x)
        here = np.isin(ids, list(self._slots))
        if here.any():
            places = np.array([self._slots[int(e)] for e in ids[here]], np.int64)
            out[here] = self._run(x[here], places, self._stacks)
        away = ~here
        if away.any():
            missing, places = np.unique(ids[away], return_inverse=True)
            found = [self._fetch(int(e)) for e in missing]
            self.fetched += len(missing)
            stacks = [np.stack([np.asarray(f[i], np.float32) for f in found]) for i in range(3)]
            out[away] = self._run(x[away], places.astype(np.int64), stacks)
        return out

    def _run(self, x: np.ndarray, places: np.ndarray, stacks: Sequence[np.ndarray]) -> np.ndarray:
        gate, up, down = stacks
        (y,) = self._graph.run(x=np.ascontiguousarray(x), ids=places, gate=gate, up=up, down=down)
        return y


def _feed_forward(k: int, n: int, *, device: str) -> CompiledGraph:
    g = Graph("experts")
    rows, slots = sym("M", 1), sym("E", 1)
    x, ids = g.input("x", (rows, k), f32), g.input("ids", (rows,), i64)
    gate, up, down = (g.input(name, (slots, *shape), f32) for name, shape in
                      (("gate", (k, n)), ("up", (k, n)), ("down", (n, k))))  # fmt: skip
    inner = ops.silu(ops.grouped_matmul(x, gate, ids)) * ops.grouped_matmul(x, up, ids)
    g.outputs(ops.grouped_matmul(inner, down, ids))
    return Session(device).compile(g)
