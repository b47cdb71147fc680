"""A progress bar on a terminal: how much is done, how fast, and how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[..., None]  # advance(count=1, note="")


@contextmanager
def progress(what: str, total: int | None, *, wanted: bool | None = None, keep: bool = False) -> Iterator[Advance]:
    """A function to call with how many more are done, and a note to show after them (a text,
    or a function that makes one); `total=` sets a new total.

    Bars go to standard error, where that is a terminal; `wanted` says otherwise. `keep` leaves the bar there.
    """
    if wanted is False or (total is not None and total < 2) or (wanted is None and not sys.stderr.isatty()):
        yield lambda count=1, note="", total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=not keep) as bar:
        task = bar.add_task(what, total=total, rate="", note="")

        def advance(count: int = 1, note: str | Callable[[], str] = "", total: int | None = None) -> None:
            told = note() if callable(note) else note
            fields: dict[str, Any] = {"note": told} if told else {}
            if total is not None:
                fields["total"] = total
            bar.update(task, advance=count, rate=_rate(bar.tasks[0].speed), **fields)

        yield advance


def _rate(speed: float | None) -> str:
    """`12.3/s`, `4.0/min` where a second is too short, nothing as long as it is not known."""
    if not speed:
        return ""
    return f"{speed:,.0f}/s" if speed >= 100 else f"{speed:.1f}/s" if speed >= 1 else f"{speed * 60:.1f}/min"
