"""Programs as trees, for tests that read the whole package: no more of it is parsed and walked than a test is about."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def nodes_of(source: str, words: Iterable[str]) -> Iterator[ast.AST]:
    """Every node of a program in which one of the words stands: what is looked for has one of them in its name."""
    if any(word in source for word in words):
        yield from ast.walk(ast.parse(source))


def statements(source: str) -> Iterator[ast.stmt]:
    """Every statement of a program, in functions and classes too, without a look at expressions."""
    rest: list[ast.AST] = [ast.parse(source)]
    for node in rest:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            rest += getattr(node, name, ())
        if isinstance(node, ast.stmt):
            yield node
