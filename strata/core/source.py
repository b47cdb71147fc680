"""Source places: the user's file and line behind a node or an error."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Place:
    """A line in the user's program."""

    file: str
    line: int

    @property
    def short(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def describe(self) -> str:
        """`train.py:41    h = x @ w`"""
        return f"{self.short}    {self.text}" if self.text else self.short


def here() -> Place | None:
    """The innermost line outside the strata package that led to this call."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.startswith("<"):
            return Place(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None
