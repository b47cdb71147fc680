"""Pipelines of components, and their plans on disk: each component is its own, in this process and in a fresh one."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from strata.runtime import AotCache, CompiledGraph, CompileOptions, DynamicDimCompileCache, ModelCompilePipeline
from tests.machines.fresh import in_fresh_process
from tests.machines.pipelines import component, scaled
from tests.machines.programs import same, whole_numbers

FACTORS = {"A": 2, "B": 3, "C": 5}
PROFILES = st.sampled_from(sorted(FACTORS))
SEQ = st.integers(1, 4)
SEEDS = st.integers(0, 999)


class PipelineMachine(RuleBasedStateMachine):
    """Components that multiply by their own number, through every way that a pipeline has."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.folder = tempfile.mkdtemp()
        self.capacity = capacity
        self.on_disk: set[tuple[str, int]] = set()
        self.is_damaged = False
        self.begin_anew()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule()
    def begin_anew(self) -> None:
        """A pipeline that knows nothing but what is on disk."""
        self.pipeline = ModelCompilePipeline("cpu", self.capacity)
        self.cache = DynamicDimCompileCache("cpu", self.capacity)

    @rule(profile=PROFILES, seq=SEQ, seed=SEEDS, threads=st.sampled_from([None, 1, 2]))
    def compile_component(self, profile: str, seq: int, seed: int, threads: int | None) -> None:
        options = CompileOptions(threads=threads) if threads else None
        made, manifest = self.pipeline.get_or_compile_component(
            component(profile, seq), lambda: scaled(FACTORS[profile]), options
        )
        assert manifest.inputs[0].shape == (1, seq)
        assert made.options.threads == threads
        _check(made, profile, seq, seed)

    @rule(profile=PROFILES, seq=SEQ, seed=SEEDS)
    def ahead_of_time(self, profile: str, seq: int, seed: int) -> None:
        made = self.pipeline.get_or_specialize_aot(
            AotCache(self.folder), component(profile, seq), lambda: scaled(FACTORS[profile])
        )
        self.on_disk.add((profile, seq))
        _check(made, profile, seq, seed)

    @rule(profile=PROFILES, seq=SEQ, seed=SEEDS)
    def ahead_of_time_by_name(self, profile: str, seq: int, seed: int) -> None:
        """One key for all: the name on disk tells them apart."""
        made = self.cache.get_or_specialize_aot(
            AotCache(self.folder), f"{profile}_{seq}", 1, {"batch": 1, "seq": seq}, lambda: scaled(FACTORS[profile])
        )
        _check(made, profile, seq, seed)

    @rule(profile=PROFILES, seq=SEQ)
    def in_a_fresh_process(self, profile: str, seq: int) -> None:
        results, built = in_fresh_process("aot", folder=self.folder, profile=profile, seq=seq, factor=FACTORS[profile])
        same([np.array(results, np.float32)], [np.full((1, seq), FACTORS[profile] + 1, np.float32)])
        if not self.is_damaged:
            assert built == ((profile, seq) not in self.on_disk)
        self.on_disk.add((profile, seq))

    @rule(seed=SEEDS)
    def damage_an_entry(self, seed: int) -> None:
        """A byte of a file changes: what it held is made again."""
        files = sorted(os.path.join(at, name) for at, _, names in os.walk(self.folder) for name in names)
        if files:
            path = files[seed % len(files)]
            with open(path, "r+b") as file:
                size = os.path.getsize(path)
                if not size:
                    return
                file.seek(seed % size)
                byte = file.read(1)
                file.seek(seed % size)
                file.write(bytes([byte[0] ^ 0x41]))
            self.is_damaged = True


def _check(made: CompiledGraph, profile: str, seq: int, seed: int) -> None:
    x = whole_numbers(seed, (1, seq))
    same(made.run(x=x), [x * FACTORS[profile] + 1], profile)
