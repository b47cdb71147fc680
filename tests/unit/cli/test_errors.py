"""Errors lead to their pages: the last line of a traceback, and `strata explain CODE`."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.errors import ShapeError

ROOT = Path(__file__).parents[3]


def test_a_traceback_ends_in_the_page_and_the_message_does_not() -> None:
    with pytest.raises(ShapeError) as raised:
        st.asarray(np.ones((2, 3))) @ st.asarray(np.ones((2, 3)))
    code = raised.value.code
    last = traceback.format_exception(raised.value)[-1].strip()
    assert last == f"more: strata explain {code}, or errors/{code}.html on the site"
    assert "more:" not in str(raised.value)


def test_a_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "S102"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("S102: inner sizes differ")
    assert "x @ w" in shown
    assert "S103" not in shown
    assert main(["explain", "S102", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == "errors/shapes.md#s102-inner-sizes-differ"


def test_every_section_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(p.read_text("utf-8") for p in (ROOT / "docs/errors").glob("*.md"))
    codes = sorted(set(re.findall(r"^## ([A-Z]\d{3})", text, re.MULTILINE)))
    assert len(codes) > 300
    for code in codes[::9]:
        assert main(["explain", code]) == 0
        assert capsys.readouterr().out.startswith(code)
    assert main(["explain", "S999"]) == 2
    assert "no error has the code S999" in capsys.readouterr().err
