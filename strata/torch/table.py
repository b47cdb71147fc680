"""The table of ATen overloads: each is a function over our ops.

A rule is called as `rule(out, *args, **kwargs)`: `out` is the type of the result (a tuple where there are several), and
the arguments are those of the overload, with values for tensors and sizes for SymInts. What it returns is cast to the
element type of `out`, so that a rule says what is computed and torch says in which type it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Rule = Callable[..., Any]


class Unsupported(Exception):  # noqa: N818 - a reason rather than an error: it decides where a graph is split
    """Why an op stays in torch."""


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload: its rule and the ops it is made of, for the table in the docs."""

    overload: str
    rule: Rule
    family: str


@dataclass(frozen=True, slots=True)
class Later:
    """One of several results, made only where somebody reads it; and only for some ops, where they are named."""

    make: Callable[[], Any]
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """What a rule made, and a truth value that torch has an error for, in its words. Where nothing looks at it, as on
    a GPU, the op stays in torch if the result would be wrong without it: if it is `needed`."""

    made: Any
    fails: Any
    told: str
    needed: bool = False


TABLE: dict[str, Overload] = {}


def aten(*overloads: str) -> Callable[[Rule], Rule]:
    """Register a rule for overloads: `add.Tensor`; `relu` alone is `relu.default`."""

    def wrap(rule: Rule) -> Rule:
        enter(overloads, rule, rule.__module__.rpartition(".")[2])
        return rule

    return wrap


def enter(overloads: Iterable[str], rule: Rule, family: str) -> None:
    for name in overloads:
        full = name if "." in name else f"{name}.default"
        full = full if "::" in full else f"aten::{full}"
        assert full not in TABLE, f"{full} twice"
        TABLE[full] = Overload(full, rule, family)


def find(target: Any) -> Overload | None:
    """The entry of an op overload of torch."""
    return TABLE.get(overload_name(target))


def overload_name(target: Any) -> str:
    """`aten::add.Tensor`, `higher_order::cond.default`; what is no op of torch has the name it prints as."""
    name = getattr(target, "name", None)
    full = str(name()) if callable(name) else str(target)
    if "::" not in full and callable(name):
        full = f"{getattr(target, 'namespace', '')}::{full}"
    return full if "." in full else f"{full}.default"
