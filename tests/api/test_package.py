"""The wheel: what is in it, how large it is, and that it runs from where it was installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import strata
from strata.cli.demo.menu import EXAMPLES
from strata.cli.shell.manual import page

ROOT = Path(__file__).parents[2]
LIMIT = 7_500_000  # bytes of files, nearly all of them Python, 95 % of it code; their bytecode is about twice as large


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer")
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "strata",
        "docs",
        "examples",
    ):  # so that no build folder is left behind here
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_is_small_and_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = {e.filename: e.file_size for e in archive.infolist()}
    assert sum(entries.values()) < LIMIT
    present = {p.relative_to(ROOT).as_posix() for p in (ROOT / "strata").rglob("*.py")}
    assert present <= set(entries)
    assert {"strata/py.typed", "strata/cli/demo/receipt.png"} <= set(entries)
    assert not [name for name in entries if name.startswith(("tests", "benchmarks", "docs", "examples"))]
    data = {name.partition(".data/data/")[2] for name in entries}
    assert {
        "share/man/man1/strata.1",
        *(f"share/strata/errors/{p.name}" for p in (ROOT / "docs/errors").glob("*.md") if p.name != "index.md"),
        *(f"share/strata/examples/{name}.py" for name in EXAMPLES),
    } <= data


@pytest.mark.slow
def test_the_wheel_runs_from_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import strata, sys; from strata.cli import main; print(strata.__file__); sys.exit(main(['demo', 'read']))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "STRATA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "left out" in done.stdout or "STRATA COFFEE HOUSE" in done.stdout


def test_one_version() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited is not None
    assert told == strata.__version__ == cited[1].strip('"')


def test_the_manual_page_is_that_of_the_parser() -> None:
    assert (ROOT / "docs/strata.1").read_text("utf-8") == page(), "run make docs"
