"""Cache entries of machine code: their header, and loading them with the functions they call."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from strata.backends.llvm.jit import jit
from strata.cache import digest
from strata.core import new_rlock


@dataclass(frozen=True, slots=True)
class CodeHeader:
    """What stands before the code in an entry of the store."""

    usage: str  # of a kernel
    functions: tuple[str, ...]  # of the code itself
    parts: dict[str, str]  # keys of the entries of parts, by name
    exports: tuple[str, ...]  # functions that are parts

    def to_line(self) -> bytes:
        return json.dumps([self.usage, self.functions, self.parts, self.exports]).encode() + b"\n"

    @staticmethod
    def of(payload: bytes) -> CodeHeader:
        usage, functions, parts, exports = json.loads(payload[: payload.index(b"\n")])
        return CodeHeader(usage, tuple(functions), parts, tuple(exports))


_loaded: WeakValueDictionary[str, jit.MachineCode] = (
    WeakValueDictionary()
)  # parts by key; code that calls them keeps them
_lock = new_rlock()


class Loader:
    """Loads entries together with their parts; equal code is loaded once."""

    def __init__(self) -> None:
        self.made: dict[str, bytes] = {}  # entries of parts that may not be in the store
        self._parts: dict[str, jit.MachineCode] = {}  # keeps them until all is loaded
        self._same: dict[tuple[str, ...], jit.MachineCode] = {}

    def stored(self, key: str) -> bytes | None:
        """An entry of the store, if it and all its parts are there."""
        payload = jit.stored(key)
        if payload is None:
            return None
        head = CodeHeader.of(payload)
        return payload if all(self._part(k) is not None for k in head.parts.values()) else None

    def code(self, key: str, payload: bytes) -> tuple[CodeHeader, jit.MachineCode]:
        """The code of an entry whose parts are there."""
        head = CodeHeader.of(payload)
        line, _, data = payload.partition(b"\n")
        same = (digest(data), *head.functions, *head.parts.values(), *head.exports)
        code = self._same.get(same)
        if code is None:
            code = self._same[same] = self._linked(key, head, data)
        return head, replace(code, key=key, head=line + b"\n")

    def _part(self, key: str) -> jit.MachineCode | None:
        """A part, loaded once per process; None where the store has lost it."""
        with _lock:
            code = self._parts.get(key) or _loaded.get(key)
            if code is None:
                payload = self.made.get(key) or jit.stored(key)
                if payload is None:
                    return None
                line, _, data = payload.partition(b"\n")
                code = replace(self._linked(key, CodeHeader.of(payload), data), head=line + b"\n")
                _loaded[key] = code
            self._parts[key] = code
            return code

    def _linked(self, key: str, head: CodeHeader, data: bytes) -> jit.MachineCode:
        parts = {name: part for name, k in head.parts.items() if (part := self._part(k)) is not None}
        code = jit.load(data, head.functions, key, parts)
        return replace(code, exports={name: parts[name] for name in head.exports})
