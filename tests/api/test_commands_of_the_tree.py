"""Commands of the source tree name files that are there: pytest runs nothing at all where one of many is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["check", "test", "golden", "fuzz", "torture", "docs", "site"])
def test_files_of_a_target_are_there(target: str) -> None:
    told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = re.findall(r"(?<![\w./-])(?:tests|docs|benchmarks)/[\w./-]+", told)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_modules_that_contributors_are_told_to_run_are_there() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text("utf-8") + (ROOT / "Makefile").read_text("utf-8")
    modules = set(re.findall(r"-m ((?:tests|benchmarks)(?:\.\w+)*)", told))
    assert len(modules) > 8
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    assert [n for n, p in places.items() if not (p.with_suffix(".py").exists() or (p / "__main__.py").exists())] == []
