"""Printing for commands: tables, sizes, times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(*, error: bool = False) -> Console:
    """Where tables go; without a terminal they are plain and not cut at 80 columns."""
    from rich.console import Console

    made = Console(stderr=error, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=error, highlight=False, width=160, no_color=True)
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table; columns whose name begins with `>` are aligned to the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))  # a list in brackets is not markup
    console().print(made)


def as_json(value: Any, *, lines: bool = False) -> None:
    """For programs; `lines` puts a value on one line, for streams of them."""
    json.dump(value, sys.stdout, indent=None if lines else 2, default=str, ensure_ascii=not lines)
    print(flush=lines)


def write_json(path: str, value: Any) -> None:
    """A file for programs and people."""
    Path(path).write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n", "utf-8")


def size(count: float) -> str:
    """`1.5 MB`"""
    name, scale = unit(count)
    return f"{count:.0f} B" if name == "B" else f"{count / scale:.1f} {name}"


def unit(count: float) -> tuple[str, float]:
    """The unit that this many bytes are shown in, and its size: `("MB", 1e6)`."""
    names = ("B", "kB", "MB", "GB")
    at = next((i for i in range(3) if count < 1000 ** (i + 1)), 3)
    return names[at], 1000.0**at


def duration(seconds: float) -> str:
    """`1.25 ms`"""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
