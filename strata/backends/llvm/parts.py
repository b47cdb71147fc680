"""Functions that many modules have, such as micro-kernels and packers, as modules of their own: compiled once for all.

A part is a function that its module keeps apart (internal, never inlined), or one that it exports under a name given
here, and that refers to nothing of its module but other parts. Code calls its parts by the names that they have in its
module; which code that is, is decided when it is loaded. Equal texts are therefore one piece of code, whatever the
parts are that they call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from strata.backends.llvm import jit
from strata.backends.llvm.builder import Function, Module
from strata.cache import digest
from strata.core import Target, new_rlock

_NAME = re.compile(r"@([\w.$-]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A function as a module, and the parts that it calls."""

    text: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A module's own text, and its parts by name, called ones first."""

    text: str
    parts: dict[str, Part]

    def keys(self, target: Target) -> dict[str, str]:
        """The keys of the parts' entries: the text of a part and what it calls decide its code."""
        found: dict[str, str] = {}
        for name, part in self.parts.items():
            calls = [f"{called} {found[called]}" for called in part.calls]
            found[name] = digest("part", name, part.text, *calls, target.key, jit.VERSION)
        return found


def split(module: Module, exported: Collection[str] = ()) -> Split:
    """The parts of a module, and the rest."""
    functions = {name: f if isinstance(f, str) else f.text() for name, f in module._functions.items()}
    candidates = {
        name: f
        for name, f in module._functions.items()
        if isinstance(f, Function) and (name in exported or (f._linkage == "internal" and "noinline" in f._attributes))
    }
    uses = {name: set(_NAME.findall(text)) - {name} for name, text in functions.items()}
    local = {*functions, *(table.removeprefix("@") for table in module._globals.values())}
    parts: dict[str, Part] = {}
    left = list(candidates)
    while ready := [n for n in left if uses[n] & local <= set(parts)]:
        for name in ready:
            visible = functions[name].replace("define internal ", "define ", 1)
            text = _module_text(module, {name: visible}, uses[name], candidates)
            parts[name] = Part(text, tuple(sorted(uses[name] & set(parts))))
        left = [n for n in left if n not in ready]
    kept = {name: text for name, text in functions.items() if name not in parts}
    needed = set[str]().union(*(uses[name] for name in kept))
    return Split(_module_text(module, kept, needed, candidates), parts)


def _module_text(module: Module, functions: dict[str, str], uses: set[str], parts: dict[str, Function]) -> str:
    """Some functions of a module with what they refer to; functions that are not among them are declared."""
    outside = [name for name in parts if name in uses and name not in functions]
    lines = [
        *([f'target triple = "{module.triple}"'] if module.triple else []),
        *(
            f"{name} = private unnamed_addr constant {body}, align 64"
            for body, name in module._globals.items()
            if name.removeprefix("@") in uses
        ),
        *(text for name, text in module._declarations.items() if name in uses and name not in module._functions),
        *(_declared(parts[name]) for name in outside),
        *functions.values(),
    ]
    return "\n".join(lines) + "\n"


def _declared(f: Function) -> str:
    types = ", ".join(type_ for type_, _ in f._parameters)
    return f"declare {f._result} @{f.name}({types})"


# ------------------------------------------------------------------------------------------------ entries of the store


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the code in an entry of the store."""

    usage: str  # of a kernel
    functions: tuple[str, ...]  # of the code itself
    parts: dict[str, str]  # keys of the entries of parts, by name
    exports: tuple[str, ...]  # functions that are parts

    def to_line(self) -> bytes:
        return json.dumps([self.usage, self.functions, self.parts, self.exports]).encode() + b"\n"

    @staticmethod
    def of(payload: bytes) -> Head:
        usage, functions, parts, exports = json.loads(payload[: payload.index(b"\n")])
        return Head(usage, tuple(functions), parts, tuple(exports))


_loaded: WeakValueDictionary[str, jit.Code] = WeakValueDictionary()  # parts by key; code that calls them keeps them
_lock = new_rlock()


class Loader:
    """Loads entries together with their parts; equal code is loaded once."""

    def __init__(self) -> None:
        self.made: dict[str, bytes] = {}  # entries of parts that may not be in the store
        self._parts: dict[str, jit.Code] = {}  # keeps them until all is loaded
        self._same: dict[tuple[str, ...], jit.Code] = {}

    def stored(self, key: str) -> bytes | None:
        """An entry of the store, if it and all its parts are there."""
        payload = jit.stored(key)
        if payload is None:
            return None
        head = Head.of(payload)
        return payload if all(self._part(k) is not None for k in head.parts.values()) else None

    def code(self, key: str, payload: bytes) -> tuple[Head, jit.Code]:
        """The code of an entry whose parts are there."""
        head = Head.of(payload)
        line, _, data = payload.partition(b"\n")
        same = (digest(data), *head.functions, *head.parts.values(), *head.exports)
        code = self._same.get(same)
        if code is None:
            code = self._same[same] = self._linked(key, head, data)
        return head, replace(code, key=key, head=line + b"\n")

    def _part(self, key: str) -> jit.Code | None:
        """A part, loaded once per process; None where the store has lost it."""
        with _lock:
            code = self._parts.get(key) or _loaded.get(key)
            if code is None:
                payload = self.made.get(key) or jit.stored(key)
                if payload is None:
                    return None
                line, _, data = payload.partition(b"\n")
                code = replace(self._linked(key, Head.of(payload), data), head=line + b"\n")
                _loaded[key] = code
            self._parts[key] = code
            return code

    def _linked(self, key: str, head: Head, data: bytes) -> jit.Code:
        parts = {name: part for name, k in head.parts.items() if (part := self._part(k)) is not None}
        code = jit.load(data, head.functions, key, parts)
        return replace(code, exports={name: parts[name] for name in head.exports})
