"""The shipped suite on the `cpu` device: every sample of every op as native code, against the oracle."""

from functools import partial

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.mir import REGISTRY, Op
from strata.testing.backend_suite import cases, run_case
from tests.groups import check_all


@pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)
def test_samples(cls: type[Op]) -> None:
    check_all((case.name, partial(run_case, "cpu", case)) for case in cases([cls]))
