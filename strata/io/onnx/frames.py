"""State of the tracer: scopes of names, what was assumed about inputs, where a run may start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import Dim, substitute
from strata.errors import FileError
from strata.io.onnx.items import Host, Item
from strata.mir import Graph, Value

Path = tuple[Any, ...]  # a name, and positions in lists below it


@dataclass(frozen=True, slots=True)
class Guard:
    """What was assumed about two sizes."""

    test: Callable[[Any, Any], bool]
    a: Dim
    b: Dim
    truth: bool

    def holds(self, binding: Mapping[str, int]) -> bool:
        return self.test(substitute(self.a, binding), substitute(self.b, binding)) == self.truth


@dataclass(frozen=True, slots=True)
class Prefix:
    """A model read up to its first segment: runs on inputs of the same shapes start after it."""

    index: int  # of the node that needed the data
    graph: Graph
    places: list[list[Path]]  # where each result of the graph belongs
    items: dict[str, Item]
    uses: dict[str, int]
    scope: int
    params: dict[str, np.ndarray]
    leaves: dict[int, tuple[Any, Value]]


class Frame:
    """Names of one graph, and how often each is still used."""

    def __init__(self, outer: Frame | None = None) -> None:
        self.outer = outer
        self.items: dict[str, Item] = {}
        self.uses: dict[str, int] = {}

    def find(self, name: str) -> Item:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.items:
                return frame.items[name]
            frame = frame.outer
        raise FileError(f"{name!r} is used before it is computed", code="F500")

    def chain(self) -> Iterator[Frame]:
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.outer


def values_in(items: Mapping[str, Any]) -> Iterator[tuple[Path, Value]]:
    """Every value below names, with its place."""
    stack: list[tuple[Path, Any]] = [((name,), item) for name, item in items.items()]
    while stack:
        path, item = stack.pop()
        if isinstance(item, Value):
            yield path, item
        elif isinstance(item, list):
            stack += [((*path, i), x) for i, x in enumerate(item)]


def put(holder: Any, path: Path, item: Item) -> None:
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = item


def copied(item: Any) -> Any:
    return [copied(x) for x in item] if isinstance(item, list) else item


def has_run_data(items: Mapping[str, Any]) -> bool:
    return any(isinstance(x, Host) and not x.fixed for item in items.values() for x in _flat(item))


def _flat(item: Any) -> Iterator[Any]:
    if isinstance(item, list):
        for x in item:
            yield from _flat(x)
    else:
        yield item
