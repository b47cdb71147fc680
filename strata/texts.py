"""Parsing the text of any stage: the first word says which one it is."""

from __future__ import annotations

from strata import hir, mir
from strata.arguments import own_checks, public
from strata.core import located
from strata.errors import ParseError
from strata.kernel import Kernel, parse_kernel
from strata.lir import Lir, parse_module

READERS = {"mir": mir.parse, "hir": hir.parse, "kernel": parse_kernel, "lir": parse_module}


@own_checks()
@located
def parse(text: str) -> mir.Graph | hir.HirModule | Kernel | Lir:
    """What a text stands for: a graph (`mir`), a module of blocks (`hir`), a kernel, or a plan with both (`lir`)."""
    if not isinstance(text, str):
        raise ParseError(f"parse takes a text, got {type(text).__name__}", code="P123")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise ParseError(f"line {line}: {text[error.start]!r} is half of a character", code="P123") from None
    words = next((line.split() for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"), [""])
    return READERS.get(words[0], mir.parse)(text)  # type: ignore[operator]


parse = public(parse)
