"""Source places: the user's file and line behind a node or an error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import linecache
import os
import sys
import threading
from dataclasses import dataclass
from opcode import opmap
from types import FrameType, TracebackType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_THE_USER = (  # ours; imports and decorators, which stand between the user and us; and code without a file
    _PACKAGE, os.path.dirname(importlib.__file__) + os.sep, contextlib.__file__, functools.__file__,
    dataclasses.__file__, threading.__file__, os.path.join(os.path.dirname(threading.__file__), "concurrent", ""), "<",
)  # fmt: skip

_TYPED_IN = ("<stdin>", "<console>", "<python-input-", "<ipython-input-")  # by the user, line by line
_NUMPY = f"{os.sep}site-packages{os.sep}numpy{os.sep}"  # calls back what it was given
_COMPARE = opmap["COMPARE_OP"]
_MOST_KEPT = 4096  # files, and lines, that are remembered


@dataclass(frozen=True, slots=True)
class Place:
    """A line in the user's program, or a part of a file that is not a program: a node of a model."""

    file: str
    line: int
    part: str = ""

    @property
    def short(self) -> str:
        if self.part:
            return f"{os.path.basename(self.file)}: {self.part}" if self.file else self.part
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        return "" if self.part else linecache.getline(self.file, self.line).strip()

    def describe(self) -> str:
        """`train.py:41    h = x @ w`"""
        return f"{self.short}    {self.text}" if self.text else self.short


class _Users(dict[str, bool]):
    """Whether a file is the user's; each is looked at once."""

    def __missing__(self, file: str) -> bool:
        if len(self) >= _MOST_KEPT:
            self.clear()
        self[file] = found = file.startswith(_TYPED_IN) or not (file.startswith(_NOT_THE_USER) or _NUMPY in file)
        return found


is_users = _Users()


@functools.lru_cache(_MOST_KEPT)
def _place(file: str, line: int) -> Place:
    return Place(file, line)


def here() -> Place | None:
    """The innermost line outside the strata package that led to this call."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users[file]:
            return _place(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_comparison(frame: FrameType) -> bool:
    """Whether a frame is at a comparison such as `a == b`, rather than at a look-up in a container or a call."""
    return frame.f_code.co_code[frame.f_lasti] == _COMPARE


def passed(trace: TracebackType | None) -> Place | None:
    """The innermost line outside the strata package among those that an exception came through."""
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users[file]:
            found = Place(file, trace.tb_lineno)
        trace = trace.tb_next
    return found
