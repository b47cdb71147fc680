"""Packages whose names are loaded when they are asked for."""

from __future__ import annotations

import builtins
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strata.ops
from strata.errors import UnknownNameError
from strata.mir import METHODS, REGISTRY
from strata.mir.registry import Registry
from strata.modules import LateTable
from strata.ops.families import FAMILIES

PACKAGE = {
    "__init__.py": """
        from strata.modules import deferred

        def beyond(name):
            if name == "more":
                return "made"
            raise AttributeError(f"no {name}")

        with deferred(globals(), lambda value: [value], beyond):
            import json
            from lazy_package.work import VALUE, work
            from lazy_package.inner import helper
    """,
    "work.py": "VALUE = 1\ndef work(): return 2\n",
    "inner/__init__.py": "",
    "inner/helper.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "lazy_package"
    (folder / "inner").mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).write_text(textwrap.dedent(text), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lazy_package  # type: ignore[import-not-found]

    yield lazy_package
    for name in [n for n in sys.modules if n.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_names_are_loaded_when_they_are_asked_for(package: Any) -> None:
    assert "lazy_package.work" not in sys.modules
    assert {"VALUE", "work", "helper", "json"} <= {*dir(package)}
    assert package.VALUE == [1]
    assert "lazy_package.work" in sys.modules
    assert package.work[0]() == 2, "a function hides the module of its name"
    assert package.helper[0] is sys.modules["lazy_package.inner.helper"]
    assert package.json.dumps({}) == "{}", "plain imports are run"
    assert package.more == "made"
    with pytest.raises(AttributeError, match="no other"):
        _ = package.other
    with pytest.raises(AttributeError, match="__wrapped__"):
        _ = package.__wrapped__


def test_imports_of_others_are_as_they_were(package: Any) -> None:
    assert builtins.__import__.__module__ == "builtins"
    from lazy_package import VALUE

    assert VALUE == [1]


def test_a_late_table_is_filled_when_something_is_missing() -> None:
    table: LateTable[int] = LateTable(lambda: table.update(a=1, b=2))
    table["c"] = 3
    assert table["c"] == 3
    assert dict.__len__(table) == 1
    assert table["a"] == 1
    assert table.get("z") is None
    assert sorted(table) == sorted(table.keys()) == ["a", "b", "c"]
    assert dict(table.items()) == {"a": 1, "b": 2, "c": 3}
    assert sorted(table.values()) == [1, 2, 3]
    assert "z" not in table
    with pytest.raises(KeyError):
        table["z"]


def test_a_source_that_another_thread_takes_away_is_asked_all_the_same() -> None:
    """It is there when it is looked for, and gone when it is asked."""
    asked: list[str] = []

    class Table(LateTable[int]):
        @property
        def source(self) -> Any:
            return self.left.pop()

        @source.setter
        def source(self, source: Any) -> None:
            self.left = [None, source]

    table = Table(lambda: asked.append("table"))
    assert table.filled() is table

    class Ops(Registry):
        @property
        def _load(self) -> Any:
            return self.left.pop()

        @_load.setter
        def _load(self, load: Any) -> None:
            self.left = [None, load]

    with pytest.raises(UnknownNameError):
        Ops(lambda name: asked.append(f"op {name}"))["none"]
    assert asked[:2] == ["table", "op none"]


def test_threads_that_ask_at_once_get_one_value(package: Any) -> None:
    """The second one asks while the first one's value is made."""
    block = vars(package)["__getattr__"].__self__
    found: list[Any] = []

    def guard(value: Any) -> list[Any]:
        if not found:
            found.append(None)
            found[0] = block.load("VALUE")
        return [value]

    block.guard = guard
    assert block.load("VALUE") is found[0] is package.VALUE


def test_families_have_the_ops_that_the_table_says() -> None:
    homes: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in REGISTRY:
        home = REGISTRY[name].__module__
        if home.startswith("strata.ops."):
            homes[home.removeprefix("strata.ops.")].append(name)
    assert {family: sorted(names) for family, names in FAMILIES.items()} == homes


def test_every_family_can_be_loaded_first() -> None:
    """None counts on another that happened to be loaded before."""
    program = """
import importlib, sys
from strata.ops.families import FAMILIES
for family in FAMILIES:
    importlib.import_module(f"strata.ops.{family}")
    for name in [n for n in sys.modules if n == "strata" or n.startswith("strata.")]:
        del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_functions_hide_modules_of_their_name() -> None:
    assert all(callable(getattr(strata.ops, name)) for name in METHODS)
    assert {*METHODS} <= {*dir(strata.ops)}
