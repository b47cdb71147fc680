"""Joining kernels: a stored value shares the kernel of a reader that runs over the same index space.

A join is decided by what the kernels compute and read. Their expression is built again only where something is summed
up, which is what may keep two kernels apart; all others are built once, when no more kernels join.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.core import Shape
from strata.lir.fused import MAX_DEPTH, FusionGroup, KernelOf, Recipes
from strata.lir.traits import Traits, is_generated
from strata.mir import Node, Value

if TYPE_CHECKING:
    from strata.passes import FusionLimits

MAX_OPS = 512  # of kernels that are joined


@dataclass(frozen=True, slots=True)
class Cut:
    """An edge of the graph that is not fused, and why."""

    producer: Node
    consumer: Node | None
    reason: str


@dataclass(slots=True, eq=False)
class _Joinable:
    """A kernel that others may join, by what decides that."""

    roots: list[Value]
    nodes: dict[int, Node]
    reads: dict[Value, None]  # of what has joined: roots that are read are among them
    kind: tuple[Shape, bool]  # of its roots: their shape, and whether they depend on parameters only
    sums: bool  # whether it reduces, or runs along an axis
    depth: int  # at most
    is_old: bool  # whether it computes what has been stored since
    first: int  # of its roots in the order of the graph
    last: int
    group: FusionGroup | None = None  # None: not built yet
    into: _Joinable | None = None  # what it has become a part of

    def now(self) -> _Joinable:
        """What it is a part of by now."""
        end = self
        while end.into is not None:
            end = end.into
        part = self
        while part.into is not None and part.into is not end:  # the next one who asks has a shorter way
            part.into, part = end, part.into
        return end


_Unit = FusionGroup | _Joinable


class Merger:
    """Joins the groups of a graph. `stored` is what is in memory; what nothing reads any more is taken out of it."""

    def __init__(
        self, stored: set[Value], fixed: set[Value], position: dict[int, int], traits: Callable[[Node], Traits],
        recipes: Recipes, limits: FusionLimits | None,
    ) -> None:  # fmt: skip
        self.stored, self.fixed, self.position, self.traits = stored, fixed, position, traits
        self.recipes, self.limits = recipes, limits
        self.parts: dict[Value, _Joinable] = {}  # by root, as they were at first
        self._generated: dict[Value, bool] = {}

    def run(
        self, groups: dict[Value, FusionGroup], cuts: list[Cut], results: set[Value]
    ) -> tuple[list[FusionGroup], list[Cut]]:
        distinct = list(dict.fromkeys(groups.values()))
        for group in distinct:
            part = self._part(group)
            if part is not None:
                self.parts.update(dict.fromkeys(group.roots, part))
        cuts = self._join(groups, distinct, cuts)
        units: dict[_Unit, None] = dict.fromkeys(self._part_of(root) or group for root, group in groups.items())
        return self._drop_unread([self._group(x) if isinstance(x, _Joinable) else x for x in units], cuts, results)

    def _part(self, group: FusionGroup) -> _Joinable | None:
        """A group as one that may join others; None: it may not."""
        if group.maker is None or group.updates or group.is_closed:
            return None
        kinds = {(r.shape, r in self.fixed) for r in group.roots}
        if len(kinds) != 1 or any(self.traits(n).contracts for n in group.nodes):
            return None
        own = set(group.roots)
        is_old = any(v in self.stored and v not in own for n in group.nodes for v in n.outputs)
        places = [self.position[id(r.node)] for r in group.roots]
        nodes, reads = {id(n): n for n in group.nodes}, dict.fromkeys(group.reads)
        maker = group.maker
        return _Joinable(
            group.roots, nodes, reads, kinds.pop(), maker.sums, maker.depth, is_old, min(places), max(places), group
        )

    def _part_of(self, root: Value) -> _Joinable | None:
        part = self.parts.get(root)
        return None if part is None else part.now()

    def _group(self, part: _Joinable) -> FusionGroup:
        if part.group is None:
            part.group = self._outline(part.roots).group
        return part.group

    def _outline(self, roots: list[Value]) -> KernelOf:
        maker = KernelOf(self.stored, FusionGroup(roots), self.recipes)
        maker.add(roots)
        maker.group.maker = maker
        return maker

    def _join(self, groups: dict[Value, FusionGroup], distinct: list[FusionGroup], cuts: list[Cut]) -> list[Cut]:
        """Join what can be, in the order of the graph. A value that ends up inside a kernel is no longer a cut."""
        reach = _Reach(groups, distinct, self.parts, self.position)
        by_producer: dict[int, list[Cut]] = defaultdict(list)
        for cut in cuts:
            if cut.consumer is not None:
                by_producer[id(cut.producer)].append(cut)
        joined: set[int] = set()
        for group in sorted(distinct, key=lambda g: max(self.position[id(r.node)] for r in g.roots)):
            consumer = self._part_of(group.roots[0])
            for read in list(group.reads) if consumer is not None else ():
                producer = self._part_of(read)
                if producer is None or consumer is None or producer is consumer:
                    continue
                made = self._both(producer, consumer) if self._can_share(producer, consumer, reach) else None
                if made is None:
                    continue
                reach.replace(producer, consumer, made)
                joined |= {id(c) for c in by_producer[id(read.node)] if id(c.consumer) in made.nodes}
                consumer = made
        return [c for c in cuts if id(c) not in joined]

    def _can_share(self, producer: _Joinable, consumer: _Joinable, reach: _Reach) -> bool:
        if producer.kind != consumer.kind or len(producer.nodes) + len(consumer.nodes) > MAX_OPS:
            return False
        if consumer.sums and any(map(self._is_generated, producer.roots)):
            return False
        return not reach.between(producer, consumer)

    def _is_generated(self, x: Value) -> bool:
        if x not in self._generated:
            self._generated[x] = is_generated(x)
        return self._generated[x]

    def _both(self, producer: _Joinable, consumer: _Joinable) -> _Joinable | None:
        """Both as one, if that is sound: its depth is at most one more than the consumer's, and only what is summed up
        asks for the expression."""
        roots = [*producer.roots, *consumer.roots]
        nodes, reads = producer.nodes | consumer.nodes, producer.reads | consumer.reads
        depth = max(producer.depth, consumer.depth + 1)
        sums = producer.sums or consumer.sums
        group = None
        if sums or depth > MAX_DEPTH or producer.is_old or consumer.is_old:
            maker = self._outline(roots)
            if maker.depth > MAX_DEPTH or maker.problems():
                return None
            group, depth, sums = maker.group, maker.depth, maker.sums
            nodes, reads = {id(n): n for n in group.nodes}, dict.fromkeys(group.reads)
        if self.limits is not None and not self.limits.allow(len(nodes), len(reads.keys() - set(roots)), len(roots)):
            return None
        first, last = min(producer.first, consumer.first), max(producer.last, consumer.last)
        return _Joinable(roots, nodes, reads, producer.kind, sums, depth, False, first, last, group)

    def _drop_unread(
        self, groups: list[FusionGroup], cuts: list[Cut], results: set[Value]
    ) -> tuple[list[FusionGroup], list[Cut]]:
        """A value whose readers have all joined its kernel need not be stored any more."""
        read = {x for g in groups for x in (*g.reads, *g.sources, *g.updates.values())} | results
        gone: set[int] = set()
        made = []
        for group in groups:
            kept = [r for r in group.roots if r in read]
            made.append(group)
            if group.maker is None or group.is_closed or not kept or len(kept) == len(group.roots):
                continue
            dropped = set(group.roots) - set(kept)
            self.stored -= dropped
            maker = self._outline(kept)
            if maker.depth > MAX_DEPTH or maker.problems():
                self.stored |= dropped
                continue
            made[-1] = maker.group
            gone |= {id(v.node) for v in dropped}
        return made, [c for c in cuts if id(c.producer) not in gone]


class _Reach:
    """Which groups depend on which, to keep merged kernels free of cycles. Merged groups stand for their parts."""

    def __init__(
        self, groups: dict[Value, FusionGroup], distinct: list[FusionGroup], parts: dict[Value, _Joinable],
        position: dict[int, int],
    ) -> None:  # fmt: skip
        self.inputs: dict[_Unit, set[_Unit]] = {}
        self.last: dict[_Unit, int] = {}  # of a group's roots, in the order of the graph
        for group in distinct:
            unit = parts.get(group.roots[0], group)
            read = [x for x in group.read_values if x in groups and groups[x] is not group]
            self.inputs[unit] = {parts.get(x, groups[x]) for x in read}
            self.last[unit] = max(position[id(r.node)] for r in group.roots)

    def between(self, producer: _Joinable, consumer: _Joinable) -> bool:
        """Whether a third group lies on a path from producer to consumer; it comes after the producer in the graph."""
        stack = [_now(unit) for unit in self.inputs[consumer]]
        seen: set[_Unit] = {producer, consumer}
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            before = [_now(unit) for unit in self.inputs[current]]
            if producer in before:
                return True
            if self.last[current] > producer.first:
                stack += before
        return False

    def replace(self, producer: _Joinable, consumer: _Joinable, merged: _Joinable) -> None:
        self.last[merged] = merged.last
        producer.into = consumer.into = merged
        self.inputs[merged] = {_now(unit) for unit in self.inputs[producer] | self.inputs[consumer]} - {merged}


def _now(unit: _Unit) -> _Unit:
    return unit.now() if isinstance(unit, _Joinable) else unit
