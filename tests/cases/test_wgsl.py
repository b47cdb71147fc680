"""Kernels and the shaders they become, compared whole. No GPU is needed for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.backends.wgsl.phases import phases_of
from strata.backends.wgsl.render import render
from strata.kernel import parse_kernel
from strata.testing import Case, find_cases

CASES = find_cases(Path(__file__).parent / "wgsl", "*.txt")


def shaders(case: Case) -> str:
    return "\n".join(render(kernel).text for kernel in phases_of(parse_kernel(case.program)).kernels)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_shader(path: Path, golden: Callable[[Path, Callable[[Case], str]], None]) -> None:
    golden(path, shaders)
