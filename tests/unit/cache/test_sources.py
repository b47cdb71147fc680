"""Versions of the package's code: they follow what files hold, and are read from the store while nothing changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.cache import default_store, last_change, sources, version_of
from strata.config import using


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two folders, and a store of its own."""
    root = tmp_path / "package"
    for name in ("core/a.py", "core/inner/b.py", "io/c.py", "io/__pycache__/d.py", "top.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    _date(root, time.time() - 1000)
    monkeypatch.setattr(sources, "PACKAGE", str(root))
    sources._sources.cache_clear()
    with using(cache_dir=tmp_path / "cache"):
        yield root
    sources._sources.cache_clear()


def _date(root: Path, when: float) -> None:
    for path in root.rglob("*.py"):
        os.utime(path, (when, when))


def _versions() -> tuple[str, str]:
    sources._sources.cache_clear()
    return version_of("core"), version_of("io")


def test_a_change_changes_the_folders_version(package: Path) -> None:
    core, io = _versions()
    assert core != io
    (package / "core/inner/b.py").write_text("# other\n")
    _date(package, time.time() - 900)
    changed, same = _versions()
    assert changed != core
    assert same == io
    (package / "core/inner/b.py").rename(package / "core/inner/e.py")
    assert _versions()[0] != changed


def test_files_are_not_read_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _versions()
    monkeypatch.setattr(Path, "read_bytes", _refuse_sources(Path.read_bytes))
    assert _versions() == before
    assert last_change() == pytest.approx(time.time() - 1000, abs=100)


def _refuse_sources(read):
    def refuse(path: Path) -> bytes:
        assert path.suffix != ".py"
        return bytes(read(path))

    return refuse


def test_what_changed_a_moment_ago_is_not_trusted(package: Path) -> None:
    _date(package, time.time())
    before = _versions()
    assert not list(default_store().entries())
    (package / "io/c.py").write_text("# io/d.py\n")  # of the same size
    _date(package, time.time())
    assert _versions() != before


def test_files_that_all_claim_one_time(package: Path) -> None:
    """As images and packages have them that are built to be equal in every bit."""
    _date(package, 315532800)
    before = _versions()
    time.sleep(0.02)  # clocks of file systems tick
    (package / "io/c.py").write_text("# io/d.py\n")  # of the same size
    _date(package, 315532800)
    after = _versions()
    assert after[0] == before[0]
    assert after[1] != before[1]
