"""Runs step by step, with the time that each thread spent on each step."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.backends.base import Arrays, Tell
from strata.backends.llvm.ir.status import check
from strata.backends.llvm.runtime.calls import ProgramCall
from strata.core import new_lock
from strata.lir import KEPT

if TYPE_CHECKING:
    from strata.backends.llvm.runtime.executable import CpuExecutable

MOST_EVENTS = 4096  # of one step
_noting = new_lock()  # threads note times in one place, for one run at a time


def run_observed(
    executable: CpuExecutable,
    inputs: Arrays,
    outputs: Arrays,
    binding: Mapping[str, int],
    threads: int | None,
    tell: Tell,
) -> None:
    """Run the steps one by one, and tell of each."""
    bound = executable.bound_for(binding)
    pool = executable.pool
    count = pool.ensure(threads or pool.default_threads)
    call = ProgramCall(None, bound.addresses, executable.input_regions, executable.output_regions, pool)
    arena = executable.arenas.take(bound.arena)
    call.set_arena(arena)
    call.set_threads(count)
    call.place(executable.input_regions, inputs)
    call.place(executable.output_regions, outputs)
    values = executable.named_arrays(inputs, outputs)

    def read(name: str) -> np.ndarray | None:
        if executable.lir.buffer(name).role in KEPT and name not in values:
            return None  # a weight of which only the packed form is kept
        return executable.array(name, values, bound, arena, binding)

    events = (ctypes.c_int64 * (2 + 4 * MOST_EVENTS))(0, MOST_EVENTS)
    with _noting:
        pool.note_times(events)
        try:
            for segment, program in zip(executable.segments, bound.programs, strict=True):
                for at in segment.steps:
                    events[0] = 0
                    begin = time.perf_counter_ns()
                    if program is None:
                        assert segment.host is not None
                        executable.run_step(segment.host, values, bound, arena, binding)
                    else:
                        first, last = bound.ranges[at]
                        program.run(call.table, threads=count, first=first, last=last)
                    end = time.perf_counter_ns()
                    if executable.native:
                        check(call.table, call.regions)
                    tell(at, begin, end, _spans(events), read)
        finally:
            pool.note_times(None)
    executable.finish(inputs, outputs)
    executable.arenas.give(arena)


def _spans(events: Any) -> list[tuple[int, int, int]]:
    count = min(int(events[0]), MOST_EVENTS)
    spans = [(events[2 + 4 * i], events[3 + 4 * i], events[4 + 4 * i]) for i in range(count)]
    return [span for span in spans if span[1]]
