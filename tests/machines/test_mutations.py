"""Defects that are put back are found; those that take long are left to `python -m tests.machines.mutations`."""

from __future__ import annotations

import secrets

import pytest

from tests.machines.mutations import MUTATIONS, ROOT, Mutation, fails


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_defect_can_be_put_back(mutation: Mutation) -> None:
    """Its text is still there, once: a defect that no longer fits the code must be written anew."""
    for file, old, new in mutation.changes:
        text = (ROOT / file).read_text()
        assert text.count(old) == 1, file
        compile(text.replace(old, new), file, "exec")


@pytest.mark.slow
def test_one_of_the_defects_is_found() -> None:
    """One a run, drawn anew: all of them together take minutes."""
    if not MUTATIONS:
        return
    mutation = MUTATIONS[secrets.randbelow(len(MUTATIONS))]
    print(f"to repeat: python -m tests.machines.mutations {mutation.name}")
    is_found, output = fails(mutation.check, mutation)
    assert is_found, output
