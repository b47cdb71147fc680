"""The order of steps: that of the graph, or one that frees memory early, whichever has the lower peak.

Gradients of weights, for instance, come last in a graph; computed as soon as their operands are there, they free them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from strata.core import Dim, bounds
from strata.mir import Value

TYPICAL_BYTES = 1 << 14  # stands in for a size without an upper bound
WORTH = 0.98  # of the peak: what another order must save to be taken


class Unit(Protocol):
    """What is put in order: a group of nodes that becomes a step."""

    roots: list[Value]
    reads: list[Value]
    updates: dict[Value, Value]


U = TypeVar("U", bound=Unit)


@dataclass(frozen=True)
class Costs:
    """Bytes of values that live in the arena; results and what depends on parameters only live elsewhere."""

    outside: frozenset[Value]

    def of(self, x: Value) -> int:
        return 0 if x in self.outside else typical_bytes(x.type.nbytes)


def typical_bytes(size: Dim) -> int:
    if isinstance(size, int):
        return size
    high = bounds(size)[1]
    return TYPICAL_BYTES if high is None else high


def read_values(unit: Unit) -> list[Value]:
    return list(dict.fromkeys([*unit.reads, *unit.updates.values()]))


def peak(order: Sequence[Unit], costs: Costs) -> int:
    """The most bytes alive at one step."""
    last: dict[Value, int] = {}
    made = {r for unit in order for r in unit.roots}
    for at, unit in enumerate(order):
        for x in (*unit.roots, *read_values(unit)):
            last[x] = at
    ending: dict[int, list[Value]] = defaultdict(list)
    for x, at in last.items():
        if x in made:
            ending[at].append(x)
    most = alive = 0
    for at, unit in enumerate(order):
        alive += sum(costs.of(r) for r in unit.roots)
        most = max(most, alive)
        alive -= sum(costs.of(x) for x in ending[at])
    return most


def best_order(order: list[U], needs: Callable[[U], Sequence[Value]], costs: Costs) -> list[U]:
    """The given order, or one with a lower peak."""
    before = peak(order, costs)
    if not before:
        return order
    other = shrinking_first(order, needs, costs)
    return other if peak(other, costs) < WORTH * before else order


def shrinking_first(order: Sequence[U], needs: Callable[[U], Sequence[Value]], costs: Costs) -> list[U]:
    """What frees the most memory first; where nothing frees any, the given order."""
    place = {id(unit): i for i, unit in enumerate(order)}
    maker = {r: unit for unit in order for r in unit.roots}
    waiting: dict[int, int] = {}
    followers: dict[int, list[U]] = defaultdict(list)
    readers: dict[Value, set[int]] = defaultdict(set)
    for unit in order:
        before = {id(maker[x]) for x in needs(unit) if x in maker and maker[x] is not unit}
        waiting[id(unit)] = len(before)
        for one in before:
            followers[one].append(unit)
        for x in read_values(unit):
            readers[x].add(id(unit))
    by_id = {id(unit): unit for unit in order}

    def growth(unit: U) -> int:
        freed = sum(costs.of(x) for x in read_values(unit) if x in maker and len(readers[x]) == 1)
        return min(0, sum(costs.of(r) for r in unit.roots) - freed)

    heap = [(growth(u), place[id(u)]) for u in order if not waiting[id(u)]]
    heapq.heapify(heap)
    done: set[int] = set()
    found: list[U] = []
    while heap:
        key, at = heapq.heappop(heap)
        unit = order[at]
        if id(unit) in done:
            continue
        now = growth(unit)
        if now < key:
            heapq.heappush(heap, (now, at))
            continue
        done.add(id(unit))
        found.append(unit)
        for x in read_values(unit):
            readers[x].discard(id(unit))
            if len(readers[x]) == 1:
                (last,) = readers[x]
                if not waiting[last] and last not in done:
                    heapq.heappush(heap, (growth(by_id[last]), place[last]))
        for follower in followers[id(unit)]:
            waiting[id(follower)] -= 1
            if not waiting[id(follower)]:
                heapq.heappush(heap, (growth(follower), place[id(follower)]))
    return found
