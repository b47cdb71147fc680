"""Bundles: a graph that is loaded is what was saved, with its parameters and no state, whatever becomes of the rest."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strata.errors import UnknownNameError
from strata.runtime import CompiledGraph, Session, load_compiled
from tests.machines.fresh import in_fresh_process
from tests.machines.programs import PROGRAMS, Program, same, shaped, whole_numbers

SEEDS = st.integers(0, 999)
PICK = st.integers(0, 5)
FIXED = {"n": 4, "b": 2}
MOST = 5

Params = dict[str, np.ndarray]


class BundleMachine(RuleBasedStateMachine):
    """Graphs with their parameters, and files by path with the parameters that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.graphs: list[tuple[CompiledGraph, Params]] = []
        self.files: dict[str, Params] = {}

    def teardown(self) -> None:
        self.graphs.clear()
        shutil.rmtree(self.folder)

    @initialize(program=st.sampled_from(PROGRAMS), is_fixed=st.booleans())
    def compile(self, program: Program, is_fixed: bool) -> None:
        fixed = {s: FIXED[s] for s in program.symbols} if is_fixed else None
        self.program = program
        self.graphs = [(Session("cpu").compile(program.graph(), dim_binding=fixed or None), {})]

    def _at(self, pick: int) -> tuple[CompiledGraph, Params]:
        return self.graphs[pick % len(self.graphs)]

    @rule(pick=PICK, which=st.integers(0, 3), seed=SEEDS)
    def set_param(self, pick: int, which: int, seed: int) -> None:
        compiled, params = self._at(pick)
        name = list(self.program.params)[which % len(self.program.params)]
        params[name] = whole_numbers(seed, shaped(self.program.params[name], FIXED))
        compiled.set_param(name, params[name])

    @rule(pick=PICK, seed=SEEDS)
    def set_params(self, pick: int, seed: int) -> None:
        compiled, params = self._at(pick)
        for i, (name, shape) in enumerate(self.program.params.items()):
            params[name] = whole_numbers(seed + i, shaped(shape, FIXED))
        compiled.set_params(params)

    @rule(pick=PICK, seed=SEEDS, which=st.integers(0, 3))
    def bind(self, pick: int, seed: int, which: int) -> None:
        """A value that is kept for an input, which no bundle holds; it is forgotten again."""
        compiled, _ = self._at(pick)
        name = list(self.program.inputs)[which % len(self.program.inputs)]
        value = whole_numbers(seed, shaped(self.program.inputs[name], FIXED))
        compiled.bind(name, value)
        path = os.path.join(self.folder, "bound")
        compiled.save(path, weights=False, levels=["baseline"])
        compiled.bind(name, None)
        try:
            load_compiled(path).read(name)
        except UnknownNameError:
            return
        raise AssertionError("a kept value was in the bundle")

    @rule(pick=PICK, name=st.sampled_from("pq"), weights=st.booleans())
    def save(self, pick: int, name: str, weights: bool) -> None:
        """Over a file that graphs may have been loaded from, too."""
        compiled, params = self._at(pick)
        compiled.save(os.path.join(self.folder, name), weights=weights, levels=["baseline"])
        self.files[name] = dict(params) if weights else {}

    @precondition(lambda self: self.files and len(self.graphs) < MOST)
    @rule(pick=PICK)
    def load(self, pick: int) -> None:
        name = sorted(self.files)[pick % len(self.files)]
        self.graphs.append((load_compiled(os.path.join(self.folder, name)), dict(self.files[name])))

    @precondition(lambda self: self.graphs and len(self.graphs) < MOST)
    @rule(pick=PICK)
    def clone(self, pick: int) -> None:
        compiled, params = self._at(pick)
        self.graphs.append((compiled.clone(), dict(params)))

    @rule(pick=PICK, seed=SEEDS)
    def run(self, pick: int, seed: int) -> None:
        compiled, params = self._at(pick)
        given = self._given(seed)
        if params.keys() == self.program.params.keys():
            same(compiled.run(given), self.program.expected({**given, **params}), self.program.name)
            return
        try:
            compiled.run(given)
        except UnknownNameError:
            return
        raise AssertionError("a parameter has a value that nobody gave it")

    @precondition(lambda self: any(self._is_whole(name) for name in self.files))
    @rule(pick=PICK, seed=SEEDS)
    def run_in_a_fresh_process(self, pick: int, seed: int) -> None:
        names = [name for name in sorted(self.files) if self._is_whole(name)]
        name = names[pick % len(names)]
        given = self._given(seed)
        feeds = {n: a.tolist() for n, a in given.items()}
        results = in_fresh_process("bundle", path=os.path.join(self.folder, name), feeds=feeds)
        wanted = self.program.expected({**given, **self.files[name]})
        same([np.array(a, np.float32) for a in results], wanted, self.program.name)

    def _is_whole(self, name: str) -> bool:
        return self.files[name].keys() == self.program.params.keys()

    def _given(self, seed: int) -> dict[str, np.ndarray]:
        return {
            name: whole_numbers(seed + 7 * i, shaped(shape, FIXED))
            for i, (name, shape) in enumerate(self.program.inputs.items())
        }
