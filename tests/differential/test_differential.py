"""Programs that went wrong once, on every path."""

from __future__ import annotations

import pytest

from tests.differential.paths import MAIN, check
from tests.differential.program import Program
from tests.differential.regressions import REGRESSIONS


@pytest.mark.parametrize("name", REGRESSIONS)
def test_programs_that_went_wrong_once(name: str) -> None:
    program: Program = REGRESSIONS[name]
    check(program, [p for p in MAIN if p != "process"])
