"""Calls of a bound program from Python: argument blocks that are allocated once and reused."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from strata.backends.llvm.executor.arena import DATA_FIELD, Arena, address_of
from strata.backends.llvm.executor.python_objects import LIST_ITEMS
from strata.backends.llvm.executor.thread_pool import ThreadPool, native_code
from strata.backends.llvm.ir.status import WORDS
from strata.backends.llvm.runtime.program import BoundProgram

_INPUTS, _OUTPUTS = 6, 9  # words of a block that hold the lists of a run; see program_enter


class ProgramCall:
    """A region table followed by status words, and the block that native code is entered with."""

    __slots__ = ("_address", "_enter", "_pool", "_words", "arena", "regions", "steps", "table", "threads")

    def __init__(
        self,
        program: BoundProgram | None,
        addresses: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        pool: ThreadPool,
    ) -> None:
        """`inputs` and `outputs` are the regions of the arrays of a run, 0 for an output that no step writes."""
        self.regions = len(addresses)
        unused = self.regions + WORDS  # the word that takes the address of such an output
        self.table = (ctypes.c_int64 * (unused + 1))(*addresses)
        self.table[self.regions - 3] = pool.address
        self.table[self.regions - 1] = ctypes.addressof(self.table) + 8 * self.regions
        self.steps = (program.address, program.count) if program is not None else (0, 0)
        words = [self.steps[0], ctypes.addressof(self.table), pool.address, 0, 0, self.steps[1]]
        words += [0, len(inputs), LIST_ITEMS, 0, len(outputs), LIST_ITEMS, DATA_FIELD]
        words += [*inputs, *(region or unused for region in outputs)]
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._address = ctypes.addressof(self._words)
        self._pool = pool
        self.threads = 0
        self.arena: Arena | None = None  # kept between runs by programs of one size
        self._enter = _enter()

    def run(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        """The whole program on arrays, in lists that nobody else changes."""
        words = self._words
        words[_INPUTS] = id(inputs)
        words[_OUTPUTS] = id(outputs)
        if self._enter(self._address):
            self._pool.check()

    def set_arena(self, arena: Arena) -> None:
        self.arena = arena
        self.table[0] = arena.address

    def set_threads(self, threads: int) -> None:
        """What the dispatch loop and native ops may use."""
        self.threads = self._words[3] = self.table[self.regions - 2] = threads

    def place(self, regions: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Addresses of arrays into the table, for runs that do not enter through the block."""
        for region, array in zip(regions, arrays, strict=True):
            if region:
                self.table[region] = address_of(array)


@cache
def _enter() -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(native_code().address("program_enter"))
