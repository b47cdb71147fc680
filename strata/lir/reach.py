"""Which kernels depend on which while kernels are joined, so that no joined one waits for itself."""

from __future__ import annotations

from strata.lir.fused import FusionGroup
from strata.mir import Value


class Reach:
    """Which groups depend on which, to keep merged kernels free of cycles. Merged groups stand for their parts."""

    def __init__(self, groups: dict[Value, FusionGroup], distinct: list[FusionGroup], position: dict[int, int]) -> None:
        self.position = position
        self.groups = {id(g): g for g in distinct}
        self.merged: dict[int, int] = {}
        self.inputs: dict[int, set[int]] = {}
        for group in distinct:
            self.inputs[id(group)] = {
                id(groups[x]) for x in group.read_values if x in groups and groups[x] is not group
            }

    def _now(self, group: int) -> int:
        while group in self.merged:
            group = self.merged[group]
        return group

    def between(self, producer: FusionGroup, consumer: FusionGroup) -> bool:
        """Whether a third group lies on a path from producer to consumer; it comes after the producer in the graph."""
        start = min(self.position[id(r.node)] for r in producer.roots)
        ends = {id(producer), id(consumer)}
        stack = [self._now(g) for g in self.inputs[id(consumer)]]
        seen: set[int] = set(ends)
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            before = [self._now(g) for g in self.inputs[current]]
            if id(producer) in before:
                return True
            if max(self.position[id(r.node)] for r in self.groups[current].roots) > start:
                stack += before
        return False

    def replace(self, producer: FusionGroup, consumer: FusionGroup, merged: FusionGroup) -> None:
        self.groups[id(merged)] = merged
        self.inputs[id(merged)] = self.inputs[id(producer)] | self.inputs[id(consumer)]
        for part in (producer, consumer):
            self.merged[id(part)] = id(merged)
