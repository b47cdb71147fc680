"""`make test` runs a few cases of tests that have many: of each parameter many values, and others next time."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

from tests.few import drawn

ROOT = Path(__file__).parents[3]
GRID = [dict(zip("abc", at, strict=True)) for at in itertools.product(range(6), range(4), range(2))]


def test_values_of_every_parameter_are_among_them() -> None:
    for seed in range(20):
        kept = drawn(GRID, 6, random.Random(seed))
        assert len(kept) == 6
        for name, count in zip("abc", (6, 4, 2), strict=True):
            assert {GRID[at][name] for at in kept} == set(range(count))


def test_every_case_has_its_turn() -> None:
    assert set.union(*(drawn(GRID, 6, random.Random(seed)) for seed in range(100))) == set(range(len(GRID)))


def test_a_seed_repeats_the_draw() -> None:
    assert drawn(GRID, 5, random.Random(3)) == drawn(GRID, 5, random.Random(3))


def test_no_more_than_there_are() -> None:
    assert drawn(GRID[:3], 9, random.Random(0)) == {0, 1, 2}


def collected(*words: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *words]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(line for line in told.splitlines() if "::" in line)


def test_all_run_unless_few_are_asked_for() -> None:
    file = "tests/unit/kernel/test_short_sums.py"
    every, some = collected(file), collected(file, "--few", "--random-order=1")
    assert set(some) < set(every)
    assert {name.partition("[")[0] for name in some} == {name.partition("[")[0] for name in every}
    assert some == collected(file, "--few", "--random-order=1") != collected(file, "--few", "--random-order=2")
