"""Functions that many modules share (micro-kernels, packing), outlined into modules that are compiled once.

A part is a function that its module keeps apart (internal, never inlined), or one that it exports under a name given
here, and that refers to nothing of its module but other parts. Code calls its parts by the names that they have in its
module; which code that is, is decided when it is loaded. Equal texts are therefore one piece of code, whatever the
parts are that they call.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, IrModule
from strata.backends.llvm.jit import jit
from strata.cache import digest
from strata.core import Target

_NAME = re.compile(r"@([\w.$-]+)")
INNER = 3  # the level of optimisation of parts: most are inner loops


@dataclass(frozen=True, slots=True)
class OutlinedFunction:
    """A function as a module, and the parts that it calls."""

    text: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A module's own text, its parts by name, called ones first, and the keys of their entries."""

    text: str
    parts: dict[str, OutlinedFunction]
    keys: dict[str, str]


def split(module: IrModule, target: Target, exported: Collection[str] = ()) -> Split:
    """The parts of a module, and the rest."""
    functions = {name: f if isinstance(f, str) else f.text() for name, f in module._functions.items()}
    candidates = {
        name: f
        for name, f in module._functions.items()
        if isinstance(f, IrFunction)
        and (name in exported or (f._linkage == "internal" and "noinline" in f._attributes))
    }
    uses = {name: set(_NAME.findall(text)) - {name} for name, text in functions.items()}
    local = {*functions, *(table.removeprefix("@") for table in module._globals.values())}
    parts: dict[str, OutlinedFunction] = {}
    left = list(candidates)
    while ready := [n for n in left if uses[n] & local <= set(parts)]:
        for name in ready:
            visible = functions[name].replace("define internal ", "define ", 1)
            text = _module_text(module, {name: visible}, uses[name], candidates)
            parts[name] = OutlinedFunction(text, tuple(sorted(uses[name] & set(parts))))
        left = [n for n in left if n not in ready]
    kept = {name: text for name, text in functions.items() if name not in parts}
    needed = set[str]().union(*(uses[name] for name in kept))
    return Split(_module_text(module, kept, needed, candidates), parts, _keys(parts, target))


def _keys(parts: dict[str, OutlinedFunction], target: Target) -> dict[str, str]:
    """The text of a part and what it calls decide its code."""
    found: dict[str, str] = {}
    for name, part in parts.items():
        calls = [f"{called} {found[called]}" for called in part.calls]
        found[name] = digest("part", name, part.text, *calls, target.key, f"{jit.VERSION} level {INNER}")
    return found


def _module_text(module: IrModule, functions: dict[str, str], uses: set[str], parts: dict[str, IrFunction]) -> str:
    """Some functions of a module with what they refer to; functions that are not among them are declared."""
    outside = [name for name in parts if name in uses and name not in functions]
    lines = [
        *([f'target triple = "{module.triple}"'] if module.triple else []),
        *(
            f"{name} = private unnamed_addr constant {body}, align 64"
            for body, name in module._globals.items()
            if name.removeprefix("@") in uses
        ),
        *(text for name, text in module.declarations.items() if name in uses and name not in module._functions),
        *(_declared(parts[name]) for name in outside),
        *functions.values(),
    ]
    return "\n".join(lines) + "\n"


def _declared(f: IrFunction) -> str:
    types = ", ".join(type_ for type_, _ in f._parameters)
    return f"declare {f._result} @{f.name}({types})"
