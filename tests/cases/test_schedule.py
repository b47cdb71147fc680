"""Golden cases of schedules: one file a case, for named targets: a change of what is generated is a diff."""

from pathlib import Path

import pytest

from strata.testing import find_cases
from tests.cases.texts import schedule_text

CASES = find_cases(Path(__file__).parent / "schedule", "*.txt")


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_becomes(path: Path, golden) -> None:
    golden(path, schedule_text)
