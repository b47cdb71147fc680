"""Observed runs: traced, timed step by step, or watched for NaN and infinity."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


class Observer(Protocol):
    """Told about every run while it is in OBSERVERS."""

    def begin(self, compiled: CompiledGraph, binding: Mapping[str, int], arrays: Sequence[np.ndarray]) -> None: ...

    def step(self, compiled: CompiledGraph, at: int, begin: int, end: int, spans: Sequence[Any], read: Any) -> None:
        """After step `at`: times in nanoseconds, spans of threads (thread, begin, end), a reader of buffers.

        The reader gives None of a weight that a backend keeps in its own form: `operand` then looks it up."""

    def end(self, compiled: CompiledGraph, begin: int, end: int) -> None: ...


OBSERVERS: list[Observer] = []  # runs look at this list only; it is empty unless a block asks for observation


def operand(compiled: CompiledGraph, name: str, read: Any) -> np.ndarray | None:
    """What a step reads: the buffer, or a parameter as it was given; None of what was computed from one and packed."""
    array = read(name)
    buffer = compiled._lir.buffer(name)
    if array is None and buffer.role == "param":
        return np.asarray(compiled._param_values[str(buffer.key)])
    return array


def run_observed(
    compiled: CompiledGraph,
    arrays: list[np.ndarray],
    outputs: list[np.ndarray],
    binding: Mapping[str, int],
    threads: int | None,
) -> None:
    """A run that tells the observers of each step; backends that cannot run step by step show up as one."""
    observers = tuple(OBSERVERS)
    for one in observers:
        one.begin(compiled, binding, arrays)
    begin = time.perf_counter_ns()

    def tell(at: int, start: int, stop: int, spans: Sequence[Any], read: Any) -> None:
        for one in observers:
            one.step(compiled, at, start, stop, spans, read)

    compiled._executable.run_observed(arrays, outputs, binding, threads, tell)
    end = time.perf_counter_ns()
    for one in observers:
        one.end(compiled, begin, end)
