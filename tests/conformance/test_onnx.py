"""A fixed third of onnx.backend.test on the compiled backend; `make onnx` runs all of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

pytest.importorskip("onnx", reason="the suite comes with the package onnx")

from tests.conformance.onnx_expected import EXPECTED_FAILURES, reason
from tests.conformance.onnx_suite import cases, run_case

pytestmark = pytest.mark.slow

PARTS = 3


def third() -> Iterator[str]:
    """Names by a hash of their own: a new case does not move the others."""
    yield from (name for name in sorted(cases()) if zlib.crc32(name.encode()) % PARTS == 0)


@pytest.mark.parametrize("name", list(third()))
def test_case(name: str) -> None:
    outcome = run_case(name)
    expected = reason(name)
    if expected is not None and not outcome.passed:
        pytest.xfail(expected)
    assert outcome.passed, outcome.message


def test_every_expected_failure_is_a_case() -> None:
    assert set(EXPECTED_FAILURES) <= set(cases())
