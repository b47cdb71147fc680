"""The documentation holds together: links resolve, code prints what pages show, every public name has its words."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import strata
from strata import errors
from strata.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
DOCS = runpy.run_path(str(ROOT / "docs/check.py"))
PAGES: list[Path] = DOCS["pages"]()
RUNNABLE = [p for p in DOCS["runnable_pages"]() if p.name not in ("README.md", "quickstart.md")]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    assert DOCS["broken_links"](page) == []


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_code_prints_what_the_page_shows(page: Path) -> None:
    # a process of its own: pages register ops, passes and devices
    command = [sys.executable, str(ROOT / "docs/check.py"), "--compare", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_from_scratch_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/from_scratch.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "agrees with NumPy" in done.stdout


def test_every_error_class_is_documented() -> None:
    page = (ROOT / "docs/errors/index.md").read_text("utf-8")
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.StrataError)]
    assert [name for name in classes if f"`{name}`" not in page] == []


def test_every_public_name_has_a_docstring() -> None:
    assert DOCS["undocumented"]() == []


def test_every_public_name_is_on_the_page_of_names() -> None:
    page = (ROOT / "docs/api.md").read_text("utf-8")
    missing = [n for n in strata._TABLE if f"`{n}`" not in page and f"`{n}(" not in page]
    missing += [n for n in strata._MODULES if f"`strata.{n}`" not in page]
    assert missing == [], "run make docs"


def test_the_site_has_every_page() -> None:
    assert (ROOT / "mkdocs.yml").read_text("utf-8") == DOCS["site_config"](), "run make docs"


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/cli.md").read_text("utf-8")
    (commands,) = [a.choices for a in make_parser()._actions if a.dest == "command"]
    assert commands is not None
    assert [name for name in commands if f"strata {name}" not in page.replace("strata\n", "strata ")] == []


def test_the_benchmark_page_is_generated() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert "Written by `make bench`" in page
    assert page.index("## Losses") < page.index("## Wins")
