"""Launches collected into CUDA graphs, where the same sequence comes again.

A run of a plan of fixed sizes makes the same launches on the same memory every time. They are collected until somebody
needs their effect. A sequence that was done before is captured, and from then on launched as a whole; one that is new,
or short, is done call by call. Two sequences are equal where kernels, grids, sizes and addresses are, so that nothing
has to be said about sizes or buffers that change: those are other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core import Table

SHORT = 3  # calls that are not worth a graph


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch or copy: what makes it equal to another, the buffers that it touches, and how to do it on a stream."""

    key: Hashable
    touches: frozenset[int]  # addresses
    do: Callable[[Any], None]


class Launches:
    """Collects calls, and does them on a stream in their order."""

    def __init__(self, stream: Any, capture: Callable[[Sequence[KernelLaunch]], Callable[[], None]]) -> None:
        self._stream, self._capture = stream, capture
        self._waiting: list[KernelLaunch] = []
        self._seen: Table[Hashable, Callable[[], None] | None] = Table("cuda graphs")  # None: seen once
        self.replays = 0

    def add(self, call: KernelLaunch) -> None:
        self._waiting.append(call)

    def touches(self, address: int) -> bool:
        """Whether a call that waits reads or writes a buffer."""
        return any(address in call.touches for call in self._waiting)

    def flush(self) -> None:
        """Do all that waits."""
        calls, self._waiting = self._waiting, []
        if len(calls) <= SHORT:
            for call in calls:
                call.do(self._stream)
            return
        key = tuple(call.key for call in calls)
        if key not in self._seen:
            self._seen.put(key, None)
            for call in calls:
                call.do(self._stream)
            return
        graph = self._seen.get(key)
        if graph is None:
            graph = self._capture(calls)
            self._seen.put(key, graph)
        self.replays += 1
        graph()
