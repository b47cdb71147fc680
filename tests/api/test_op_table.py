"""docs/ops.md is made from the registry."""

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.testing.op_table import op_table, page


def test_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    text = op_table()
    if request.config.getoption("--update-golden"):
        page().write_text(text, encoding="utf-8")
    assert page().read_text(encoding="utf-8") == text, "docs/ops.md is out of date: run make golden"


def test_no_rule_is_missing() -> None:
    lacking = [line for line in op_table().splitlines() if "| – |" in line]
    assert not lacking, "\n".join(lacking)
