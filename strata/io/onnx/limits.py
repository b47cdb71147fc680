"""Limits on reading one model: nodes, host arrays, tensor sizes, seconds.

A model is data of somebody else: a kilobyte can ask for gigabytes. Every amount here is a setting; `docs/concepts/
budgets.md` lists them. Nodes and seconds are counted from one segment to the next, so that long runs are no offence.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from strata.config import config
from strata.core import Deadline, Meter, TensorType, over_budget, show_bytes, substitute

ALWAYS = 1 << 24  # elements of a tensor that no model is refused for
HELD = 4  # arrays of the host may be this many times what the model holds and is given, and `max_folded_bytes` more
WATCHED = 1 << 12  # bytes of an array that is worth counting


class OnnxLimits:
    """The budgets of one tracer; `elements`, of `size` bytes, are those that the model holds."""

    def __init__(self, elements: int, size: int) -> None:
        self.elements = elements
        self._loops = 1  # steps of the loops around what is being read, multiplied
        self._folded = Meter("max_folded_bytes", "constants of the model")
        self._folded.limit += HELD * size
        self.start()

    def start(self) -> None:
        """A new segment begins."""
        self._nodes = Meter("max_nodes", "nodes of the model, with its functions and loops written out")
        self._deadline = Deadline("reading the model")

    def give(self, kind: TensorType, hints: Mapping[str, int] | None = None) -> None:
        """The run has an array of this type, too."""
        count: Any = substitute(kind.size, hints or {})
        self.elements += count if isinstance(count, int) else ALWAYS
        self._folded.limit += HELD * kind.dtype.itemsize * count if isinstance(count, int) else 0

    def nodes(self, count: int = 1) -> None:
        """Another node is read, or becomes several."""
        self._nodes.add(count)
        self._deadline.check()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, time is spent on compiling or running."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._deadline.extend(time.monotonic() - start)

    # loops

    @contextmanager
    def loop(self, steps: int, what: str) -> Iterator[None]:
        """Inside, a loop of this many steps is read, whose number nothing but the model decides."""
        outer, self._loops = self._loops, self._loops * max(steps, 1)
        try:
            if self._loops > config().max_steps:
                raise over_budget("max_steps", self._loops, f"{what} would run {self._loops:,} steps")
            yield
        finally:
            self._loops = outer

    # arrays of the host

    def has_room(self, size: int) -> bool:
        """Whether another array of this many bytes may be computed while the model is read."""
        return self._folded.has(size)

    def require_room(self, size: int, what: str) -> None:
        if not self.has_room(size):
            raise over_budget("max_folded_bytes", self._folded.spent + size, f"{what} takes {show_bytes(size)}")

    def keep(self, array: np.ndarray, what: str) -> None:
        """Count an array as long as it lives."""
        size = host_bytes(array)
        if size >= WATCHED:
            self.require_room(size, what)
            self._folded.spent += size
            weakref.finalize(array, self._let_go, size).atexit = False

    def _let_go(self, size: int) -> None:
        self._folded.spent -= size

    # tensors of the graph

    def require_possible(self, label: str, kind: TensorType, hints: Mapping[str, int] | None) -> None:
        """Refuse what is out of all proportion to the model before anything is allocated for it."""
        size: Any = kind.size
        if not isinstance(size, int):
            if not hints:
                return
            size = substitute(size, hints)
            if not isinstance(size, int):
                return
        needed, settings = size * kind.dtype.itemsize, config()
        if size > max(ALWAYS, settings.max_growth * self.elements):
            times = -(-size // max(self.elements, 1))
            raise over_budget("max_growth", times, f"{label} would give {kind}, {times:,} times all that it comes from")
        if needed > settings.max_tensor_bytes:
            raise over_budget("max_tensor_bytes", needed, f"{label} would give {kind}, {show_bytes(needed)}")


def host_bytes(array: np.ndarray) -> int:
    """What an array takes, with the texts in it."""
    if not array.dtype.hasobject:
        return array.nbytes
    return array.nbytes + sum(len(x) for x in array.reshape(-1) if isinstance(x, (str, bytes)))
