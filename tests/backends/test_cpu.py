"""The shipped suite on the `cpu` device: every sample of every op as native code, against the oracle."""

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.testing.backend_suite import Case, cases, run_case

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sample(case: Case) -> None:
    run_case("cpu", case)
