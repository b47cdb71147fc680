"""Kernels and the shaders they become, compared whole. No GPU is needed for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.backends.wgsl.backend import shader_text
from strata.kernel import parse_kernel
from strata.testing import GoldenCase, find_cases

CASES = find_cases(Path(__file__).parent / "wgsl", "*.txt")


def shaders(case: GoldenCase) -> str:
    return shader_text(parse_kernel(case.program), halves="f16" in case.header.get("with", ""))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_shader(path: Path, golden: Callable[[Path, Callable[[GoldenCase], str]], None]) -> None:
    golden(path, shaders)
