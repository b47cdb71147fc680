"""A slice of the differential machine, from a fresh seed that is printed, and programs that went wrong once."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from strata.core import DType, f16, f32, f64
from tests.differential.paths import MAIN, OPEN, Run, check
from tests.differential.program import Shape, Step
from tests.differential.regressions import REGRESSIONS, V, exact, leaf, program
from tests.differential.turned import PATHS, turned_program
from tests.differential.workers import run_all

COUNT = 60
FIRST, TURNED = 5006, 12
# Gradients of all programs take long: they are for `python -m tests.differential`.
VALUES = [path for path in MAIN if path != "gradient"]


def test_random_programs_agree_on_every_path() -> None:
    seed = secrets.randbelow(1 << 31)
    print(f"to repeat: python -m tests.differential --seed {seed} --count {COUNT}")
    totals = run_all(seed, COUNT, 1, VALUES, whole=False)
    assert totals.programs == COUNT
    assert not totals.violations, "\n".join([f"--seed {seed} --count {COUNT}", *totals.violations])


@pytest.mark.parametrize("seed", range(TURNED))
def test_what_is_turned_and_merged_where_sizes_are_1_has_the_same_bits(seed: int) -> None:
    check(turned_program(FIRST + seed), PATHS)


def test_one_op_that_reads_twice_is_one_reader() -> None:
    """A square of what is merged: stored for several readers only, as a reshape is a view where n is 1."""
    steps = [
        Step("sin", (V[0],)), exact("transpose", V[1], (3, 2, 0, 1)), Step("use:merge", (V[2], 1)),
        Step("multiply", (V[3], V[3])), Step("sum", (V[4],)),
    ]  # fmt: skip
    check(program(leaf(f32, 16, 1, "n", 5), steps=steps, n=1, low=1), VALUES)


@pytest.mark.parametrize("shape", [("n",), ("n", 3), (3, "n")])
@pytest.mark.parametrize("dtype", [f16, f32, f64], ids=str)
def test_a_sum_of_negative_zeros_is_zero_on_every_path(shape: Shape, dtype: DType) -> None:
    zeros = np.full([1 if d == "n" else d for d in shape], -0.0)
    ways = Run(program(leaf(dtype, *shape, data=zeros), steps=[Step("sum", (V[0],))], n=1))
    for path in ("reference", "graph", "lazy", "later", "jit", *OPEN):
        assert not np.signbit(getattr(ways, path)()[0]), path


@pytest.mark.parametrize("name", REGRESSIONS)
def test_programs_that_went_wrong_once(name: str) -> None:
    check(REGRESSIONS[name], VALUES)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_gradients_of_programs_that_went_wrong_once(name: str) -> None:
    check(REGRESSIONS[name], ["gradient"])
