"""docs/capabilities.md: every op and every test that it names exists."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import strata as st
import strata.ops
from strata.mir import REGISTRY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/capabilities.md").read_text("utf-8")


def rows(section: str) -> list[list[str]]:
    part = PAGE.split(f"## {section}")[1].split("## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) == sum(len(rows(s)) for s in re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert [(path, test) for path, test in named if test not in functions(path)] == []


def test_every_op_exists() -> None:
    names = [name for _, here, _ in rows("Ops") for name in re.findall(r"`(\w+)`", here)]
    assert len(names) > 90
    assert [name for name in names if name not in REGISTRY and not hasattr(strata.ops, name)] == []


CACHES = (st.CompileCache, st.BucketedCompileCache, st.DynamicDimCompileCache, st.ModelCompilePipeline, st.AotCache)


def test_every_option_and_every_name_of_the_caches_is_listed() -> None:
    listed = set(re.findall(r"`(\w+)`", PAGE))
    assert [f.name for f in fields(st.CompileOptions) if f.name not in listed] == []
    for cache_class in CACHES:
        names = [name for name in vars(cache_class) if not name.startswith("_")]
        assert [name for name in names if name not in listed] == [], cache_class


def test_nothing_is_shown_in_part() -> None:
    assert "partly" not in PAGE
