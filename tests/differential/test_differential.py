"""A slice of the differential machine, from a fresh seed that is printed, and programs that went wrong once."""

from __future__ import annotations

import secrets

import pytest

from tests.differential.paths import MAIN, check
from tests.differential.program import Program
from tests.differential.regressions import REGRESSIONS
from tests.differential.workers import run_all

COUNT = 60
# Gradients of all programs take long: they are for `python -m tests.differential`.
VALUES = [path for path in MAIN if path != "gradient"]


def test_random_programs_agree_on_every_path() -> None:
    seed = secrets.randbelow(1 << 31)
    print(f"to repeat: python -m tests.differential --seed {seed} --count {COUNT}")
    totals = run_all(seed, COUNT, 1, VALUES, whole=False)
    assert totals.programs == COUNT
    assert not totals.violations, "\n".join([f"--seed {seed} --count {COUNT}", *totals.violations])


@pytest.mark.parametrize("name", REGRESSIONS)
def test_programs_that_went_wrong_once(name: str) -> None:
    program: Program = REGRESSIONS[name]
    check(program, VALUES)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_gradients_of_programs_that_went_wrong_once(name: str) -> None:
    check(REGRESSIONS[name], ["gradient"])
