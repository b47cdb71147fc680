"""Launch sequences: a plan's launches over numbered memory, one by one, or as one CUDA graph when they repeat.

The graph is made once for a sequence. What changes from run to run is where inputs and results are: those addresses
are set in the graph, launch by launch, where they differ from the last run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.recipe import Copy
from strata.backends.triton.launch.calls import PreparedLaunch

SHORT = 3  # launches that are not worth a graph


class LaunchSequence:
    """Launches and copies in order."""

    def __init__(self, calls: Any, actions: Sequence[PreparedLaunch | Copy]) -> None:
        self.parts: list[Copy | GraphedLaunches] = []
        for action in actions:
            if isinstance(action, Copy):
                self.parts.append(action)
            elif self.parts and isinstance(self.parts[-1], GraphedLaunches):
                self.parts[-1].launches.append(action)
            else:
                self.parts.append(GraphedLaunches(calls, [action]))
        self._calls = calls
        self._copies = [part for part in self.parts if isinstance(part, Copy)]
        each = [part for part in self.parts if isinstance(part, GraphedLaunches)]
        # all launches as one, for runs in which every copy is of memory to itself: updates in place
        self._whole = GraphedLaunches(calls, [x for part in each for x in part.launches]) if len(each) > 1 else None

    @property
    def launches(self) -> list[PreparedLaunch] | None:
        """All of it, where that is a few launches and no more."""
        if len(self.parts) != 1 or not isinstance(self.parts[0], GraphedLaunches):
            return None
        return self.parts[0].launches if len(self.parts[0].launches) <= SHORT else None

    def play(self, places: Sequence[int], stream: int) -> int:
        """Do all; gives how many graphs were launched for it."""
        if self._whole is not None and all(_is_nothing(copy, places) for copy in self._copies):
            return int(self._whole.play(places, stream))
        replays = 0
        for part in self.parts:
            if isinstance(part, GraphedLaunches):
                replays += part.play(places, stream)
                continue
            if not _is_nothing(part, places):
                source, target = (places[base] + offset for base, offset in (part.source, part.target))
                self._calls.copy(source, target, part.size, stream)
        return replays


def _is_nothing(copy: Copy, places: Sequence[int]) -> bool:
    (one, at), (other, to) = copy.source, copy.target
    return not copy.size or places[one] + at == places[other] + to


class GraphedLaunches:
    """Launches without anything between them."""

    def __init__(self, calls: Any, launches: list[PreparedLaunch]) -> None:
        self.launches = launches
        self._calls = calls
        self._runs = 0
        self._graph: Any = None
        self._last: list[int] = []  # where memory was when the graph was launched last
        self._users: dict[int, list[int]] = {}  # launches, by the memory that they use

    def play(self, places: Sequence[int], stream: int) -> bool:
        self._runs += 1
        if len(self.launches) > SHORT and self._runs > 1:
            self._replay(list(places), stream)
            return True
        for launch in self.launches:
            launch.patch(places)
            self._calls.launch(launch, stream)
        return False

    def _replay(self, places: list[int], stream: int) -> None:
        if self._graph is None:
            for at, launch in enumerate(self.launches):
                launch.patch(places)
                for _, base, _ in launch.patches:
                    users = self._users.setdefault(base, [])
                    if not users or users[-1] != at:
                        users.append(at)
            self._graph = self._calls.graph(self.launches)
        elif places != self._last:
            last, self._last = self._last, []  # nothing is known of a graph whose addresses were set in part
            moved = {
                at for base, users in self._users.items() if not last or places[base] != last[base] for at in users
            }
            for at in sorted(moved):
                self.launches[at].patch(places)
                self._graph.set(at)
        self._last = places
        self._graph.launch(stream)
