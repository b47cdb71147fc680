"""Recording and replay: requests and answers as JSON lines, to be compared after a change or a complaint."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, Final, Self

from strata.core import append_private, here, open_file
from strata.errors import FileError

TIMES: Final = ("id", "created", "created_at", "item_id", "call_id", "cached_tokens")  # of an answer, of one time only


@dataclass(frozen=True)
class Record:
    """One request, the path it was sent to, and its answer."""

    path: str
    body: Any
    answer: Any
    seconds: float = 0.0


class Recorder:
    """Appends records to a file, each at once and whole; safe for many threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = append_private(path)  # what users say is private
        except (OSError, ValueError) as error:
            raise FileError(f"{str(path)!r} cannot be written: {error}", code="F500", place=here()) from None
        self._lock = Lock()

    def write(self, record: Record) -> None:
        line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":"))
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, in the order of writing."""
    with io.TextIOWrapper(open_file(path), "utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                yield Record(found["path"], found["body"], found["answer"], float(found.get("seconds", 0.0)))
            except (ValueError, KeyError, TypeError) as error:
                raise FileError(f"{path}: line {number} is not a record: {error}", code="F620") from None


def replay(
    path: str | os.PathLike[str], answer: Callable[[str, Any], Any], *, same: Callable[[Any, Any], bool] | None = None
) -> list[tuple[Record, Any]]:
    """Send all recorded requests again, in order; returns those whose answers differ, with the new answer.

    `answer(path, body)` asks, and `same(old, new)` compares, by default what was said and not when.
    """
    compare = same or (lambda old, new: told(old) == told(new))
    found = []
    for record in list(read_records(path)):  # asking may add to the file
        new = answer(record.path, record.body)
        if not compare(record.answer, new):
            found.append((record, new))
    return found


def told(answer: Any) -> Any:
    """An answer without what differs from one time to the next: its id and its date."""
    if isinstance(answer, dict):
        return {k: told(v) for k, v in answer.items() if k not in TIMES}
    return [told(v) for v in answer] if isinstance(answer, list) else answer
