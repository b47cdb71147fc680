"""The notebooks: outputs are kept, with plots, and fast ones run here; `python -m tests.notebooks` runs all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import notebooks

PATHS = notebooks.notebooks()


def test_there_are_six() -> None:
    assert len(PATHS) == 6
    assert len(notebooks.notebooks(fast=True)) >= 2


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_outputs_are_kept_with_plots(path: Path) -> None:
    text = path.read_text("utf-8")
    book = json.loads(text)
    cells = [c for c in book["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1)), "python -m tests.notebooks --write"
    shown = [kind for c in cells for o in c["outputs"] for kind in o.get("data", ())]
    assert {"image/svg+xml", "image/png"} & set(shown)
    assert not [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    assert len(text) < 100_000
    assert len({c["id"] for c in book["cells"]}) == len(book["cells"])
    assert "site-packages" not in text, "a path of the machine that ran it"
    assert book["cells"][0]["source"][0].startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks.notebooks(fast=True)[:2], ids=lambda p: p.stem)
def test_fast_ones_run(path: Path) -> None:
    assert notebooks.differences(path) == []


def test_a_cell_shows_what_jupyter_shows() -> None:
    def book(*sources: str) -> dict[str, object]:
        cells = [{"cell_type": "code", "source": [s]} for s in sources]
        return {"metadata": {}, "cells": [{"cell_type": "markdown", "source": ["# t"]}, *cells]}

    made = notebooks.run(book("x = 2\nprint('a')\nx + 1", "display(x)\nNone", "x;"))
    assert notebooks.kinds(made[0]) == ["stdout", ["text/plain"]]
    assert made[0][1]["data"]["text/plain"] == ["3"]
    assert notebooks.kinds(made[1]) == [["text/plain"]]
    assert made[2] == []
    with pytest.raises(ZeroDivisionError) as raised:
        notebooks.run(book("1 / 0"))
    assert "in cell 1" in raised.value.__notes__[0]
