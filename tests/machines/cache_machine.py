"""Caches of compiled graphs: what is asked for is what is given, whatever was asked for before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata import ops
from strata.config import using
from strata.core import sym
from strata.errors import OptionError, UnknownNameError
from strata.mir import Graph
from strata.runtime import (
    BucketedCompileCache,
    CompileCache,
    CompiledGraph,
    CompileOptions,
    DynamicDimCompileCache,
)
from tests.machines.programs import same, whole_numbers

SEEDS = st.integers(0, 999)
FACTORS = st.integers(2, 5)
OPTIONS = (
    None,
    CompileOptions(threads=1),
    CompileOptions(threads=2),
    CompileOptions(fusion=False),
    CompileOptions(exact=False),
    CompileOptions(threads=2, exact=False),
)
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"check_indices": True}, {"deterministic": False}, {"num_threads": 1})
CODE = ("check_indices", "deterministic")  # settings that decide the code


def key_of(options: CompileOptions | None, settings: dict[str, Any]) -> tuple[Hashable, ...]:
    """All that tells one entry from another beside what the caller calls it."""
    chosen = options or CompileOptions()
    return (chosen.threads, chosen.fusion, chosen.exact, *(settings.get(name) for name in CODE))


def scaled(factor: int, shape: tuple[Any, ...] = (3,)) -> Graph:
    g = Graph("scaled")
    return g.outputs(g.input("x", shape) * float(factor) + g.param("w", ()))


class Entry:
    """A compiled graph that a cache gave, what it multiplies by, and what was set on it."""

    def __init__(self, compiled: CompiledGraph, factor: int) -> None:
        self.compiled, self.factor = compiled, factor
        self.w: float | None = None

    def set(self, value: float) -> None:
        self.compiled.set_param("w", np.float32(value))
        self.w = value

    def check(self, seed: int, shape: tuple[int, ...] = (3,)) -> None:
        x = whole_numbers(seed, shape)
        if self.w is None:
            try:
                self.compiled.run(x=x)
            except UnknownNameError:
                return
            raise AssertionError("a parameter has a value that nobody gave it")
        same(self.compiled.run(x=x), [x * self.factor + np.float32(self.w)])


class CompileCacheMachine(RuleBasedStateMachine):
    """A table of entries by key, options and settings, the next to go first."""

    @initialize(capacity=st.integers(1, 4), policy=st.sampled_from(["lru", "fifo"]))
    def start(self, capacity: int, policy: str) -> None:
        self.cache = CompileCache("cpu", capacity, policy)
        self.capacity, self.policy = capacity, policy
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()

    @rule(
        key=st.sampled_from([1, 2, "1"]),
        options=st.sampled_from(OPTIONS),
        settings=st.sampled_from(SETTINGS),
        factor=FACTORS,
        w=st.none() | st.integers(-3, 3),
        seed=SEEDS,
    )
    def get(
        self,
        key: Hashable,
        options: CompileOptions | None,
        settings: dict[str, Any],
        factor: int,
        w: int | None,
        seed: int,
    ) -> None:
        name = (key, key_of(options, settings))
        with using(**settings):
            assert self.cache.contains(key, options) == (name in self.entries)
            made = self.cache.get_or_compile(key, lambda: scaled(factor), options)
            if name not in self.entries:
                self.entries[name] = Entry(made, factor)
                while len(self.entries) > self.capacity:
                    self.entries.popitem(last=False)
            elif self.policy == "lru":
                self.entries.move_to_end(name)
            entry = self.entries[name]
            assert made is entry.compiled
            assert made.options.threads == (options or CompileOptions()).threads
            if w is not None:
                entry.set(w)
            entry.check(seed)

    @invariant()
    def same_size(self) -> None:
        if hasattr(self, "cache"):
            assert len(self.cache) == len(self.entries)


class SizesCacheMachine(RuleBasedStateMachine):
    """Executables of one template for each model, by key, options and settings."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.cache = DynamicDimCompileCache("cpu", capacity)
        self.capacity = capacity
        self.templates: dict[Hashable, int] = {}  # factors
        self.entries: OrderedDict[Hashable, tuple[Entry, int]] = OrderedDict()

    @rule(
        key=st.sampled_from([1, 2, "1"]),
        n=st.integers(1, 3),
        model=st.sampled_from(["a", "b"]),
        options=st.sampled_from(OPTIONS),
        settings=st.sampled_from([SETTINGS[0], SETTINGS[1], SETTINGS[3]]),  # no more than templates are kept for
        factor=FACTORS,
        w=st.none() | st.integers(-3, 3),
        seed=SEEDS,
    )
    def get(
        self,
        key: Hashable,
        n: int,
        model: str,
        options: CompileOptions | None,
        settings: dict[str, Any],
        factor: int,
        w: int | None,
        seed: int,
    ) -> None:
        name = (model, key, key_of(options, settings))
        template = (model, key_of(options, settings)[1:])  # made once, for any number of threads

        def ask() -> CompiledGraph:
            return self.cache.get_or_specialize(
                key, {"n": n}, lambda: scaled(factor, (sym("n", 1, 3),)), options, model
            )

        with using(**settings):
            assert self.cache.contains(key, options, model) == (name in self.entries)
            if name in self.entries and self.entries[name][1] != n:
                self.entries.move_to_end(name)
                _refused(ask, "O414")
                return
            made = ask()
            if name not in self.entries:
                self.entries[name] = (Entry(made, self.templates.setdefault(template, factor)), n)
                while len(self.entries) > self.capacity:
                    self.entries.popitem(last=False)
            self.entries.move_to_end(name)
            entry, _ = self.entries[name]
            assert made is entry.compiled
            assert made.options.threads == (options or CompileOptions()).threads
            if w is not None:
                entry.set(w)
            entry.check(seed, (n,))


def _refused(ask: Callable[[], object], code: str) -> None:
    with pytest.raises(OptionError) as refusal:
        ask()
    assert refusal.value.code == code


def _table(upper: int) -> Graph:
    g = Graph("bucket")
    x, y, t = g.input("x", (upper, 3)), g.input("y", (upper, 3)), g.input("t", (7, 2))
    return g.outputs(x * 2.0, x.T - 1.0, ops.sum(y, 0), x + ops.sum(y, 0, keepdims=True), t * 3.0)


class BucketMachine(RuleBasedStateMachine):
    """Rows that are padded to the bucket: results are those of the rows alone, or the call is refused."""

    @initialize(options=st.sampled_from(OPTIONS))
    def start(self, options: CompileOptions | None) -> None:
        self.cache = BucketedCompileCache("cpu", [range(1, 4), (4, 8)], options)
        self.used: set[int] = set()

    @rule(
        rows=st.integers(1, 9),
        pads_y=st.booleans(),
        seed=SEEDS,
        asked=st.none() | st.lists(st.integers(0, 1), min_size=3, max_size=5),
    )
    def run_padded(self, rows: int, pads_y: bool, seed: int, asked: list[int] | None) -> None:
        upper = 3 if rows < 4 else 7
        x, t = whole_numbers(seed, (rows, 3)), whole_numbers(seed + 1, (7, 2))
        y = whole_numbers(seed + 2, (rows if pads_y else upper, 3))
        given = [("x", x, 3), ("y", y, 3 if pads_y else None), ("t", t, None)]
        if rows > 7:
            assert self.cache.run_padded(rows, rows, _table, given) is None
            return
        self.used.add(upper)
        if pads_y:
            _refused(lambda: self.cache.run_padded(rows, rows, _table, given, asked), "O408")
            return
        found = self.cache.run_padded(rows, rows, _table, given, asked)
        assert found is not None
        assert found[0] == upper
        padded = np.concatenate([x, np.zeros((upper - rows, 3), np.float32)])
        whole = [padded * 2, padded.T - 1, y.sum(0), padded + y.sum(0, keepdims=True), t * 3]
        rows_on = {0: 0, 1: 1, 3: 0}
        wanted = []
        for i, array in enumerate(whole):
            is_cut = asked is None or (i < len(asked) and asked[i])
            axis = rows_on.get(i, 0 if asked is not None and array.shape[0] == upper else None)
            wanted.append(array if not is_cut or axis is None else array.take(range(rows), axis))
        same(found[1], wanted, (rows, asked))

    @invariant()
    def same_count(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.compiled_count() == len(self.used)
