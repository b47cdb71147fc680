"""Hand-written kernels for named ops: what the loop generator cannot say (sorts, factorizations, transforms, loops of graphs).

A family registers a function for its op with `@override("name")`. It is given a node and a target, and returns a
`NativeOp`, or None where it has nothing for these types; the op then runs as its loops say, or on the host, and reports
say so. The machine code of a native op depends on types only: sizes are known when a program is bound, and go in as
arguments. So do the tables that a size asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.backends.llvm.builder import Module
from strata.core import Target
from strata.mir import Node

# an argument of a call: ("input", i), ("output", i), ("workspace", bytes from its start), ("number", size),
# ("table", array kept alive by the executable), ("pointer", native address), ("pool", 0) and ("threads", 0) to run other
# programs with, ("status", 0): the words of strata.backends.llvm.status
Slot = tuple[str, Any]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Call:
    """One function of the module over a number of points: `void function(ptr arguments, i64 begin, i64 end)`."""

    function: str
    slots: Sequence[Slot]
    points: int = 1
    grain: int = 1


@dataclass(frozen=True)
class Planned:
    """What an op does for given sizes: calls in order, and the bytes of workspace that they share."""

    calls: Sequence[Call]
    workspace: int = 0
    keep: Any = None  # what must stay alive as long as the calls may run


@dataclass(frozen=True, eq=False)
class NativeOp:
    """An op as machine code and a way to call it. `key` decides the code: equal keys share it."""

    key: str
    emit: Callable[[Module], None]
    functions: tuple[str, ...]
    plan: Callable[[Sizes], Planned]


Maker = Callable[[Node, Target], NativeOp | None]
_MAKERS: dict[str, Maker] = {}
_WHOLE: set[str] = set()
_FAMILIES: tuple[str, ...] = ("native", "native_recurrence")  # modules of this folder that register overrides, imported when one is first asked for


def override(*names: str, whole: bool = False) -> Callable[[Maker], Maker]:
    """Register the maker of one op, or of several. With `whole`, it is preferred to the loops that the op lowers to."""

    def wrap(maker: Maker) -> Maker:
        for name in names:
            _MAKERS[name] = maker
            if whole:
                _WHOLE.add(name)
        return maker

    return wrap


@cache
def _load_families() -> None:
    for family in _FAMILIES:
        importlib.import_module(f"strata.backends.llvm.{family}")


def native_op(node: Node, target: Target) -> NativeOp | None:
    """The hand-written form of a node, if there is one."""
    _load_families()
    maker = _MAKERS.get(node.op.name)
    return maker(node, target) if maker is not None else None


def runs_whole(node: Node, target: Target) -> bool:
    """Whether a node that has a lowering is better a step of its own."""
    _load_families()
    return node.op.name in _WHOLE and native_op(node, target) is not None
