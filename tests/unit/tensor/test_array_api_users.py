"""scikit-learn and SciPy take tensors, in a process of their own: SciPy reads a switch of the environment once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="its estimators are what is called")


def test_estimators_and_functions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.array_api_users"], env={**os.environ, "SCIPY_ARRAY_API": "1"}, check=False,
        cwd=Path(__file__).parents[3], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
