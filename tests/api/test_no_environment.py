"""Habits that a reader of the package may rely on: one reader of the environment, no pickle, no grab-bag modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import strata
from tests.source import nodes_of

PACKAGE = Path(strata.__file__).parent
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
GRAB_BAGS = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def environment_reads(source: str) -> list[int]:
    """Lines that touch the process environment."""
    found: list[int] = []
    for node in nodes_of(source, ENVIRONMENT):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
                found.append(node.lineno)
            case ast.ImportFrom(module="os", names=names) if ENVIRONMENT & {a.name for a in names}:
                found.append(node.lineno)
            case _:
                pass
    return found


def unsafe_loads(source: str) -> list[int]:
    """Lines that could run code found in a file: pickle and its relatives."""
    found: list[int] = []
    for node in nodes_of(source, {*UNSAFE, "allow_pickle"}):
        match node:
            case ast.Import(names=names) if UNSAFE & {a.name.split(".")[0] for a in names}:
                found.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNSAFE:
                found.append(node.lineno)
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg="allow_pickle"):
                found.append(node.value.lineno)
            case _:
                pass
    return found


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_only_config_reads_the_environment() -> None:
    allowed = PACKAGE / "config.py"
    found = [f"{p}:{n}" for p in sources() if p != allowed for n in environment_reads(p.read_text("utf-8"))]
    assert not found, found
    assert environment_reads(allowed.read_text("utf-8"))  # the check sees the reader that there is


def test_nothing_loads_pickle() -> None:
    found = [f"{p}:{n}" for p in sources() for n in unsafe_loads(p.read_text("utf-8"))]
    assert not found, found


def test_modules_are_named_after_their_subject() -> None:
    assert [p for p in sources() if p.name in GRAB_BAGS] == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['X']", "os.getenv('X')", "from os import environ as e", "os.putenv('a', 'b')"]
)
def test_environment_check_sees(source: str) -> None:
    assert environment_reads(source)


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "import marshal", "np.load(f, allow_pickle=True)"]
)
def test_pickle_check_sees(source: str) -> None:
    assert unsafe_loads(source)
