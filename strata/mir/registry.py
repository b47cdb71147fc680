"""The registry of op classes by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from strata.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from strata.mir.ir import Op


class Registry:
    """Op classes by name. One is shared by the whole package; a test or a plug-in may hold its own."""

    def __init__(self) -> None:
        self._ops: dict[str, type[Op]] = {}

    def add(self, name: str, cls: type[Op]) -> None:
        if name in self._ops and self._ops[name].__qualname__ != cls.__qualname__:
            raise OptionError(f"op {name!r} is registered twice: {self._ops[name].__qualname__} and {cls.__qualname__}")
        self._ops[name] = cls

    def __getitem__(self, name: str) -> type[Op]:
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


REGISTRY = Registry()


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
