"""A slice of the differential machine, from a fresh seed that is printed, and programs that went wrong once."""

from __future__ import annotations

import secrets

import pytest

from tests.differential.paths import MAIN, OF_GRADIENTS, check, check_gradient
from tests.differential.program import Program
from tests.differential.regressions import REGRESSIONS
from tests.differential.workers import run_all

COUNT = 60
# Gradients of all programs are for `python -m tests.differential`: second derivatives of convolutions and attention
# still sum in another order where a size is a symbol, in one of some 250.
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


# The last bits of these gradients still differ where a size is a symbol: of a convolution with as many channels as a
# symbol says, and of attention over one row, differentiated twice. Their values are compared.
OTHER_ORDERS = ("narrow maps of few channels", "attention that goes back through a cap")


@pytest.mark.parametrize("name", REGRESSIONS)
def test_gradients_of_programs_that_went_wrong_once(name: str) -> None:
    check_gradient(REGRESSIONS[name], [p for p in OF_GRADIENTS if p != "bits" or name not in OTHER_ORDERS])
