"""Compile contracts: one result for all sizes, whichever of its forms runs, from one set of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from strata.config import using
from strata.errors import RunError, SymbolError, UnknownNameError
from strata.runtime import specialize
from tests.machines.programs import PROGRAMS, Program, same, shaped, whole_numbers

SEEDS = st.integers(0, 999)
SIZED = [p for p in PROGRAMS if p.symbols]


class VariantMachine(RuleBasedStateMachine):
    """Forms for some sizes, made at once or in the background, or none."""

    @initialize(
        program=st.sampled_from(SIZED),
        on_miss=st.sampled_from(["compile", "error", "bucket", "interpret"]),
        most=st.integers(1, 3),
        buckets=st.sampled_from([None, None, (2, 6)]),
    )
    def start(self, program: Program, on_miss: str, most: int, buckets: tuple[int, ...] | None) -> None:
        chosen = {"n": list(buckets)} if buckets else None
        self.program, self.on_miss, self.most = program, on_miss, most
        self.graph = specialize(program.graph(), "cpu", max_variants=most, on_miss=on_miss, buckets=chosen)
        self.params: dict[str, np.ndarray] = {}
        self.sizes = {"n": 3, "b": 2}

    @rule(n=st.integers(1, 6), b=st.integers(1, 3))
    def resize(self, n: int, b: int) -> None:
        self.sizes = {"n": n, "b": b}

    @rule(which=st.integers(0, 3), seed=SEEDS)
    def set_param(self, which: int, seed: int) -> None:
        name = list(self.program.params)[which % len(self.program.params)]
        value = whole_numbers(seed, shaped(self.program.params[name], self.sizes))
        self.graph.set_param(name, float(value) if value.ndim == 0 else value)
        self.params[name] = value

    @rule(seed=SEEDS)
    def set_params(self, seed: int) -> None:
        for i, (name, shape) in enumerate(self.program.params.items()):
            self.params[name] = whole_numbers(seed + i, shaped(shape, self.sizes))
        self.graph.set_params(self.params)

    @rule()
    def wait(self) -> None:
        self.graph.wait()

    @rule(seed=SEEDS, settings=st.sampled_from([{}, {}, {"check_indices": True}, {"num_threads": 1}]))
    def run(self, seed: int, settings: dict[str, Any]) -> None:
        given = {
            name: whole_numbers(seed + 7 * i, shaped(shape, self.sizes))
            for i, (name, shape) in enumerate(self.program.inputs.items())
        }
        disagree = any(a.shape != shaped(self.program.params[n], self.sizes) for n, a in self.params.items())
        with using(**settings):
            try:
                results = self.graph.run(given)
            except SymbolError:
                assert disagree
                return
            except UnknownNameError:
                assert self.params.keys() != self.program.params.keys()
                return
            except RunError as error:
                assert (error.code, self.on_miss) == ("X401", "error")  # noqa: PT017 - others are raised on
                assert len(self.graph.variants) == self.most
                return
        assert not disagree
        same(results, self.program.expected({**given, **self.params}), self.program.name)
        assert len(self.graph.variants) <= self.most
