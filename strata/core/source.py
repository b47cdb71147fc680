"""Source places: the user's file and line behind a node or an error."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from strata.errors import StrataError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USER = (_PACKAGE, os.path.dirname(importlib.__file__) + os.sep, "<")  # ours, imports, and code without a file


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
        if not file.startswith(_NOT_THE_USER):
            return Place(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


FnT = TypeVar("FnT", bound=Callable[..., Any])


def located(fn: FnT) -> FnT:
    """The function, with the user's line added to errors that leave it without one."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except StrataError as error:
            if error.place is None:
                error.place = here()
            raise

    return call  # type: ignore[return-value]
