"""Guides followed to the letter: their edits on a copy of the tree, few files each, and then what they say is so."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"
EDITED = runpy.run_path(str(ROOT / "docs/check.py"))["edited"]

OP = """
import numpy as np
import strata as st
from strata.ops.elementwise.numeric import SignedRoot
from strata.testing import check_op
from strata.testing.op_table import op_table

check_op(SignedRoot)
x = np.array([4, -9, 0], np.float32)
np.testing.assert_array_equal(st.signed_root(x).numpy(), [2, -3, 0])
np.testing.assert_array_equal(st.tensor(x).signed_root().numpy(), [2, -3, 0])
assert "| `signed_root` |" in op_table()
"""
PASS = """
import strata as st

g = st.Graph("f")
g.outputs((-g.input("x", (8,))).abs() * 2.0)
result = st.CompilePipeline("cpu").compile(g)
assert "unwind" in [p.name for p in result.fusion.passes]
assert [s.label for s in result.lir.schedule] == ["abs + multiply"]
"""
ONNX = """
from strata.io.onnx.handlers import register
from strata.io.onnx.registry import lookup

register()
assert lookup("org.example", "ComplexMul", 1).__module__ == "strata.io.onnx.handlers.fourier"
"""
FAMILY = """
from strata.models.decoders import decoder_family

assert decoder_family("minicpm").graph.__module__ == "strata.models.decoders.minicpm"
"""
CASES = {  # what must hold afterwards, the most files that may be touched, and those that `make golden` writes
    "add-an-op.md": (OP, 2, ["docs/ops.md"]),
    "add-a-pass.md": (PASS, 3, []),
    "add-an-onnx-operator.md": (ONNX, 2, []),
    "add-a-model-family.md": (FAMILY, 2, []),
}
GENERATED = {  # tests of all ops, rules and imports, which find what was added
    "ops/test_generated.py": "signed_root",
    "rules/test_rules.py": "unwind",
    "api/test_layers.py": "every_import or passes",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all of these guides were followed."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("strata", "docs/guides"):
        shutil.copytree(ROOT / folder, copy / folder)  # with compiled files, which keep their times
    tests = [f"tests/{name}" for name in ("conftest.py", "few.py", "groups.py", "source.py", *GENERATED)]
    for name in ("docs/check.py", "pyproject.toml", *tests):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    run(copy, "docs/check.py", "--follow", *(f"docs/guides/{guide}" for guide in CASES))
    return copy


def run(folder: Path, *arguments: str) -> None:
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("guide", CASES)
def test_a_newcomer_touches_few_files(guide: str) -> None:
    _, most, written = CASES[guide]
    assert 1 <= len({*EDITED(GUIDES / guide), *written}) <= most


@pytest.mark.parametrize("guide", CASES)
def test_what_was_added_works(guide: str, tree: Path) -> None:
    run(tree, "docs/check.py", "--followed", f"docs/guides/{guide}")
    run(tree, "-c", CASES[guide][0])


@pytest.mark.parametrize("test", GENERATED)
def test_what_was_added_is_tested_by_generation(test: str, tree: Path) -> None:
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{test}", "-k", GENERATED[test])


def test_reasons_of_the_fusion_guide_are_those_of_the_planner() -> None:
    source = (ROOT / "strata/lir/fusion.py").read_text("utf-8")
    reasons = re.findall(r"^\| ([^|]+) \|", (GUIDES / "fusion.md").read_text("utf-8"), re.MULTILINE)[1:]
    parts = [part.strip() for reason in reasons for part in reason.split("…") if part.strip()]
    assert len(parts) > 10
    assert [part for part in parts if part not in source] == []
