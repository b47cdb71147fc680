"""Elements that graphs cannot hold, strings above all: ops that only move elements move their positions instead.

The handler of such an op gets integers in place of the elements; its results are looked up afterwards. Position 0 is
the empty element, which pads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from strata.errors import DTypeError
from strata.io.onnx.dtypes import in_graphs, is_text
from strata.io.onnx.items import Host, Item
from strata.io.onnx.node import NodeView


def by_position(reader: Callable[[NodeView], Any]) -> Callable[[NodeView], Any]:
    """A reader of an op that moves elements, for every type of element."""

    @wraps(reader)
    def read(n: NodeView) -> Any:
        return reader(n) if in_graphs(n.np_dtype(0)) else _moved(n, reader)

    return read


def _moved(n: NodeView, reader: Callable[[NodeView], Any]) -> tuple[np.ndarray, ...]:
    kind = n.np_dtype(0)
    if n.attr("reduction", "none") != "none":
        named = "texts" if is_text(kind) else kind
        raise DTypeError(f"{n.label}: {named} are not combined by {n.attr('reduction')!r}", code="D500")
    held = [np.array([""] if is_text(kind) else [0], kind)]
    items: list[Item | None] = []
    count = 1
    for i, item in enumerate(n.items):
        if item is None:
            items.append(None)
            continue
        array = n.array(i)
        if array.dtype == kind:
            held.append(array.reshape(-1))
            array = np.arange(count, count + array.size).reshape(array.shape)
            count += array.size
        items.append(Host(array))
    table = np.concatenate(held)
    moved = n.tracer.evaluated(reader, NodeView(n.tracer, n.proto, items, n.version))
    return tuple(table[at] for at in moved)
