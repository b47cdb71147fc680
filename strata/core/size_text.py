"""Symbolic sizes read from text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from strata.core.dims import Dim, Symbol, dim_max, dim_min, dim_sum, floordiv, from_atom, mod, sym
from strata.errors import ParseError

MAX_NESTING = 200  # brackets inside each other
MAX_DIGITS = 40  # of a number
KEPT_TEXT = 1000  # characters of a size that is kept once it was read
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z0-9_.]*)|(//|[-+*%(),]))")


def parse_dim(text: str, known: Mapping[str, Symbol] | None = None) -> Dim:
    """Read a size as `str` prints it. Symbols take their bounds from `known`; others get the defaults of `sym`."""
    table = tuple((known or {}).items())
    return _parsed(text, table) if len(text) < KEPT_TEXT else _read(text, table)


def _read(text: str, known: tuple[tuple[str, Symbol], ...]) -> Dim:
    tokens: list[str] = []
    at, end = 0, len(text.rstrip())
    depth = 0
    while at < end:
        match = _TOKEN.match(text, at)
        if not match:
            raise ParseError(f"size {_short(text)}: cannot read {_short(text[at:])}", code="P110")
        token = match.group().strip()
        depth += (token == "(") - (token == ")")
        if depth > MAX_NESTING:
            raise ParseError(f"size {_short(text)}: more than {MAX_NESTING} brackets inside each other", code="P110")
        if len(token) > MAX_DIGITS and token.isdigit():
            raise ParseError(f"size {_short(text)}: a number of {len(token)} digits", code="P110")
        tokens.append(token)
        at = match.end()
    parser = _DimParser(tokens, dict(known), text)
    try:
        result = parser.sum()
    except RecursionError:
        raise ParseError(f"size {_short(text)}: it is nested too deeply", code="P110") from None
    parser.end()
    return result


_parsed = lru_cache(maxsize=4096)(_read)  # plans and stored code have the same few sizes again and again


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r} …"


class _DimParser:
    def __init__(self, tokens: list[str], known: Mapping[str, Symbol], text: str) -> None:
        self.tokens, self.known, self.text, self.at = tokens, known, text, 0
        self._ends = _matching(tokens)
        self._read: dict[str, Dim] = {}  # what stands between brackets: long sizes have the same parts many times

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise ParseError(
                f"size {_short(self.text)}: expected {expected or 'a size'}, found {token or 'the end'!r}", code="P110"
            )
        self.at += 1
        return token

    def end(self) -> None:
        if self.peek():
            raise ParseError(f"size {_short(self.text)}: nothing may follow, found {self.peek()!r}", code="P110")

    def sum(self) -> Dim:
        parts = [self.product()]
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            parts.append(self.product() * sign)
        return parts[0] if len(parts) == 1 else dim_sum(parts)

    def product(self) -> Dim:
        value = self.factor()
        while self.peek() in ("*", "//", "%"):
            match self.take():
                case "*":
                    value = value * self.factor()
                case "//":
                    value = floordiv(value, self.factor())
                case _:
                    value = mod(value, self.factor())
        return value

    def factor(self) -> Dim:
        start = self.at
        end = self._ends.get(start + 1 if self.peek() in ("min", "max") else start)
        if end is None:
            return self._factor()
        key = " ".join(self.tokens[start:end])
        if key not in self._read:
            self._read[key] = self._factor()
        else:
            self.at = end + 1
        return self._read[key]

    def _factor(self) -> Dim:
        token = self.take()
        if token == "-":
            sign = -1
            while self.peek() == "-":
                self.take()
                sign = -sign
            return self.factor() * sign
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token.isdigit():
            return int(token)
        if token in ("min", "max"):
            self.take("(")
            a = self.sum()
            self.take(",")
            b = self.sum()
            self.take(")")
            return dim_min(a, b) if token == "min" else dim_max(a, b)
        if token[0].isalpha() or token[0] == "_":
            return from_atom(self.known[token]) if token in self.known else sym(token)
        raise ParseError(f"size {_short(self.text)}: {token!r} is not a size", code="P110")


def _matching(tokens: Sequence[str]) -> dict[int, int]:
    """Where each bracket is closed."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for at, token in enumerate(tokens):
        if token == "(":
            opened.append(at)
        elif token == ")" and opened:
            found[opened.pop()] = at
    return found
