"""Golden cases: one file holds a program, what is done to it, and the text it becomes.

    # pass: stabilize
    mir @f(x: f32[4]) -> f32[4] { … }
    # becomes
    mir @f(x: f32[4]) -> f32[4] { … }

The header is one or more `# key: value` lines. The whole result is compared, so a case cannot pass by accident.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from strata.errors import FileError

_HEADER = re.compile(r"# *([a-z_]+): *(.*\S) *")
_BECOMES = "# becomes"


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One golden case. `expected` is None while the file has no `# becomes` part yet."""

    path: Path
    header: Mapping[str, str]  # {"pass": "stabilize"}
    program: str
    expected: str | None

    def __str__(self) -> str:
        lines = [f"# {key}: {value}" for key, value in self.header.items()]
        parts = ["\n".join(lines), self.program]
        if self.expected is not None:
            parts += [_BECOMES, self.expected]
        return "\n".join(part.strip("\n") for part in parts) + "\n"


def find_cases(folder: Path, pattern: str = "**/*.mir") -> list[Path]:
    """The case files below a folder, in a fixed order. None at all is an error: that test would check nothing."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileError(f"{folder}: no golden case matches {pattern}", code="F190")
    return found


def read_case(path: Path) -> GoldenCase:
    """Read a case file; what is malformed is named by its line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header: dict[str, str] = {}
    at = 0
    while at < len(lines) and (match := _HEADER.fullmatch(lines[at])):
        key, value = match.groups()
        if key in header:
            raise FileError(f"{path}:{at + 1}: {key!r} is given twice", code="F191")
        header[key] = value
        at += 1
    if not header:
        raise FileError(f"{path}:1: a golden case opens with a line such as '# pass: name'", code="F191")
    cuts = [i for i in range(at, len(lines)) if lines[i].strip() == _BECOMES]
    if len(cuts) > 1:
        raise FileError(f"{path}:{cuts[1] + 1}: a second '{_BECOMES}'", code="F191")
    cut = cuts[0] if cuts else len(lines)
    program = _join(lines[at:cut])
    if not program:
        raise FileError(f"{path}:{at + 1}: the program is missing", code="F191")
    return GoldenCase(path, MappingProxyType(header), program, _join(lines[cut + 1 :]) if cuts else None)


def check_case(path: Path, run: Callable[[GoldenCase], str], *, update: bool = False) -> None:
    """Compare `run(case)` with the expected text; with `update`, write it into the file instead."""
    case = read_case(path)
    actual = _join(run(case).splitlines())
    if actual == case.expected:
        return
    if update:
        _write(GoldenCase(path, case.header, case.program, actual))
        return
    if case.expected is None:
        raise AssertionError(f"{path} has no '{_BECOMES}' part; `make golden` writes it. The result is\n{actual}")
    diff = difflib.unified_diff(case.expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="")
    raise AssertionError(f"{path}: the result differs; `make golden` accepts it\n" + "\n".join(diff))


def _join(lines: list[str]) -> str:
    """Text without blank lines at its ends and without spaces at the ends of its lines."""
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _write(case: GoldenCase) -> None:
    draft = case.path.with_name(case.path.name + ".new")
    draft.write_text(str(case), encoding="utf-8")
    os.replace(draft, case.path)  # a killed run leaves the old case, never half of the new one
