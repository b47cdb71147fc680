"""A few histories of every state machine, from a fresh seed that is printed; `python -m tests.machines` runs many."""

from __future__ import annotations

import secrets

import pytest

from tests.machines.running import BATCH, machines, run_batch


@pytest.mark.parametrize("name", machines())
def test_histories_agree_with_the_model(name: str, request: pytest.FixtureRequest) -> None:
    given: int = request.config.getoption("--seed")
    seed = given or secrets.randbelow(1 << 31)
    count = getattr(machines()[name], "slice", 20)
    print(f"to repeat: python -m tests.machines --machine {name} --seed {seed} --count {count}")
    for at in range(0, count, BATCH):
        done = run_batch(name, seed + at // BATCH, min(BATCH, count - at))
        assert done.violation is None, done.violation
