"""Tests generated from the registry: every rule of every op on every sample."""

from functools import partial

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.mir import REGISTRY, Op
from strata.testing import check_dtypes, checks_for
from tests.groups import check_all

every_op = pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)


@every_op
def test_rules(cls: type[Op]) -> None:
    check_all(
        (f"{cls.name}-{i}-{name}", partial(check, cls, sample))
        for i, sample in enumerate(cls.samples())
        for name, check in checks_for(cls, sample).items()
    )


@every_op
def test_claimed_dtypes(cls: type[Op]) -> None:
    for sample in cls.samples()[:1]:
        check_dtypes(cls, sample)


@every_op
def test_rules_are_complete(cls: type[Op]) -> None:
    assert cls.samples() or cls.name == "constant", f"{cls.name} has no samples"
    needed = ["infer", "numpy", "vmap"] + (["jvp", "vjp"] if cls.differentiable else [])
    missing = [rule for rule in needed if not cls.has_rule(rule)]
    assert not missing, f"{cls.name} lacks {', '.join(missing)}"
