"""README and quickstart do as they say: every Python block runs as printed and prints what the page shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = runpy.run_path(str(ROOT / "docs/check.py"))


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_blocks_run_as_printed(name: str) -> None:
    assert DOCS["differences"](ROOT / name) == []


def test_readme_opens_with_a_program_and_its_output() -> None:
    first = DOCS["blocks"](ROOT / "README.md")[0]
    assert first.expected is not None


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\n", "a\n", True),
        ("a ...\n", "a 1.5 ms\n", True),
        ("a\n", "b\n", False),
        ("a\n", "a\nb\n", False),
        ("...\n", "a\nb\n", False),
    ],
)
def test_outputs_are_compared_line_by_line(expected: str, printed: str, same: bool) -> None:
    assert DOCS["agrees"](expected, printed) is same


def test_quickstart_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "matmul + add + gelu" in printed
