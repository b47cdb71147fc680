"""Mistakes and their exact messages, one file a mistake: a failing program and what it says.

A case opens with the code that the error carries and the repair that `docs/errors` gives; `make golden` writes the
rest. Programs run after `prelude.txt`, under the file name `case.py`, so that messages name their lines.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.backends import registry
from strata.errors import StrataError
from strata.testing import GoldenCase, find_cases, read_case

FOLDER = Path(__file__).parent / "cases"
CASES = find_cases(FOLDER, "*.case")
PRELUDE = (Path(__file__).parent / "prelude.txt").read_text("utf-8")


def run(case: GoldenCase) -> str:
    """The name and message of the error that a program ends in."""
    scope: dict[str, object] = {"__name__": "case"}
    exec(compile(PRELUDE, "<prelude>", "exec"), scope)  # noqa: S102 - the programs are ours
    registered = dict(registry._made)
    registry._made = {name: made for name, made in registered.items() if name in ("cpu", "reference")}  # no test's own
    lines = [f"{line}\n" for line in case.program.split("\n")]
    linecache.cache["case.py"] = (len(case.program), None, lines, "case.py")
    try:
        exec(compile(case.program, "case.py", "exec"), scope)  # noqa: S102
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        text = f"{type(error).__name__}: {error}"  # while the lines are known
        raised = _forgetful(error)
    else:
        raise AssertionError(f"{case.path.name} raised nothing")
    finally:
        scope.clear()
        del linecache.cache["case.py"]
        registry._made = registered
    assert not isinstance(raised, StrataError) or "case.py:" in text, f"{case.path.name} does not name the line: {text}"
    code = raised.code if isinstance(raised, StrataError) else type(raised).__name__
    assert code == case.header["error"], f"{case.path.name} raised {code}: {raised}"
    return text


def _forgetful(error: Exception) -> Exception:
    """Without the frames that it came through: they keep values, and an equal one of the next case would be the same
    one, made at the line of this case."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_message(path: Path, golden: Callable[[Path, Callable[[GoldenCase], str]], None]) -> None:
    golden(path, run)


def test_cases_are_named_after_their_codes() -> None:
    named = [(path.stem.partition("_")[0], read_case(path).header) for path in CASES]
    assert [code for code, header in named if header["error"] != code or not header.get("repair")] == []
