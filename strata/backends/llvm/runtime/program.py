"""Native programs: the whole schedule of a plan, run by one native call.

A program is data: steps that name a native kernel, its argument block and its points. Arguments are offsets into
regions (the arena, inputs, outputs, weights), or sizes; both may be symbolic. `bind` turns the symbols into numbers
once per set of sizes; a run then needs only the addresses of the regions. The dispatch loop is the same code for every
program, so programs are never compiled and hold no addresses until they are bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.backends.llvm.executor.dispatch_loop import STEP_WORDS
from strata.backends.llvm.executor.thread_pool import ThreadPool, default_pool, native_code
from strata.core import Dim, Target, substitute
from strata.errors import CompileError, RunError


@dataclass(frozen=True, slots=True)
class Argument:
    """An address, `region` + `offset` bytes, or with region None the value of `offset` itself."""

    region: int | None
    offset: Dim = 0


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One kernel over a number of points, `grain` at a time; `kernel` names an entry of the program's functions.

    `reads` is how many bytes it goes through. Where a cache holds only a part of them, the step turns: it takes its
    chunks in the order opposite to that of the step before it of which that is true, which may be its own last run. 0
    says that the caller is always to begin with the first chunk.
    """

    kernel: str
    arguments: tuple[Argument, ...]
    points: Dim
    grain: int = 1
    reads: Dim = 0


@dataclass(frozen=True, slots=True)
class NativeProgram:
    """Steps in order, over a fixed number of regions."""

    steps: tuple[ProgramStep, ...]
    regions: int

    def __post_init__(self) -> None:
        for step in self.steps:
            for argument in step.arguments:
                if argument.region is not None and not 0 <= argument.region < self.regions:
                    raise CompileError(
                        f"step {step.kernel} uses region {argument.region} of {self.regions}", code="C140"
                    )
            if step.grain < 1:
                raise CompileError(f"step {step.kernel} has a grain of {step.grain}", code="C141")

    def bind(self, functions: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> BoundProgram:
        """The program for given kernels' addresses and sizes. Steps without points are left out."""
        rows: list[list[int]] = []
        arguments: list[int] = []
        numbers: list[int] = []  # of bound steps before each step, so that ranges of steps can be run
        for step in self.steps:
            numbers.append(len(rows))
            points = _number(step.points, sizes or {}, step.kernel)
            if points <= 0:
                continue
            at = len(arguments)
            for argument in step.arguments:
                offset = _number(argument.offset, sizes or {}, step.kernel)
                arguments += [-1 if argument.region is None else argument.region, offset]
            turns = _number(step.reads, sizes or {}, step.kernel) > held_in_part()
            rows.append([functions[step.kernel], points, step.grain, len(step.arguments), at, int(turns)])
        numbers.append(len(rows))
        base = 2 + STEP_WORDS * len(rows)
        most = max((row[3] for row in rows), default=1)
        words = [len(rows), max(1, most)]
        for row in rows:
            words += [*row[:4], base + row[4], row[5]]
        words += arguments
        return BoundProgram(self, (ctypes.c_int64 * len(words))(*words), tuple(numbers))


def held_in_part() -> int:
    """Bytes of which the last cache drops most before they are read again in the same order.

    Of fewer, a part is still there: a cache does not just drop what was used longest ago.
    """
    return 5 * Target.host().l3_bytes // 2


def _number(dim: Dim, sizes: Mapping[str, int], kernel: str) -> int:
    value = substitute(dim, sizes)
    if not isinstance(value, int):
        raise RunError(f"step {kernel}: size {dim} is not bound", code="X120")
    return value


class BoundProgram:
    """A program with all numbers filled in. Any number of threads may run it at the same time."""

    __slots__ = ("_address", "_numbers", "_run", "_words", "program")

    def __init__(self, program: NativeProgram | None, words: Any, numbers: tuple[int, ...]) -> None:
        self.program = program
        self._words = words  # keeps the memory alive
        self._address = ctypes.addressof(words)
        self._numbers = numbers
        self._run = _dispatch_loop()

    @property
    def address(self) -> int:
        """Of its words, for code that runs it inside another program."""
        return self._address

    @property
    def count(self) -> int:
        """Steps that have something to do."""
        return self._numbers[-1]

    def run(
        self,
        regions: Any,
        *,
        threads: int | None = None,
        pool: ThreadPool | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """Runs steps first … last - 1 in one native call. `regions` is a ctypes array of addresses (`region_table`)."""
        chosen = pool or default_pool()
        count = chosen.ensure(threads or chosen.default_threads)
        end = len(self._numbers) - 1 if last is None else last
        self._run(self._address, regions, chosen.address, count, self._numbers[first], self._numbers[end])
        chosen.check()


@cache
def _dispatch_loop() -> Any:
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return ctypes.CFUNCTYPE(None, *kinds)(native_code().address("program_run"))


def region_table(addresses: Sequence[int]) -> Any:
    """The addresses of the regions, as `run` takes them; entries may be changed between runs."""
    return (ctypes.c_int64 * max(1, len(addresses)))(*addresses)
