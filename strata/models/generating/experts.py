"""A cache of mixture-of-experts weights: the experts that are used most stay in memory.

Results do not depend on it: an expert that is not in memory is fetched for the step that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import f32, i64, new_lock, sym
from strata.errors import OptionError
from strata.io import release_pages
from strata.mir import Graph
from strata.runtime import CompiledGraph, ResidencyStats, Session

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
        raise OptionError(f"experts: {bytes_per_expert} bytes in {layers} layers do not make up an expert", code="O612")
    return max(0, min((free - reserve) // (bytes_per_expert * layers), experts))


Fetch = Callable[[int], Sequence[np.ndarray]]


class ExpertStore:
    """The feed-forward of one layer's experts; a pool says which of them are in memory.

    `fetch(expert)` gives its matrices, gate and up [K, N] and down [N, K], from wherever they are: a mapped file, or
    blocks that are decoded. `run` gives the same result, whichever experts are in memory: others are fetched into one
    of `spare` slots for the run that needs them. `feed_forward(slots)` makes a graph of inputs x, ids, and what
    `fetch` gives, stacked, for feed-forwards of another form.
    """

    def __init__(
        self, pool: ExpertPool, fetch: Fetch, *, spare: int = 1, device: str = "cpu",
        feed_forward: Callable[[int], CompiledGraph] | None = None,
    ) -> None:  # fmt: skip
        if spare < 1:
            raise OptionError(f"experts: {spare} spare slots are none", code="O612")
        self.pool, self._fetch, self._lock = pool, fetch, new_lock()
        self.fetched = 0  # how often an expert had to be fetched
        self._spare = min(spare, pool.experts - pool.budget)
        slots = pool.budget + self._spare
        self._slots = {expert: at for at, expert in enumerate(pool.resident)}
        self._graph = feed_forward(slots) if feed_forward is not None else _swiglu(fetch, slots, device)
        _, _, *self._names = self._graph.inputs
        kinds = [self._graph.inputs[name] for name in self._names]
        self._stacks = [np.zeros(k.shape, k.dtype.np) for k in kinds]
        self._seen = _Seen()
        for expert, at in self._slots.items():
            self._put(expert, at)
        self._step = 0

    @property
    def nbytes(self) -> int:
        """The memory of the slots."""
        return sum(stack.nbytes for stack in self._stacks)

    def _put(self, expert: int, at: int) -> None:
        self.fetched += 1
        slots = self.pool.budget + self._spare
        for stack, w in zip(self._stacks, self._fetch(expert), strict=True):
            self._seen.moved += w.nbytes
            stack.reshape(slots, -1)[at].reshape(w.shape)[...] = w
            release_pages(w)

    def run(self, x: np.ndarray, ids: np.ndarray, *, is_prefill: bool = False) -> np.ndarray:
        """Rows f32[M, K] through the experts i64[M] that each is routed to: f32[M, K]."""
        ids = np.asarray(ids, np.int64)
        with self._lock:
            counts = hit_counts(ids, self.pool.experts)
            self._seen.count(counts, self.pool.mask)
            if self.pool.is_due(self._step, is_prefill=is_prefill):
                moves = self.pool.refresh(ids)
                for gone, new in zip(moves.went, moves.came, strict=False):
                    self._slots[new] = self._slots.pop(gone)
                    self._put(new, self._slots[new])
            self._step += 1
            missing = [int(e) for e in np.flatnonzero(counts) if int(e) not in self._slots]
            if not missing:
                return self._run(x, ids, self._slots)
            return self._in_turns(x, ids, missing)

    def _in_turns(self, x: np.ndarray, ids: np.ndarray, missing: Sequence[int]) -> np.ndarray:
        """Those in memory and as many others as there are spare slots; then as many others again."""
        out, here = np.empty_like(x), dict(self._slots)
        for first in range(0, len(missing), self._spare):
            for at, expert in enumerate(missing[first : first + self._spare], self.pool.budget):
                self._put(expert, at)
                here[expert] = at
            rows = np.isin(ids, list(here))
            if rows.any():
                out[rows] = self._run(x[rows], ids[rows], here)
            here = {}
        return out

    def _run(self, x: np.ndarray, ids: np.ndarray, slots: Mapping[int, int]) -> np.ndarray:
        places = np.zeros(self.pool.experts, np.int64)
        places[list(slots)] = list(slots.values())
        feeds = {"x": np.ascontiguousarray(x), "ids": places[ids]}
        (y,) = self._graph.run({**feeds, **dict(zip(self._names, self._stacks, strict=True))})
        return y

    def take_stats(self) -> ResidencyStats:
        """What was routed and moved since the last time."""
        with self._lock:
            seen, self._seen = self._seen, _Seen()
        return ResidencyStats(
            (seen.hits,), (seen.misses,), (seen.hit_calls,), (seen.miss_calls,), (seen.moved,)
        )  # fmt: skip


class _Seen:
    """What a store has counted."""

    def __init__(self) -> None:
        self.hits = self.misses = self.hit_calls = self.miss_calls = self.moved = 0

    def count(self, counts: np.ndarray, mask: np.ndarray) -> None:
        self.hits += int(counts[mask].sum())
        self.misses += int(counts[~mask].sum())
        self.hit_calls += int(np.count_nonzero(counts[mask]))
        self.miss_calls += int(np.count_nonzero(counts[~mask]))


def _swiglu(fetch: Fetch, slots: int, device: str) -> CompiledGraph:
    gate, up, down = fetch(0)
    if gate.ndim != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
        shapes = ", ".join(str(list(w.shape)) for w in (gate, up, down))
        raise OptionError(f"experts: gate, up and down of {shapes} do not fit", code="O612")
    (k, n), rows = gate.shape, sym("M", 1)
    g = Graph("experts")
    x, ids = g.input("x", (rows, k), f32), g.input("ids", (rows,), i64)
    stacks = (
        g.input(name, (slots, *shape), f32) for name, shape in (("gate", (k, n)), ("up", (k, n)), ("down", (n, k)))
    )
    first, second, last = stacks
    inner = ops.silu(ops.grouped_matmul(x, first, ids)) * ops.grouped_matmul(x, second, ids)
    return Session(device).compile(g.outputs(ops.grouped_matmul(inner, last, ids)))


class ExpertStores:
    """The stores of a decoder, one for each layer with experts, made when they are first needed."""

    def __init__(self, layers: Sequence[str], make: Callable[[str], ExpertStore]) -> None:
        self.layers, self._make = tuple(layers), make  # by how the names of their weights begin
        self._stores: dict[str, ExpertStore] = {}
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> ExpertStore:
        return self._store(self.layers[layer])

    def __iter__(self) -> Iterator[ExpertStore]:
        return map(self._store, self.layers)

    def _store(self, at: str) -> ExpertStore:
        with self._lock:
            if at not in self._stores:
                self._stores[at] = self._make(at)
            return self._stores[at]

    def run(self, at: str, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Rows through the experts of a layer."""
        return self._store(at).run(rows, ids)

    @property
    def nbytes(self) -> int:
        """The memory of all slots."""
        return sum(store.nbytes for store in self)

    def take_stats(self) -> ResidencyStats:
        """What was routed and moved since the last time, by layer."""
        return ResidencyStats.joined([store.take_stats() for store in self])
