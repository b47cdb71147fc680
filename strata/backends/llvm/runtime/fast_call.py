"""Fast calls: a native function from the caller's arrays to the results, past the general path.

Most of what a small call costs is Python: looking at the arrays, making new ones for the results, filling a block. A
program of fixed sizes that is run again and again is therefore entered by a function that does all of this natively.
It gives out results that it keeps: arrays that nobody but it refers to any more. Whatever is not as it expects (other
types, results that are all in use, another thread inside, an id out of range) it leaves to the long way, which
computes the same or says what is wrong.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.backends.llvm.executor.arena import address_of
from strata.backends.llvm.executor.fast_call_code import (
    FIELDS,
    FUNCTIONS,
    HITS,
    INPUT_WORDS,
    KEPT_AT,
    MOST_ARRAYS,
    OUTPUT_WORDS,
    TURNS,
)
from strata.backends.llvm.executor.python_objects import CAN_CHECK_ARRAYS
from strata.backends.llvm.executor.thread_pool import native_code
from strata.backends.llvm.runtime.calls import ProgramCall
from strata.core import new_lock

if TYPE_CHECKING:
    from strata.backends.llvm.runtime.executable import CpuExecutable

FIRST_RUNS: Final = 1  # that go the long way: most programs of lazy tensors run once
PATIENCE: Final = 32  # runs in a row that find no free result; then it is given up
MOST_RESULTS: Final = 4 << 20  # bytes of a program's results: longer runs do not feel the long way
MOST_SCRATCH: Final = 8 << 20
MOST_KEPT: Final = 64 << 20  # bytes of results that are kept for all programs together
NOT_READY: Final = -1  # threads

Entry = Callable[[Any], "tuple[np.ndarray, ...] | None"]
Inputs = Sequence[tuple[str, "np.dtype[Any]", Any]]  # name, dtype, shape


class NativeFastCall:
    """What a program is entered by, on as many threads as are `asked` for; it takes a dict, or a list in order, or a
    tuple of either and a list of arrays for the results."""

    __slots__ = ("__weakref__", "_is_given_up", "_kept", "_misses", "_runs", "_seen", "_turn", "_words", "asked",
                 "enter")  # fmt: skip

    def __init__(self) -> None:
        self.asked: int | None = NOT_READY
        self.enter: Entry = _leave
        self._is_given_up = not CAN_CHECK_ARRAYS
        self._kept: list[list[np.ndarray | None]] = []
        self._words = np.zeros(0, np.int64)
        self._turn = self._misses = self._runs = self._seen = 0

    def forget(self) -> None:
        """Start over, as if the program had not run yet."""
        self.asked, self.enter, self._kept = NOT_READY, _leave, []

    def wants(self, asked: int | None) -> bool:
        """Whether `learn` would make the fast call now."""
        return self.asked != asked and not self._is_given_up

    def learn(
        self, executable: CpuExecutable, inputs: Inputs, outputs: Sequence[np.ndarray], asked: int | None
    ) -> None:
        """After a run on the general path: its results are kept for a later one."""
        if self._is_given_up:
            return
        if self._runs < FIRST_RUNS:
            self._runs += 1
        elif self.asked != asked:
            self._make(executable, inputs, outputs, asked)
        else:
            hits = int(self._words[HITS])
            self._misses, self._seen = 0 if hits != self._seen else self._misses + 1, hits
            self._turn = (self._turn + 1) % TURNS
            if self._misses < PATIENCE:
                self._keep(outputs)
            else:
                self._give_up()

    def _give_up(self) -> None:
        self.forget()
        self._is_given_up = True

    def _make(
        self, executable: CpuExecutable, inputs: Inputs, outputs: Sequence[np.ndarray], asked: int | None
    ) -> None:
        bound, size = executable.only, sum(a.nbytes for a in outputs)
        if bound is None:  # a parameter was set meanwhile
            return
        few = max(len(inputs), len(outputs)) <= MOST_ARRAYS and size <= MOST_RESULTS and bound.arena <= MOST_SCRATCH
        if not (few and bound.is_direct) or executable.has_leaf_results:
            self._give_up()
            return
        try:
            call = bound.free.pop()  # with its memory; other callers make their own
        except IndexError:
            return
        threads = asked or executable.threads
        call.set_threads(threads)
        executable.pool.ensure(threads)
        self._words, names = _block(call, executable, inputs, outputs)
        self._kept = [[None] * TURNS for _ in outputs]
        self._turn = self._seen = 0
        self._keep(outputs)
        # whoever is inside holds the function, and with it all that it needs
        self.enter = _function((self._words, names, call, bound, self._kept))
        self.asked = asked
        executable.pool.users.add(self)
        _make_room(self, TURNS * size)

    def _keep(self, outputs: Sequence[np.ndarray]) -> None:
        """Replace kept results by those of the general path."""
        words = self._words
        at = len(FIELDS) + INPUT_WORDS * int(words[FIELDS.index("inputs")]) + KEPT_AT + 2 * self._turn
        for kept, array in zip(self._kept, outputs, strict=True):
            words[at] = 0  # nobody finds an object here that is about to end
            kept[self._turn] = array
            words[at : at + 2] = id(array), address_of(array)
            at += OUTPUT_WORDS


def _leave(given: Any) -> None:
    """Leave the fast path: a program without one."""


def _block(
    call: ProgramCall, executable: CpuExecutable, inputs: Inputs, outputs: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[Any]]:
    """The words that the native function reads, and the objects that they refer to."""
    table = ctypes.addressof(call.table)
    program, steps = call.steps
    status = table + 8 * call.regions if executable.native else 0
    words = [table, program, executable.pool.address, call.threads, steps, status, 0, 0, len(inputs), len(outputs)]
    words += [id(dict), id(np.ndarray), id(list), id(tuple), id(None), *map(_address, FUNCTIONS)]
    shapes = [*(shape for _, _, shape in inputs), *(a.shape for a in outputs)]
    first = len(words) + INPUT_WORDS * len(inputs) + OUTPUT_WORDS * len(outputs)
    block = np.zeros(first + sum(map(len, shapes)), np.int64)
    sizes = address_of(block) + 8 * first
    keep: list[Any] = []
    for (name, dtype, shape), region in zip(inputs, executable.input_regions, strict=True):
        keep += [name, dtype]
        words += [id(name), id(dtype), len(shape), table + 8 * region, sizes, dtype.itemsize * math.prod(shape)]
        sizes += 8 * len(shape)
    for array, region in zip(outputs, executable.output_regions, strict=True):
        keep.append(array.dtype)
        words += [id(array.dtype), array.ndim, table + 8 * region, sizes, array.flags.num, array.nbytes]
        words += [0] * (2 * TURNS)
        sizes += 8 * array.ndim
    block[:] = [*words, *(d for shape in shapes for d in shape)]
    return block, keep


class _Method(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_METHODS: list[_Method] = []  # one, for as long as there are functions that are made of it
_TAKES_ONE: Final = 8  # METH_O


def _function(owned: tuple[Any, ...]) -> Entry:
    if not _METHODS:
        _METHODS.append(_Method(b"enter", native_code().address("quick_call"), _TAKES_ONE, None))
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Entry = prototype(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.addressof(_METHODS[0]), owned, None)
    return made


def _address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


_holders: weakref.WeakKeyDictionary[NativeFastCall, int] = (
    weakref.WeakKeyDictionary()
)  # bytes kept, the longest ago first
_lock = new_lock()


def _make_room(fast_call: NativeFastCall, size: int) -> None:
    """Account for what a program keeps; where all keep too much, the oldest give it up."""
    with _lock:
        _holders.pop(fast_call, None)
        _holders[fast_call] = size
        total = sum(_holders.values())
        for other, held in list(_holders.items()):
            if total <= MOST_KEPT:
                break
            if other is not fast_call:
                other.forget()
                del _holders[other]
                total -= held
