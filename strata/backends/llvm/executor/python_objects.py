"""Offsets of the fields of CPython and NumPy objects that native code reads, checked before use."""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import weakref
from typing import Any, Final

import numpy as np

from strata.backends.llvm.executor.arena import DATA_FIELD, HAS_DATA_FIELD

WORD: Final = ctypes.sizeof(ctypes.c_ssize_t)
COUNT: Final = object.__basicsize__  # of items, in a list
LIST_ITEMS: Final = COUNT + WORD  # the pointer to its items
TUPLE_ITEMS: Final = tuple.__basicsize__  # the items themselves
NDIM, DIMS, DTYPE, FLAGS, WATCHERS = (DATA_FIELD + WORD * i for i in (1, 2, 5, 6, 7))  # of an array

_word, _half = ctypes.c_ssize_t.from_address, ctypes.c_int32.from_address


def _reads_lists() -> bool:
    """Whether list and array objects are laid out as native code expects: it then needs no help to find the data."""
    probe = [np.empty(2), np.arange(5)[2:]]
    items = _word(id(probe) + LIST_ITEMS).value
    return HAS_DATA_FIELD and [_word(items + WORD * i).value for i in (0, 1)] == [*map(id, probe)]


def _reads_arrays() -> bool:
    """Whether it can also check arrays, and see whether anybody else refers to them."""
    if not IS_DIRECT or WORD != 8 or sysconfig.get_config_var("Py_GIL_DISABLED") or not hasattr(sys, "getrefcount"):
        return False
    watched = np.zeros((3, 5, 2), np.int16)
    before = _word(id(watched) + WATCHERS).value
    watch = weakref.ref(watched)
    if before != 0 or _word(id(watched) + WATCHERS).value != id(watch):
        return False
    listed: list[np.ndarray] = [watched, np.zeros((4, 6))[:, ::2], np.arange(7)[2:], np.zeros(())]
    for probe in listed:
        place = id(probe)
        found = _half(place + NDIM).value, _word(place + DTYPE).value, _half(place + FLAGS).value
        dims = _word(place + DIMS).value
        sizes = tuple(_word(dims + WORD * i).value for i in range(probe.ndim))
        if found != (probe.ndim, id(probe.dtype), probe.flags.num) or sizes != probe.shape:
            return False
        if _word(place + WORD).value != id(np.ndarray):
            return False
    del probe
    only = id(listed[1])  # the list is all that refers to it
    pair: tuple[Any, ...] = (watched, watch)
    counts = _word(id(listed) + COUNT).value == len(listed) and _half(only).value == 1
    return counts and _word(id(pair) + TUPLE_ITEMS).value == id(watched)


IS_DIRECT: Final = sys.implementation.name == "cpython" and _reads_lists()
CAN_CHECK_ARRAYS: Final = IS_DIRECT and _reads_arrays()
