"""Copies between devices: lazy until somebody asks for the elements, a step of the plan that needs them.

`(a @ b).to("cuda")` records a copy. What is below it is a separate program, on its own device; what is above starts
from the copy. A plan runs both, and copies in between, each time that it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from strata.backends import DeviceArray
from strata.mir import Node, Value
from strata.tensor.data import CopyTo, Data, Handle, handle_of, remember
from strata.tensor.placement import home_of

LAZY_COPIES: WeakSet[Node] = WeakSet()  # in expressions that are alive: mostly none, and none is looked for


def copied(x: Value, device: str) -> Value:
    """A lazy copy of an expression."""
    made = CopyTo(device)(x)
    LAZY_COPIES.add(made.node)
    return made


def moved(array: Any, device: str) -> Any:
    """An array in the memory of a device, one of the host's included; itself if it is there already."""
    home = home_of(device)
    if home is None:
        return array.numpy() if type(array) is DeviceArray else array
    if type(array) is DeviceArray and array.home is home:
        return array
    return home.upload(array.numpy() if type(array) is DeviceArray else np.asarray(array))


def copies_in(values: Sequence[Value]) -> list[Value]:
    """The copies that values are computed from and that have not been made yet, those that come first at the front."""
    found: list[Value] = []
    seen: set[int] = set()
    stack = [(x, False) for x in reversed(values)]
    while stack:
        x, done = stack.pop()
        if done:
            found.append(x)
        elif id(x.node) not in seen and type(x.node.op) is not Data and handle_of(x) is None:
            seen.add(id(x.node))
            if type(x.node.op) is CopyTo:
                stack.append((x, True))
            stack.extend((y, False) for y in reversed(x.node.inputs))
    return found


def make_copies(values: Sequence[Value], realize: Callable[[Value], Handle]) -> None:
    """Make the copies that values need; `realize` computes what is copied."""
    for copy in copies_in(values):
        assert isinstance(copy.node.op, CopyTo)
        source = realize(copy.node.inputs[0])
        remember(copy, Handle(moved(source.array, copy.node.op.device), source.type, source.binding))
