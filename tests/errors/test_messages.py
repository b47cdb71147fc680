"""Mistakes and their exact messages, one file a mistake: a failing program and what it says.

A case opens with the code that the error carries and the repair that `docs/errors` gives; `make golden` writes the rest.
Programs run after `PRELUDE`, under the file name `case.py`, so that messages name their lines.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.errors import StrataError
from strata.testing import Case, find_cases, read_case

FOLDER = Path(__file__).parent / "cases"
CASES = find_cases(FOLDER, "*.case")
PRELUDE = """\
import numpy as np
from strata import ops
from strata.core import bool_, c64, f16, f32, f64, i32, i64, sym, u32
from strata.mir import REGISTRY, Graph, evaluate, parse, pullback
g = Graph("main")
"""


def run(case: Case) -> str:
    """The name and message of the error that a program ends in."""
    scope: dict[str, object] = {"__name__": "case"}
    exec(compile(PRELUDE, "<prelude>", "exec"), scope)
    lines = [f"{line}\n" for line in case.program.split("\n")]
    linecache.cache["case.py"] = (len(case.program), None, lines, "case.py")
    try:
        exec(compile(case.program, "case.py", "exec"), scope)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        code = error.code if isinstance(error, StrataError) else type(error).__name__
        assert code == case.header["error"], f"{case.path.name} raised {code}: {error}"
        return f"{type(error).__name__}: {error}"
    finally:
        del linecache.cache["case.py"]
    raise AssertionError(f"{case.path.name} raised nothing")


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_message(path: Path, golden: Callable[[Path, Callable[[Case], str]], None]) -> None:
    golden(path, run)


def test_cases_are_named_after_their_codes() -> None:
    named = [(path.stem.partition("_")[0], read_case(path).header) for path in CASES]
    assert [code for code, header in named if header["error"] != code or not header.get("repair")] == []
