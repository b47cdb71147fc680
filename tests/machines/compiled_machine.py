"""Compiled graphs: parameters, clones, extents, kept and fed values, runs in every form, on any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.config import using
from strata.errors import OptionError, StrataError, SymbolError, UnknownNameError
from strata.runtime import CompiledGraph, Session
from tests.machines.programs import BOUNDS, PROGRAMS, Arrays, Program, same, shaped, whole_numbers

SEEDS = st.integers(0, 999)
PICK = st.integers(0, 5)  # one of the graphs that are there
FIXED = {"n": 4, "b": 2}
MOST = 5  # graphs at a time


class Model:
    """What a compiled graph is: its program, and what was set on it."""

    def __init__(self, program: Program, fixed: Mapping[str, int]) -> None:
        self.program, self.fixed = program, fixed
        self.params: dict[str, np.ndarray] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.fed: dict[str, int] = {}
        self.active: dict[str, int] = {}
        self.last: list[np.ndarray] | None = None

    def clone(self) -> Model:
        made = Model(self.program, self.fixed)
        made.params, made.kept, made.fed = dict(self.params), dict(self.kept), dict(self.fed)
        return made

    @property
    def extent_is_used(self) -> bool:
        return bool(self.active) and not self.program.mixes & self.active.keys()

    def sizes(self, arrays: Arrays) -> dict[str, int]:
        """Sizes of the symbols; SymbolError where arrays and parameters disagree."""
        found: dict[str, int] = {}
        for name, shape in (*self.program.inputs.items(), *self.program.params.items()):
            for declared, actual in zip(shape, arrays[name].shape, strict=True):
                if isinstance(declared, str) and found.setdefault(declared, actual) != actual:
                    raise SymbolError(name)
        return found

    def outcome(self, given: Arrays, into: list[np.ndarray] | None) -> list[np.ndarray]:
        """What a run gives, or the error it raises; `into` is what lies where results are written."""
        if self.program.params.keys() - self.params.keys():
            raise UnknownNameError("parameter")
        arrays = {**self.kept, **given, **self.params}
        if self.program.inputs.keys() - arrays.keys():
            raise UnknownNameError("input")
        sizes = self.sizes(arrays)
        if self.extent_is_used and any(actual > sizes[axis] for axis, actual in self.active.items()):
            raise OptionError("extent")
        made = self.program.expected(arrays)
        if self.extent_is_used:
            made = [self._front(i, whole, into) for i, whole in enumerate(made)]
        if into is None:
            self.last = [a.copy() for a in made]
        for name, output in self.fed.items():
            self.kept[name] = made[output].copy()
        return made

    def _front(self, number: int, whole: np.ndarray, into: list[np.ndarray] | None) -> np.ndarray:
        before = into if into is not None else self.last
        fits = before is not None and before[number].shape == whole.shape
        made = before[number].copy() if before is not None and fits else np.zeros_like(whole)
        cut = tuple(
            slice(self.active.get(d)) if isinstance(d, str) else slice(None) for d in self.program.outputs[number]
        )
        made[cut] = whole[cut]
        return made


class CompiledGraphMachine(RuleBasedStateMachine):
    """A compiled graph and its clones, each beside its own model."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[tuple[CompiledGraph, Model]] = []
        self.earlier: list[tuple[np.ndarray, np.ndarray]] = []  # results, and what they were

    @initialize(
        program=st.sampled_from(PROGRAMS),
        is_fixed=st.booleans(),
        threads=st.sampled_from([None, None, 1, 2]),
        device=st.sampled_from(["cpu", "cpu", "cpu", "reference"]),
        is_ready=st.sampled_from([True, True, False]),
    )
    def compile(self, program: Program, is_fixed: bool, threads: int | None, device: str, is_ready: bool) -> None:
        fixed = {s: FIXED[s] for s in program.symbols} if is_fixed else {}
        compiled = Session(device).compile(program.graph(), dim_binding=fixed or None, threads=threads)
        self.graphs = [(compiled, Model(program, fixed))]
        self.sizes = {s: fixed.get(s, 3) for s in program.symbols}
        if is_ready:
            self.set_params(0, 0)

    def _at(self, pick: int) -> tuple[CompiledGraph, Model]:
        return self.graphs[pick % len(self.graphs)]

    @precondition(lambda self: len(self.graphs) < MOST)
    @rule(pick=PICK)
    def clone(self, pick: int) -> None:
        compiled, model = self._at(pick)
        self.graphs.append((compiled.clone(), model.clone()))

    @precondition(lambda self: len(self.graphs) > 1)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        del self.graphs[pick % len(self.graphs)]

    @rule(n=st.integers(1, 6), b=st.integers(1, 3))
    def resize(self, n: int, b: int) -> None:
        """Arrays of other sizes from now on, where sizes are open."""
        fixed = self.graphs[0][1].fixed
        self.sizes = {s: fixed.get(s, {"n": n, "b": b}[s]) for s in self.sizes}

    @rule(pick=PICK, which=st.integers(0, 3), seed=SEEDS)
    def set_param(self, pick: int, which: int, seed: int) -> None:
        compiled, model = self._at(pick)
        name = list(model.program.params)[which % len(model.program.params)]
        value = whole_numbers(seed, shaped(model.program.params[name], self.sizes))
        compiled.set_param(name, value)
        model.params[name] = value

    @rule(pick=PICK, seed=SEEDS)
    def set_params(self, pick: int, seed: int) -> None:
        compiled, model = self._at(pick)
        values = {
            name: whole_numbers(seed + i, shaped(shape, self.sizes))
            for i, (name, shape) in enumerate(model.program.params.items())
        }
        compiled.set_params(values)
        model.params |= values

    @rule(pick=PICK, which=st.integers(0, 3), seed=st.none() | SEEDS)
    def bind(self, pick: int, which: int, seed: int | None) -> None:
        compiled, model = self._at(pick)
        name = list(model.program.inputs)[which % len(model.program.inputs)]
        if seed is None:
            compiled.bind(name, None)
            model.kept.pop(name, None)
            return
        value = whole_numbers(seed, shaped(model.program.inputs[name], self.sizes))
        compiled.bind(name, value)
        model.kept[name] = value.copy()
        value[...] = 99  # it was copied

    @precondition(lambda self: self.graphs and self.graphs[0][1].program.feeds)
    @rule(pick=PICK, which=st.integers(0, 3), stops=st.booleans())
    def feed(self, pick: int, which: int, stops: bool) -> None:
        compiled, model = self._at(pick)
        name, output = model.program.feeds[which % len(model.program.feeds)]
        compiled.feed(name, None if stops else output)
        if stops:
            model.fed.pop(name, None)
        else:
            model.fed[name] = output

    @precondition(lambda self: bool(self.sizes))
    @rule(pick=PICK, which=st.integers(0, 1), actual=st.sampled_from([0, 2, 1, None, 0, 3, 4, 6, 7]))
    def set_active_extent(self, pick: int, which: int, actual: int | None) -> None:
        compiled, model = self._at(pick)
        axis = model.program.symbols[which % len(model.program.symbols)]
        upper = model.fixed.get(axis, BOUNDS[axis][1])
        if actual is not None and actual > upper:
            try:
                compiled.set_active_extent(axis, actual)
            except OptionError:
                return
            raise AssertionError(f"an extent of {actual} was taken, the most is {upper}")
        is_used = compiled.set_active_extent(axis, actual)
        assert is_used == (axis not in model.program.mixes)
        if actual is None:
            model.active.pop(axis, None)
        else:
            model.active[axis] = actual

    @rule(pick=PICK, seed=SEEDS, left_out=st.integers(0, 7), threads=st.sampled_from([None, 1, 3]))
    def run(self, pick: int, seed: int, left_out: int, threads: int | None) -> None:
        compiled, model = self._at(pick)
        given = self._given(model, seed, left_out)
        with using(num_threads=threads):
            results = _agree(lambda: compiled.run(given), lambda: model.outcome(given, None), model)
        for array in results or ():
            if not array.flags.writeable:  # it shows what is kept for the next run
                continue
            if model.extent_is_used:
                array[...] = -77  # a result is the caller's
            self.earlier = [*self.earlier[-9:], (array, array.copy())]

    @rule(pick=PICK, seed=SEEDS, left_out=st.integers(0, 7), times=st.integers(2, 4))
    def run_again_and_again(self, pick: int, seed: int, left_out: int, times: int) -> None:
        """Later runs take the short way."""
        compiled, model = self._at(pick)
        for i in range(times):
            given = self._given(model, seed + i, left_out)
            _agree(lambda given=given: compiled.run(given), lambda given=given: model.outcome(given, None), model)

    @rule(pick=PICK, seed=SEEDS, left_out=st.integers(0, 7))
    def run_into(self, pick: int, seed: int, left_out: int) -> None:
        compiled, model = self._at(pick)
        given = self._given(model, seed, left_out)
        out = [whole_numbers(seed + i, shaped(s, self.sizes)) for i, s in enumerate(model.program.outputs)]
        if any(a.shape != shaped(model.program.inputs[name], self.sizes) for name, a in model.kept.items()):
            return  # other sizes than those of the arrays for results
        before = [a.copy() for a in out]

        def run() -> list[np.ndarray]:
            compiled.run_into(given, out)
            return out

        _agree(run, lambda: model.outcome(given, before), model)

    @precondition(lambda self: len(self.graphs) > 1)
    @rule(seed=SEEDS)
    def run_all_at_once(self, seed: int) -> None:
        """Each in a thread of its own."""
        given = [self._given(model, seed + i, 0) for i, (_, model) in enumerate(self.graphs)]
        found: list[Any] = [None] * len(self.graphs)

        def run(i: int) -> None:
            try:
                found[i] = self.graphs[i][0].run(given[i])
            except StrataError as error:
                found[i] = error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(self.graphs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for (_, model), feeds, made in zip(self.graphs, given, found, strict=True):
            _agree(lambda made=made: _raised(made), lambda m=model, f=feeds: m.outcome(f, None), model)

    @invariant()
    def kept_values(self) -> None:
        for compiled, model in self.graphs:
            for name, value in model.kept.items():
                same([compiled.read(name)], [value], name)

    @invariant()
    def earlier_results(self) -> None:
        for array, before in self.earlier:
            same([array], [before], "a result that was given earlier has changed")

    def _given(self, model: Model, seed: int, left_out: int) -> dict[str, np.ndarray]:
        """Arrays for the inputs, without some of those that have a value."""
        return {
            name: whole_numbers(seed + 7 * i, shaped(shape, self.sizes))
            for i, (name, shape) in enumerate(model.program.inputs.items())
            if not (left_out >> i & 1 and name in model.kept)
        }


def _raised(made: Any) -> Any:
    if isinstance(made, StrataError):
        raise made
    return made


def _agree(run: Any, outcome: Any, model: Model) -> Any:
    """Both give the same results, which are returned, or raise errors of one class."""
    note = f"{model.program.name} {model.fixed} params {model.params} kept {model.kept} active {model.active}"
    try:
        wanted = outcome()
    except StrataError as error:
        try:
            run()
        except type(error):
            return None
        raise AssertionError(f"{type(error).__name__} was not raised: {note}") from None
    given = run()
    same(given, wanted, note)
    return given
