"""Lazy imports: a module is loaded when something of it is asked for."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from importlib import import_module as imported
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

__all__ = ["LateTable", "deferred", "imported"]

Scope = dict[str, Any]
T = TypeVar("T")


class deferred:  # noqa: N801 - read as a statement
    """Names that a package exports, whose modules are loaded when one of them is first asked for.

    with deferred(globals()):
        from strata.kernel.text import parse_kernel, show_kernel

    Until then neither the names nor the modules are there. `guard` is put around each value when it is loaded;
    `beyond` is asked for names that no import has. A name hides the module of the same name.
    """

    def __init__(
        self, scope: Scope, guard: Callable[[Any], Any] | None = None, beyond: Callable[[str], Any] | None = None
    ) -> None:
        self.scope, self.guard, self.beyond = scope, guard, beyond
        self.homes: dict[str, str] = {}

    def __enter__(self) -> None:
        with _lock:
            if not _hook.is_set:
                _hook.eager, _hook.is_set, builtins.__import__ = builtins.__import__, True, _import
            _open.append(self)

    def __exit__(self, *_: object) -> None:
        with _lock:
            _open.remove(self)
            if not _open and builtins.__import__ is _import:  # else others wrapped it
                _hook.is_set, builtins.__import__ = False, _hook.eager
        for name in self.homes:
            del self.scope[name]
        self.scope["__getattr__"] = self.load
        self.scope["__dir__"] = lambda: sorted({*self.scope, *self.homes})
        package = sys.modules[self.scope["__name__"]]
        package.__class__ = _DeferredPackage
        package.__dict__["__deferred__"] = self.homes

    def load(self, name: str) -> Any:
        """The value of a name, which is there from now on."""
        if name in self.homes:
            value = getattr(__import__(self.homes[name], fromlist=(name,)), name)  # of a module, or a module of it
            if self.guard is not None:
                value = self.guard(value)
            return self.scope.setdefault(name, value)  # the same for all threads that ask at once
        if self.beyond is not None and not name.startswith("__"):
            value = self.scope[name] = self.beyond(name)
            return value
        raise AttributeError(f"module {self.scope['__name__']!r} has no attribute {name!r}")


class _DeferredPackage(ModuleType):
    """A package that is not told of a module whose name it exports as something else."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self.__dict__["__deferred__"] and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


_open: list[deferred] = []
_lock = threading.Lock()
_hook = SimpleNamespace(is_set=False, eager=builtins.__import__)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`import` while packages list what they export: their own statements are noted, those of others are run."""
    block = next((block for block in (*_open,) if block.scope is globals), None)
    if block is None or not fromlist:
        return _hook.eager(name, globals, locals, fromlist, level)
    block.homes.update(dict.fromkeys(fromlist, name))
    return SimpleNamespace(**dict.fromkeys(fromlist))


class LateTable(dict[str, T]):
    """A table that modules fill when they are imported: `source` imports them all when something is not there."""

    def __init__(self, source: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.source = source

    def filled(self) -> LateTable[T]:
        """The table with all that belongs to it."""
        source = self.source  # another thread may be done meanwhile, and take it away
        if source is not None:
            source()
        return self

    def __missing__(self, name: str) -> T:
        if not dict.__contains__(self.filled(), name):
            raise KeyError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or dict.__contains__(self.filled(), name)

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self.filled())

    def __len__(self) -> int:
        return dict.__len__(self.filled())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if name in self else default

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self.filled())

    def items(self) -> ItemsView[str, T]:  # type: ignore[override]
        return ItemsView(self.filled())

    def values(self) -> ValuesView[T]:  # type: ignore[override]
        return ValuesView(self.filled())
