"""Hand-written kernels for named ops: what the loop generator cannot say (sorts, factorizations, transforms, loops of graphs).

A family registers a function for its op with `@override("name")`. It is given a node and a target, and returns a
`NativeOp`, or None where it has nothing for these types; the op then runs on the host, and reports say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.backends.llvm.builder import Module
from strata.core import Dim, Target
from strata.mir import Node

# an argument of a call: ("input", i), ("output", i), ("workspace", bytes from its start), ("number", size),
# ("symbol", name of a symbolic size), ("table", array kept alive by the executable), ("pointer", native address)
Slot = tuple[str, Any]


@dataclass(frozen=True)
class Call:
    """One function of the module over a number of points: `void function(ptr arguments, i64 begin, i64 end)`."""

    function: str
    slots: tuple[Slot, ...]
    points: Dim = 1
    grain: int = 1


@dataclass(frozen=True)
class NativeOp:
    """An op as calls in order. `key` decides the machine code: equal keys share it."""

    key: str
    emit: Callable[[Module], None]
    calls: tuple[Call, ...]
    workspace: Dim = 0  # bytes


Maker = Callable[[Node, Target], NativeOp | None]
_MAKERS: dict[str, Maker] = {}
_FAMILIES: tuple[str, ...] = ()  # modules of this folder that register overrides, imported when one is first asked for


def override(*names: str) -> Callable[[Maker], Maker]:
    """Register the maker of one op, or of several."""

    def wrap(maker: Maker) -> Maker:
        for name in names:
            _MAKERS[name] = maker
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
