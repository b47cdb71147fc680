"""Loops that count: a condition `i + 1 < bound` over a counter of the state says how many steps there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from strata.core import Dim, dim_min
from strata.io.onnx.comparisons import greater, less
from strata.io.onnx.items import Host, Item, Sizes
from strata.io.onnx.node import NodeView
from strata.mir import Constant, Value

_SAME = ("Identity", "Cast")  # what keeps a whole number


def counted_steps(n: NodeView, body: Any, carried: Sequence[Item]) -> Dim | None:
    """The steps of a Loop whose first condition holds; None where its condition does not count, or not to a size."""
    found = _Body(n, body, carried).steps(body.output[0].name)
    if found is None:
        return None
    return found if n.tracer.decide(less, 0, found) else 1  # the first step is run whatever the bound is


def changed(body: Any, count: int) -> list[int]:
    """The places of the state that a loop's step changes; what stays as it is, weights say, need not be carried."""
    kept = {name: node.input[0] for node in body.node if node.op_type == "Identity" for name in node.output}
    found = []
    for at in range(count):
        name = body.output[1 + at].name
        while name in kept:
            name = kept[name]
        if name != body.input[2 + at].name:
            found.append(at)
    return found


def decided(n: NodeView, condition: Item | None) -> bool | None:
    """Whether a comparison of sizes that were made floats holds: decided by the sizes at hand. None: it is none."""
    if not isinstance(condition, Value) or condition.node.op.name not in ("less", "greater"):
        return None
    a, b = (_size_of(x) for x in condition.node.inputs)
    if a is None or b is None:
        return None
    return n.tracer.decide(less if condition.node.op.name == "less" else greater, a, b)


def _size_of(x: Value) -> Dim | None:
    while x.node.op.name in ("cast", "reshape", "stack") and len(x.node.inputs) == 1:
        x = x.node.inputs[0]
    op: Any = x.node.op
    if op.name == "dim_size":
        return cast("Dim", op.dim)
    if isinstance(op, Constant) and op.data.array.size == 1:
        number = op.data.array.reshape(()).item()
        return int(number) if number == int(number) else None
    return None


class _Body:
    """The body of a loop as equations between names."""

    def __init__(self, n: NodeView, body: Any, carried: Sequence[Item]) -> None:
        self.n = n
        self.makers = {name: node for node in body.node for name in node.output}
        self.held = n.tracer.initializers(body)
        self.given = [x.name for x in body.input[2:]]
        self.outputs = [x.name for x in body.output[1:]]
        self.carried = carried
        self.own = {*self.makers, *self.held, *(x.name for x in body.input)}

    def steps(self, condition: str) -> Dim | None:
        """How often a condition that held before the first step holds."""
        node = self.makers.get(self._source(condition))
        if node is None:
            return None
        if node.op_type == "And":
            both = [self.steps(name) for name in node.input]
            return None if both[0] is None or both[1] is None else dim_min(both[0], both[1])
        sides = list(node.input)
        if node.op_type == "Greater":
            sides.reverse()
        if node.op_type not in ("Less", "Greater") or node.domain not in ("", "ai.onnx"):
            return None
        first, bound = self._counter(sides[0]), self._fixed(sides[1])
        return None if first is None or bound is None else bound - first

    def _source(self, name: str) -> str:
        node = self.makers.get(name)
        while node is not None and node.op_type in _SAME:
            name = node.input[0]
            node = self.makers.get(name)
        return name

    def _counter(self, name: str) -> Dim | None:
        """What a name that is one more than the last time begins with, less that one."""
        name = self._source(name)
        node = self.makers.get(name)
        if node is None or node.op_type != "Add":
            return None
        for before, step in (node.input, reversed(node.input)):
            place = self._place(self._source(before))
            if place is not None and self._source(self.outputs[place]) == name and self._fixed(step) == 1:
                return _whole(self.carried[place])
        return None

    def _place(self, name: str) -> int | None:
        return self.given.index(name) if name in self.given else None

    def _fixed(self, name: str) -> Dim | None:
        """A whole number that no step changes."""
        name = self._source(name)
        place = self._place(name)
        if place is not None:
            kept = self._source(self.outputs[place]) == name
            return _whole(self.carried[place]) if kept else None
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            view = NodeView(self.n.tracer, maker, [], self.n.version)
            return _whole(Host(np.asarray(view.attr("value", view.attr("value_int", 0.5)))))
        if name in self.held:
            return _whole(self.held[name])
        return None if name in self.own else _whole(self.n.tracer.frame.find(name))


def _whole(item: Item) -> Dim | None:
    if isinstance(item, Sizes):
        return item.flat[0] if item.array.size == 1 else None
    if isinstance(item, Host) and item.fixed and item.array.size == 1 and item.array.dtype.kind in "iu":
        return int(item.array.reshape(()))
    return None
