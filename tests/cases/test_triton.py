"""Golden cases of the Triton renderer: the text of kernels, compared whole. Neither Triton nor a GPU is needed."""

import ast
from pathlib import Path

import pytest

from strata.backends.triton.codegen.render import render
from strata.kernel import parse_kernel, verify_kernel
from strata.testing import find_cases, read_case

CASES = find_cases(Path(__file__).parent / "triton", "*.txt")


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
def test_becomes(path: Path, golden) -> None:
    golden(path, lambda case: str(render(parse_kernel(case.program))))


@pytest.mark.parametrize("path", CASES, ids=[p.stem for p in CASES])
@pytest.mark.parametrize("interpreted", [False, True])
def test_is_python_that_defines_its_function(path: Path, interpreted: bool) -> None:
    kernel = parse_kernel(read_case(path).program)
    verify_kernel(kernel)
    for program in render(kernel).programs:
        tree = ast.parse(program.text(interpreted=interpreted))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert program.name in defined
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        builtin = {"range", "float"} | ({"int", "hasattr"} if interpreted else set())
        assert called <= defined | builtin
