"""The registry of op classes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from strata.errors import OptionError, UnknownNameError
from strata.modules import LateTable, imported

if TYPE_CHECKING:
    from strata.mir.ir import Op


class Registry:
    """Op classes by name. One is shared by the whole package; a test or a plug-in may hold its own."""

    def __init__(self, load: Callable[[str | None], None] | None = None) -> None:
        """`load` imports what registers the op of a name that is not there; given None, all ops."""
        self._load = load
        self._ops: LateTable[type[Op]] = LateTable(None if load is None else partial(load, None))

    def is_whole(self) -> None:
        """All ops are registered that will be."""
        self._load = self._ops.source = None

    def add(self, name: str, cls: type[Op]) -> None:
        if dict.__contains__(self._ops, name) and self._ops[name].__qualname__ != cls.__qualname__:
            raise OptionError(f"op {name!r} is registered twice: {self._ops[name].__qualname__} and {cls.__qualname__}")
        self._ops[name] = cls

    def __getitem__(self, name: str) -> type[Op]:
        load = self._load  # another thread may be done meanwhile, and take it away
        if load is not None and not dict.__contains__(self._ops, name):
            load(name)
        if name not in self._ops:
            raise UnknownNameError(f"no op is named {name!r}{near(name, self._ops)}", code="N110")
        return self._ops[name]

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._ops))

    def __len__(self) -> int:
        return len(self._ops)

    def classes(self) -> list[type[Op]]:
        return [self._ops[name] for name in self]


REGISTRY = Registry(lambda name: imported("strata.ops.families").load(name))


def some_of(names: Iterable[str], most: int = 12) -> str:
    """The first of these names, and how many more there are; `none` where there are none."""
    found = list(names)
    rest = len(found) - most
    return ", ".join(found[:most] if rest > 0 else found) + (f" and {rest} more" if rest > 0 else "") or "none"


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'exp'?` when a known name is close."""
    import difflib

    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
