"""Tests generated from the registry: every rule of every op on every sample."""

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.mir import REGISTRY, Op, Sample
from strata.testing import check_dtypes, checks_for

CASES = [
    pytest.param(cls, sample, check, id=f"{cls.name}-{i}-{name}")
    for cls in REGISTRY.classes()
    for i, sample in enumerate(cls.samples())
    for name, check in checks_for(cls, sample).items()
]


@pytest.mark.parametrize(("cls", "sample", "check"), CASES)
def test_rule(cls: type[Op], sample: Sample, check) -> None:
    check(cls, sample)


@pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)
def test_claimed_dtypes(cls: type[Op]) -> None:
    for sample in cls.samples()[:1]:
        check_dtypes(cls, sample)


@pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)
def test_rules_are_complete(cls: type[Op]) -> None:
    assert cls.samples() or cls.name == "constant", f"{cls.name} has no samples"
    needed = ["infer", "numpy", "vmap"] + (["jvp", "vjp"] if cls.differentiable else [])
    missing = [rule for rule in needed if not cls.has_rule(rule)]
    assert not missing, f"{cls.name} lacks {', '.join(missing)}"
