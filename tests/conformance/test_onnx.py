"""A fixed third of onnx.backend.test on the compiled backend; `make onnx` runs all of it."""

from __future__ import annotations

import zlib
from functools import partial

import pytest

pytest.importorskip("onnx", reason="the suite comes with the package onnx")

from tests.conformance.onnx_expected import EXPECTED_FAILURES, reason
from tests.conformance.onnx_suite import cases, run_case
from tests.groups import check_all

pytestmark = pytest.mark.slow

PARTS = 3
GROUPS = 24  # the names of all cases take seconds to make: a process that runs none of them does without


@pytest.mark.few(12)
@pytest.mark.parametrize("group", range(GROUPS))
def test_cases(group: int) -> None:
    """Names by a hash of their own: a new case does not move the others."""
    named = {name: zlib.crc32(name.encode()) for name in sorted(cases())}
    some = [name for name, code in named.items() if code % PARTS == 0 and code // PARTS % GROUPS == group]
    assert some
    check_all((name, partial(check, name)) for name in some)


def check(name: str) -> None:
    outcome = run_case(name)
    assert outcome.passed or reason(name) is not None, outcome.message


def test_every_expected_failure_is_a_case() -> None:
    assert set(EXPECTED_FAILURES) <= set(cases())
